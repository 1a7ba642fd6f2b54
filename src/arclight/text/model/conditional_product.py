"""Multiply rows by their experts' matrices in a Triton kernel with backward, also in 8 bits.

It is the ``triton`` path of experts, beside torch's grouped product. `moe` and `switch_head` call `conditional_product`, `expert_paths` asks
`refusal` whether it can run. Each product is one opaque operator, which compilers, FLOP counters and
`parallel.model.activation_checkpoint` know by its name ``arclight::conditional_product``: that stays. Triton is imported at the first product.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

if TYPE_CHECKING:
    from types import ModuleType

Precision = Literal["full", "e4m3", "int8"]
LARGEST: dict[str, float] = {"e4m3": 448.0, "int8": 127.0}
"""Largest number of each 8-bit type; a row is scaled so that its largest element becomes that."""
TYPES = (torch.bfloat16, torch.float16, torch.float32)


class TokenOrder(NamedTuple):
    """The token of each row, by which a product gathers its rows as it reads them."""

    source: Tensor
    """Token of each row (R,), in the order of experts."""
    places: Tensor
    """Index of each token's rows (N, K)."""


def conditional_product(
    x: Tensor, w_EOI: Tensor, ends: Tensor, order: TokenOrder | None = None, precision: Precision = "full"
) -> Tensor:  # fmt: skip
    """Multiply rows, sorted by expert, by each one's matrix: (R, O) in the type of ``x``.

    Sums are float32 (int32 with ``int8``).
    x: rows (R, I), or with ``order`` tokens (N, I). w_EOI: (E, O, I). ends: (E,) int32 ends of each expert's rows, the last one R.
    precision: with ``e4m3`` and ``int8`` each row of ``x`` and of a matrix is divided by a scale of its own and rounded to 8 bits.
    Their gradient is straight-through: that of the product without rounding.

    Raises TypeError for types other than bfloat16, float16 and float32, and RuntimeError if no kernel runs: see `refusal`.
    """
    if (reason := refusal(x.device, precision)) is not None:
        raise RuntimeError(reason)
    if x.dtype not in TYPES or w_EOI.dtype != x.dtype:
        raise TypeError(
            f"the Triton product takes bfloat16, float16 or float32 on both sides, not {x.dtype} and {w_EOI.dtype}: convert them, or set path = "
            '"grouped"'
        )
    product: Tensor = _product(x, w_EOI, ends, *(order or (None, None)), precision)
    return product


def refusal(device: torch.device, precision: Precision = "full") -> str | None:
    """Return the reason why the Triton product cannot run on ``device``, with a fix; or None.

    On a CPU it runs in Triton's interpreter only, and without Triton this raises MissingExtraError; on a GPU the first product does.
    """
    if device.type == "meta":
        return None
    if device.type == "cpu" and not _kernels().INTERPRETED:
        return (
            'path = "triton" needs a GPU, and this is a cpu: set path = "auto" or "grouped", or (to test kernels) the environment variable '
            "TRITON_INTERPRET=1 before Python starts"
        )
    if (
        precision == "e4m3"
        and device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) < (8, 9)
    ):
        return f'precision = "e4m3" needs a GPU of compute capability 8.9 or more, not {torch.cuda.get_device_name(device)}: set "int8" or "full"'
    return None


def _kernels() -> ModuleType:
    from arclight.fabric.extras import require

    require("triton", extra="triton")
    from arclight.text.model import triton_kernels

    return triton_kernels


def quantized(x: Tensor, precision: Precision) -> tuple[Tensor, Tensor]:
    """Quantize ``x`` (..., I) to 8 bits; return it and the scale (...) of each row, float32.

    Values times scale are near ``x``.
    """
    wide = x.float()
    scale = wide.abs().amax(-1).clamp(min=1e-30) / LARGEST[precision]
    wide = wide / scale[..., None]
    return (wide.round().to(torch.int8) if precision == "int8" else wide.to(torch.float8_e4m3fn)), scale


@torch.library.custom_op("arclight::conditional_product", mutates_args=())
def _product(
    x: Tensor, w_EOI: Tensor, ends: Tensor, source_R: Tensor | None, places_NK: Tensor | None, precision: str
) -> Tensor:
    scales, dtype = None, x.dtype
    if precision != "full":
        (x, scale_x), (w_EOI, scale_w) = (quantized(side, precision) for side in (x, w_EOI))  # type: ignore[arg-type]
        scales = (scale_x, scale_w)
    product: Tensor = _kernels().multiply(x, w_EOI, ends, source_R, scales, dtype)
    return product


@_product.register_fake
def _(x: Tensor, w_EOI: Tensor, ends: Tensor, source_R: Tensor | None, places_NK: Tensor | None, precision: str) -> Tensor:  # fmt: skip
    return x.new_empty(len(x) if source_R is None else len(source_R), w_EOI.shape[1])


@torch.library.custom_op("arclight::conditional_weight_gradient", mutates_args=())
def _weight_gradient(grad_RO: Tensor, x: Tensor, ends: Tensor, source_R: Tensor | None) -> Tensor:
    gradient: Tensor = _kernels().weight_gradient(grad_RO, x, ends, source_R)
    return gradient


@_weight_gradient.register_fake
def _(grad_RO: Tensor, x: Tensor, ends: Tensor, source_R: Tensor | None) -> Tensor:
    return x.new_empty(len(ends), grad_RO.shape[1], x.shape[1])


def _save_operands(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])


def _backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, ...]:
    x, w_EOI, ends, source_R, places_NK = ctx.saved_tensors
    d_x = d_w = None
    if ctx.needs_input_grad[0]:
        d_x = _product(grad_RO, w_EOI.transpose(1, 2), ends, None, None, "full")
        if places_NK is not None:  # gathered and summed, never scattered
            d_x = d_x[places_NK].sum(1, dtype=torch.float32).to(x.dtype)
    if ctx.needs_input_grad[1]:
        d_w = _weight_gradient(grad_RO, x, ends, source_R)
    return d_x, d_w, None, None, None, None


_product.register_autograd(_backward, setup_context=_save_operands)


@register_flop_formula([torch.ops.arclight.conditional_product, torch.ops.arclight.conditional_weight_gradient])
def _flops(left: Any, right: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Count two operations for each row, output and input.

    Shapes are as both operators take and give them.
    """
    if len(out_shape) == 3:  # a gradient of weights, of as many rows as the gradient of the product has
        return int(2 * left[0] * out_shape[1] * out_shape[2])
    return int(2 * out_shape[0] * out_shape[1] * right[-1])
