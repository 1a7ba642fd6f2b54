"""What nodes talk to: messages become events, plans become orders with manifests, updates are checked before they count."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from arclight.federated.blobs.folder import FolderStore
from arclight.federated.codecs.encoding import LazyTensors
from arclight.federated.codecs.settings import to_table
from arclight.federated.coordination import events
from arclight.federated.errors import LinkError, ProtocolError, Reason, RefusedError, SessionError
from arclight.federated.masks.transfer_mask import ServerMasks
from arclight.federated.privacy import noise
from arclight.federated.protocol import (
    Ask,
    Beat,
    Close,
    Evaluate,
    Evaluated,
    Failed,
    Fit,
    Join,
    Leave,
    Manifest,
    Message,
    Receipt,
    Secure,
    Update,
    Wait,
    Welcome,
    digest_of,
)
from arclight.federated.rounds.history import History
from arclight.federated.server import secure_sums
from arclight.federated.server.published_weights import PublishedWeights, Weights
from arclight.federated.server.runtime import DISK_FULL, PausedError, Runtime
from arclight.federated.server.validation import (
    LARGEST_METRIC,
    MOST_COUNTED,
    Baseline,
    Expected,
    Validated,
    check,
    check_message,
    largest_message,
    most_bytes,
    too_much,
)
from arclight.federated.settings import Federation

log = logging.getLogger(__name__)

_LONGEST_HELD = 60.0
_LONGEST_TEXT = 4000
_SESSIONS = 10_000  # of which it is remembered what they were sent
_SPARE = 2
"""Times the room for the updates that a node may have under way: what was begun and is not wanted any more lies there too."""


class Service:
    """Answers nodes for one run. Made by `Server`, whose weights lie on a `PublishedWeights`."""

    def __init__(
        self,
        federation: Federation,
        run: str,
        blobs: FolderStore,
        shelf: PublishedWeights,
        history: History,
        recipe: dict[str, Any] | None = None,
        *,
        seed: int = 0,
    ) -> None:
        self.federation, self.run, self.blobs = federation, run, blobs
        self.recipe = recipe or {}
        self.history = history
        self.driver: Runtime
        self.exchange: secure_sums.SecureSumRelay | None = None
        self.travels = ServerMasks(federation, seed, self._place)
        self.shelf = shelf
        self._lock = threading.Lock()
        self._looking = threading.BoundedSemaphore(os.cpu_count() or 1)
        """Checks are no faster when more than the processors can do at once take memory each."""
        self._has: dict[str, str] = {}
        """Session to the digest of the weights that it has been sent, the one that was heard longest ago first."""
        self._known: tuple[Manifest, int, int] | None = None
        self.intake = UploadQuota(blobs)
        self.checked: dict[str, Validated] = {}
        """What the check of an update found, by the digest of its manifest, until its round is folded."""

    # -- what the run tells ------------------------------------------------------------------------------------------

    def fits(self, weights: Weights) -> Weights:
        """These weights. Raises FederatedError where the federation's masks do not fit them."""
        self.travels.whole(weights.manifest)
        return weights

    # -- what nodes put ----------------------------------------------------------------------------------------------

    @property
    def largest_message(self) -> int:
        return self._largest()[1]

    def _largest(self) -> tuple[Manifest, int, int]:
        """The newest weights, and bytes of the largest message and update for them: found once, and asked for by each message."""
        weights, known = self.shelf.all()[-1].manifest, self._known
        if known is None or known[0] is not weights:
            clients, whole = secure_sums.most(self.federation), self.travels.whole(weights)
            message = largest_message(weights, self.federation, whole, clients)
            known = self._known = (weights, message, most_bytes(weights, self.federation))
        return known

    def taking(self, node: str, session: str, digest: str, size: int) -> AbstractContextManager[None]:
        """While a node puts a blob, or a part of it. Raises RefusedError where its clients' updates cannot need as much."""
        clients = self.driver.speaks_for(session)
        if clients is None:
            raise SessionError("this session is not known here (any more): join again")
        updates = _SPARE * (1 + self.federation.overlap) * (len(clients) or secure_sums.most(self.federation))
        room = updates * self._largest()[2]
        return self.intake.taking(node, digest, size, room)

    # -- what nodes say ----------------------------------------------------------------------------------------------

    def answer(self, message: Message) -> Message:
        """The reply to a node. Raises ProtocolError for what no node says, PausedError while there is no room to write."""
        check_message(message)
        try:
            return self._answer(message)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            raise PausedError(f"the server waits for room on its disk: {error}") from error

    def _answer(self, message: Message) -> Message:
        match message:
            case Join():
                return self._join(message)
            case Ask():
                return self._ask(message)
            case Beat():
                return self._tell(lambda to: events.Beaten(to=to, session=message.session, doing=message.doing))
            case Update():
                return self._update(message)
            case Evaluated():
                return self._evaluated(message)
            case Failed():
                return self._tell(
                    lambda to: events.WorkFailed(
                        to=to,
                        session=message.session,
                        client=message.client,
                        round=message.round,
                        error=message.error[:_LONGEST_TEXT],
                        again=message.again,
                        attempt=message.attempt,
                    )
                )
            case Secure():
                return self._secure(message)
            case Leave():
                return self._tell(
                    lambda to: events.Left(to=to, session=message.session, why=message.why[:_LONGEST_TEXT])
                )
        raise ProtocolError(
            f"a server is not told {message.kind!r}: nodes join, ask, beat, update, evaluate, fail and leave"
        )

    def _join(self, message: Join) -> Message:
        session = secrets.token_hex(16)
        try:
            plan = self.driver.ask(
                lambda to: events.Joined(
                    to=to,
                    node=message.node,
                    session=session,
                    process=message.process,
                    clients=message.clients,
                    held=message.held,
                    steps_per_second=message.steps_per_second,
                )
            )
        except PausedError as error:
            return Wait(seconds=1.0, about=str(error))
        if isinstance(plan, events.SessionGranted):
            return Welcome(
                session=plan.session,
                run=self.run,
                beat_every=self.federation.waiting.beat_every,
                recipe=self.recipe,
                blobs=self.federation.blobs_at or "",
                ahead=None if self.federation.buffered else self.federation.overlap,
            )
        return self._said(plan)

    def _ask(self, message: Ask) -> Message:
        wait = min(max(message.wait, 0.0), _LONGEST_HELD)
        try:
            plan = self.driver.ask(
                lambda to: events.Asked(to=to, session=message.session, wait=wait, doing=message.doing), wait
            )
        except PausedError as error:
            return Wait(seconds=1.0, about=str(error))
        if isinstance(plan, events.FitPlan):
            return self._fit(plan, message.session)
        if isinstance(plan, events.EvaluatePlan):
            weights = self.shelf.known(plan.base)
            self._count_down(plan.client, plan.round, plan.base, message.session)
            return Evaluate(
                run=self.run,
                client=plan.client,
                round=plan.round,
                base=plan.base,
                weights=weights.manifest,
                changes=weights.changes,
                deadline=plan.deadline,
                keep=self.travels.of(plan.client, plan.round, weights.manifest).to_table(),
            )
        return self._said(plan)

    def _fit(self, plan: events.FitPlan, session: str) -> Fit:
        asked, weights = self.federation, self.shelf.known(plan.base)
        self._count_down(plan.client, plan.round, plan.base, session)
        travel = self.travels.of(plan.client, plan.round, weights.manifest)
        return Fit(
            run=self.run,
            client=plan.client,
            round=plan.round,
            steps=plan.steps,
            clock=plan.clock,
            base=plan.base,
            weights=weights.manifest,
            changes=weights.changes,
            form=asked.send,
            codec=to_table(asked.up),
            weigh_by=asked.weigh_by,
            seed=plan.seed,
            deadline=plan.deadline,
            journal_every=asked.journal_every,
            keep={"reset_optimizer": asked.reset_optimizer, **travel.to_table()},
            privacy={**noise.noise_for_clients(asked, plan.least), **secure_sums.order(asked, plan.discarded)},
            fragment=plan.fragment,
            overlap=asked.overlap,
            lane=asked.lane(plan.round),
            attempt=plan.discarded,
            redo=plan.redo,
        )

    def _place(self, client: str) -> int | None:
        return self.driver.coordinator.roster.index(client)

    def _update(self, message: Update) -> Message:
        text = message.manifest.to_json().encode()
        with self.intake.reading([digest_of(text), *message.manifest.blobs]):
            return self._look_at(message, text)

    def _look_at(self, message: Update, text: bytes) -> Message:
        """Checked first, which takes a while and needs no lock; then it happens."""
        digest, attempt = digest_of(text), None if self.federation.secure is None else message.attempt
        early = self.driver.refusal(message.session, message.client, message.round, digest) or self._of_another(message)
        if early is not None:
            log.warning("%s, round %d: %s", message.client, message.round, early[1])
            if early[0] != "session":
                self.intake.refused(message.node, message.manifest.blobs)
            committed = self.driver.coordinator.state.committed
            return Receipt(accepted=False, reason=early[0], message=early[1], committed=committed)
        if self.driver.has_taken(message.client, message.round, digest):  # it comes again: the receipt was lost
            self.intake.counts(message.manifest.blobs)
            return self._tell(lambda to: _checked(to, message, digest, 0.0, attempt))
        try:
            checked = self._check(message)
        except RefusedError as error:
            log.warning("refused: %s", error)
            reason, why = error.reason, str(error)[:_LONGEST_TEXT]
            self.intake.refused(message.node, message.manifest.blobs)
            who = {"session": message.session, "client": message.client, "round": message.round}
            return self._tell(lambda to: events.UpdateRejected(to=to, reason=reason, message=why, **who))  # type: ignore[arg-type]
        self.blobs.put(digest, text)
        self.checked[digest] = checked
        receipt = self._tell(lambda to: _checked(to, message, digest, checked.norm, attempt))
        if isinstance(receipt, Receipt) and receipt.accepted:
            self.intake.counts(message.manifest.blobs)
        else:
            self.checked.pop(digest, None)
        return receipt

    def _of_another(self, message: Update) -> tuple[Reason, str] | None:
        """Why an update does not go into the secure sum that a round gathers; None where it does."""
        opened = self.driver.coordinator.state.begun.get(message.round)
        if self.federation.secure is None or opened is None or message.attempt == opened.discarded:
            return None
        return "stale", f"client {message.client} masked it for a sum of round {message.round} that was discarded"

    def _check(self, message: Update) -> Validated:
        opened = self.driver.coordinator.state.begun.get(message.round)
        if opened is None:
            raise RefusedError("stale", f"round {message.round} of {message.client} was not asked for, or is over")
        base = self.shelf.known(opened.base).manifest
        asked = Expected(
            base=base,
            weights=LazyTensors(base, self.blobs),
            travel=self.travels.of(message.client, message.round, base),
            round=message.round,
            form=self.federation.send,
            masked=self.federation.secure is not None,
            steps=opened.steps,
            weigh_by=self.federation.weigh_by,
            most_weight=None if self.federation.secure is None else self.federation.secure.most_weight,
        )
        recent = self.driver.recent()
        norms, samples, tokens = zip(*recent, strict=True) if recent else ((), (), ())
        seen = Baseline(norms=norms, samples_per_step=samples, tokens_per_step=tokens)
        with self._looking:
            return check(message, asked, seen, self.federation.checks, self.blobs)

    def _secure(self, message: Secure) -> Message:
        if self.exchange is None:
            raise ProtocolError(f"run {self.run} has no secure sums")
        clients = self.driver.speaks_for(message.session)
        if clients is None:
            return Receipt(accepted=False, reason="session", message="this session is not known here: join again")
        if clients and message.client not in clients:
            raise ProtocolError(f"node {message.node} does not speak for client {message.client}")
        return self.exchange.hear(message)

    def _evaluated(self, message: Evaluated) -> Message:
        if (refused := _mismeasured(message)) is not None:
            log.warning("refused: %s", refused[1])
            failed = self._tell(
                lambda to: events.WorkFailed(
                    to=to,
                    session=message.session,
                    client=message.client,
                    round=message.round,
                    error=refused[1],
                    again=False,
                )
            )
            known = not isinstance(failed, Receipt) or failed.accepted
            return Receipt(accepted=False, reason=refused[0], message=refused[1]) if known else failed
        return self._tell(
            lambda to: events.EvaluatedBy(
                to=to,
                session=message.session,
                client=message.client,
                round=message.round,
                samples=message.samples,
                metrics=dict(message.metrics),
            )
        )

    def _tell(self, event: Any) -> Message:
        return self._said(self.driver.ask(event))

    def _said(self, plan: Any) -> Message:
        if isinstance(plan, Wait | Close | Receipt):
            return plan
        raise ProtocolError(f"the coordinator gave {plan!r}, which is no answer to this message")

    def _count_down(self, client: str, number: int, base: str, session: str) -> None:
        """What a node has to fetch for an order: nothing where it has been sent these weights before."""
        weights = self.shelf.known(base)
        with self._lock:
            had = self._has.pop(session, None)
            self._has[session] = base
            if len(self._has) > _SESSIONS:
                del self._has[next(iter(self._has))]
            if had == base:
                size = 0
            elif had is not None and had in (chain := [change.base for change in weights.changes]):
                size = sum(change.size for change in weights.changes[chain.index(had) :])
            else:
                size = weights.manifest.size
        self.history.sent(number, client, size)


