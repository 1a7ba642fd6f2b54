"""Decide what follows from a node's message or a driver's event: pure rules.

Only `coordinator` calls these. In: a `Situation` and an event; out: a decision. They change nothing themselves, and read no clock. A new
event needs a case in `decide`, a new message of nodes one in `_on_message`. Reasons of refusals are part of the protocol (`errors.Reason`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from arclight.federated.coordination import answers, round_rules
from arclight.federated.coordination import events as ev
from arclight.federated.coordination.cluster import Assignment, NodeState, Task
from arclight.federated.coordination.events import Answer, Change, Command, Decision, Event, NodeMessage
from arclight.federated.coordination.records import (
    ClientFailed,
    Record,
    RoundCommitted,
    RoundDiscarded,
    RoundEvaluated,
    RoundOpened,
    RunOpened,
    UpdateAccepted,
    UpdateRefused,
    UpdatesLost,
)
from arclight.federated.coordination.run_state import RoundState
from arclight.federated.coordination.situation import Situation
from arclight.federated.errors import FederatedError, ProtocolError, Reason
from arclight.federated.protocol import (
    ActiveWork,
    Close,
    Evaluated,
    Failed,
    Heartbeat,
    Join,
    Leave,
    Receipt,
    Update,
    Wait,
    WorkRequest,
)

_FORGOTTEN = 10
"""A node gets work again that it confirmed, but has not reported for this many times ``waiting.silence_s``."""

Refusal = tuple[Reason, str]


def decide(s: Situation, event: Event, now: float) -> Decision:
    """Decide what follows from an event.

    Raises ProtocolError for one that is not allowed in this state.
    """
    match event:
        case ev.Tick():
            return round_rules.tick(s, event, now)
        case NodeMessage():
            return _on_message(s, event, now)
        case ev.RunStarted():
            return _start(s, event, now)
        case ev.RunResumed():
            if s.state.committed < 0:
                raise FederatedError("there is nothing to resume: the journal names no weights; begin the run")
            longer = s.state.ended is not None and s.state.committed < s.settings.rounds
            opened = (RunOpened(run=s.run, settings=s.records.digest),) if s.state.failed or longer else ()
            return Decision(event=event, now=now, records=opened)
        case ev.RoundStored():
            return _commit(s, event, now)
        case ev.AggregationFailed():
            return _discard(s, event, now)
        case ev.ServerEvaluated():
            due = s.state.measuring.get(event.round)
            record = RoundEvaluated(round=event.round, client=None, samples=event.samples, metrics=event.metrics)
            return Decision(event=event, now=now, records=(record,) if due is not None else ())
        case ev.StopRequested():
            if s.state.ended is not None:
                return Decision(event=event, now=now)
            return answers.end(s, event, now, event.why, failed=True)
    return Decision(event=event, now=now)


def refusal(s: Situation, session: str, message: Update, digest: str) -> Refusal | None:
    """Return the reason to refuse an update; None if it would be, or is, accepted.

    digest: of its manifest. The same update that is sent again is accepted again.
    """
    return _refusal(s, session, message, digest) or _of_another_sum(s, message)


def _refusal(s: Situation, session: str, message: Update, digest: str) -> Refusal | None:
    client, round = message.client, message.round
    node = s.cluster.sessions.get(session)
    if node is None:
        return "session", answers.UNKNOWN_SESSION
    if s.roster.index(client) is None:
        return "unknown_client", f"this run has no client {client!r}"
    if (other := _not_of(node, client)) is not None:
        return other
    if (taken := s.records.accepted(client, round)) is not None:
        if digest == taken:
            return None
        return "duplicate", f"another update of client {client} for round {round} was taken already"
    into, state = s.records.collecting(round), s.state
    if into is not None and client in state.assigned.get(round, {}):
        return None
    if into is not None and (failed := into.failed.get(client)) is not None and failed.round == round:
        return None if failed.lost else ("stale", f"client {client} is out of round {round}: {failed.message}")
    if round > state.opened:
        return "stale", f"round {round} has not begun: the newest is {state.opened}"
    if into is None or round not in state.started_rounds:
        return "stale", f"round {round} is closed; the newest that is committed is {state.committed}"
    return "unknown_client", f"client {client} was not drawn for round {round}"


def _of_another_sum(s: Situation, message: Update) -> Refusal | None:
    """Return the reason to refuse an update masked for a secure sum that was discarded.

    The sum may have been discarded during the update's validation.
    """
    opened = s.state.started_rounds.get(message.round)
    if s.settings.secure is None or opened is None or message.attempt == opened.discarded:
        return None
    return "stale", f"client {message.client} masked it for a sum of round {message.round} that was discarded"


def lost(s: Situation, round: int, clients: Sequence[str]) -> tuple[Record, ...]:
    """Return the records for a round whose accepted updates are lost.

    Masks of a secure sum fit no other values.
    """
    if s.settings.secure is None:
        return (UpdatesLost(round=round, clients=tuple(clients)),)
    why = f"masked values of {', '.join(clients)} are not on the server's disk any more"
    return RoundDiscarded(round=round, why=why), _asked_again(s, s.state.open[round])


# -- messages of nodes -------------------------------------------------------------------------------------------------


def _on_message(s: Situation, event: NodeMessage, now: float) -> Decision:
    cluster, message = s.cluster, event.message
    if isinstance(message, Join):
        return _join(s, event, message, now)
    node = cluster.node_of(event.session) if isinstance(message, Leave) else cluster.sessions.get(event.session)
    if node is None:
        return Decision(event=event, now=now, commands=(answers.unknown_session(s, event.to),))
    contact = (partial(cluster.record_contact, node, now),) if node.lost is None else ()
    match event:
        case ev.UpdateValidated():
            records, commands = _on_update(s, event)
            return Decision(event=event, now=now, before=contact, records=records, commands=commands)
        case ev.UpdateRejected():
            records, changes = _on_rejected(s, event, now)
            refused = answers.receipt(s, event.to, (event.reason, event.why))
            return Decision(event=event, now=now, before=contact, records=records, changes=changes, commands=(refused,))
    match message:
        case WorkRequest():
            return _on_work_request(s, event, message, node, now)
        case Heartbeat():
            cancel = tuple(one for one in message.active_work if _assignment(one) in node.cancelling)
            alive = Answer(to=event.to, plan=Receipt(accepted=True, committed=s.state.committed, cancel=cancel))
            reported = partial(cluster.report_progress, node, message.active_work, now)
            return Decision(event=event, now=now, before=(reported,), commands=(alive,))
        case Failed():
            records, changes, commands = _on_failed(s, event.to, message, node, now)
            return Decision(event=event, now=now, before=contact, records=records, changes=changes, commands=commands)
        case Evaluated():
            records, answer = _on_evaluated(s, event.to, message, node)
            return Decision(event=event, now=now, before=contact, records=records, commands=(answer,))
        case Leave():
            asks = tuple(answers.unknown_session(s, to) for to in node.held_requests)
            why = f"it has left: {message.reason}"
            lost = (ev.NodeLost(node=node.name, session=node.session, why=why),) if message.reason else ()
            evicted = partial(cluster.evict, node, now, message.reason)
            return Decision(
                event=event, now=now, before=contact, changes=(evicted,), commands=(*asks, answers.receipt(s, event.to), *lost)
            )  # fmt: skip
    raise ProtocolError(f"a coordinator is not sent {message.kind!r} as it is")


def _join(s: Situation, event: NodeMessage, message: Join, now: float) -> Decision:
    def answer(plan: ev.SessionGranted | Wait | Close, *others: Command, changes: tuple[Change, ...] = ()) -> Decision:
        return Decision(event=event, now=now, commands=(Answer(to=event.to, plan=plan), *others), changes=changes)

    if s.state.ended is not None:
        told = partial(s.cluster.record_late_node, message.clients, now)
        return answer(Close(reason=s.state.ended, failed=s.state.failed), changes=(told,))
    if strange := [client for client in message.clients if s.roster.index(client) is None]:
        return answer(Close(reason=f"this run has no client {strange[0]!r}: its clients are {s.roster}", failed=True))
    here = s.cluster.nodes.get(message.node)
    if here is None or here.lost is not None or not message.process or here.process in ("", message.process):
        former = () if here is None else tuple(answers.unknown_session(s, to) for to in here.held_requests)
        joined = partial(s.cluster.join, message, event.session, now)
        return answer(ev.SessionGranted(session=event.session), *former, changes=(joined,))
    waiting = s.settings.waiting
    challenger, since = s.cluster.challengers.get(message.node, ("", now))
    ago = f"it was heard {now - here.last_contact:.1f} s ago"
    if challenger == message.process and here.last_contact > since + waiting.heartbeat_interval_s:
        why = f"another process works as node {message.node!r} ({ago}): give each node a name of its own"
        return answer(Close(reason=why, failed=True))
    about = f"node {message.node!r} is here from another process ({ago}); it counts as lost {waiting.silence_s} s after its last word"
    seconds = max(0.0, here.last_contact + waiting.silence_s - now) + waiting.heartbeat_interval_s / 2
    challenged = partial(s.cluster.challenge, message.node, message.process, now)
    return answer(
        Wait(retry_after_s=seconds, waiting_for=about), changes=() if challenger == message.process else (challenged,)
    )


def _on_work_request(s: Situation, event: NodeMessage, message: WorkRequest, node: NodeState, now: float) -> Decision:
    held = (partial(s.cluster.hold_request, event.to, node, message, now),)
    if s.state.ended is not None:
        over = Answer(to=event.to, plan=Close(reason=s.state.ended, failed=s.state.failed))
        return Decision(event=event, now=now, before=held, commands=(over,))
    having = {_assignment(one) for one in message.active_work if s.cluster.is_current(one)}
    lost = (task.work for task in node.tasks.values() if task.work not in having and _is_forgotten(s, task, now))
    again = next((work for work in lost if s.cluster.is_in_order(work, node, having)), None)
    work = again or s.cluster.next_assignment(node, having)
    if work is not None:
        given = Answer(to=event.to, plan=answers.plan(s, work, now))
        started = partial(s.cluster.start, event.to, work, now)
        return Decision(event=event, now=now, before=held, changes=(started,), commands=(given,))
    if message.hold_s <= 0:
        wait = Wait(retry_after_s=s.settings.waiting.heartbeat_interval_s, waiting_for=answers.status(s, now))
        return Decision(event=event, now=now, before=held, commands=(Answer(to=event.to, plan=wait),))
    return Decision(event=event, now=now, before=held)


def _assignment(one: ActiveWork) -> Assignment:
    return Assignment(one.kind, one.round, one.client)


def _is_forgotten(s: Situation, task: Task, now: float) -> bool:
    """Return True if a node that requests work seems not to have this order.

    A node reports a client until its update is here.
    """
    silence = s.settings.waiting.silence_s
    confirmed = task.steps >= 0
    return now - task.seen > (_FORGOTTEN * silence if confirmed else silence)


def _not_of(node: NodeState, client: str) -> Refusal | None:
    """Return the reason to refuse a node's message about a client that it has not joined for."""
    if not node.clients or client in node.clients:
        return None
    return "unknown_client", f"node {node.name} has joined for {', '.join(sorted(node.clients)[:5])}, not for {client}"


