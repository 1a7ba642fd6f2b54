"""Run a federation in a folder: start or resume it, aggregate, evaluate and commit rounds.

`Server.opened` makes a `ServerRun`, whose ``service`` a transport then serves. In: settings, initial weights, a folder; out: a run folder that
a later process resumes: ``run.db`` (journal and history), ``identity``, ``rounds/<number>/``, ``blobs/``, ``chains/``, with secure sums
``secure.json``, and ``metrics.csv`` once the run was closed. The journal decides what has happened.

A resumed run must find what an earlier version wrote: files, folders and the entries of ``_trees`` may be added, not renamed.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from arclight.checkpoint.errors import CheckpointError
from arclight.checkpoint.tensorfile import DTYPES
from arclight.fabric.atomic_replace import DISK_FULL, replace_text
from arclight.federated.aggregation.fold import Fold
from arclight.federated.aggregation.statistics import Statistics
from arclight.federated.aggregation.strategy_step import plain
from arclight.federated.blobs.folder import FolderStore
from arclight.federated.blobs.object_store import MirroredStore
from arclight.federated.coordination import events
from arclight.federated.coordination import records as r
from arclight.federated.coordination.coordinator import Coordinator
from arclight.federated.coordination.run_database import Injection, RunDatabase, UnavailableError
from arclight.federated.disk_full import DISK_RETRY_INTERVAL_S, T, retry_while_disk_full
from arclight.federated.errors import OBSERVED, BlobError, FederatedError, RefusedError
from arclight.federated.masks.transfer_mask import MODEL, ServerMasks, TransferMask
from arclight.federated.privacy import noise, robust
from arclight.federated.privacy.secure_aggregation import Unmasking
from arclight.federated.rounds.history import History, add_contributions, export_metrics
from arclight.federated.rounds.store import Rounds
from arclight.federated.rounds.writer import MODULE_ENTRIES
from arclight.federated.server.published_weights import ORPHAN_S, PublishedWeights, Weights, manifest_of
from arclight.federated.server.runtime import Runtime, ServerTask
from arclight.federated.server.secure_sums import SecureFold, SecureSumRelay, most_clients
from arclight.federated.server.server_step import AcceptedUpdate, ServerStep, repeat_round, write_first_round
from arclight.federated.server.service import Service, UploadQuota
from arclight.federated.server.validation import ValidUpdate
from arclight.federated.settings import Federation

log = logging.getLogger(__name__)

Measurement = tuple[int, dict[str, float]]
"""Samples, and metrics over them."""
Evaluation = Callable[[int, Mapping[str, torch.Tensor]], Measurement]
"""Evaluate the weights of a round, by parameter name."""


@dataclass(frozen=True, kw_only=True)
class InitialState:
    """The weights that a run starts from."""

    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Weights by parameter name."""
    moments: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """``exp_avg/<parameter name>``."""
    clock: int = 0
    """Optimizer steps behind them."""
    module: Mapping[str, Any] = field(default_factory=dict)
    """Entries about the module that every round carries; see `MODULE_ENTRIES` in `rounds.writer`."""


