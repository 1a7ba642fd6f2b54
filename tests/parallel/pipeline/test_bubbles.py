"""Idle time of a pipeline by its cause: against closed forms, and never more or less than there is."""

from __future__ import annotations

import random

import pytest

from arclight.parallel.pipeline.actions import Action, Order, Span, Trace
from arclight.parallel.pipeline.bubbles import bubble, busy, idle, peak_bytes, source
from arclight.parallel.plan import PlanError


def gpipe(ranks: int, micro_batches: int) -> Order:
    return tuple(
        tuple(Action(rank, kind, number) for kind in ("F", "B") for number in range(micro_batches))
        for rank in range(ranks)
    )  # fmt: skip


def one_forward_one_backward(ranks: int, micro_batches: int) -> Order:
    rows = []
    for rank in range(ranks):
        warm = min(micro_batches, ranks - rank)
        row = [Action(rank, "F", number) for number in range(warm)]
        for number in range(micro_batches):
            row.append(Action(rank, "B", number))
            if warm + number < micro_batches:
                row.append(Action(rank, "F", warm + number))
        rows.append(tuple(row))
    return tuple(rows)


def run(order: Order, took: dict[str, float], slow: dict[int, float] | None = None, transfer: float = 0.0) -> Trace:
    """Every action as soon as it can: forwards wait for the stage before, backwards for the stage after."""
    ranks, spans, clocks, rows = len(order), dict[Action, Span](), [0.0] * len(order), [list(row) for row in order]
    while any(rows):
        for rank, row in enumerate(rows):
            while row:
                stage, kind, number = row[0].stage, row[0].kind, row[0].micro_batch
                needs = Action(stage - 1, "F", number) if kind == "F" else Action(stage + 1, "B", number)
                if 0 <= needs.stage < ranks and needs not in spans:
                    break
                ready = spans[needs].end + transfer if needs in spans else 0.0
                start = max(clocks[rank], ready)
                clocks[rank] = start + took[kind] * (slow or {}).get(stage, 1.0)
                spans[row.pop(0)] = Span(rank, Action(stage, kind, number), start, clocks[rank])
    micro_batches = 1 + max(action.micro_batch for action in spans)
    return Trace("test", ranks, ranks, micro_batches, tuple(spans.values()))


@pytest.mark.parametrize("make", [gpipe, one_forward_one_backward])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (4, 8), (8, 8), (3, 16)])
def test_equal_stages_idle_for_no_other_reason_than_the_schedule(make, ranks: int, micro_batches: int) -> None:
    trace = run(make(ranks, micro_batches), {"F": 1.0, "B": 2.0})
    assert bubble(trace) == pytest.approx((ranks - 1) / (micro_batches + ranks - 1))
    assert busy(trace) == pytest.approx([3.0 * micro_batches] * ranks)
    for rank, cause in enumerate(idle(trace)):
        assert cause.warm_up == rank  # one forward for each stage before
        assert cause.cool_down == pytest.approx(2.0 * rank)
        assert cause.schedule == pytest.approx(3.0 * (ranks - 1 - rank))
        assert (cause.imbalance, cause.communication, cause.overhead) == (0, 0, 0)


def test_a_slow_stage_and_a_slow_link_are_told_apart() -> None:
    order, took = one_forward_one_backward(4, 8), {"F": 1.0, "B": 2.0}
    slow = run(order, took, slow={2: 1.5})
    assert [cause.communication for cause in idle(slow)] == [0, 0, 0, 0]
    imbalance = [cause.imbalance for cause in idle(slow)]
    assert imbalance[2] < 0.1
    assert min(imbalance[0], imbalance[1], imbalance[3]) > 3.0
    far = run(order, took, transfer=0.25)
    assert all(cause.imbalance < 1e-9 for cause in idle(far))
    assert all(cause.communication >= 0.25 for cause in idle(far)[:3])
    without = [cause.seconds for cause in idle(run(order, took))]
    assert all(
        far_seconds > before for far_seconds, before in zip([c.seconds for c in idle(far)], without, strict=True)
    )


def test_no_second_is_lost_or_counted_twice_whatever_the_clocks_say() -> None:
    generator = random.Random(5)
    for _ in range(40):
        ranks, micro_batches = generator.randint(1, 6), generator.randint(1, 9)
        trace = run(
            one_forward_one_backward(ranks, micro_batches),
            {"F": generator.uniform(0.1, 1), "B": generator.uniform(0.1, 3)},
            {stage: generator.uniform(0.5, 2) for stage in range(ranks)},
            generator.uniform(0, 0.5),
        )
        skew = [generator.gauss(0, 0.2) for _ in range(ranks)]  # clocks that were not read at the same time
        spans = tuple(
            Span(span.rank, span.action, span.start + skew[span.rank], span.end + skew[span.rank])
            for span in trace.spans
        )
        skewed = Trace("test", ranks, ranks, micro_batches, spans)
        for one in (trace, skewed):
            total = sum(busy(one)) + sum(cause.seconds for cause in idle(one))
            assert total == pytest.approx(ranks * one.seconds, rel=1e-12)
            for worked, cause in zip(busy(one), idle(one), strict=True):
                assert worked + cause.seconds == pytest.approx(one.seconds, rel=1e-12)
                assert min(vars(cause).values()) >= -1e-12


def test_time_between_actions_of_a_process_that_waits_for_nobody_is_overhead() -> None:
    spans = (
        Span(0, Action(0, "F", 0), 0.0, 1.0, 5), Span(0, Action(0, "F", 1), 1.5, 2.5, 9), Span(1, Action(1, "F", 0), 1.0, 2.0),
        Span(1, Action(1, "I", 0), 2.25, 3.25, 7), Span(0, Action(0, "B", 0), 4.25, 5.0, 1), Span(1, Action(1, "W", 0), 3.25, 4.0),
    )  # fmt: skip
    first, second = idle(Trace("test", 2, 2, 2, spans))
    assert (first.overhead, first.communication) == (0.5, 1.0)
    assert (first.schedule, first.imbalance) == (0.75, 0)
    assert (second.overhead, second.warm_up, second.cool_down) == (0.25, 1.0, 1.0)
    assert peak_bytes(Trace("test", 2, 2, 2, spans)) == [9, 7]
    trace = Trace("test", 2, 2, 2, spans)
    by_action = {span.action: span for span in spans}
    found = {str(action): source(action, trace, by_action) for action in by_action}
    made = {name: str(span.action) if span else None for name, span in found.items()}
    assert made == {"0F0": None, "0F1": None, "1F0": "0F0", "1I0": "1F0", "0B0": "1I0", "1W0": "1I0"}


def test_an_order_that_cannot_have_happened_is_refused() -> None:
    spans = (Span(0, Action(0, "B", 0), 0, 1), Span(0, Action(0, "F", 0), 1, 2))
    with pytest.raises(PlanError, match="process 0 does 0B0 before what it needs is done"):
        idle(Trace("test", 1, 1, 1, spans))