def _on_update(s: Situation, event: ev.UpdateValidated) -> tuple[tuple[Record, ...], tuple[Command, ...]]:
    update = event.message
    refused = refusal(s, event.session, update, event.digest)
    is_here = s.records.accepted(update.client, update.round) is not None
    answer = answers.receipt(s, event.to, refused, "it was here already" if is_here else "")
    if refused is not None or is_here:
        return (), (answer,)
    into = s.records.collecting(update.round)
    assert into is not None  # what `refusal` has just found
    accepted = UpdateAccepted(
        round=into.round, client=update.client, digest=event.digest, samples=update.samples, tokens=update.tokens,
        steps=update.steps, seconds=update.seconds, bytes=update.manifest.size, norm=event.norm, metrics=dict(update.metrics),
        staleness=into.round - update.round,
    )  # fmt: skip
    return (accepted,), (answer,)


def _on_rejected(s: Situation, event: ev.UpdateRejected, now: float) -> tuple[tuple[Record, ...], tuple[Change, ...]]:
    client, round = event.message.client, event.message.round
    if s.records.accepted(client, round) is not None or refusal(s, event.session, event.message, "") is not None:
        return (), ()  # it would not have been accepted anyway
    refused = UpdateRefused(round=round, client=client, reason=event.reason, message=event.why)
    work = Assignment("fit", round, client)
    attempts = s.cluster.attempts.get(work, 0) + 1
    if event.reason == "damaged" and attempts < s.settings.waiting.attempts:
        return (refused,), (partial(s.cluster.retry, work, now, keep=True),)
    why = f"its update was refused: {event.why}"
    return (refused, ClientFailed(round=round, client=client, message=why, redo=True)), ()


