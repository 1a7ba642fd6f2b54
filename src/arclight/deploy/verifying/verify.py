"""Verify a quantizer: quantize a model with it, and judge the graph by several references.

Users call `verify_quantizer` (``arclight.deploy``). It makes the quantized graph (`conversion`), checks operators and scales (`expectations`),
compares outputs with the float model, a float64 reference (`float64_reference`), torchao's reference representation and runtimes, and returns a
`Verification`, or raises VerificationError with all that broke a bound. A new check is a function that returns sentences, which `verify_quantizer`
adds to ``failures``.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from arclight.deploy.capture import (
    FreeDimensions,
    Inputs,
    as_inputs,
    as_outputs,
    capture,
    free_dimensions,
    free_sizes,
    frozen_copy,
    in_float32,
    with_sizes,
    without_absent_outputs,
)
from arclight.deploy.errors import QuantizeError, VerificationError
from arclight.deploy.formats import onnx_graph
from arclight.deploy.parity import Parity, broken_bound, compare, worst
from arclight.deploy.programs.benchmark import benchmark
from arclight.deploy.programs.onnx_runtime import INTEGER_KERNELS
from arclight.deploy.programs.openvino import LAYERS
from arclight.deploy.programs.program import Program
from arclight.deploy.quantizing import pt2e
from arclight.deploy.verifying.conversion import Conversion, Literals, Mode, post_training, trained
from arclight.deploy.verifying.expectations import (
    Count,
    Operator,
    Qparams,
    check_counts,
    check_mode,
    check_order,
    check_qparams,
    counts,
    integer_layers,
)
from arclight.deploy.verifying.float64_reference import compare_nodes, run_in_float64

Backend = Literal["onnxruntime", "openvino"]
DEFAULT_BOUNDS: Mapping[str, float] = {
    "sqnr_db": 15.0, "judge_db": 40.0, "reference_db": 30.0, "trained_db": 15.0, "backend_db": 30.0, "integer_share": 0.9,
    "speedup": 1.0,
}  # fmt: skip
"""Least values. Of any output's signal-to-noise ratio against the float model (sqnr), the float64 reference (judge), torchao's reference
representation (reference), the trained graph (trained) and the quantized graph in each runtime (backend), decibels; of the share of integer
layers on integer kernels; and of the float program's latency over the quantized one's, which must be larger."""
FURTHER_BOUNDS = ("node_sqnr_db",)
"""Bounds without a default: the least ratio of any single operator."""
TWIN_DB = 60.0
"""Least ratio, decibels, of the prepared graph without rounding against the model: it is the same computation."""
TIMED_ROUNDS = 15


@dataclass(frozen=True, kw_only=True)
class BackendReport:
    """A runtime's program of the quantized graph."""

    outputs: Mapping[str, Parity]
    """Parity of its outputs with those of the quantized graph, the worst of all shapes."""
    kernels: Mapping[str, int]
    """Operators that the runtime really runs, by kernel; of OpenVINO those of layers with weights, such as "Convolution u8"."""
    integer_kernels: int
    speedup: float
    """Median latency of the float program over that of the quantized one, one thread, interleaved."""


