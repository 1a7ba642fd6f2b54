"""A layer of experts: what routing and grouped products reach of what the device reaches in one large product.

The layer has the shape of DeepSeek-V3's 16B model (2048 wide, 64 experts of 1408, 6 chosen, 2 shared) and bfloat16 on a CUDA GPU;
a quarter of the widths, float32 and one thread on a CPU. Loads are forced to be equal, so that figures do not depend on a router's
state; one row has a fresh router. Forward and backward; the contenders take turns in random order, figures are medians of ratios
within a turn. On a CPU a turn is a single step; on a GPU it is ten, since its queue must not run empty.

With a GPU and Triton also layers on the Triton path beside grouped ones, as the gate has it: 8 and 64 experts, top-2, widths of 1 and 2 k;
the figure is the least of their ratios, each compared with float32 before.

Then what `benchmarks.rate_transfer` measures of muP, CompleteP and ADOPT, `benchmarks.expert_models` of models with experts, and
`benchmarks.remote_stall` of a corpus at an address, on the CPU with one thread.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import importlib.util
import itertools
import math
import random
import statistics
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arclight.fabric.memory import keep_freed_memory
from arclight.text.families.zoo import model_config
from arclight.text.language_model import matmul_rate
from arclight.text.model.decoder import active_parameters
from arclight.text.model.layers import FeedForward
from arclight.text.model.moe import MoE, MoEConfig, Path
from arclight.trainer.throughput import get_available_flops
from benchmarks import expert_models, rate_transfer, remote_stall
from benchmarks.results import SPREAD, Ratio, paired, parser, publish, versions


class Loop(MoE):
    """The same layer, one expert after the other: its tokens are picked, multiplied and added up."""

    def routed(self, x_BTD: Tensor) -> Tensor:
        weights_NK, chosen_NK, _ = self.router(x_BTD)
        x_ND = x_BTD.flatten(0, 1)
        out_ND = torch.zeros_like(x_ND)
        for expert, (w1, w2, w3) in enumerate(zip(self.experts.w1, self.experts.w2, self.experts.w3, strict=True)):
            token, place = torch.where(chosen_NK == expert)
            x = x_ND[token]
            y = (F.silu(x @ w1.T) * (x @ w3.T)) @ w2.T
            out_ND.index_add_(0, token, (y * weights_NK[token, place, None]).to(y.dtype))
        return out_ND.view_as(x_BTD)


class Alone(nn.Module):
    """The experts of a layer on rows that lie in order already."""

    def __init__(self, moe: MoE) -> None:
        super().__init__()
        self.experts, config = moe.experts, moe.config
        self.shared, self.top_k, self.count = moe.shared, config.top_k, config.experts

    def forward(self, x_BTD: Tensor) -> Tensor:
        rows_RD = x_BTD.flatten(0, 1).repeat(self.top_k, 1)
        counts_E = torch.full((self.count,), len(rows_RD) // self.count, device=rows_RD.device)
        y_RD = self.experts(rows_RD, counts_E)
        return y_RD if self.shared is None else y_RD.view(self.top_k, *x_BTD.shape).sum(0) + self.shared(x_BTD)


def seconds(module: nn.Module, x: Tensor, upstream: Tensor, repeats: int) -> float:
    started = now(x.device)
    for _ in range(repeats):
        module(x).backward(upstream)
        x.grad = None
        module.zero_grad()
    return (now(x.device) - started) / repeats


def now(device: torch.device) -> float:
    """Seconds: of this process on a CPU, whatever else the machine does; by the clock with a GPU, when it has done its work."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def large_product(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of the fastest of several large products."""
    if device.type == "cuda":
        return matmul_rate(device, dtype)
    a, best = torch.ones(1024, 1024, dtype=dtype), float("inf")
    for _ in range(6):
        started = now(device)
        a @ a
        best = min(best, now(device) - started)
    return 2 * 1024**3 / best


def contenders(config: MoEConfig, width: int, device: torch.device, dtype: torch.dtype) -> dict[str, nn.Module]:
    def layer(kind: type[MoE], config: MoEConfig) -> MoE:
        torch.manual_seed(0)
        return kind(config, width, 0.02, 0.02).to(device, dtype)

    forced = dataclasses.replace(config, force_balance=True)
    found: dict[str, nn.Module] = {
        "grouped": layer(MoE, forced),
        "grouped, a fresh router's loads": layer(MoE, config),
        "one expert after the other": layer(Loop, forced),
        "experts alone, rows in order": Alone(layer(MoE, forced)),
        "dense, as many multiplications": FeedForward(width, (config.top_k + config.shared) * config.hidden, 0.02, 0.02).to(device, dtype),
    }  # fmt: skip
    if device.type == "cuda":
        compiled = layer(MoE, forced)
        compiled.compile()
        found["grouped, compiled"] = compiled
    return found


