"""Explain in one sentence each why plans were not chosen.

`mesh_search` lists rejected plans with it; ``arclight plan`` prints them, writes them with ``--json``, and formats times by `duration`.
Words may change freely: they are for people.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from arclight.parallel.plan import Plan
from arclight.parallel.planning.estimates import Estimate

GIB = 2**30
NEAREST = 10
"""Most neighbours that are listed before plans that cannot run."""


@dataclass(frozen=True)
class RejectedPlan:
    """A plan that was not chosen."""

    plan: Plan
    change: str
    """What differs from the chosen plan."""
    reason: str
    estimate: Estimate | None = None


def describe(plan: Plan) -> str:
    """Return the dimensions of a plan that are not 1."""
    sizes = {name: getattr(plan, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")}
    return " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one process"


def memory_name(name: str) -> str:
    """Return a class of memory as a person would call it."""
    return {
        "parameters": "weights", "optimizer": "optimizer state", "in_flight": "activations in flight",
        "gathered": "gathered weights and gradients",
    }.get(name, name)  # fmt: skip


def neighbours(
    fitting: list[Estimate], too_large: list[Estimate], refused: Iterable[tuple[Plan, str]], memory: float
) -> list[RejectedPlan]:  # fmt: skip
    """List plans that differ from the best in one choice; then faster ones that do not fit.

    Last comes what cannot be done.
    """
    best = fitting[0]
    found: dict[tuple[str, Any], RejectedPlan] = {}
    for one in sorted([*fitting[1:], *too_large], key=lambda one: (one.worst.total > memory, one.step_seconds)):
        changed = differences(best, one)
        if len(changed) == 1:
            name, value = changed[0]
            found.setdefault(
                (name, value),
                RejectedPlan(one.plan, f"{_LABELS.get(name, name)} {value}", explain_rejection(best, one, memory), one),
            )
    if too_large:
        fastest = min(too_large, key=lambda one: one.step_seconds)
        if fastest.step_seconds < best.step_seconds and all(one.estimate is not fastest for one in found.values()):
            found["fastest", 0] = RejectedPlan(
                fastest.plan, "fastest, if it fitted", explain_rejection(best, fastest, memory), fastest
            )
    ordered = sorted(
        found.values(), key=lambda one: abs(one.estimate.step_seconds - best.step_seconds) if one.estimate else 0.0
    )
    rejected: dict[str, RejectedPlan] = {}
    usual = Plan().schedule
    for plan, reason in refused:
        change = describe(plan) if plan.schedule == usual else f"schedule {plan.schedule}"
        rejected.setdefault(reason, RejectedPlan(plan, change, reason))
    return [*ordered[:NEAREST], *list(rejected.values())[:2], *ordered[NEAREST:]]


_LABELS = {
    "activation_checkpointing": "recompute", "reshard_after_forward": "reshard", "samples": "micro-batch of",
}  # fmt: skip


def differences(best: Estimate, other: Estimate) -> list[tuple[str, Any]]:
    """List the choices in which two plans differ, with the other's value.

    What has to follow from a mesh is no choice of its own.
    """
    meshes = [(name, getattr(other.plan, name)) for name in ("pp", "tp", "cp", "ep") if _differ(best, other, name)]
    found: list[tuple[str, Any]] = list(meshes)
    if not meshes and best.plan.dp_shard != other.plan.dp_shard:
        found.append(("dp_shard", other.plan.dp_shard))
    if best.samples != other.samples:
        found.append(("samples", other.samples))
    names = ["activation_checkpointing"]
    if (best.plan.pp > 1) == (other.plan.pp > 1):
        names += ["schedule", "reshard_after_forward"]
    return found + [(name, getattr(other.plan, name)) for name in names if _differ(best, other, name)]


def _differ(best: Estimate, other: Estimate, name: str) -> bool:
    return bool(getattr(best.plan, name) != getattr(other.plan, name))


def explain_rejection(best: Estimate, other: Estimate, memory: float) -> str:
    """Explain in one sentence why ``other`` was not chosen."""
    worst, ratio = other.worst, other.step_seconds / best.step_seconds
    if worst.total > memory:
        over = f"{(worst.total - memory) / GIB:.1f} GiB too much: {getattr(worst, worst.largest) / GIB:.1f} GiB of {memory_name(worst.largest)}"
        return over + (f", for a step {1 - ratio:.1%} shorter" if ratio < 0.999 else "")
    if ratio < 1.0005:
        return f"as fast, with {worst.total / GIB:.1f} GiB where the choice above takes {best.worst.total / GIB:.1f}"
    more = {name: seconds - best.parts[name] for name, seconds in other.parts.items()}
    cause = max(more, key=lambda name: more[name])
    now, before = distinct_durations(other.parts[cause], best.parts[cause])
    return f"{ratio - 1:.1%} slower: {cause} takes {now} of a step where it took {before}"


def duration(seconds: float, digits: int = 1) -> str:
    """Format seconds, or below one milliseconds.

    ``digits`` after the point of the latter, and of the former one more.
    """
    return f"{seconds:.{digits + 1}f} s" if seconds >= 0.995 else f"{seconds * 1e3:.{digits}f} ms"


def distinct_durations(one: float, other: float) -> tuple[str, str]:
    """Format two times with as many digits as it takes to tell them apart."""
    pairs = [(duration(one, digits), duration(other, digits)) for digits in range(1, 7)]
    return next((pair for pair in pairs if pair[0] != pair[1]), pairs[0])
