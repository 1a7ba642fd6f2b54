"""Reduce logged values over all ranks: in one exchange per epoch, or per row for steps.

`reporting` calls `reduce_epoch` and `reduce_steps` on all ranks, also on one that logged nothing. Each gathers plain numbers from all
ranks and merges them in order of rank; a second exchange describes entries that a rank lacks, and metric objects compute over ranks by
themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from arclight.trainer.logging.metrics import read_scalars
from arclight.trainer.logging.results import ResultCollection, ResultMetric

if TYPE_CHECKING:
    from arclight.fabric.strategies import Strategy

Key = tuple[str, str, int]
"""Hook, name and loader (-1 if there is only one)."""


class LoggedNamesDifferError(RuntimeError):
    """Processes logged one name in ways that cannot be merged."""


def reduce_epoch(values: ResultCollection, strategy: Strategy, module: nn.Module) -> list[ResultMetric]:
    """Reduce the epoch values over all ranks, and return the entries with new ones.

    Their ``result`` is set.

    A process that did not log a name adds nothing to it, cannot block the others, and knows the result as they do. A metric
    computes over processes by itself: a process that did not log it takes part with its own. A collective. Raises
    LoggedNamesDifferError, on every process, naming the key.
    """
    every = list(values.entries())
    entries = [e for e in every if e.count and e.reduced != e.count]
    epoch = [e for e in entries if e.settings.on_epoch and e.metric is None]
    summaries = {_key(entry): entry.summary() for entry in epoch}
    if strategy.world_size > 1:
        synced = [e for e in every if _synced_step(e)]
        metrics = [e for e in entries if e.settings.on_epoch and e.metric is not None and not e.settings.rank_zero_only]
        everyone = strategy.all_gather_object(
            {
                "what": "epoch",
                "values": _parts(epoch, summaries) if strategy.contributes_logs else {},
                "names": [_key(e) for e in epoch if _is_synced(e)],
                "metrics": [_key(entry) for entry in metrics],
                "steps": _step_values(synced) if strategy.contributes_logs else {},
            }
        )
        _check(everyone, "epoch")
        missing = _missing_entries(values, everyone, strategy, [*epoch, *metrics], module)
        entries += missing
        epoch += [entry for entry in missing if entry.metric is None]
        for entry in epoch:
            summaries[_key(entry)] = _over_ranks(entry, [ranks["values"] for ranks in everyone])
        _set_step_values(synced, everyone)
    for entry in epoch:
        entry.finish(*summaries[_key(entry)])
    for entry in sorted(
        entries, key=_key
    ):  # metrics talk to their like in other processes: in the same order everywhere
        if entry.metric is not None and entry.settings.on_epoch:
            entry.result, entry.reduced = entry.compute_metric(), entry.count
    return [entry for entry in entries if entry.settings.on_epoch]


def _parts(
    epoch: list[ResultMetric], summaries: dict[Key, tuple[torch.Tensor, float]]
) -> dict[Key, tuple[str, float, float]]:
    """Return reduction, total and weight of each entry on this rank, read in one transfer."""
    totals = read_scalars({str(number): total for number, (total, _) in enumerate(summaries.values())})
    return {
        _key(entry): (entry.settings.reduce, total, summaries[_key(entry)][1])
        for entry, total in zip(epoch, totals.values(), strict=True)
    }


def _is_synced(entry: ResultMetric) -> bool:
    """Return True if the value of an entry is already that of all processes."""
    return not entry.settings.rank_zero_only and entry.settings.sync_group is None


def _missing_entries(
    values: ResultCollection,
    everyone: list[dict[str, Any]],
    strategy: Strategy,
    own: list[ResultMetric],
    module: nn.Module,
) -> list[ResultMetric]:
    """Add entries for what other ranks have logged and this one has not.

    It may have had no batch.

    A second exchange, of how they are kept and shown, if a process lacks any.
    """
    known: list[set[Key]] = [{*rank["names"], *rank["metrics"]} for rank in everyone]
    wanted = {key for names in known for key in names if not all(key in others for others in known)}
    if not wanted:
        return []
    given = {_key(entry): entry.description() for entry in own if _key(entry) in wanted}
    described: dict[Key, dict[str, Any]] = {}
    for descriptions in strategy.all_gather_object(given):
        described = descriptions | described
    have = known[strategy.global_rank]
    return [values.add_remote_entry(*key, described[key], module) for key in sorted(wanted) if key not in have]


def reduce_steps(entries: Iterable[ResultMetric], strategy: Strategy) -> None:
    """Reduce the newest step values of ``sync_dist`` over all ranks."""
    synced = [entry for entry in entries if _synced_step(entry)]
    if strategy.world_size > 1 and synced:
        everyone = strategy.all_gather_object(
            {"what": "steps", "steps": _step_values(synced) if strategy.contributes_logs else {}}
        )
        _check(everyone, "steps")
        _set_step_values(synced, everyone)


def _key(entry: ResultMetric) -> Key:
    return entry.hook, entry.name, -1 if entry.loader is None else entry.loader


def _synced_step(entry: ResultMetric) -> bool:
    settings = entry.settings
    return settings.on_step and settings.sync_dist and not settings.rank_zero_only and entry.metric is None


def _step_values(entries: Sequence[ResultMetric]) -> dict[Key, tuple[str, float, float]]:
    """Return the values that have not been merged yet."""
    fresh = [(e, e.last.double()) for e in entries if e.last is not None and e.last is not e.synced]
    values = read_scalars({str(number): value for number, (_, value) in enumerate(fresh)})
    return {_key(e): (e.settings.reduce, value, 1.0) for (e, _), value in zip(fresh, values.values(), strict=True)}


def _set_step_values(entries: Sequence[ResultMetric], everyone: list[dict[str, Any]]) -> None:
    for entry in entries:
        total, weight = _over_ranks(entry, [ranks["steps"] for ranks in everyone])
        if weight > 0:
            value = total / weight if entry.settings.reduce == "mean" else total
            entry.last = entry.synced = value.to(entry.dtype)


def _over_ranks(entry: ResultMetric, ranks: list[dict[Key, tuple[str, float, float]]]) -> tuple[torch.Tensor, float]:
    """Return the entry's total and weight, merged from the ranks that it is shared with."""
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
    """Check that all ranks exchange the same values in the same way.

    They all see the same lists, so all of them raise, or none.
    """
    for number, rank in enumerate(everyone):
        if rank["what"] != what:
            raise LoggedNamesDifferError(
                f"process {number} exchanges {rank['what']} values while others exchange {what} values: values logged with "
                f"sync_dist=True, on_step=True must be logged on every process ({_names(everyone)})"
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


def _names(everyone: list[dict[str, Any]]) -> str:
    names = {key[1] for rank in everyone for key in rank["steps"]}
    return ", ".join(sorted(names)) or "none"
