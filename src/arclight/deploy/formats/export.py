"""Export a model as a program, which is kept only if it agrees with the model.

Users call `export`; `ship` (``deploy.deployment``) calls `export_one`, `export_each` and `export_fastest`. They capture the model, write it by
`formats` into a staging folder, compare program and model in a fresh process, count the kernels of a quantized one and time it against float32, and
publish it: what was at the path stays until then. Keys of the description are in programs: they must stay. Bounds of outputs are in ``parity``, that
of kernels is `INTEGER_SHARE`.
"""

from __future__ import annotations

import copy
import errno
import logging
import math
import os
import platform
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, get_args, overload

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from arclight._intervals import kind_of
from arclight.checkpoint import files
from arclight.deploy.capture import (
    FreeDimensions,
    Inputs,
    absent_outputs,
    as_copy_inputs,
    as_inputs,
    as_outputs,
    batch_size,
    capture,
    copied_inputs,
    free_dimensions,
    free_sizes,
    frozen_copy,
    in_float32,
    output_keys,
    resized,
    trial_run,
    with_sizes,
    without_absent_outputs,
)
from arclight.deploy.errors import ExportError, ProgramError, QuantizeError
from arclight.deploy.formats import onnx_graph
from arclight.deploy.formats.formats import (
    LONE,
    PLANNED,
    Captured,
    Fastest,
    Format,
    Several,
    check_replaceable,
    destination,
    destination_in,
    planned_size,
    quantized_formats,
    runtime_of,
    write,
)
from arclight.deploy.parity import Parity, Parts, broken_bound, compare, to_json, worst
from arclight.deploy.programs import executorch_runtime, folder, torch_runtime
from arclight.deploy.programs.benchmark import benchmark
from arclight.deploy.programs.fresh import run_fresh
from arclight.deploy.programs.metadata import check as check_metadata
from arclight.deploy.programs.metadata import seal, unseal
from arclight.deploy.programs.onnx_runtime import INTEGER_KERNELS, LINEAR_KERNELS
from arclight.deploy.programs.openvino import INTEGERS, LAYERS, PACKED, PRECISION_HINTS, check_bfloat16
from arclight.deploy.programs.other_runtime import described_probe
from arclight.deploy.programs.processing import check_name
from arclight.deploy.programs.processor import instruction_sets, overflows
from arclight.deploy.programs.program import Program
from arclight.deploy.programs.session import NAMES, dtype_name
from arclight.deploy.quantizing.ptq import QuantizedModel, rounded_part
from arclight.deploy.quantizing.qat import PreparedModel
from arclight.deploy.settings import BFloat16, DynamicInt8, Int8, LowBit, Quantization, Runtime, WeightOnly
from arclight.fabric.atomic_replace import DISK_FULL
from arclight.fabric.extras import MissingExtraError, require
from arclight.fabric.signing import SigningError, SigningKey
from arclight.fabric.strategies.root_module import RoundsOwnWeights

log = logging.getLogger(__name__)
T = TypeVar("T")

CANDIDATES: tuple[Format, ...] = ("openvino", "onnx")
"""Formats among which "fastest" chooses by default; pt2 and aoti run what their files say, and are taken only if they are named."""

BATCH_SIZES = (1, 2, 3)
"""Sizes at which a program with a free batch dimension is compared with its model."""
INTEGER_SHARE = 0.9
"""Least share of the quantized layers that must run on integer kernels."""
PROBES = 3
"""Most batches of a program with named free dimensions that are recorded as a probe, to compare other runtimes on; of others one is."""
TIMED_ROUNDS = 15
"""Timed calls of each program, in turns: a quantized and its float32 program, or the candidates for the fastest."""
_PACKAGES: Mapping[str, tuple[str, ...]] = {
    "onnxruntime": ("onnx", "onnxscript", "onnxruntime"), "openvino": ("onnx", "onnxscript", "openvino"),
    "openvino-bf16": ("onnx", "onnxscript", "openvino"), "torch": (), "inductor": (),
    "executorch": ("executorch.version",),
}  # fmt: skip
"""Maps a runtime to the packages that write and run its programs, beside torch."""
_EXTRAS: Mapping[str, str] = {"executorch": "executorch"}
"""Maps a runtime to the extra with its packages, if that is not deploy."""


_NO_OUTPUT: Mapping[torch.dtype, str] = {
    torch.bfloat16: "its .float()",
    **dict.fromkeys(
        (torch.complex32, torch.complex64, torch.complex128),
        "torch.view_as_real of it, a tensor with one dimension more",
    ),
}
"""Maps a type that NumPy or a runtime lacks to what a model may return in its place."""


@overload
def export(
    model: nn.Module | QuantizedModel,
    path: str | os.PathLike[str],
    *,
    example_inputs: Tensor | Sequence[Tensor],
    format: Format | Fastest | None = None,
    candidates: Sequence[Format] | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_batch: bool = True,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    comparisons: Mapping[str, Tensor | Sequence[Tensor]] | None = None,
    metadata: Mapping[str, Any] | None = None,
    max_difference: float | None = None,
    parts: Parts | None = None,
    sign: str | os.PathLike[str] | SigningKey | None = None,
) -> Program: ...


