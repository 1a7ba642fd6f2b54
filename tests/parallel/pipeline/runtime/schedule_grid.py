"""Compare gradients of pipelines with those of sequential micro-batches, for every schedule.

    PYTHONPATH=. torchrun --nproc-per-node 4 tests/parallel/pipeline/runtime/schedule_grid.py [--float32]

prints a line for each case; :func:`gradient_error` is for other programs.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from tests.parallel.pipeline.even_cuts import even_cuts
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from arclight.parallel.pipeline import split
from arclight.parallel.pipeline.schedule.table import SCHEDULES, schedule_kind

CASES = ("plain", "frozen", "tied", "skip", "uneven", "masked")
MICRO_BATCHES, LENGTH, WORDS, WIDTH, BLOCKS = 8, 6, 23, 12, 8
IGNORED = -100


class Block(nn.Module):
    """A residual block with two products and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.tanh(self.wide(self.norm(x))))


class Words(nn.Module):
    """A small language model, in the form that a case asks for."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.skips = case == "skip"
        if case == "tied":
            self.head.weight = self.embed.weight
        if case == "frozen":
            for part in (self.embed, *self.blocks[: BLOCKS // 2 + 1]):
                part.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        early = x
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1:
                early = x
            if self.skips and number == BLOCKS - 2:
                x = x + 0.5 * early.roll(1, 1)
        return self.head(self.norm(x))


def summed(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    total = cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (targets != IGNORED).sum()


def batch_of(case: str, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels; of a masked batch samples count very differently."""
    samples = MICRO_BATCHES + 3 if case == "uneven" else MICRO_BATCHES
    tokens = torch.randint(0, WORDS, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    labels = tokens[:, 1:].clone()
    if case == "masked":
        for row in range(samples):
            labels[row, : row % (LENGTH + 1)] = IGNORED
    return tokens[:, :-1].contiguous(), labels


def accumulated(model: nn.Module, tokens: Tensor, labels: Tensor) -> tuple[float, dict[str, Tensor | None]]:
    """Loss and gradients by micro-batches one after another."""
    count = (labels != IGNORED).sum()
    loss = 0.0
    for some, wanted in zip(tokens.tensor_split(MICRO_BATCHES), labels.tensor_split(MICRO_BATCHES), strict=True):
        part = summed(model(some), wanted)[0] / count
        part.backward()
        loss += float(part.detach())
    return loss, {name: parameter.grad for name, parameter in model.named_parameters()}


def relative(found: Tensor | None, wanted: Tensor | None) -> float:
    """The largest difference over the largest value; infinite where one has none."""
    if found is None or wanted is None:
        return 0.0 if found is wanted else float("inf")
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(torch.finfo(wanted.dtype).tiny))


def gradient_error(schedule: str, case: str, dtype: torch.dtype, group: Any = None) -> float:
    """The largest relative error, over two steps, of this process's gradients and of the loss against :func:`accumulated`."""
    torch.manual_seed(3)
    whole = Words(case).to(dtype)
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    stages = ranks * schedule_kind(schedule).stages_per_process
    pipe = split(copy.deepcopy(whole), (batch_of(case, 0)[0],), stages=stages, policy=even_cuts)
    runner = pipe.on(group, schedule=schedule, micro_batches=MICRO_BATCHES, loss=summed)
    worst = 0.0
    for seed in range(2):
        tokens, labels = batch_of(case, seed)
        whole.zero_grad()
        for parameter in runner.parameters():
            parameter.grad = None
        loss, wanted = accumulated(whole, tokens, labels)
        result = runner.step(tokens, targets=labels)
        worst = max(worst, abs(float(result.loss) - loss) / abs(loss))
        for stage in runner.stages.values():
            for name, parameter in stage.named_parameters():
                worst = max(worst, relative(parameter.grad, wanted[name]))
    return worst


def gradient_errors(
    dtype: torch.dtype, schedules: Iterable[str] = tuple(SCHEDULES), cases: Iterable[str] = CASES, group: Any = None
) -> dict[tuple[str, str], float]:
    """:func:`gradient_error` of each schedule and case, the largest of all processes; every process calls it."""
    found: dict[tuple[str, str], float] = {}
    for schedule, case in itertools.product(schedules, cases):
        worst = torch.tensor(gradient_error(schedule, case, dtype, group), dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
        found[schedule, case] = float(worst)
    return found


if __name__ == "__main__":
    dist.init_process_group("gloo")
    chosen = torch.float32 if "--float32" in sys.argv else torch.float64
    for schedule in SCHEDULES:
        for (_, case), error in gradient_errors(chosen, (schedule,)).items():
            if dist.get_rank() == 0:
                print(f"{schedule:22} {case:8} {error:.1e}", flush=True)
    dist.destroy_process_group()
