"""Choose schedule, cut, micro-batches and recomputation of the shortest step that fits.

``arclight plan`` and ``Trainer(strategy="pipeline")`` (`auto_schedule`) call `choose`:

    costs = predict(model, graph, example)
    choice = choose(costs, batch=64, processes=4, memory="22GiB")
    best = choice.best[0]
    best.setting.schedule, best.setting.micro_batches, best.cuts, best.seconds, best.memory

The choice depends on the arguments only, so that all processes of a run choose alike if they are given the costs of one of them. Keep
it so: no time limits, no random numbers, no order of sets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from arclight.parallel.pipeline.cost.candidates import Costs, EvaluatedPlan, PlanCandidate, PlanEvaluator
from arclight.parallel.pipeline.schedule.step_trace import busy
from arclight.parallel.pipeline.unit_costs import Link
from arclight.parallel.plan import PlanError, bytes_of

GIB = 2**30
SCHEDULES = (
    "1F1B", "GPipe", "Interleaved1F1B", "Interleaved1F1B:4", "LoopedBFS", "ZB-H1", "ZB-H2", "InterleavedZeroBubble",
    "ZBVZeroBubble", "V-Half", "V-Min", "DualPipeV",
)  # fmt: skip
"""Schedules that `choose` tries by default; a Trainer's "auto" tries `auto_schedule.AUTOMATIC` only."""
MAX_MICRO_BATCHES = 64
"""Most micro-batches that are tried by default; eight for each process if that is more."""
PRUNE_FACTOR = 1.25
"""A candidate is not simulated if its busiest process computes longer than this times the best step so far."""
REFINED_PLANS, REFINE_SIMULATIONS = 3, 32
"""Number of best plans with several stages on a process whose cut is improved, and of simulations for each."""
TIE = 1e-3
"""Relative difference of two predicted times below which less memory is preferred."""


@dataclass(frozen=True)
class RejectedChoice:
    """An alternative to the best plan that differs in one setting, and why it was not chosen."""

    choice: str
    reason: str
    option: EvaluatedPlan | None = None
    """The best plan with that setting; None if it cannot be run."""


@dataclass(frozen=True)
class Choice:
    """Result of :func:`choose`."""

    best: tuple[EvaluatedPlan, ...]
    """The fastest plan of each schedule that fits, fastest first."""
    rejected: tuple[RejectedChoice, ...]
    considered: int
    """Number of plans that were simulated or pruned."""


def choose(
    costs: Costs, batch: int, processes: int, *, stages: int | None = None, schedules: str | Sequence[str] = "auto",
    micro_batches: int | Literal["auto"] = "auto", memory: float | str | None = None, recompute: bool | Literal["auto"] = "auto",
    link: Link | None = None, states: float = 4.0, compiled: bool = False, overhead: float = 0.0, keep: int = 5,
) -> Choice:  # fmt: skip
    """Return the plans with the shortest predicted step, and why others were rejected.

    costs: see :data:`Costs`. batch: samples of a step, over all ``processes``. stages: processes of one pipeline (each may have several
    stages, by the schedule); None: any divisor of ``processes``, which then run several pipelines. schedules: allowed names, or
    "auto" for :data:`SCHEDULES`. memory: bytes that a process may hold, or "22GiB"; None: any. states: bytes kept for each
    byte of parameters (weights, gradients and two moments). compiled: True if blocks are compiled, so that no schedule can split their
    backward. overhead: extra seconds of each action. link: between neighbours; None: sending costs nothing. keep: plans to return.

    Raises PlanError if no plan can be run or none fits; it names the plan that comes nearest.
    """
    limit = bytes_of(memory) if isinstance(memory, str) else memory
    evaluator = PlanEvaluator(costs, batch, link=link, states=states, overhead=overhead, limit=limit)
    names = SCHEDULES if schedules == "auto" else (schedules,) if isinstance(schedules, str) else tuple(schedules)
    search = _Search(evaluator, compiled)
    for setting in _settings(batch, processes, stages, names, micro_batches, recompute):
        search.consider(setting)
    if not search.options:
        if stages is not None and stages > evaluator.units:
            raise PlanError(
                f"the model has {evaluator.units} parts, too few for a pipeline of {stages} processes: use {evaluator.units} or fewer"
            )
        reasons = list(dict.fromkeys(f"{setting.schedule} {reason}" for setting, reason in search.refused))
        raise PlanError(
            f"no schedule can be run over {processes} processes: {'; '.join(reasons[:4]) or 'none is allowed'}"
        )
    if not search.fitting:
        raise PlanError(_nothing_fits(search))
    search.improve()
    ordered = _ordered(search.fitting)
    first = {(option.setting.schedule, option.setting.processes): option for option in reversed(ordered)}
    best = sorted(first.values(), key=ordered.index)
    return Choice(tuple(best[:keep]), tuple(_rejected(ordered, search)), len(search.options) + len(search.pruned))