def _mismeasured(message: Evaluated) -> tuple[Reason, str] | None:
    """What is wrong with a measurement that cannot be averaged with others."""
    who = f"the measurement of {message.client} for round {message.round}"
    if (told := too_much(message.metrics)) is not None:
        return "too_large", f"{who} {told}"
    if not 0 <= message.samples <= MOST_COUNTED:
        return "weight", f"{who} says {message.samples} samples"
    for name, value in message.metrics.items():
        if not abs(value) <= LARGEST_METRIC:
            return "not_finite", f"{who} says {name} = {value}: more than can be averaged"
    return None


def _checked(to: str, message: Update, digest: str, norm: float, attempt: int | None) -> events.UpdateValidated:
    return events.UpdateValidated(
        to=to,
        session=message.session,
        client=message.client,
        round=message.round,
        digest=digest,
        samples=message.samples,
        tokens=message.tokens,
        steps=message.steps,
        seconds=message.seconds,
        bytes=message.manifest.size,
        norm=norm,
        metrics=dict(message.metrics),
        attempt=attempt,
    )


@dataclass(slots=True)
class _Put:
    size: int
    heard: float
    open: int = 0
    """Requests in which it is coming now."""


class UploadQuota:
    """Blobs by the node that put them. What counts is the server's own, and not in here any more."""

    def __init__(self, blobs: FolderStore) -> None:
        self._blobs, self._lock = blobs, threading.Lock()
        self._of: dict[str, dict[str, _Put]] = {}
        """Node to its blobs, those that it has been silent about for longest first."""
        self._read: Counter[str] = Counter()
        """Blobs of updates that are being looked at."""
        self._since: set[str] = set()
        """Those, and all that were since the server has last asked what is `kept`."""

    @contextmanager
    def taking(self, node: str, digest: str, size: int, room: int) -> Iterator[None]:
        """While a blob comes, or a part of it. What the node has put before and not used makes room for it, the oldest first.

        room: bytes that all of it may take. Raises RefusedError for a blob that has none, LinkError while others of the node's
        are coming that have taken it.
        """
        if (put := self._begin(node, digest, size, room)) is None:
            yield
            return
        try:
            yield
        finally:
            with self._lock:
                put.open, put.heard = put.open - 1, time.monotonic()

    def _begin(self, node: str, digest: str, size: int, room: int) -> _Put | None:
        """None for what is here and no node's: the server's own, which does not go with whoever says it again."""
        if size > room:
            raise RefusedError(
                "too_large",
                f"blob {digest[:12]} has {size:,} bytes: all updates of node {node}'s clients together need {room:,} at most",
            )
        with self._lock:
            if not any(digest in theirs for theirs in self._of.values()) and self._blobs.size(digest) is not None:
                return None
            mine = self._of.setdefault(node, {})
            put = mine.pop(digest, None) or _Put(size, 0.0)
            put.size = max(put.size, size)
            left = room - put.size - sum(other.size for other in mine.values())
            for old in [old for old, other in mine.items() if not other.open and not self._read[old]]:
                if left < 0 and self._dropped(node, old):
                    left += mine.pop(old).size
            mine[digest] = put
            if left < 0:
                if not put.open:
                    del mine[digest]
                raise LinkError(f"node {node} is sending as much as it may at once ({room:,} bytes): come back")
            put.open, put.heard = put.open + 1, time.monotonic()
            return put

    @contextmanager
    def reading(self, digests: list[str]) -> Iterator[None]:
        """While an update with these blobs is looked at: an older one may have had the same, and be over now."""
        with self._lock:
            self._read.update(digests)
            self._since.update(digests)
        try:
            yield
        finally:
            with self._lock:
                self._read.subtract(digests)
                self._read = +self._read

    def remove(self, digest: str) -> None:
        """Remove what nobody needed when the server last asked what is `kept`, unless an update with it has come since."""
        with self._lock:
            if digest not in self._since:
                self._blobs.remove(digest)

    def counts(self, digests: Collection[str]) -> None:
        """An update with these blobs was taken: they are the server's."""
        with self._lock:
            for mine in self._of.values():
                for digest in digests:
                    mine.pop(digest, None)

    def refused(self, node: str, digests: Collection[str]) -> None:
        """An update with these blobs was not taken: what nobody else has put goes."""
        with self._lock:
            mine = self._of.get(node, {})
            for digest in digests:
                if digest in mine and not mine[digest].open and self._dropped(node, digest):
                    del mine[digest]

    def kept(self, silent: float) -> set[str]:
        """Blobs of nodes that were sending within the last ``silent`` seconds; what others have left is removed."""
        since, found, left = time.monotonic() - silent, set[str](), set[str]()
        with self._lock:
            self._since = set(self._read)
            for node, mine in list(self._of.items()):
                if any(put.open or put.heard > since for put in mine.values()):
                    found |= mine.keys()
                else:
                    left |= self._of.pop(node).keys()
            for digest in left - found:
                self._blobs.discard(digest)
        return found

    def _dropped(self, node: str, digest: str) -> bool:
        """Remove what a node has put, unless another one has the same; False where that cannot be now."""
        others = any(digest in theirs for name, theirs in self._of.items() if name != node) or self._read[digest] > 1
        return others or self._blobs.discard(digest)