def _on_failed(
    s: Situation, to: str, message: Failed, node: NodeState, now: float
) -> tuple[tuple[Record, ...], tuple[Change, ...], tuple[Command, ...]]:
    def refused(reason: Reason, why: str) -> tuple[tuple[Record, ...], tuple[Change, ...], tuple[Command, ...]]:
        return (), (), (answers.receipt(s, to, (reason, why)),)

    client, round, cluster = message.client, message.round, s.cluster
    if (other := _not_of(node, client)) is not None:
        return refused(*other)
    fit, evaluate = Assignment("fit", round, client), Assignment("evaluate", round, client)
    mine = [work for work in (fit, evaluate) if work in node.tasks]
    work = mine[0] if mine else fit if fit in cluster.assignments else evaluate
    if work not in cluster.assignments or cluster.assignments[work] not in (node, None):
        return refused("stale", f"client {client} is not at work on round {round} here (any more)")
    opened = s.state.started_rounds.get(work.round) if work.kind == "fit" else None
    if opened is not None and message.attempt not in (None, opened.discarded):  # it is asked for another one
        return refused("stale", f"what client {client} failed in was discarded with its round {round}")
    receipt, why = answers.receipt(s, to), f"node {node.name} says: {message.error}"
    if message.retryable and cluster.attempts.get(work, 0) + 1 < s.settings.waiting.attempts:
        return (), (partial(cluster.retry, work, now, keep=False),), (receipt,)
    if work.kind == "evaluate":
        skipped = partial(cluster.finish, work, node)
        return (), (skipped,), (receipt, ev.ClientNotEvaluated(client=client, round=round, why=why))
    # In a secure sum whose clients have agreed on masks it cannot be tried again, but in another sum of the round.
    again = message.retryable and s.settings.secure is not None
    return (ClientFailed(round=round, client=client, message=why, lost=again),), (), (receipt,)


