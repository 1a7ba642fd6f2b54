"""Compare two networks of one task: scores, outputs, worst samples, latency, size, bounds.

`compare` is public (``arclight.deploy``); ``cli.comparing`` calls it for two runs or programs, and ``cli.comparing.detectors`` also makes a
`Comparison` itself. A task gives an `Evaluation` by its deployment. A new bound is a field of `Bounds`, an argument of `compare` and a sentence in
`_broken`. Keys of `Comparison.to_json` are in ``arclight compare --json``: they must stay.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from arclight.deploy.capture import Inputs, as_copy_inputs, as_inputs, as_outputs, batch_size, frozen_copy
from arclight.deploy.errors import ComparisonError, ProgramError
from arclight.deploy.parity import Distance, Parity, Parts, distance, to_json
from arclight.deploy.programs.benchmark import Row, as_program_inputs, benchmark
from arclight.deploy.programs.program import Program
from arclight.deploy.quantizing.ptq import QuantizedModel

LISTED = 8
"""Most outputs, and most samples, that a summary names."""
Network = Callable[..., Any]
Scores = Callable[[Network], float | Mapping[str, float]]
"""Takes a network or a program and returns its score, or scores by name, the main one first; higher is better."""


@dataclass(frozen=True)
class NamedInputs:
    """Inputs of a network, and the names of their samples."""

    names: Sequence[str]
    inputs: Tensor | Sequence[Tensor]


Samples = Iterable[Tensor | Sequence[Tensor] | NamedInputs]
"""Batches; each holds the network's positional arguments, batch dimension first."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Hold the inputs and scores by which two networks of one task are compared."""

    samples: Samples
    """Batches of the network's inputs, which may be an iterator."""
    scores: Scores | None = None
    classes: frozenset[str] = frozenset()
    """Names of scores that are of single classes."""
    parts: Parts | None = None

    def scored(self, network: Network) -> Mapping[str, float]:
        """Return the scores of ``network`` by name, the main one first.

        There are none if the task gives no metric.
        """
        found = {} if self.scores is None else self.scores(network)
        return found if isinstance(found, Mapping) else {"metric": float(found)}

    def first(self, count: int) -> Evaluation:
        """Return the same with the first ``count`` samples."""
        return replace(self, samples=_first(self.samples, count))


def _first(samples: Samples, count: int) -> Iterator[NamedInputs]:
    seen = 0
    for batch in samples:
        named = _named(batch, seen)
        left = min(len(named.names), count - seen)
        yield NamedInputs(named.names[:left], [value[:left] if value.dim() else value for value in named.inputs])
        seen += left
        if seen >= count:
            return


def _named(batch: Tensor | Sequence[Tensor] | NamedInputs, seen: int) -> NamedInputs:
    """Return a batch with the names of its samples, by default numbers from ``seen`` on."""
    given = batch if isinstance(batch, NamedInputs) else NamedInputs((), batch)
    inputs = as_inputs(given.inputs)
    count = batch_size(inputs)
    names = given.names or [f"sample {seen + place}" for place in range(count)]
    if len(names) != count:
        raise ComparisonError(f"a batch of {count} samples has {len(names)} names: give one for each")
    return NamedInputs(names, inputs)


