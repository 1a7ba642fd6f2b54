"""Stepping learning-rate schedulers: after optimizer steps, or when an epoch ends."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from arclight.fabric.errors import MisconfigurationError
from arclight.trainer.hooks import logging_as, overridden
from arclight.trainer.module import Module
from arclight.trainer.profilers.watching import watch_module

if TYPE_CHECKING:
    from arclight.trainer.optimizer_config import LRSchedulerConfig
    from arclight.trainer.trainer import Trainer


def scheduler_steps(trainer: Trainer, module: Module, interval: str, plateau: bool) -> list[Callable[[], Any]]:
    """Return one function per scheduler of this interval: of those that watch a value, or of the others.

    ``plateau`` chooses; no function in manual optimization, where ``training_step`` steps them.
    """
    if not module.automatic_optimization:
        return []
    return [
        watch_module(trainer, module, "lr_scheduler_step", _stepper(trainer, module, config))
        for config in trainer.lr_scheduler_configs
        if config.interval == interval and plateau == config.reduce_on_plateau
    ]


def plateau_stepper(trainer: Trainer, module: Module) -> Callable[[], None] | None:
    """Return a function that steps what watches a value at every update, once for each; None if nothing does.

    It runs behind the batch's validation and saves, as a value may come from there. ``progress.plateau_step`` tells a
    resume whether the update that it starts after is still to be followed.
    """
    steps, progress = scheduler_steps(trainer, module, "step", plateau=True), trainer.progress
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


def _stepper(trainer: Trainer, module: Module, config: LRSchedulerConfig) -> Callable[[], Any]:
    own = overridden(module, "lr_scheduler_step", Module)
    if not own and not config.reduce_on_plateau and config.frequency == 1:
        return config.scheduler.step  # type: ignore[no-any-return]

    run = logging_as(module, "lr_scheduler_step", module.lr_scheduler_step) if own else module.lr_scheduler_step

    def step() -> None:
        if config.interval == "epoch":
            count = trainer.progress.epoch + 1
        elif trainer.conventions.frequency_counts_batches:
            count = trainer.training_values.batch.index + 1
        else:  # the update is counted when those that watch a value are stepped, and not yet for the others
            count = trainer.progress.global_step + (not config.reduce_on_plateau)
        if count % config.frequency == 0 and (metric := _monitored(trainer, config)) is not _MISSING:
            run(config.scheduler, metric)

    return step


_MISSING = object()


def _monitored(trainer: Trainer, config: LRSchedulerConfig) -> Any:
    """The value that a plateau scheduler watches; None for schedulers that watch nothing."""
    if not config.reduce_on_plateau:
        return None
    metrics = trainer.callback_metrics
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
