"""Wrap the functions of a run for its profiler when they are resolved, or not at all.

Loops, data and checkpoints call it when they resolve their functions; `session` sets the profiler up and asks for its report. The names
of actions are the ones that reports of Lightning have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from arclight.trainer.profilers.profiler import PassThroughProfiler, Profiler, profiled, profiled_items

Function = Callable[..., Any]


def profiling_enabled(profiler: Profiler | None) -> bool:
    return profiler is not None and type(profiler) is not PassThroughProfiler and not profiler.is_over


def profile_action(profiler: Profiler | None, action: str, function: Function) -> Function:
    """Return ``function`` profiled as an action of the loop."""
    return profiled(profiler, action, function) if profiler is not None and profiling_enabled(profiler) else function


def profile_items(profiler: Profiler, action: str, items: Iterator[Any]) -> Iterator[Any]:
    """Yield ``items``, with the wait for each as an action."""
    return profiled_items(profiler, action, items) if profiling_enabled(profiler) else items


def profile_callback(profiler: Profiler, callback: Any, hook: str, function: Function) -> Function:
    return (
        profiled(profiler, f"[Callback]{callback.state_key}.{hook}", function)
        if profiling_enabled(profiler)
        else function
    )


def profile_module_hook(profiler: Profiler | None, module: nn.Module, hook: str, function: Function) -> Function:
    return profile_action(profiler, f"[LightningModule]{type(module).__name__}.{hook}", function)


def profile_data_hook(profiler: Profiler, data: Any, hook: str) -> Function:
    """Return a data module's ``hook``, profiled."""
    return profile_action(profiler, f"[LightningDataModule]{type(data).__name__}.{hook}", getattr(data, hook))


def profile_strategy(profiler: Profiler, strategy: object, action: str, function: Function) -> Function:
    """Return ``function`` profiled as an action of the strategy."""
    return profile_action(profiler, f"[Strategy]{type(strategy).__name__}.{action}", function)


def profile_transfer(profiler: Profiler, strategy: object, move: Function | None) -> Function | None:
    """Profile the transfer of a batch to the device, if there is one."""
    return None if move is None else profile_strategy(profiler, strategy, "batch_to_device", move)


def reset_profiler(profiler: Profiler) -> None:
    """Open the profiler again for a run that is being set up."""
    if profiler.is_over:
        profiler.is_over = False


def setup_profiler(
    profiler: Profiler, module: nn.Module, stage: str, local_rank: int | None, log_dir: Callable[[], str | None]
) -> None:
    """Set up the profiler for a run; a report to a file goes beside the logs."""
    if profiling_enabled(profiler):
        profiler._lightning_module = module
        profiler.setup(stage=stage, local_rank=local_rank, log_dir=log_dir())


def describe_profile(profiler: Profiler) -> None:
    """Report at the end of a run."""
    if profiling_enabled(profiler):
        profiler.describe()
        _release_profiler(profiler)


def teardown_profiler(profiler: Profiler, stage: str | None) -> None:
    """Close the profiler of a run that failed."""
    if profiling_enabled(profiler):
        profiler.teardown(stage)
        _release_profiler(profiler)


def _release_profiler(profiler: Profiler) -> None:
    profiler._lightning_module, profiler.is_over = None, True
