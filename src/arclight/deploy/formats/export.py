"""Export a model as a program, which is kept only if it computes what the model computes."""

from __future__ import annotations

import copy
import logging
import math
import os
import platform
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from arclight._intervals import kind_of
from arclight.deploy.capture import (
    FreeDimensions,
    Inputs,
    as_inputs,
    as_outputs,
    batch_size,
    capture,
    free_dimensions,
    free_sizes,
    frozen_copy,
    resized,
)
from arclight.deploy.errors import ExportError, ProgramError
from arclight.deploy.formats import onnx_graph
from arclight.deploy.parity import Parity, Parts, compare, worst
from arclight.deploy.programs.benchmark import benchmark
from arclight.deploy.programs.metadata import check as check_metadata
from arclight.deploy.programs.metadata import seal
from arclight.deploy.programs.openvino import INTEGERS, LAYERS, check_bfloat16
from arclight.deploy.programs.processing import check_name
from arclight.deploy.programs.program import Program, Runtime
from arclight.deploy.quantizing.ptq import QuantizedModel
from arclight.deploy.settings import BFloat16, DynamicInt8, Int8, LowBit, Quantization, Target, WeightOnly
from arclight.fabric.extras import require

log = logging.getLogger(__name__)

BATCH_SIZES = (1, 2, 3)
"""Sizes at which a program with a free batch dimension is compared with its model."""
FLOAT_TOLERANCE = 1e-4
"""Default bound for float32 programs: largest difference as a share of the largest value of the same output."""
INT8_SQNR_DB = 30.0
"""Default bound for int8 programs: kernels and simulation round ties differently, which must stay below the rounding
noise of quantization itself."""
INTEGER_SHARE = 0.9
"""Least share of the quantized layers that must run on integer kernels."""
_KERNELS = {
    "onnxruntime": "integer kernels in ONNX Runtime", "openvino": "integer kernels in OpenVINO",
    "openvino-bf16": "bfloat16 kernels in OpenVINO",
}  # fmt: skip
TIMED_ROUNDS = 15
"""Calls of a program and of its float32 program that are timed, one after the other."""


def export(
    model: nn.Module | QuantizedModel,
    path: str | os.PathLike[str],
    *,
    example_inputs: Tensor | Sequence[Tensor],
    format: Literal["onnx"] = "onnx",
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_batch: bool = True,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    comparisons: Mapping[str, Tensor | Sequence[Tensor]] | None = None,
    metadata: Mapping[str, Any] | None = None,
    max_difference: float | None = None,
    parts: Parts | None = None,
) -> Program:
    """Write ``model`` to one file at ``path``, compare the program with it on real inputs, and return it.

    ``example_inputs``: the positional inputs, batch first; the more samples, the more is compared. ``dynamic`` names the
    dimensions of any size, by the parameters of ``forward``, in place of the batch: ``{"tokens": {0: "batch", 1: "time"}}``,
    equal names for equal sizes (those of ``*past`` are all called past); ``comparisons`` are further inputs of other
    sizes that the program is compared on, and what is empty there may be so in the program. ``metadata`` is
    stored in the file beside what the exporter knows (precision, parity, versions). ``max_difference`` is the largest
    absolute difference to the model that is accepted, in the unit of the outputs; by default 1e-4 of the largest
    value for float32, and 30 dB between the program and the simulation of a quantized model. Every output is
    judged by itself, or every tensor that ``parts`` takes out of them: ``lambda predictions: {"boxes": predictions[...,
    :4], "scores": predictions[..., 4:]}``. The file records each.

    Raises ExportError, and leaves whatever was at ``path`` as it was, where the model cannot be captured or converted,
    the program differs by more than the bound, or quantized layers would not run on integer kernels, for which 4-bit
    activations have none; QuantizeError where the program's metric drops further than the model was quantized with.
    """
    _check_format(format)
    described = _callers_metadata(metadata)
    path, inputs = Path(path), as_inputs(example_inputs)
    quantized = model if isinstance(model, QuantizedModel) else None
    precision = _precision(quantized.recipe) if quantized else "fp32"
    runtime = _runtime(quantized.target if quantized else "onnxruntime", precision)
    module = copy.deepcopy(quantized).cpu().graph if quantized else frozen_copy(model)
    sizes = _Sizes.of(quantized.reference if quantized else module, inputs, comparisons or {}, dynamic, dynamic_batch)
    onnx_model = onnx_graph.convert(sizes.capture(module), input_names=input_names, output_names=output_names)

    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=path.parent) as scratch:
        draft = Path(scratch) / "program.onnx"
        files = onnx_graph.write(onnx_model, draft, weights=f"{path.name}.data")
        program = _opened(draft, runtime)
        parity = _parity(program, module, sizes.batches, parts)
        _accept(parity, max_difference, precision)
        against = f"simulated {precision}" if quantized else "fp32"
        described |= {"parity": {"against": against, **sizes.described(), **_described(parity)}, "precision": precision}
        if quantized:
            described["quantization"] = _quantization_report(quantized, program, inputs, parts, sizes)
        described |= {"runtime": program.runtime} if program.runtime != "onnxruntime" else {}
        described["versions"] = _versions(program.runtime)
        seal(draft, described)
        Program.load(draft, device="cpu")
        for file in files:
            os.replace(file, path if file == draft else path.with_name(file.name))
    log.info("%s: %s", path, described["parity"])
    return Program.load(path, device="cpu")


