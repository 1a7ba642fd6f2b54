"""What follows from the state and the time by themselves. Pure, and one thing at a time: a driver ticks until nothing follows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median_low
from typing import TYPE_CHECKING

from arclight.federated.coordination import events as ev
from arclight.federated.coordination.cluster import (
    Assignment,
    DeadlinePassed,
    EvaluationSkipped,
    Node,
    NodeEvicted,
    Timer,
    TimerFired,
    Unassigned,
)
from arclight.federated.coordination.events import Answer, Command, Decision, EvaluatePlan, Event, FitPlan, Note
from arclight.federated.coordination.records import (
    ClientFailed,
    Record,
    RoundClosed,
    RoundDiscarded,
    RoundEvaluated,
    RoundOpened,
    RoundSkipped,
    RunEnded,
)
from arclight.federated.coordination.run_state import RoundState
from arclight.federated.protocol import Close, Receipt, Wait

if TYPE_CHECKING:
    from arclight.federated.coordination.coordinator import Coordinator

SAY_EVERY = 30.0
"""Seconds between lines that say what is waited for."""


def tick(c: Coordinator, event: Event, now: float) -> Decision:
    """The next thing that is due."""
    if c.state.committed < 0:
        return Decision(event=event, now=now)
    if c.state.ended is not None:
        closing = tuple(Answer(to=to, plan=Close(why=c.state.ended, failed=c.state.failed)) for to in c.present.asks)
        return Decision(event=event, now=now, commands=closing)
    if c.present.timers and c.present.timers[0].at <= now:
        return _ring(c, event, c.present.timers[0], now)
    return _rounds(c, event, now) or _serve(c, event, now)


def urgent(c: Coordinator) -> bool:
    """Whether something is due without the time going on."""
    if c.state.committed < 0:
        return False
    if c.state.ended is not None:
        return bool(c.present.asks)
    return bool(_rounds(c, ev.Tick(), 0.0)) or bool(c.present.ready)


def plan(c: Coordinator, work: Assignment, now: float) -> FitPlan | EvaluatePlan:
    if work.kind == "evaluate":
        return EvaluatePlan(
            client=work.client, round=work.round, base=c.state.measuring[work.round].base, deadline=c.settings.waiting.deadline
        )  # fmt: skip
    open, until = c.state.begun[work.round], c.present.deadlines.get(work.round)
    return FitPlan(
        client=work.client, round=work.round, fragment=open.fragment, base=open.base, clock=open.clock, steps=open.steps,
        seed=c.sampler.seed_of(work.round, work.client), deadline=None if until is None else max(0.0, until - now),
        discarded=open.discarded, least=open.least, redo=work.client in open.redo,
    )  # fmt: skip


def end(c: Coordinator, event: Event, now: float, why: str, *, failed: bool) -> Decision:
    closing = tuple(Answer(to=to, plan=Close(why=why, failed=failed)) for to in c.present.asks)
    return Decision(
        event=event, now=now, records=(RunEnded(why=why, failed=failed),), commands=(*closing, ev.RunOver(why=why, failed=failed))
    )  # fmt: skip


# -- rounds ------------------------------------------------------------------------------------------------------------


def _rounds(c: Coordinator, event: Event, now: float) -> Decision:
    state = c.state
    for open in state.open.values():
        if open.closed is None and open.wanted and (decision := _settle(c, event, open, now)):
            return decision
    due = state.open.get(state.committed + 1)
    if due is not None and due.closed is not None and c.present.folding != due.round:
        updates = tuple(due.accepted[client] for client in due.closed)
        clock = due.clock + due.steps if updates else due.clock
        fold = ev.Aggregate(round=due.round, fragment=due.fragment, clock=clock, updates=updates)
        return Decision(event=event, now=now, commands=(fold,))
    for round, measuring in state.measuring.items():
        if c.settings.evaluate_on == "server":
            if round not in c.present.measured:
                return Decision(event=event, now=now, commands=(ev.EvaluateOnServer(round=round, base=measuring.base),))
        elif state.committed > round + c.settings.overlap or not any(
            Assignment("evaluate", round, x) in c.present.where for x in measuring.waiting
        ):
            return _measured(event, round, c, now)
    following = state.opened + 1
    if following <= c.settings.rounds and state.committed >= following - 1 - c.settings.overlap:
        if c.present.started or len(c.present.sessions) >= c.settings.waiting.nodes:
            return _open(c, event, following, now)
    elif state.committed >= c.settings.rounds and not state.measuring:
        return end(c, event, now, f"all {c.settings.rounds} rounds are done", failed=False)
    return Decision(event=event, now=now)


def _measured(event: Event, round: int, c: Coordinator, now: float) -> Decision:
    measuring = c.state.measuring[round]
    record = RoundEvaluated(round=round, client=None, samples=measuring.samples, metrics=measuring.mean)
    return Decision(event=event, now=now, records=(record,))


def _possible(c: Coordinator, open: RoundState) -> int:
    """Updates that may still come into a round."""
    if c.settings.buffered:
        return sum(len(clients) for clients in c.state.outstanding.values())
    return len(c.state.outstanding.get(open.round, ()))


def _settle(c: Coordinator, event: Event, open: RoundState, now: float) -> Decision:
    """Close a round, or find that it cannot be closed."""
    need, got, possible = c.rules.need(open), len(open.accepted), _possible(c, open)
    grace = ("grace", open.round, open.attempt) in c.present.over
    late = ("deadline", open.round, open.attempt) in c.present.over
    if got >= max(open.wanted, need) or (got >= need and (grace or late or not _is_awaited(c, open))):
        if out := _outweighing(c, open):
            return Decision(event=event, now=now, records=out)
        away = () if c.settings.buffered else _away(c, open)
        closed = RoundClosed(round=open.round, clients=c.roster.sort(open.accepted))
        return Decision(event=event, now=now, records=(*away, closed))
    if late or got + possible < need:
        return _again(c, event, open, now, late=late)
    return Decision(event=event, now=now)


def _is_awaited(c: Coordinator, open: RoundState) -> bool:
    """Return True while a client whose node has not gone away is at work for a round that has its quorum."""
    return any(c.present.where.get(work) is not None or not c.present.is_away(work) for work in _asked_of(c, open))


def _away(c: Coordinator, open: RoundState) -> tuple[Record, ...]:
    """Say of clients that are not waited for why they are not in the round."""
    gone = [work.client for work in _asked_of(c, open) if c.present.where.get(work) is None and c.present.is_away(work)]
    return tuple(ClientFailed(round=open.round, client=x, message=_gone(c, x), lost=True) for x in gone)


def _asked_of(c: Coordinator, open: RoundState) -> Iterator[Assignment]:
    """Everything that may still come into a round."""
    rounds = c.state.outstanding if c.settings.buffered else (open.round,)
    return (Assignment("fit", round, client) for round in rounds for client in c.state.outstanding.get(round, ()))


def _outweighing(c: Coordinator, open: RoundState) -> tuple[Record, ...]:
    """Put out clients that claim far more samples (or tokens) per step than their round's median: the first updates of a run
    have no earlier ones to be compared with when they come.
    """
    times, by = c.settings.checks.weight_times, c.settings.weigh_by
    if by == "equal" or not times or len(open.accepted) < 2:
        return ()
    each = {x: (u.tokens if by == "tokens" else u.samples) / max(u.steps, 1) for x, u in open.accepted.items()}
    usual = median_low(each.values())
    return tuple(
        ClientFailed(
            round=open.round,
            client=client,
            message=f"it says {own:,.0f} {by} per step, {own / usual:,.0f} times the {usual:,.0f} of the round's others "
            f"(checks.weight_times allows {times:g}): it would outweigh them",
            redo=True,
        )
        for client, own in each.items()
        if usual > 0 and own > times * usual
    )


def _again(c: Coordinator, event: Event, open: RoundState, now: float, *, late: bool) -> Decision:
    """Ask others, or those that have come back; or end the run."""
    need, waiting, alone = c.rules.need(open), c.settings.waiting, c.present.alone_since
    if not c.present.sessions and alone is not None and alone + waiting.join > now:
        return Decision(event=event, now=now)  # somebody may come
    why = f"round {open.round} has {len(open.accepted)} of the {need} updates that its quorum needs"
    if late:
        why += f" after {waiting.deadline} s"
    why += _blame(c, open, late=late)
    fewer = f", or let rounds close with fewer updates (waiting.quorum, now {waiting.quorum:g})" if need > 1 else ""
    if need > c.rules.quorum(open.wanted):
        fewer = f"; {open.least} clients share its noise: fork the run from round {open.round - 1} to have fewer do so"
    if not c.present.sessions:
        return end(c, event, now, f"{why}; no node is here", failed=True)
    if open.attempt >= waiting.retries:
        return give_up(c, event, open, now, f"{why}; it was tried {open.attempt + 1} times: mend that{fewer}")
    kept = dict.fromkeys((*open.accepted, *_at_work(c, open)))
    without = {*kept, *(client for client, failed in open.failed.items() if not failed.lost)}
    if c.settings.buffered:  # whoever is at work, or has an update in the next buffer since this one was closed
        without |= {client for clients in c.state.outstanding.values() for client in clients}
        without |= {client for other in c.state.open.values() for client in other.accepted}
    busy = _possible(c, open) + (0 if c.settings.buffered else len(open.accepted))
    count = max(0, c.sampler.asked - busy)
    fresh = c.sampler.draw(open.round, count=count, attempt=open.attempt + 1, without=without) if count else ()
    if len(open.accepted) + _possible(c, open) + len(fresh) < need:
        return give_up(c, event, open, now, f"{why}; no others could be asked: mend that{fewer}")
    record = RoundOpened(
        round=open.round, base=open.base, clients=(*kept, *fresh), wanted=open.wanted, clock=open.clock, steps=open.steps,
        fragment=open.fragment, least=open.least,
    )  # fmt: skip
    records = (*_another_sum(open, why), record) if fresh and c.settings.secure is not None else (record,)
    return Decision(event=event, now=now, records=records, commands=(ev.LogMessage(text=f"{why}; it asks again"),))


def _another_sum(open: RoundState, why: str) -> tuple[Record, ...]:
    """Discard what was masked: whoever is asked now cannot be in a secure sum whose clients have agreed on their masks."""
    out = (failed for failed in open.failed.values() if not failed.lost)
    return RoundDiscarded(round=open.round, why=why), *out


def give_up(
    c: Coordinator, event: Event, open: RoundState, now: float, why: str, records: tuple[Record, ...] = ()
) -> Decision:
    """End the run, or go on with the next round, as the settings say; ``records`` come first.

    A round that was to be skipped and whose former weights could not be written ends the run in any case.
    """
    if c.settings.waiting.on_failed_round == "skip" and open.closed != ():
        said = ev.LogMessage(text=f"round {open.round} is skipped, its weights stay those of the round before: {why}")
        skipped = RoundSkipped(round=open.round, why=why)
        return Decision(event=event, now=now, records=(*records, skipped), commands=(said,))
    ended = end(c, event, now, why, failed=True)
    return replace(ended, records=(*records, *ended.records))


def _at_work(c: Coordinator, open: RoundState) -> list[str]:
    return list(c.state.outstanding.get(open.round, ()))


def _blame(c: Coordinator, open: RoundState, *, late: bool) -> str:
    """Who has failed, and why; where nobody has, or time is up, who is still at work."""
    alike: dict[str, list[str]] = {}
    for client, what in open.failed.items():
        alike.setdefault(what.message, []).append(client)
    failed = [f"{', '.join(clients[:5])}{_more(clients)} ({message})" for message, clients in alike.items()]
    waited = [f"{client} ({_whereabouts(c, Assignment('fit', open.round, client))})" for client in _at_work(c, open)]
    waited = waited if late or not failed else []
    parts = []
    for title, names in (("failed", failed), ("not heard from", waited)):
        if names:
            parts.append(f"{title}: {', '.join(names[:5])}{_more(names)}")
    return "; " + "; ".join(parts) if parts else ""


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - 5} more" if len(names) > 5 else ""


def _open(c: Coordinator, event: Event, round: int, now: float) -> Decision:
    state, settings = c.state, c.settings
    fragments = settings.streaming.fragments if settings.streaming else 1
    steps = settings.local_steps // fragments
    gathering = state.open.get(round)
    kept: list[str] = []
    count = None
    if settings.buffered:  # those at work go on; those that have not begun do so from these weights
        busy = {work.client for work, node in c.present.where.items() if work.kind == "fit" and _begun(work, node)}
        waiting = [client for clients in state.outstanding.values() for client in clients]
        kept = [client for client in waiting if client not in busy]
        busy |= set(gathering.accepted if gathering else ())
        count = max(0, c.sampler.asked - len(waiting))
        drawn = (*kept, *(c.sampler.draw(round, count=count, without=[*waiting, *busy]) if count else ()))
        wanted = settings.buffered.size
    else:
        drawn = c.sampler.draw(round)
        wanted = min(c.sampler.wanted, len(drawn))
    record = RoundOpened(
        round=round, base=state.bases[max(min(state.bases), round - 1 - c.settings.overlap)], clients=drawn, wanted=wanted,
        clock=state.clock + steps * (round - state.committed - 1), steps=steps,
        fragment=round % fragments if settings.streaming else None,
        least=c.rules.quorum(wanted) if settings.noise is not None and settings.noise.by == "clients" else 0,
    )  # fmt: skip
    started = () if c.present.started else (DeadlinePassed(what=("start", round, 0)),)
    return Decision(event=event, now=now, records=(record,), notes=started)


def _begun(work: Assignment, node: Node | None) -> bool:
    return node is not None and work in node.tasks


# -- nodes that ask ----------------------------------------------------------------------------------------------------


def _serve(c: Coordinator, event: Event, now: float) -> Decision:
    commands: list[Command] = []
    for node in c.present.ready.values():
        work = c.present.next(node)
        if work is not None:
            commands.append(Answer(to=next(iter(node.asks)), plan=plan(c, work, now)))
    return Decision(event=event, now=now, commands=tuple(commands))


# -- time --------------------------------------------------------------------------------------------------------------


def _ring(c: Coordinator, event: Event, timer: Timer, now: float) -> Decision:
    records: tuple[Record, ...] = ()
    commands: tuple[Command, ...] = ()
    notes: tuple[Note, ...] = (TimerFired(),)
    match timer.kind:
        case "silence" | "stall":
            commands, notes = _watch(c, timer, now)
        case "lease":
            commands, notes = _lease(c, str(timer.key))
        case "ask" if timer.key in c.present.asks:
            wait = Wait(seconds=0.0, about=about(c, now))
            commands = (Answer(to=str(timer.key), plan=wait),)
        case "home":
            records, notes = _homeless(c, timer, now)
        case "deadline" | "grace":
            notes = (TimerFired(), *_over(c, timer))
        case "settle":
            notes = (TimerFired(), DeadlinePassed(what=("settle", 0, 0)))
        case "join" if not c.present.started and c.state.committed < c.settings.rounds:
            came = len(c.present.sessions)
            why = f"{came} of {c.settings.waiting.nodes} nodes came within {c.settings.waiting.join} s before the first round"
            return end(c, event, now, why, failed=True)
        case "measure" if timer.key in c.state.measuring:
            records = _measured(event, int(str(timer.key)), c, now).records
        case "say":
            commands, notes = (ev.LogMessage(text=about(c, now)),), (TimerFired(again=now + SAY_EVERY),)
    return Decision(event=event, now=now, records=records, commands=commands, notes=notes)


def _over(c: Coordinator, timer: Timer) -> tuple[Note, ...]:
    assert isinstance(timer.key, tuple)
    round, attempt = timer.key
    open = c.state.open.get(round)
    return (DeadlinePassed(what=(timer.kind, round, attempt)),) if open is not None and open.attempt == attempt else ()


def _watch(c: Coordinator, timer: Timer, now: float) -> tuple[tuple[Command, ...], tuple[Note, ...]]:
    node, waiting = c.present.sessions.get(str(timer.key)), c.settings.waiting
    if node is None:
        return (), (TimerFired(),)
    if timer.kind == "silence":
        until, why = node.heard + waiting.silence, f"nothing was heard of it for {now - node.heard:.1f} s"
    else:
        busy = bool(node.tasks) or (c.present.next(node) is not None and not node.asks)
        until = (node.progress if busy else now) + waiting.stall
        why = f"it lives, but has done nothing for {now - node.progress:.0f} s"
    if until > now:
        return (), (TimerFired(again=until),)
    gone = Receipt(accepted=False, reason="session", message=f"{why}: join again", committed=c.state.committed)
    asks = tuple(Answer(to=to, plan=gone) for to in node.asks)
    return (*asks, ev.NodeLost(node=node.name, session=node.session, why=why)), (TimerFired(),)


def _lease(c: Coordinator, session: str) -> tuple[tuple[Command, ...], tuple[Note, ...]]:
    node = next((n for n in c.present.nodes.values() if n.session == session and n.lost is not None), None)
    if node is None:
        return (), (TimerFired(),)
    moved = tuple(
        ev.ClientMoved(client=task.work.client, round=task.work.round, node=node.name)
        for task in node.tasks.values()
        if task.work.kind == "fit" and not node.clients
    )
    return moved, (TimerFired(), NodeEvicted(node=node.name))


def _homeless(c: Coordinator, timer: Timer, now: float) -> tuple[tuple[Record, ...], tuple[Note, ...]]:
    work, waiting = timer.key, c.settings.waiting
    assert isinstance(work, Assignment)
    until = c.present.homeless.get(work)
    if until is None or until > timer.at:
        return (), (TimerFired(),)
    if c.present.alone_since is not None and c.present.alone_since + waiting.join > now:
        return (), (TimerFired(), Unassigned(work=work, until=c.present.alone_since + waiting.join))
    if work.kind == "evaluate":
        return (), (TimerFired(), EvaluationSkipped(work=work))
    since = c.present.departed.get(work.client)
    if since is not None and since.at + waiting.join > now and _is_irreplaceable(c, work):
        return (), (TimerFired(), Unassigned(work=work, until=since.at + waiting.join))
    failed = ClientFailed(round=work.round, client=work.client, message=_gone(c, work.client), lost=True)
    return (failed,), (TimerFired(),)


def _is_irreplaceable(c: Coordinator, work: Assignment) -> bool:
    """Return True if a round asks all clients, so that no other can be asked in the place of one that is away.

    Where the others are a quorum, the round closes without waiting for it.
    """
    open = None if c.settings.buffered else c.state.open.get(work.round)
    return open is not None and len(open.drawn) >= len(c.roster)


def _gone(c: Coordinator, client: str) -> str:
    message = "no node that could do it is here any more, or came in time"
    since = c.present.departed.get(client)
    return f"{message}; its own has left: {since.why}" if since is not None and since.why else message


# -- words -------------------------------------------------------------------------------------------------------------


def about(c: Coordinator, now: float) -> str:
    state = c.state
    if state.ended is not None:
        return state.ended
    if not c.present.started and state.opened <= state.committed:
        return f"{len(c.present.sessions)} of {c.settings.waiting.nodes} nodes are here for the first round"
    parts = []
    for open in state.open.values():
        if open.closed is not None:
            parts.append(f"round {open.round} is being folded ({len(open.closed)} updates)")
        elif open.wanted:
            clients = (
                _at_work(c, open) if not c.settings.buffered else [x for w in state.outstanding.values() for x in w]
            )
            names = [f"{client} ({_whereabouts(c, _work(c, client, open))})" for client in clients[:5]]
            parts.append(
                f"round {open.round}: {len(open.accepted)} of {open.wanted} updates; waiting for {', '.join(names)}{_more(clients)}"
            )
    for round, measuring in state.measuring.items():
        parts.append(
            f"round {round} is measured" + (f" by {len(measuring.waiting)} clients" if measuring.waiting else "")
        )
    return "; ".join(parts) or "nothing is waited for"


def _work(c: Coordinator, client: str, open: RoundState) -> Assignment:
    begun = next((round for round, clients in c.state.outstanding.items() if client in clients), open.round)
    return Assignment("fit", begun if c.settings.buffered else open.round, client)


def _whereabouts(c: Coordinator, work: Assignment) -> str:
    node = c.present.where.get(work)
    if node is None:
        return "no node that could do it is here"
    task = node.tasks.get(work)
    if task is None:
        return f"queued at node {node.name}"
    done = f"step {task.steps}" if task.steps >= 0 else "given"
    return f"node {node.name} is lost, its work is kept" if node.lost is not None else f"node {node.name}, {done}"
