"""The cut of a chain is the best of all cuts: compared with trying every one, with bounds, and with the rules of others."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

import pytest
from tests.parallel.pipeline.cost.chains import (
    GPT2,
    QWEN2_5,
    Sizes,
    bound,
    by_layers,
    by_parameters,
    by_torchtitan,
    slowest,
)

from arclight.parallel import PlanError
from arclight.parallel.pipeline.cost.partition import MemoryLimit, MemoryLimitError, Partition, partition, refine
from arclight.parallel.pipeline.unit_costs import Link, Tie, UnitCost


def cuts_of(count: int, stages: int) -> Iterator[tuple[int, ...]]:
    return ((0, *between) for between in itertools.combinations(range(1, count), stages - 1))


class Case:
    """A random chain with everything that a partition may be asked for, and its definition written out."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.count = draw.randint(2, 12)
        self.stages = draw.randint(1, min(self.count, 5))
        self.micro_batches = draw.choice([1, 2, 4, 8, 32])

        def seconds() -> float:
            return draw.choice([0.0, 1.0, draw.uniform(0, 5)])

        self.units = [
            UnitCost(seconds(), seconds(), seconds(), draw.randint(0, 9), draw.randint(0, 9), draw.randint(0, 40))
            for _ in range(self.count)
        ]
        self.link = draw.choice([None, Link(0.1, 20.0), Link(2.0, 3.0)])
        self.crossing = draw.choice([None, [float(draw.randint(0, 60)) for _ in range(self.count)]])
        members = [
            sorted(draw.sample(range(self.count), min(self.count, draw.choice([2, 2, 3]))))
            for _ in range(draw.randint(0, 3))
        ]
        self.ties = [Tie(tuple(m), min(self.units[unit].parameters for unit in m)) for m in members]
        self.together = draw.random() < 0.3 and self.stages > 1
        self.closed = draw.sample(range(self.count), draw.choice([0, 0, 1]))
        flights = tuple(float(self.stages - stage) for stage in range(self.stages))
        self.memory_limit = draw.choice([None, MemoryLimit(draw.uniform(0, 90), flights, draw.choice([1.0, 4.0]))])

    def transfer(self, at: int) -> float:
        if self.link is None or at in (0, self.count):
            return 0.0
        size = self.crossing[at] if self.crossing is not None else self.units[at - 1].output
        return self.link.latency + size / self.link.bandwidth

    def seconds(self, cuts: Sequence[int]) -> float:
        ranges = list(zip(cuts, [*cuts[1:], self.count], strict=True))
        own = [sum(u.seconds for u in self.units[i:j]) + self.transfer(i) + self.transfer(j) for i, j in ranges]
        total = sum(own) + (self.micro_batches - 1) * max(own)
        for tie in self.ties if self.link is not None else ():
            first, last = (
                next(n for n, (i, j) in enumerate(ranges) if i <= unit < j) for unit in (tie.units[0], tie.units[-1])
            )
            one_process = self.together and len(tie.units) == 2 and first == 0 and tie.units[-1] == self.count - 1
            if first != last and not one_process:
                total += 2 * (self.link.latency + tie.parameters / self.link.bandwidth)
        return total

    def memory(self, cuts: Sequence[int], memory_limit: MemoryLimit) -> list[float]:
        found = []
        for (i, j), flight in zip(zip(cuts, [*cuts[1:], self.count], strict=True), memory_limit.in_flight, strict=True):
            parameters = sum(unit.parameters for unit in self.units[i:j])
            for tie in self.ties:
                inside = [unit for unit in tie.units if i <= unit < j]
                parameters -= tie.parameters * max(0, len(inside) - 1)
            came = (self.crossing[i] if self.crossing is not None else self.units[i - 1].output) if i else 0
            held = sum(unit.saved_activation_bytes for unit in self.units[i:j]) + came
            found.append(parameters * memory_limit.states + held * flight)
        return found

    def solve(self) -> Partition:
        options: dict[str, Any] = {
            "link": self.link,
            "ties": self.ties,
            "crossing": self.crossing,
            "memory_limit": self.memory_limit,
        }
        return partition(
            self.units, self.stages, self.micro_batches, together=self.together, closed=self.closed, **options
        )


