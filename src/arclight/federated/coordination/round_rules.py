"""Decide when rounds open, close, retry and end, and when work is assigned: pure rules.

`message_rules` calls `tick` for each `Tick`: one thing that is due, so the driver ticks until nothing follows. It also retries rounds that
could not be aggregated by these; `coordinator` asks `is_urgent`. In: a `Situation`; out: a decision. Simulations run the same rules.
A timer of a new kind needs a case in `_on_timer`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from statistics import median_low

from arclight.federated.coordination import answers
from arclight.federated.coordination import events as ev
from arclight.federated.coordination.cluster import Assignment, NodeState, Timer
from arclight.federated.coordination.events import Answer, Change, Command, Decision, Event
from arclight.federated.coordination.records import (
    ClientFailed,
    Record,
    RoundClosed,
    RoundDiscarded,
    RoundEvaluated,
    RoundOpened,
    RoundSkipped,
)
from arclight.federated.coordination.run_state import RoundState
from arclight.federated.coordination.situation import Situation
from arclight.federated.protocol import Wait

STATUS_INTERVAL_S = 30.0
"""Seconds between log lines that say what is waited for."""


def tick(s: Situation, event: Event, now: float) -> Decision:
    """Decide the next thing that is due."""
    if s.state.committed < 0:
        return Decision(event=event, now=now)
    if s.state.ended is not None:
        return Decision(event=event, now=now, commands=answers.closed(s, s.state.ended, failed=s.state.failed))
    if s.cluster.timers and s.cluster.timers[0].at <= now:
        return _on_timer(s, event, s.cluster.timers[0], now)
    return _next_transition(s, event, now) or _assign_waiting(s, event, now)


def is_urgent(s: Situation) -> bool:
    """Return True if something is due now."""
    if s.state.committed < 0:
        return False
    if s.state.ended is not None:
        return bool(s.cluster.held_requests)
    return bool(_next_transition(s, ev.Tick(), 0.0)) or bool(s.cluster.ready)


# -- rounds ------------------------------------------------------------------------------------------------------------


def _next_transition(s: Situation, event: Event, now: float) -> Decision:
    """Return the first due step: close, aggregate, evaluate or open a round, or end the run."""
    state, cluster = s.state, s.cluster
    for open in state.open.values():
        if open.closed is None and open.wanted and (decision := _close_if_ready(s, event, open, now)):
            return decision
    due = state.open.get(state.committed + 1)
    if due is not None and due.closed is not None and cluster.aggregating != due.round:
        updates = tuple(due.accepted[client] for client in due.closed)
        clock = due.clock + due.steps if updates else due.clock
        command = ev.Aggregate(round=due.round, fragment=due.fragment, clock=clock, updates=updates)
        change = partial(cluster.mark_aggregating, due.round)
        return Decision(event=event, now=now, commands=(command,), changes=(change,))
    for round, measuring in state.measuring.items():
        if s.settings.evaluate_on == "server":
            if round not in cluster.evaluating_on_server:
                evaluate = ev.EvaluateOnServer(round=round, base=measuring.base)
                change = partial(cluster.mark_evaluating, round)
                return Decision(event=event, now=now, commands=(evaluate,), changes=(change,))
        elif state.committed > round + s.settings.overlap or not any(
            Assignment("evaluate", round, x) in cluster.assignments for x in measuring.waiting
        ):
            return Decision(event=event, now=now, records=(_mean_evaluation(s, round),))
    following = state.opened + 1
    if following <= s.settings.rounds and state.committed >= following - 1 - s.settings.overlap:
        if cluster.started or len(cluster.sessions) >= s.settings.waiting.nodes:
            return _open(s, event, following, now)
    elif state.committed >= s.settings.rounds and not state.measuring:
        return answers.end(s, event, now, f"all {s.settings.rounds} rounds are done", failed=False)
    return Decision(event=event, now=now)


def _mean_evaluation(s: Situation, round: int) -> Record:
    measuring = s.state.measuring[round]
    return RoundEvaluated(round=round, client=None, samples=measuring.samples, metrics=measuring.mean)


def _open(s: Situation, event: Event, round: int, now: float) -> Decision:
    state, settings = s.state, s.settings
    fragments = settings.streaming.fragments if settings.streaming else 1
    steps = settings.local_steps // fragments
    gathering = state.open.get(round)
    kept: list[str] = []
    count = None
    if settings.buffered:  # those at work go on; those that have not started do so from these weights
        busy = {work.client for work, node in s.cluster.assignments.items() if work.kind == "fit" and _has(node, work)}
        waiting = [client for clients in state.assigned.values() for client in clients]
        kept = [client for client in waiting if client not in busy]
        busy |= set(gathering.accepted if gathering else ())
        count = max(0, s.sampler.asked - len(waiting))
        drawn = (*kept, *(s.sampler.draw(round, count=count, without=[*waiting, *busy]) if count else ()))
        wanted = settings.buffered.size
    else:
        drawn = s.sampler.draw(round)
        wanted = min(s.sampler.wanted, len(drawn))
    record = RoundOpened(
        round=round, base=state.bases[max(min(state.bases), round - 1 - s.settings.overlap)], clients=drawn, wanted=wanted,
        clock=state.clock + steps * (round - state.committed - 1), steps=steps,
        fragment=round % fragments if settings.streaming else None,
        least=s.records.quorum(wanted) if settings.noise is not None and settings.noise.by == "clients" else 0,
    )  # fmt: skip
    started = () if s.cluster.started else (s.cluster.mark_started,)
    return Decision(event=event, now=now, records=(record,), changes=started)


def _has(node: NodeState | None, work: Assignment) -> bool:
    return node is not None and work in node.tasks


def _possible(s: Situation, open: RoundState) -> int:
    """Count the updates that may still come into a round."""
    if s.settings.buffered:
        return sum(len(clients) for clients in s.state.assigned.values())
    return len(s.state.assigned.get(open.round, ()))


def _close_if_ready(s: Situation, event: Event, open: RoundState, now: float) -> Decision:
    """Close a round that has enough updates, or retry one that can no longer get them."""
    need, got, possible = s.records.need(open), len(open.accepted), _possible(s, open)
    grace = ("grace", open.round, open.attempt) in s.cluster.passed
    late = ("deadline", open.round, open.attempt) in s.cluster.passed
    if got >= max(open.wanted, need) or (got >= need and (grace or late or not _is_awaited(s, open))):
        if out := _outweighing(s, open):
            return Decision(event=event, now=now, records=out)
        away = () if s.settings.buffered else _away(s, open)
        closed = RoundClosed(round=open.round, clients=s.roster.sort(open.accepted))
        return Decision(event=event, now=now, records=(*away, closed))
    if late or got + possible < need:
        return _retry(s, event, open, now, late=late)
    return Decision(event=event, now=now)


def _is_awaited(s: Situation, open: RoundState) -> bool:
    """Return True while an update may still come for a round with a quorum.

    Its client has a node, or has not left or been waited for in vain.
    """
    return any(s.cluster.assignments.get(work) is not None or not s.cluster.is_away(work) for work in _fits_of(s, open))


def _away(s: Situation, open: RoundState) -> tuple[Record, ...]:
    """Exclude clients whose node has left or never came, with the reason."""
    cluster = s.cluster
    gone = [x.client for x in _fits_of(s, open) if cluster.assignments.get(x) is None and cluster.is_away(x)]
    return tuple(ClientFailed(round=open.round, client=x, message=_explain_absence(s, x), lost=True) for x in gone)


def _fits_of(s: Situation, open: RoundState) -> Iterator[Assignment]:
    """Iterate over the assignments whose updates may still come into a round."""
    rounds = s.state.assigned if s.settings.buffered else (open.round,)
    return (Assignment("fit", round, client) for round in rounds for client in s.state.assigned.get(round, ()))


def _outweighing(s: Situation, open: RoundState) -> tuple[Record, ...]:
    """Exclude clients that claim far more samples (or tokens) per step than the median.

    The first updates of a run have no earlier ones to be compared with when they arrive.
    """
    times, by = s.settings.checks.weight_times, s.settings.weigh_by
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


def _retry(s: Situation, event: Event, open: RoundState, now: float, *, late: bool) -> Decision:
    """Retry a round with other clients or returned ones, or give it up."""
    need, waiting, empty_since = s.records.need(open), s.settings.waiting, s.cluster.empty_since
    if not s.cluster.sessions and empty_since is not None and empty_since + waiting.join_timeout_s > now:
        return Decision(event=event, now=now)  # a node may join
    why = f"round {open.round} has {len(open.accepted)} of the {need} updates that its quorum needs"
    if late:
        why += f" after {waiting.deadline_s} s"
    why += _describe_failures(s, open, late=late)
    fewer = f", or let rounds close with fewer updates (waiting.quorum, now {waiting.quorum:g})" if need > 1 else ""
    if need > s.records.quorum(open.wanted):
        fewer = f"; {open.least} clients share its noise: fork the run from round {open.round - 1} to have fewer do so"
    if not s.cluster.sessions:
        return answers.end(s, event, now, f"{why}; no node is here", failed=True)
    if open.attempt >= waiting.retries:
        return give_up(s, event, open, now, f"{why}; it was tried {open.attempt + 1} times: mend that{fewer}")
    kept = dict.fromkeys((*open.accepted, *answers.at_work(s, open)))
    without = {*kept, *(client for client, failed in open.failed.items() if not failed.lost)}
    if s.settings.buffered:  # clients at work, or has an update in the next buffer since this one was closed
        without |= {client for clients in s.state.assigned.values() for client in clients}
        without |= {client for other in s.state.open.values() for client in other.accepted}
    busy = _possible(s, open) + (0 if s.settings.buffered else len(open.accepted))
    count = max(0, s.sampler.asked - busy)
    fresh = s.sampler.draw(open.round, count=count, attempt=open.attempt + 1, without=without) if count else ()
    if len(open.accepted) + _possible(s, open) + len(fresh) < need:
        return give_up(s, event, open, now, f"{why}; no others could be asked: mend that{fewer}")
    record = reopened(open, (*kept, *fresh))
    records = (*_another_sum(open, why), record) if fresh and s.settings.secure is not None else (record,)
    return Decision(event=event, now=now, records=records, commands=(ev.LogMessage(text=f"{why}; it asks again"),))


def reopened(open: RoundState, clients: tuple[str, ...]) -> RoundOpened:
    """Return the record that asks these clients for the round once more."""
    return RoundOpened(
        round=open.round, base=open.base, clients=clients, wanted=open.wanted, clock=open.clock, steps=open.steps,
        fragment=open.fragment, least=open.least,
    )  # fmt: skip


def _another_sum(open: RoundState, why: str) -> tuple[Record, ...]:
    """Discard a round's masked updates: new clients cannot join a sum with agreed masks."""
    out = (failed for failed in open.failed.values() if not failed.lost)
    return RoundDiscarded(round=open.round, why=why), *out


