"""Merge logged values and outputs of a step's micro-batches; broadcast them to stages.

Only `PipelinedSteps` uses it. What a user's step logs and returns must come out as from one process, on every rank of the pipeline.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from arclight.fabric.batches import map_tensors
from arclight.parallel.plan import PlanError

_NO_SIZE = -1.0
"""Stands for a batch size that was not given."""


@dataclass(frozen=True)
class _Call:
    """One call of ``log``."""

    name: str
    value: Any
    size: Any
    options: dict[str, Any]


@dataclass(frozen=True)
class LoggedName:
    """Name, options and type of a logged value, sent once; its numbers are sent every step."""

    name: str
    options: dict[str, Any]
    dtype: torch.dtype | None
    """None for a metric, whose number is what its last call gave."""


class LogRecorder:
    """Recorder of the values that micro-batches log, in place of ``module.log``.

    The calls of each micro-batch are kept apart. Only what the last stage's process records counts: it alone runs each
    step to its end.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.calls: dict[int, list[_Call]] = {}
        """Calls by micro-batch."""
        self.micro_batch = 0
        """The one that is running."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Replace the module's ``log`` within the block by this recorder."""
        self.calls = {}
        if not hasattr(self.module, "log"):
            yield
            return
        self._log: Callable[..., None] = self.module.log
        self._signature = inspect.signature(self._log)
        self.module.__dict__["log"] = self._take
        try:
            yield
        finally:
            del self.module.__dict__["log"]

    def __deepcopy__(self, memo: Any) -> LogRecorder:
        return self

    def _take(self, *arguments: Any, **options: Any) -> None:
        given = dict(self._signature.bind(*arguments, **options).arguments)
        name, value, size = given.pop("name"), given.pop("value"), given.pop("batch_size", None)
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.detach().reshape(()).clone()
        elif not isinstance(value, numbers.Number) and not hasattr(value, "compute"):
            self._log(name, value, **given)  # which says what is wrong with it
        if given.get("sync_dist_group") is not None:
            raise PlanError(
                f"self.log({name!r}, sync_dist_group=...) in a step that a pipeline runs: leave the group out, values are merged "
                "over all processes"
            )
        self.calls.setdefault(self.micro_batch, []).append(_Call(name, value, size, given))

    def values(self) -> list[Any]:
        """Return all that was logged."""
        return [call.value for calls in self.calls.values() for call in calls]

    def combined(
        self, weights: Mapping[int, float], device: torch.device
    ) -> tuple[tuple[LoggedName, ...], list[Tensor]]:
        """Combine each logged value as if the step had run on the whole batch.

        Values come with their number and batch size. A mean counts with the batch sizes that were given, else with
        ``weights``; sums, least and greatest are those of all.
        """
        together: dict[tuple[str, int], list[tuple[float, _Call]]] = {}
        for micro_batch, calls in self.calls.items():
            seen: dict[str, int] = {}
            for call in calls:
                seen[call.name] = seen.get(call.name, 0) + 1
                together.setdefault((call.name, seen[call.name]), []).append((weights[micro_batch], call))
        names, values = [], []
        for (name, _), calls_of_name in together.items():
            newest = calls_of_name[-1][1]
            options = newest.options if _dtype(newest.value) is not None else with_attribute(self.module, newest)
            names.append(LoggedName(name, options, _dtype(newest.value)))
            values += [x.to(device, torch.float64) for x in _whole(calls_of_name)]
        return tuple(names), values

    def replay(self, names: Sequence[LoggedName], values: Tensor) -> None:
        """Log the whole step's values; called on every process, outside of :meth:`recording`."""
        sizes = values[1::2].tolist()
        for number, entry in enumerate(names):
            options = dict(entry.options)
            if sizes[number] != _NO_SIZE:
                size = sizes[number]
                options["batch_size"] = int(size) if size == int(size) else size
            if entry.dtype is not None:
                self.module.log(entry.name, values[2 * number].to(entry.dtype), **options)
                continue
            metric = _attribute(self.module, entry)
            metric._forward_cache = values[2 * number].to(torch.get_default_dtype())
            self.module.log(entry.name, metric, **options)