@overload
def export(
    model: nn.Module | QuantizedModel,
    path: str | os.PathLike[str],
    *,
    example_inputs: Tensor | Sequence[Tensor],
    format: Several,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_batch: bool = True,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    comparisons: Mapping[str, Tensor | Sequence[Tensor]] | None = None,
    metadata: Mapping[str, Any] | None = None,
    max_difference: float | None = None,
    parts: Parts | None = None,
    sign: str | os.PathLike[str] | SigningKey | None = None,
) -> dict[Format, Program]: ...


def export(
    model: nn.Module | QuantizedModel,
    path: str | os.PathLike[str],
    *,
    example_inputs: Tensor | Sequence[Tensor],
    format: Format | Fastest | Several | None = None,
    candidates: Sequence[Format] | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_batch: bool = True,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    comparisons: Mapping[str, Tensor | Sequence[Tensor]] | None = None,
    metadata: Mapping[str, Any] | None = None,
    max_difference: float | None = None,
    parts: Parts | None = None,
    sign: str | os.PathLike[str] | SigningKey | None = None,
) -> Program | dict[Format, Program]:
    """Export ``model`` as a program at ``path``, verify it in a fresh process, and return it.

    A ``path`` that ends in .onnx is that one file, any other a folder. ``format``: onnx, openvino, pt2, aoti or executorch; by default that of the target
    that the model was quantized for, or openvino. Several of them are written of one capture, each as the folder ``path/FORMAT``, all or none, and returned
    by format; "fastest" times ``candidates`` (default: openvino and onnx; aoti only if named) in turns on the example, and keeps the one with the lowest
    median, with the times as its ``fastest``. ``example_inputs``: the positional inputs, batch first. Its first 1, 2 and 3 samples are compared,
    all of them with ``dynamic`` or a fixed batch size; more are ``comparisons``. A program computes in float32: inputs in another type that the model's
    weights have are taken in that. ``dynamic`` names the dimensions of any size, by the
    parameters of ``forward``, in place of the batch: ``{"tokens": {0: "batch", 1: "time"}}``, equal names for equal sizes (those of ``*past`` are all
    called past); ``comparisons`` are further inputs of other sizes that the program is compared on (with fewer than two, other sizes of the example are),
    and what is empty there may be so in the program. ``metadata`` is stored in the program beside what the exporter knows (precision, parity, versions).
    ``max_difference`` is the largest absolute difference to the model that is accepted, in the unit of the outputs; by default 1e-4 of the largest value
    for float32, and 30 dB between the program and the simulation of a quantized model. Integers and bools must be equal with any bound, 99 % of them in
    a quantized program, where near ties of scores are decided otherwise. Every output is judged by itself, or every tensor that ``parts``
    takes out of them: ``lambda predictions: {"boxes": predictions[..., :4], "scores": predictions[..., 4:]}``. The program records each, and what is None
    and left out as ``absent_outputs``. ``sign``: an Ed25519 key, or its file.

    Raises ExportError, and leaves whatever was at ``path`` as it was, if the model cannot be captured or converted,
    the program differs by more than the bound, or quantized layers would not run on integer kernels, for which 4-bit
    activations have none; QuantizeError if the program's metric drops further than the model was quantized with.
    """
    request = Request(
        example_inputs=example_inputs, input_names=input_names, output_names=output_names, dynamic_batch=dynamic_batch, dynamic=dynamic,
        comparisons=comparisons or {}, metadata=metadata or {}, max_difference=max_difference, parts=parts, sign=sign,
    )  # fmt: skip
    tried = candidates_of(format, candidates)
    if format == "fastest":
        if isinstance(model, QuantizedModel) and _runtimes(model) == 1:
            raise ExportError(
                f"the model was quantized for {model.target}, the only runtime that its integers are fast in, so there is nothing to choose from: leave format "
                "out, or let `arclight quantize --format fastest` quantize it for each runtime"
            )
        return export_fastest(each_format(tried, model), path, request)
    if isinstance(format, list | tuple):
        return export_each(each_format(format, model), path, request)
    return export_one(model, path, format, request)


def _runtimes(model: QuantizedModel) -> int:
    """Count the runtimes that run programs of ``model``."""
    return len(set(quantized_formats(_precision(model), model.target).values()))


def export_one(
    model: nn.Module | QuantizedModel, path: str | os.PathLike[str], format: Format | None, request: Request
) -> Program:
    """Write ``model`` in one format at ``path``."""
    plan = _plan(model, path, format, request.sign)
    source = _Source(model, request)
    with ExitStack() as stack:
        source.drafted(plan, source.captured([plan.format]), stack).publish()
    return _opened(plan)


def candidates_of(format: Format | Fastest | Several | None, candidates: Sequence[Format] | None) -> Sequence[Format]:
    """Return the formats to time for the fastest: ``candidates``, or the usual ones.

    Raises ExportError for candidates if the fastest is not asked for, for none of them, and for what is no format.
    """
    if candidates is None:
        return CANDIDATES
    if unknown := [name for name in candidates if name not in get_args(Format)]:
        raise ExportError(f"candidates name {unknown[0]!r}: there is {', '.join(get_args(Format))}")
    if not candidates:
        raise ExportError("candidates are empty: name formats, or leave them out")
    if format != "fastest":
        raise ExportError(f"candidates are of format='fastest', and the format is {format!r}: leave them out")
    return candidates