def give_up(
    s: Situation, event: Event, open: RoundState, now: float, why: str, records: tuple[Record, ...] = ()
) -> Decision:
    """End the run, or skip the round, as the settings say; ``records`` come first.

    If the former weights of a round that was to be skipped could not be written, the run ends in any case.
    """
    if s.settings.waiting.on_failed_round == "skip" and open.closed != ():
        message = ev.LogMessage(
            text=f"round {open.round} is skipped, its weights stay those of the round before: {why}"
        )
        skipped = RoundSkipped(round=open.round, why=why)
        return Decision(event=event, now=now, records=(*records, skipped), commands=(message,))
    ended = answers.end(s, event, now, why, failed=True)
    return replace(ended, records=(*records, *ended.records))


def _describe_failures(s: Situation, open: RoundState, *, late: bool) -> str:
    """Describe the clients that have failed, and why.

    If none has, or time is up (``late``), those that are still at work are named.
    """
    alike: dict[str, list[str]] = {}
    for client, what in open.failed.items():
        alike.setdefault(what.message, []).append(client)
    failed = [f"{', '.join(clients[:5])}{answers.more(clients)} ({message})" for message, clients in alike.items()]
    works = [Assignment("fit", open.round, client) for client in answers.at_work(s, open)]
    waited = [f"{work.client} ({answers.progress(s, work)})" for work in works] if late or not failed else []
    parts = []
    for title, names in (("failed", failed), ("not heard from", waited)):
        if names:
            parts.append(f"{title}: {', '.join(names[:5])}{answers.more(names)}")
    return "; " + "; ".join(parts) if parts else ""


