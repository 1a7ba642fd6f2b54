"""Evaluate one candidate (schedule, stages, micro-batches): best cut, time, memory.

`pipeline_search` evaluates each candidate here, `forecast` a single one. In: costs of units, a link and limits; out: an
`EvaluatedPlan`, which ``arclight plan`` prints, or the reason against it. The same arguments must give the same result on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from arclight.parallel.pipeline.cost.partition import CutCost, MemoryLimit, MemoryLimitError, partition, refine
from arclight.parallel.pipeline.schedule.orders import peak_in_flight, stages_of
from arclight.parallel.pipeline.schedule.simulation import Prediction, simulate
from arclight.parallel.pipeline.schedule.step_trace import bubble, peak_bytes
from arclight.parallel.pipeline.schedule.table import NOT_COMPILED, ScheduleKind, order_of, schedule_kind
from arclight.parallel.pipeline.unit_costs import Link, ModelCosts, UnitCost

Costs = ModelCosts | tuple[ModelCosts, ModelCosts]
"""Costs of micro-batches of one size (others cost in proportion), or of two sizes (others lie on the line through them)."""


@dataclass(frozen=True)
class PlanCandidate:
    """Candidate: processes, schedule, micro-batches, recomputation, replicas of a pipeline."""

    processes: int
    """Processes of one pipeline."""
    schedule: str
    micro_batches: int
    recompute: bool = False
    """Whether units keep only their output, and compute the rest again in backward."""
    replicas: int = 1
    """Pipelines that train the same weights on other samples."""

    def __str__(self) -> str:
        copies = f", {self.replicas} replicas" if self.replicas > 1 else ""
        again = ", recomputing" if self.recompute else ""
        return f"{self.schedule} over {self.processes} processes, {self.micro_batches} micro-batches{again}{copies}"


@dataclass(frozen=True)
class EvaluatedPlan:
    """Candidate with its best cut and predictions."""

    setting: PlanCandidate
    samples: int
    """Samples of the largest micro-batch."""
    cuts: tuple[int, ...]
    """The first unit of each stage."""
    memory: tuple[int, ...]
    """Bytes that each process holds at most: weights, gradients, optimizer, activations."""
    seconds: float
    """Seconds of a step."""
    bubble: float
    """Share of a step in which a process waits for others, on average."""
    prediction: Prediction = field(repr=False, compare=False)
    parts: tuple[UnitCost, ...] = field(repr=False, compare=False)
    """What each stage costs for the largest micro-batch."""

    @property
    def peak(self) -> int:
        """Bytes of the process that holds most."""
        return max(self.memory)


class PlanEvaluator:
    """Evaluator of candidates, for one model and one batch of samples over all replicas."""

    def __init__(
        self, costs: Costs, batch: int, *, link: Link | None = None, states: float = 4.0, overhead: float = 0.0, limit: float | None = None
    ) -> None:  # fmt: skip
        """Initialise the evaluator.

        limit: bytes that a process may hold, which cuts then observe if they can; the rest as for `choose.choose`.
        """
        self.costs, self.batch, self.link, self.states = costs, batch, link or Link(), states
        self.overhead, self.limit = overhead, limit
        one = costs[0] if isinstance(costs, tuple) else costs
        self.units = len(one.units) - len(one.closed)
        """Units with which a stage can begin."""
        self._sizes: dict[tuple[int, bool], ModelCosts] = {}

    def at(self, samples: int, recompute: bool) -> ModelCosts:
        """Return the costs of micro-batches of ``samples``."""
        if (samples, recompute) not in self._sizes:
            known = self.costs
            one = known[0].line_to(known[1], samples) if isinstance(known, tuple) else known.scaled(samples)
            self._sizes[samples, recompute] = one.recomputed() if recompute else one
        return self._sizes[samples, recompute]

    def refusal(self, setting: PlanCandidate, compiled: bool = False) -> str | None:
        """Return the reason why a candidate cannot be run, or None."""
        kind, number = schedule_kind(setting.schedule), setting.micro_batches
        stages = setting.processes * kind.stages_per_process
        if stages > self.units:
            return f"makes {stages} stages over {setting.processes} processes, and the model has {self.units} parts"
        if self.batch % setting.replicas:
            return f"a batch of {self.batch} samples cannot be divided among {setting.replicas} replicas"
        if not kind.fits(number, setting.processes):
            return _does_not_fit(kind, setting)
        if kind.splits_backward and compiled:
            return NOT_COMPILED
        return None

    def cut(self, setting: PlanCandidate) -> StageLayout:
        """Return the setting with the best cut that a formula finds."""
        kind = schedule_kind(setting.schedule)
        local, number = self.batch // setting.replicas, setting.micro_batches
        whole, rest = divmod(local, number)
        sizes = (*[whole + 1] * rest, *[whole] * (number - rest))
        costs = self.at(sizes[0], setting.recompute)
        moment = self.at(sizes[0], False).moment if setting.recompute else 0
        line = StageLayout(self, setting, kind, costs, sizes, moment)
        return replace(line, cuts=line.best_cuts())


@dataclass(frozen=True)
class StageLayout:
    """The processes of a setting with a cut, before anything is simulated."""

    forecast: PlanEvaluator
    setting: PlanCandidate
    kind: ScheduleKind
    costs: ModelCosts
    sizes: tuple[int, ...]
    """Samples of each micro-batch, the largest first."""
    moment: int
    """Bytes that a unit holds while it is computed again."""
    cuts: tuple[int, ...] = ()

    @property
    def number(self) -> int:
        """Return the number of stages."""
        return self.setting.processes * self.kind.stages_per_process

    @cached_property
    def own(self) -> list[list[int]]:
        """Stages of each process."""
        ranks = range(self.setting.processes)
        return [stages_of(rank, len(ranks), self.number, self.kind.v_shaped) for rank in ranks]

    @cached_property
    def flights(self) -> list[int]:
        """Passes through a stage that each process holds at most."""
        return peak_in_flight(order_of(self.kind.name, self.setting.processes, self.setting.micro_batches))

    def best_cuts(self) -> tuple[int, ...]:
        """Return the best cuts: exact with one stage per process, else by hill climbing.

        Climbing starts from such a cut, and is judged by the busiest process.
        """
        options: dict[str, Any] = {"link": self.forecast.link, "ties": self.costs.ties, "together": self.kind.v_shaped}
        options |= {"crossing": self.costs.crossing or None, "closed": self.costs.closed}
        units, number, limit = self.costs.units, self.setting.micro_batches, self.forecast.limit
        if self.kind.stages_per_process == 1 and limit is not None:
            memory_limit = MemoryLimit(limit - self.moment, tuple(map(float, self.flights)), self.forecast.states)
            try:
                return partition(units, self.number, number, memory_limit=memory_limit, **options).cuts
            except MemoryLimitError as error:  # the cut that holds least tells how much more there should be
                return error.cuts
        seed = partition(units, self.number, number, **options).cuts
        if self.kind.stages_per_process == 1:
            return seed
        return refine(seed, len(units), self._judge(), 300, self.costs.closed)

    def _judge(self) -> CutCost:
        """Return a cost of cuts: bytes over the limit, then time of the busiest process."""
        states, count = self.forecast.states, len(self.costs.units)
        limit = float("inf") if self.forecast.limit is None else self.forecast.limit - self.moment
        seconds, held, parameters = (
            list(accumulate((of(unit) for unit in self.costs.units), initial=0.0))
            for of in (
                lambda unit: unit.seconds,
                lambda unit: float(unit.saved_activation_bytes),
                lambda unit: float(unit.parameters),
            )
        )
        before = [self.costs.before(unit) for unit in range(count)]
        shares = [flight / len(own) for own, flight in zip(self.own, self.flights, strict=True)]

        def judge(cuts: tuple[int, ...]) -> tuple[float, ...]:
            ends = (*cuts[1:], count)
            times = [seconds[j] - seconds[i] for i, j in zip(cuts, ends, strict=True)]
            bytes_ = [held[j] - held[i] + before[i] for i, j in zip(cuts, ends, strict=True)]
            loads, over = [], 0.0
            for own, share in zip(self.own, shares, strict=True):
                loads.append(sum(times[stage] for stage in own))
                weights = sum(parameters[ends[stage]] - parameters[cuts[stage]] for stage in own)
                over += max(0.0, weights * states + share * sum(bytes_[stage] for stage in own) - limit)
            return over, max(loads), sum(load**2 for load in loads), sum(time**2 for time in times)

        return judge

    @cached_property
    def parts(self) -> list[UnitCost]:
        """Costs of each stage."""
        more = self.forecast.overhead
        return [
            replace(part, forward=part.forward + more, inputs=part.inputs + more, weights=part.weights + more)
            for part in self.costs.stages(self.cuts)
        ]

    @cached_property
    def least(self) -> float:
        """Seconds that the busiest process computes: no step is shorter."""
        share = sum(self.sizes) / self.sizes[0]
        return share * max(sum(self.parts[stage].seconds for stage in own) for own in self.own)

    def option(self) -> EvaluatedPlan:
        """Simulate all of it."""
        units = [self._units(own) for own in self.own]
        parameters = [self._parameters(own) for own in units]
        exchanged = [self._exchange(own, size) for own, size in zip(units, parameters, strict=True)]
        prediction = simulate(
            self.kind.name, self.parts, self.setting.processes, self.setting.micro_batches, link=self.forecast.link,
            shares=[size / self.sizes[0] for size in self.sizes], reduction=exchanged,
        )  # fmt: skip
        held = zip(parameters, peak_bytes(prediction), strict=True)
        memory = tuple(round(size * self.forecast.states) + live + self.moment for size, live in held)
        seconds, idle = prediction.step_seconds, bubble(prediction)
        return EvaluatedPlan(
            self.setting, self.sizes[0], self.cuts, memory, seconds, idle, prediction, tuple(self.parts)
        )

    def improved(self, most: int) -> EvaluatedPlan:
        """Return the plan with cuts improved by at most ``most`` simulations.

        Cuts stay if each process has one stage.
        """
        known: dict[tuple[int, ...], EvaluatedPlan] = {}

        def judge(cuts: tuple[int, ...]) -> tuple[float, ...]:
            one = known[cuts] = replace(self, cuts=cuts).option()
            over = 0.0 if self.forecast.limit is None else max(0.0, one.peak - self.forecast.limit)
            return over, one.seconds

        if self.kind.stages_per_process == 1:
            return self.option()
        return known[refine(self.cuts, len(self.costs.units), judge, most, self.costs.closed)]

    def _units(self, own: list[int]) -> set[int]:
        ends = [*self.cuts[1:], len(self.costs.units)]
        return {unit for stage in own for unit in range(self.cuts[stage], ends[stage])}

    def _parameters(self, units: set[int]) -> int:
        """Return the bytes of a process's parameters, counting those of several units once."""
        again = sum(tie.parameters * max(0, len(units.intersection(tie.units)) - 1) for tie in self.costs.ties)
        return sum(self.costs.units[unit].parameters for unit in units) - again

    def _exchange(self, units: set[int], parameters: int) -> float:
        """Return the seconds after the last backward: sums of tied gradients, and over replicas.

        Replicas exchange the gradients of all parameters in a ring.
        """
        shared = [
            tie.parameters
            for tie in self.costs.ties
            if units.intersection(tie.units) and not units.issuperset(tie.units)
        ]
        seconds, copies = sum(2 * self.forecast.link.seconds(size) for size in shared), self.setting.replicas
        return seconds + (2 * self.forecast.link.seconds(parameters * (copies - 1) / copies) if copies > 1 else 0.0)


def _does_not_fit(kind: ScheduleKind, setting: PlanCandidate) -> str:
    number, processes = setting.micro_batches, setting.processes
    if kind.only is not None:
        return f"is for {kind.only[0]} processes and {kind.only[1]} micro-batches, not for {processes} and {number}"
    least = kind.fewest(processes)
    if number < least:
        return f"needs {least} micro-batches or more over {processes} processes: fewer leave some idle for good"
    return f"takes micro-batches in rounds of equal length over {processes} processes: {number} leave some over"
