"""Answer nodes: validate their messages, ask the coordinator, turn its plans into orders.

Transports call `Service.answer` with a message and return what it gives, and `Service.reserve_upload` before they receive a blob. A message of a
new kind needs a case in ``_answer``, its check in `validation`, and a rule in `coordination.message_rules` unless, as with secure sums,
another part answers it. Nothing here decides about clients or rounds.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from arclight.fabric.atomic_replace import DISK_FULL
from arclight.federated.blobs.folder import FolderStore
from arclight.federated.codecs.encoding import LazyTensors
from arclight.federated.codecs.settings import to_table
from arclight.federated.coordination.events import (
    EvaluatePlan,
    FitPlan,
    NodeMessage,
    SessionGranted,
    UpdateRejected,
    UpdateValidated,
)
from arclight.federated.errors import OBSERVED, LinkError, ProtocolError, Reason, RefusedError, SessionError
from arclight.federated.masks.transfer_mask import ServerMasks
from arclight.federated.privacy import noise
from arclight.federated.protocol import (
    Close,
    Evaluate,
    Evaluated,
    Failed,
    Fit,
    Heartbeat,
    Join,
    Leave,
    Manifest,
    Message,
    Receipt,
    SecureSumRequest,
    Update,
    Wait,
    Welcome,
    WorkRequest,
    digest_of,
)
from arclight.federated.rounds.history import History
from arclight.federated.server import secure_sums
from arclight.federated.server.published_weights import PublishedWeights
from arclight.federated.server.runtime import PausedError, Runtime
from arclight.federated.server.validation import (
    LARGEST_METRIC,
    MAX_COUNTED,
    Baseline,
    ExpectedUpdate,
    ValidUpdate,
    largest_message,
    most_bytes,
    too_many_metrics,
    validate_message,
    validate_update,
)
from arclight.federated.settings import Federation

log = logging.getLogger(__name__)

_LONGEST_HELD_S = 60.0
"""Seconds for which a work request is held at most."""
_LONGEST_TEXT = 4000
"""Characters of a node's error or reason that are kept."""
_SESSIONS = 10_000
"""Sessions whose last weights are remembered."""
_SPARE = 2
"""Uploads of a node may take this many times the bytes of the updates that it may have under way: abandoned ones count too."""


