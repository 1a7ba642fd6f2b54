"""A model whose layers take known times, on any machine: they sleep through forward and both halves of backward."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from arclight.parallel.step_protocol import Split


def undisturbed(check: Callable[[float], None], attempts: int = 10) -> None:
    """Do ``check`` until it finds nothing wrong: what is measured while others have the processors takes longer now and then.

    It is given how much longer than at first everything is to last: beside longer naps, whatever a slow machine adds is small.
    What is wrong by itself is wrong each time.
    """
    for attempt in range(attempts):
        try:
            check(2.0 ** (attempt // 2))
            return
        except AssertionError:
            if attempt == attempts - 1:
                raise
            time.sleep(attempt / 2)


class SlowInputs(torch.autograd.Function):
    """Sleeps in forward, and where the gradient of its input is wanted."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_seconds)
        return gradient, None, None


class SlowWeights(torch.autograd.Function):
    """Sleeps where the gradient of a weight is computed."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, backward: float) -> Tensor:
        ctx.backward_seconds = backward
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.backward_seconds)
        return gradient, None


class Nap(nn.Module):
    """Takes ``seconds``: of forward, backward of what came in (where it needs a gradient) and backward of its weights."""

    def __init__(self, seconds: tuple[float, float, float]) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        forward, inputs, weights = self.seconds
        return SlowInputs.apply(x, forward, inputs) * SlowWeights.apply(self.weight, weights)


class Naps(nn.Module):
    """A model of one layer for each of ``seconds``, which is cut by leaving layers out."""

    def __init__(self, seconds: list[tuple[float, float, float]]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): Nap(one) for number, one in enumerate(seconds)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


class Sleeper(nn.Module):
    """The module around it, as a pipeline wants it. A batch: (samples, 16)."""

    def __init__(self, seconds: list[tuple[float, float, float]]) -> None:
        super().__init__()
        self.model = Naps(seconds)
        self.runner: Any = None

    def split_batch(self, batch: Tensor) -> Split:
        return (batch,), {}, batch

    def loss(self, output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        return (output - targets).square().sum(), len(targets)