def _dtype(value: Any) -> torch.dtype | None:
    if isinstance(value, Tensor):
        return value.dtype if value.is_floating_point() else torch.get_default_dtype()
    return torch.get_default_dtype() if isinstance(value, numbers.Number) else None


def _whole(calls: list[tuple[float, _Call]]) -> tuple[Tensor, Tensor]:
    newest = calls[-1][1]
    sizes = [call.size for _, call in calls]
    given = all(size is not None for size in sizes)
    total = sum(torch.as_tensor(size).double() for size in sizes) if given else torch.tensor(_NO_SIZE)
    if _dtype(newest.value) is None:
        return torch.as_tensor(_newest_of(newest.value)).double().reshape(()), torch.as_tensor(total)
    values = torch.stack([torch.as_tensor(call.value).double() for _, call in calls])
    shares = torch.stack([torch.as_tensor(weight).double().to(values.device) for weight, _ in calls])
    reduce = newest.options.get("reduce_fx", "mean")
    reduce = reduce if isinstance(reduce, str) else getattr(reduce, "__name__", "mean")
    if reduce in _NEUTRAL:
        values = torch.where(_of_nothing(values, shares), _NEUTRAL[reduce], values)
        return getattr(values, reduce)(), torch.as_tensor(total)
    given_shares = (
        torch.stack([torch.as_tensor(size).double().to(values.device) for size in sizes]) if given else shares
    )
    return _weighted_mean(values, torch.where(_of_nothing(values, shares), 0.0, given_shares)), torch.as_tensor(total)


_NEUTRAL = {"sum": 0.0, "max": -math.inf, "amax": -math.inf, "min": math.inf, "amin": math.inf}
"""What changes nothing, by how values are merged; a mean is the other way."""


def _of_nothing(values: Tensor, weights: Tensor) -> Tensor:
    """Return which values are the NaN of a micro-batch that counts nothing, if others count."""
    return values.isnan() & (weights == 0) & (weights > 0).any()


def _weighted_mean(values: Tensor, shares: Tensor) -> Tensor:
    """Return the mean of ``values`` by ``shares``; what has no share may be NaN."""
    shares = torch.where(shares.sum() > 0, shares, 1.0)
    return torch.where(shares > 0, values * shares, 0.0).sum() / shares.sum()


def _newest_of(metric: Any) -> Any:
    """Return the result of a metric's last call; NaN for one that was only updated."""
    cache = getattr(metric, "_forward_cache", None)
    return float("nan") if cache is None else cache


def _attribute(module: Any, entry: LoggedName) -> Any:
    path = entry.options["metric_attribute"]
    found = module
    for part in path.split("."):
        found = getattr(found, part)
    return found


def with_attribute(module: Any, call: _Call) -> dict[str, Any]:
    """Return the options of ``call`` with the name of the module's metric.

    With it every process can log its own.
    """
    if call.options.get("metric_attribute") is not None:
        return call.options
    for path, part in [*module.named_modules(), *vars(module).items()]:
        if part is call.value:
            return call.options | {"metric_attribute": path}
    raise PlanError(
        f"the metric logged as {call.name!r} is not an attribute of {type(module).__name__}: make it one, so that every process has it"
    )


# -- outputs -------------------------------------------------------------------------------------------------------