class _Search:
    """Candidates considered so far: simulated, pruned as too slow, or refused."""

    def __init__(self, evaluator: PlanEvaluator, compiled: bool) -> None:
        self.evaluator, self.compiled = evaluator, compiled
        self.options: list[EvaluatedPlan] = []
        self.pruned: list[tuple[PlanCandidate, float]] = []
        """Candidates that were not simulated, with a lower bound of their seconds."""
        self.refused: list[tuple[PlanCandidate, str]] = []
        self.best = float("inf")

    def consider(self, setting: PlanCandidate) -> None:
        """Simulate a candidate, unless it cannot be run or its lower bound is too slow."""
        reason = self.evaluator.refusal(setting, self.compiled)
        if reason is not None:
            self.refused.append((setting, reason))
            return
        cut = self.evaluator.cut(setting)
        if cut.least > PRUNE_FACTOR * self.best:
            self.pruned.append((setting, cut.least))
            return
        option = cut.option()
        self.options.append(option)
        if self.fits(option):
            self.best = min(self.best, option.seconds)

    def fits(self, option: EvaluatedPlan) -> bool:
        return self.evaluator.limit is None or option.peak <= self.evaluator.limit

    @property
    def fitting(self) -> list[EvaluatedPlan]:
        return [option for option in self.options if self.fits(option)]

    def improve(self) -> None:
        """Simulate other cuts of the best options with several stages per process.

        There is one option of each schedule.
        """
        several = [one for one in _ordered(self.fitting) if len(one.cuts) > one.setting.processes]
        first = {one.setting.schedule: one for one in reversed(several)}
        for leader in sorted(first.values(), key=several.index)[:REFINED_PLANS]:
            better = self.evaluator.cut(leader.setting).improved(REFINE_SIMULATIONS)
            if self.fits(better):
                self.options.append(better)


def micro_batch_numbers(batch: int, processes: int) -> list[int]:
    """List numbers of micro-batches to try: divisors of the batch, multiples of processes.

    The latter may leave a remainder.
    """
    most = min(batch, max(MAX_MICRO_BATCHES, 8 * processes))
    exact = {number for number in range(1, most + 1) if batch % number == 0}
    rounds = {processes * 2**step for step in range(8)} | {3 * processes, 6 * processes}
    return sorted(number for number in exact | rounds if number <= most)


def _settings(
    batch: int, processes: int, stages: int | None, names: Sequence[str], micro_batches: int | str, recompute: bool | str
) -> Iterator[PlanCandidate]:  # fmt: skip
    if processes < 1 or batch < 1:
        raise PlanError(f"processes = {processes} and batch = {batch} must be 1 or more")
    if stages is not None and (stages < 1 or processes % stages):
        raise PlanError(
            f"{processes} processes cannot be divided among pipelines of {stages}: use a number that divides them"
        )
    sizes = [stages] if stages is not None else [n for n in range(1, processes + 1) if processes % n == 0]
    again = (False, True) if recompute == "auto" else (bool(recompute),)
    for size in sizes:
        replicas = processes // size
        local = batch // replicas
        if not local:
            continue
        if isinstance(micro_batches, int) and not 1 <= micro_batches <= local:
            raise PlanError(f"micro_batches = {micro_batches} cannot be cut from {local} samples: use 1 to {local}")
        numbers = [micro_batches] if isinstance(micro_batches, int) else micro_batch_numbers(local, size)
        for how, name, number in product(again, names if size > 1 else names[:1], numbers):
            yield PlanCandidate(size, name, number, how, replicas)


def _ordered(options: list[EvaluatedPlan]) -> list[EvaluatedPlan]:
    """Sort plans by time; of those that tie, by memory, then by simplicity."""
    options = sorted(dict.fromkeys(options), key=lambda one: one.seconds)
    found: list[EvaluatedPlan] = []
    while options:
        tied = [one for one in options if one.seconds <= options[0].seconds * (1 + TIE)]
        found += sorted(
            tied,
            key=lambda one: (
                one.peak,
                len(one.cuts),
                one.setting.recompute,
                one.setting.micro_batches,
                str(one.setting),
            ),
        )
        options = options[len(tied) :]
    return found