def _on_evaluated(s: Situation, to: str, message: Evaluated, node: NodeState) -> tuple[tuple[Record, ...], Answer]:
    measuring = s.state.measuring.get(message.round)
    if (other := _not_of(node, message.client)) is not None:
        return (), answers.receipt(s, to, other)
    if measuring is None or message.client not in measuring.waiting:
        return (), answers.receipt(s, to, ("stale", f"round {message.round} is not measured (any more)"))
    record = RoundEvaluated(
        round=message.round, client=message.client, samples=message.samples, metrics=dict(message.metrics)
    )
    return (record,), answers.receipt(s, to)


# -- reports of the driver ---------------------------------------------------------------------------------------------


def _start(s: Situation, event: ev.RunStarted, now: float) -> Decision:
    if s.state.committed >= 0:
        raise FederatedError(f"run {s.run!r} has begun already: it is at round {s.state.committed}; resume it")
    committed = RoundCommitted(
        round=event.round, base=event.base, checkpoint=event.checkpoint, norm=0.0, clock=event.clock,
        measured=_is_evaluated(s, event.round),
    )  # fmt: skip
    return Decision(event=event, now=now, records=(RunOpened(run=s.run, settings=s.records.digest), committed))


def _commit(s: Situation, event: ev.RoundStored, now: float) -> Decision:
    open = s.state.open.get(event.round)
    if event.round == s.state.committed and event.base == s.state.base:
        return Decision(event=event, now=now)  # reported twice
    if open is None or open.closed is None or event.round != s.state.committed + 1:
        raise ProtocolError(
            f"round {event.round} cannot be committed now: the newest is {s.state.committed}, closed and waiting are "
            f"{[r.round for r in s.state.open.values() if r.closed is not None]}"
        )
    skipped = not open.closed  # no client has trained: no steps are added, and there is nothing new to evaluate
    record = RoundCommitted(
        round=event.round, base=event.base, checkpoint=event.checkpoint, norm=event.norm, drift=event.drift,
        clock=open.clock if skipped else None, measured=not skipped and _is_evaluated(s, event.round),
    )  # fmt: skip
    return Decision(event=event, now=now, records=(record,))


def _is_evaluated(s: Situation, round: int) -> bool:
    every = s.settings.evaluate_every
    return bool(every) and (round % every == 0 or round == s.settings.rounds)


def _discard(s: Situation, event: ev.AggregationFailed, now: float) -> Decision:
    """Discard a closed round and ask its clients again, without those to blame.

    Clients that have finished the round send their updates again, without training.
    """
    open = s.state.open.get(event.round)
    if open is None or open.closed is None:
        raise ProtocolError(f"round {event.round} is not closed: it cannot be asked for again")
    blamed = [client for client in event.clients if client in open.accepted]
    message = f"its update could not be folded: {event.why}"
    out = (ClientFailed(round=open.round, client=client, message=message, redo=True) for client in blamed)
    discarded = (RoundDiscarded(round=open.round, why=event.why), *out)
    again, need = _asked_again(s, open, blamed), s.records.need(open)
    end = ""
    if open.failed_aggregations >= s.settings.waiting.retries:
        end = f"it was tried {open.failed_aggregations + 1} times (waiting.retries)"
    elif blamed and len(again.clients) < need and not s.settings.buffered:
        end = f"without {', '.join(blamed)} there are fewer than the {need} updates that its quorum needs"
    if end:
        return round_rules.give_up(s, event, open, now, f"round {event.round}: {event.why}; {end}", discarded)
    without = f" without {', '.join(blamed)}" if blamed else ""
    text = f"round {event.round} is discarded and asked for again{without}: {event.why}"
    records = discarded if s.settings.buffered else (*discarded, again)  # a buffer fills up again by itself
    return Decision(event=event, now=now, records=records, commands=(ev.LogMessage(text=text),))


def _asked_again(s: Situation, open: RoundState, without: Sequence[str] = ()) -> RoundOpened:
    """Ask a round's clients again, and others in place of those left out, if there are any."""
    kept = [client for client in open.drawn if client not in without]
    count, attempt = len(without), open.attempt + 1
    fresh = s.sampler.draw(open.round, count=count, attempt=attempt, without=open.drawn) if without else ()
    return round_rules.reopened(open, (*kept, *fresh))
