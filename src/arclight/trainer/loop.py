"""The training loop: epochs, batches, and what happens between them.

Everything that may run at some moment was resolved before the first batch (``FitPlan``), so the loop body
calls what exists and asks about nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from arclight.fabric.seeding import set_rng_state
from arclight.trainer import reporting
from arclight.trainer.dataloading import load
from arclight.trainer.evaluation import PROGRESS_INTERVAL, validate_during_fit
from arclight.trainer.hooks import Hook, callback_hooks, module_hooks, resolve
from arclight.trainer.module import Module
from arclight.trainer.optimization import Step, build_step, epoch_scheduler_steps
from arclight.trainer.transfer import batch_transfer

if TYPE_CHECKING:
    from arclight.trainer.trainer import Trainer


@dataclass(frozen=True)
class FitPlan:
    """All that one fit calls, resolved once."""

    step: Step
    move: Callable[[Any], Any] | None
    batch_start: tuple[Hook, ...]
    batch_end: tuple[Hook, ...]
    batch_save: tuple[Hook, ...]
    """``on_train_batch_end`` of the callbacks that run last: after the step's row is written, so that a checkpoint has it behind it."""
    on_progress: tuple[Hook, ...]
    epoch_schedulers: list[Callable[[], Any]]

    @classmethod
    def build(cls, trainer: Trainer, module: Module) -> FitPlan:
        return cls(
            step=build_step(trainer, module),
            move=batch_transfer(trainer, module),
            batch_start=resolve(trainer, module, "on_train_batch_start"),
            batch_end=callback_hooks(
                trainer, module, [c for c in trainer.callbacks if not c.runs_last], "on_train_batch_end"
            )
            + module_hooks(module, "on_train_batch_end"),
            batch_save=callback_hooks(
                trainer, module, [c for c in trainer.callbacks if c.runs_last], "on_train_batch_end"
            ),
            on_progress=callback_hooks(trainer, module, trainer.callbacks, "on_progress"),
            epoch_schedulers=epoch_scheduler_steps(trainer, module),
        )


def run_fit(trainer: Trainer, module: Module) -> None:
    """Train from where ``trainer.progress`` stands until a limit or a stop request."""
    plan = FitPlan.build(trainer, module)
    trainer.call("on_train_start")
    if evaluating := sum(not part.training for part in module.modules()):
        trainer.notice(
            f"{evaluating} modules are in evaluation mode and stay so: call .train() on those not meant to be frozen"
        )
    while not finished(trainer):
        if not train_epoch(trainer, module, plan):
            break
        trainer.progress.next_epoch()
        trainer.logged.clear()
    trainer.call("on_train_end")


def finished(trainer: Trainer) -> bool:
    """Whether a limit has been reached, or a stop was asked for after the minimum."""
    progress = trainer.progress
    if trainer.max_epochs != -1 and progress.epoch >= trainer.max_epochs:
        return True
    if trainer.max_steps != -1 and progress.global_step >= trainer.max_steps:
        return True
    return trainer.should_stop and may_stop(trainer)


def may_stop(trainer: Trainer) -> bool:
    """Whether the minimum of epochs and steps is behind us."""
    progress = trainer.progress
    return progress.epoch >= trainer.min_epochs and progress.global_step >= trainer.min_steps


def train_epoch(trainer: Trainer, module: Module, plan: FitPlan) -> bool:
    """The rest of the epoch that ``trainer.progress`` points into; whether it was completed."""
    progress = trainer.progress
    load(trainer, "train")  # again, where it is time to
    if progress.batch == 0:
        _take_up_rng(trainer)
    trainer.call("on_train_epoch_start")
    _take_up_rng(trainer)
    if progress.batch == trainer.next_validation():  # left to do by the run that saved
        validate_during_fit(trainer, module)
    complete = progress.batch >= trainer.num_training_batches
    if not complete:
        try:
            complete = train_batches(trainer, module, plan)
        except StopIteration:
            if trainer.batch_iterator is None or not trainer.batch_iterator.done:
                raise
            complete = True  # the step asked its iterator for more than there was
    reporting.check_finite(trainer)
    if complete and trainer.validates_when_epoch_is_over():
        validate_during_fit(trainer, module)
    if complete:
        progress.ended = True
        for scheduler_step in plan.epoch_schedulers:
            scheduler_step()
    reporting.end_epoch(trainer)
    return complete


def _take_up_rng(trainer: Trainer) -> None:
    """After a resume, draw from here on what the first run drew (its hook at the epoch's start included, if still to come)."""
    if trainer.pending_rng is not None:
        set_rng_state(trainer.pending_rng)
        trainer.pending_rng = None


def train_batches(trainer: Trainer, module: Module, plan: FitPlan) -> bool:
    """The innermost loop; whether the epoch's batches came to their end."""
    progress, current, enter = trainer.progress, trainer.logged.batch, trainer.enter
    step, move, batch_start, batch_end, batch_save = (
        plan.step,
        plan.move,
        plan.batch_start,
        plan.batch_end,
        plan.batch_save,
    )
    total, validate_at, max_steps = trainer.num_training_batches, trainer.next_validation(), trainer.max_steps
    log_every = trainer.log_every_n_steps
    log_at = progress.global_step // log_every * log_every + log_every
    on_progress, clock, show_at = plan.on_progress, time.monotonic, 0.0
    enter("training_step")
    trainer.logged.in_batches = True
    for index, batch in enumerate(trainer.train_batches(progress.epoch, progress.batch), progress.batch):
        if move is not None:
            batch = move(batch)
        current.value, current.known_size = batch, None
        if batch_start:
            enter("on_train_batch_start")
            if -1 in [hook(batch, index) for hook in batch_start]:
                return True  # a hook asked to skip the rest of this epoch
            enter("training_step")
        output = step(batch, index)
        progress.batch = index + 1
        progress.batches += 1
        if batch_end:
            trainer.is_last_batch = index + 1 == total
            enter("on_train_batch_end")
            for hook in batch_end:
                hook(output, batch, index)
            enter("training_step")
        if progress.global_step >= log_at:
            log_at += log_every
            reporting.log_step(trainer)
        for hook in batch_save:
            hook(output, batch, index)
        if progress.batch == validate_at:
            validate_during_fit(trainer, module)
            validate_at = trainer.next_validation()
            enter("training_step")
        if on_progress and (now := clock()) >= show_at:
            show_at = now + PROGRESS_INTERVAL
            for hook in on_progress:
                hook()
        if progress.global_step == max_steps or (trainer.should_stop and may_stop(trainer)):
            return progress.batch == total
    return True