@dataclass(frozen=True)
class WorstSample:
    """A sample on which the outputs differ, and its output of least signal-to-noise ratio."""

    name: str
    output: str
    parity: Parity


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Bounds of the second network against the first, as in `compare`; None for no bound."""

    metric: str | None = None
    """The score that ``max_drop`` is about; the first one if it is not named."""
    max_drop: float | None = None
    min_sqnr_db: float | None = None
    max_latency: float | None = None
    max_size: float | None = None

    def __post_init__(self) -> None:
        least = {"max_drop": 0.0, "min_sqnr_db": -math.inf, "max_latency": 0.0, "max_size": 0.0}
        for name, lowest in least.items():
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= lowest):
                raise ComparisonError(f"{name} must be a finite number{' from 0' * (lowest == 0)}, got {value}")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two networks side by side; the second is measured against the first."""

    names: tuple[str, str]
    samples: int
    """Samples that outputs were compared on."""
    outputs: Mapping[str, Parity]
    """Each output, or part of one, of the second against the first; none if these are of other shapes."""
    worst: tuple[WorstSample, ...]
    """At most `LISTED` samples, the one with the least signal-to-noise ratio first; equal ones are left out."""
    scores: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Scores of both by name, the metric first; classes that the data has no sample of are left out."""
    classes: frozenset[str] = frozenset()
    """Names of scores that are of single classes."""
    latency_ms: tuple[float, float]
    """Median wall time of a call of each, milliseconds, taken in turn."""
    latency: tuple[float, float, float]
    """Median, 10th and 90th percentile over pairs of calls of the second's time over the first's."""
    batch: int
    """Samples of a timed call."""
    threads: int
    nbytes: tuple[int | None, int | None]
    """Sizes of the programs' files, or of models' weights, bytes; None for other callables."""
    exceeded: tuple[str, ...] = ()
    """A sentence for each bound that the second one breaks."""

    @property
    def size(self) -> float | None:
        """Return the second's size over the first's."""
        first, second = self.nbytes
        return None if not first or second is None else second / first

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as JSON; what there is none of is None."""

        def finite(value: float) -> float | None:
            return value if math.isfinite(value) else None

        sides = [
            {"name": name, "latency_ms": latency, "size_bytes": size}
            for name, latency, size in zip(self.names, self.latency_ms, self.nbytes, strict=True)
        ]
        median, low, high = self.latency
        return {
            "a": sides[0],
            "b": sides[1],
            "scores": {
                name: {"a": finite(a), "b": finite(b), "difference": finite(b - a), "class": name in self.classes}
                for name, (a, b) in self.scores.items()
            },
            "samples": self.samples,
            "outputs": {name: to_json(one) for name, one in self.outputs.items()},
            "worst": [{"sample": one.name, "output": one.output, **to_json(one.parity)} for one in self.worst],
            "latency": {"ratio": median, "low": low, "high": high, "batch": self.batch, "threads": self.threads},
            "size": self.size,
            "exceeded": list(self.exceeded),
        }

    def lines(self, *, scores: bool = True) -> list[str]:
        """Format the comparison as lines, without the bounds that are broken.

        Without ``scores`` these are left out, for places that show them elsewhere.
        """
        return [*(self._score_lines() if scores else ()), *self._output_lines(), *self._cost_lines()]

    def __str__(self) -> str:
        return "\n".join([*self.lines(), *self.exceeded])

    def _score_lines(self) -> list[str]:
        if not self.scores:
            return ["no score: the task gives no metric"]
        total = [(name, both) for name, both in self.scores.items() if name not in self.classes]
        by_class = [(name, both) for name, both in self.scores.items() if name in self.classes]
        rows = total + sorted(by_class, key=lambda row: row[1][1] - row[1][0])
        width = max(len(name) for name, _ in rows)
        heading = f"{'':<{width}}         A         B     B - A"
        return [heading, *(f"{name:<{width}}  {a:8.4f}  {b:8.4f}  {b - a:+8.4f}" for name, (a, b) in rows)]

    def _output_lines(self) -> list[str]:
        if not self.outputs:
            return ["outputs are not compared: A and B give other shapes"]
        noisiest = sorted(self.outputs.items(), key=lambda item: item[1].sqnr_db)
        lines = [f"output {name}: {_described(one)}" for name, one in noisiest[:LISTED]]
        if len(noisiest) > LISTED:
            lines.append(f"and {len(noisiest) - LISTED} outputs that differ less")
        lines += [f"worst sample {one.name}: {one.output} {_described(one.parity)}" for one in self.worst[:LISTED]]
        return [*lines, f"outputs of {self.samples} samples were compared"]

    def _cost_lines(self) -> list[str]:
        (a, b), (median, low, high) = self.latency_ms, self.latency
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}, batch {self.batch}"
        lines = [f"latency: A {a:.2f} ms, B {b:.2f} ms, B over A {median:.2f} ({low:.2f}-{high:.2f}; {threads})"]
        first, second = self.nbytes
        if first is not None and second is not None and self.size is not None:
            lines.append(f"size: A {first / 1e6:.2f} MB, B {second / 1e6:.2f} MB, B over A {self.size:.2f}")
        return lines


