"""Whether a learning rate transfers: best rates by width and depth, growth of activations, ADOPT beside AdamW.

Small Llamas on the bytes of Python's own sources, three seeds; validation losses at each rate of a grid by factors of two. Used by
`benchmarks.moe`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from arclight.optim import ADOPT, AdamW, Linear
from arclight.parallel import initialize
from arclight.text import build_model
from benchmarks.results import Ratio, paired

LENGTH, ROWS = 64, 4
BASE = {"base_dim": 64}
WIDTHS, DEPTHS, BASE_DEPTH = (64, 128, 256), (2, 8), 2
ADAMW = AdamW(betas=(0.9, 0.95))
GOAL = 0.01
"""Most that ADOPT's loss may be above AdamW's."""
Losses = dict[float, list[float]]
"""Validation losses of each seed by rate."""


@dataclasses.dataclass(frozen=True)
class Length:
    """Steps of a run, the rates that are tried, and the seeds."""

    steps: int
    rates: tuple[float, ...]
    seeds: tuple[int, ...]


@functools.cache
def text() -> tuple[Tensor, Tensor]:
    """Bytes to train on, and others to validate with."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    data = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    return data[: -len(data) // 10], data[-len(data) // 10 :]


def windows(data: Tensor, count: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(0, len(data) - LENGTH - 1, (count,), generator=generator).tolist()
    return torch.stack([data[start : start + LENGTH + 1] for start in starts]).long()


def llama(width: int, layers: int, mup: dict[str, Any] | None, seed: int) -> nn.Module:
    heads = width // 16
    model = build_model(
        "llama3-debug", vocab_size=256, dim=width, layers=layers, heads=heads, kv_heads=heads, hidden=3 * width, mup=mup
    )
    initialize(model, seed)
    return model


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def train(model: nn.Module, settings: AdamW, steps: int, seed: int) -> float:
    """Return the validation loss (nats per byte) after ``steps``."""
    config: Any = model.config
    optimizer = settings.build(model.named_parameters(), (), config.rates)
    schedule, generator = Linear(warmup=0.1).build(optimizer, steps), torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, windows(text()[0], ROWS, generator)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return float(loss_of(model, windows(text()[1], 64, torch.Generator().manual_seed(0))))


def sweep(width: int, layers: int, mup: dict[str, Any] | None, length: Length, settings: AdamW = ADAMW) -> Losses:
    """Train at every rate with every seed."""
    return {
        rate: [
            train(llama(width, layers, mup, seed), dataclasses.replace(settings, lr=rate), length.steps, seed)
            for seed in length.seeds
        ]
        for rate in length.rates
    }


def best(losses: Losses) -> int:
    """Return the number of the rate with the least mean loss."""
    means = [statistics.mean(of_seeds) for of_seeds in losses.values()]
    return means.index(min(means))


def steps_apart(runs: Sequence[Losses]) -> int:
    places = [best(losses) for losses in runs]
    return max(places) - min(places)


def growth(mup: dict[str, Any] | None, seeds: Sequence[int]) -> float:
    """Return the factor by which the residual stream grows per doubling of the width, after ten steps."""

    def size(width: int, seed: int) -> float:
        model = llama(width, 2, mup, seed)
        train(model, dataclasses.replace(ADAMW, lr=2**-8), 10, seed)
        found: list[Tensor] = []
        model.get_submodule("layers.1").register_forward_hook(lambda module, given, out: found.append(out))
        with torch.no_grad():
            loss_of(model, windows(text()[1], 16, torch.Generator().manual_seed(0)))
        return float(found[0].square().mean().sqrt())

    ratios = [size(WIDTHS[-1], seed) / size(WIDTHS[0], seed) for seed in seeds]
    return float(statistics.mean(ratios) ** (1 / math.log2(WIDTHS[-1] / WIDTHS[0])))


def step_times(rounds: int) -> dict[str, Ratio]:
    """Times of an optimizer's step on the 6.5 million parameters of a debug Llama, over that of torch's foreach AdamW."""

    def prepared(make: Any) -> torch.optim.Optimizer:
        model = build_model("llama3-debug")
        initialize(model, 0)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer: torch.optim.Optimizer = make(model)
        return optimizer

    runs = {
        "foreach": prepared(lambda model: torch.optim.AdamW(model.parameters(), foreach=True)),
        "fused": prepared(lambda model: torch.optim.AdamW(model.parameters(), fused=True)),
        "adopt": prepared(lambda model: ADOPT(weight_decay=0.01).build(model.named_parameters())),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 2):
        for name in random.sample(list(runs), len(runs)):
            started = time.process_time()
            runs[name].step()
            if number >= 2:
                times[name].append(time.process_time() - started)
    return {
        "adopt_over_adamw_step": paired(times["adopt"], times["foreach"]),
        "adopt_over_fused_adamw_step": paired(times["adopt"], times["fused"]),
    }


def measure(quick: bool) -> tuple[dict[str, float | Ratio], str]:
    """Return the figures, and lines that show the losses behind them."""
    rates = tuple(2.0**power for power in range(-10, -4))
    short = Length(4, rates[2:4], (0, 1)) if quick else Length(60, rates, (0, 1, 2))
    medium = Length(4, rates[2:4], (0, 1)) if quick else Length(400, rates, (0, 1, 2))
    long = Length(8, rates[2:4], (0, 1)) if quick else Length(1600, (rates[0] / 2, *rates), (0, 1, 2))
    runs: dict[str, Losses] = {}
    for name, mup in (("standard", None), ("muP", BASE)):
        for width in WIDTHS[:2] if quick else WIDTHS:
            runs[f"{name}, width {width}"] = sweep(width, BASE_DEPTH, mup, short)
    for name, mup in (("standard", None), ("CompleteP", BASE | {"base_layers": BASE_DEPTH})):
        for depth in DEPTHS:
            runs[f"{name}, depth {depth}"] = sweep(WIDTHS[0], depth, mup, short)
    kinds: dict[str, AdamW] = {"AdamW": ADAMW, "ADOPT": ADOPT()}
    for length in (medium, long):
        for name, settings in kinds.items():
            runs[f"{name}, {length.steps} steps"] = sweep(WIDTHS[0], BASE_DEPTH, None, length, settings)

    def apart(begin: str) -> int:
        return steps_apart([losses for name, losses in runs.items() if name.startswith(begin)])

    def behind(length: Length) -> float:
        adamw, adopt = (runs[f"{kind}, {length.steps} steps"] for kind in kinds)
        at_best = (list(losses.values())[best(losses)] for losses in (adopt, adamw))
        return statistics.mean(a - b for a, b in zip(*at_best, strict=True))

    figures: dict[str, float | Ratio] = {
        "mup_lr_steps_apart": apart("muP, width"),
        "standard_width_lr_steps_apart": apart("standard, width"),
        "completep_lr_steps_apart": apart("CompleteP, depth"),
        "standard_depth_lr_steps_apart": apart("standard, depth"),
        "coordinate_growth": growth(BASE, short.seeds),
        "standard_coordinate_growth": growth(None, short.seeds),
        "adopt_minus_adamw_loss": behind(long),
        "adopt_minus_adamw_loss_of_short_runs": behind(medium),
        **step_times(6 if quick else 40),
    }
    lines = [
        f"* {name}: "
        + ", ".join(f"2^{torch.tensor(rate).log2():.0f} {statistics.mean(found):.3f}" for rate, found in losses.items())
        for name, losses in runs.items()
    ]
    lines += [
        f"* ADOPT's loss over AdamW's, each at its best rate, {length.steps} steps: {behind(length):+.3f}; at most {GOAL:+.2f} is the goal"
        for length in (medium, long)
    ]
    about = (
        f"Losses (nats per byte, mean of {len(short.seeds)} seeds) by peak rate; {short.steps} steps of {ROWS} x {LENGTH} bytes of Python's sources "
        f"unless said otherwise, widths at depth {BASE_DEPTH}, depths at width {WIDTHS[0]}:\n\n"
    )
    return figures, about + "\n".join(lines)
