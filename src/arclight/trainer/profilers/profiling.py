"""Wrap the functions of a run for the trainer's profiler when they are resolved, or not at all.

The names of actions are the ones that reports of Lightning have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from arclight.trainer.profilers.profiler import PassThroughProfiler, profiled, profiled_items

if TYPE_CHECKING:
    from arclight.trainer.callback import Callback
    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer

Function = Callable[..., Any]


def profiling_enabled(trainer: Trainer) -> bool:
    return type(trainer.profiler) is not PassThroughProfiler and not trainer.profiler.is_over


def profile_action(trainer: Trainer, action: str, function: Function) -> Function:
    """``function`` as an action of the loop itself."""
    return profiled(trainer.profiler, action, function) if profiling_enabled(trainer) else function


def profile_items(trainer: Trainer, action: str, items: Iterator[Any]) -> Iterator[Any]:
    """``items``, with the wait for each as an action."""
    return profiled_items(trainer.profiler, action, items) if profiling_enabled(trainer) else items


def profile_callback(trainer: Trainer, callback: Callback, hook: str, function: Function) -> Function:
    return (
        profile_action(trainer, f"[Callback]{callback.state_key}.{hook}", function)
        if profiling_enabled(trainer)
        else function
    )


def profile_module_hook(trainer: Trainer | None, module: Module, hook: str, function: Function) -> Function:
    if trainer is None or not profiling_enabled(trainer):
        return function
    return profile_action(trainer, f"[LightningModule]{type(module).__name__}.{hook}", function)


def profile_data_hook(trainer: Trainer, data: Any, hook: str) -> Function:
    """A data module's ``hook``."""
    return profile_action(trainer, f"[LightningDataModule]{type(data).__name__}.{hook}", getattr(data, hook))


def profile_strategy(trainer: Trainer, action: str, function: Function) -> Function:
    """``function`` as something that depends on where the run takes place."""
    return profile_action(trainer, f"[Strategy]{type(trainer.strategy).__name__}.{action}", function)


def profile_transfer(trainer: Trainer, move: Function | None) -> Function | None:
    """Profile the move of a batch to the device, if there is one."""
    return None if move is None else profile_strategy(trainer, "batch_to_device", move)


def reset_profiler(trainer: Trainer) -> None:
    """A run is being set up."""
    if trainer.profiler.is_over:
        trainer.profiler.is_over = False


def setup_profiler(trainer: Trainer, module: Module, stage: str) -> None:
    """A run begins; where a report may go to a file, it goes beside the logs."""
    if not profiling_enabled(trainer):
        return
    trainer.profiler._lightning_module = module
    local_rank = trainer.local_rank if trainer.world_size > 1 else None
    trainer.profiler.setup(stage=stage, local_rank=local_rank, log_dir=trainer.log_dir)


def describe_profile(trainer: Trainer) -> None:
    """The run is over: report."""
    if profiling_enabled(trainer):
        trainer.profiler.describe()
        _release_profiler(trainer)


def teardown_profiler(trainer: Trainer) -> None:
    """The run failed: nothing is left open."""
    if profiling_enabled(trainer):
        trainer.profiler.teardown(trainer.state.fn.value if trainer.state.fn is not None else None)
        _release_profiler(trainer)


def _release_profiler(trainer: Trainer) -> None:
    trainer.profiler._lightning_module, trainer.profiler.is_over = None, True
