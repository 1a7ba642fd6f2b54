"""List, inspect, validate, edit, fork and prune rounds, for ``arclight checkpoint``.

`cli.federate.rounds` (``arclight checkpoint rounds|inspect|validate|edit|fork|prune``) calls these on the folder of a run. Nothing is replaced
before its replacement is complete, and ``dry_run`` changes nothing at all.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight import checkpoint
from arclight.checkpoint import remote
from arclight.checkpoint.manifest import Manifest as CheckpointManifest
from arclight.checkpoint.tree import read_stored
from arclight.federated.coordination.run_database import has_journal, locked
from arclight.federated.errors import FederatedError
from arclight.federated.rounds.history import copy_history, loss_of
from arclight.federated.rounds.store import FOLDER, Rounds, layout_of
from arclight.federated.rounds.writer import TENSOR_ENTRIES

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class RoundSummary:
    """One round of a run, in short."""

    number: int
    path: str
    complete: bool
    problems: tuple[str, ...]
    clock: int | None = None
    """Optimizer steps behind its weights."""
    contributors: int | None = None
    loss: float | None = None
    bytes: int = 0
    created: str = ""
    """ISO 8601, UTC."""


@dataclass(frozen=True, kw_only=True)
class RoundInspection:
    """One round in full; ``rich.print`` shows it as tables."""

    listed: RoundSummary
    checkpoint: checkpoint.Inspection
    run: str
    seed: int
    strategy: str
    settings: dict[str, Any]
    clients: dict[str, dict[str, int]]
    """What each client has contributed so far: rounds, steps, samples, tokens, and its last round."""
    record: dict[str, Any]
    """The round's own entry of the history."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def __rich__(self) -> Table:
        from rich.table import Table

        table = Table(title=f"round {self.listed.number} of {self.run}", show_header=False)
        shown = {
            "path": self.listed.path,
            "weights after": f"{self.listed.clock} optimizer steps",
            "parameters": f"{self.checkpoint.parameters or 0:,}",
            "size": f"{self.checkpoint.bytes / 1e6:,.1f} MB",
            "strategy": self.strategy,
            "seed": str(self.seed),
            "clients so far": str(len(self.clients)),
            "contributors": ", ".join(self.record.get("contributors", [])[:20]) or "none",
            "norm of the mean change": _number(self.record.get("norm")),
            "loss": _number(self.listed.loss),
            "written": self.listed.created,
        }
        for name, value in shown.items():
            table.add_row(name, value)
        return table


@dataclass(frozen=True, kw_only=True)
class EditReport:
    """The changes of an edit, planned or done."""

    path: Path
    changes: dict[str, tuple[Any, Any]]
    """Dotted name to value before and after."""
    backup: Path | None
    """Backup of the unchanged round; None if none was wanted, or nothing was done."""
    done: bool


@dataclass(frozen=True, kw_only=True)
class Edit:
    """Values to set in a round; None leaves them."""

    number: int | None = None
    """The round's own number."""
    clock: int | None = None
    """Optimizer steps behind the weights: schedules go on from there."""
    seed: int | None = None
    client_steps: Mapping[str, int] = field(default_factory=dict)
    """Steps to record for a client as done, by client."""


def list_rounds(run: str | Path) -> list[RoundSummary]:
    """List every round of a run, oldest first. Raises FederatedError if the run has none."""
    rounds = Rounds(run)
    found = [_listed(rounds, number) for number in rounds.numbers()]
    if not found:
        raise FederatedError(
            f"{rounds.run} has no rounds: give the folder of a federated run (it has a folder {FOLDER!r})"
        )
    return found


def inspect_round(run: str | Path, number: int | None = None) -> RoundInspection:
    """Inspect one round, by default the newest complete one.

    Raises FederatedError if it is incomplete.
    """
    rounds = Rounds(run)
    number = _chosen(rounds, number)
    trees = rounds.trees(number)
    listed = _listed(rounds, number)
    return RoundInspection(
        listed=listed,
        checkpoint=checkpoint.inspect(listed.path),
        run=trees["round"]["run"],
        seed=trees["sampler"]["seed"],
        strategy=trees["federation"]["strategy"],
        settings=trees["federation"]["settings"],
        clients=trees["clients"],
        record=_record(trees, number),
    )