def check_folder(path: str | os.PathLike[str]) -> None:
    """Raise ExportError for a file in place of the folder of the fastest format."""
    if Path(path).suffix == LONE:
        raise ExportError(
            f"{path} names an ONNX file, and the fastest format is known afterwards: name a folder, without {LONE}"
        )


def each_format(formats: Sequence[Format], value: T) -> dict[Format, T]:
    """Return ``value`` for each of ``formats``.

    Raises ExportError if there is none, or one is named twice.
    """
    if not formats or len(set(formats)) < len(formats):
        named = ", ".join(map(str, formats)) or "nothing"
        raise ExportError(f"format names {named}: name each format once, and one at least")
    return dict.fromkeys(formats, value)


def export_each(
    models: Mapping[Format, nn.Module | QuantizedModel], path: str | os.PathLike[str], request: Request
) -> dict[Format, Program]:
    """Export each of ``models``, by format, into a folder in ``path``, all or none.

    A model in several formats is captured once.
    """
    plans = {form: _plan(model, destination_in(path, form), form, request.sign) for form, model in models.items()}
    sources = _Source.of_each(models, request)
    captures = _captures(sources)
    with ExitStack() as stack:
        drafts = [sources[form].drafted(plan, captures[form], stack) for form, plan in plans.items()]
        _publish_all(drafts)
    return {form: _opened(plan) for form, plan in plans.items()}


def _publish_all(drafts: Sequence[_Draft]) -> None:
    """Publish folders, all or none: on an error those that were replaced are put back.

    What takes room on the disk is done for all before the first of them is replaced.
    """
    for draft in drafts:
        draft.finish()
    with ExitStack() as links, ExitStack() as undo:
        formers = [links.enter_context(_linked(draft.plan.path)) for draft in drafts]
        for draft, former in zip(drafts, formers):
            check_replaceable(draft.plan.path)  # again, as the export took a while
            undo.callback(_put_back, draft.plan.path, former)
            draft.place()
        undo.pop_all()


@contextmanager
def _linked(path: Path) -> Iterator[Path | None]:
    """Yield a folder with links to the files of the folder ``path``; None without one."""
    if not path.is_dir():
        yield None
        return
    with _staging(path) as links:
        shutil.copytree(path, links, copy_function=files.link_or_copy, dirs_exist_ok=True)
        yield links


def _put_back(path: Path, former: Path | None) -> None:
    """Put the folder ``former`` back at ``path``, or nothing if there was none."""
    try:
        if former is not None:
            files.publish(former, path)
        elif path.exists():
            files.retire(path)
    except OSError as error:
        raise ExportError(
            f"{path} holds a new program, and the one before cannot be put back: {error.strerror}: export again"
        ) from error


def _captures(sources: Mapping[Format, _Source]) -> dict[Format, Captured]:
    """Capture each source once, for all of its formats; return the captures by format.

    Those whose memory is planned have a capture of their own, whose sizes are bounded.
    """
    formats: dict[tuple[_Source, bool], list[Format]] = {}
    for form, source in sources.items():
        formats.setdefault((source, form in PLANNED), []).append(form)
    made = {key: key[0].captured(own) for key, own in formats.items()}
    return {form: made[source, form in PLANNED] for form, source in sources.items()}


def export_fastest(
    models: Mapping[Format, nn.Module | QuantizedModel],
    path: str | os.PathLike[str],
    request: Request,
    left_out: Mapping[Format, Exception] = MappingProxyType({}),
) -> Program:
    """Export ``models``, by format, time them in turns, and keep the fastest at ``path``.

    The times of all are kept with it. A format that this machine cannot write or run is left out, with a warning and
    the reason in the program, beside those ``left_out`` before; the first reason is raised if none is left.
    """
    check_folder(path)
    sources = _Source.of_each(models, request)
    captures = _captures(sources)
    drafts: dict[Format, _Draft] = {}
    refused: dict[Format, Exception] = dict(left_out)
    with ExitStack() as stack:
        for form, model in models.items():
            try:
                plan = _plan(model, path, form, request.sign)
                drafts[form] = sources[form].drafted(plan, captures[form], stack)
            except (ExportError, QuantizeError, MissingExtraError) as error:
                refused[form] = error
        if not drafts:
            raise next(iter(refused.values()))
        for form, reason in refused.items():
            log.warning("format %s is not timed: %s", form, reason)
        source = sources[next(iter(drafts))]
        table = benchmark(
            {form: draft.program for form, draft in drafts.items()},
            source.sizes.one(source.inputs),
            rounds=TIMED_ROUNDS,
        )
        fastest = min(drafts, key=lambda form: table[form].wall_ms)
        drafts[fastest].described["fastest"] = {
            "wall_ms": {form: table[form].wall_ms for form in drafts},
            "threads": table.threads,
            "shapes": [list(shape) for shape in table.shapes],
            "left_out": {form: str(reason) for form, reason in refused.items()},
        }
        drafts[fastest].publish()
    return _opened(drafts[fastest].plan)


def _opened(plan: _Plan) -> Program:
    """Open the program that was published."""
    program = Program.load(plan.path, device="cpu", trusted=[plan.key.public] if plan.key else None)
    log.info("%s: %s", plan.path, program.metadata["parity"])
    return program


