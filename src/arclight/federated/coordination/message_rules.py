"""What follows from what nodes and the driver say. Pure: everything here reads the coordinator and changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from arclight.federated.coordination import events as ev
from arclight.federated.coordination import round_rules
from arclight.federated.coordination.cluster import Assignment, DuplicateJoin, EvaluationSkipped, Node, Retry, Task
from arclight.federated.coordination.events import Answer, Command, Decision, Event
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
from arclight.federated.errors import FederatedError, ProtocolError, Reason
from arclight.federated.protocol import Close, Receipt, Wait

_FORGOTTEN = 10
"""Silences after which work that a node had, and does not name any more although it asks for some, is given to it again."""

if TYPE_CHECKING:
    from arclight.federated.coordination.coordinator import Coordinator


def decide(c: Coordinator, event: Event, now: float) -> Decision:
    match event:
        case ev.Tick():
            return round_rules.tick(c, event, now)
        case ev.Joined():
            return _join(c, event, now)
        case ev.Said():
            session = getattr(event, "session", "")
            node = c.present.that_leaves(session) if isinstance(event, ev.Left) else c.present.sessions.get(session)
            if node is None:
                return Decision(event=event, now=now, commands=(unknown_session(event.to, c.state.committed),))
            return _from_node(c, event, node, now)
        case ev.RunStarted():
            return _begin(c, event, now)
        case ev.RunResumed():
            if c.state.committed < 0:
                raise FederatedError("there is nothing to resume: the journal names no weights; begin the run")
            longer = c.state.ended is not None and c.state.committed < c.settings.rounds
            opened = (RunOpened(run=c.run, settings=c.rules.digest),) if c.state.failed or longer else ()
            return Decision(event=event, now=now, records=opened)
        case ev.RoundStored():
            return _committed(c, event, now)
        case ev.AggregationFailed():
            return _fold_failed(c, event, now)
        case ev.ServerEvaluated():
            due = c.state.measuring.get(event.round)
            record = RoundEvaluated(round=event.round, client=None, samples=event.samples, metrics=event.metrics)
            return Decision(event=event, now=now, records=(record,) if due is not None else ())
        case ev.StopRequested():
            if c.state.ended is not None:
                return Decision(event=event, now=now)
            return round_rules.end(c, event, now, event.why, failed=True)
    return Decision(event=event, now=now)


def refusal(c: Coordinator, session: str, client: str, round: int, digest: str | None) -> tuple[Reason, str] | None:
    node = c.present.sessions.get(session)
    if node is None:
        return "session", "this session is not known (any more): join again"
    if c.roster.index(client) is None:
        return "unknown_client", f"this run has no client {client!r}"
    if (other := _not_of(node, client)) is not None:
        return other
    if (taken := c.rules.accepted(client, round)) is not None:
        if digest is None or digest == taken:
            return None
        return "duplicate", f"another update of client {client} for round {round} was taken already"
    into, state = c.rules.into(round), c.state
    if into is not None and client in state.outstanding.get(round, {}):
        return None
    if into is not None and (failed := into.failed.get(client)) is not None and failed.round == round:
        return None if failed.lost else ("stale", f"client {client} is out of round {round}: {failed.message}")
    if round > state.opened:
        return "stale", f"round {round} has not begun: the newest is {state.opened}"
    if into is None or round not in state.begun:
        return "stale", f"round {round} is closed; the newest that is committed is {state.committed}"
    return "unknown_client", f"client {client} was not drawn for round {round}"


def _not_of(node: Node, client: str) -> tuple[Reason, str] | None:
    """Why a node is not heard about a client: it has joined for others."""
    if not node.clients or client in node.clients:
        return None
    return "unknown_client", f"node {node.name} has joined for {', '.join(sorted(node.clients)[:5])}, not for {client}"


def unknown_session(to: str, committed: int) -> Answer:
    text = "this session is not known (any more): join again"
    return Answer(to=to, plan=Receipt(accepted=False, reason="session", message=text, committed=committed))


def _receipt(c: Coordinator, to: str, refused: tuple[Reason, str] | None = None, message: str = "") -> Answer:
    committed = c.state.committed
    if refused is None:
        return Answer(to=to, plan=Receipt(accepted=True, message=message, committed=committed))
    return Answer(to=to, plan=Receipt(accepted=False, reason=refused[0], message=refused[1], committed=committed))


def _begin(c: Coordinator, event: ev.RunStarted, now: float) -> Decision:
    if c.state.committed >= 0:
        raise FederatedError(f"run {c.run!r} has begun already: it is at round {c.state.committed}; resume it")
    committed = RoundCommitted(
        round=event.round, base=event.base, checkpoint=event.checkpoint, norm=0.0, clock=event.clock,
        measured=_is_measured(c, event.round),
    )  # fmt: skip
    return Decision(
        event=event, now=now, records=(RunOpened(run=c.run, settings=c.rules.digest), committed)
    )  # fmt: skip


def _join(c: Coordinator, event: ev.Joined, now: float) -> Decision:
    def answer(plan: ev.SessionGranted | Wait | Close, *others: Command, notes: tuple[ev.Note, ...] = ()) -> Decision:
        return Decision(event=event, now=now, commands=(Answer(to=event.to, plan=plan), *others), notes=notes)

    if c.state.ended is not None:
        return answer(Close(why=c.state.ended, failed=c.state.failed))
    if strange := [client for client in event.clients if c.roster.index(client) is None]:
        return answer(Close(why=f"this run has no client {strange[0]!r}: its clients are {c.roster}", failed=True))
    here = c.present.nodes.get(event.node)
    if here is None or here.lost is not None or not event.process or here.process in ("", event.process):
        former = () if here is None else tuple(unknown_session(to, c.state.committed) for to in here.asks)
        return answer(ev.SessionGranted(session=event.session), *former)
    waiting = c.settings.waiting
    challenger, since = c.present.challengers.get(event.node, ("", now))
    ago = f"it was heard {now - here.heard:.1f} s ago"
    if challenger == event.process and here.heard > since + waiting.beat_every:
        return answer(
            Close(
                why=f"another process works as node {event.node!r} ({ago}): give each node a name of its own",
                failed=True,
            )
        )
    about = f"node {event.node!r} is here from another process ({ago}); it counts as lost {waiting.silence} s after its last word"
    wait = Wait(seconds=max(0.0, here.heard + waiting.silence - now) + waiting.beat_every / 2, about=about)
    return answer(
        wait, notes=() if challenger == event.process else (DuplicateJoin(node=event.node, process=event.process),)
    )


def _from_node(c: Coordinator, event: ev.Said, node: Node, now: float) -> Decision:
    records: tuple[Record, ...] = ()
    commands: tuple[Command, ...] = ()
    notes: tuple[ev.Note, ...] = ()
    match event:
        case ev.Asked():
            commands = _ask(c, event, node, now)
        case ev.Beaten():
            cancel = tuple(one for one in event.doing if Assignment(one.kind, one.round, one.client) in node.stopping)
            commands = (Answer(to=event.to, plan=Receipt(accepted=True, committed=c.state.committed, cancel=cancel)),)
        case ev.UpdateValidated():
            refused = refusal(c, event.session, event.client, event.round, event.digest) or _of_another_sum(c, event)
            taken = c.rules.accepted(event.client, event.round) is not None
            if refused is None and not taken:
                records = (_accept(c, event),)
            commands = (_receipt(c, event.to, refused, "it was here already" if taken else ""),)
        case ev.UpdateRejected():
            records, notes = _unsound(c, event)
            commands = (_receipt(c, event.to, (event.reason, event.message)),)
        case ev.WorkFailed():
            records, notes, refused = _failed(c, event, node)
            why = f"node {node.name} says: {event.error}"
            without = [note.work for note in notes if isinstance(note, EvaluationSkipped)]
            unmeasured = [ev.ClientNotEvaluated(client=work.client, round=work.round, why=why) for work in without]
            commands = (_receipt(c, event.to, refused), *unmeasured)
        case ev.EvaluatedBy():
            measuring = c.state.measuring.get(event.round)
            if (other := _not_of(node, event.client)) is not None:
                commands = (_receipt(c, event.to, other),)
            elif measuring is not None and event.client in measuring.waiting:
                records = (
                    RoundEvaluated(
                        round=event.round, client=event.client, samples=event.samples, metrics=event.metrics
                    ),
                )
                commands = (_receipt(c, event.to),)
            else:
                commands = (_receipt(c, event.to, ("stale", f"round {event.round} is not measured (any more)")),)
        case ev.Left():
            asks = tuple(unknown_session(to, c.state.committed) for to in node.asks)
            said = (
                (ev.NodeLost(node=node.name, session=node.session, why=f"it has left: {event.why}"),)
                if event.why
                else ()
            )
            commands = (*asks, _receipt(c, event.to), *said)
        case _:
            raise ProtocolError(f"nodes do not say {type(event).__name__}")
    return Decision(event=event, now=now, records=records, commands=commands, notes=notes)


def _ask(c: Coordinator, event: ev.Asked, node: Node, now: float) -> tuple[Command, ...]:
    if c.state.ended is not None:
        return (Answer(to=event.to, plan=Close(why=c.state.ended, failed=c.state.failed)),)
    having = {Assignment(one.kind, one.round, one.client) for one in event.doing if c.present.is_current(one)}
    lost = (task.work for task in node.tasks.values() if task.work not in having and _unknown(c, task, now))
    again = next((work for work in lost if c.present.in_turn(work, node, having)), None)
    work = again or c.present.next(node, having)
    if work is not None:
        return (Answer(to=event.to, plan=round_rules.plan(c, work, now)),)
    if event.wait <= 0:
        return (Answer(to=event.to, plan=Wait(seconds=c.settings.waiting.beat_every, about=round_rules.about(c, now))),)
    return ()


def _unknown(c: Coordinator, task: Task, now: float) -> bool:
    """Whether a node that asks seems not to have got this order: its beats should name the client until the update is here."""
    silence = c.settings.waiting.silence
    confirmed = task.steps >= 0
    return now - task.seen > (_FORGOTTEN * silence if confirmed else silence)


def _of_another_sum(c: Coordinator, event: ev.UpdateValidated) -> tuple[Reason, str] | None:
    """Why an update is not taken that was masked for a sum which was discarded, maybe while the update was checked."""
    opened = c.state.begun.get(event.round)
    if event.attempt is None or opened is None or event.attempt == opened.discarded:
        return None
    return "stale", f"client {event.client} masked it for a sum of round {event.round} that was discarded"


def _accept(c: Coordinator, event: ev.UpdateValidated) -> UpdateAccepted:
    into = c.rules.into(event.round)
    assert into is not None  # what `refusal` has just found
    return UpdateAccepted(
        round=into.round, client=event.client, digest=event.digest, samples=event.samples, tokens=event.tokens,
        steps=event.steps, seconds=event.seconds, bytes=event.bytes, norm=event.norm, metrics=event.metrics,
        staleness=into.round - event.round,
    )  # fmt: skip


def _unsound(c: Coordinator, event: ev.UpdateRejected) -> tuple[tuple[Record, ...], tuple[ev.Note, ...]]:
    if refusal(c, event.session, event.client, event.round, None) is not None:
        return (), ()  # it would not have been taken anyway
    if c.rules.accepted(event.client, event.round) is not None:
        return (), ()
    said = UpdateRefused(round=event.round, client=event.client, reason=event.reason, message=event.message)
    work = Assignment("fit", event.round, event.client)
    tries = c.present.tries.get(work, 0) + 1
    if event.reason == "damaged" and tries < c.settings.waiting.attempts:
        return (said,), (Retry(work=work, keep=True),)
    why = f"its update was refused: {event.message}"
    out = ClientFailed(round=event.round, client=event.client, message=why, redo=True)
    return (said, out), ()


def _failed(
    c: Coordinator, event: ev.WorkFailed, node: Node
) -> tuple[tuple[Record, ...], tuple[ev.Note, ...], tuple[Reason, str] | None]:
    if (other := _not_of(node, event.client)) is not None:
        return (), (), other
    fit, measure = Assignment("fit", event.round, event.client), Assignment("evaluate", event.round, event.client)
    mine = [work for work in (fit, measure) if work in node.tasks]
    work = mine[0] if mine else fit if fit in c.present.where else measure
    if work not in c.present.where or c.present.where[work] not in (node, None):
        return (), (), ("stale", f"client {event.client} is not at work on round {event.round} here (any more)")
    opened = c.state.begun.get(work.round) if work.kind == "fit" else None
    if opened is not None and event.attempt not in (None, opened.discarded):  # it is asked for another one
        return (), (), ("stale", f"what client {event.client} failed in was discarded with its round {event.round}")
    if event.again and c.present.tries.get(work, 0) + 1 < c.settings.waiting.attempts:
        return (), (Retry(work=work),), None
    if work.kind == "evaluate":
        return (), (EvaluationSkipped(work=work),), None
    failed = ClientFailed(round=event.round, client=event.client, message=f"node {node.name} says: {event.error}")
    return (failed,), (), None


def _committed(c: Coordinator, event: ev.RoundStored, now: float) -> Decision:
    open = c.state.open.get(event.round)
    if event.round == c.state.committed and event.base == c.state.base:
        return Decision(event=event, now=now)  # said twice
    if open is None or open.closed is None or event.round != c.state.committed + 1:
        raise ProtocolError(
            f"round {event.round} cannot be committed now: the newest is {c.state.committed}, closed and waiting are "
            f"{[r.round for r in c.state.open.values() if r.closed is not None]}"
        )
    skipped = not open.closed  # nobody has trained: no steps are added, and there is nothing new to measure
    record = RoundCommitted(
        round=event.round, base=event.base, checkpoint=event.checkpoint, norm=event.norm, drift=event.drift,
        clock=open.clock if skipped else None, measured=not skipped and _is_measured(c, event.round),
    )  # fmt: skip
    return Decision(event=event, now=now, records=(record,))


def _is_measured(c: Coordinator, round: int) -> bool:
    every = c.settings.evaluate_every
    return bool(every) and (round % every == 0 or round == c.settings.rounds)


def _fold_failed(c: Coordinator, event: ev.AggregationFailed, now: float) -> Decision:
    """Discard a closed round and ask its clients once more, but for those to blame; most have their training behind them."""
    open = c.state.open.get(event.round)
    if open is None or open.closed is None:
        raise ProtocolError(f"round {event.round} is not closed: it cannot be asked for again")
    blamed = [client for client in event.clients if client in open.accepted]
    message = f"its update could not be folded: {event.why}"
    out = (ClientFailed(round=open.round, client=client, message=message, redo=True) for client in blamed)
    discarded = (RoundDiscarded(round=open.round, why=event.why), *out)
    again, need = _asked_again(c, open, blamed), c.rules.need(open)
    end = ""
    if open.folds_failed >= c.settings.waiting.retries:
        end = f"it was tried {open.folds_failed + 1} times (waiting.retries)"
    elif blamed and len(again.clients) < need and not c.settings.buffered:
        end = f"without {', '.join(blamed)} there are fewer than the {need} updates that its quorum needs"
    if end:
        return round_rules.give_up(c, event, open, now, f"round {event.round}: {event.why}; {end}", discarded)
    without = f" without {', '.join(blamed)}" if blamed else ""
    text = f"round {event.round} is discarded and asked for again{without}: {event.why}"
    records = discarded if c.settings.buffered else (*discarded, again)  # a buffer fills up again by itself
    return Decision(event=event, now=now, records=records, commands=(ev.LogMessage(text=text),))


def _asked_again(c: Coordinator, open: RoundState, without: Sequence[str] = ()) -> RoundOpened:
    """The round once more, for its clients but for some, and for others in the place of these as far as there are any."""
    kept = [client for client in open.drawn if client not in without]
    fresh = (
        c.sampler.draw(open.round, count=len(without), attempt=open.attempt + 1, without=open.drawn) if without else ()
    )
    return RoundOpened(
        round=open.round, base=open.base, clients=(*kept, *fresh), wanted=open.wanted, clock=open.clock, steps=open.steps,
        fragment=open.fragment, least=open.least,
    )  # fmt: skip


def lost(c: Coordinator, round: int, clients: Sequence[str]) -> tuple[Record, ...]:
    """What follows where accepted updates of a round are not here any more. Masks of a secure sum fit no other values."""
    if c.settings.secure is None:
        return (UpdatesLost(round=round, clients=tuple(clients)),)
    why = f"masked values of {', '.join(clients)} are not on the server's disk any more"
    return RoundDiscarded(round=round, why=why), _asked_again(c, c.state.open[round])
