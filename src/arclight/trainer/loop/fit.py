"""Run the training loop: epochs, batches, and what happens between them.

`session` makes a `FitLoop` for ``Trainer.fit``, ``tuner.trial`` for trials. What a batch calls is resolved before the first one
(`FitPlan`), and again at an epoch's start if settings changed: the innermost loop looks nothing up. Tests compare the order of hooks,
which follows Lightning's; callbacks with ``runs_last`` come after the module and the logged row. What runs within a step is composed in
`step`; a new action for every batch belongs in `FitPlan`.
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
from arclight.trainer.data.limits import timed_validation
from arclight.trainer.loop.evaluation import PROGRESS_INTERVAL, EvaluationLoop
from arclight.trainer.loop.gradients import detach_outputs
from arclight.trainer.loop.hooks import Hook, callback_hooks, module_hooks
from arclight.trainer.loop.schedulers import start_clocks
from arclight.trainer.loop.signals import SignalConnector
from arclight.trainer.loop.step import Step, StepBuilder
from arclight.trainer.module import Module
from arclight.trainer.profilers.profiling import profile_action, profile_transfer

if TYPE_CHECKING:
    from arclight.trainer.trainer import Trainer


@dataclass(frozen=True)
class FitPlan:
    """Resolved calls of one fit: forward, step, transfer and hooks."""

    key: tuple[Any, ...]
    """The settings that the plan was made of."""
    trained: tuple[bool, ...]
    forward: Step
    step: Step
    move: Callable[[Any], Any] | None
    batch_start: tuple[Hook, ...]
    batch_end: tuple[Hook, ...]
    batch_save: tuple[Hook, ...]
    """``on_train_batch_end`` of callbacks with ``runs_last``: after the step's row is written, so that a resume finds it."""
    on_progress: tuple[Hook, ...]
    epoch_schedulers: list[Callable[[], Any]]
    plateau_schedulers: list[Callable[[], Any]]
    step_plateaus: Callable[[], None] | None
    """Steps the schedulers that watch a value at every update: after the validation that may have measured it."""

    def step_epoch_schedulers(self) -> bool:
        """Step the schedulers of an epoch's last batch; always True, for an epoch that is complete."""
        for scheduler_step in self.epoch_schedulers:
            scheduler_step()
        return True


def _trained(module: Module) -> tuple[bool, ...]:
    return tuple(parameter.requires_grad for parameter in module.parameters())