@dataclass(frozen=True, kw_only=True)
class Request:
    """Arguments of `export` that all programs of a model share; see there."""

    example_inputs: Tensor | Sequence[Tensor]
    input_names: Sequence[str] | None = None
    output_names: Sequence[str] | None = None
    dynamic_batch: bool = True
    dynamic: Mapping[str, Mapping[int, str]] | None = None
    comparisons: Mapping[str, Tensor | Sequence[Tensor]] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    max_difference: float | None = None
    parts: Parts | None = None
    sign: str | os.PathLike[str] | SigningKey | None = None


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Path, format, runtime and key of one program."""

    path: Path
    format: Format
    runtime: Runtime
    key: SigningKey | None


def _plan(
    model: nn.Module | QuantizedModel,
    path: str | os.PathLike[str],
    format: Format | None,
    sign: str | os.PathLike[str] | SigningKey | None,
) -> _Plan:
    """Plan the export of ``model``.

    Raises ExportError for a format that does not hold it, and for a place where it cannot be.
    """
    target = model.target if isinstance(model, QuantizedModel) else None
    path, form = destination(path, format, target)
    key = _signing_key(sign, path, form)
    runtime = _required(runtime_of(form, _precision(model), target))
    return _Plan(path=path, format=form, runtime=runtime, key=key)


def _precision(model: nn.Module | QuantizedModel) -> str:
    return precision_of(model.recipe) if isinstance(model, QuantizedModel) else "fp32"


class _Source:
    """Model that programs are made of: a copy, its inputs, and metadata of every program."""

    def __init__(self, model: nn.Module | QuantizedModel, request: Request) -> None:
        self._request = request
        self._quantized = model if isinstance(model, QuantizedModel) else None
        if found := rounded_part(model, PreparedModel | RoundsOwnWeights):
            raise ExportError(f"the model {found}, which trains with rounding: export what convert(model) returns")
        self._precision = _precision(model)
        self._described = _callers_metadata(request.metadata)
        seconds = self._quantized.seconds if self._quantized else math.nan
        self._build_s = {"quantization": seconds} if math.isfinite(seconds) else {}
        self.inputs = _taken(model, request.example_inputs)
        compared = {name: _taken(model, batch) for name, batch in request.comparisons.items()}
        self._module = copy.deepcopy(self._quantized).cpu().graph if self._quantized else frozen_copy(model)
        shaped = self._quantized.reference if self._quantized else self._module
        self.sizes = _Sizes.of(shaped, self.inputs, compared, request.dynamic, request.dynamic_batch)
        outputs = _tried(self._module, self.inputs, request.input_names, request.output_names)
        self._described |= {"absent_outputs": absent} if (absent := absent_outputs(outputs)) else {}
        self._output_keys = output_keys(outputs)

    @classmethod
    def of_each(cls, models: Mapping[Format, nn.Module | QuantizedModel], request: Request) -> dict[Format, _Source]:
        """Return the source of each model, by format; equal models have the same one."""
        made: dict[int, _Source] = {}
        for model in models.values():
            if id(model) not in made:
                made[id(model)] = cls(model, request)
        return {form: made[id(model)] for form, model in models.items()}

    def captured(self, formats: Sequence[Format]) -> Captured:
        """Capture the model for ``formats``."""
        start = time.perf_counter()
        exported = self.sizes.capture(self._module, formats)
        self._build_s["capture"] = time.perf_counter() - start
        names, keys = self._request.output_names, self._output_keys
        if self._quantized is not None and names is None and keys is None:
            keys = self._named(self.float_model, None, None).names()[1]  # placements end in operators of their own
        return self._named(exported, names, keys)

    def _named(
        self, exported: ExportedProgram, output_names: Sequence[str] | None, keys: Sequence[str] | None
    ) -> Captured:
        return Captured(exported, self.sizes.names(), self._request.input_names, output_names, keys)

    @cached_property
    def float_model(self) -> ExportedProgram:
        """Capture the float model that a quantized one was made of, once."""
        assert self._quantized is not None
        return self.sizes.capture(frozen_copy(self._quantized.reference), ["onnx"])

    def drafted(self, plan: _Plan, captured: Captured, stack: ExitStack) -> _Draft:
        """Write the program as a draft, and accept it by its outputs, kernels and scores.

        It is unpublished until ``stack`` is left.
        """
        quantized, request = self._quantized, self._request
        stack.enter_context(_disk_named(plan.path))
        draft = _Draft(captured, stack.enter_context(_staging(plan.path)), plan)
        start = time.perf_counter()
        needs = draft.write(self._precision)
        build_s = {**self._build_s, "writing": time.perf_counter() - start}
        draft.program = program = draft.opened()
        parity = _parity(program, self._module, self.sizes.batches, request.parts, fresh=True)
        _accept(parity, request.max_difference, self._precision, _remedy(quantized))
        against = f"simulated {self._precision}" if quantized else "fp32"
        draft.described = {
            **self._described,
            **needs,
            "parity": {"against": against, **self.sizes.described(), **_described(parity)},
            "precision": self._precision,
            "probe": described_probe(self.sizes.probed()),
            "build_s": build_s,
        }
        if quantized:
            draft.described["quantization"] = _quantization_report(quantized, program, self.inputs, request.parts, self)
        draft.described |= _environment(program.runtime, draft.lone)
        return draft


def _taken(model: nn.Module | QuantizedModel, batch: Tensor | Sequence[Tensor]) -> Inputs:
    """Return ``batch`` as the float32 program of ``model`` takes it."""
    inputs = as_inputs(batch)
    return in_float32(inputs) if isinstance(model, QuantizedModel) else as_copy_inputs(model, inputs)


def _tried(
    module: nn.Module, inputs: Inputs, input_names: Sequence[str] | None, output_names: Sequence[str] | None
) -> Any:
    """Run the model on the example; return its outputs.

    Raises ExportError for outputs that no program can give, and for names that do not fit.
    """
    outputs = trial_run(module, inputs)
    tensors = as_outputs(outputs)
    _check_names(len(inputs), input_names, len(tensors), output_names)
    for place, tensor in enumerate(tensors):
        name = output_names[place] if output_names is not None else place
        if way := _NO_OUTPUT.get(tensor.dtype):
            raise ExportError(
                f"output {name} of the model is {dtype_name(tensor.dtype)}, which programs do not give: return {way}"
            )
        if not tensor.numel():
            raise ExportError(
                f"output {name} of the model has shape {tuple(tensor.shape)} on the example and holds no value, so nothing can be told from it: "
                "give an example on which it holds some, or wrap the model in one that leaves it out"
            )
    return outputs


def _check_names(
    inputs: int, input_names: Sequence[str] | None, outputs: int, output_names: Sequence[str] | None
) -> None:
    """Raise ExportError for names that are too few or many, or that stand for two tensors."""
    for what, count, names in (("input", inputs, input_names), ("output", outputs, output_names)):
        if names is not None and not all(names):
            raise ExportError(f"{what}_names are {', '.join(map(repr, names))}: no name may be empty")
        if names is not None and len(names) != count:
            raise ExportError(
                f"the model has {count} {what}s, and {what}_names are {len(names)}: {', '.join(names)}; give one for each"
            )
    named = Counter([*(input_names or ()), *(output_names or ())])
    if twice := [name for name, count in named.items() if count > 1]:
        raise ExportError(
            f"input_names and output_names give {', '.join(twice)} to several tensors: no two of a program's have one name"
        )


def _required(runtime: Runtime) -> Runtime:
    """Return ``runtime``.

    Raises MissingExtraError if what writes or runs its programs is not installed.
    """
    for package in _PACKAGES[runtime]:
        require(package, extra=_EXTRAS.get(runtime, "deploy"))
    return runtime


class _Draft:
    """Program under construction in the folder ``staging``, to be moved to its plan's path."""

    program: Program
    """The program in staging, once it is opened."""

    def __init__(self, captured: Captured, staging: Path, plan: _Plan) -> None:
        self._captured, self._staging, self.plan = captured, staging, plan
        self._trusted = [plan.key.public] if plan.key else None
        self.described: dict[str, Any] = {}
        self.lone = plan.path.suffix == LONE
        self._main = ""

    def write(self, precision: str) -> dict[str, Any]:
        """Write the files; return what they require of a machine, for the description."""
        stem = self.plan.path.stem if self.lone else "model"
        self._main, needs = write(self._captured, self._staging, self.plan.format, precision, stem)
        return needs

    def opened(self) -> Program:
        """Open the program, with its runtime alone as its description so far."""
        try:
            if self.lone:
                return Program.load(self._staging / self._main, device="cpu", runtime=self.plan.runtime)
            self._describe({"runtime": self.plan.runtime})
            return Program.load(self._staging, device="cpu", trusted=self._trusted)
        except ProgramError as error:
            raise ExportError(f"the exported model cannot be run here: {error}") from error

    def publish(self) -> None:
        """Describe and check the program, and put it where it belongs in one step."""
        if self.lone:
            self._publish_file(self._staging / self._main, dict(self.described))
            return
        self.finish()
        check_replaceable(self.plan.path)  # again, as the export took a while
        self.place()

    def finish(self) -> None:
        """Describe and check the program of a folder, which only has to be renamed then."""
        with _disk_named(self.plan.path):
            self._describe(self.described)
            folder.read(self._staging, self._trusted)

    def place(self) -> None:
        """Put a finished folder where it belongs, in one step."""
        with _disk_named(self.plan.path):
            files.publish(self._staging, self.plan.path)

    def _publish_file(self, draft: Path, described: dict[str, Any]) -> None:
        """Replace the file atomically, after its weights, and delete the weights of the one before.

        Weights lie beside it under a name with their digest, see `onnx_graph`.
        """
        path = self.plan.path
        seal(draft, described)
        unseal(draft)
        check_replaceable(path)
        former = _weights_of(path)
        beside = [file for file in sorted(self._staging.iterdir()) if file != draft]
        for file in (*beside, draft):
            with file.open("rb") as written:
                os.fsync(written.fileno())
        for file in beside:
            files.replace_file(path.with_name(file.name), file)
        files.replace_file(path, draft)
        for file in former - {path.with_name(file.name) for file in beside}:
            files.discard(file)

    def _describe(self, described: Mapping[str, Any]) -> None:
        inputs, outputs = self._captured.specs()
        folder.write(
            self._staging, format=self.plan.format, main=self._main, inputs=inputs, outputs=outputs, description=described,
            key=self.plan.key,
        )  # fmt: skip


