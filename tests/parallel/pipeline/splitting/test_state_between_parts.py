"""Effects of models between their parts: hooks, lists, buffers and random numbers."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from arclight.parallel import PlanError
from arclight.parallel.pipeline import split

INPUTS = torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(4, 8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Chain(nn.Module):
    block: Callable[[], nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(type(self).block() for _ in range(6))
        self.last = nn.Linear(8, 3)
        self.double()

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def compare(model: nn.Module, stages: int, times: int = 2, **options: Any) -> None:
    """Results of several forwards, gradients and buffers of the stages are those of the model."""
    alone = copy.deepcopy(model)
    pipe = split(model, (INPUTS,), stages=stages, **options)
    for _ in range(times):
        wanted, found = alone(INPUTS), pipe(INPUTS)
        assert torch.equal(wanted, found)
        wanted.square().sum().backward()
        found.square().sum().backward()
    gradients = {name: p.grad for stage in pipe.stages for name, p in stage.named_parameters()}
    torch.testing.assert_close(gradients, {name: p.grad for name, p in alone.named_parameters()}, rtol=0, atol=1e-12)
    held = [dict(stage.named_buffers()) for stage in pipe.stages]
    for name, buffer in alone.named_buffers():
        assert any(torch.equal(buffers[name], buffer) for buffers in held if name in buffers)


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_hooks_that_change_what_parts_get_and_give_do_so_once(stages: int) -> None:
    model = Chain()
    for number, block in enumerate(model.blocks):
        block.register_forward_hook(lambda _, __, output, by=number: output * (1 + by / 10))
        block.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    compare(model, stages)


def test_hooks_may_change_the_structure_of_what_a_part_gives() -> None:
    class Pairs(Block):
        def forward(self, x: Tensor) -> Any:
            return (super().forward(x), x)

    model = type("Model", (Chain,), {"block": Pairs})()
    for block in model.blocks:
        block.register_forward_hook(lambda _, __, output: output[0])
    compare(model, 3)


class Listening(Chain):
    """Changes what a part gives for one forward, by hooks of the moment."""

    def forward(self, x: Tensor) -> Any:
        handles = [block.register_forward_hook(lambda _, __, output: output * 2) for block in self.blocks]
        try:
            return super().forward(x)
        finally:
            for handle in handles:
                handle.remove()


@pytest.mark.parametrize("stages", [2, 4])
def test_hooks_of_one_forward(stages: int) -> None:
    compare(Listening(), stages)


class ThroughDict(Block):
    def forward(self, state: Any) -> None:
        state["x"] = super().forward(state["x"])


class WithDict(Chain):
    block = ThroughDict

    def forward(self, x: Tensor) -> Any:
        state = {"x": x}
        for block in self.blocks:
            block(state)
        return self.last(state["x"])


class OntoList(Block):
    def forward(self, x: Tensor, found: list[Tensor] | None = None) -> Tensor:
        result: Tensor = super().forward(x)
        assert found is not None
        found.append(result)
        return result


class WithList(Chain):
    block = OntoList

    def forward(self, x: Tensor) -> Any:
        found: list[Tensor] = []
        for block in self.blocks:
            x = block(x, found)
        return self.last(torch.stack(found).mean(0))


class Stashing(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.aside = torch.tanh(self.inner(x)).mean()
        return super().forward(x)


class WithStash(Chain):
    block = Stashing

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + sum(block.aside for block in self.blocks)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (WithDict, r"blocks\.0 changes a list or dict that it is given, .* let it return"),
        (WithList, r"blocks\.0 changes a list or dict that it is given, .* let it return"),
        (WithStash, r"reads aside of blocks\.0.* let blocks\.0 return it"),
    ],
)
def test_side_effects_between_parts_are_traced_or_refused(kind: Any, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        split(kind(), (INPUTS,), stages=2, frontend="slice")
    with pytest.warns(UserWarning, match=said):
        compare(kind(), 2)


@pytest.mark.parametrize(
    "draw", [random.random, pytest.param(np.random.rand, marks=pytest.mark.slow)], ids=["python", "numpy"]
)
def test_random_numbers_that_each_stage_would_draw_for_itself_are_refused(draw: Callable[[], float]) -> None:
    class Scaled(Chain):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x * draw())

    class Late(Chain):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x) * draw()

    for frontend in ("auto", "slice", "trace"):
        with pytest.raises(PlanError, match=r"random generator .* draw them where batches are made"):
            split(Scaled(), (INPUTS,), stages=2, frontend=frontend)  # type: ignore[arg-type]
    split(Late(), (INPUTS,), stages=2, frontend="slice")


class Normalized(Chain):
    """A module without parameters, whose buffers `batch_norm` changes without counting that."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, affine=False).double()

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.norm(x))


class Counted(Chain):
    def __init__(self, early: bool = False) -> None:
        super().__init__()
        self.early = early
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        if self.early:
            x = x * self.scale
        x = super().forward(x)
        self.scale.mul_(0.5)
        return x if self.early else x * self.scale


@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_statistics_between_parts_are_taken_once(stages: int) -> None:
    compare(Normalized(), stages)
    compare(Counted(), stages)


def test_a_buffer_that_earlier_stages_would_not_see_changed() -> None:
    said = "scale is read before other parts than it is changed"
    with pytest.raises(PlanError, match=said):
        split(Counted(early=True), (INPUTS,), stages=2, frontend="slice")
    with pytest.warns(UserWarning, match=said):
        compare(Counted(early=True), 2)


class Fading(nn.Module):
    """Keeps a number that is written after the last part and read before the first."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        self.scale *= 0.5
        return x


def test_numbers_that_code_between_parts_keeps_are_warned_of() -> None:
    model = Fading()
    with pytest.warns(UserWarning, match=r"changes scale: every stage that runs it changes its own"):
        split(model, (torch.randn(2, 4),), stages=2)
    assert model.scale == 1.0