class Service:
    """Answer the messages of nodes for one run. Made by `ServerRun`, which owns the parts.

    run: what nodes know the run by. validated: what validation found, by the digest of an update's manifest, until its round is
    aggregated.
    """

    def __init__(
        self,
        federation: Federation,
        run: str,
        *,
        runtime: Runtime,
        blobs: FolderStore,
        weights: PublishedWeights,
        masks: ServerMasks,
        quota: UploadQuota,
        history: History,
        validated: dict[str, ValidUpdate],
        relay: secure_sums.SecureSumRelay | None = None,
        recipe: dict[str, Any] | None = None,
    ) -> None:
        self.federation, self.run, self.blobs, self.history = federation, run, blobs, history
        self._runtime, self._weights, self._masks, self._quota = runtime, weights, masks, quota
        self._validated, self._relay, self._recipe = validated, relay, recipe or {}
        self._lock = threading.Lock()
        self._validating = threading.BoundedSemaphore(os.cpu_count() or 1)
        """As many validations at a time as there are processors: more would take memory and be no faster."""
        self._sent: dict[str, tuple[str, Set[str]]] = {}
        """Session to the digest of the weights that it was sent and their blobs, the least recent session first."""
        self._limits: tuple[Manifest, int, int] | None = None

    # -- uploads -----------------------------------------------------------------------------------------------------

    @property
    def largest_message(self) -> int:
        """Bytes of the largest message of a node."""
        return self._limits_now()[1]

    def _limits_now(self) -> tuple[Manifest, int, int]:
        """Return the newest weights, and the largest sizes in bytes of a message and an update.

        They are computed once per weights.
        """
        newest, known = self._weights.all()[-1], self._limits
        weights = newest.manifest
        if known is None or known[0] is not weights:
            clients, whole = secure_sums.most_clients(self.federation), self._masks.whole(newest.own)
            message = largest_message(weights, self.federation, whole, clients)
            known = self._limits = (weights, message, most_bytes(weights, self.federation))
        return known

    def reserve_upload(self, node: str, session: str, digest: str, size: int) -> AbstractContextManager[None]:
        """Return a context for a node's upload of a blob, or a part of it.

        Raises RefusedError if its clients' updates cannot need as much.
        """
        clients = self._runtime.clients_of_session(session)
        if clients is None:
            raise SessionError("this session is not known here (any more): join again")
        updates = _SPARE * (1 + self.federation.overlap) * (len(clients) or secure_sums.most_clients(self.federation))
        return self._quota.reserve_upload(node, digest, size, updates * self._limits_now()[2])

    # -- messages ----------------------------------------------------------------------------------------------------

    def answer(self, message: Message) -> Message:
        """Answer a node.

        Raises ProtocolError for a message that no node sends, PausedError while the disk is full.
        """
        validate_message(message)
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
            case WorkRequest():
                return self._ask(message)
            case Update():
                return self._update(message)
            case Evaluated():
                return self._evaluated(message)
            case SecureSumRequest():
                return self._secure(message)
            case Heartbeat():
                return self._forward(message)
            case Failed():
                return self._forward(replace(message, error=message.error[:_LONGEST_TEXT]))
            case Leave():
                return self._forward(replace(message, reason=message.reason[:_LONGEST_TEXT]))
        raise ProtocolError(
            f"a server is not sent {message.kind!r}: nodes join, ask, beat, update, evaluate, fail and leave"
        )

    def _forward(self, message: Heartbeat | Evaluated | Failed | Leave) -> Message:
        """Forward a message to the coordinator unchanged."""
        return self._request(lambda to: NodeMessage(to=to, message=message, session=message.session))

    def _request(self, event: Callable[[str], NodeMessage], wait_s: float = 0.0) -> Message:
        return _answered(self._runtime.request(event, wait_s))

    def _join(self, message: Join) -> Message:
        session = secrets.token_hex(16)
        try:
            plan = self._runtime.request(lambda to: NodeMessage(to=to, message=message, session=session))
        except PausedError as error:
            return Wait(retry_after_s=1.0, waiting_for=str(error))
        if isinstance(plan, SessionGranted):
            return Welcome(
                session=plan.session,
                run=self.run,
                heartbeat_interval_s=self.federation.waiting.heartbeat_interval_s,
                recipe=self._recipe,
                blob_address=self.federation.blobs_at or "",
                prefetch_rounds=None if self.federation.buffered else self.federation.overlap,
            )
        return _answered(plan)

    def _ask(self, message: WorkRequest) -> Message:
        ask = replace(message, hold_s=min(max(message.hold_s, 0.0), _LONGEST_HELD_S))
        try:
            plan = self._runtime.request(lambda to: NodeMessage(to=to, message=ask, session=ask.session), ask.hold_s)
        except PausedError as error:
            return Wait(retry_after_s=1.0, waiting_for=str(error))
        if isinstance(plan, FitPlan):
            return self._fit(plan, message.session)
        if isinstance(plan, EvaluatePlan):
            return self._evaluate(plan, message.session)
        return _answered(plan)

    def _fit(self, plan: FitPlan, session: str) -> Fit:
        federation, weights = self.federation, self._weights.known(plan.base)
        self._count_sent(plan.client, plan.round, plan.base, session)
        mask = self._masks.of(plan.client, plan.round, weights.own)
        return Fit(
            run=self.run,
            client=plan.client,
            round=plan.round,
            steps=plan.steps,
            clock=plan.clock,
            base=plan.base,
            weights=weights.manifest,
            changes=weights.changes,
            form=federation.send,
            codec=to_table(federation.up),
            weigh_by=federation.weigh_by,
            seed=plan.seed,
            deadline_s=plan.deadline_s,
            checkpoint_every_steps=federation.checkpoint_every_steps,
            local_policy={"reset_optimizer": federation.reset_optimizer, **mask.to_table()},
            privacy={
                **noise.noise_for_clients(federation, plan.least),
                **secure_sums.secure_sum_for_clients(federation, plan.discarded),
            },
            fragment=plan.fragment,
            overlap=federation.overlap,
            residual_slot=federation.residual_slot(plan.round),
            attempt=plan.discarded,
            redo=plan.redo,
        )

    def _evaluate(self, plan: EvaluatePlan, session: str) -> Evaluate:
        weights = self._weights.known(plan.base)
        self._count_sent(plan.client, plan.round, plan.base, session)
        return Evaluate(
            run=self.run,
            client=plan.client,
            round=plan.round,
            base=plan.base,
            weights=weights.manifest,
            changes=weights.changes,
            deadline_s=plan.deadline_s,
            local_policy=self._masks.of(plan.client, plan.round, weights.own).to_table(),
        )

    def _update(self, message: Update) -> Message:
        text = message.manifest.to_json().encode()
        with self._quota.reading([digest_of(text), *message.manifest.blobs]):
            return self._take_update(message, text)

    def _take_update(self, update: Update, text: bytes) -> Message:
        """Validate an update without the lock, then report it to the coordinator.

        One that would be refused, or is here already, is not validated.
        """
        digest, blobs = digest_of(text), update.manifest.blobs
        if (refused := self._runtime.refusal(update, digest)) is not None:
            reason, why = refused
            log.warning("%s, round %d: %s", update.client, update.round, why, extra=OBSERVED)
            if reason != "session":
                self._quota.refused(update.node, blobs)
            committed = self._runtime.coordinator.state.committed
            return Receipt(accepted=False, reason=reason, message=why, committed=committed)
        norm, is_new = 0.0, not self._runtime.has_accepted(update, digest)
        if is_new:  # else its receipt was lost, and it is sent again
            try:
                validated = self._validate(update)
            except RefusedError as error:
                log.warning("refused: %s", error, extra=OBSERVED)
                self._quota.refused(update.node, blobs)
                why, who = str(error)[:_LONGEST_TEXT], {"session": update.session, "reason": error.reason}
                return self._request(lambda to: UpdateRejected(to=to, message=update, why=why, **who))  # type: ignore[arg-type]
            self.blobs.put(digest, text)
            self._validated[digest], norm = validated, validated.norm
        receipt = self._request(
            lambda to: UpdateValidated(to=to, message=update, session=update.session, digest=digest, norm=norm)
        )
        if isinstance(receipt, Receipt) and receipt.accepted:
            self._quota.counts(blobs)
        elif is_new:
            self._validated.pop(digest, None)
        return receipt

    def _validate(self, update: Update) -> ValidUpdate:
        opened = self._runtime.coordinator.state.started_rounds.get(update.round)
        if opened is None:
            raise RefusedError("stale", f"round {update.round} of {update.client} was not asked for, or is over")
        weights, federation = self._weights.known(opened.base), self.federation
        base = weights.manifest
        expected = ExpectedUpdate(
            base=base,
            weights=LazyTensors(base, self.blobs),
            transfer_mask=self._masks.of(update.client, update.round, weights.own),
            round=update.round,
            form=federation.send,
            masked=federation.secure is not None,
            steps=opened.steps,
            weigh_by=federation.weigh_by,
            max_weight=None if federation.secure is None else federation.secure.max_weight,
        )
        recent = self._runtime.recent()
        norms, samples, tokens = zip(*recent, strict=True) if recent else ((), (), ())
        baseline = Baseline(norms=norms, samples_per_step=samples, tokens_per_step=tokens)
        with self._validating:
            return validate_update(update, expected, baseline, federation.checks, self.blobs)

    def _secure(self, message: SecureSumRequest) -> Message:
        if self._relay is None:
            raise ProtocolError(f"run {self.run} has no secure sums")
        clients = self._runtime.clients_of_session(message.session)
        if clients is None:
            return Receipt(accepted=False, reason="session", message="this session is not known here: join again")
        if clients and message.client not in clients:
            raise ProtocolError(f"node {message.node} does not speak for client {message.client}")
        return self._relay.handle(message)

    def _evaluated(self, message: Evaluated) -> Message:
        if (refused := _mismeasured(message)) is None:
            return self._forward(message)
        reason, why = refused
        log.warning("refused: %s", why, extra=OBSERVED)
        who = {"node": message.node, "session": message.session, "client": message.client, "round": message.round}
        receipt = self._forward(Failed(**who, error=why))  # type: ignore[arg-type]
        known = not isinstance(receipt, Receipt) or receipt.accepted
        return Receipt(accepted=False, reason=reason, message=why) if known else receipt

    def _count_sent(self, client: str, number: int, base: str, session: str) -> None:
        """Count the bytes that a node has to download for an order.

        Blobs of the weights that it was sent before do not count.
        """
        weights = self._weights.known(base)
        with self._lock:
            had, blobs = self._sent.pop(session, (None, frozenset()))
            self._sent[session] = (base, weights.manifest.blobs.keys())
            if len(self._sent) > _SESSIONS:
                del self._sent[next(iter(self._sent))]
        size = sum(size for blob, size in weights.manifest.blobs.items() if blob not in blobs)
        if had != base and had in (chain := [change.base for change in weights.changes]):
            size = min(size, sum(change.size for change in weights.changes[chain.index(had) :]))
        self.history.sent(number, client, size)


