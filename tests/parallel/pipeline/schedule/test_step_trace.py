"""Idle time of a pipeline by its cause: against closed forms, and never more or less than there is."""

from __future__ import annotations

import random

import pytest
from tests.parallel.pipeline.schedule.hand_written_steps import gpipe, one_forward_one_backward, run

from arclight.parallel.pipeline.schedule.actions import Action
from arclight.parallel.pipeline.schedule.step_trace import Span, Trace, bubble, busy, describe, idle, peak_bytes, source
from arclight.parallel.plan import PlanError


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


def test_a_slow_stage_and_a_slow_link_are_distinguished() -> None:
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


def test_a_step_is_a_table_for_terminals() -> None:
    trace = run(one_forward_one_backward(4, 8), {"F": 0.01, "B": 0.02}, slow={2: 1.5})
    head, names, *rows = describe(trace, run(one_forward_one_backward(4, 8), {"F": 0.01, "B": 0.02})).splitlines()
    assert head.startswith("test: 4 processes, 4 stages, 8 micro-batches; step ")
    assert head.endswith("(predicted 330.0 ms, 27.3%)")
    assert names.split() == [
        "process", "stages", "busy", "warm-up", "schedule", "imbalance", "communication", "overhead", "cool-down", "activations",
    ]  # fmt: skip
    assert [row.split()[0] for row in rows] == ["0", "1", "2", "3"]
    for row in rows:
        assert sum(float(cell.rstrip("%")) for cell in row.split()[2:-1]) == pytest.approx(100, abs=0.4)
    assert len({len(row) for row in (names, *rows)}) == 1
    assert str(trace).splitlines()[1:] == [names, *rows]
