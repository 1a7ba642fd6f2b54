"""Compare the conditional product with loops and layers on its path with the dense reference, in Triton's interpreter; print errors as JSON.

Errors are the largest difference over the largest magnitude of what is expected in float32.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor

from arclight.text.model import conditional_product as products
from arclight.text.model.conditional_product import TokenOrder, conditional_product
from arclight.text.model.expert_paths import set_path
from arclight.text.model.moe import MoE, MoEConfig
from arclight.text.model.switch_head import HeadOutputs, HeadValues, SwitchHeadConfig

SHAPES: dict[str, tuple[list[int], int, int]] = {
    "an expert without a row": ([3, 0, 5], 24, 40),
    "no rows": ([0, 0], 8, 8),
    "one expert": ([7], 33, 17),
    "uneven, over tiles": ([0, 35, 1, 17], 70, 130),
}
CASES = [
    ("an expert without a row", "float32", False), ("one expert", "float32", True), ("uneven, over tiles", "bfloat16", True),
    ("no rows", "bfloat16", True), ("one expert", "float16", False),
]  # fmt: skip
"""Shape, type, and whether products in 8 bits are compared too."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    if not expected.numel():
        return 0.0
    expected = expected.detach().float()
    return float((found.detach().float() - expected).abs().max() / expected.abs().max().clamp(min=1e-9))


def loop(x: Tensor, w: Tensor, counts: list[int]) -> Tensor:
    return torch.cat([part @ matrix.T for part, matrix in zip(x.split(counts), w, strict=True)])


def errors(counts: list[int], inner: int, columns: int, dtype: torch.dtype, small: bool) -> dict[str, float]:
    x, w = torch.randn(sum(counts), inner).to(dtype), torch.randn(len(counts), columns, inner).to(dtype)
    grad, ends = torch.randn(sum(counts), columns).to(dtype), torch.tensor(counts).cumsum(0).int()
    ours, wide = ([one.to(kind).requires_grad_() for one in (x, w)] for kind in (dtype, torch.float32))
    found, expected = conditional_product(*ours, ends), loop(*wide, counts)
    grads = torch.autograd.grad(found, ours, grad)
    wanted = torch.autograd.grad(expected, wide, grad.float())
    out = {"product": error(found, expected)} | {
        name: error(*pair) for name, *pair in zip(("rows", "weights"), grads, wanted, strict=True)
    }
    for precision in ("e4m3", "int8") if small else ():
        rounded = conditional_product(*ours, ends, None, precision)  # type: ignore[arg-type]
        straight = torch.autograd.grad(rounded, ours, grad)
        out[precision] = error(rounded, expected)
        out[f"{precision}, gradient"] = max(
            error(*pair) for pair in zip(straight, [g.float() for g in grads], strict=True)
        )
    return out


def layer_errors(layer: Any, inputs: list[Tensor]) -> float:
    """Return the largest error of the output and of all gradients beside the dense path in float32."""
    found = []
    for path, dtype in (("triton", inputs[0].dtype), ("dense", torch.float32)):
        layer.to(dtype)
        set_path(layer, path)  # type: ignore[arg-type]
        given = [x.detach().to(dtype).requires_grad_() for x in inputs]
        out = layer(*given)
        stacks = [weight for name, weight in layer.named_parameters() if "router" not in name]
        found.append([out, *torch.autograd.grad(out.float().square().mean(), [*given, *stacks])])
    return max(error(*pair) for pair in zip(*found, strict=True))


def moe(dtype: torch.dtype, **settings: Any) -> MoE:
    torch.manual_seed(0)
    return MoE(MoEConfig(**{"experts": 4, "top_k": 2, "hidden": 24} | settings), 16, 0.3, 0.3).to(dtype)


def tokens(dtype: torch.dtype, width: int = 16) -> Tensor:
    return torch.randn(2, 9, width, generator=torch.Generator().manual_seed(1)).to(dtype)


def layers(dtype: torch.dtype) -> dict[str, float]:
    x, choice = tokens(dtype), SwitchHeadConfig(experts=3, entropy_loss=0.0)
    before = moe(dtype, activation="relu", score="sigmoid", score_before=True, top_k=1)
    outputs = HeadOutputs(choice, 2, 16, 6, (0.3, 0.3)).to(dtype)
    return {
        "swiglu": layer_errors(moe(dtype), [x]),
        "relu, weights before": layer_errors(before, [x]),
        "values": layer_errors(HeadValues(choice, 2, 16, 6, 0.3).to(dtype), [x]),
        "outputs": layer_errors(outputs, [tokens(dtype, 12), x]),
    }


def gathered() -> bool:
    """Return whether a product that gathers has the bits of one whose rows were repeated before."""
    x, w, ends = torch.randn(5, 16), torch.randn(3, 8, 16), torch.tensor([4, 4, 10], dtype=torch.int32)
    order = torch.randperm(10)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(10)).view(5, 2)
    found = conditional_product(x, w, ends, TokenOrder(order // 2, places))
    return torch.equal(found, conditional_product(x[order // 2], w, ends))


def refused(call: Any) -> str:
    try:
        call()
    except (RuntimeError, TypeError) as reason:
        return f"{type(reason).__name__}: {reason}"
    return ""


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    MoE(MoEConfig(experts=4, top_k=2, hidden=8), 8, 0.3, 0.3)(torch.randn(1, 3, 8)).sum().backward()
    report: dict[str, Any] = {"imported before": "arclight.text.model.triton_kernels" in sys.modules}
    report["products"] = {
        f"{shape}, {name}": errors(*SHAPES[shape], DTYPES[name], small) for shape, name, small in CASES
    }
    report["layers"] = {
        "float32": layers(torch.float32),
        "bfloat16": {"swiglu": layer_errors(moe(torch.bfloat16), [tokens(torch.bfloat16)])},
    }
    report["gathered"] = gathered()
    x, w, ends = torch.randn(2, 4), torch.randn(1, 4, 4), torch.tensor([2], dtype=torch.int32)
    report["float64"] = refused(lambda: conditional_product(x.double(), w.double(), ends))
    products._kernels().INTERPRETED = False  # type: ignore[attr-defined]
    report["cpu"] = refused(lambda: conditional_product(x, w, ends))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