def merge_step_outputs(outputs: Sequence[Any], sizes: Sequence[int], weights: Sequence[float], what: str) -> Any:
    """Return one output from those of micro-batches with ``sizes`` samples.

    Tensors and lists that have a row for each sample are joined, single numbers averaged by ``weights``; what is the same in all is
    itself. Raises PlanError for anything else.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if isinstance(first, Mapping):
        return {key: merge_step_outputs([x[key] for x in outputs], sizes, weights, f"{what}[{key!r}]") for key in first}
    if all(isinstance(x, Tensor) for x in outputs):
        if all(x.ndim and len(x) == size for x, size in zip(outputs, sizes, strict=True)):
            return torch.cat(list(outputs))
        if all(x.numel() == 1 for x in outputs):
            shares = torch.as_tensor(weights, dtype=torch.float64, device=first.device)
            mean = _weighted_mean(torch.stack([x.reshape(()).double() for x in outputs]), shares)
            return mean.to(first.dtype if first.is_floating_point() else torch.get_default_dtype())
    elif isinstance(first, list) and all(len(x) == size for x, size in zip(outputs, sizes, strict=True)):
        return [row for output in outputs for row in output]
    elif isinstance(first, tuple):
        parts = zip(*outputs, strict=True)
        return tuple(merge_step_outputs(part, sizes, weights, f"{what}[{i}]") for i, part in enumerate(parts))
    elif all(x is first or (type(x) is type(first) and x == first) for x in outputs):
        return first
    raise PlanError(
        f"{what} of several micro-batches cannot be merged: it is a {type(first).__name__} without a row for each sample; "
        "return tensors that have one, or evaluate with evaluation_micro_batches = 1"
    )


# -- broadcasting them ----------------------------------------------------------------------------------------------


@dataclass
class StepOutput:
    """Result of a step besides its loss."""

    names: tuple[LoggedName, ...] = ()
    values: Tensor | None = None
    """(2 n,) float64: for each name its number and its batch size."""
    output: Any = None


@dataclass
class OutputBroadcaster:
    """Brings an outcome from the process of the last stage to all of its pipeline.

    Names are sent when they change; from step to step one vector of numbers is.
    """

    group: dist.ProcessGroup | None
    source: int
    """The process that has the last stage, as all are numbered."""
    device: torch.device
    known: tuple[LoggedName, ...] | None = field(default=None)
    with_output: bool = False

    def broadcast(self, outcome: StepOutput | None, check: int) -> StepOutput:
        """Broadcast the last stage's outcome to all processes; others pass None.

        Raises RuntimeError if ``check`` differs.
        """
        if self.group is None:
            assert outcome is not None
            return outcome
        changed = outcome is not None and (
            outcome.names != self.known or (outcome.output is not None) != self.with_output
        )
        vector = self._vector(None if changed else outcome, check, changed)
        dist.broadcast(vector, self.source, group=self.group)
        changed_names, other = vector[:2].tolist()
        if int(other) != check:
            raise RuntimeError(
                "processes of one pipeline draw other random numbers than the last stage's, so that its stages would compute other "
                "steps: a hook or data set draws from torch's global generator on some processes only"
            )
        if changed_names:
            box = [(outcome.names, outcome.output is not None)] if outcome is not None else [None]
            dist.broadcast_object_list(box, self.source, group=self.group, device=self._box_device)
            self.known, self.with_output = box[0]  # type: ignore[misc]
            vector = self._vector(outcome, check, False)
            dist.broadcast(vector, self.source, group=self.group)
        output = self._output(outcome) if self.with_output else None
        return StepOutput(self.known or (), vector[2:], output)

    def _vector(self, outcome: StepOutput | None, check: int, changed: bool) -> Tensor:
        vector = torch.zeros(2 + 2 * len(self.known or ()), dtype=torch.float64, device=self.device)
        vector[0], vector[1] = float(changed), float(check)
        if outcome is not None and outcome.values is not None:
            vector[2:] = outcome.values
        return vector

    def _output(self, outcome: StepOutput | None) -> Any:
        box = [map_tensors(outcome.output, lambda x: x.detach().cpu())] if outcome is not None else [None]
        dist.broadcast_object_list(box, self.source, group=self.group, device=self._box_device)
        return outcome.output if outcome is not None else map_tensors(box[0], lambda x: x.to(self.device))

    @property
    def _box_device(self) -> torch.device | None:
        return self.device if self.device.type == "cuda" else None
