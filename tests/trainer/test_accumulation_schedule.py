"""GradientAccumulationScheduler: when the optimizer steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import arclight as al
from arclight.trainer.callbacks import GradientAccumulationScheduler


class Steps(al.Callback):
    """Batches after which the optimizer stepped."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self._before = 0

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        if trainer.global_step != self._before:
            self.seen.append(trainer.progress.batches)
        self._before = trainer.global_step


@pytest.mark.parametrize(
    ("schedule", "after"),
    [
        ({1: 2, 2: 4}, [1, 2, 3, 4, 6, 8, 12, 16]),
        ({0: 4, 1: 1}, [4, *range(5, 17)]),
        ({0: 2, 3: 1}, [2, 4, 6, 8, 10, 12, 13, 14, 15, 16]),
    ],
)
def test_the_optimizer_steps_by_the_accumulation_schedule(fit: Any, schedule: dict[int, int], after: list[int]) -> None:
    steps, scheduler = Steps(), GradientAccumulationScheduler(schedule)
    trainer = fit({"val/score": [0.0] * 4}, scheduler, steps)
    assert steps.seen == after
    assert trainer.accumulate_grad_batches == 1, "as it was before fit"
    assert [scheduler.get_accumulate_grad_batches(epoch) for epoch in range(4)] == [
        ({0: 1} | schedule)[max(k for k in {0, *schedule} if k <= epoch)] for epoch in range(4)
    ]


def test_the_weights_are_those_of_larger_batches(fit: Any, scripted: Any) -> None:
    scheduled, fixed = scripted(), scripted()
    fit(scheduled, GradientAccumulationScheduler({0: 2}), max_epochs=3)
    fit(fixed, max_epochs=3, accumulate_grad_batches=2)
    assert torch.equal(scheduled.line.weight, fixed.line.weight)


@pytest.mark.parametrize("schedule", [{0: 2, 1: 1}, {1: 2, 2: 1}])
def test_every_step_of_a_closure_counts_after_a_change_back(
    fit: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch, schedule: dict[int, int]
) -> None:
    """A plan of an earlier epoch would wait for an optimizer that tells a later one of its steps."""
    steps, taken = Steps(), []

    def optimizer_step(self: Any, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        taken.append(self.trainer.progress.batches + 1)
        optimizer.step(closure=closure)

    monkeypatch.setattr(scripted, "optimizer_step", optimizer_step)
    trainer = fit(scripted(), GradientAccumulationScheduler(schedule), steps, max_epochs=4)
    assert steps.seen == taken
    assert trainer.global_step == len(taken) == 14


def test_wrong_use_is_refused(fit: Any, scripted: Any) -> None:
    with pytest.raises(TypeError, match="at least one epoch"):
        GradientAccumulationScheduler({})
    for wrong in ({1: 2, -3: 4}, {0: 2, "2": 1}):
        with pytest.raises(ValueError, match="Epoch should be an int"):
            GradientAccumulationScheduler(wrong)  # type: ignore[arg-type]
    for wrong in ({1: 0}, {0: 2, 2: "2"}):
        with pytest.raises(ValueError, match="Accumulation factor should be an int"):
            GradientAccumulationScheduler(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="You have set `accumulate_grad_batches`"):
        fit({"val/score": [0.0]}, GradientAccumulationScheduler({0: 2}), accumulate_grad_batches=2)
    manual = scripted()
    manual.automatic_optimization = False
    with pytest.raises(RuntimeError, match="manual optimization"):
        fit(manual, GradientAccumulationScheduler({0: 2}), max_epochs=1)

    class Own(scripted):  # type: ignore[misc, valid-type]
        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            optimizer.zero_grad()

    with pytest.warns(UserWarning, match="its own optimizer_zero_grad.*not be called on every batch"):
        fit(Own(), GradientAccumulationScheduler({0: 2}), max_epochs=1)


def test_a_trainer_accumulates_at_least_one_batch() -> None:
    trainer = al.Trainer(logger=False, accelerator="cpu", devices=1)
    trainer.use_accumulation(3)
    assert trainer.accumulate_grad_batches == 3
    with pytest.raises(ValueError, match="accumulate_grad_batches = 0: accumulate at least 1 batch"):
        trainer.use_accumulation(0)
    assert trainer.accumulate_grad_batches == 3