def triton_over_grouped(device: torch.device, rounds: int, tokens: int = 8192) -> tuple[Ratio, list[str]]:
    """Return how often the Triton path runs while the grouped one runs once, the least over shapes, and a line for each shape.

    Raises AssertionError for a layer that is further than 1e-2 of the largest value from the dense path in float32.
    """
    ratios = {}
    for experts, width in itertools.product((8, 64), (1024, 2048)):
        config = MoEConfig(experts=experts, top_k=2, hidden=width, force_balance=True)
        torch.manual_seed(0)
        layer = MoE(config, width, 0.02, 0.02).to(device, torch.bfloat16)
        x = torch.randn(1, tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
        times: dict[Path, list[float]] = {"grouped": [], "triton": []}
        layer.experts.path = "triton"
        exact = copy.deepcopy(layer).float().dense(x[:, :256].float())
        assert (layer(x[:, :256]).float() - exact).abs().max() <= 1e-2 * exact.abs().max()
        for turn in range(rounds + 2):
            for path in random.sample(list(times), len(times)):
                layer.experts.path = path
                taken = seconds(layer, x, torch.ones_like(x), 10)
                times[path] += [taken] if turn >= 2 else []
        ratios[f"{experts} experts, width {width}"] = paired(times["grouped"], times["triton"])
    lines = [f"* Triton over grouped, {name}, top-2, {tokens} tokens: {ratio}" for name, ratio in ratios.items()]
    return min(ratios.values(), key=lambda ratio: ratio.value), lines


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    published = model_config("deepseek-v3-16b")
    config, width, tokens, dtype = published.moe, published.dim, 16384, torch.bfloat16
    if device.type == "cpu":
        torch.set_num_threads(1)
        keep_freed_memory()  # as a trainer does
        config, width, tokens, dtype = (
            dataclasses.replace(config, hidden=config.hidden // 4),
            width // 4,
            1024,
            torch.float32,
        )
    if options.quick:
        config, width, tokens = dataclasses.replace(config, hidden=64), 128, 256
    config = dataclasses.replace(config, balance_loss=0.0)
    runs = contenders(config, width, device, dtype)
    x = torch.randn(1, tokens, width, device=device, dtype=dtype, requires_grad=True)
    upstream = torch.randn_like(x)
    rounds, repeats = 6 if options.quick else 40, 10 if device.type == "cuda" else 1
    for module in runs.values():
        seconds(module, x, torch.randn_like(module(x)), 2)
    bounds = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 3e-3}
    torch.testing.assert_close(runs["one expert after the other"](x), runs["grouped"](x), **bounds)
    times: dict[str, list[float]] = {name: [] for name in runs}
    reached = []
    for _ in range(rounds):
        for name in random.sample(list(runs), len(runs)):
            times[name].append(seconds(runs[name], x, upstream, repeats))
        reached.append(large_product(device, dtype))
    report(options, runs, times, reached, tokens, device, dtype)


def report(
    options: argparse.Namespace, runs: dict[str, nn.Module], times: dict[str, list[float]], reached: list[float], tokens: int,
    device: torch.device, dtype: torch.dtype,
) -> None:  # fmt: skip
    nominal = get_available_flops(device, dtype) if device.type == "cuda" else None
    operations = 6 * active_parameters(runs["grouped"]) * tokens

    def share(name: str, of: list[float]) -> Ratio:
        return paired([operations / one for one in times[name]], of, same=None)

    rows = []
    for name in runs:
        middle = statistics.median(times[name])
        over = paired(times[name], times["grouped"])
        rows.append(
            (
                name, f"{middle * 1e3:.2f}", f"{operations / middle / 1e9:.0f}", f"{share(name, reached).value:.1%}",
                f"{operations / middle / nominal:.1%}" if nominal else "-",
                *(("1", "") if name == "grouped" else (str(over), over.difference)),
            )
        )  # fmt: skip
    best = min(("grouped", "grouped, compiled"), key=lambda name: statistics.median(times.get(name, [math.inf])))
    figures: dict[str, float | Ratio] = {
        "loop_over_grouped": paired(times["one expert after the other"], times["grouped"]),
        "experts_alone_over_grouped": paired(times["experts alone, rows in order"], times["grouped"]),
        "grouped_over_dense_tokens": paired(times["dense, as many multiplications"], times["grouped"]),
        "fresh_router_over_grouped": paired(times["grouped, a fresh router's loads"], times["grouped"]),
        "layer_over_large_product": share(best, reached),
    }
    if nominal:
        figures["layer_mfu"] = share(best, [nominal] * len(reached))
    on_triton: list[str] = []
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        figures["triton_over_grouped"], on_triton = triton_over_grouped(device, 6 if options.quick else 40)
    torch.set_num_threads(1)
    transfer, losses = rate_transfer.measure(options.quick)
    models, of_models = expert_models.measure(options.quick)
    remote, of_remote = remote_stall.measure(options.quick)
    publish(
        "moe", "What a layer of experts reaches, and which rates transfer",
        ("", "ms forward and backward", "GFLOP/s", "of a large product", "of the data sheet", f"time over grouped: {SPREAD}", "difference"),
        rows, figures | transfer | models | remote, options=options, packages=versions("torch", "arclight-torch"),
        notes=f"{tokens} tokens, {str(dtype).removeprefix('torch.')}, {device.type}. Operations are 6 per parameter that a token meets. "
        f"The large product is the fastest of several in each turn.\n\n" + "".join(f"{line}\n" for line in on_triton)
        + f"\n{losses}\n\n{of_models}\n\n{of_remote}",
    )  # fmt: skip


if __name__ == "__main__":
    main()