def compare(
    a: nn.Module | Program | Network,
    b: nn.Module | Program | Network,
    samples: Samples,
    *,
    scores: Scores | None = None,
    classes: Iterable[str] = (),
    parts: Parts | None = None,
    names: tuple[str, str] = ("A", "B"),
    rounds: int = 15,
    threads: int = 1,
    metric: str | None = None,
    max_drop: float | None = None,
    min_sqnr_db: float | None = None,
    max_latency: float | None = None,
    max_size: float | None = None,
) -> Comparison:
    """Compare ``b`` with ``a``: programs, models or other callables of the same inputs.

    ``samples``: batches of positional inputs, each a tensor, a sequence of tensors, or `NamedInputs`; both compute all of them, and each output
    (or part of one, as ``parts`` names them) of ``b`` is judged against that of ``a``, in total and sample by sample. ``scores`` takes either and
    returns its score on data of its own, or several by name, the one to watch first; more is better, and ``classes`` are the names of those of
    single classes. Models run as copies in evaluation mode and float32 on the CPU, programs as they were loaded; one of a fixed batch size is
    called as often as it must be. Time is of calls in turn on ``threads`` CPU threads. ``max_drop`` bounds how much lower the score ``metric``
    of ``b`` may be (default: the first one), ``min_sqnr_db`` every output, ``max_latency`` and ``max_size`` what ``b`` has of ``a``'s time and
    size, as factors: what is beyond is in ``exceeded``.

    Raises ComparisonError for programs of different tasks, inputs or outputs, for outputs of other shapes, or NaN, by sample, for no samples, and for
    a bound on what is not measured.
    """
    bounds = Bounds(
        metric=metric, max_drop=max_drop, min_sqnr_db=min_sqnr_db, max_latency=max_latency, max_size=max_size
    )  # fmt: skip
    if scores is None and (max_drop is not None or metric is not None):
        raise ComparisonError("max_drop and metric are about a score, and the task gives no metric: give scores")
    check_alike(a, b)
    sides = _Side("A", a), _Side("B", b)
    inputs, outputs = iter(samples), _Outputs(parts, sides)
    first = next(inputs, None)
    if first is None:
        raise ComparisonError("there is no sample to compare on: name data that holds some")
    with torch.no_grad():
        for batch in chain([first], inputs):
            outputs.add(batch)
        scored = {} if scores is None else _scored(scores, sides)
    example = as_inputs(first.inputs if isinstance(first, NamedInputs) else first)
    timed = _timed(sides, example, rounds, threads)
    found = Comparison(
        names=names, samples=outputs.samples, outputs=outputs.parities, worst=outputs.worst, scores=scored,
        classes=frozenset(classes), latency_ms=(timed[0].wall_ms, timed[1].wall_ms),
        latency=(1 / timed[1].speedup, 1 / timed[1].speedup_high, 1 / timed[1].speedup_low), batch=timed[0].batch,
        threads=threads, nbytes=(timed[0].nbytes, timed[1].nbytes),
    )  # fmt: skip
    return bounded(found, bounds)


def bounded(found: Comparison, bounds: Bounds) -> Comparison:
    """Return the comparison with a sentence for each broken bound.

    Raises ComparisonError for a bound on what is not there.
    """
    return replace(found, exceeded=tuple(_broken(found, bounds)))