@pytest.mark.parametrize("block", range(10))
def test_the_solved_partition_is_optimal_among_all_cuts(block: int) -> None:
    """Every cut of 400 random chains of up to 12 units is tried."""
    refused = bounded = 0
    for seed in range(40 * block, 40 * block + 40):
        case = Case(seed)
        every = [cuts for cuts in cuts_of(case.count, case.stages) if not set(cuts[1:]).intersection(case.closed)]
        if not every:
            with pytest.raises(PlanError, match="are too few"):
                case.solve()
            continue
        memory_limit = case.memory_limit
        fits = [
            cuts for cuts in every if memory_limit is None or max(case.memory(cuts, memory_limit)) <= memory_limit.cap
        ]
        if memory_limit is not None and not fits:
            refused += 1
            least = min(max(case.memory(cuts, memory_limit)) for cuts in every)
            with pytest.raises(
                MemoryLimitError, match=rf"the least cap that would do is .*\({least:.0f} bytes"
            ) as said:
                case.solve()
            assert said.value.least == max(case.memory(said.value.cuts, memory_limit)) == pytest.approx(least)
            continue
        found = case.solve()
        bounded += len(fits) < len(every)
        best = min(case.seconds(cuts) for cuts in fits)
        assert found.cuts in fits
        assert case.seconds(found.cuts) == pytest.approx(best, rel=1e-9, abs=1e-9)
        assert found.seconds == pytest.approx(best, rel=1e-9, abs=1e-9)
        if memory_limit is not None:
            assert found.memory == pytest.approx(case.memory(found.cuts, memory_limit))
    assert refused
    assert bounded


def timed(*seconds: float) -> list[UnitCost]:
    return [UnitCost(one, 0.0, 0.0) for one in seconds]


def test_of_cuts_as_good_the_stages_are_most_alike() -> None:
    assert partition(timed(1, 1, 1, 1, 9), 3, 8).cuts == (0, 2, 4)
    assert partition(timed(9, 1, 1, 1, 1, 1), 3, 8).cuts == (0, 1, 3)  # and earlier ones shorter


def test_a_slow_link_moves_the_cut_to_where_little_crosses() -> None:
    units = [UnitCost(1.0, 1.0, 1.0, output=size) for size in (100, 100, 1, 100, 100, 100)]
    assert partition(units, 2, 8).cuts == (0, 3)
    units[2], units[3] = units[3], units[2]
    assert partition(units, 2, 8, link=Link(0.0, 1e9)).cuts == (0, 3)
    assert partition(units, 2, 8, link=Link(0.0, 25.0)).cuts == (0, 4)


def test_a_shared_parameter_is_held_once_and_exchanged_between_processes() -> None:
    units = [UnitCost(1.0, 0.0, 0.0, parameters=size) for size in (100, 10, 10, 100)]
    tie = Tie((0, 3), 100)
    assert partition(units, 1, 1, ties=[tie]).memory == (4 * 120,)
    assert partition(units, 2, 1, ties=[tie]).memory == (4 * 110, 4 * 110)
    apart, together = (
        partition(units, 2, 1, ties=[tie], link=Link(0, 50.0), together=on).seconds for on in (False, True)
    )
    assert apart - together == pytest.approx(2 * 100 / 50)


def test_infeasible_partitions_are_refused() -> None:
    with pytest.raises(PlanError, match=r"3 units are too few for 4 stages: use 3 or less"):
        partition(timed(1, 1, 1), 4)
    with pytest.raises(
        PlanError, match=r"3 units, which can be cut in 1 places, are too few for 3 stages: use 2 or less"
    ):
        partition(timed(1, 1, 1), 3, closed=[0, 2])
    with pytest.raises(PlanError, match=r"must be 1 or more"):
        partition(timed(1, 1, 1), 0)
    with pytest.raises(PlanError, match=r"2 stages hold in flight, and there are 3"):
        partition(timed(1, 1, 1), 3, memory_limit=MemoryLimit(1.0, (1, 1)))


# -- against the rules of others, on published sizes (max stage over its lower bound) --------------------------------


