"""Build answers to nodes (plans, receipts, the end of the run) and log lines for the rules.

`message_rules` and `round_rules` build what they send with these, `coordinator` asks for `status`; nothing is changed here. Nodes react to
the types and reasons of answers, which are part of the protocol; texts may change.
"""

from __future__ import annotations

from collections.abc import Sequence

from arclight.federated.coordination.cluster import Assignment
from arclight.federated.coordination.events import Answer, Decision, EvaluatePlan, Event, FitPlan, RunOver
from arclight.federated.coordination.records import RunEnded
from arclight.federated.coordination.run_state import RoundState
from arclight.federated.coordination.situation import Situation
from arclight.federated.errors import Reason
from arclight.federated.protocol import Close, Receipt

UNKNOWN_SESSION = "this session is not known (any more): join again"


def plan(s: Situation, work: Assignment, now: float) -> FitPlan | EvaluatePlan:
    """Return the plan for an assignment."""
    if work.kind == "evaluate":
        return EvaluatePlan(
            client=work.client, round=work.round, base=s.state.measuring[work.round].base, deadline_s=s.settings.waiting.deadline_s
        )  # fmt: skip
    open, until = s.state.started_rounds[work.round], s.cluster.deadlines.get(work.round)
    return FitPlan(
        client=work.client, round=work.round, fragment=open.fragment, base=open.base, clock=open.clock, steps=open.steps,
        seed=s.sampler.seed_of(work.round, work.client), deadline_s=None if until is None else max(0.0, until - now),
        discarded=open.discarded, least=open.least, redo=work.client in open.redo,
    )  # fmt: skip


def receipt(s: Situation, to: str, refused: tuple[Reason, str] | None = None, message: str = "") -> Answer:
    """Return the receipt for a message that is accepted, or refused for a reason."""
    committed = s.state.committed
    if refused is None:
        return Answer(to=to, plan=Receipt(accepted=True, message=message, committed=committed))
    return Answer(to=to, plan=Receipt(accepted=False, reason=refused[0], message=refused[1], committed=committed))


def unknown_session(s: Situation, to: str) -> Answer:
    """Return the answer that lets a node join again."""
    return receipt(s, to, ("session", UNKNOWN_SESSION))


def closed(s: Situation, why: str, *, failed: bool) -> tuple[Answer, ...]:
    """Answer all held work requests by the end of the run."""
    return tuple(Answer(to=to, plan=Close(reason=why, failed=failed)) for to in s.cluster.held_requests)


def end(s: Situation, event: Event, now: float, why: str, *, failed: bool) -> Decision:
    """End the run."""
    return Decision(
        event=event, now=now, records=(RunEnded(why=why, failed=failed),),
        commands=(*closed(s, why, failed=failed), RunOver(why=why, failed=failed)),
    )  # fmt: skip


def status(s: Situation, now: float) -> str:
    """Describe the clients and nodes the run waits for, for logs."""
    state = s.state
    if state.ended is not None:
        return state.ended
    if not s.cluster.started and state.opened <= state.committed:
        return f"{len(s.cluster.sessions)} of {s.settings.waiting.nodes} nodes are here for the first round"
    parts = []
    for open in state.open.values():
        if open.closed is not None:
            parts.append(f"round {open.round} is being folded ({len(open.closed)} updates)")
        elif open.wanted:
            clients = (
                at_work(s, open) if not s.settings.buffered else [x for them in state.assigned.values() for x in them]
            )
            names = [f"{client} ({progress(s, _current_fit(s, client, open))})" for client in clients[:5]]
            parts.append(
                f"round {open.round}: {len(open.accepted)} of {open.wanted} updates; waiting for {', '.join(names)}{more(clients)}"
            )
    for round, measuring in state.measuring.items():
        parts.append(
            f"round {round} is measured" + (f" by {len(measuring.waiting)} clients" if measuring.waiting else "")
        )
    return "; ".join(parts) or "nothing is waited for"


def progress(s: Situation, work: Assignment) -> str:
    """Describe the node of an assignment, and its progress."""
    node = s.cluster.assignments.get(work)
    if node is None:
        return "no node that could do it is here"
    task = node.tasks.get(work)
    if task is None:
        return f"queued at node {node.name}"
    done = f"step {task.steps}" if task.steps >= 0 else "given"
    return f"node {node.name} is lost, its work is kept" if node.lost is not None else f"node {node.name}, {done}"


def at_work(s: Situation, open: RoundState) -> list[str]:
    """List the clients that are to fit a round and have not reported."""
    return list(s.state.assigned.get(open.round, ()))


def more(names: Sequence[str]) -> str:
    """Count the names beyond the five that a message lists."""
    return f" and {len(names) - 5} more" if len(names) > 5 else ""


def _current_fit(s: Situation, client: str, open: RoundState) -> Assignment:
    started = next((round for round, clients in s.state.assigned.items() if client in clients), open.round)
    return Assignment("fit", started if s.settings.buffered else open.round, client)