class ServerRun:
    """Open run, served as a context.

    Raises FederatedError if this run cannot go on with what the folder holds.
    """

    def __init__(
        self,
        folder: Path,
        federation: Federation,
        clients: Sequence[str] | int,
        *,
        name: str,
        seed: int,
        start: Callable[[], InitialState],
        evaluate: Evaluation | None = None,
        recipe: dict[str, Any] | None = None,
        observer: Callable[[events.Command | r.Record], None] = lambda what: None,
        inject: Injection | None = None,
    ) -> None:
        self.folder, self.federation, self.seed, self.name = folder, federation, seed, name
        self._start, self._evaluate, self._observer, self._inject, self._recipe = (
            start,
            evaluate,
            observer,
            inject,
            recipe,
        )
        self.rounds = Rounds(folder)
        at = federation.blobs_at
        self.blobs = (
            MirroredStore(folder / "blobs", at)
            if at
            else FolderStore(folder / "blobs", durable="all" if federation.secure else "made")
        )
        self.weights = PublishedWeights(folder, self.rounds, self.blobs, federation)
        self.coordinator = Coordinator(federation, clients, seed, name)
        self._masks = ServerMasks(federation, seed, self.coordinator.roster.index)
        self._quota = UploadQuota(self.blobs)
        self._validated: dict[str, ValidUpdate] = {}
        self._check_count(len(self.coordinator.roster))
        self._server_step = ServerStep(
            rounds=self.rounds,
            store=self.blobs,
            strategy=federation.strategy,
            form=federation.send,
            fold_maker=self._fold_maker(),
            is_stack=TransferMask(masks=federation.masks).is_stack,
        )
        self._budget = noise.privacy_budget(federation, len(self.coordinator.roster))
        self._spent = noise.Ledger()
        self._progress: dict[str, Any] = {}
        self._since: dict[tuple[str, int], float] = {}
        self._began, self._resumed = time.monotonic(), False

    def _check_count(self, named: int) -> None:
        """Check settings that are made for a number of clients: a secure sum of more would overflow."""
        federation = self.federation
        made_for = next((what for what in (federation.secure, federation.robust) if what is not None), None)
        if made_for is not None and named != federation.clients:
            raise FederatedError(
                f"federation.clients is {federation.clients}, and {named} clients are named: {type(made_for).__name__} is made for "
                f"that number; set federation.clients = {named}, or name {federation.clients}"
            )

    def _fold_maker(self) -> Callable[..., Fold]:
        federation = self.federation
        if federation.secure is not None:
            held = (
                partial(noise.clamp_variance, former=self._former)
                if federation.noise is not None
                else lambda key, mean: mean
            )
            return partial(SecureFold, federation.secure, most_clients(federation), self._unmasking, held)
        return (
            robust.fold_maker(federation.robust)
            if federation.noise is None
            else noise.noisy_fold(federation.noise, former=self._former)
        )

    def _former(self, key: str) -> torch.Tensor:
        """Read a weight of the newest round."""
        kind, _, name = key.partition("/")
        return plain(self.rounds.stored(self.coordinator.state.committed, kind)[name])

    def _unmasking(self, here: Sequence[str]) -> Unmasking:
        assert self._relay is not None
        return self._relay.open(self._round, here)

    def __enter__(self) -> ServerRun:
        if self._budget is not None and not self.rounds.numbers():  # refused before anything is written
            self._budget.check(self.federation.rounds)
        self._database = RunDatabase.open(self.folder, inject=self._inject)
        self.history = History(self._database)
        try:
            identity = self._patiently(self._identity)
            self.runtime = Runtime(
                self.coordinator, self._database, self._execute,
                on_record=self._on_record, on_command=self._on_command, after=self._clean_up,
            )  # fmt: skip
            self._relay = None
            if (secure := self.federation.secure) is not None:
                self._relay = SecureSumRelay(secure, identity, self.folder / "secure.json", self.runtime.expected)
            self.service = Service(
                self.federation, identity, runtime=self.runtime, blobs=self.blobs, weights=self.weights, masks=self._masks,
                quota=self._quota, history=self.history, validated=self._validated, relay=self._relay, recipe=self._recipe,
            )  # fmt: skip
            first = self._first()
            if self._budget is not None:
                done = first.round if isinstance(first, events.RunStarted) else self.coordinator.state.committed
                self._budget.check(self.federation.rounds - done, self._spent)
            self._shorten()
            self.runtime.start(first)
            self._began = time.monotonic()
        except BaseException:
            self._database.close()
            raise
        return self

    def _identity(self) -> str:
        """Return the unique identity of the run, which nodes keep their state by.

        Runs of one name have different identities.
        """
        path = self.folder / "identity"
        if not path.exists():
            replace_text(path, f"{self.name}-{secrets.token_hex(4)}")
        return path.read_text(encoding="utf-8")

    def _patiently(self, do: Callable[[], T]) -> T:
        """Wait while the disk is full, also before the first round."""

        def pause() -> bool:
            time.sleep(DISK_RETRY_INTERVAL_S)
            return False

        return retry_while_disk_full(do, f"the beginning of run {self.name}", pause)

    def __exit__(self, *_: object) -> None:
        try:
            if self._relay is not None:
                self._relay.close()
            self.runtime.close()
            if not self._database.closed:
                self._write_history()
                export_metrics(self.folder)
        finally:
            self._database.close()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the run is over, or for some time.

        Raises its error, FederatedError if it could not go on.
        """
        self.runtime.wait(seconds)
        if self.runtime.ended is not None and self.runtime.ended.failed:
            raise FederatedError(f"run {self.name} could not continue: {self.runtime.ended.why}")

    def wait_for_nodes(self) -> None:
        """Wait until the run is over and nodes have been notified of its end."""
        try:
            self.wait()
        finally:
            if self.runtime.ended is not None:
                self.notify_nodes()

    def notify_nodes(self, seconds: float = 7.0) -> None:
        """Wait so that every node can request work and learn that the run is over.

        After a restart also to nodes that are not back yet: a node that found no server tries again within 5 s.
        """
        roster, cluster = self.coordinator.roster, self.coordinator.cluster

        def are_back() -> bool:
            return all(cluster.has_joined(roster.name(place)) for place in range(len(roster)))

        if self._resumed:
            self.runtime.until(are_back, seconds - (time.monotonic() - self._began))

        def here() -> list[str]:
            return sorted(node.name for node in cluster.sessions.values() if node.lost is None)

        if not self.runtime.until(lambda: not here(), seconds):
            log.warning(
                "nodes that have not heard in %g s that run %s is over: %s", seconds, self.name, ", ".join(here())
            )

    # -- beginning and going on ----------------------------------------------------------------------------------------

    def _first(self) -> events.Event:
        """Restore the run from its journal, or write the weights that it starts from."""
        state = self.coordinator.state
        if not recover(self._database, self.coordinator, self.history, partial(has_blobs, self.blobs)):
            return self._patiently(self._begin)
        committed = state.committed
        for number, base in state.bases.items():
            found = self.rounds.check_round(number)
            if found.problems and number == committed:
                raise FederatedError(
                    f"{found.problems[0]}: the run cannot continue from round {committed}, which its journal says is committed; "
                    "put the folder back, or fork a new run from an earlier round (arclight checkpoint fork)"
                )
            if not found.problems:
                self._check_masks(self._patiently(partial(self.weights.restore, number, base)))
        try:
            trees = self.rounds.trees(committed)
        except CheckpointError as error:
            raise FederatedError(f"the run cannot continue from round {committed}: {error}") from error
        self._continue_from(trees, committed)
        log.info("run %s resumes after round %d", self.name, committed)
        self._resumed = True
        return events.RunResumed()

    def _begin(self) -> events.Event:
        number = self.rounds.newest(verify=True)
        if number is None:
            start = self._start()
            if not start.weights:
                raise FederatedError(
                    "a federated run begins with weights: give it a module, its weights, or a checkpoint"
                )
            self._check_start(start.weights)
            self._carry(start.module, 0)
            write_first_round(
                self.rounds, 0, start.weights, start.moments, self._trees(0, start.clock, {}, {}, {}, self._spent)
            )
            number = 0
        elif len(numbers := self.rounds.numbers()) > 1:
            log.warning(
                "%s has none of the %d rounds in %s: the run continues from round %d as a fork does, without the updates received "
                "since; if the database was copied without its log (run.db-wal), stop, and copy both",
                self._database.path, len(numbers), self.folder, number,
            )  # fmt: skip
        trees = self.rounds.trees(number)  # a fork, or a run that was killed before its first line
        self.history.load(number, number - 1)
        self._continue_from(trees, number)
        base = self._check_masks(self.weights.publish(number)).manifest.digest
        clock = int(trees["round"]["clock"])
        return events.RunStarted(base=base, checkpoint=str(self.rounds.path(number)), round=number, clock=clock)

    def _continue_from(self, trees: Mapping[str, Any], number: int) -> None:
        self.history.add_missing(trees["history"])
        self._progress = trees["clients"]
        self._carry(trees, number)

    def _carry(self, trees: Mapping[str, Any], number: int) -> None:
        """Restore the module's entries and the privacy budget spent from a checkpoint's trees."""
        self._module = {name: trees[name] for name in MODULE_ENTRIES if name in trees}
        self._spent = noise.spent_before(trees, number)
        if self._spent and "privacy" not in trees:
            log.warning(
                "round %d does not say what its noise was, having been written by an older version: epsilon is counted as if "
                "its %d rounds had had the least noise that their settings allow", number, number
            )  # fmt: skip

    # -- work ----------------------------------------------------------------------------------------------------------

    def _check_start(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Check initial weights before they are written.

        A later start goes on from what is in the folder, whatever it is given.
        Raises SettingsError if the masks do not fit, FederatedError for values that are NaN or infinite and that clients send.
        """
        mask = self._masks.whole_of({name: tensor.shape for name, tensor in weights.items()})
        for name, tensor in weights.items():
            # float8 has no isfinite
            value = tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor
            if mask.sends(MODEL + name) and not torch.isfinite(value).all():
                raise FederatedError(
                    f"{name} of the initial weights has values that are NaN or infinite: begin from others, or keep it from being sent "
                    "(federation.masks)"
                )

    def _check_masks(self, weights: Weights) -> Weights:
        """Check that the masks fit the weights; return the weights.

        Raises SettingsError if they do not; warns of experts that nobody trains.
        """
        clients = len(self.coordinator.roster)
        for what, (unassigned, count) in self._masks.unassigned(weights.own, clients).items():
            log.warning(
                "%d of %d experts%s are trained by no client (%s): masks.%s.per_client x %d clients leaves them out; raise per_client, "
                'or set assign = "random"',
                len(unassigned), count, " of each head" if what == "head_experts" else "", ", ".join(map(str, unassigned)), what, clients,
            )  # fmt: skip
        return weights

    def _execute(self, task: ServerTask) -> events.Event:
        return self._aggregate(task) if isinstance(task, events.Aggregate) else self._measure(task)

    def _aggregate(self, fold: events.Aggregate) -> events.Event:
        """Aggregate a closed round; report a failure, so that the round is retried.

        A full disk is raised.
        """
        try:
            return self._step(fold)
        except Exception as error:
            if isinstance(error, OSError) and error.errno in DISK_FULL:
                raise
            if not isinstance(error, FederatedError | CheckpointError | OSError):
                log.exception("round %d could not be folded", fold.round)
            for update in fold.updates:
                self._validated.pop(update.digest, None)  # it may be wrong, and is found again
            remove_damaged(self.blobs, fold.updates)
            clients = error.clients if isinstance(error, RefusedError) else ()
            why = (
                str(error)
                if isinstance(error, FederatedError | CheckpointError)
                else f"{type(error).__name__}: {error}"
            )
            return events.AggregationFailed(round=fold.round, why=why, clients=clients)

    def _step(self, fold: events.Aggregate) -> events.Event:
        began, history = time.monotonic(), self.history
        before, self._round = self.coordinator.state.committed, fold.round
        given = []
        for update in fold.updates:
            validated = self._validated.get(update.digest)
            given.append(
                AcceptedUpdate(
                    client=update.client,
                    manifest=manifest_of(self.blobs, update.digest),
                    weight=float(
                        {"samples": update.samples, "tokens": update.tokens, "equal": 1}[self.federation.weigh_by]
                    ),
                    staleness_discount=1 / math.sqrt(1 + update.staleness),
                    samples=update.samples,
                    largest=None if validated is None else validated.largest,
                    norm=update.norm,
                )
            )

        spent = self._spent_with(fold, given)
        if self._budget is not None and (why := self._budget.exceeded(spent)) is not None:
            return events.StopRequested(why=f"round {fold.round} is not made: {why}")

        def trees(statistics: Statistics, counts: dict[str, int]) -> dict[str, Any]:
            here = history.at(fold.round)
            if given:
                here.norm, here.drift, here.noise_scale = statistics.norm, statistics.cosines, statistics.noise_scale
            here.contributors, here.clock = [one.client for one in given], fold.clock
            if self._budget is not None:
                here.epsilon = spent.epsilon(self._budget.noise.delta)
            history.record_duration(fold.round, "fold", time.monotonic() - began)
            updates = {update.client: update.digest for update in fold.updates}
            return self._trees(fold.round, fold.clock, updates, counts, progress, spent)

        progress = add_contributions(self._progress, fold.round, fold.updates)
        if given:
            stepped = self._server_step.step(fold.round, before, given, trees)
        else:
            stepped = repeat_round(self.rounds, fold.round, before, trees)
        history.record_duration(fold.round, "fold", time.monotonic() - began)
        base = self.weights.publish(fold.round, all_changed=stepped.all_changed).manifest.digest
        self._progress, self._spent = progress, spent  # last: what fails before is folded again, and counts once
        return events.RoundStored(
            round=fold.round,
            base=base,
            checkpoint=str(stepped.written.path),
            norm=stepped.statistics.norm,
            drift=stepped.statistics.cosines,
        )

    def _spent_with(self, fold: events.Aggregate, given: Sequence[AcceptedUpdate]) -> noise.Ledger:
        """Return the privacy budget spent with this round, by its actual updates."""
        if self._budget is None or not given:  # a round that is skipped publishes nothing
            return self._spent
        multiplier, clients = self._budget.noise.multiplier, {update.client for update in fold.updates}
        if self._budget.noise.by == "clients":
            parts = Counter(
                key for one in given for key, entry in one.manifest.tensors.items()
                if self.federation.secure is not None or DTYPES[entry.dtype].is_floating_point
            )  # fmt: skip
            least = self.coordinator.state.open[fold.round].least or noise.expected_updates(self.federation)
            multiplier *= math.sqrt(min(parts.values(), default=len(given)) / least)
        drawn = set(self.coordinator.sampler.draw(fold.round)) == clients
        one = self._budget.release(multiplier, len(clients), all_drawn=drawn)
        return self._spent.after(one)

    def _measure(self, work: events.EvaluateOnServer) -> events.Event:
        if self._evaluate is None:
            return events.ServerEvaluated(round=work.round)
        began = time.monotonic()
        samples, metrics = self._evaluate(work.round, self.rounds.tensors(work.round, "model"))
        self.history.record_duration(work.round, "evaluate", time.monotonic() - began)
        return events.ServerEvaluated(round=work.round, samples=samples, metrics=metrics)

    def _trees(
        self,
        number: int,
        clock: int,
        updates: dict[str, str],
        counts: dict[str, int],
        progress: dict[str, Any],
        spent: noise.Ledger,
    ) -> dict[str, Any]:
        return {
            **self._module,
            **({"privacy": spent.to_table()} if spent or self._budget is not None else {}),
            "round": {"number": number, "clock": clock, "run": self.name, "updates": updates, "counts": counts},
            "federation": {"settings": asdict(self.federation), "strategy": type(self.federation.strategy).__name__},
            "clients": progress,
            "sampler": {"seed": self.seed, "clients": len(self.coordinator.roster)},
            "history": [self.history.to_json(number)],
        }

    # -- after a commit ------------------------------------------------------------------------------------------------

    def _clean_up(self, task: ServerTask) -> None:
        """Delete what no round references, and write the history; a full disk is no reason to stop."""
        try:
            if isinstance(task, events.Aggregate):
                self._prune(task)
            self._write_history()
            self._shorten()
        except (OSError, UnavailableError) as error:
            if isinstance(error, OSError) and error.errno not in DISK_FULL:
                raise
            log.warning("the history is not up to date, or the journal stays long: %s", error)

    def _prune(self, fold: events.Aggregate) -> None:
        done = [update.digest for update in fold.updates]
        for digest in done:
            self._validated.pop(digest, None)
        coming = self._quota.kept(ORPHAN_S)  # first: what is uploaded from here on is kept
        self.weights.collect_garbage(self.runtime.bases(), done, self.runtime.spooled(), coming, self._quota.remove)

    def _shorten(self) -> None:
        """Shorten a long journal; only the history still has what is removed."""
        self.runtime.save(lambda state: self.history.write(state.state.oldest, state))

    def _write_history(self) -> None:
        self.history.write(self.runtime.oldest())

    # -- history and logs ----------------------------------------------------------------------------------------------

    def _on_record(self, record: r.Record) -> None:
        now, history = time.monotonic(), self.history
        match record:
            case r.RoundOpened():
                self._since.setdefault(("round", record.round), now)
            case r.RoundClosed():
                history.record_duration(record.round, "waiting", now - self._since.get(("round", record.round), now))
            case r.RoundCommitted():
                began = self._since.pop(("round", record.round), None)
                if began is not None:
                    history.record_duration(record.round, "round", now - began)
            case _:
                pass
        history.note(record)
        self._observer(record)

    def _on_command(self, command: events.Command) -> None:
        match command:
            case events.LogMessage():
                log.info("%s", command.text)
            case events.NodeLost() | events.ClientMoved() | events.ClientNotEvaluated():
                log.warning("%s", command, extra=OBSERVED)
            case events.RunOver():
                level = logging.ERROR if command.failed else logging.INFO
                log.log(level, "run %s is over: %s", self.name, command.why, extra=OBSERVED)
            case _:
                return
        self._observer(command)


