"""The training loop: epochs, batches, and what happens between them.

Everything that may run at some moment was resolved before the first batch (``FitPlan``), so the loop body
calls what exists and asks about nothing else.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from arclight.fabric.batches import count_samples_and_tokens
from arclight.fabric.seeding import set_rng_state
from arclight.fabric.warnings import PossibleUserWarning
from arclight.trainer.data.batches import batch_transfer
from arclight.trainer.data.limits import timed_validation, validation_before_stop
from arclight.trainer.data.stage_data import load
from arclight.trainer.logging import reporting
from arclight.trainer.loop.evaluation import PROGRESS_INTERVAL, validate_during_fit
from arclight.trainer.loop.gradients import detach_outputs
from arclight.trainer.loop.hooks import Hook, callback_hooks, module_hooks, resolve
from arclight.trainer.loop.schedulers import plateau_stepper, scheduler_steps
from arclight.trainer.loop.signals import end_by_signal, requeue_job
from arclight.trainer.loop.step import Step, build_forward, build_step
from arclight.trainer.module import Module
from arclight.trainer.profilers.profiling import profile_action, profile_transfer

if TYPE_CHECKING:
    from arclight.trainer.trainer import Trainer


@dataclass(frozen=True)
class FitPlan:
    """All that one fit calls, resolved once (and again where an epoch's beginning changed what it is made of)."""

    made_of: tuple[Any, ...]
    trained: tuple[bool, ...]
    forward: Step
    step: Step
    move: Callable[[Any], Any] | None
    batch_start: tuple[Hook, ...]
    batch_end: tuple[Hook, ...]
    batch_save: tuple[Hook, ...]
    """``on_train_batch_end`` of the callbacks that run last: after the step's row is written, so that a checkpoint has it behind it."""
    on_progress: tuple[Hook, ...]
    epoch_schedulers: list[Callable[[], Any]]
    plateau_schedulers: list[Callable[[], Any]]
    step_plateaus: Callable[[], None] | None
    """Steps the schedulers that watch a value at every update: after the validation that may have measured it."""

    @classmethod
    def build(cls, trainer: Trainer, module: Module, forward: Step | None = None) -> FitPlan:
        usual = [c for c in trainer.callbacks if not c.runs_last]
        last = [c for c in trainer.callbacks if c.runs_last]
        forward = build_forward(trainer, module) if forward is None else forward
        trainer.close_window = None
        return cls(
            made_of=_plan_key(trainer, module),
            trained=_trained(module),
            forward=forward,
            step=profile_action(trainer, "run_training_batch", build_step(trainer, module, forward)),
            move=profile_transfer(trainer, batch_transfer(trainer, module)),
            batch_start=resolve(trainer, module, "on_train_batch_start"),
            batch_end=callback_hooks(trainer, module, usual, "on_train_batch_end")
            + module_hooks(module, "on_train_batch_end"),
            batch_save=callback_hooks(trainer, module, last, "on_train_batch_end"),
            on_progress=callback_hooks(trainer, module, trainer.callbacks, "on_progress"),
            epoch_schedulers=scheduler_steps(trainer, module, "epoch", plateau=False),
            plateau_schedulers=scheduler_steps(trainer, module, "epoch", plateau=True),
            step_plateaus=plateau_stepper(trainer, module),
        )

    def current(self, trainer: Trainer, module: Module) -> FitPlan:
        """The same plan, or a new one if callbacks or hooks changed the settings it was made of, or what is trained."""
        if self.trained != _trained(module):  # who exchanges gradients in backward has to know of which
            return FitPlan.build(trainer, module)
        same = self.made_of == _plan_key(trainer, module)
        return self if same else FitPlan.build(trainer, module, self.forward)

    def step_epoch_schedulers(self) -> bool:
        """Step the schedulers of an epoch's last batch; always True, for an epoch that is complete."""
        for scheduler_step in self.epoch_schedulers:
            scheduler_step()
        return True


def _trained(module: Module) -> tuple[bool, ...]:
    return tuple(parameter.requires_grad for parameter in module.parameters())


def _plan_key(trainer: Trainer, module: Module) -> tuple[Any, ...]:
    return (
        trainer.accumulate_grad_batches,
        trainer.gradient_clip_val,
        trainer.gradient_clip_algorithm,
        module.automatic_optimization,
        *map(id, trainer.optimizers),
        *(id(config.scheduler) for config in trainer.lr_scheduler_configs),
        *map(id, trainer.callbacks),
    )


def run_fit(trainer: Trainer, module: Module) -> None:
    """Train from where ``trainer.progress`` stands until a limit or a stop request."""
    plan = FitPlan.build(trainer, module)
    trainer.strategy.stop.begin()
    trainer.call("on_train_start")
    if evaluating := sum(not part.training for part in module.modules()):
        trainer.warn(
            f"Found {evaluating} module(s) in eval mode at the start of training: they stay so; call .train() on those "
            "not meant to be frozen",
            PossibleUserWarning,
        )
    while not finished(trainer):
        complete = profile_action(trainer, "run_training_epoch", train_epoch)(trainer, module, plan)
        agree_on_stop(trainer)
        if not complete:
            trainer.left_within_epoch = True
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


def drop_window(trainer: Trainer) -> None:
    """Forget an accumulation window whose epoch was cut short, where windows end with epochs."""
    if not trainer.conventions.windows_span_epochs:
        trainer.window.count = 0


def agree_on_stop(trainer: Trainer) -> None:
    """At a moment that all ranks reach: if one of them was told to stop, all are. A collective where there are several.

    A signal that came in between is acted on.
    """
    told = trainer.strategy.all_gather_object((trainer.should_stop, trainer.requeue, trainer.received_sigterm))
    trainer.should_stop, trainer.requeue, trainer.received_sigterm = (any(flags) for flags in zip(*told, strict=True))
    if trainer.requeue:
        requeue_job(trainer)
    if trainer.received_sigterm:
        end_by_signal(trainer)


def stops_here(trainer: Trainer, module: Module) -> bool:
    """Return True to leave an epoch behind the batch just done, which all ranks do at the same one, validated where that is due.

    A rank alone in being told to stop says so to the others beside the loop; they all stop at the next batch that none has begun.
    """
    stop = trainer.strategy.stop
    if trainer.should_stop:
        trainer.strategy.request_stop(
            "SIGTERM" if trainer.received_sigterm else "requeue" if trainer.requeue else "should_stop"
        )
    if not stop.asked or not stop.due(trainer.progress.batches):
        return False
    if trainer.requeue or "requeue" in stop.reason:
        requeue_job(trainer)
    if trainer.received_sigterm or "SIGTERM" in stop.reason:
        end_by_signal(trainer)
    trainer.should_stop = True
    if not may_stop(trainer):
        return False
    if validation_before_stop(trainer):
        validate_during_fit(trainer, module)
    return True


def may_stop(trainer: Trainer) -> bool:
    """Whether the minimum of epochs and steps is behind us."""
    progress, epochs, steps = trainer.progress, trainer.min_epochs, trainer.min_steps
    enough = (not epochs or progress.epoch >= epochs) and (not steps or progress.global_step >= steps)
    if not enough and not trainer.told_of_minimum:
        trainer.told_of_minimum = True
        trainer.say(
            f"Trainer was signaled to stop but the required `min_epochs={epochs}` or `min_steps={steps}` has not been met. "
            "Training will continue..."
        )
    return enough


def train_epoch(trainer: Trainer, module: Module, plan: FitPlan) -> bool:
    """The rest of the epoch that ``trainer.progress`` points into; whether it was completed."""
    progress = trainer.progress
    load(trainer, "train")  # again, where it is time to
    if progress.batch == 0:
        _take_up_rng(trainer)
    trainer.call("on_train_epoch_start")
    _take_up_rng(trainer)
    plan = plan.current(trainer, module)
    if progress.batch == trainer.next_validation():  # left to do by the run that saved
        validate_during_fit(trainer, module)
    complete = progress.batch >= trainer.num_training_batches
    if plan.step_plateaus is not None and not complete:  # left to do by the run that saved
        plan.step_plateaus()
    if not complete:
        try:
            complete = train_batches(trainer, module, plan)
        except StopIteration:
            if trainer.batch_iterator is None or not trainer.batch_iterator.done:
                raise
            complete = True  # the step asked its iterator for more than there was
    reporting.check_finite(trainer)
    ends = not trainer.conventions.windows_span_epochs or progress.epoch + 1 == trainer.max_epochs
    if complete and ends and trainer.window.count and trainer.close_window:
        trainer.close_window()  # the last batch was not known to be the last
    if complete and trainer.validates_when_epoch_is_over():
        validate_during_fit(trainer, module)
    if plan.step_plateaus is not None:
        plan.step_plateaus()
    progress.ended = complete
    trainer.strategy.settle(module)
    reporting.end_epoch(trainer, plan.plateau_schedulers if complete else [])
    return complete


def _take_up_rng(trainer: Trainer) -> None:
    """After a resume, draw from here on what the first run drew (its hook at the epoch's start included, if still to come)."""
    if trainer.pending_rng is not None:
        set_rng_state(trainer.pending_rng)
        trainer.pending_rng = None


def train_batches(trainer: Trainer, module: Module, plan: FitPlan) -> bool:
    """The innermost loop; whether the epoch's batches came to their end."""
    progress, current, enter = trainer.progress, trainer.logged.batch, trainer.enter
    step, move, on_progress = plan.step, plan.move, plan.on_progress
    batch_start, batch_end, batch_save, plateaus = plan.batch_start, plan.batch_end, plan.batch_save, plan.step_plateaus
    total, validate_at, max_steps = trainer.num_training_batches, trainer.next_validation(), trainer.step_limit
    log_every = trainer.log_every_n_steps or sys.maxsize  # 0: never
    logged_at, timed = progress.global_step // log_every * log_every, timed_validation(trainer)
    clock, show_at, scheduled, stop = time.monotonic, 0.0, False, trainer.strategy.stop
    enter("training_step")
    trainer.logged.in_batches = True
    for index, batch in enumerate(trainer.train_batches(progress.epoch, progress.batch), progress.batch):
        if move is not None:
            batch = move(batch)
        current.value, current.known_size, current.index = batch, None, index
        trainer.is_last_batch = index + 1 == total
        if batch_start:
            enter("on_train_batch_start")
            if -1 in [hook(batch, index) for hook in batch_start]:
                drop_window(trainer)
                trainer.is_last_batch = True
                break  # a hook asked to skip the rest of this epoch
            enter("training_step")
        output = step(batch, index)
        progress.batch, progress.batches = index + 1, progress.batches + 1
        samples, tokens = count_samples_and_tokens(batch)
        progress.samples, progress.tokens = progress.samples + samples, progress.tokens + tokens
        if progress.batch == total:
            scheduled = plan.step_epoch_schedulers()
        if batch_end:
            enter("on_train_batch_end")
            output = detach_outputs(output)
            for hook in batch_end:
                hook(output, batch, index)
            enter("training_step")
        if progress.global_step - logged_at >= log_every:
            logged_at += log_every
            reporting.log_step(trainer)
        elif progress.global_step < logged_at:  # a callback has gone back to an earlier step
            logged_at = progress.global_step // log_every * log_every
        for hook in batch_save:
            hook(output, batch, index)
        if progress.batch == validate_at or (timed is not None and timed()):
            validate_during_fit(trainer, module)
            agree_on_stop(trainer)
            if trainer.should_stop and may_stop(trainer):
                return progress.batch == total
            validate_at = trainer.next_validation()
            enter("training_step")
        if on_progress and (now := clock()) >= show_at:
            show_at = now + PROGRESS_INTERVAL
            for hook in on_progress:
                hook()
        stop.position = progress.batches  # before looking whether a stop is asked for: other ranks go by it
        if ((trainer.should_stop or stop.asked) and stops_here(trainer, module)) or progress.global_step >= max_steps:
            return progress.batch == total
        if plateaus is not None and progress.batch != total:
            plateaus()
    return scheduled or plan.step_epoch_schedulers()