@dataclass(kw_only=True)
class Verification:
    """All that was measured of one quantizer on one model."""

    mode: Mode
    program: GraphModule = field(repr=False)
    """The converted graph."""
    captured: Mapping[str, int]
    """Operators of the captured graph by name."""
    converted: Mapping[str, int]
    """Operators of the converted graph by name."""
    integer_layers: tuple[str, ...]
    """Nodes that multiply rounded activations with rounded weights."""
    literals: Mapping[str, tuple[float, ...]]
    """(momentum, epsilon) of each batch norm and (p,) of each dropout, the same before and after."""
    shapes: tuple[tuple[tuple[int, ...], ...], ...]
    """Shapes of the inputs that it was compared on."""
    outputs: Mapping[str, Parity] = field(default_factory=dict)
    """Outputs beside the float model's, the worst of all batches and shapes."""
    nodes: Mapping[str, Parity] = field(default_factory=dict)
    """Operators beside the float model's on the first batch, in the order they run."""
    judge: Mapping[str, Parity] = field(default_factory=dict)
    """Outputs beside those of the graph in float64 (`run_in_float64`)."""
    rewritten_nodes: int | None = None
    """Quantize and dequantize operators that torchao's reference representation rewrites; None if another check failed before."""
    reference: Mapping[str, Parity] = field(default_factory=dict)
    """Outputs beside the reference representation's; empty if it rewrites nothing."""
    trained: Mapping[str, Parity] = field(default_factory=dict)
    """Outputs beside those of the graph as it was trained, in mode qat."""
    backends: Mapping[str, BackendReport] = field(default_factory=dict)
    failures: tuple[str, ...] = ()

    def __str__(self) -> str:
        def ratio(found: Mapping[str, Parity]) -> str:
            least = worst(list(found.values())).sqnr_db if found else math.nan
            return "every bit" if least == math.inf else f"{least:.1f} dB"

        rounded = sum(n for name, n in self.converted.items() if "quantized_decomposed.quantize" in name)
        lines = [
            f"{self.mode}: {len(self.integer_layers)} integer layers, {rounded} quantize operators, "
            f"compared on {len(self.shapes)} inputs",
            f"outputs {ratio(self.outputs)} against the float model, {ratio(self.judge)} against float64",
        ]
        if self.nodes:
            name = min(self.nodes, key=lambda node: self.nodes[node].sqnr_db)
            lines.append(f"noisiest of {len(self.nodes)} operators: {name}, {self.nodes[name].sqnr_db:.1f} dB")
        if self.rewritten_nodes is not None:
            lines.append(
                f"reference representation: {self.rewritten_nodes} nodes rewritten, {ratio(self.reference)}"
                if self.rewritten_nodes
                else "reference representation: no node rewritten, so it judges nothing"
            )
        lines += [f"as trained: {ratio(self.trained)}"] if self.trained else []
        for name, report in self.backends.items():
            faster = f"{report.speedup:.2f} x as fast as float"
            lines.append(f"{name}: {ratio(report.outputs)}, {report.integer_kernels} integer kernels, {faster}")
        return "\n".join([*lines, *(f"FAILED {failure}" for failure in self.failures)])