@contextmanager
def _staging(path: Path) -> Iterator[Path]:
    """Yield a staging folder beside ``path``, which is deleted unless it was published.

    Folders that killed exports have left beside it are deleted, too.
    """
    staging = files.make_staging(path)
    files.sweep(path.parent)
    try:
        yield staging
    finally:
        files.discard(staging)


@contextmanager
def _disk_named(path: Path) -> Iterator[None]:
    """Raise ExportError in place of an OSError of a disk that is full or read-only."""
    try:
        yield
    except OSError as error:
        if error.errno not in (*DISK_FULL, errno.EROFS):
            raise
        raise ExportError(f"{path} cannot be written: {error.strerror}; what was there is as it was") from error


def _weights_of(path: Path) -> set[Path]:
    """Return the weight files beside the program at ``path`` that an export wrote for it."""
    try:
        names = unseal(path)[0].get("files", {}) if path.is_file() else {}
    except ProgramError:  # damaged: what it had beside it is not known
        return set()
    own = re.compile(rf"{re.escape(path.stem)}-[0-9a-f]{{16}}\.data")
    return {path.with_name(name) for name in names if own.fullmatch(name)}


def check_signed(path: Path, form: Format, *, signed: bool) -> None:
    """Raise ExportError if a format needs a key and has none, or cannot be signed."""
    if not signed and form in folder.EXECUTED:
        raise ExportError(
            f"{form} programs are loaded only if somebody who is trusted signed them ({folder.EXECUTED[form]}): give sign= an "
            "Ed25519 key, which `openssl genpkey -algorithm ed25519 -out FILE` makes"
        )
    if signed and path.suffix == LONE:
        raise ExportError(f"{path} would be one file, and only a folder is signed: name a folder, without {LONE}")