def _broken(found: Comparison, bounds: Bounds) -> Iterator[str]:
    if bounds.metric is not None and bounds.metric not in found.scores:
        raise ComparisonError(f"there is no score {bounds.metric!r}; there are {', '.join(found.scores) or 'none'}")
    if bounds.max_drop is not None:
        metric = bounds.metric or next(iter(found.scores))
        a, b = found.scores[metric]
        if not a - b <= bounds.max_drop:
            yield f"B is lower by {a - b:.4f} in {metric}: more than max_drop {bounds.max_drop:g}"
    if bounds.min_sqnr_db is not None:
        if not found.outputs:
            raise ComparisonError("min_sqnr_db bounds outputs, and A and B give other shapes: leave it out")
        for name, one in found.outputs.items():
            if one.sqnr_db < bounds.min_sqnr_db:
                yield f"output {name} of B has {one.sqnr_db:.1f} dB of A's: less than min_sqnr_db {bounds.min_sqnr_db:g}"
    if bounds.max_latency is not None and found.latency[0] > bounds.max_latency:
        yield f"B takes {found.latency[0]:.2f} times as long as A: more than max_latency {bounds.max_latency:g}"
    if bounds.max_size is not None:
        if found.size is None:
            raise ComparisonError("max_size bounds a size, and that of A or B is not known: leave it out")
        if found.size > bounds.max_size:
            yield f"B has {found.size:.2f} times the size of A: more than max_size {bounds.max_size:g}"


def check_alike(a: object, b: object) -> None:
    """Raise ComparisonError for two programs of different tasks, inputs or outputs."""
    if not isinstance(a, Program) or not isinstance(b, Program):
        return
    tasks = [program.metadata.get("task") for program in (a, b)]
    if tasks[0] != tasks[1] and None not in tasks:
        raise ComparisonError(
            f"{a.path} is a program of the task {tasks[0]!r}, {b.path} of {tasks[1]!r}: compare programs of one task"
        )
    for verb, first, second in (("takes", a.inputs, b.inputs), ("gives", a.outputs, b.outputs)):
        if len(first) != len(second) or not all(one.fits(other, named=False) for one, other in zip(first, second)):
            texts = [", ".join(map(str, specs)) for specs in (first, second)]
            what = "inputs" if verb == "takes" else "outputs"
            raise ComparisonError(
                f"{a.path} {verb} {texts[0]}, and {b.path} {verb} {texts[1]}: compare programs of the same {what}"
            )


