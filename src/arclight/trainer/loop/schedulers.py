"""Step learning-rate schedulers, after optimizer steps or when an epoch ends.

`step` and `fit` resolve these functions before the first batch; federated clients set a schedule's step by `StepSync`. When a scheduler
steps is part of exact resuming and follows Lightning's, but for ``frequency``, which counts updates unless ``frequency_counts_batches``.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LambdaLR

from arclight.fabric.errors import MisconfigurationError
from arclight.optim.schedules import FactorSchedule

if TYPE_CHECKING:
    from arclight.trainer.loop.optimizers import LRSchedulerConfig
    from arclight.trainer.loop.run_state import RunState


class SchedulerSteps:
    """Functions that step a run's learning-rate schedulers; none in manual optimization.

    ``step``: the module's ``lr_scheduler_step``, and ``own``: True if it overrides that; ``watch``: wraps each function for the profiler;
    ``count_batches``: a scheduler's ``frequency`` at step interval counts the batches of its epoch, not the updates of the fit.
    """

    def __init__(
        self,
        run: RunState,
        step: Callable[[Any, Any], Any],
        watch: Callable[[Callable[[], Any]], Callable[[], Any]],
        *,
        own: bool,
        automatic: bool,
        count_batches: bool,
    ) -> None:
        self.run, self._step, self._watch = run, step, watch
        self._own, self._automatic, self._count_batches = own, automatic, count_batches

    def of(self, interval: str, *, plateau: bool) -> list[Callable[[], Any]]:
        """Return one function per scheduler of this interval.

        With ``plateau`` those of schedulers that watch a value, else those of the others.
        """
        if not self._automatic:
            return []  # training_step steps them
        return [
            self._watch(self._stepper(config))
            for config in self.run.lr_scheduler_configs
            if config.interval == interval and plateau == config.reduce_on_plateau
        ]

    def after_validation(self) -> Callable[[], None] | None:
        """Return a function that steps schedulers that watch a value after each update.

        None if there are none.

        It runs behind the batch's validation and saves, as a value may come from there. ``progress.plateau_step`` tells a
        resume whether the update that it starts after is still to be followed.
        """
        steps, progress = self.of("step", plateau=True), self.run.progress
        if not steps:
            return None
        if progress.plateau_step < 0:
            progress.plateau_step = progress.global_step

        def run() -> None:
            if progress.global_step != progress.plateau_step:
                for step in steps:
                    step()
                progress.plateau_step = progress.global_step

        return run

    def _stepper(self, config: LRSchedulerConfig) -> Callable[[], Any]:
        run, call = self.run, self._step
        if not self._own and not config.reduce_on_plateau and config.frequency == 1:
            return config.scheduler.step  # type: ignore[no-any-return]

        def step() -> None:
            if config.interval == "epoch":
                count = run.progress.epoch + 1
            elif self._count_batches:
                count = run.progress.batch if config.reduce_on_plateau else run.training_values.batch.index + 1
            else:  # the update is counted when those that watch a value are stepped, and not yet for the others
                count = run.progress.global_step + (not config.reduce_on_plateau)
            if count % config.frequency == 0 and (metric := _monitored(run, config)) is not _MISSING:
                call(config.scheduler, metric)

        return step


def start_clocks(run: RunState) -> None:
    """Count the time of schedules over seconds from now on."""
    for config in run.lr_scheduler_configs:
        if isinstance(config.scheduler, FactorSchedule):
            config.scheduler.start_clock()


_MISSING = object()


def _monitored(run: RunState, config: LRSchedulerConfig) -> Any:
    """Return the value that a plateau scheduler watches; None for schedulers that watch nothing."""
    if not config.reduce_on_plateau:
        return None
    metrics = run.metrics.update(run.logged).callback
    if config.monitor in metrics:
        return metrics[config.monitor]
    if config.strict:
        raise MisconfigurationError(
            f"ReduceLROnPlateau conditioned on metric {config.monitor} which is not available. Available metrics are: "
            f"{sorted(metrics)}. Name one of them as `monitor` in the lr scheduler dict, or log that one"
        )
    warnings.warn(
        f"ReduceLROnPlateau conditioned on metric {config.monitor} which is not available but strict is False: "
        "skipping this update",
        RuntimeWarning,
        stacklevel=2,
    )
    return _MISSING


class StepSync:
    """Set the step count of a fit that joins others, which have done more or fewer steps.

    Make it where optimizers and schedules are new (``on_fit_start``), call :meth:`set` when training begins (``on_train_start``).
    What is counted in samples, batches or epochs stays: those are this fit's own.
    """

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._fresh = [_state(config) for config in self._by_step()]

    def set(self, step: int) -> None:
        """Set the number of optimizer steps done to ``step``; nothing happens if it is that already.

        A schedule by steps gets the rates that it would have after ``step`` steps without any in between being left out.
        Schedules that watch a value stay as they are.
        """
        before = self._run.progress.global_step
        if step == before:
            return
        self._run.progress.set_step(step)
        for config, fresh in zip(self._by_step(), self._fresh, strict=True):
            _move(config, fresh, before, step)

    def _by_step(self) -> list[LRSchedulerConfig]:
        return [c for c in self._run.lr_scheduler_configs if c.interval == "step" and not c.reduce_on_plateau]


def _state(config: LRSchedulerConfig) -> dict[str, Any]:
    """Return a schedule's state, and what it may have set in its optimizer's groups."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in config.scheduler.optimizer.param_groups]
    return copy.deepcopy({"scheduler": config.scheduler.state_dict(), "groups": groups})


def _move(config: LRSchedulerConfig, fresh: dict[str, Any], before: int, step: int) -> None:
    scheduler, every = config.scheduler, config.frequency
    ticks = step // every
    with _any_order():
        if isinstance(scheduler, LambdaLR):  # a function of the step alone
            scheduler.last_epoch = ticks - 1
            scheduler.step()
            return
        done = before // every
        if ticks < done:
            scheduler.load_state_dict(copy.deepcopy(fresh["scheduler"]))
            for group, values in zip(scheduler.optimizer.param_groups, copy.deepcopy(fresh["groups"]), strict=True):
                group.update(values)
            done = 0
        for _ in range(ticks - done):
            scheduler.step()


@contextmanager
def _any_order() -> Iterator[None]:
    """Silence torch's warning of schedules that are stepped before their optimizer."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        yield