def _signing_key(sign: str | os.PathLike[str] | SigningKey | None, path: Path, form: Format) -> SigningKey | None:
    check_signed(path, form, signed=sign is not None)
    if sign is None or isinstance(sign, SigningKey):
        return sign
    try:
        return SigningKey.read(Path(sign))
    except (OSError, SigningError) as error:
        raise ExportError(f"cannot sign with {os.fspath(sign)}: {error}") from error


@dataclass(frozen=True)
class _Sizes:
    """Inputs that a program is captured on and compared on, and its free dimensions."""

    example: Inputs
    free: FreeDimensions | None
    dynamic_batch: bool
    batches: Mapping[str, Inputs]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        inputs: Inputs,
        compared: dict[str, Inputs],
        dynamic: Mapping[str, Mapping[int, str]] | None,
        dynamic_batch: bool,
    ) -> _Sizes:
        samples = batch_size(inputs)
        empty = (more for more in compared.values() if any(0 in value.shape for value in more))
        example = next(empty, inputs)  # sizes that may be 0 are inferred from it
        if dynamic is not None:
            free = free_dimensions(model, inputs, dynamic)
            more = {} if len(compared) > 1 else _other_sizes(inputs, free)
            return cls(example, free, dynamic_batch, {"example": inputs, **compared, **more})
        # inputs of a fixed size stay what they are: they may be tables, whose first dimension is no batch
        batch_sizes = BATCH_SIZES if dynamic_batch else (samples,)
        batches = {f"batch size {n}": resized(inputs, n) if dynamic_batch else inputs for n in batch_sizes}
        return cls(example, None, dynamic_batch, {**batches, **compared})

    def capture(self, module: nn.Module, formats: Sequence[Format]) -> ExportedProgram:
        functional = not {"pt2", "aoti"}.isdisjoint(formats)  # others are written by way of ONNX
        largest = self.largest() if PLANNED.issuperset(formats) else None
        exported = capture(
            module,
            self.example,
            dynamic_batch=self.dynamic_batch,
            free=self.free,
            functional=functional,
            largest=largest,
        )
        return without_absent_outputs(exported)

    def largest(self) -> dict[str, int]:
        """Return the size of each free dimension that memory is planned for."""
        compared = (self.example, *self.batches.values())
        if self.free is None:
            return {"batch": planned_size(max(map(batch_size, compared)))}
        sizes = [free_sizes(batch, self.free) for batch in compared]
        return {name: planned_size(max(one[name] for one in sizes)) for name in sizes[0]}

    def names(self) -> FreeDimensions:
        """Return the free dimensions of each input with their names."""
        if self.free is not None:
            return self.free
        return [{0: "batch"} if self.dynamic_batch and value.dim() else {} for value in self.example]

    def described(self) -> dict[str, Any]:
        """Return the sizes in which a program was compared, for its metadata."""
        if self.free is None:
            return {"batch_sizes": [batch_size(batch) for batch in self.batches.values()]}
        return {"sizes": {name: free_sizes(batch, self.free) for name, batch in self.batches.items()}}

    def probed(self) -> list[Inputs]:
        """Return the batches whose shapes and ranges are recorded for comparing runtimes later."""
        return list(self.batches.values())[: PROBES if self.free is not None else 1]

    def one(self, inputs: Inputs) -> Inputs:
        """Return one sample of ``inputs``, if the batch is free."""
        return resized(inputs, 1) if self.dynamic_batch else inputs


def _other_sizes(inputs: Inputs, free: FreeDimensions) -> dict[str, Inputs]:
    """Return ``inputs`` in two other sizes of every free dimension.

    They are 1, and one more or (from 3 on) one less than they have.
    """
    given = free_sizes(inputs, free)
    near = {name: size - 1 if size > 2 else size + 1 for name, size in given.items()}
    found = (dict.fromkeys(given, 1), near)
    return {
        ", ".join(f"{name} {size}" for name, size in sizes.items()): with_sizes(inputs, free, sizes) for sizes in found
    }