def _check_format(format: str) -> None:
    if format != "onnx":
        raise ExportError(f"format {format!r} is not known; the one format there is now is 'onnx'")
    for package in ("onnx", "onnxscript", "onnxruntime"):
        require(package, extra="deploy")


@dataclass(frozen=True)
class _Sizes:
    """Sizes of a program: those it is captured in, those that are free, and those it is compared in."""

    example: Inputs
    free: FreeDimensions | None
    dynamic_batch: bool
    batches: Mapping[str, Inputs]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        inputs: Inputs,
        comparisons: Mapping[str, Tensor | Sequence[Tensor]],
        dynamic: Mapping[str, Mapping[int, str]] | None,
        dynamic_batch: bool,
    ) -> _Sizes:
        samples = batch_size(inputs)
        compared = {name: as_inputs(more) for name, more in comparisons.items()}
        empty = (more for more in compared.values() if any(0 in value.shape for value in more))
        example = next(empty, inputs)  # what may be empty is told from it
        if dynamic is not None:
            free = free_dimensions(model, inputs, dynamic)
            return cls(example, free, dynamic_batch, {"example": inputs} | compared)
        # inputs of a fixed size stay what they are: they may be tables, whose first dimension is no batch
        batch_sizes = BATCH_SIZES if dynamic_batch else (samples,)
        batches = {f"batch size {n}": resized(inputs, n) if dynamic_batch else inputs for n in batch_sizes}
        return cls(example, None, dynamic_batch, batches | compared)

    def capture(self, module: nn.Module) -> ExportedProgram:
        return capture(module, self.example, dynamic_batch=self.dynamic_batch, free=self.free)

    def described(self) -> dict[str, Any]:
        """Say on what sizes a program was compared."""
        if self.free is None:
            return {"batch_sizes": [batch_size(batch) for batch in self.batches.values()]}
        return {"sizes": {name: free_sizes(batch, self.free) for name, batch in self.batches.items()}}

    def one(self, inputs: Inputs) -> Inputs:
        """Return one sample of ``inputs``, where the batch is free."""
        return resized(inputs, 1) if self.dynamic_batch else inputs


def _callers_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    described = dict(metadata or {})
    check_metadata(described, reserved={"precision", "parity", "quantization", "runtime", "versions"})
    if "processing" in described:
        check_name(described["processing"])
    return described


def _runtime(target: Target, precision: str) -> Runtime:
    """Return what runs the program of a target; ExportError for one that runs no ONNX file."""
    if target in ("inductor", "executorch"):
        raise ExportError(
            f"the model was quantized for {target}, which does not run ONNX files: quantize it with target='openvino' or "
            "'onnxruntime'"
        )
    if target == "openvino":
        return "openvino-bf16" if precision == "bf16" else "openvino"
    return "onnxruntime"  # where TensorRT's programs are compared with their models, too