def validate(run: str | Path, number: int | None = None) -> dict[int, list[str]]:
    """List all that is wrong with a round, or each round of a run; empty lists for valid ones.

    Every file is read and compared with its SHA-256; state keys, shapes of the strategy's states, and the round's number are checked.
    """
    rounds = Rounds(run)
    numbers = [number] if number is not None else [listed.number for listed in list_rounds(run)]
    return {each: _wrong(rounds, each) for each in numbers}


def edit(run: str | Path, number: int, wanted: Edit, *, dry_run: bool = True, backup: bool = True) -> EditReport:
    """Set values in a round of a run without a journal: of a fork, or of copied rounds.

    The round as it was is kept beside it unless ``backup`` is False. Raises FederatedError for a run with a journal, whose word
    counts (fork the round first), for an unknown client, and for numbers that cannot be.
    """
    rounds = Rounds(run)
    if has_journal(rounds.run):
        raise FederatedError(
            f"{rounds.run} has a journal, which says what its rounds are: fork round {number} into a new run, and edit that one"
        )
    before = rounds.trees(number)
    after, target = copy.deepcopy(before), number
    if wanted.number is not None and wanted.number != number:
        target = _counted("a round", wanted.number)
        if target in rounds.numbers():
            raise FederatedError(
                f"{rounds.run} has a round {target} already: remove it first, or choose another number"
            )
        after["round"]["number"] = target
        after["history"] = [entry for entry in after["history"] if entry["round"] < min(number, target)]
        after["history"].append({**_record(before, number), "round": target})
    if wanted.clock is not None:
        after["round"]["clock"] = _counted("a clock", wanted.clock)
    if wanted.seed is not None:
        after["sampler"]["seed"] = wanted.seed
    for client, steps in wanted.client_steps.items():
        if client not in after["clients"]:
            have = ", ".join(sorted(after["clients"])[:10]) or "none"
            raise FederatedError(f"round {number} of {rounds.run} has no client {client!r}; it has: {have}")
        after["clients"][client]["steps"] = _counted(f"steps of {client}", steps)
    changes = _changes(before, after)
    if dry_run or not changes:
        return EditReport(path=rounds.path(target), changes=changes, backup=None, done=False)
    kept = None
    if backup:
        kept = _free(rounds.path(number))
        _rewrite(rounds, number, kept, before)
    _rewrite(rounds, number, rounds.path(target), after)
    if target != number:
        rounds.remove(number)
    return EditReport(path=rounds.path(target), changes=changes, backup=kept, done=True)


def fork(
    run: str | Path, target: str | Path, number: int | None = None, *, name: str | None = None, dry_run: bool = False
) -> Path:
    """Fork a new run from a round of another, by default the newest complete one.

    Returns the path of the new run's round. A `Server` in the target's folder begins there, with the same or other
    settings: weights, moments, the strategy's states, history and clock are those of the round; a strategy whose states are
    of other kinds starts without. Either may be at an address. Raises FederatedError if the target holds a run already.
    """
    source, new = Rounds(run), Rounds(target)
    number = _chosen(source, number)
    if has_journal(new.run) or new.numbers():
        raise FederatedError(f"{new.run} holds a run already: give the fork a folder of its own")
    trees = source.trees(number)
    trees["round"] = {**trees["round"], "run": name or new.run.name, "forked_from": f"{source.run}, round {number}"}
    if not dry_run:
        copy_history(run, target, number)
        _rewrite(source, number, new.path(number), trees)
    return new.path(number)


