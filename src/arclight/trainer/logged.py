"""Logged values: kept on their device, reduced in batches, read back only when somebody looks.

``Module.log`` appends a detached reference; nothing here waits for a device until the logging interval,
the end of an epoch or a display asks. Epoch means are sums of value times weight (weight = samples) in
float64, so that every sample counts once whatever the batch sizes and the number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from arclight.fabric.batches import batch_size_of

if TYPE_CHECKING:
    from arclight.fabric.strategies import Strategy

FLUSH = 256
"""Pending values per name before they are folded into one sum; fixed, so that sums never depend on when they were read."""

_ON_STEP_DEFAULT = {
    "training_step",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
}
_NO_LOGGING = {
    "predict_step",
    "setup",
    "teardown",
    "configure_optimizers",
    "on_fit_start",
    "on_fit_end",
    "on_train_end",
    "on_validation_end",
    "on_test_end",
}

Value = torch.Tensor | float | int


class Entry:
    """All values logged under one name from one hook."""

    __slots__ = (
        "batch",
        "last",
        "logger",
        "metric",
        "name",
        "on_epoch",
        "on_step",
        "pending",
        "prog_bar",
        "rank_zero_only",
        "reduce",
        "total",
        "weight",
        "weights",
    )

    def __init__(
        self,
        name: str,
        batch: Batch,
        *,
        on_step: bool,
        on_epoch: bool,
        prog_bar: bool,
        logger: bool,
        reduce: str | Callable[..., Any],
        rank_zero_only: bool,
    ) -> None:
        self.name, self.batch = name, batch
        self.on_step, self.on_epoch, self.prog_bar, self.logger, self.reduce = (
            on_step,
            on_epoch,
            prog_bar,
            logger,
            reduce,
        )
        self.rank_zero_only = rank_zero_only
        self.metric: Any = None
        self.clear()

    def clear(self) -> None:
        """Forget the epoch's values."""
        self.last: torch.Tensor | None = None
        self.pending: list[torch.Tensor] = []
        self.weights: list[float] = []
        self.total: torch.Tensor | None = None
        self.weight = 0.0

    @property
    def step_name(self) -> str:
        return f"{self.name}_step" if self.on_epoch else self.name

    @property
    def epoch_name(self) -> str:
        return f"{self.name}_epoch" if self.on_step else self.name

    def add(self, value: Any, batch_size: int | None) -> None:
        """Append a scalar. A value that is no result of a computation may change in place later, so it is copied."""
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise ValueError(
                    f"log({self.name!r}, ...): need a single number, got a tensor of shape {tuple(value.shape)}; reduce it first"
                )
            value = value.detach() if value.requires_grad and not value.is_leaf else value.detach().clone()
            if value.ndim:
                value = value.reshape(())
        elif isinstance(value, (int, float)):
            value = torch.tensor(float(value))
        else:
            self._add_metric(value)
            return
        self.last = value
        if self.on_epoch:
            self.pending.append(value)
            self.weights.append(self.batch.known_size or self.batch.size() if batch_size is None else batch_size)
            if len(self.pending) == FLUSH and isinstance(self.reduce, str):
                self._fold()  # a user's own reduction sees all values at once

    def _add_metric(self, value: Any) -> None:
        if not (hasattr(value, "compute") and hasattr(value, "reset")):
            raise TypeError(
                f"log({self.name!r}, ...): need a number, a one-element tensor or a metric with compute() and reset(), got {type(value).__name__}"
            )
        self.metric = value
        if self.on_step:
            self.last = torch.as_tensor(
                getattr(value, "_forward_cache", None)
                if getattr(value, "_forward_cache", None) is not None
                else value.compute()
            ).detach()

    def _fold(self) -> None:
        total, weight = self._reduced(self.total, self.weight)
        self.total, self.weight, self.pending, self.weights = total, weight, [], []

    def _stacked(self) -> torch.Tensor:
        device = self.pending[-1].device  # plain numbers and resumed values lie on the host
        return torch.stack([value.to(device) for value in self.pending])

    def _reduced(self, total: torch.Tensor | None, weight: float) -> tuple[torch.Tensor | None, float]:
        """Total and weight with the pending values folded in; nothing is changed."""
        if not self.pending:
            return total, weight
        values = self._stacked().double()
        if self.reduce == "mean":
            folded = (values * torch.tensor(self.weights, dtype=torch.float64, device=values.device)).sum()
        elif self.reduce in ("sum", "min", "max"):
            folded = getattr(values, str(self.reduce))()
        else:
            folded = torch.as_tensor(self.reduce(values)).double()  # type: ignore[operator]
        if total is not None:
            folded = total + folded if self.reduce in ("mean", "sum") else _COMBINE[str(self.reduce)](total, folded)
        return folded, weight + sum(self.weights)

    def summary(self) -> tuple[torch.Tensor, float]:
        """``(total, weight)`` of the epoch so far on this rank; weight 0 where nothing was logged."""
        total, weight = self._reduced(self.total, self.weight)
        return (torch.zeros((), dtype=torch.float64), 0.0) if total is None else (total, weight)

    def state_dict(self) -> dict[str, Any]:
        return {
            "total": self.total, "weight": self.weight, "last": self.last, "weights": list(self.weights),
            "pending": self._stacked() if self.pending else None,
            "settings": [self.on_step, self.on_epoch, self.prog_bar, self.logger, self.reduce if isinstance(self.reduce, str) else None, self.rank_zero_only],
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.weight, self.last, self.weights = (
            state["total"],
            state["weight"],
            state["last"],
            list(state["weights"]),
        )
        self.pending = list(state["pending"].unbind()) if state["pending"] is not None else []


_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"max": torch.maximum, "min": torch.minimum}


