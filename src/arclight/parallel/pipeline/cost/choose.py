"""Choose the schedule, cut, micro-batches and recomputation of the shortest step in given memory.

    costs = predict(model, graph, example)
    choice = choose(costs, batch=64, processes=4, memory="22GiB")
    best = choice.best[0]
    best.setting.schedule, best.setting.micro_batches, best.cuts, best.seconds, best.memory

The same costs give the same choice, so that all processes of a run choose alike where they were given the costs of one of them.
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
"""That are tried."""
MOST = 64
"""Micro-batches that are tried at most by default, or eight for each process."""
HOPELESS = 1.25
"""A plan whose busiest process alone computes so many times as long as the best step so far is not simulated."""
REFINED, CUTS = 3, 32
"""Of the best plans with several stages on a process, how many have their cut improved, and by how many simulations."""
ALIKE = 1e-3
"""Relative difference of two predicted times below which memory decides."""


@dataclass(frozen=True)
class RejectedChoice:
    """A choice that was not made, alone of its kind: what it would be, and why not."""

    choice: str
    reason: str
    option: EvaluatedPlan | None = None
    """The best that it could have been, where it can be run."""


@dataclass(frozen=True)
class Choice:
    """The answer of :func:`choose`."""

    best: tuple[EvaluatedPlan, ...]
    """Plans that fit, the fastest of each schedule, fastest first."""
    rejected: tuple[RejectedChoice, ...]
    considered: int
    """Plans that were predicted."""


def choose(
    costs: Costs, batch: int, processes: int, *, stages: int | None = None, schedules: str | Sequence[str] = "auto",
    micro_batches: int | Literal["auto"] = "auto", memory: float | str | None = None, recompute: bool | Literal["auto"] = "auto",
    link: Link | None = None, states: float = 4.0, compiled: bool = False, overhead: float = 0.0, keep: int = 5,
) -> Choice:  # fmt: skip
    """Return the plans whose step is predicted to be shortest, and why not others.

    costs: see :data:`Costs`. batch: samples of a step, over all ``processes``. stages: processes of one pipeline (with the stages that a
    schedule gives each); None: any number that divides ``processes``, which then has several pipelines. schedules: names that may be
    chosen, or "auto" for :data:`SCHEDULES`. memory: bytes that a process may hold, or "22GiB"; None: any. states: bytes kept
    for each byte of parameters (weights, gradients and two moments). compiled: whether blocks are compiled, which no schedule can split
    the backward of. overhead: seconds that each action takes besides. link: between neighbours; None: sending costs nothing.

    Raises PlanError where nothing can be run, or fits: with what comes nearest.
    """
    limit = bytes_of(memory) if isinstance(memory, str) else memory
    forecast = PlanEvaluator(costs, batch, link=link, states=states, overhead=overhead, limit=limit)
    names = SCHEDULES if schedules == "auto" else (schedules,) if isinstance(schedules, str) else tuple(schedules)
    search = _Search(forecast, compiled)
    for setting in _settings(batch, processes, stages, names, micro_batches, recompute):
        search.consider(setting)
    if not search.options:
        if stages is not None and stages > forecast.units:
            raise PlanError(
                f"the model has {forecast.units} parts, too few for a pipeline of {stages} processes: use {forecast.units} or fewer"
            )
        said = list(dict.fromkeys(f"{setting.schedule} {reason}" for setting, reason in search.refused))
        raise PlanError(
            f"no schedule can be run over {processes} processes: {'; '.join(said[:4]) or 'none is allowed'}"
        )
    if not search.fitting:
        raise PlanError(_nothing_fits(search))
    search.improve()
    ordered = _ordered(search.fitting)
    first = {(option.setting.schedule, option.setting.processes): option for option in reversed(ordered)}
    best = sorted(first.values(), key=ordered.index)
    return Choice(tuple(best[:keep]), tuple(_rejected(ordered, search)), len(search.options) + len(search.hopeless))


class _Search:
    """Keep the candidates that have been considered so far."""

    def __init__(self, forecast: PlanEvaluator, compiled: bool) -> None:
        self.forecast, self.compiled = forecast, compiled
        self.options: list[EvaluatedPlan] = []
        self.hopeless: list[tuple[PlanCandidate, float]] = []
        """What was not simulated, with the seconds that it takes at least."""
        self.refused: list[tuple[PlanCandidate, str]] = []
        self.best = float("inf")

    def consider(self, setting: PlanCandidate) -> None:
        """Simulate a setting, unless it cannot be run or is much too slow already."""
        reason = self.forecast.refusal(setting, self.compiled)
        if reason is not None:
            self.refused.append((setting, reason))
            return
        line = self.forecast.cut(setting)
        if line.least > HOPELESS * self.best:
            self.hopeless.append((setting, line.least))
            return
        option = line.option()
        self.options.append(option)
        if self.fits(option):
            self.best = min(self.best, option.seconds)

    def fits(self, option: EvaluatedPlan) -> bool:
        return self.forecast.limit is None or option.peak <= self.forecast.limit

    @property
    def fitting(self) -> list[EvaluatedPlan]:
        return [option for option in self.options if self.fits(option)]

    def improve(self) -> None:
        """Simulate other cuts of the best options that have several stages on a process, one of each schedule."""
        several = [one for one in _ordered(self.fitting) if len(one.cuts) > one.setting.processes]
        first = {one.setting.schedule: one for one in reversed(several)}
        for leader in sorted(first.values(), key=several.index)[:REFINED]:
            better = self.forecast.cut(leader.setting).improved(CUTS)
            if self.fits(better):
                self.options.append(better)


def micro_batch_numbers(batch: int, processes: int) -> list[int]:
    """List the numbers of micro-batches worth trying: divisors of the batch, and multiples of the processes, which may leave a rest."""
    most = min(batch, max(MOST, 8 * processes))
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
    """Fastest first; of those that are as fast the one that holds least, then the simplest."""
    options = sorted(dict.fromkeys(options), key=lambda one: one.seconds)
    found: list[EvaluatedPlan] = []
    while options:
        alike = [one for one in options if one.seconds <= options[0].seconds * (1 + ALIKE)]
        found += sorted(
            alike,
            key=lambda one: (
                one.peak,
                len(one.cuts),
                one.setting.recompute,
                one.setting.micro_batches,
                str(one.setting),
            ),
        )
        options = options[len(alike) :]
    return found


_CHOICES: tuple[tuple[Callable[[PlanCandidate], Any], Callable[[Any], str]], ...] = (
    (lambda one: one.processes, lambda size: f"a pipeline of {size}" if size > 1 else "no pipeline"),
    (lambda one: one.schedule, str),
    (lambda one: one.micro_batches, lambda number: f"{number} micro-batch{'es' if number > 1 else ''}"),
    (lambda one: one.recompute, lambda again: "recomputing" if again else "keeping all"),
)
"""What a setting chooses, and how one would say it."""


def _rejected(ordered: list[EvaluatedPlan], search: _Search) -> Iterator[RejectedChoice]:
    """For each choice that the best plan does not make: the best that could be made with it, or why none."""
    best = ordered[0]
    for of, words in _CHOICES:
        settings = (
            *(one.setting for one in search.options),
            *(one for one, _ in search.hopeless),
            *(one for one, _ in search.refused),
        )
        values = dict.fromkeys(of(one) for one in settings if of(one) != of(best.setting))
        for value in sorted(values, key=lambda value: value if isinstance(value, int) else 0):
            fits = next((one for one in ordered if of(one.setting) == value), None)
            slow = [seconds for one, seconds in search.hopeless if of(one) == value]
            large = [one for one in search.options if of(one.setting) == value]
            if fits is not None:
                yield RejectedChoice(words(value), _why(best, fits), fits)
            elif large:
                least = min(large, key=lambda one: one.peak)
                over = least.peak - (search.forecast.limit or 0)
                said = f"needs {format_bytes(least.peak)} at best, {format_bytes(over)} too much"
                if slow:
                    said += f"; or takes {min(slow) / best.seconds - 1:.0%} longer or more"
                yield RejectedChoice(words(value), said, least)
            elif slow:
                longer = min(slow) / best.seconds - 1
                yield RejectedChoice(words(value), f"{longer:.0%} slower or more: so long its busiest process computes")
            else:
                yield RejectedChoice(words(value), next(reason for one, reason in search.refused if of(one) == value))


def _why(best: EvaluatedPlan, other: EvaluatedPlan) -> str:
    """Say why a plan that fits was not chosen."""
    ratio = other.seconds / best.seconds
    if ratio <= 1 + ALIKE:
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
    """Return the least that any plan needs, and whether more processes would help."""
    forecast = search.forecast
    limit = forecast.limit or 0.0
    least = min(search.options, key=lambda one: (one.peak, one.seconds))
    said = f"no plan keeps each process within {format_bytes(limit)}: the least that any needs is {format_bytes(least.peak)} ({least.setting})"
    for factor in (2, 3, 4, 6, 8):
        more = least.setting.processes * factor
        for name in dict.fromkeys((least.setting.schedule, "1F1B", "V-Min")):
            number = max(2 * more, least.setting.micro_batches)
            setting = replace(least.setting, processes=more, schedule=name, micro_batches=number)
            if (
                number > forecast.batch // least.setting.replicas
                or forecast.refusal(setting, search.compiled) is not None
            ):
                continue
            if search.fits(forecast.cut(setting).option()):
                return f"{said}; it would fit over {more} processes ({setting})"
    return f"{said}; take smaller micro-batches (more samples to cut them from), or devices with more memory"


def format_bytes(nbytes: float) -> str:
    """Bytes as a person writes them."""
    for unit, size in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes:.0f} bytes"