class FitLoop:
    """Run the epochs of a fit, from where its progress stands until a limit or a stop request."""

    plan: FitPlan
    """The newest one. No earlier one is used again: optimizers report their steps to the newest."""

    def __init__(self, trainer: Trainer, module: Module) -> None:
        self.trainer, self.module, self.run_state = trainer, module, trainer.run_state
        self.strategy, self.evaluation = trainer.strategy, EvaluationLoop(trainer, module)

    def run(self) -> None:
        trainer, run = self.trainer, self.run_state
        self.plan = self._build_plan()
        self.strategy.stop.begin()
        trainer.call("on_train_start")
        if evaluating := sum(not part.training for part in self.module.modules()):
            trainer.warn(
                f"Found {evaluating} module(s) in eval mode at the start of training: they stay so; call .train() on those "
                "not meant to be frozen",
                PossibleUserWarning,
            )
        start_clocks(run)
        while not trainer.fit_is_over:
            complete = profile_action(trainer.profiler, "run_training_epoch", self.train_epoch)()
            self.agree_on_stop()
            if not complete:
                run.left_within_epoch = True
                break
            run.progress.next_epoch()
            run.logged.clear()
        trainer.call("on_train_end")

    def agree_on_stop(self) -> None:
        """Stop all ranks if one of them is to stop, at a point that all reach.

        A collective if there are several.

        A signal that came in between is acted on.
        """
        run = self.run_state
        told = self.strategy.all_gather_object((run.should_stop, run.requeue, run.received_sigterm))
        run.should_stop, run.requeue, run.received_sigterm = (any(flags) for flags in zip(*told, strict=True))
        self._act_on_signal(requeue=run.requeue, sigterm=run.received_sigterm)

    def _act_on_signal(self, *, requeue: bool, sigterm: bool) -> None:
        if requeue:
            SignalConnector(self.trainer).requeue_job()
        if sigterm:
            SignalConnector(self.trainer).end_by_signal()

    def stops_here(self) -> bool:
        """Return True to leave the epoch after the current batch, on all ranks at the same one.

        A validation that is due runs first.

        A rank that alone is asked to stop notifies the others outside the loop; they all stop at the next batch that none has begun.
        """
        run, stop = self.run_state, self.strategy.stop
        if run.should_stop:
            self.strategy.request_stop(
                "SIGTERM" if run.received_sigterm else "requeue" if run.requeue else "should_stop"
            )
        if not stop.asked or not stop.due(run.progress.batches):
            return False
        self._act_on_signal(
            requeue=run.requeue or "requeue" in stop.reason, sigterm=run.received_sigterm or "SIGTERM" in stop.reason
        )
        run.request_stop()
        if not self.trainer.may_stop():
            return False
        if self.trainer.behavior.validate_before_stop and self.trainer.validation_schedule.is_due_before_stop(
            run.progress
        ):
            self.evaluation.validate_during_fit()
        return True

    def train_epoch(self) -> bool:
        """Train the rest of the epoch that the progress points into; True if it was completed."""
        trainer, run, progress = self.trainer, self.run_state, self.run_state.progress
        trainer.data.load("train")  # again, if it is time to
        if progress.batch == 0:
            self._take_up_rng()
        trainer.call("on_train_epoch_start")
        self._take_up_rng()
        plan = self.plan = self._refreshed_plan()
        if progress.batch == trainer.next_validation():  # left to do by the run that saved
            self.evaluation.validate_during_fit()
        complete = progress.batch >= run.num_training_batches
        if plan.step_plateaus is not None and not complete:  # left to do by the run that saved
            plan.step_plateaus()
        if not complete:
            try:
                complete = self.train_batches(plan)
            except StopIteration:
                if run.batch_iterator is None or not run.batch_iterator.done:
                    raise
                complete = True  # the step asked its iterator for more than there was
        trainer.check_finite()
        if complete and trainer.window_ends_with_epoch and run.window.count and run.close_window:
            run.close_window()  # the last batch was not known to be the last
        if complete and trainer.validates_at_epoch_end:
            self.evaluation.validate_during_fit()
        if plan.step_plateaus is not None:
            plan.step_plateaus()
        progress.ended = complete
        self.strategy.sync_module_attributes(self.module)
        self._end_epoch(plan.plateau_schedulers if complete else [])
        return complete

    def _end_epoch(self, schedulers: list[Callable[[], Any]]) -> None:
        """Run the hooks at an epoch's end, with what they log, and the schedulers that watch it.

        The callbacks that monitor come last and see it all.
        """
        trainer, values, reporter = self.trainer, self.run_state.logged, self.trainer.reporter
        row = reporter.end_batches(values)
        trainer.call("on_train_epoch_end", monitors=False)
        reporter.log_row(row | reporter.reduce_epoch(values))
        for step in schedulers:
            step()
        trainer.call_monitors("on_train_epoch_end")
        reporter.log_row(reporter.reduce_epoch(values))

    def _take_up_rng(self) -> None:
        """Restore the random state after a resume, if that is still to be done."""
        if self.run_state.pending_rng is not None:
            set_rng_state(self.run_state.pending_rng)
            self.run_state.pending_rng = None

    def _drop_window(self) -> None:
        """Discard an accumulation window if its epoch was cut short and windows end with epochs."""
        if not self.trainer.behavior.windows_span_epochs:
            self.run_state.window.clear()

    def _timed_validation(self) -> Callable[[], bool] | None:
        trainer, run = self.trainer, self.run_state
        if run.validated_time is None:
            run.validated_time = time.monotonic()
        return timed_validation(
            trainer.val_check_interval,
            run.progress,
            self.strategy,
            validated=lambda: run.validated_time or 0,
            validates=lambda epoch: trainer.validation_schedule.is_due(run.progress),
        )

    def train_batches(self, plan: FitPlan) -> bool:
        """Run the innermost loop; True if the epoch's batches came to their end."""
        trainer, run, enter = self.trainer, self.run_state, self.trainer.enter
        progress, current, by_batch = run.progress, run.logged.batch, trainer.reporter.counts_batches
        step, move, on_progress, plateaus = plan.step, plan.move, plan.on_progress, plan.step_plateaus
        batch_start, batch_end, batch_save = plan.batch_start, plan.batch_end, plan.batch_save
        total, validate_at, max_steps = run.num_training_batches, trainer.next_validation(), trainer.step_limit
        log_every, timed = trainer.log_every_n_steps or sys.maxsize, self._timed_validation()  # 0: never
        logged_at = (progress.batches if by_batch else progress.global_step) // log_every * log_every
        clock, show_at, scheduled, stop = time.monotonic, 0.0, False, self.strategy.stop
        enter("training_step")
        run.logged.in_batches = True
        for index, batch in enumerate(trainer.data.train_batches(progress.epoch, progress.batch), progress.batch):
            if move is not None:
                batch = move(batch)
            current.value, current.known_size, current.index = batch, None, index
            run.is_last_batch = index + 1 == total
            if batch_start:
                enter("on_train_batch_start")
                if -1 in [hook(batch, index) for hook in batch_start]:
                    self._drop_window()
                    run.is_last_batch = True
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
            if (steps := progress.batches if by_batch else progress.global_step) - logged_at >= log_every:
                logged_at += log_every
                trainer.log_step()
            elif steps < logged_at:  # a callback has gone back to an earlier step
                logged_at = steps // log_every * log_every
            for hook in batch_save:
                hook(output, batch, index)
            if progress.batch == validate_at or (timed is not None and timed()):
                self.evaluation.validate_during_fit()
                self.agree_on_stop()
                if run.should_stop and self.trainer.may_stop():
                    return progress.batch == total
                validate_at = trainer.next_validation()
                enter("training_step")
            if on_progress and (now := clock()) >= show_at:
                show_at = now + PROGRESS_INTERVAL
                for hook in on_progress:
                    hook()
            stop.position = progress.batches  # before looking whether a stop is asked for: other ranks go by it
            if ((run.should_stop or stop.asked) and self.stops_here()) or progress.global_step >= max_steps:
                return progress.batch == total
            if plateaus is not None and progress.batch != total:
                plateaus()
        return scheduled or plan.step_epoch_schedulers()

    # -- what a step calls -----------------------------------------------------------------------------------------------

    def _build_plan(self, forward: Step | None = None) -> FitPlan:
        trainer, module = self.trainer, self.module
        usual = [c for c in trainer.callbacks if not c.runs_last]
        last = [c for c in trainer.callbacks if c.runs_last]
        builder = StepBuilder(trainer, module)
        forward = builder.forward() if forward is None else forward
        self.run_state.close_window = None
        return FitPlan(
            key=self._plan_key(),
            trained=_trained(module),
            forward=forward,
            step=profile_action(trainer.profiler, "run_training_batch", builder.step(forward)),
            move=profile_transfer(trainer.profiler, trainer.strategy, trainer.data.transfer(module)),
            batch_start=trainer.resolve("on_train_batch_start"),
            batch_end=callback_hooks(trainer, module, usual, "on_train_batch_end")
            + module_hooks(module, "on_train_batch_end"),
            batch_save=callback_hooks(trainer, module, last, "on_train_batch_end"),
            on_progress=callback_hooks(trainer, module, trainer.callbacks, "on_progress"),
            epoch_schedulers=builder.schedules.of("epoch", plateau=False),
            plateau_schedulers=builder.schedules.of("epoch", plateau=True),
            step_plateaus=builder.schedules.after_validation(),
        )

    def _refreshed_plan(self) -> FitPlan:
        """Return the plan, rebuilt if callbacks or hooks changed its settings or what is trained."""
        plan = self.plan
        if plan.trained != _trained(self.module):  # DDP must be rebuilt when requires_grad changes
            return self._build_plan()
        return plan if plan.key == self._plan_key() else self._build_plan(plan.forward)

    def _plan_key(self) -> tuple[Any, ...]:
        trainer = self.trainer
        return (
            trainer.accumulate_grad_batches,
            trainer.gradient_clip_val,
            trainer.gradient_clip_algorithm,
            self.module.automatic_optimization,
            *map(id, trainer.optimizers),
            *(id(config.scheduler) for config in trainer.lr_scheduler_configs),
            *map(id, trainer.callbacks),
        )