def _opened(draft: Path, runtime: Runtime) -> Program:
    """Open a program that does not say yet what runs it."""
    try:
        return Program.load(draft, device="cpu", runtime=runtime)
    except ProgramError as error:
        raise ExportError(f"the exported model cannot be run here: {error}") from error


def _parity(
    program: Program, module: nn.Module, batches: Mapping[str, Inputs], parts: Parts | None
) -> dict[str, Parity]:  # fmt: skip
    """Compare the program with ``module`` on ``batches`` by name; the worst of every output, or part, by name."""
    named = parts or (lambda *outputs: {spec.name: value for spec, value in zip(program.outputs, outputs)})
    found: dict[str, list[Parity]] = {}
    for which, batch in batches.items():
        with torch.no_grad():
            expected = as_outputs(module(*batch))
        given = program(*batch)
        try:
            for name, parity in compare(expected, as_outputs(given), named).items():
                found.setdefault(name, []).append(parity)
        except ValueError as error:
            raise ExportError(f"the program does not compute what the model computes at {which}: {error}") from error
    return {name: worst(sizes_of_one) for name, sizes_of_one in found.items()}


def _precision(recipe: Quantization) -> str:
    """Name what the program of a recipe computes in; ExportError where no kernel does."""
    match recipe:
        case Int8():
            return "int8"
        case DynamicInt8():
            return "dynamic int8"
        case WeightOnly():
            return f"{recipe.bits}-bit weights"
        case BFloat16():
            check_bfloat16()
            return "bf16"
        case LowBit(activation_bits=8):
            return "w4a8"
    raise ExportError(
        "4-bit activations have no kernels in ONNX Runtime, nor on any CPU, so there is no program of W4A4: it can be "
        "trained and scored in PyTorch; for a program take LowBit(activation_bits=8), WeightOnly(bits=4) or Int8()"
    )


def _accept(found: Mapping[str, Parity], max_difference: float | None, precision: str) -> None:
    """Raise ExportError where an output of the program is further from the model's than allowed."""
    for name, parity in found.items():
        if max_difference is not None:
            fits, limit = parity.max_difference <= max_difference, f"max_difference is {max_difference:.3g}"
        elif precision != "fp32":
            fits, limit = parity.sqnr_db >= INT8_SQNR_DB, f"{precision} programs need {INT8_SQNR_DB:.0f} dB"
        else:
            allowed = FLOAT_TOLERANCE * parity.largest
            fits = parity.max_difference <= allowed
            limit = f"{FLOAT_TOLERANCE:.0e} of its largest value is {allowed:.3g}"
        if not fits:
            raise ExportError(
                f"output {name} of the program differs from the model's by up to {parity.max_difference:.3g} in values "
                f"of up to {parity.largest:.3g} ({parity.sqnr_db:.1f} dB), and {limit}: no program was written"
            )


def _quantization_report(
    quantized: QuantizedModel, program: Program, inputs: Inputs, parts: Parts | None, sizes: _Sizes
) -> dict[str, Any]:
    """Report what was quantized, its distance to the float model, its kernels, and its speed and scores."""
    calibrated = isinstance(quantized.recipe, Int8)
    against_float = _parity(program, quantized.reference, {"the example": inputs}, parts)
    kind = {} if calibrated else {"kind": kind_of(type(quantized.recipe))}
    scored = {} if quantized.scores is None else {"metric": _metric(quantized, program)}
    return {
        **kind,
        **asdict(quantized.recipe),
        "target": quantized.target,
        "calibration_batches": quantized.batches,
        "quantized_layers": len(quantized.quantized_layers),
        "float_layers": list(quantized.float_layers),
        **_measured(quantized, program, inputs, sizes),
        "against_float": _described(against_float),
        **scored,
    }