class Batch:
    """The batch under way, whose size is counted only if a logged value needs it."""

    __slots__ = ("known_size", "value")

    def __init__(self) -> None:
        self.value: Any = None
        self.known_size: int | None = None

    def set(self, value: Any) -> None:
        self.value, self.known_size = value, None

    def size(self) -> int:
        if self.known_size is None:
            self.known_size = batch_size_of(self.value)
        return self.known_size


class LoggedValues:
    """Everything logged in one stage (training, validation, test) since its epoch began."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.batch = Batch()
        self.tables: dict[str, dict[str, Entry]] = {}
        self.hook = ""
        self.loader_suffix = ""

    def table(self, hook: str) -> dict[str, Entry]:
        """The entries of ``hook``, by the name given to ``log``."""
        if hook not in self.tables:
            self.tables[hook] = {}
        return self.tables[hook]

    def entries(self) -> Iterable[Entry]:
        for table in self.tables.values():
            yield from table.values()

    def new_entry(
        self, hook: str, name: str, *, prog_bar: bool, logger: bool | None, on_step: bool | None, on_epoch: bool | None,
        reduce_fx: str | Callable[..., Any], add_dataloader_idx: bool, rank_zero_only: bool,
    ) -> Entry:  # fmt: skip
        """An entry for ``name`` with the hook's defaults filled in. Raises ValueError where logging is not possible."""
        if hook in _NO_LOGGING:
            raise ValueError(
                f"log({name!r}, ...) cannot be called in {hook}: nothing logged there would be seen; log it in a step or an epoch-end hook"
            )
        per_step = hook in _ON_STEP_DEFAULT
        on_step = per_step if on_step is None else on_step
        on_epoch = (not per_step) if on_epoch is None else on_epoch
        if on_step and not per_step and hook.endswith(("epoch_start", "epoch_end")):
            raise ValueError(f"log({name!r}, on_step=True) in {hook}: it runs once per epoch; use on_epoch=True")
        if isinstance(reduce_fx, str) and reduce_fx not in ("mean", "sum", "min", "max"):
            raise ValueError(f"log({name!r}, reduce_fx={reduce_fx!r}): choose mean, sum, min, max or a function")
        shown = name + (self.loader_suffix if add_dataloader_idx else "")
        return Entry(
            shown,
            self.batch,
            on_step=on_step,
            on_epoch=on_epoch,
            prog_bar=prog_bar,
            logger=logger is not False,
            reduce=reduce_fx,
            rank_zero_only=rank_zero_only,
        )

    def clear(self) -> None:
        """Start a new epoch: last values and sums are forgotten, names stay known."""
        for entry in self.entries():
            entry.clear()

    # -- reading ---------------------------------------------------------------------------------------------------

    def last(self, wanted: Callable[[Entry], bool]) -> dict[str, float]:
        """The newest value of each wanted entry under its step name, in one transfer from each device."""
        entries = [e for e in self.entries() if e.last is not None and wanted(e)]
        by_device: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
        for entry in entries:
            if entry.last is not None:
                by_device.setdefault(entry.last.device, []).append((entry.step_name, entry.last.float()))
        values: dict[str, float] = {}
        for items in by_device.values():
            values |= zip([name for name, _ in items], torch.stack([value for _, value in items]).tolist(), strict=True)
        return {entry.step_name: values[entry.step_name] for entry in entries}

    def epoch(self, strategy: Strategy) -> list[tuple[Entry, torch.Tensor]]:
        """Each ``on_epoch`` entry with its value over all ranks: one packed reduction, whatever the number of names."""
        entries = [e for e in self.entries() if e.on_epoch and e.metric is None]
        results = _reduce_over_ranks(entries, strategy)
        for entry in self.entries():
            if entry.metric is not None and entry.on_epoch:
                results.append((entry, torch.as_tensor(entry.metric.compute()).detach()))
                entry.metric.reset()
        return results

    def state_dict(self) -> dict[str, Any]:
        return {
            hook: {name: entry.state_dict() for name, entry in table.items()}
            for hook, table in self.tables.items()
            if table
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for hook, table in state.items():
            for name, saved in table.items():
                on_step, on_epoch, prog_bar, logger, reduce, rank_zero_only = saved["settings"]
                if reduce is None:
                    continue  # a user's own reduction is a function: its epoch starts afresh
                entry = Entry(
                    name,
                    self.batch,
                    on_step=on_step,
                    on_epoch=on_epoch,
                    prog_bar=prog_bar,
                    logger=logger,
                    reduce=reduce,
                    rank_zero_only=rank_zero_only,
                )
                entry.load_state_dict(saved)
                self.table(hook)[name] = entry


def _reduce_over_ranks(entries: list[Entry], strategy: Strategy) -> list[tuple[Entry, torch.Tensor]]:
    """Each entry's value; a rank that did not log a name adds nothing to it, and cannot block the others."""
    summaries = [(entry, *entry.summary()) for entry in entries]
    if strategy.world_size > 1:
        local = {
            (e.name, e.reduce if isinstance(e.reduce, str) else "mean"): (float(t), w)
            for e, t, w in summaries
            if not e.rank_zero_only
        }
        everyone = strategy.all_gather_object(local)
        merged = [
            (
                e,
                *_merge(
                    [ranks[key] for ranks in everyone if (key := (e.name, e.reduce)) in ranks], str(e.reduce), (t, w)
                ),
            )
            for e, t, w in summaries
        ]
        summaries = [(e, torch.as_tensor(t, dtype=torch.float64), w) for e, t, w in merged]
    return [(e, (t / w if e.reduce == "mean" else t).float()) for e, t, w in summaries if w > 0]


def _merge(
    parts: list[tuple[float, float]], reduce: str, own: tuple[torch.Tensor, float]
) -> tuple[float | torch.Tensor, float]:
    parts = [part for part in parts if part[1] > 0]
    if not parts:
        return own
    totals = [total for total, _ in parts]
    combined = {"max": max, "min": min}.get(reduce, sum)(totals)
    return combined, sum(weight for _, weight in parts)