def verify_quantizer(
    model: nn.Module,
    inputs: Iterable[Tensor | Sequence[Tensor]],
    quantizer: Any,
    *,
    mode: Mode = "static",
    expect: Mapping[Operator, Count] | None = None,
    order: Sequence[Operator] = (),
    qparams: Mapping[str, Qparams] | None = None,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    qat_steps: int | None = None,
    bounds: Mapping[str, float] | None = None,
    backends: Sequence[Backend] = (),
) -> Verification:
    """Quantize a copy of ``model`` by a torchao ``Quantizer``, and check it as expected.

    ``inputs``: calibration batches, each a tensor or the positional inputs. ``expect`` counts operators of the converted graph:
    ``{torch.ops.aten.conv2d.default: 2, "aten.batch_norm": 0}`` or (low, high); ``order`` names operators that follow each
    other. ``qparams`` holds scales and levels by place (``"conv1.input"``, ``"cat.output"``): values by name, a specification of
    torchao, another place to share with, or a tuple of two places whose product is the scale. ``dynamic`` names free dimensions
    by input (default: the first of each), on which the program is also run one smaller and one larger. In mode ``"qat"`` it is
    trained for ``qat_steps`` (default 2) towards the float model's outputs. ``bounds`` are least values: DEFAULT_BOUNDS
    and ``node_sqnr_db``. Programs of ``backends`` must agree, run on integer kernels, and be faster than the float program by more than
    ``speedup`` (1; a small model may be slower, and 0 lets it).

    Raises VerificationError naming all that failed, with the report as ``error.report``; also, without a report, for expectations that could
    not fail: operators that neither graph has, places that are not rounded, a quantizer that annotates nothing.
    """
    batches = [in_float32(as_inputs(batch)) for batch in inputs]
    limits = _check_arguments(quantizer, batches, mode, qat_steps, bounds, backends)
    free = _free(model, batches[0], dynamic)
    name = type(quantizer).__name__
    if mode == "qat":
        steps = 2 if qat_steps is None else qat_steps
        made = trained(model, batches, quantizer, None if dynamic is None else free, steps)
    else:
        made = post_training(model, batches, quantizer, free)
    trials = [*batches, *_other_sizes(batches[0], free)]
    report = Verification(
        mode=mode,
        program=made.program,
        captured=counts(made.captured),
        converted=counts(made.program),
        integer_layers=tuple(integer_layers(made.program)),
        literals=made.before,
        shapes=tuple(tuple(tuple(value.shape) for value in trial) for trial in trials),
    )
    failures = _check_graph(made, mode, expect or {}, order, qparams or {})
    given = _outputs(made.program, trials)
    failures += _compare_outputs(made, report, trials, given, limits)
    if not failures:
        failures += _compare_rewritten(made, report, trials, given, limits)
    for backend in backends:
        failures += _run_backend(backend, made, report, trials, given, free, limits)
    report.failures = tuple(failures)
    if failures:
        raise VerificationError(f"{name} fails {len(failures)} checks:\n" + "\n".join(failures), report)
    return report


def _check_graph(
    made: Conversion,
    mode: Mode,
    expect: Mapping[Operator, Count],
    order: Sequence[Operator],
    qparams: Mapping[str, Qparams],
) -> list[str]:
    """Check mode, literals, operators, order and scales of the graph; return what differs."""
    captured = counts(made.captured)
    return [
        *check_mode(mode, made.program),
        *_check_literals(made.before, made.after),
        *check_counts(expect, captured, counts(made.program)),
        *(check_order(order, captured, made.program) if order else []),
        *check_qparams(made.program, qparams),
    ]


def _check_arguments(
    quantizer: Any,
    batches: Sequence[Inputs],
    mode: Mode,
    qat_steps: int | None,
    bounds: Mapping[str, float] | None,
    backends: Sequence[Backend],
) -> dict[str, float]:
    """Return all bounds by name; TypeError, ValueError, QuantizeError for wrong arguments."""
    if not isinstance(quantizer, pt2e.Quantizer):
        raise TypeError(f"quantizer must be a Quantizer of torchao, got {type(quantizer).__name__}")
    if not batches:
        raise QuantizeError("inputs hold no batch; ranges of activations need at least one")
    if mode not in get_args(Mode):
        raise ValueError(f"mode must be one of {', '.join(get_args(Mode))}, got {mode!r}")
    if qat_steps is not None and (mode != "qat" or qat_steps < 1):
        raise ValueError(f"qat_steps must be at least 1, and mode 'qat'; got {qat_steps} with mode {mode!r}")
    known = (*DEFAULT_BOUNDS, *FURTHER_BOUNDS)
    for name in bounds or {}:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f": there are {', '.join(known)}"
            raise ValueError(f"bounds names {name!r}, which is not measured{hint}")
    if unknown := [name for name in backends if name not in get_args(Backend)]:
        raise ValueError(f"backends are {', '.join(get_args(Backend))}, got {unknown}")
    if backends and mode == "dynamic":
        raise ValueError(
            "ranges that each call chooses cannot be written as ONNX from PT2E, so there is no program for backends; "
            "quantize(model, recipe=DynamicInt8()) makes one"
        )
    if "speedup" in (bounds or {}) and not backends:
        raise ValueError("bounds has a speedup, which is measured on backends: name at least one")
    return {**DEFAULT_BOUNDS, **(bounds or {})}