def _callers_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    described = dict(metadata or {})
    reserved = {
        "precision",
        "parity",
        "probe",
        "quantization",
        "runtime",
        "versions",
        "instruction_sets",
        "absent_outputs",
        "fastest",
        "largest_sizes",
    }
    check_metadata(
        described, reserved=reserved | {"requires", "requires_machine", "precision_hint", "passes", "build_s"}
    )
    if "processing" in described:
        check_name(described["processing"])
    return described


def _parity(
    program: Program, module: nn.Module, batches: Mapping[str, Inputs], parts: Parts | None, *, fresh: bool = False
) -> dict[str, Parity]:  # fmt: skip
    """Compare the program with ``module``; return the worst parity by output, or by part.

    ``fresh``: the program runs in a process of its own.
    """
    named = parts or (lambda *outputs: {spec.name: value for spec, value in zip(program.outputs, outputs)})
    if fresh:
        try:
            held = run_fresh(program, [[value.numpy() for value in batch] for batch in batches.values()]).outputs
        except ProgramError as error:
            raise ExportError(f"the exported model cannot be run at {', '.join(batches)}: {error}") from error
        given: Any = ([torch.from_numpy(output) for output in outputs] for outputs in held)
    else:
        given = (as_outputs(program(*batch)) for batch in batches.values())
    found: dict[str, list[Parity]] = {}
    for (which, batch), outputs in zip(batches.items(), given):
        try:
            with torch.no_grad():
                expected = as_outputs(module(*copied_inputs(batch)))
        except Exception as error:  # the model's own
            raise ExportError(
                f"the model cannot be run at {which}: {error}; give comparisons= in sizes that it takes"
            ) from error
        try:
            for name, parity in compare(expected, outputs, named).items():
                found.setdefault(name, []).append(parity)
        except ValueError as error:
            raise ExportError(
                f"the program cannot be accepted for what the model computes at {which}: {error}"
            ) from error
    return {name: worst(sizes_of_one) for name, sizes_of_one in found.items()}


def precision_of(recipe: Quantization) -> str:
    """Return the precision of a recipe's program.

    Raises ExportError for W4A4, which no kernel computes, and ProgramError for bfloat16 on a processor without such instructions.
    """
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


def _remedy(quantized: QuantizedModel | None) -> str:
    """Return what to do about a program that differs, if the reason is known."""
    if quantized is None or not overflows(quantized.target):
        return ""
    where = ", in ONNX Runtime, where programs for tensorrt are compared" if quantized.target == "tensorrt" else ""
    reason = f"this processor has no VNNI, and its sums of 8-bit products overflow{where}"
    if quantized.quantizer is not None:
        return f" ({reason}: let the configuration of {quantized.quantizer} round weights to 7 bits, where it has reduce_range)"
    if getattr(quantized.recipe, "reduce_range", None) is False:
        return f" ({reason}: quantize with reduce_range=True)"
    return ""


def _accept(found: Mapping[str, Parity], max_difference: float | None, precision: str, way_out: str) -> None:
    """Raise ExportError if an output of the program is further from the model's than allowed."""
    for name, parity in found.items():
        if limit := broken_bound(parity, precision, max_difference):
            ties = (
                ": return what they are computed from, such as scores, take another format, or leave them out of parts"
                if parity.integers
                else ""
            )
            raise ExportError(
                f"output {name} of the program differs from the model's {parity.difference}, and {limit}: no program was written{ties}{way_out}"
            )


def _quantization_report(
    quantized: QuantizedModel, program: Program, inputs: Inputs, parts: Parts | None, source: _Source
) -> dict[str, Any]:
    """Report what was quantized, its distance to the float model, kernels, speed and scores."""
    calibrated = isinstance(quantized.recipe, Int8)
    against_float = _parity(program, quantized.reference, {"the example": inputs}, parts)
    kind = {} if calibrated else {"kind": kind_of(type(quantized.recipe))}
    scored = {} if quantized.scores is None else {"metric": _metric(quantized, program)}
    settings = asdict(quantized.recipe) if quantized.quantizer is None else {"quantizer": quantized.quantizer}
    if quantized.trained:  # ranges are those of training
        settings.pop("observer", None)
    return {
        **kind,
        **settings,
        "trained": quantized.trained,
        "target": "openvino" if program.runtime == "openvino" else quantized.target,
        "calibration_batches": 0 if quantized.trained else quantized.batches,
        "quantized_layers": len(quantized.quantized_layers),
        "float_layers": list(quantized.float_layers),
        **_measured(quantized, program, inputs, source),
        "against_float": _described(against_float),
        **scored,
    }


