"""Weigh batches by the module's own ``batch_weight``, whose mistakes must be heard."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import arclight as al
from arclight.parallel.pipeline.runtime.runner import StepRunner, StepWeights
from arclight.parallel.pipeline.steps.micro_batch import weights


class Silent(al.Module):
    """Has what every module has: a batch_weight that says that there is none."""


class Counting(al.Module):
    def batch_weight(self, batch: Tensor) -> Tensor:
        return torch.tensor(len(batch))


class Misspelt(al.Module):
    def batch_weight(self, batch: Tensor) -> Tensor:
        return batch.lenght()  # type: ignore[attr-defined, no-any-return]


class Unsupported(al.Module):
    def batch_weight(self, batch: Tensor) -> Tensor:
        raise NotImplementedError("Could not run 'aten::_something' on this device")


BATCH = torch.zeros(4, 2)


def share(module: Any) -> float:
    topology = SimpleNamespace(device=torch.device("cpu"))
    engine: Any = SimpleNamespace(topology=topology, parts={}, parameters=[])
    return float(StepRunner(engine, 2)._share(StepWeights.of(module, BATCH)))


def test_modules_that_count_nothing_weigh_alike_and_others_by_what_they_count() -> None:
    cut = [(BATCH[:1], 1), (BATCH[1:], 3)]
    assert share(Silent()) == share(torch.nn.Identity()) == 1.0
    assert share(Counting()) == 1 / 4
    assert weights(Silent(), cut) == weights(torch.nn.Identity(), cut) == ([1.0, 3.0], False)
    assert weights(Counting(), cut) == ([1.0, 3.0], True)


@pytest.mark.parametrize(("module", "error"), [(Misspelt(), AttributeError), (Unsupported(), NotImplementedError)])
def test_a_mistake_in_batch_weight_changes_no_loss_but_is_raised(module: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        share(module)
    with pytest.raises(error):
        weights(module, [(BATCH, 4)])


def test_a_step_that_fails_leaves_the_gradients_of_steps_before() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = before = torch.ones(2)

    def fail(*_: Any, **__: Any) -> None:
        parameter.grad = torch.full((2,), 5.0)
        raise RuntimeError("a stage fails")

    topology = SimpleNamespace(device=torch.device("cpu"))
    engine: Any = SimpleNamespace(topology=topology, parts={}, parameters=[parameter], run=fail)
    with pytest.raises(RuntimeError, match="a stage fails"):
        StepRunner(engine, 1).run([((), {}, None)], StepWeights())
    assert parameter.grad is before