def _free(
    model: nn.Module, example: Inputs, dynamic: Mapping[str, Mapping[int, str]] | None
) -> FreeDimensions:  # fmt: skip
    if dynamic is not None:
        return free_dimensions(model, example, dynamic)
    free = [{0: "batch"} if value.dim() else {} for value in example]
    if len({len(value) for value in example if value.dim()}) > 1:
        raise QuantizeError(
            f"the inputs have shapes {[tuple(value.shape) for value in example]} and no common batch size: name the free "
            "dimensions in dynamic"
        )
    return free


def _other_sizes(example: Inputs, free: FreeDimensions) -> list[Inputs]:
    """Return ``example`` with each free dimension one smaller, if possible, and one larger."""
    sizes = free_sizes(example, free)
    return [
        with_sizes(example, free, {name: size})
        for name, held in sizes.items()
        for size in (held - 1, held + 1)
        if size >= 1
    ]


def _check_literals(before: Literals, after: Sequence[Literals]) -> list[str]:
    """Return batch norms and dropouts whose numbers have changed.

    Those that were folded are not compared.
    """
    changed = {
        name: (before[name], found[name]) for found in after for name in found if found[name] != before.get(name, found[name])
    }  # fmt: skip
    return [
        f"literals: {name} has (momentum, epsilon) or (p,) {found}, the model has {held}"
        for name, (held, found) in changed.items()
    ]


def _outputs(program: Any, trials: Sequence[Inputs]) -> list[list[Tensor]]:
    """Run ``program`` on each of ``trials``."""
    with torch.no_grad():
        return [as_outputs(program(*trial)) for trial in trials]


def _parity(
    reference: Sequence[list[Tensor]], program: Sequence[list[Tensor]], trials: Sequence[Inputs], *, what: str
) -> tuple[dict[str, Parity], list[str]]:  # fmt: skip
    """Return the worst of each output over ``trials``, and how outputs cannot be compared."""
    found: dict[str, list[Parity]] = {}
    for trial, wanted, given in zip(trials, reference, program):
        try:
            for name, parity in compare(wanted, given).items():
                found.setdefault(name, []).append(parity)
        except ValueError as error:
            return {}, [f"{what}: {error}, on inputs of shapes {[tuple(value.shape) for value in trial]}"]
    return {name: worst(parities) for name, parities in found.items()}, []


def _below(found: Mapping[str, Parity], least: float, what: str, precision: str | None = None) -> list[str]:
    """Return the outputs below ``least`` decibels; with ``precision`` integers are counted."""
    broken = []
    for name, parity in found.items():
        if precision is not None and parity.integers:
            if limit := broken_bound(parity, precision):
                broken.append(f"{what} {name} differs {parity.difference}, and {limit}")
        elif parity.sqnr_db < least:
            broken.append(f"{what} {name} has {parity.sqnr_db:.1f} dB, and the bound is {least:.1f}")
    return broken


def _compare_outputs(
    made: Conversion,
    report: Verification,
    trials: Sequence[Inputs],
    given: Sequence[list[Tensor]],
    limits: Mapping[str, float],
) -> list[str]:
    """Compare the program with the model and its judges; return what breaks a bound.

    The report is filled in.
    """
    model = _outputs(made.reference, trials)
    twin, failures = _parity(model, _outputs(made.twin, trials), trials, what="annotation")
    what = "annotation: the graph that the quantizer has prepared, without rounding, output"
    failures += _below(twin, TWIN_DB, what, "fp32")

    def judged(what: str, bound: str, reference: Sequence[list[Tensor]]) -> Mapping[str, Parity]:
        found, problems = _parity(reference, given, trials, what=what)
        failures.extend([*problems, *_below(found, limits[bound], f"{bound}: output")])
        return found

    report.outputs = judged("outputs", "sqnr_db", model)
    report.judge = judged("judge", "judge_db", [run_in_float64(made.program, trial) for trial in trials])
    if made.trained is not None:
        report.trained = judged("trained", "trained_db", _outputs(made.trained, trials))
    report.nodes = compare_nodes(made.twin, made.program, trials[0])
    if not report.nodes:
        failures.append("nodes: no operator of the converted graph has its counterpart in the float graph")
    return failures + _below(report.nodes, limits.get("node_sqnr_db", -math.inf), "node_sqnr_db:")