class _Side:
    """One of the two networks, callable on any number of samples.

    A program of a fixed batch size is called as often as it must be.
    """

    def __init__(self, name: str, network: nn.Module | Program | Network) -> None:
        self.name, self.network = name, network
        program = network if isinstance(network, Program) else None
        self.batch = None if program is None else program.batch_size
        """The only number of samples that it takes; None for any."""
        self.output_names = None if program is None else [spec.name for spec in program.outputs]
        model = isinstance(network, nn.Module) and not isinstance(network, QuantizedModel)
        self._call: Network = frozen_copy(network) if model else network  # type: ignore[arg-type]
        self.timed = copy.deepcopy(network).cpu() if model and _is_on_cuda(network) else network  # type: ignore[union-attr,arg-type]
        """What is timed: `benchmark` would time a model on CUDA there."""

    def __call__(self, *inputs: Any) -> Any:
        try:
            if isinstance(self.network, Program):
                return self.network.in_batches(*self.taken(inputs))
            return self._call(*self.taken(inputs))
        except ProgramError as error:
            raise ComparisonError(f"{self.name}: {error}") from error

    def taken(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Cast ``inputs`` to the floating-point types that the program or model copy takes."""
        if not all(isinstance(value, Tensor) for value in inputs):
            return inputs
        if isinstance(self.network, nn.Module):
            return as_copy_inputs(self.network, as_inputs(inputs))
        return as_program_inputs(self.network, inputs) if isinstance(self.network, Program) else inputs


class _Outputs:
    """Distances of B's outputs from A's, summed over batches and kept for each sample."""

    def __init__(self, parts: Parts | None, sides: tuple[_Side, _Side]) -> None:
        self._parts, self._sides = parts, sides
        self._names = next((side.output_names for side in sides if side.output_names is not None), None)
        self._total: dict[str, Distance] = {}
        self._worst: list[WorstSample] = []
        self.samples = 0

    def add(self, batch: Tensor | Sequence[Tensor] | NamedInputs) -> None:
        named = _named(batch, self.samples)
        count = len(named.names)
        given = [as_outputs(side(*named.inputs)) for side in self._sides]
        a, b = ({name: value.cpu() for name, value in self._by_name(outputs).items()} for outputs in given)
        for name in (*a, *(b.keys() - a.keys())):
            shapes = [tuple(side[name].shape) if name in side else "none" for side in (a, b)]
            if shapes[0] != shapes[1]:
                raise ComparisonError(
                    f"output {name} of A has shape {shapes[0]}, of B {shapes[1]}: compare networks of the same outputs"
                )
        self.samples += count
        for place, sample in enumerate(named.names):
            self._add_sample(sample, {name: self._rows(a[name], b[name], place, count) for name in a})

    def _rows(self, a: Tensor, b: Tensor, place: int, count: int) -> tuple[Tensor, Tensor] | None:
        """Return the rows of one sample; an output that is no batch counts for the first alone."""
        if a.dim() and len(a) == count:
            return a[place], b[place]
        return (a, b) if place == 0 else None

    def _add_sample(self, sample: str, rows: Mapping[str, tuple[Tensor, Tensor] | None]) -> None:
        found = {}
        for name, both in rows.items():
            if both is None:
                continue
            for side, value in zip(self._sides, both, strict=True):
                if value.isnan().any():
                    raise ComparisonError(
                        f"output {name} of {side.name} is NaN in {int(value.isnan().sum())} of {value.numel()} values for {sample}: mend its "
                        "weights, or leave that sample out"
                    )
            try:
                found[name] = distance(*both, name)
            except ValueError as error:
                raise ComparisonError(f"{sample}: {error}") from error
        for name, one in found.items():
            self._total[name] = self._total.get(name, Distance()) + one
        differing = {name: one.parity for name, one in found.items() if one.noise > 0}
        if differing:
            name = min(differing, key=lambda output: differing[output].sqnr_db)
            self._worst.append(WorstSample(sample, name, differing[name]))

    def _by_name(self, outputs: Sequence[Tensor]) -> Mapping[str, Tensor]:
        if self._parts is not None:
            return self._parts(*outputs)
        names = self._names if self._names is not None and len(self._names) == len(outputs) else None
        return {names[place] if names else str(place): output for place, output in enumerate(outputs)}

    @property
    def parities(self) -> dict[str, Parity]:
        return {name: one.parity for name, one in self._total.items()}

    @property
    def worst(self) -> tuple[WorstSample, ...]:
        return tuple(sorted(self._worst, key=lambda one: one.parity.sqnr_db)[:LISTED])


def _scored(scores: Scores, sides: Sequence[_Side]) -> dict[str, tuple[float, float]]:
    """Score both; ComparisonError if they are not scored by the same names."""
    a, b = (Evaluation(samples=(), scores=scores).scored(side) for side in sides)
    if not a or list(a) != list(b):
        raise ComparisonError(f"A is scored by {', '.join(a) or 'nothing'}, and B by {', '.join(b) or 'nothing'}")
    return {name: (float(a[name]), float(b[name])) for name in a}


def _timed(sides: tuple[_Side, _Side], example: Inputs, rounds: int, threads: int) -> tuple[Row, Row]:
    """Time both in turn on one sample, or on as many as a program takes."""
    size = next((side.batch for side in sides if side.batch is not None), 1)
    calls = {side.name: side.timed for side in sides}
    try:
        table = benchmark(calls, example, rounds=rounds, threads=threads, batch_sizes=[size])
    except ProgramError as error:
        raise ComparisonError(str(error)) from error
    return table["A"], table["B"]


def _is_on_cuda(model: nn.Module) -> bool:
    return any(value.is_cuda for value in chain(model.parameters(), model.buffers()))


def _described(parity: Parity) -> str:
    if parity.sqnr_db == math.inf:
        return "equal in every bit"
    if parity.integers:
        return f"{parity.sqnr_db:.1f} dB, differs {parity.difference}"
    return f"{parity.sqnr_db:.1f} dB, differs by up to {parity.max_difference:.2g} of {parity.largest:.3g}"
