"""An epoch's values over all processes: one packed exchange, whatever the number of names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from arclight.fabric.rank_zero import rank_zero_warn
from arclight.trainer.logged import Entry
from arclight.trainer.metrics import numbers

if TYPE_CHECKING:
    from arclight.fabric.strategies import Strategy

Key = tuple[str, str, int]
"""Hook, name and loader (-1 where there is only one)."""


class LoggedNamesDifferError(RuntimeError):
    """Processes logged one name in ways that cannot be put together."""


def reduce_epoch(entries: Iterable[Entry], strategy: Strategy) -> list[Entry]:
    """The ``on_epoch`` entries with new values; the ``result`` of each is set to that over all processes.

    A process that did not log a name adds nothing to it and cannot block the others. A metric computes over processes by
    itself, so it must be logged on all of them. A collective. Raises LoggedNamesDifferError, on every process, naming the key.
    """
    every = list(entries)
    entries = [e for e in every if e.count and e.reduced != e.count]
    epoch = [e for e in entries if e.settings.on_epoch and e.metric is None]
    parts: dict[Key, tuple[str, float, float]] = {}
    summaries = {_key(entry): entry.summary() for entry in epoch}
    if strategy.world_size > 1:
        totals = numbers({str(number): total for number, (total, _) in enumerate(summaries.values())})
        for entry, total in zip(epoch, totals.values(), strict=True):
            parts[_key(entry)] = (entry.settings.reduce, total, summaries[_key(entry)][1])
        synced = [e for e in every if _synced_step(e)]
        metrics = [
            _key(e) for e in entries if e.settings.on_epoch and e.metric is not None and not e.settings.rank_zero_only
        ]
        everyone = strategy.all_gather_object(
            {
                "what": "epoch",
                "values": parts if strategy.counts else {},
                "metrics": metrics,
                "steps": _step_values(synced) if strategy.counts else {},
            }
        )
        _check(everyone, "epoch")
        for entry in epoch:
            summaries[_key(entry)] = _over_ranks(entry, [ranks["values"] for ranks in everyone])
        _take_step_values(synced, everyone)
    for entry in epoch:
        entry.finish(*summaries[_key(entry)])
    for entry in sorted(
        entries, key=_key
    ):  # metrics talk to their like in other processes: in the same order everywhere
        if entry.metric is not None and entry.settings.on_epoch:
            entry.result, entry.reduced = entry.compute_metric(), entry.count
    return [entry for entry in entries if entry.settings.on_epoch]


def reduce_steps(entries: Iterable[Entry], strategy: Strategy) -> None:
    """Put together the newest values that were logged with ``sync_dist`` to be shown at each step; nothing if there are none."""
    synced = [entry for entry in entries if _synced_step(entry)]
    if strategy.world_size > 1 and synced:
        everyone = strategy.all_gather_object(
            {"what": "steps", "steps": _step_values(synced) if strategy.counts else {}}
        )
        _check(everyone, "steps")
        _take_step_values(synced, everyone)


def _key(entry: Entry) -> Key:
    return entry.hook, entry.name, -1 if entry.loader is None else entry.loader


def _synced_step(entry: Entry) -> bool:
    settings = entry.settings
    return settings.on_step and settings.sync_dist and not settings.rank_zero_only and entry.metric is None


def _step_values(entries: Sequence[Entry]) -> dict[Key, tuple[str, float, float]]:
    """The values that have not been put together yet."""
    fresh = [(e, e.last.double()) for e in entries if e.last is not None and e.last is not e.synced]
    values = numbers({str(number): value for number, (_, value) in enumerate(fresh)})
    return {_key(e): (e.settings.reduce, value, 1.0) for (e, _), value in zip(fresh, values.values(), strict=True)}


def _take_step_values(entries: Sequence[Entry], everyone: list[dict[str, Any]]) -> None:
    for entry in entries:
        total, weight = _over_ranks(entry, [ranks["steps"] for ranks in everyone])
        if weight > 0:
            value = total / weight if entry.settings.reduce == "mean" else total
            entry.last = entry.synced = value.to(entry.dtype)


def _over_ranks(entry: Entry, ranks: list[dict[Key, tuple[str, float, float]]]) -> tuple[torch.Tensor, float]:
    """The entry's total and weight, put together from the ranks that it is shared with."""
    if entry.settings.rank_zero_only:
        own = entry.summary()
        return own[0].cpu(), own[1]
    if entry.settings.sync_group is not None:
        members = torch.distributed.get_process_group_ranks(entry.settings.sync_group)
        ranks = [ranks[member] for member in members]
    parts = [part for rank in ranks if (part := rank.get(_key(entry))) is not None and part[2] > 0]
    if not parts:
        return torch.zeros((), dtype=torch.float64), 0.0
    combined = {"max": max, "min": min}.get(entry.settings.reduce, sum)(total for _, total, _ in parts)
    return torch.tensor(combined, dtype=torch.float64), sum(weight for _, _, weight in parts)


def _check(everyone: list[dict[str, Any]], what: str) -> None:
    """Every process sees the same lists, so all of them raise, or none."""
    for number, rank in enumerate(everyone):
        if rank["what"] != what:
            raise LoggedNamesDifferError(
                f"process {number} exchanges {rank['what']} values while others exchange {what} values: values logged with "
                f"sync_dist=True, on_step=True must be logged on every process ({_names(everyone)})"
            )
    unseen = {
        key[1]: number
        for number, rank in enumerate(everyone)
        for key in rank.get("values", {})
        if key not in everyone[0]["values"]
    }
    for name, number in unseen.items():
        rank_zero_warn(
            f"{name!r} is logged on process {number} but not on process 0, whose values are the ones that are shown; log it on all"
        )
    for part in ("values", "steps"):
        seen: dict[Key, tuple[int, str]] = {}
        for number, rank in enumerate(everyone):
            for key, (reduce, _, _) in rank.get(part, {}).items():
                first, other = seen.setdefault(key, (number, reduce))
                if other != reduce:
                    raise LoggedNamesDifferError(
                        f"{key[1]!r} is logged in {key[0]} with reduce_fx={other!r} on process {first} and with {reduce!r} on "
                        f"process {number}; use one of them on all"
                    )
    metrics = [set(rank.get("metrics", ())) for rank in everyone]
    for key in sorted(set().union(*metrics)):
        without = [number for number, keys in enumerate(metrics) if key not in keys]
        if without:
            raise LoggedNamesDifferError(
                f"the metric {key[1]!r} is logged in {key[0]} on some processes and not on {without}; it computes over all of "
                "them, so log it on all, or with rank_zero_only=True"
            )


def _names(everyone: list[dict[str, Any]]) -> str:
    names = {key[1] for rank in everyone for key in rank["steps"]}
    return ", ".join(sorted(names)) or "none"