def recover(
    database: RunDatabase, coordinator: Coordinator, history: History, is_here: Callable[[r.UpdateAccepted], bool]
) -> bool:
    """Restore the state and its history from the journal; False if nothing was committed.

    is_here: tells if an accepted update is on disk. It was not synced: a power failure loses it, and it is asked for again.
    """
    records = database.records()
    coordinator.replay(records)
    state = coordinator.state
    if state.committed < 0:
        return False
    lost = _lost(coordinator, is_here)
    database.append(lost)
    coordinator.replay(lost)
    history.load(state.oldest, state.opened)
    for record in (*records, *lost):
        history.note(record)
    return True


def has_blobs(blobs: FolderStore, update: r.UpdateAccepted) -> bool:
    """Return True if an update's manifest and blobs are here.

    Blobs of another size are deleted, to be uploaded again. Those that a power failure has damaged without changing
    their size were deleted when the folder was opened.
    """
    try:
        needed = manifest_of(blobs, update.digest).blobs
    except (FederatedError, OSError):
        blobs.remove(update.digest)
        return False
    wrong = [blob for blob, size in needed.items() if blobs.size(blob) != size]
    for blob in wrong:
        blobs.remove(blob)
    return not wrong


def remove_damaged(blobs: FolderStore, updates: Iterable[r.UpdateAccepted]) -> None:
    """Verify the blobs of updates that could not be aggregated, and delete damaged ones."""
    for update in updates:
        for digest in (update.digest, *_needed(blobs, update)):
            try:
                if blobs.size(digest) is not None:
                    blobs.check(digest)
            except (BlobError, OSError) as error:
                log.error("update of %s for round %d: %s", update.client, update.round, error)


def _needed(blobs: FolderStore, update: r.UpdateAccepted) -> Collection[str]:
    """Return digests of an update's blobs; none if its manifest is not here as a whole."""
    try:
        return manifest_of(blobs, update.digest).blobs
    except (FederatedError, OSError):
        return ()


def _lost(coordinator: Coordinator, is_here: Callable[[r.UpdateAccepted], bool]) -> list[r.Record]:
    found: list[r.Record] = []
    for open in coordinator.state.open.values():
        gone = tuple(client for client, update in open.accepted.items() if not is_here(update))
        if gone:
            log.warning("updates of round %d are gone, and asked for again: %s", open.round, ", ".join(gone))
            found += coordinator.lost(open.round, gone)
    return found