# -- held requests -----------------------------------------------------------------------------------------------------


def _assign_waiting(s: Situation, event: Event, now: float) -> Decision:
    """Assign work to the nodes whose requests are held."""
    commands: list[Command] = []
    changes: list[Change] = []
    for node in s.cluster.ready.values():
        work = s.cluster.next_assignment(node)
        if work is not None:
            to = next(iter(node.held_requests))
            commands.append(Answer(to=to, plan=answers.plan(s, work, now)))
            changes.append(partial(s.cluster.start, to, work, now))
    return Decision(event=event, now=now, commands=tuple(commands), changes=tuple(changes))


# -- timers ------------------------------------------------------------------------------------------------------------


def _on_timer(s: Situation, event: Event, timer: Timer, now: float) -> Decision:
    cluster = s.cluster
    fired = Decision(event=event, now=now, before=(cluster.pop_timer,))
    match timer.kind:
        case "silence" | "stall":
            return _watch(s, fired, timer)
        case "lease":
            return _end_lease(s, fired, str(timer.key))
        case "ask" if timer.key in cluster.held_requests:
            wait = Wait(retry_after_s=0.0, waiting_for=answers.status(s, now))
            return replace(fired, commands=(Answer(to=str(timer.key), plan=wait),))
        case "home":
            return _give_up_waiting(s, fired, timer)
        case "deadline" | "grace":
            assert isinstance(timer.key, tuple)
            round, attempt = timer.key
            open = s.state.open.get(round)
            is_current = open is not None and open.attempt == attempt
            passed = partial(cluster.mark_passed, timer.kind, round, attempt)
            return replace(fired, changes=(passed,) if is_current else ())
        case "settle":
            return replace(fired, changes=(partial(cluster.end_rejoin, now),))
        case "join" if not cluster.started and s.state.committed < s.settings.rounds:
            here, waiting = len(cluster.sessions), s.settings.waiting
            why = f"{here} of {waiting.nodes} nodes came within {waiting.join_timeout_s} s before the first round"
            return answers.end(s, event, now, why, failed=True)
        case "measure" if timer.key in s.state.measuring:
            return replace(fired, records=(_mean_evaluation(s, int(str(timer.key))),))
        case "say":
            again = partial(cluster.pop_timer, now + STATUS_INTERVAL_S)
            return replace(fired, before=(again,), commands=(ev.LogMessage(text=answers.status(s, now)),))
    return fired