def _compare_rewritten(
    made: Conversion,
    report: Verification,
    trials: Sequence[Inputs],
    given: Sequence[list[Tensor]],
    limits: Mapping[str, float],
) -> list[str]:
    """Compare the program with torchao's reference representation, if that differs.

    The report is filled in.
    """
    rewritten = made.rewritten()
    report.rewritten_nodes = _rounding_nodes(made.program) - _rounding_nodes(rewritten)
    if not report.rewritten_nodes:
        return []
    report.reference, failures = _parity(_outputs(rewritten, trials), given, trials, what="reference")
    return failures + _below(report.reference, limits["reference_db"], "reference_db: output")


def _rounding_nodes(graph: GraphModule) -> int:
    return sum(n for name, n in counts(graph).items() if name.startswith("quantized_decomposed."))


def _run_backend(
    backend: Backend,
    made: Conversion,
    report: Verification,
    trials: Sequence[Inputs],
    given: Sequence[list[Tensor]],
    free: FreeDimensions,
    limits: Mapping[str, float],
) -> list[str]:
    """Run the program in a runtime, count its kernels and time it; return broken bounds."""
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        scratch = Path(folder)
        program = _written(made.program, trials[0], free, scratch / "quantized.onnx", backend)
        found, failures = _parity(given, _outputs(program, trials), trials, what=backend)
        failures += _below(found, limits["backend_db"], f"backend_db: {backend}, output", "int8")
        kernels, integer = _kernels(backend, program)
        planned = len(report.integer_layers)
        if integer < limits["integer_share"] * planned:
            failures.append(
                f"integer_share: {backend} runs {integer} of {planned} integer layers on integer kernels ({dict(kernels)}), and "
                f"the bound is {limits['integer_share']:.0%}"
            )
        plain = _written(frozen_copy(made.reference), trials[0], free, scratch / "float.onnx", backend)
        table = benchmark({"float": plain, "quantized": program}, trials[0], rounds=TIMED_ROUNDS)
        speedup = table["quantized"].speedup
        if speedup <= limits["speedup"]:
            failures.append(
                f"speedup: in {backend} the quantized program is {speedup:.2f} x as fast as the float program "
                f"({table['quantized'].wall_ms:.3g} ms for {table['float'].wall_ms:.3g} ms), and it must be more than {limits['speedup']:.2f} x: give "
                "inputs as large as in use, or, where it need not be faster, bounds={'speedup': 0}"
            )
    own = BackendReport(outputs=found, kernels=kernels, integer_kernels=integer, speedup=speedup)
    report.backends = {**report.backends, backend: own}
    return failures


def _written(model: nn.Module, example: Inputs, free: FreeDimensions, path: Path, backend: Backend) -> Program:
    exported = without_absent_outputs(capture(model, example, free=free))
    onnx_graph.write(onnx_graph.convert(exported, input_names=None, output_names=None), path)
    return Program.load(path, device="cpu", runtime=backend)


def _kernels(backend: Backend, program: Program) -> tuple[Counter[str], int]:
    """Count the operators that the runtime runs, by kernel, and the layers on integers."""
    if backend == "openvino":
        layers = Counter(
            {f"{kind} {kept}": n for (kind, kept), n in program.openvino_kernels().items() if kind in LAYERS}
        )
        return layers, sum(n for name, n in layers.items() if name.split()[1] in ("i8", "u8"))
    found = program.kernels()
    return found, sum(found[name] for name in INTEGER_KERNELS)