_CHOICES: tuple[tuple[Callable[[PlanCandidate], Any], Callable[[Any], str]], ...] = (
    (lambda one: one.processes, lambda size: f"a pipeline of {size}" if size > 1 else "no pipeline"),
    (lambda one: one.schedule, str),
    (lambda one: one.micro_batches, lambda number: f"{number} micro-batch{'es' if number > 1 else ''}"),
    (lambda one: one.recompute, lambda again: "recomputing" if again else "keeping all"),
)
"""Fields of a candidate in which alternatives are reported, and how each value is written."""


def _rejected(ordered: list[EvaluatedPlan], search: _Search) -> Iterator[RejectedChoice]:
    """Yield, for each other value of each field, the best plan with it, or why there is none."""
    best = ordered[0]
    for of, words in _CHOICES:
        settings = (
            *(one.setting for one in search.options),
            *(one for one, _ in search.pruned),
            *(one for one, _ in search.refused),
        )
        values = dict.fromkeys(of(one) for one in settings if of(one) != of(best.setting))
        for value in sorted(values, key=lambda value: value if isinstance(value, int) else 0):
            fits = next((one for one in ordered if of(one.setting) == value), None)
            slow = [seconds for one, seconds in search.pruned if of(one) == value]
            large = [one for one in search.options if of(one.setting) == value]
            if fits is not None:
                yield RejectedChoice(words(value), _explain_rejection(best, fits), fits)
            elif large:
                least = min(large, key=lambda one: one.peak)
                over = least.peak - (search.evaluator.limit or 0)
                reason = f"needs {format_bytes(least.peak)} at best, {format_bytes(over)} too much"
                if slow:
                    reason += f"; or takes {min(slow) / best.seconds - 1:.0%} longer or more"
                yield RejectedChoice(words(value), reason, least)
            elif slow:
                longer = min(slow) / best.seconds - 1
                yield RejectedChoice(words(value), f"{longer:.0%} slower or more: so long its busiest process computes")
            else:
                yield RejectedChoice(words(value), next(reason for one, reason in search.refused if of(one) == value))


def _explain_rejection(best: EvaluatedPlan, other: EvaluatedPlan) -> str:
    """Explain why a plan that fits was not chosen."""
    ratio = other.seconds / best.seconds
    if ratio <= 1 + TIE:
        if other.peak == best.peak:
            return "as fast, and holds as much"
        return f"as fast, and holds {format_bytes(other.peak)} where the choice holds {format_bytes(best.peak)}"
    computing, before = max(busy(other.prediction)), max(busy(best.prediction))
    waiting = (other.seconds - computing) - (best.seconds - before)
    if computing - before > waiting:
        cause = f"the busiest process computes {computing / before - 1:.1%} longer"
    else:
        cause = f"processes wait {other.bubble:.1%} of the step where they waited {best.bubble:.1%}"
    return f"{ratio - 1:.1%} slower: {cause}"


def _nothing_fits(search: _Search) -> str:
    """Describe the least that any plan needs, and if more processes would help."""
    evaluator = search.evaluator
    limit = evaluator.limit or 0.0
    least = min(search.options, key=lambda one: (one.peak, one.seconds))
    problem = f"no plan keeps each process within {format_bytes(limit)}: the least that any needs is {format_bytes(least.peak)} ({least.setting})"
    for factor in (2, 3, 4, 6, 8):
        more = least.setting.processes * factor
        for name in dict.fromkeys((least.setting.schedule, "1F1B", "V-Min")):
            number = max(2 * more, least.setting.micro_batches)
            setting = replace(least.setting, processes=more, schedule=name, micro_batches=number)
            if (
                number > evaluator.batch // least.setting.replicas
                or evaluator.refusal(setting, search.compiled) is not None
            ):
                continue
            if search.fits(evaluator.cut(setting).option()):
                return f"{problem}; it would fit over {more} processes ({setting})"
    return f"{problem}; take smaller micro-batches (more samples to cut them from), or devices with more memory"


def format_bytes(nbytes: float) -> str:
    """Format a number of bytes in binary units."""
    for unit, size in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes:.0f} bytes"