@pytest.mark.parametrize(
    ("sizes", "stages", "ours", "titan", "layers", "pippy"),
    [
        (GPT2, 2, 1.05, 1.29, 1.29, 1.29), (GPT2, 4, 1.00, 1.41, 1.61, 1.41), (GPT2, 8, 1.00, 1.00, 1.41, 1.00),
        (QWEN2_5, 2, 1.00, 1.25, 1.25, 1.25), (QWEN2_5, 4, 1.00, 1.62, 1.74, 1.37), (QWEN2_5, 8, 1.00, 1.25, 1.37, None),
    ],
    ids=lambda value: f"{value.layers} layers" if isinstance(value, Sizes) else None,
)  # fmt: skip
def test_published_models_are_balanced_better(
    sizes: Sizes, stages: int, ours: float, titan: float, layers: float, pippy: float | None
) -> None:  # fmt: skip
    units = sizes.units()
    least = bound(units, stages)
    assert slowest(units, partition(units, stages, 8).cuts) / least == pytest.approx(ours, abs=0.006)
    assert slowest(units, by_torchtitan(sizes.layers, stages)) / least == pytest.approx(titan, abs=0.006)
    assert slowest(units, by_layers(sizes.layers, stages)) / least == pytest.approx(layers, abs=0.006)
    cuts = by_parameters([unit.parameters for unit in units], stages)
    if pippy is None:
        assert len(cuts) < stages
    else:
        assert slowest(units, cuts) / least == pytest.approx(pippy, abs=0.006)


# -- how much work it is -------------------------------------------------------------------------------------------


def many(count: int) -> list[UnitCost]:
    draw = random.Random(count)
    return [UnitCost(*(draw.uniform(1, 2) for _ in range(3)), output=draw.randint(1, 100)) for _ in range(count)]


def test_few_bounds_are_tried_where_every_cut_costs_its_own() -> None:
    """200 units have 20,100 ranges, each with seconds of its own: that many bounds on the slowest stage there are to try."""
    solved = [partition(many(200), 64, 128, link=Link(0.1, bandwidth)).solved for bandwidth in (1e9, 1e3, 50.0)]
    assert max(solved) < 60
    assert partition(many(200), 64, 128).solved == 2  # nothing crosses: the slowest stage decides alone


def test_work_grows_as_units_squared_times_stages() -> None:
    def seconds(units: int, stages: int) -> float:
        chain, times = many(units), []
        for _ in range(3):
            before = time.process_time()
            partition(chain, stages, 128)
            times.append(time.process_time() - before)
        return min(times)

    assert seconds(200, 64) < 8 * seconds(100, 32) * 2.5


# -- several stages of a process -------------------------------------------------------------------------------------


def test_refined_cuts_are_as_good_as_exhaustive_search() -> None:
    """Two stages on each of three processes: the busiest process decides, and what one has is not contiguous."""
    before, after = [], []
    for seed in range(30):
        draw = random.Random(seed)
        units = timed(*(draw.choice([1.0, 1.0, 1.0, draw.uniform(0, 3)]) for _ in range(11)))

        def judge(cuts: tuple[int, ...], units: list[UnitCost] = units) -> tuple[float, float]:
            own = [sum(u.seconds for u in units[i:j]) for i, j in zip(cuts, [*cuts[1:], len(units)], strict=True)]
            loads = [own[process] + own[process + 3] for process in range(3)]
            return max(loads), sum(load**2 for load in loads)

        begin = partition(units, 6, 8).cuts
        found = refine(begin, len(units), judge)
        assert judge(found) <= judge(begin)
        best = min(map(judge, cuts_of(len(units), 6)))[0]
        before.append(judge(begin)[0] / best)
        after.append(judge(found)[0] / best)
    assert max(after) < 1.15
    assert fmean(after) < 1.02 < fmean(before)


def test_refinement_evaluates_at_most_the_given_number_of_cuts() -> None:
    asked = []

    def judge(cuts: tuple[int, ...]) -> tuple[float]:
        asked.append(cuts)
        return (-float(sum(cuts)),)

    assert refine((0, 1, 2), 30, judge) == (0, 28, 29)
    asked.clear()
    refine((0, 1, 2), 30, judge, most=10)
    assert len(asked) == 10


def test_without_a_number_there_is_one_micro_batch() -> None:
    units = [UnitCost(seconds, 0.0, 0.0, 0, 0, output) for seconds, output in ((1.0, 10), (1.0, 0), (2.0, 0))]
    link = Link(0.0, 1.0)
    assert partition(units, 2, link=link) == partition(units, 2, 1, link=link)
    assert partition(units, 2, link=link).seconds == 4


def test_refinement_stops_at_an_optimum() -> None:
    asked = []
    assert refine((0, 2, 4), 6, lambda cuts: (float(bool(asked.append(cuts))),)) == (0, 2, 4)
    assert len(asked) == len(set(asked)) > 4