def _measured(quantized: QuantizedModel, program: Program, inputs: Inputs, sizes: _Sizes) -> dict[str, Any]:
    """Count kernels and measure speed in the target; ExportError where layers would not run on the kernels they are for."""
    if quantized.target == "tensorrt":
        log.warning(
            "TensorRT is not here: kernels and speed of the program are not measured, only its outputs, in ONNX Runtime; measure "
            "them with trtexec on the machine that will run it"
        )
        return {}
    planned, found = len(quantized.quantized_layers), _kernels(quantized, program)
    if sum(found.values()) < INTEGER_SHARE * planned:
        recipe = quantized.recipe
        field = "" if isinstance(recipe, BFloat16) else f" ({type(recipe).__name__}.skip)"
        raise ExportError(
            f"only {sum(found.values())} of {planned} quantized layers became {_KERNELS[program.runtime]}, so the program "
            f"would be called {_precision(recipe)} without running as that: keep the modules around operators that it cannot run on "
            f"these kernels in float{field}, quantize for another target, or export the float model"
        )
    name = "integer_kernels" if isinstance(quantized.recipe, Int8) else "kernels"
    return {name: found, "speed": _speed(quantized, program, inputs, sizes)}


def _kernels(quantized: QuantizedModel, program: Program) -> dict[str, int]:
    """Count the kernels that the recipe asks for among those that the runtime really runs."""
    if program.runtime != "onnxruntime":
        wanted = ("bf16",) if program.runtime == "openvino-bf16" else INTEGERS
        ran: Counter[str] = Counter()
        for (kind, precision), count in program.openvino_kernels().items():
            if kind in LAYERS and precision in wanted:
                ran[kind] += count
        return dict(sorted(ran.items()))
    kernels = onnx_graph.INTEGER_KERNELS if isinstance(quantized.recipe, Int8) else onnx_graph.LINEAR_KERNELS
    found = onnx_graph.kernels(program.path, program.path.parent)
    return {name: found[name] for name in sorted(kernels) if found[name]}


def _speed(quantized: QuantizedModel, program: Program, inputs: Inputs, sizes: _Sizes) -> dict[str, Any]:
    """Time the program against the float32 program of the same model, on one sample where the batch is free."""
    exported = sizes.capture(frozen_copy(quantized.reference))
    plain = program.path.with_name("fp32.onnx")
    size = program.nbytes + sum(
        file.stat().st_size for file in plain.parent.glob("*.data")
    )  # not listed before it is sealed
    files = onnx_graph.write(onnx_graph.convert(exported, input_names=None, output_names=None), plain)
    # bfloat16 is for speed over what runs anywhere, which is ONNX Runtime; integers are placed for one runtime
    runtime: Runtime = "openvino" if program.runtime == "openvino" else "onnxruntime"
    programs = {"fp32": Program.load(plain, device="cpu", runtime=runtime), "quantized": program}
    table = benchmark(programs, sizes.one(inputs), rounds=TIMED_ROUNDS)
    row = table["quantized"]
    if row.speedup_high < 1:
        log.warning(
            "in %s the quantized program takes %.1f times as long as the float32 program (%.2f ms): it saves memory, no time",
            quantized.target,
            1 / row.speedup,
            table["fp32"].wall_ms,
        )
    return {
        "over_fp32": row.speedup,
        "low": row.speedup_low,
        "high": row.speedup_high,
        "threads": table.threads,
        "shapes": [list(shape) for shape in table.shapes],
        "size_over_fp32": size / sum(file.stat().st_size for file in files),
    }


def _metric(quantized: QuantizedModel, program: Program) -> dict[str, Any]:
    """Score the program itself beside both models."""
    scores = quantized.scores
    assert scores is not None
    score = float(scores.metric(program))
    scores.check(score, "program")
    return {
        "float": scores.float_model,
        "simulated": scores.quantized_model,
        "program": score,
        "max_drop": scores.max_drop,
    }


def _described(found: Mapping[str, Parity]) -> dict[str, Any]:
    """Write the worst of all outputs, then each, as JSON, which has no infinity: the ratio of equal outputs is null."""

    def values(parity: Parity) -> dict[str, Any]:
        ratio = None if parity.sqnr_db == math.inf else max(parity.sqnr_db, -999.0)  # noise beside a reference of zeros
        return {**asdict(parity), "sqnr_db": ratio}

    return {**values(worst(list(found.values()))), "outputs": {name: values(one) for name, one in found.items()}}


def _versions(runtime: Runtime) -> dict[str, str]:
    packages = ("torch", "onnx", "onnxruntime", *(("openvino",) if runtime != "onnxruntime" else ()))
    return {name: str(require(name, extra="deploy").__version__) for name in packages} | {
        "machine": platform.machine(),
    }
