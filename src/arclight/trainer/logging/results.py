"""Collect values of ``Module.log`` on their device; reduce and read them on demand.

``Module.log`` appends a detached reference to the `ResultCollection` of its stage; `sync` and `reporting` reduce it, `metrics` shows it,
and checkpoints hold an epoch's sums, whose keys stay. Nothing here waits for a device until the logging interval, the end of an epoch or
a display asks. Epoch means are sums of value times weight (weight = samples) in float64, so that every sample counts once whatever the
batch sizes and the number of processes.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from arclight.fabric.batches import batch_size_of, batch_sizes
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.rank_zero import rank_zero_warn
from arclight.trainer.hparams import known_fields
from arclight.trainer.logging import rules
from arclight.trainer.logging.rules import LogSettings


class BatchInfo:
    """The batch under way, whose size is counted only if a logged value needs it."""

    __slots__ = ("checked", "index", "known_size", "value")

    def __init__(self) -> None:
        self.value: Any = None
        self.known_size: int | None = None
        self.checked = False
        self.index = -1
        """Number of the newest batch that was begun, in its epoch; -1 before the first."""

    def set(self, value: Any) -> None:
        self.value, self.known_size = value, None

    def size(self) -> int:
        """Count the samples in the batch; 1 between batches, and for a batch without tensors."""
        if self.known_size is None:
            self.known_size = 1 if self.value is None else batch_size_of(self.value)
        return self.known_size

    def weight(self) -> int:
        """Return the size, for a mean. Warns once if tensors differ in their first dimension.

        Raises MisconfigurationError for a batch without any tensor.
        """
        if not self.checked and self.value is not None:
            self._check()
            self.checked = True
        return self.size()

    def _check(self) -> None:
        sizes = list(dict.fromkeys(batch_sizes(self.value)))
        if not sizes:
            raise MisconfigurationError(
                f"We could not infer the batch_size of a batch of type {type(self.value).__name__}, which mean values are weighted "
                "by: give it, as in `self.log(..., batch_size=batch_size)`"
            )
        if len(sizes) > 1:
            rank_zero_warn(
                f"Trying to infer the `batch_size` from an ambiguous collection: its tensors have first dimensions {sizes[:4]}, "
                f"and {sizes[0]} is taken. To be sure, use `self.log(..., batch_size=batch_size)`",
                stacklevel=6,
            )


def metric_state(metric: Any) -> dict[str, Any] | None:
    """Return the states of ``metric`` and of metrics inside it, on the host; or None."""
    parts = dict(_with_states(metric))
    if parts:
        return {
            "parts": {
                path: {name: _to_host(value) for name, value in states.items()} for path, states in parts.items()
            },
            "updates": {path: getattr(_part(metric, path), "_update_count", 0) for path in parts},
        }
    if callable(getattr(metric, "state_dict", None)) and callable(getattr(metric, "load_state_dict", None)):
        return {"state_dict": {name: _to_host(value) for name, value in metric.state_dict().items()}}
    return None


def restore_metric(module: nn.Module, path: str, state: dict[str, Any] | None) -> Any:
    """Restore ``state`` of the metric at ``path``, and return it; None if it is not there."""
    try:
        metric = _part(module, path)
    except AttributeError:
        metric, state = None, None
    if state is None:
        rank_zero_warn(
            f"the metric {path} of {type(module).__name__} cannot be restored and starts its epoch afresh: "
            + ("there is no such attribute" if metric is None else "give it state_dict() and load_state_dict()")
        )
    elif "state_dict" in state:
        metric.load_state_dict(state["state_dict"])
    else:
        for inner, states in state["parts"].items():
            part = _part(metric, inner)
            for name, value in states.items():
                setattr(part, name, _like(value, getattr(part, name), part))
            part._update_count, part._computed = state["updates"][inner], None
    return metric


def find_metric(module: nn.Module, path: str, name: str) -> Any:
    """Find the metric at ``path`` in ``module``, to join the reduction of other ranks.

    They logged it as ``name``.

    Raises MisconfigurationError if it holds none.
    """
    try:
        return _part(module, path)
    except AttributeError:
        raise MisconfigurationError(
            f"the metric {name!r} is logged on other processes, and computes over all of them, but {type(module).__name__} has no "
            f"attribute {path!r} on this one: log it on all, or with rank_zero_only=True"
        ) from None


def _with_states(metric: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield path and states of ``metric`` and of each metric inside it that has states."""
    parts = metric.named_modules() if isinstance(metric, nn.Module) else [("", metric)]
    for path, part in parts:
        states = getattr(part, "metric_state", None)
        if isinstance(states, dict) and states:
            yield path, states