def _answered(plan: Any) -> Message:
    """Return an answer that goes to the node as it is."""
    if isinstance(plan, Wait | Close | Receipt):
        return plan
    raise ProtocolError(f"the coordinator gave {plan!r}, which is not an answer to this message")


def _mismeasured(message: Evaluated) -> tuple[Reason, str] | None:
    """Return the reason to refuse an evaluation that cannot be averaged with others."""
    who = f"the evaluation of {message.client} for round {message.round}"
    if (problem := too_many_metrics(message.metrics)) is not None:
        return "too_large", f"{who} {problem}"
    if not 0 <= message.samples <= MAX_COUNTED:
        return "weight", f"{who} says {message.samples} samples"
    for name, value in message.metrics.items():
        if not abs(value) <= LARGEST_METRIC:
            return "not_finite", f"{who} says {name} = {value}: more than can be averaged"
    return None


@dataclass(slots=True)
class _Upload:
    """A blob that a node uploads."""

    size: int
    last_activity: float
    open: int = 0
    """Requests that upload it now."""


class UploadQuota:
    """Limit the bytes of each node's blobs that no accepted update refers to.

    Blobs of accepted updates are the server's own and do not count.
    """

    def __init__(self, blobs: FolderStore) -> None:
        self._blobs, self._lock = blobs, threading.Lock()
        self._of: dict[str, dict[str, _Upload]] = {}
        """Node to its blobs, the least recently uploaded first."""
        self._read: Counter[str] = Counter()
        """Blobs of updates that are being validated."""
        self._since: set[str] = set()
        """Those, and all that were since the last call of `kept`."""

    @contextmanager
    def reserve_upload(self, node: str, digest: str, size: int, room: int) -> Iterator[None]:
        """Reserve room for an upload by removing the node's unused blobs, the oldest first.

        room: bytes that all of them may take. Raises RefusedError for a blob beyond it, LinkError while other uploads of the
        node have taken it.
        """
        if (upload := self._begin(node, digest, size, room)) is None:
            yield
            return
        try:
            yield
        finally:
            with self._lock:
                upload.open, upload.last_activity = upload.open - 1, time.monotonic()

    def _begin(self, node: str, digest: str, size: int, room: int) -> _Upload | None:
        """Register an upload; return None for a blob that is the server's own.

        Such a blob is not removed with the node that uploads it again.
        """
        if size > room:
            raise RefusedError(
                "too_large",
                f"blob {digest[:12]} has {size:,} bytes: all updates of node {node}'s clients together need {room:,} at most",
            )
        with self._lock:
            if not any(digest in theirs for theirs in self._of.values()) and self._blobs.size(digest) is not None:
                return None
            mine = self._of.setdefault(node, {})
            upload = mine.pop(digest, None) or _Upload(size, 0.0)
            upload.size = max(upload.size, size)
            left = room - upload.size - sum(other.size for other in mine.values())
            for old in [old for old, other in mine.items() if not other.open and not self._read[old]]:
                if left < 0 and self._dropped(node, old):
                    left += mine.pop(old).size
            mine[digest] = upload
            if left < 0:
                if not upload.open:
                    del mine[digest]
                raise LinkError(
                    f"node {node} is sending as much as it may at once ({room:,} bytes): wait for its running uploads, then send again"
                )
            upload.open, upload.last_activity = upload.open + 1, time.monotonic()
            return upload

    @contextmanager
    def reading(self, digests: list[str]) -> Iterator[None]:
        """Protect the blobs of an update during its validation.

        An older update with the same ones may end now.
        """
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
        """Remove a blob not needed at the last call of `kept`, unless an update of it came since."""
        with self._lock:
            if digest not in self._since:
                self._blobs.remove(digest)

    def counts(self, digests: Collection[str]) -> None:
        """Make the blobs of an accepted update the server's own."""
        with self._lock:
            for mine in self._of.values():
                for digest in digests:
                    mine.pop(digest, None)

    def refused(self, node: str, digests: Collection[str]) -> None:
        """Delete the blobs of a refused update, except those that another node has uploaded."""
        with self._lock:
            mine = self._of.get(node, {})
            for digest in digests:
                if digest in mine and not mine[digest].open and self._dropped(node, digest):
                    del mine[digest]

    def kept(self, silent: float) -> set[str]:
        """Return the blobs of nodes that uploaded in the last ``silent`` seconds; delete others."""
        since, found, left = time.monotonic() - silent, set[str](), set[str]()
        with self._lock:
            self._since = set(self._read)
            for node, mine in list(self._of.items()):
                if any(upload.open or upload.last_activity > since for upload in mine.values()):
                    found |= mine.keys()
                else:
                    left |= self._of.pop(node).keys()
            for digest in left - found:
                self._blobs.discard(digest)
        return found

    def _dropped(self, node: str, digest: str) -> bool:
        """Delete a node's blob, unless another one has the same; False if that cannot be done now."""
        others = any(digest in theirs for name, theirs in self._of.items() if name != node) or self._read[digest] > 1
        return others or self._blobs.discard(digest)