def _watch(s: Situation, fired: Decision, timer: Timer) -> Decision:
    """Declare a node lost that was silent, or made no progress, for too long."""
    node, waiting, now = s.cluster.sessions.get(str(timer.key)), s.settings.waiting, fired.now
    if node is None:
        return fired
    if timer.kind == "silence":
        until, why = (
            node.last_contact + waiting.silence_s,
            f"nothing was heard of it for {now - node.last_contact:.1f} s",
        )
    else:
        busy = bool(node.tasks) or (s.cluster.next_assignment(node) is not None and not node.held_requests)
        until = (node.last_progress if busy else now) + waiting.no_progress_timeout_s
        why = f"it lives, but has done nothing for {now - node.last_progress:.0f} s"
    if until > now:
        return replace(fired, before=(partial(s.cluster.pop_timer, until),))
    asks = tuple(answers.receipt(s, to, ("session", f"{why}: join again")) for to in node.held_requests)
    lost = ev.NodeLost(node=node.name, session=node.session, why=why)
    return replace(fired, commands=(*asks, lost), changes=(partial(s.cluster.mark_lost, node, now),))


def _end_lease(s: Situation, fired: Decision, session: str) -> Decision:
    """Evict a lost node that has not come back within its lease."""
    node = next((n for n in s.cluster.nodes.values() if n.session == session and n.lost is not None), None)
    if node is None:
        return fired
    moved = tuple(
        ev.ClientMoved(client=task.work.client, round=task.work.round, node=node.name)
        for task in node.tasks.values()
        if task.work.kind == "fit" and not node.clients
    )
    return replace(fired, commands=moved, changes=(partial(s.cluster.evict, node, fired.now),))


def _give_up_waiting(s: Situation, fired: Decision, timer: Timer) -> Decision:
    """Exclude a client, or skip its evaluation, if no node that could do it has joined in time."""
    work, waiting, cluster = timer.key, s.settings.waiting, s.cluster
    assert isinstance(work, Assignment)
    until = cluster.unassigned.get(work)
    if until is None or until > timer.at:
        return fired
    if cluster.empty_since is not None and cluster.empty_since + waiting.join_timeout_s > fired.now:
        return replace(fired, changes=(partial(cluster.unassign, work, cluster.empty_since + waiting.join_timeout_s),))
    if work.kind == "evaluate":
        return replace(fired, changes=(partial(cluster.finish, work),))
    since = cluster.departed.get(work.client)
    if since is not None and since.at + waiting.join_timeout_s > fired.now and _is_irreplaceable(s, work):
        return replace(fired, changes=(partial(cluster.unassign, work, since.at + waiting.join_timeout_s),))
    failed = ClientFailed(round=work.round, client=work.client, message=_explain_absence(s, work.client), lost=True)
    return replace(fired, records=(failed,))


def _is_irreplaceable(s: Situation, work: Assignment) -> bool:
    """Return True if a round asks all clients, so that none can replace one that is away.

    If the others are a quorum, the round closes without waiting for it.
    """
    open = None if s.settings.buffered else s.state.open.get(work.round)
    return open is not None and len(open.drawn) >= len(s.roster)


def _explain_absence(s: Situation, client: str) -> str:
    message = "no node that could do it is here any more, or came in time"
    since = s.cluster.departed.get(client)
    return f"{message}; its own has left: {since.why}" if since is not None and since.why else message
