"""Check orders of actions, read them from files, and count their activations.

`table` and `simulation` check orders with it; ``runtime``, ``cost`` and the planner ask which process has which stage by `stages_of`, the
one rule of placement. An order or a CSV file in torch's form, which stays, comes in; PlanError names the first wrong action.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from arclight.parallel.pipeline.schedule.actions import Action, Kind, Order, read_csv
from arclight.parallel.plan import PlanError

_KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")


def load_order(path: str | Path) -> Order:
    """Load and check the order in a CSV file.

    Raises PlanError that names the file and the first wrong action.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise PlanError(f"the schedule {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        order = read_csv(text)
        check_order(order)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error
    return order


def shape_of(order: Order) -> tuple[int, int, bool]:
    """Return stages, micro-batches, and whether stages are placed in a V.

    Raises PlanError if they are placed neither in a V nor in a loop.
    """
    actions = [action for one in order for action in one]
    if not actions:
        raise PlanError("the schedule has no actions")
    stages = 1 + max(action.stage for action in actions)
    micro_batches = 1 + max(action.micro_batch for action in actions)
    if stages % len(order):
        raise PlanError(f"{stages} stages cannot be divided evenly among {len(order)} processes")
    # With one process, or one stage on each, both are the same.
    for v_shaped in (False, True):
        if v_shaped and stages != 2 * len(order):
            break
        places = [set(stages_of(rank, len(order), stages, v_shaped)) for rank in range(len(order))]
        if all(action.stage in places[rank] for rank, one in enumerate(order) for action in one):
            return stages, micro_batches, v_shaped
    looped = [stages_of(rank, len(order), stages, False) for rank in range(len(order))]
    rank, action = next((r, a) for r, one in enumerate(order) for a in one if a.stage not in looped[r])
    raise PlanError(
        f"process {rank} has {action}, but its stages are {looped[rank]} in a loop"
        + (f", or {stages_of(rank, len(order), stages, True)} in a V" if stages == 2 * len(order) else "")
    )


def check_order(
    order: Order, stages: int | None = None, v_shaped: bool | None = None, micro_batches: int | None = None
) -> None:
    """Raise PlanError, naming the first wrong action, for an order that cannot be run.

    Each stage takes each micro-batch forward once and back once, in one (B) or by halves (I, and W after it). Each process does its
    actions in order and waits for what an action needs, so that processes must not wait for one another in a circle: sends do
    not wait, and an exchange takes place when its sender is done with the action (the runtime of torch then orders
    sends and receives alike on both sides). Stages lie in a loop or in a V. What is given of stages, v_shaped
    and micro_batches must agree.
    """
    found = shape_of(order)
    wanted = stages, micro_batches, v_shaped if len(order) > 1 else None  # one process has them either way
    for name, is_, should in zip(("stages", "micro-batches", "v_shaped"), found, wanted, strict=True):
        if should is not None and is_ != should:
            raise PlanError(f"the schedule has {name} {is_}, not {should}")
    _check_counts(order, found[0], found[1])
    _check_progress(order, found[0])


def _check_counts(order: Order, stages: int, micro_batches: int) -> None:
    owners = {action.stage: rank for rank, one in enumerate(order) for action in one}
    for rank, one in enumerate(order):
        seen: set[Action] = set()
        for place, action in enumerate(one):
            at = f"process {rank}, action {place + 1}: {action}"
            if action in seen:
                raise PlanError(f"{at} is there twice")
            before = {kind: Action(action.stage, kind, action.micro_batch) in seen for kind in _KINDS}
            if action.kind != "F" and not before["F"]:
                raise PlanError(f"{at} comes before its forward")
            if action.kind == "W" and not before["I"]:
                raise PlanError(f"{at} comes before the backward of the inputs (I)")
            if (action.kind == "B" and before["I"]) or (action.kind in "IW" and before["B"]):
                raise PlanError(f"{at} is done twice, in one (B) and by halves (I, W)")
            seen.add(action)
        for stage in (stage for stage, owner in owners.items() if owner == rank):
            for number in range(micro_batches):
                have = {kind for kind in _KINDS if Action(stage, kind, number) in seen}
                missing = next((kind for kind in "FIW" if kind not in have and not (kind in "IW" and "B" in have)), "")
                if missing:
                    raise PlanError(f"process {rank} never does {stage}{missing}{number}")
    if len(owners) < stages:
        raise PlanError(f"no process runs stage {next(s for s in range(stages) if s not in owners)}")


def needs(action: Action, stages: int) -> Iterator[tuple[Action, ...]]:
    """List what must be over before ``action``; of each tuple one suffices.

    That is a backward in one or that of the inputs; last comes what it computes with.
    """
    stage, number = action.stage, action.micro_batch
    if action.kind == "F":
        if stage:
            yield (Action(stage - 1, "F", number),)
    elif action.kind == "W":
        yield (Action(stage, "I", number),)
    else:
        yield (Action(stage, "F", number),)
        if stage + 1 < stages:
            yield Action(stage + 1, "I", number), Action(stage + 1, "B", number)


def _check_progress(order: Order, stages: int) -> None:
    done: set[Action] = set()
    at, moved = [0] * len(order), True
    while moved:
        moved = False
        for rank, one in enumerate(order):
            while at[rank] < len(one) and all(
                any(a in done for a in choice) for choice in needs(one[at[rank]], stages)
            ):
                done.add(one[at[rank]])
                at[rank] += 1
                moved = True
    for rank, one in enumerate(order):
        if at[rank] < len(one):
            action = one[at[rank]]
            wanted = next(choice for choice in needs(action, stages) if not any(a in done for a in choice))
            raise PlanError(
                f"process {rank} waits for ever before action {at[rank] + 1}, {action}: {' or '.join(map(str, wanted))} cannot come before it"
            )


def first_of(order: Order, micro_batches: int) -> Order:
    """Return ``order`` with the first ``micro_batches`` only.

    What remains can be run, since none waits for another.
    """
    return tuple(tuple(action for action in one if action.micro_batch < micro_batches) for one in order)


def peak_in_flight(order: Order) -> list[int]:
    """Return the most passes (micro-batch, stage) that each process holds at once.

    Activations of a pass are held until its backward is over (that of the weights, if they are apart).
    """
    change: Mapping[str, int] = {"F": 1, "B": -1, "I": 0, "W": -1}
    most = []
    for actions in order:
        now = peak = 0
        for action in actions:
            now += change[action.kind]
            peak = max(peak, now)
        most.append(peak)
    return most


def splits_backward(order: Order) -> bool:
    """Return True for orders that compute gradients of weights in actions of their own."""
    return Counter(action.kind for actions in order for action in actions)["I"] > 0


def stages_of(rank: int, ranks: int, stages: int, v_shaped: bool) -> list[int]:
    """Return the stages of process ``rank`` of ``ranks``: every ``ranks``-th, or those of a V."""
    if not v_shaped:
        return list(range(rank, stages, ranks))
    return [rank, stages - 1 - rank]