def _measured(quantized: QuantizedModel, program: Program, inputs: Inputs, source: _Source) -> dict[str, Any]:
    """Count kernels and measure speed in the program's runtime; nothing for TensorRT.

    Raises ExportError if fewer than `INTEGER_SHARE` of the quantized layers run on the kernels of the recipe.
    """
    if quantized.target == "tensorrt":
        log.warning(
            "TensorRT is not here: kernels and speed of the program are not measured, only its outputs, in ONNX Runtime; measure "
            "them with trtexec on the machine that will run it"
        )
        return {}
    planned, found = len(quantized.quantized_layers), _kernels(quantized, program)
    if sum(found.values()) < INTEGER_SHARE * planned:
        recipe = quantized.recipe
        kind = "bfloat16" if isinstance(recipe, BFloat16) else "integer"
        unread = isinstance(recipe, BFloat16) or quantized.quantizer is not None  # neither reads a field skip
        field = "" if unread else f" ({type(recipe).__name__}.skip)"
        raise ExportError(
            f"only {sum(found.values())} of {planned} quantized layers became {kind} kernels in {NAMES[program.runtime]}, so the program "
            f"would be called {precision_of(recipe)} without running as that: keep the modules around operators that it cannot run on "
            f"these kernels in float{field}, quantize for another target, or export the float model"
        )
    name = "integer_kernels" if isinstance(quantized.recipe, Int8) else "kernels"
    return {name: found, "speed": _speed(program, inputs, source)}


def _kernels(quantized: QuantizedModel, program: Program) -> dict[str, int]:
    """Count the kernels that the recipe asks for among those that the runtime really runs."""
    if program.runtime in ("openvino", "openvino-bf16"):
        integers = PACKED if isinstance(quantized.recipe, WeightOnly) else INTEGERS
        precisions = {"bf16"} if program.runtime == "openvino-bf16" else integers
        ran: Counter[str] = Counter()
        for (kind, precision), count in program.openvino_kernels().items():
            if kind in LAYERS and precision in precisions:
                ran[kind] += count
        return dict(sorted(ran.items()))
    wanted = INTEGER_KERNELS if isinstance(quantized.recipe, Int8) else LINEAR_KERNELS
    found = program.kernels()
    return {name: found[name] for name in sorted(_INTEGERS.get(program.runtime, wanted)) if found[name]}


_INTEGERS: Mapping[Runtime, set[str]] = {
    "inductor": torch_runtime.INTEGER_KERNELS, "executorch": executorch_runtime.INTEGER_KERNELS,
}  # fmt: skip
"""Maps a runtime to its kernels of integer layers, if that is not ONNX Runtime."""


def _speed(program: Program, inputs: Inputs, source: _Source) -> dict[str, Any]:
    """Time the program against the float32 program of the same model.

    Each call has one sample, if the batch size is free. The float32 program runs in OpenVINO for programs of runtime openvino, else in ONNX Runtime.
    """
    place = program.path if program.path.is_dir() else program.path.parent  # where the program is being made
    size = sum(file.stat().st_size for file in place.iterdir() if file.name != folder.NAME)
    # bfloat16, AOTInductor and ExecuTorch are judged by speed over what runs anywhere, which is ONNX Runtime
    runtime: Runtime = "openvino" if program.runtime == "openvino" else "onnxruntime"
    with tempfile.TemporaryDirectory(prefix="fp32-", dir=place) as scratch:
        plain = Path(scratch) / "fp32.onnx"
        written = onnx_graph.write(onnx_graph.convert(source.float_model, input_names=None, output_names=None), plain)
        size_fp32 = sum(file.stat().st_size for file in written)
        programs = {"fp32": Program.load(plain, device="cpu", runtime=runtime), "quantized": program}
        table = benchmark(programs, source.sizes.one(inputs), rounds=TIMED_ROUNDS)
    row = table["quantized"]
    if row.speedup_high < 1:
        log.warning(
            "in %s the quantized program takes %.1f times as long as the float32 program (%.2f ms): it saves memory, no time",
            NAMES[program.runtime],
            1 / row.speedup,
            table["fp32"].wall_ms,
        )
    return {
        "over_fp32": row.speedup,
        "low": row.speedup_low,
        "high": row.speedup_high,
        "threads": table.threads,
        "shapes": [list(shape) for shape in table.shapes],
        "size_over_fp32": size / size_fp32,
    }


def _metric(quantized: QuantizedModel, program: Program) -> dict[str, Any]:
    """Score the program itself beside both models."""
    scores = quantized.scores
    assert scores is not None
    score = float(scores.metric(program if program.largest_batch is None else program.in_batches))
    scores.check(score, "program")
    return {
        "float": scores.float_model,
        "simulated": scores.quantized_model,
        "program": score,
        "max_drop": scores.max_drop,
        **({} if scores.search is None else {"search": scores.search.to_json()}),
    }


def _described(found: Mapping[str, Parity]) -> dict[str, Any]:
    """Write the worst of all outputs, then each, as JSON."""
    return {**to_json(worst(list(found.values()))), "outputs": {name: to_json(one) for name, one in found.items()}}


def _environment(runtime: Runtime, lone: bool) -> dict[str, Any]:
    """Return runtime, precision hint, versions and instruction sets, for the description.

    The runtime of a lone .onnx file is ONNX Runtime if none is named.
    """
    named = {} if lone and runtime == "onnxruntime" else {"runtime": runtime}
    hint = {"precision_hint": PRECISION_HINTS[runtime]} if runtime in PRECISION_HINTS else {}
    return {**named, **hint, "versions": _versions(runtime), "instruction_sets": sorted(instruction_sets())}


def _versions(runtime: Runtime) -> dict[str, str]:
    packages = ("torch", *(name for name in _PACKAGES[runtime] if name != "onnxscript"))
    extra = _EXTRAS.get(runtime, "deploy")
    return {name.partition(".")[0]: str(require(name, extra=extra).__version__) for name in packages} | {
        "machine": platform.machine(),
    }