def prune(run: str | Path, *, keep: int, dry_run: bool = True) -> list[int]:
    """Remove all rounds but the newest ``keep`` valid ones; return the numbers of those removed.

    What stays has been read in full. Raises ValueError for keeping none, FederatedError while a server has the run open, and
    if no round is valid.
    """
    if keep < 1:
        raise ValueError(f"keep = {keep}: at least the newest round must stay, or the run is lost")
    rounds = Rounds(run)
    numbers = [listed.number for listed in list_rounds(run)]
    stay = set(islice((number for number in reversed(numbers) if not _wrong(rounds, number)), keep))
    if not stay:
        raise FederatedError(
            f"no round of {rounds.run} is sound, and nothing was removed: `arclight checkpoint validate` says what is wrong"
        )
    doomed = [number for number in numbers if number not in stay]
    if doomed and not dry_run:
        with nullcontext() if remote.is_remote(rounds.run) else locked(rounds.run):
            for number in doomed:
                rounds.remove(number)
    return doomed


# -- parts -----------------------------------------------------------------------------------------------------------


def _listed(rounds: Rounds, number: int) -> RoundSummary:
    found = rounds.check_round(number)
    described: CheckpointManifest | None = found.manifest
    if described is None or found.problems:
        return RoundSummary(number=number, path=str(found.path), complete=False, problems=found.problems)
    trees = rounds.trees(number)
    record = _record(trees, number)
    return RoundSummary(
        number=number,
        path=str(found.path),
        complete=True,
        problems=(),
        clock=trees["round"]["clock"],
        contributors=len(record.get("contributors", [])),
        loss=loss_of(record),
        bytes=sum(file.bytes for file in described.files.values()),
        created=described.created,
    )


def _record(trees: Mapping[str, Any], number: int) -> dict[str, Any]:
    return next((dict(entry) for entry in trees["history"] if entry["round"] == number), {})


def _chosen(rounds: Rounds, number: int | None) -> int:
    chosen = rounds.newest() if number is None else number
    if chosen is None:
        raise FederatedError(f"{rounds.run} has no complete round")
    rounds.open(chosen)
    return chosen


def _wrong(rounds: Rounds, number: int) -> list[str]:
    found = rounds.check_round(number)
    if found.manifest is None or found.problems:
        return list(found.problems)
    problems = checkpoint.verify(found.path)
    if problems:
        return problems
    trees, layout = rounds.trees(number), layout_of(found.manifest)
    if trees["round"]["number"] != number:
        problems.append(f"{found.path} says that it is round {trees['round']['number']}")
    model = layout.get("model", {})
    if not model:
        problems.append(f"{found.path} has no weights")
    for entry in ("moments", "server"):
        for name, (_, shape) in layout.get(entry, {}).items():
            parameter = name.partition("/")[2]
            if parameter not in model:
                problems.append(f"{found.path}: {entry} has {name}, but there is no weight {parameter}")
            elif model[parameter][1] != shape:
                problems.append(
                    f"{found.path}: {name} of {entry} is {list(shape)}, its weight {list(model[parameter][1])}"
                )
    return problems


def _rewrite(source: Rounds, number: int, target: Path, trees: dict[str, Any]) -> None:
    """Write a round again, tensor by tensor, with other trees.

    Raises FederatedError if it is damaged.
    """
    from arclight.federated.rounds.writer import RoundWriter

    described = source.open(number)
    layout = layout_of(described)
    with RoundWriter(target, layout) as writer:
        for entry in TENSOR_ENTRIES:
            stored = source.stored(number, entry)
            for name in layout.get(entry, {}):
                writer.add(entry, name, read_stored(stored[name]))
        for file, record in writer.finished().items():
            if record != described.files[file]:
                raise FederatedError(
                    f"{source.path(number) / file} is damaged: its SHA-256 differs; take another round"
                )
        writer.publish(trees)


def _changes(before: Any, after: Any, name: str = "") -> dict[str, tuple[Any, Any]]:
    if isinstance(before, dict) and isinstance(after, dict):
        found: dict[str, tuple[Any, Any]] = {}
        for key in {**before, **after}:
            found |= _changes(before.get(key), after.get(key), f"{name}.{key}" if name else str(key))
        return found
    return {} if before == after else {name: (before, after)}


def _free(path: Path) -> Path:
    """Return a free name beside a round."""
    number = 1
    while (kept := path.parent / f"{path.name}.backup-{number}").exists():
        number += 1
    return kept


def _counted(what: str, value: int) -> int:
    if value < 0:
        raise FederatedError(f"{what} cannot be {value}")
    return value


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"
