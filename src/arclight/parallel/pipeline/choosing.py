"""Where the steps of a module are cut, from what their parts cost: predicted from their operations, without computing anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from arclight.parallel.pipeline.graph import UnitGraph
from arclight.parallel.pipeline.measuring import predict
from arclight.parallel.pipeline.partition import Room, partition
from arclight.parallel.plan import PlanError

Step = Callable[..., Any]


def cuts_of(
    module: nn.Module, step: Step, args: tuple[Any, ...], graph: UnitGraph, stages: int, *, micro_batches: int, processes: int,
    memory: float | None = None, device: str = "cpu",
) -> Sequence[int]:  # fmt: skip
    """The first call of each stage, so that a step takes least time. memory: bytes that a process may use, None for any number.

    Raises PlanError where no cut keeps the memory, and where the step cannot be followed without data.
    """
    if stages == 1:
        return (0,)
    figures = "cpu" if device == "cpu" else None
    try:
        costs = predict(_alone(module, step), graph, args, device=figures)
    except (RuntimeError, AttributeError) as error:
        raise PlanError(
            f"what the parts of {type(module).__name__} cost cannot be predicted: {step.__name__} failed with tensors that have no data ({error})"
        ) from error
    room = None
    if memory is not None:
        room = Room(memory, tuple(_in_flight(stage, stages, micro_batches, processes) for stage in range(stages)))
    found = partition(costs.units, stages, micro_batches, ties=costs.ties, crossing=costs.crossing, room=room)
    return found.cuts


def _in_flight(stage: int, stages: int, micro_batches: int, processes: int) -> float:
    """Micro-batches whose activations a stage holds at once with 1F1B: as many as it is away from the end. Two stages of one process hold
    theirs at the same time, and half of the memory each.
    """
    return float(min(micro_batches, stages - stage) * max(1, stages // processes))


def _alone(module: nn.Module, step: Step) -> nn.Module:
    """``module`` as something whose call is ``step``. It shares all members; a copy of it knows the same trainer."""
    kind, function = type(module), step.__func__  # type: ignore[attr-defined]

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if "_in_step" in self.__dict__:  # the step calls the module itself
            return nn.Module.__call__(self, *args, **kwargs)
        self.__dict__["_in_step"] = True
        try:
            return function(self, *args, **kwargs)
        finally:
            del self.__dict__["_in_step"]

    members = {
        "__call__": call,
        "__getstate__": lambda self: dict(self.__dict__),
        "_trainer": module.__dict__.get("_trainer"),
        "_entries": None,
        "log": _unheard,
    }
    made: nn.Module = object.__new__(type(kind.__name__, (kind,), members))
    made.__dict__.update({k: v for k, v in module.__dict__.items() if k not in members})
    return made


def _unheard(*_: Any, **__: Any) -> None:
    """In place of ``log``, where nothing happens that could be logged."""


def largest_fitting(samples: int, processes: int, fits: Callable[[int], bool]) -> int:
    """Micro-batches for a batch of ``samples``: four for each process, or as many as there are samples, that the schedule takes.

    With four, 1F1B idles (p - 1) / (5 p - 1) of its time, less than a fifth; more make each product smaller.
    """
    for number in range(min(samples, 4 * processes), 0, -1):
        if fits(number):
            return number
    return max(1, min(samples, processes))


def bytes_of(memory: str | float | None) -> float | None:
    """Bytes of "22GiB", "500 MB" or a number of bytes. Raises PlanError for anything else."""
    if memory is None:
        return None
    if isinstance(memory, (int, float)) and not isinstance(memory, bool) and memory > 0:
        return float(memory)
    units = {
        "": 1,
        "b": 1,
        "kib": 2**10,
        "mib": 2**20,
        "gib": 2**30,
        "tib": 2**40,
        "kb": 1e3,
        "mb": 1e6,
        "gb": 1e9,
        "tb": 1e12,
    }
    text = memory.strip().lower() if isinstance(memory, str) else ""
    number = text.rstrip("bikmgt ")
    unit = text[len(number) :].strip()
    try:
        found = float(number) * units[unit]
    except (ValueError, KeyError):
        found = 0.0
    if not found > 0:
        raise PlanError(f'memory = {memory!r} is no size: write a number of bytes, or one with its unit, as "22GiB"')
    return found


def device_kind(device: torch.device) -> str:
    """What costs are predicted for."""
    return "cpu" if device.type == "cpu" else device.type