def _part(owner: Any, path: str) -> Any:
    for name in path.split(".") if path else ():
        owner = owner[int(name)] if isinstance(owner, nn.ModuleList) else getattr(owner, name)
    return owner


def _to_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    return [_to_host(item) for item in value] if isinstance(value, (list, tuple)) else value


def _like(value: Any, present: Any, metric: Any) -> Any:
    """Return ``value`` on the device of ``metric``."""
    device = present.device if isinstance(present, torch.Tensor) else getattr(metric, "device", None)
    if isinstance(value, list):
        return [_like(item, None, metric) for item in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value


FLUSH = 256
"""Values of a name that are kept before they are added to its sum: fixed, so that sums have the same bits whenever they are read."""

LOADER_SUFFIX = "/dataloader_idx_{}"
"""Ending of a name's values if an evaluation has several loaders."""


class ResultMetric:
    """Values logged under one name from one hook since the epoch began.

    In evaluation there is one for each loader.
    """

    __slots__ = (
        "batch",
        "double",
        "folded",
        "given",
        "hook",
        "last",
        "loader",
        "metric",
        "name",
        "pending",
        "reduced",
        "result",
        "settings",
        "shown",
        "suffix",
        "synced",
        "total",
        "weight",
        "weights",
    )

    def __init__(
        self, hook: str, name: str, settings: LogSettings, batch: BatchInfo, loader: int | None = None
    ) -> None:
        self.hook, self.name, self.settings, self.batch, self.loader = hook, name, settings, batch, loader
        self.suffix = LOADER_SUFFIX.format(loader) if loader is not None and settings.add_dataloader_idx else ""
        self.given: tuple[Any, ...] = ()
        """The arguments of the call that made this entry: a call with the same ones needs no further check."""
        self.metric: Any = None
        self.double = False
        """Whether other processes have logged float64 if this one has logged nothing."""
        self.clear()

    def replace_settings(self, settings: LogSettings) -> None:
        """Replace the settings; values that were logged for another result are dropped."""
        if (settings.reduce, settings.metric_attribute) != (self.settings.reduce, self.settings.metric_attribute):
            self.metric = None
            self.clear()
        self.settings = settings

    def clear(self) -> None:
        """Forget the epoch's values."""
        self.last: torch.Tensor | None = None
        self.shown: torch.Tensor | None = None
        """The value of ``last`` that has been taken into the trainer's metrics."""
        self.synced: torch.Tensor | None = None
        """The value of ``last`` that was merged from those of all processes."""
        self.pending: list[torch.Tensor] = []
        self.weights: list[float] = []
        self.total: torch.Tensor | None = None
        self.weight = 0.0
        self.folded = 0
        self.result: torch.Tensor | None = None
        self.reduced = 0
        """How many values ``result`` was made of."""

    @property
    def count(self) -> int:
        """Values logged so far."""
        return self.folded + len(self.pending)

    @property
    def log_name(self) -> str:
        return self.name + self.suffix

    @property
    def step_name(self) -> str:
        return f"{self.name}_step{self.suffix}" if self.settings.on_epoch else self.log_name

    @property
    def epoch_name(self) -> str:
        return f"{self.name}_epoch{self.suffix}" if self.settings.on_step else self.log_name

    def add(self, value: Any, batch_size: int | None) -> None:
        """Append a scalar, copied if it may change in place later."""
        settings = self.settings
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise rules.refuse_value(self.name, value)
            if not settings.enable_graph:
                own = value.requires_grad and not value.is_leaf and not value._version
                value = value.detach() if own else value.detach().clone()
            if value.ndim:
                value = value.reshape(())
        elif isinstance(value, numbers.Number):
            value = torch.tensor(value, dtype=_wide(torch.get_default_dtype()))
        else:
            self._add_metric(value)
            return
        if settings.on_step:
            self.last = value
        if settings.on_epoch:
            self.pending.append(value)
            batch = self.batch
            if settings.reduce != "mean":
                self.weights.append(1)
            elif batch_size is not None:
                self.weights.append(batch_size)
            else:  # a size that somebody else asked for has not been checked
                self.weights.append((batch.checked and batch.known_size) or batch.weight())
            if len(self.pending) == FLUSH:
                self._fold()

    def _add_metric(self, value: Any) -> None:
        if not rules.is_metric(value):
            raise rules.refuse_value(self.name, value)
        if self.metric is None:
            self.metric = value
        elif self.metric is not value:
            raise _twice(self.name, self.hook)
        self.folded += 1
        if self.settings.on_step:
            # what its last call gave; a metric that was only updated has no value of this step, nor is it asked for one
            cache = value._forward_cache if hasattr(value, "_forward_cache") else value.compute()
            self.last = cache.detach() if isinstance(cache, torch.Tensor) else self._tensor(cache)

    def _tensor(self, value: Any) -> torch.Tensor | None:
        return torch.tensor(float(value)) if isinstance(value, (int, float)) else None

    def compute_metric(self) -> torch.Tensor:
        """Return the metric's value of the epoch. Raises ValueError if that is no tensor."""
        value = self.metric.compute()
        if isinstance(value, torch.Tensor):
            return value if self.settings.enable_graph else value.detach()
        if (number := self._tensor(value)) is not None:
            return number
        raise ValueError(f"The `.compute()` return of the metric logged as {self.name!r} must be a tensor, got {value}")

    def _fold(self) -> None:
        total, weight = self._folded()
        self.folded += len(self.pending)
        self.total, self.weight, self.pending, self.weights = total, weight, [], []

    def _stacked(self) -> torch.Tensor:
        device = self.pending[-1].device  # plain numbers and resumed values lie on the host
        self.check_unchanged(self.pending)
        return torch.stack([value.detach().to(device) for value in self.pending])

    def check_unchanged(self, values: list[torch.Tensor]) -> None:
        """Raise RuntimeError if a logged tensor was changed in place afterwards.

        It would be shown with a value that was never logged.
        """
        # a list, because a generator would cost a Python call for each value
        if not self.settings.enable_graph and any([not v.is_inference() and v._version for v in values]):  # noqa: C419
            raise RuntimeError(
                f"the tensor logged as {self.name!r} in {self.hook} was changed in place afterwards (`+=`, for one), and its "
                f"value is lost; log {self.name}.clone(), or write `x = x + y`"
            )

    def _folded(self) -> tuple[torch.Tensor | None, float]:
        """Compute total and weight with the pending values, without changing either."""
        if not self.pending:
            return self.total, self.weight
        reduce, values = self.settings.reduce, self._stacked().double()
        if reduce == "mean":
            folded = (values * torch.tensor(self.weights, dtype=torch.float64, device=values.device)).sum()
        else:
            folded = getattr(values, reduce)()
        if self.total is not None:
            folded = combine(reduce, self.total.to(folded.device), folded)
        return folded, self.weight + sum(self.weights)

    def summary(self) -> tuple[torch.Tensor, float]:
        """Return this rank's ``(total, weight)`` of the epoch so far; weight 0 for no value."""
        total, weight = self._folded()
        return (torch.zeros((), dtype=torch.float64), 0.0) if total is None else (total, float(weight))

    def finish(self, total: torch.Tensor | float, weight: float) -> None:
        """Set the epoch's result from ``total`` and ``weight``; weight 0 is no value."""
        self.reduced = self.count
        if weight > 0:
            total = torch.as_tensor(total, dtype=torch.float64)
            self.result = (total / weight if self.settings.reduce == "mean" else total).to(self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The type of shown values: that of the newest one, at least float32."""
        newest = self.pending[-1] if self.pending else self.last
        empty = torch.float64 if self.double else torch.float32
        return _wide(newest.dtype) if newest is not None else empty

    def description(self) -> dict[str, Any]:
        """Describe how the value is reduced and shown, for a rank that has not logged it."""
        settings = {name: getattr(self.settings, name) for name in LogSettings.__slots__ if name != "sync_group"}
        return {"settings": settings, "double": self.dtype == torch.float64}

    def state_dict(self) -> dict[str, Any]:
        state = {
            "total": self.total, "weight": self.weight, "last": self.last, "weights": list(self.weights), "folded": self.folded,
            "pending": self._stacked() if self.pending else None,
            "settings": self.description()["settings"],
        }  # fmt: skip
        return state if self.metric is None else {**state, "metric": metric_state(self.metric)}

    def load_state_dict(self, state: dict[str, Any], module: nn.Module) -> None:
        self.total, self.weight, self.last, self.weights = (
            state["total"],
            state["weight"],
            None if state["last"] is None else state["last"].clone(),  # read from a file, it counts as changed in place
            list(state["weights"]),
        )
        self.folded = state["folded"]
        self.pending = list(state["pending"].clone().unbind()) if state["pending"] is not None else []
        if self.settings.metric_attribute is not None:
            self.metric = restore_metric(module, self.settings.metric_attribute, state["metric"])

    def merge(self, other: ResultMetric) -> None:
        """Merge the values that another rank has logged under this name."""
        self.folded, (total, weight) = self.count + other.count, self._folded()
        more, more_weight = other._folded()
        self.total = (
            combine(self.settings.reduce, total, more)
            if total is not None and more is not None
            else total
            if more is None
            else more
        )
        self.weight, self.pending, self.weights = weight + more_weight, [], []
        self.last = self.last if other.last is None else other.last


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def combine(reduce: str, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Combine two parts of a reduction."""
    functions: dict[str, Callable[..., torch.Tensor]] = {"max": torch.maximum, "min": torch.minimum}
    return functions.get(reduce, torch.add)(one, other)


def _twice(name: str, hook: str) -> MisconfigurationError:
    return MisconfigurationError(
        f"You called `self.log({name}, ...)` twice in `{hook}` with different arguments; give the two different names"
    )


_AT_A_RESUME = ("on_train_start", "on_train_epoch_start")


class ResultCollection:
    """Everything logged in one stage (training, validation, test) since its epoch began."""

    def __init__(self, stage: str, entry_point: str = "fit") -> None:
        self.stage, self.entry_point = stage, entry_point
        self.batch = BatchInfo()
        self.tables: dict[str, dict[str, ResultMetric]] = {}
        self.hook = ""
        self.loader: int | None = None
        """Number of the loader under way if there are several."""
        self.has_steps = False
        """Whether any name is logged ``on_step``."""
        self.in_batches = False
        """Whether batches are running: step values are what there is to see, else the epoch's."""

    def table(self, hook: str) -> dict[str, ResultMetric]:
        """Return the entries of ``hook`` (and of the current loader), by the name given to ``log``."""
        key = hook if self.loader is None else f"{hook}/{self.loader}"
        if key not in self.tables:
            self.tables[key] = {}
        return self.tables[key]

    def entries(self) -> Iterator[ResultMetric]:
        for table in self.tables.values():
            yield from table.values()

    def entry(
        self, table: dict[str, ResultMetric], module: nn.Module, name: str, value: Any, given: tuple[Any, ...]
    ) -> ResultMetric:
        """Return the entry in ``table`` for a call of ``log``; make it if it is new.

        ``given``: the arguments of that call.

        Raises MisconfigurationError if nothing can be logged (so), or if the name is logged with other arguments.
        """
        if self.stage == "predict":
            raise MisconfigurationError(
                f"`self.log({name!r}, ...)`: prediction's result collection is not registered yet anywhere: what a predict hook "
                "logs would be seen by nobody; return it from predict_step"
            )
        settings = self._settings(module, name, value, *given)
        known = table.get(name)
        if known is None:
            known = table[name] = ResultMetric(self.hook, name, settings, self.batch, self.loader)
            self._check_new(known, value)
        elif not known.given:  # from a checkpoint: the code of today says how it is shown
            known.replace_settings(settings)
        elif known.settings != settings:
            raise _twice(name, self.hook)
        known.given = given
        return known

    def _settings(
        self, module: nn.Module, name: str, value: Any, prog_bar: bool, logger: bool | None, on_step: bool | None, on_epoch: bool | None,
        reduce_fx: Any, enable_graph: bool, sync_dist: bool, sync_dist_group: Any, add_dataloader_idx: bool,
        metric_attribute: str | None, rank_zero_only: bool,
    ) -> LogSettings:  # fmt: skip
        if not (isinstance(value, (torch.Tensor, numbers.Number)) or rules.is_metric(value)):
            raise rules.refuse_value(name, value)
        step, epoch = rules.levels(self.hook, on_step, on_epoch)
        rules.check_name(name, add_dataloader_idx)
        if metric_attribute is None and rules.is_metric(value):
            metric_attribute = rules.metric_attribute(module, name, value)
        return LogSettings(
            step, epoch, prog_bar, logger is not False, rules.reduction(reduce_fx), enable_graph, sync_dist, sync_dist_group,
            add_dataloader_idx, metric_attribute, rank_zero_only,
        )  # fmt: skip

    def _check_new(self, entry: ResultMetric, value: Any) -> None:
        if not entry.settings.add_dataloader_idx and any(
            other.hook == entry.hook and other.name == entry.name and other is not entry for other in self.entries()
        ):
            raise _twice(entry.name, entry.hook)  # from two loaders, whose values would be mixed
        self.has_steps = self.has_steps or entry.settings.on_step
        if isinstance(value, torch.Tensor) and not value.is_floating_point():
            rank_zero_warn(
                f"You called `self.log({entry.name!r}, ...)` in your `{entry.hook}` but the value needs to be floating point to be "
                f"reduced. Converting it to {_wide(torch.get_default_dtype())}; log `{entry.name}.float()` to say so yourself",
                stacklevel=5,
            )

    def add_remote_entry(
        self, hook: str, name: str, loader: int, description: dict[str, Any], module: nn.Module
    ) -> ResultMetric:
        """Add an entry for a value that only other ranks have logged.

        ``loader``: -1 if there is only one.

        Raises MisconfigurationError for a metric that this process does not have.
        """
        table = self.tables.setdefault(hook if loader < 0 else f"{hook}/{loader}", {})
        settings = LogSettings(**description["settings"], sync_group=None)
        entry = table.setdefault(name, ResultMetric(hook, name, settings, self.batch, loader if loader >= 0 else None))
        entry.double = description["double"]
        if settings.metric_attribute is not None:
            entry.metric = find_metric(module, settings.metric_attribute, name)
        return entry

    def clear(self) -> None:
        """Start a new epoch: last values and sums are forgotten, metrics reset; names stay known."""
        for entry in self.entries():
            if entry.metric is not None:
                entry.metric.reset()
            entry.clear()
        self.in_batches = False

    def merge(self, other: ResultCollection) -> None:
        """Merge the entries that another rank has logged."""
        for hook, table in other.tables.items():
            for name, entry in table.items():
                known = self.table(hook).setdefault(name, entry)
                if known is not entry:
                    known.merge(entry)

    def state_dict(self) -> dict[str, Any]:
        return {
            hook: {name: entry.state_dict() for name, entry in table.items()}
            for hook, table in self.tables.items()
            if table
        }

    def load_state_dict(self, state: dict[str, Any], module: nn.Module) -> None:
        """Restore values of an epoch, without those of hooks that a resume within it calls again."""
        for hook, table in state.items():
            for name, saved in table.items() if hook not in _AT_A_RESUME else ():
                settings = LogSettings(**known_fields(LogSettings, saved["settings"], f"logged value {name!r}"))
                entry = ResultMetric(hook, name, settings, self.batch)
                entry.load_state_dict(saved, module)
                self.table(hook)[name] = entry
