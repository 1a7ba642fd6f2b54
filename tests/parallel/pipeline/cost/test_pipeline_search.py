"""The chosen plan is the best of all that could be run, fits, and is the same everywhere; what was not chosen has a reason that holds."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from tests.parallel.pipeline.cost.chains import GPT2

from arclight.parallel import PlanError
from arclight.parallel.pipeline.cost.pipeline_search import Choice, choose, micro_batch_numbers
from arclight.parallel.pipeline.schedule.simulation import simulate
from arclight.parallel.pipeline.schedule.step_trace import peak_bytes
from arclight.parallel.pipeline.unit_costs import Link, ModelCosts, Tie, UnitCost


def blocks(
    *seconds: float, saved_activation_bytes: int = 100, output: int = 10, parameters: int = 50, samples: int = 1
) -> ModelCosts:
    return ModelCosts(
        tuple(UnitCost(s, s, s, parameters, saved_activation_bytes, output) for s in seconds), samples=samples
    )


def reason(choice: Choice, words: str) -> str:
    (found,) = [one.reason for one in choice.rejected if one.choice == words]
    return found


def test_the_chosen_plan_is_the_fastest_of_all_simulated_plans() -> None:
    """Every cut of every schedule with every number of micro-batches is simulated by hand."""
    costs, link = blocks(1.0, 0.5, 2.0, 1.0, 3.0, 0.25, 1.5), Link(0.02, 1000.0)
    names = ("1F1B", "GPipe", "ZB-H1", "ZB-H2", "ZBVZeroBubble", "V-Min", "Interleaved1F1B")
    found = choose(costs, 8, 3, stages=3, schedules=names, link=link)
    every = []
    for name, number in itertools.product(names, (1, 2, 3, 4, 6, 8)):
        per_process = 2 if name in ("ZBVZeroBubble", "V-Min", "Interleaved1F1B") else 1
        if (name == "1F1B" and number < 3) or (name == "Interleaved1F1B" and number % max(1, number // 3)):
            continue
        largest = -(-8 // number)
        sizes = [largest] * (8 - number * (largest - 1)) + [largest - 1] * (number * largest - 8)
        for between in itertools.combinations(range(1, 7), 3 * per_process - 1):
            parts = costs.scaled(largest).stages((0, *between))
            made = simulate(name, parts, 3, number, link=link, shares=[size / largest for size in sizes])
            every.append(made.step_seconds)
    assert found.best[0].seconds == pytest.approx(min(every), rel=0.01)
    assert found.best[0].seconds >= min(every)
    assert [one.seconds for one in found.best] == sorted(one.seconds for one in found.best)


def test_zero_bubble_is_chosen_if_memory_allows_else_v_min_or_v_half() -> None:
    costs = blocks(*[1.0] * 16, saved_activation_bytes=1000, parameters=10)
    free = choose(costs, 16, 4, stages=4)
    assert "ZB" in free.best[0].setting.schedule or free.best[0].setting.schedule == "InterleavedZeroBubble"
    assert free.best[0].bubble < 0.1
    peaks = {one.setting.schedule: one.peak for one in free.best}
    tight = choose(costs, 16, 4, stages=4, memory=0.6 * peaks[free.best[0].setting.schedule], recompute=False)
    assert tight.best[0].setting.schedule in ("V-Min", "V-Half")
    assert all(one.peak <= 0.6 * free.best[0].peak for one in tight.best)
    assert tight.best[0].seconds > free.best[0].seconds
    assert "too much" in reason(tight, "GPipe")


def test_slow_links_leave_one_stage_on_each_process() -> None:
    costs, names = blocks(*[1.0] * 8), ("1F1B", "GPipe", "Interleaved1F1B", "V-Half")
    near, far = (
        choose(costs, 8, 4, stages=4, schedules=names, link=Link(latency, 1e9)).best[0] for latency in (0.0, 20.0)
    )
    assert len(near.cuts) > 4
    assert len(far.cuts) == 4


def test_recomputing_is_chosen_where_nothing_else_fits() -> None:
    costs = blocks(*[1.0] * 8, saved_activation_bytes=1000, output=10, parameters=10)
    loose = choose(costs, 8, 4, stages=4, schedules="1F1B")
    assert not loose.best[0].setting.recompute
    assert "slower" in reason(loose, "recomputing")
    tight = choose(costs, 8, 4, stages=4, schedules="1F1B", memory=0.5 * loose.best[0].peak, micro_batches=8)
    assert tight.best[0].setting.recompute
    assert "too much" in reason(tight, "keeping all")
    # One unit computed again, what came in and went out of four micro-batches, and the states of two units.
    assert tight.best[0].memory[1] <= 1000 + 3 * (2 * 10 + 10) + 4 * 2 * 10


def test_predictions_match_the_simulation() -> None:
    costs = replace(blocks(*[1.0] * 8, samples=2), ties=(Tie((0, 7), 50),))
    best = choose(costs, 24, 4, stages=2, schedules="1F1B", micro_batches=5, link=Link(0.1, 100.0)).best[0]
    assert (best.setting.replicas, best.samples, best.cuts) == (2, 3, (0, 4))  # 12 samples on each: 3, 3, 2, 2, 2
    parts = costs.scaled(3).stages(best.cuts)
    made = simulate("1F1B", parts, 2, 5, link=Link(0.1, 100.0), shares=[1, 1, 2 / 3, 2 / 3, 2 / 3])
    shared = 2 * (0.1 + 50 / 100) + 2 * (0.1 + 4 * 50 / 2 / 100)  # of the tied parameter, and of all between replicas
    assert best.seconds == pytest.approx(made.seconds + shared)
    assert best.memory == tuple(4 * 4 * 50 + live for live in peak_bytes(made))


def test_two_sizes_tell_what_a_micro_batch_costs_at_least() -> None:
    """If half of the time of a single sample is overhead, the smallest micro-batches are not the fastest."""
    one, four = blocks(*[1.0] * 8), blocks(*[2.5] * 8, saved_activation_bytes=400, output=40, samples=4)
    proportional = choose(one, 32, 4, stages=4, schedules="1F1B").best[0]
    measured = choose((one, four), 32, 4, stages=4, schedules="1F1B").best[0]
    assert proportional.setting.micro_batches == 32
    assert 8 <= measured.setting.micro_batches < 32
    with_overhead = choose(one, 32, 4, stages=4, schedules="1F1B", overhead=1.0).best[0]
    assert with_overhead.setting.micro_batches < 32


def test_infeasible_settings_are_rejected_with_a_reason() -> None:
    costs = blocks(*[1.0] * 9)
    compiled = choose(costs, 16, 4, stages=4, compiled=True)
    assert "which compiled blocks cannot" in reason(compiled, "ZB-H1")
    assert {one.setting.schedule for one in compiled.best}.isdisjoint({"ZB-H1", "ZB-H2", "ZBVZeroBubble", "V-Min"})
    assert "makes 16 stages over 4 processes, and the model has 9 parts" in reason(compiled, "Interleaved1F1B:4")
    few = choose(costs, 16, 4, stages=4, micro_batches=2)
    assert "needs 4 micro-batches or more" in reason(few, "1F1B")
    assert "needs 8 micro-batches or more" in reason(few, "DualPipeV")
    reasons = [(one.choice, one.reason) for one in choose(costs, 12, 6).rejected]
    assert len(dict(reasons)) == len(reasons)  # a line for each choice
    assert {"no pipeline", "a pipeline of 2", "a pipeline of 3", "a pipeline of 6"}.difference(dict(reasons))


def test_an_unmet_memory_limit_names_what_would_fit() -> None:
    costs = blocks(*[1.0] * 16, saved_activation_bytes=2**20, output=2**10, parameters=2**20)
    with pytest.raises(
        PlanError,
        match=r"within 4 MiB: the least that any needs is .* over 2 processes.*it would fit over 8 processes",
    ) as said:
        choose(costs, 32, 2, stages=2, schedules=("1F1B", "ZB-H1"), memory="4MiB", states=1.0)
    assert "micro-batches" in str(said.value)
    # By hand: the stage with eight of the units of 1 MiB each, one of which is computed again while two inputs wait for their backward.
    assert "is 9.0" in str(said.value)
    with pytest.raises(PlanError, match="take smaller micro-batches"):
        choose(costs, 8, 2, stages=2, schedules="1F1B", memory="1KiB")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"processes": 4, "stages": 3}, "cannot be divided among pipelines of 3"),
        ({"processes": 4, "stages": 4, "micro_batches": 9}, "micro_batches = 9 cannot be cut from 8 samples"),
        ({"processes": 4, "stages": 4, "schedules": "2F2B"}, "there is no pipeline schedule '2F2B'"),
        ({"processes": 8, "stages": 8}, "the model has 4 parts, too few for a pipeline of 8 processes: use 4 or fewer"),
        ({"processes": 4, "memory": "22"}, "write a number and a unit"),
        ({"processes": 4, "stages": 4, "schedules": "ZB-H1", "compiled": True}, "no schedule can be run over 4 processes: ZB-H1 computes"),
    ],
)  # fmt: skip
def test_contradictory_search_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        choose(blocks(1.0, 1.0, 1.0, 1.0), 8, **options)  # type: ignore[arg-type]


def test_numbers_of_micro_batches_are_divisors_and_rounds() -> None:
    assert micro_batch_numbers(10, 4) == [1, 2, 4, 5, 8, 10]
    assert max(micro_batch_numbers(1000, 4)) <= 64


def test_gpt2_is_planned_with_its_head_apart() -> None:
    """Over four processes the vocabulary of GPT-2 weighs more than five layers: the last stage has no layer but it."""
    costs = ModelCosts(tuple(replace(unit, saved_activation_bytes=10, output=1) for unit in GPT2.units()))
    best = choose(costs, 32, 4, stages=4, schedules="1F1B").best[0]
    assert best.cuts == (0, 5, 9, 13)


def test_rounds_are_the_processes_times_powers_of_two_three_and_six() -> None:
    assert micro_batch_numbers(997, 4) == [1, 4, 8, 12, 16, 24, 32, 64]  # a prime: beside rounds it has 1 alone
    assert micro_batch_numbers(7, 1) == [1, 2, 3, 4, 6, 7]


def test_a_batch_of_one_sample_is_planned_and_of_none_refused() -> None:
    costs = blocks(1.0, 1.0)
    assert choose(costs, 1, 1).best[0].setting.micro_batches == 1
    for processes, batch in ((0, 1), (1, 0)):
        with pytest.raises(PlanError, match=f"processes = {processes} and batch = {batch} must be 1 or more"):
            choose(costs, batch, processes)


def test_replicas_share_the_samples_of_a_batch() -> None:
    best = choose(blocks(1.0, 1.0), 8, 4, stages=2, schedules="GPipe", micro_batches=4).best[0]
    assert (best.setting.replicas, best.samples) == (2, 1)
    with pytest.raises(PlanError, match="micro_batches = 5 cannot be cut from 4 samples: use 1 to 4"):
        choose(blocks(1.0, 1.0), 8, 4, stages=2, schedules="GPipe", micro_batches=5)


def test_the_reason_names_what_takes_most_of_the_time_lost() -> None:
    costs = blocks(*[1.0] * 8)
    waits = choose(costs, 16, 4, stages=4, schedules=("GPipe", "ZB-H2"), micro_batches=16)
    assert waits.best[0].setting.schedule != "GPipe"
    assert "processes wait" in reason(waits, "GPipe")
    computes = choose(costs, 16, 4, stages=4, schedules="1F1B", micro_batches=16)
    assert "the busiest process computes" in reason(computes, "recomputing")


def test_more_processes_are_proposed_only_where_each_replica_has_the_samples_for_them() -> None:
    costs = blocks(*[1.0] * 16, saved_activation_bytes=2**20, output=2**10, parameters=2**20)
    for batch, words in ((8, "take smaller micro-batches"), (64, "it would fit over 8 processes")):
        with pytest.raises(PlanError, match=words):
            choose(costs, batch, 4, stages=2, schedules="1F1B", memory="4MiB", states=1.0)
