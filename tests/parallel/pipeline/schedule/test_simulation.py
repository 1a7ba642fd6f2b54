"""Simulated steps: against closed forms, a longest path found by brute force, and what must hold of any step."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import cache, partial

import pytest

from arclight.parallel import PlanError
from arclight.parallel.pipeline.schedule.actions import Action, Order, write_csv
from arclight.parallel.pipeline.schedule.orders import peak_in_flight, shape_of
from arclight.parallel.pipeline.schedule.simulation import Prediction, idle_seconds
from arclight.parallel.pipeline.schedule.simulation import simulate as simulate_as_run
from arclight.parallel.pipeline.schedule.step_trace import bubble, busy, idle, peak_bytes
from arclight.parallel.pipeline.schedule.table import SCHEDULES, order_of
from arclight.parallel.pipeline.unit_costs import Link, UnitCost

simulate = partial(simulate_as_run, whole_first=False)
"""As in papers: the first stage splits its backward like all others."""
NAMES = [*SCHEDULES, "Interleaved1F1B:3"]


def drawn(order: Order, seed: int) -> list[UnitCost]:
    generator = random.Random(seed)
    return [
        UnitCost(*(generator.uniform(0.2, 2) for _ in "FIW"), saved_activation_bytes=generator.randrange(1, 999), output=generator.randrange(9999))
        for _ in range(shape_of(order)[0])
    ]  # fmt: skip


def longest_path(order: Order, costs: list[UnitCost], link: Link) -> dict[Action, float]:
    """Return the end of each action: the longest path over dependencies, order and messages."""
    place = {action: (rank, i) for rank, one in enumerate(order) for i, action in enumerate(one)}
    last = len(costs) - 1

    def whole(stage: int, number: int) -> Action:
        one = Action(stage, "B", number)
        return one if one in place else Action(stage, "I", number)

    def makes_for(action: Action) -> int | None:
        to = action.stage + (1 if action.kind == "F" else -1)
        return None if action.kind == "W" or not 0 <= to <= last else place[Action(to, "F", 0)][0]

    @cache
    def sent(action: Action) -> tuple[float, float]:
        """Return the times at which the message begins and has left the sender."""
        rank, i = place[action]
        earlier = [a for a in order[rank][:i] if makes_for(a) == makes_for(action)]
        begin = max([end(action), *(sent(a)[1] for a in earlier[-1:])])
        boundary = action.stage if action.kind == "F" else action.stage - 1
        return begin, begin + costs[boundary].output / link.bandwidth

    def there(action: Action, rank: int) -> float:
        return end(action) if place[action][0] == rank else sent(action)[1] + link.latency

    @cache
    def end(action: Action) -> float:
        rank, i = place[action]
        stage, number, cost = action.stage, action.micro_batch, costs[action.stage]
        ready = [end(order[rank][i - 1])] if i else [0.0]
        if action.kind == "F" and stage:
            ready.append(there(Action(stage - 1, "F", number), rank))
        elif action.kind in "BI":
            ready.append(end(Action(stage, "F", number)))
            if stage < last:
                ready.append(there(whole(stage + 1, number), rank))
        seconds = {"F": cost.forward, "I": cost.inputs, "W": cost.weights, "B": cost.inputs + cost.weights}
        return max(ready) + seconds[action.kind]

    return {action: end(action) for one in order for action in one}


@pytest.mark.parametrize("name", NAMES)
def test_every_action_ends_where_the_longest_path_to_it_does(name: str) -> None:
    for seed, (processes, micro_batches) in enumerate([(1, 3), (2, 4), (3, 6), (4, 8)]):
        order = order_of(name, processes, micro_batches)
        costs = drawn(order, seed)
        for link in (Link(), Link(0.3), Link(0.1, 8000.0), Link(0.0, 1500.0)):
            trace = simulate(order, costs, link=link)
            wanted = longest_path(order, costs, link)
            assert {span.action: span.end for span in trace.spans} == pytest.approx(wanted)
            for rank, one in enumerate(order):
                assert [span.action for span in trace.of(rank)] == list(one)


def test_steps_have_their_closed_forms() -> None:
    forward, back, hop = 1.0, 2.5, 0.25
    for processes, micro_batches in [(2, 2), (3, 5), (4, 8)]:
        p, m = processes, micro_batches
        costs, link = [UnitCost(forward, 1.5, 1.0)] * p, Link(hop)
        both = (m + p - 1) * (forward + back)
        assert simulate("GPipe", costs, p, m).seconds == pytest.approx(both)
        assert simulate("1F1B", costs, p, m).seconds == pytest.approx(both)
        hops = 2 * (p - 1) * hop
        assert simulate("GPipe", costs, p, m, link=link, receives="early").seconds == pytest.approx(both + hops)
        # With nothing on its way before it is needed the last process waits for every forward, the first for every backward.
        waits = 2 * (m - 1) * hop
        assert simulate("GPipe", costs, p, m, link=link).seconds == pytest.approx(both + hops + waits)
        # A sender that waits adds its hop to each action (the last forward's is not for anyone).
        slow = simulate("GPipe", costs, p, m, link=link, overlap=False)
        assert slow.seconds == pytest.approx(both + hops + waits)
        share = simulate("Interleaved1F1B", [UnitCost(forward / 2, 0.75, 0.5)] * (2 * p), p, p)
        assert bubble(share) == pytest.approx((p - 1) / (2 * p + p - 1))
        zero = simulate("ZB-H1", costs, p, 2 * p + 1)
        assert idle_of(zero) == pytest.approx([(p - 1) * (forward + 1.5 - 1.0)] * p)
        assert idle_seconds("ZB-H1", p, 2 * p, 1.0, 1.5, 1.0) == pytest.approx((p - 1) * 1.5)


def idle_of(trace: Prediction) -> list[float]:
    return [trace.seconds - own for own in busy(trace)]


@pytest.mark.parametrize("name", NAMES)
def test_simulated_steps_keep_invariants(name: str) -> None:
    for seed in range(4):
        order = order_of(name, 4, 8)
        costs, link = drawn(order, seed), Link(0.05, 20000.0)
        trace = simulate(order, costs, link=link)
        work = [sum(8 * costs[stage].seconds for stage in {a.stage for a in one}) for one in order]
        alone = sum(cost.forward + cost.inputs for cost in costs)
        assert trace.seconds >= max(*work, alone)
        assert busy(trace) == pytest.approx(work)
        for rank, causes in enumerate(idle(trace)):
            assert causes.seconds + work[rank] == pytest.approx(trace.seconds)
        assert sum(trace.waits.values()) <= sum(idle_of(trace)) + 1e-9
        assert simulate(order, costs).seconds <= trace.seconds + 1e-9
        assert trace.seconds <= simulate(order, costs, link=link, receives="due").seconds + 1e-9
        slower = [replace(cost, forward=cost.forward + 0.1 * (stage == seed % 4)) for stage, cost in enumerate(costs)]
        assert simulate(order, slower, link=link).seconds >= trace.seconds - 1e-9


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_what_is_in_flight(name: str) -> None:
    order = order_of(name, 4, 8)
    own = shape_of(order)[0] // 4
    costs = [UnitCost(1, 1, 1, saved_activation_bytes=1000)] * (4 * own)
    whole = simulate(order, costs)
    assert peak_bytes(whole) == [1000 * most for most in peak_in_flight(order)]
    half = simulate(order, costs, freed_by_inputs=0.5)
    assert all(a <= b for a, b in zip(peak_bytes(half), peak_bytes(whole), strict=True))
    assert all(trace.of(rank)[-1].live == 0 for trace in (whole, half) for rank in range(4))
    measured = simulate(order, costs, freed_by_inputs=[0.25] * (4 * own))
    first = next((span for span in measured.of(0) if span.action.kind == "I"), None)
    if first is not None:
        before = measured.of(0)[measured.of(0).index(first) - 1]
        assert before.live - first.live == 250


def test_the_table_of_idle_shares_and_peaks() -> None:
    """Shares and peaks (in micro-batches, half of one freed at I) of schedules as upstream runs them, found apart from this."""
    table = {
        ("GPipe", 4, 8): (27.3, 8), ("1F1B", 4, 8): (27.3, 4), ("Interleaved1F1B", 4, 8): (15.8, 5.5),
        ("Interleaved1F1B:4", 4, 8): (8.6, 4.75), ("InterleavedZeroBubble", 4, 8): (5.9, 4), ("ZBVZeroBubble", 4, 8): (5.9, 4),
        ("GPipe", 8, 16): (30.4, 16), ("Interleaved1F1B", 8, 16): (17.9, 11.5), ("Interleaved1F1B:4", 8, 16): (9.9, 9.75),
        ("InterleavedZeroBubble:4", 8, 32): (1.8, 8), ("1F1B", 8, 32): (17.9, 8), ("ZBVZeroBubble", 8, 32): (3.5, 8),
    }  # fmt: skip
    for (name, p, m), (share, peak) in table.items():
        own = shape_of(order_of(name, p, m))[0] // p
        trace = simulate(
            name,
            [UnitCost(1 / own, 1 / own, 1 / own, saved_activation_bytes=4000 // own)] * (p * own),
            p,
            m,
            freed_by_inputs=0.5,
        )
        assert (100 * bubble(trace), max(peak_bytes(trace)) / 4000) == pytest.approx((share, peak), abs=0.06)
    late = {"GPipe": 18.9, "1F1B": 22.5, "Interleaved1F1B": 12.3, "InterleavedZeroBubble": 6.9, "ZBVZeroBubble": 6.6}
    for name, share in late.items():
        own = SCHEDULES[name].stages_per_process
        costs = [UnitCost(1 / own, 1 / own, 1 / own)] * (8 * own)
        trace = simulate(name, costs, 8, 32, link=Link(0.1), receives="early")
        assert 100 * bubble(trace) == pytest.approx(share, abs=0.06)


def test_micro_batches_of_several_sizes() -> None:
    costs = [UnitCost(1, 1, 1, saved_activation_bytes=100, output=10)] * 2
    shares = [1.0, 1.0, 0.5]
    trace = simulate("1F1B", costs, 2, 3, shares=shares, link=Link(0, 10))
    assert busy(trace) == pytest.approx([7.5, 7.5])
    assert {span.end - span.start for span in trace.spans if span.action.kind == "F"} == {1.0, 0.5}
    with pytest.raises(PlanError, match="2 shares were given"):
        simulate("1F1B", costs, 2, 3, shares=[1, 1])


def test_after_the_last_action_gradients_are_reduced_and_the_optimizer_steps() -> None:
    costs = [UnitCost(1, 1, 1)] * 4
    bare = simulate("ZB-H2", costs, 4, 12)
    last = [bare.of(rank)[-1].end for rank in range(4)]
    assert list(bare.ends) == [last[3]] * 4  # each with its update, for which it waits for all
    assert bare.step_seconds == bare.seconds
    assert last[0] < last[3]  # processes begin and end one after the other
    after = simulate("ZB-H2", costs, 4, 12, reduction=0.5, optimizer=[1, 2, 1, 1])
    assert list(after.ends) == [last[3] + 0.5 + step for step in (1, 2, 1, 1)]
    free = simulate("ZB-H2", costs, 4, 12, reduction=0.5, optimizer=1.0, synchronous=False)
    assert list(free.ends) == [end + 1.5 for end in last]
    # Then the next step of each process begins a whole step later: there is no bubble.
    begins = [free.of(rank)[0].start for rank in range(4)]
    assert {end - begin for begin, end in zip(begins, last, strict=True)} == {36.0}


def test_first_stage_skips_the_gradient_of_its_input() -> None:
    costs = [UnitCost(1, 1, 1, saved_activation_bytes=100)] * 4
    for name in ("1F1B", "GPipe"):
        assert simulate_as_run(name, costs, 4, 8) == simulate(name, costs, 4, 8)
    trace = simulate_as_run("ZB-H1", costs, 4, 8)
    took = {(s.action.stage, s.action.kind): s.end - s.start for s in trace.spans}
    assert [took[0, kind] for kind in "FIW"] == [1, 0, 2]
    assert [took[1, kind] for kind in "FIW"] == [1, 1, 1]
    assert peak_bytes(trace)[0] == 400
    assert busy(trace) == pytest.approx([24] * 4)


def test_each_boundary_has_its_link() -> None:
    costs = [UnitCost(1, 1, 1, output=100)] * 3
    near, far = Link(0.0, 1000.0), Link(0.5, 100.0)
    trace = simulate("GPipe", costs, 3, 1, link=[near, far])
    assert trace.seconds == pytest.approx(9 + 2 * (0.1 + 1.5))
    assert trace.waits[Action(2, "F", 0)] == pytest.approx(2 + 0.1 + 1.5)


def test_invalid_simulations_are_refused() -> None:
    costs = [UnitCost(1, 1, 1)] * 4
    with pytest.raises(PlanError, match="1F1B has 2 stages: 4 costs were given"):
        simulate("1F1B", costs, 2, 4)
    with pytest.raises(PlanError, match="to simulate 1F1B, say for how many processes"):
        simulate("1F1B", costs)
    with pytest.raises(PlanError, match="2 values were given for 3"):
        simulate("1F1B", costs, 4, 4, link=[Link()] * 2)
    with pytest.raises(PlanError, match="waits for ever before action 2, 0B0"):
        simulate(((Action(0, "F", 0), Action(0, "B", 0), Action(0, "F", 1), Action(0, "B", 1)),
                  (Action(1, "F", 0), Action(1, "F", 1), Action(1, "B", 0), Action(1, "B", 1))), costs[:2])  # fmt: skip


def test_as_many_stages_on_each_process_as_there_are_costs(tmp_path) -> None:
    costs = [UnitCost(1, 1, 1)] * 6
    assert simulate("Interleaved1F1B", costs, 2, 4).stages == 6
    path = tmp_path / "own.csv"
    path.write_text(write_csv(order_of("V-Half", 3, 6)))
    trace = simulate(str(path), costs, 3, 6)
    assert (trace.stages, trace.micro_batches, trace.schedule) == (6, 6, str(path))
    assert trace.seconds == simulate("V-Half", costs, 3, 6).seconds


def test_bounded_schedules_hold_less_and_wait_no_more_than_one_forward_one_backward() -> None:
    for p, m in itertools.product((4, 8), (8, 24)):
        if m < p:
            continue
        usual = simulate("1F1B", [UnitCost(2, 2, 2, saved_activation_bytes=2000)] * p, p, m)
        for name, most in (("V-Half", (p + 2) // 2), ("V-Min", (p + 4) // 3)):
            trace = simulate(name, [UnitCost(1, 1, 1, saved_activation_bytes=1000)] * (2 * p), p, m)
            assert max(peak_bytes(trace)) <= 2000 * most < max(peak_bytes(usual))
            assert trace.seconds <= usual.seconds
