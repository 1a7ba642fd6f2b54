"""Deploy any ``Module`` as a program: find its network and inputs, and `ship` it.

``arclight export``, ``quantize``, ``benchmark`` and ``compare`` call `configured`, the first two then `ship`, the last `evaluation_of`; ``vision``
and ``text`` call `ship` with a `Deployment` of their own, and `QuantizationAwareTraining` takes inputs from `configured_example`. A Module may define
``configure_deployment``, as those of vision and text do; of any other all is taken from ``forward`` or ``model``, ``example_input_array`` and the
batches of its data.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, overload, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from arclight._intervals import kind_of
from arclight.deploy.capture import Inputs, as_inputs, as_outputs, resized
from arclight.deploy.comparison import Evaluation
from arclight.deploy.errors import ExportError, QuantizeError
from arclight.deploy.formats.export import (
    Request,
    candidates_of,
    check_folder,
    check_signed,
    each_format,
    export_each,
    export_fastest,
    export_one,
    precision_of,
)
from arclight.deploy.formats.formats import (
    DEFAULT,
    LONE,
    Fastest,
    Format,
    Several,
    destination,
    destination_in,
    runtime_of,
)
from arclight.deploy.parity import Parts
from arclight.deploy.programs.processing import Processing
from arclight.deploy.programs.program import Program
from arclight.deploy.quantizing.ptq import Metric, QuantizedModel, chosen_target, judge, quantize
from arclight.deploy.quantizing.qat import PreparedModel, convert
from arclight.deploy.quantizing.rounded_linear import trained_linears
from arclight.deploy.settings import BFloat16, Quantization, Target, calibration_batches, is_calibrated
from arclight.fabric.modules import evaluating
from arclight.fabric.signing import SigningKey
from arclight.trainer.datamodule import DataHooks

if TYPE_CHECKING:
    from arclight.trainer import DataModule, Module


EXAMPLES = 3
"""Most samples of a batch that become example inputs, on which a program is compared with its model; ``vision`` and ``text`` take as many."""


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """Hold what is shipped of a module: its network and inputs at least.

    Fields without a text here are arguments of `export`.
    """

    model: nn.Module
    """The network, in whatever mode and on whatever device: copies are exported. One that was trained with rounding is converted."""
    example_inputs: Tensor | Sequence[Tensor]
    """Positional inputs of the model, on which the program is compared with it."""
    calibration: Iterable[Tensor | Sequence[Tensor]] = ()
    """Batches of such inputs, which may be an iterator: `ship` reads them once, for a recipe that is calibrated, and `evaluation_of` if there is no
    ``evaluation``."""
    capture_inputs: Tensor | Sequence[Tensor] | None = None
    """Inputs that a quantized graph is captured on (default: the example)."""
    comparisons: Mapping[str, Tensor | Sequence[Tensor]] = field(default_factory=dict)
    dynamic: Mapping[str, Mapping[int, str]] | None = None
    dynamic_batch: bool = True
    input_names: Sequence[str] | None = None
    output_names: Sequence[str] | None = None
    parts: Parts | None = None
    quantized_parts: Parts | None = None
    """Parts of the outputs by which a quantized model is compared with the float model (default: ``parts``)."""
    float_modules: tuple[str, ...] = ()
    """Modules of ``model`` that every recipe keeps in float32."""
    prefix: str = ""
    """Prefix of modules in ``model``, which names in a recipe's ``skip`` may leave out."""
    processing: Processing | None = None
    """Processing of ``Program.predict``: a dataclass of this package is stored in the program, by class and fields; any other is attached to the
    returned `Program` alone."""
    metric: Metric | None = None
    evaluation: Evaluation | None = None
    """Samples and scores by which `evaluation_of` compares two networks (default: the metric, on ``calibration``)."""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Deployable(Protocol):
    """Module that defines its own deployment."""

    def configure_deployment(self, data: DataModule | None, batches: int) -> Deployment:
        """Return the deployment.

        data: that of the module's training, not set up; None if none was named. batches: how many are read for calibration; 1 if
        the recipe has none.
        """


def configured(module: Module, data: DataModule | None = None, batches: int = 1) -> Deployment:
    """Return the deployment of ``module``, by default from ``forward``'s example or batches.

    A module's ``configure_deployment`` comes first. Without it the network is the module, if it has a ``forward``, else ``module.model``; its inputs
    are ``example_input_array``, else taken from training batches: a tensor, as many tensors of a sequence as the network takes, or those of a
    mapping that have the names of its parameters. Raises ExportError if that gives no inputs.
    """
    if isinstance(module, Deployable):
        return module.configure_deployment(data, batches)
    network, whole = _network(module)
    example = None if module.example_input_array is None else _example(module.example_input_array, whole)
    names = _parameters(whole, example)
    found = (_inputs(batch, names) for batch in islice(_training_batches(module, data), batches))
    evaluated = Evaluation(samples=(_inputs(batch, names) for batch in _validation_batches(module, data)))
    if example is not None:
        own = data is not None or _has_loader(module)
        return Deployment(
            model=_shipped(network, whole, example),
            example_inputs=example,
            calibration=found if own else [example],
            evaluation=evaluated if _has_loader(module if data is None else data, "val_dataloader") else None,
        )
    first = next(found, None)
    if first is None:
        raise ExportError(
            f"{type(module).__name__} does not say what it takes: set example_input_array, name its data, or define configure_deployment"
        )
    return Deployment(
        model=_shipped(network, whole, first),
        example_inputs=_first(first),
        calibration=chain([first], found),
        evaluation=evaluated if _has_loader(module if data is None else data, "val_dataloader") else None,
    )


@runtime_checkable
class GivesExample(Protocol):
    """Module that gives the inputs on which its network is captured for training with rounding."""

    def configure_example(self, data: DataModule | None) -> Tensor | Sequence[Tensor]:
        """Return a few samples of ``data``, that of the run, as the network takes them."""


def configured_example(
    module: Module, network: nn.Module, data: DataModule | None, stage: str
) -> Tensor | Sequence[Tensor] | None:  # fmt: skip
    """Return example inputs of ``network``, a part of ``module``; None if there are none.

    They are those of the module's ``configure_example``, else of the first batch of ``stage`` (fit, validate, test or predict). data: that of the run,
    set up for the stage.
    """
    if isinstance(module, GivesExample):
        return module.configure_example(data)
    source: Any = module if data is None else data
    hook = {"fit": "train", "validate": "val"}.get(stage, stage) + "_dataloader"
    first = next(iter(_loaded(source, hook)), None) if _has_loader(source, hook) else None
    return None if first is None else _first(_inputs(first, _parameters(network, None)))


def _first(inputs: Inputs) -> Inputs:
    return tuple(value[:EXAMPLES] if value.dim() else value for value in inputs)


def evaluation_of(deployment: Deployment) -> Evaluation:
    """Return the evaluation by which ``arclight compare`` compares the deployment's network.

    It is the deployment's own, or its metric on the calibration batches, which are then read.
    """
    found = deployment.evaluation
    if found is None:
        batches = iter(deployment.calibration)
        first = next(batches, deployment.example_inputs)
        found = Evaluation(samples=chain([first], batches), parts=deployment.parts)
    if found.scores is None and deployment.metric is not None:
        found = dataclasses.replace(found, scores=deployment.metric)
    return found


@overload
def ship(
    deployment: Deployment,
    path: str | os.PathLike[str],
    recipe: Quantization | None = None,
    *,
    format: Format | Fastest | None = None,
    candidates: Sequence[Format] | None = None,
    batch_size: int | None = None,
    max_drop: float | None = None,
    sign: str | os.PathLike[str] | SigningKey | None = None,
) -> Program: ...


@overload
def ship(
    deployment: Deployment,
    path: str | os.PathLike[str],
    recipe: Quantization | None = None,
    *,
    format: Several,
    batch_size: int | None = None,
    max_drop: float | None = None,
    sign: str | os.PathLike[str] | SigningKey | None = None,
) -> dict[Format, Program]: ...


def ship(
    deployment: Deployment,
    path: str | os.PathLike[str],
    recipe: Quantization | None = None,
    *,
    format: Format | Fastest | Several | None = None,
    candidates: Sequence[Format] | None = None,
    batch_size: int | None = None,
    max_drop: float | None = None,
    sign: str | os.PathLike[str] | SigningKey | None = None,
) -> Program | dict[Format, Program]:
    """Write ``deployment`` as a program at ``path``, in float32 or quantized by ``recipe``.

    A quantized model is placed for the runtime of ``format``. One that was trained with rounding is converted for its target, and takes no recipe.

    ``batch_size`` fixes the first dimension, which may else be of any size. ``max_drop``: how much less the quantized model and its program may
    score than the float model by the deployment's metric. ``format``, ``candidates`` and ``sign`` as in `export`; of several formats, or candidates for the
    fastest, each is quantized for its own runtime. Raises ExportError or QuantizeError if the program would not compute what the
    model does, and before any work if ``format`` does not hold the recipe.
    """
    left_out: dict[Format, Exception] = {}
    trained = trained_recipe(deployment.model)
    if trained is not None and recipe is not None:
        raise QuantizeError(
            f"the model was trained with rounding for {kind_of(type(trained[0]))}, and {recipe} would round it otherwise: leave the recipe out"
        )
    asked, target = trained or (recipe, None)
    plans = planned(path, asked, format, candidates, signed=sign is not None, left_out=left_out, target=target)
    if max_drop is not None and deployment.metric is None:
        raise QuantizeError("max_drop bounds a metric, and the module has none: let its configure_deployment give one")
    if batch_size is not None:
        deployment = _with_batch_size(deployment, batch_size)
    if recipe is not None and len(plans) > 1:  # read once for each target
        batches = list(islice(deployment.calibration, calibration_batches(recipe))) if is_calibrated(recipe) else ()
        deployment = dataclasses.replace(deployment, calibration=batches)
    models: dict[Format, Any] = dict.fromkeys(plans, _converted(deployment, max_drop) if trained else deployment.model)
    if recipe is not None:
        made: dict[Target | None, Any] = {}
        for target in dict.fromkeys(plans.values()):
            try:
                made[target] = _quantized(deployment, recipe, target, max_drop)
            except QuantizeError as error:
                if format != "fastest":
                    raise
                left_out |= {form: error for form, own in plans.items() if own == target}
        if not made:
            raise next(iter(left_out.values()))
        models = {form: made[target] for form, target in plans.items() if target in made}
    request = Request(
        example_inputs=deployment.example_inputs, input_names=deployment.input_names, output_names=deployment.output_names,
        dynamic_batch=deployment.dynamic_batch, dynamic=deployment.dynamic, comparisons=deployment.comparisons,
        metadata={**deployment.metadata, **_named(deployment.processing)}, parts=deployment.parts, sign=sign,
    )  # fmt: skip
    if isinstance(format, list | tuple):
        written = export_each(models, path, request)
        return {form: _processed(program, deployment) for form, program in written.items()}
    if format == "fastest":
        return _processed(export_fastest(models, path, request, left_out), deployment)
    ((form, model),) = models.items()
    return _processed(export_one(model, path, form, request), deployment)


def _processed(program: Program, deployment: Deployment) -> Program:
    return program if deployment.processing is None else program.with_processing(deployment.processing)


def planned(
    path: str | os.PathLike[str],
    recipe: Quantization | None,
    format: Format | Fastest | Several | None,
    candidates: Sequence[Format] | None = None,
    *,
    signed: bool,
    left_out: dict[Format, Exception] | None = None,
    target: Target | None = None,
) -> dict[Format, Target | None]:
    """Return the formats of programs at ``path``, and the target of each (None: float).

    ``target``: that of a model which was trained with rounding. With "fastest" only candidates that hold ``recipe`` are returned; ``left_out`` gets
    the others with their errors, and the first of these is raised if none is left. Otherwise raises ExportError or QuantizeError for a format that
    does not hold it.
    """
    tried = candidates_of(format, candidates)
    if isinstance(format, list | tuple):
        return dict(
            _planned(destination_in(path, form), recipe, form, signed, target) for form in each_format(format, None)
        )
    if format != "fastest":
        return dict([_planned(path, recipe, format, signed, target)])
    check_folder(path)
    found: dict[Format, Target | None] = {}
    refused: dict[Format, Exception] = {} if left_out is None else left_out
    for form in each_format(tried, None):
        try:
            found |= [_planned(path, recipe, form, signed, target)]
        except (ExportError, QuantizeError) as error:
            refused[form] = error
    if not found:
        raise next(iter(refused.values()))
    return found


def _planned(
    path: str | os.PathLike[str], recipe: Quantization | None, format: Format | None, signed: bool, trained: Target | None
) -> tuple[Format, Target | None]:  # fmt: skip
    target = trained
    if recipe is not None and trained is None:
        target = chosen_target(recipe, _target(path, format) if is_calibrated(recipe) else None)
    path, form = destination(path, format, target)
    if recipe is not None:
        try:
            runtime_of(form, precision_of(recipe), target)
        except ExportError as error:
            if trained is None or format is None:
                raise
            raise ExportError(
                f"the model was trained with rounding for {trained}, which does not run format {form!r}: leave the format out, or train for what runs it "
                "([qat] target)"
            ) from error
    check_signed(path, form, signed=signed)
    return form, target


def _target(path: str | os.PathLike[str], format: Format | None) -> Target | None:
    """Return the target of ``format``, by default that of ``path``; None: ONNX Runtime.

    Without a format an .onnx path is ONNX Runtime's, a folder OpenVINO's.
    """
    return _TARGETS.get(format or ("onnx" if Path(path).suffix == LONE else DEFAULT))


_TARGETS: Mapping[str, Target] = {"openvino": "openvino", "aoti": "inductor", "executorch": "executorch"}
"""Maps a format to the target of its programs, if that is not onnxruntime."""


def trained_recipe(model: nn.Module) -> tuple[Quantization, Target] | None:
    """Return the recipe and target that ``model`` or a part was trained for; None for float."""
    prepared = next((part for part in model.modules() if isinstance(part, PreparedModel)), None)
    if prepared is not None:
        return prepared.recipe, prepared.target
    recipe, _ = trained_linears(model)
    return None if recipe is None else (recipe, chosen_target(recipe, None))


def _converted(deployment: Deployment, max_drop: float | None) -> QuantizedModel:
    """Convert a model that was trained with rounding.

    Raises QuantizeError if a part of it is a graph, or if its metric drops by more than ``max_drop``.
    """
    model = deployment.model
    if not isinstance(model, PreparedModel) and any(isinstance(part, PreparedModel) for part in model.modules()):
        raise QuantizeError(
            f"{type(model).__name__} has a part that was trained with rounding, as a graph of its own: let configure_deployment give that part as model"
        )
    quantized = convert(
        model,
        example_inputs=deployment.example_inputs if deployment.capture_inputs is None else deployment.capture_inputs,
        dynamic=deployment.dynamic,
        parts=deployment.quantized_parts or deployment.parts,
    )
    if max_drop is not None:
        assert deployment.metric is not None
        judge(quantized, deployment.metric, max_drop)
    return quantized


def _quantized(deployment: Deployment, recipe: Quantization, target: Target | None, max_drop: float | None) -> Any:
    if not isinstance(recipe, BFloat16):
        skipped = [f"{deployment.prefix}{name.removeprefix(deployment.prefix)}" for name in recipe.skip]
        recipe = dataclasses.replace(recipe, skip=tuple(dict.fromkeys([*skipped, *deployment.float_modules])))
    return quantize(
        deployment.model,
        deployment.calibration if is_calibrated(recipe) else None,
        recipe=recipe,
        example=deployment.example_inputs if deployment.capture_inputs is None else deployment.capture_inputs,
        dynamic=deployment.dynamic,
        parts=deployment.quantized_parts or deployment.parts,
        metric=None if max_drop is None else deployment.metric,
        max_drop=max_drop,
        target=target,
    )


def _with_batch_size(deployment: Deployment, size: int) -> Deployment:
    if size < 1:
        raise ExportError(f"a batch has at least one sample, got batch_size={size}")
    if deployment.dynamic is not None or deployment.comparisons:
        raise ExportError(
            f"batch_size={size} would fix what the module frees, the dimensions {deployment.dynamic}: leave it out"
        )
    inputs = resized(as_inputs(deployment.example_inputs), size)
    return dataclasses.replace(deployment, example_inputs=inputs, dynamic_batch=False)


def _named(processing: Processing | None) -> dict[str, Any]:
    """Describe ``processing`` by class and fields, to be made again; {} if it is not ours."""
    kind = type(processing)
    if processing is None or not dataclasses.is_dataclass(processing) or not kind.__module__.startswith("arclight."):
        return {}
    return {"processing": f"{kind.__module__}:{kind.__name__}", "processing_args": dataclasses.asdict(processing)}


def _network(module: Module) -> tuple[nn.Module, nn.Module]:
    """Return the network that a module ships, and the module that takes its inputs.

    The latter is the module itself if it has a ``forward``, else its ``model``. They differ if a part of it is trained with rounding as a
    graph: that part is shipped.
    """
    whole: nn.Module | None = module
    if type(module).forward is nn.Module.forward:
        whole = getattr(module, "model", None)
    prepared: list[nn.Module] = [part for part in module.modules() if isinstance(part, PreparedModel)]
    if not isinstance(whole, nn.Module):
        rounded = prepared or [part for part in module.children() if trained_linears(part)[0] is not None]
        if len(rounded) == 1:
            return rounded[0], rounded[0]
        raise ExportError(
            f"{type(module).__name__} has neither forward nor a network called model: define one, or configure_deployment"
        )
    if len(prepared) > 1:
        raise ExportError(
            f"{type(module).__name__} has {len(prepared)} networks that are trained with rounding, and a program is of one: define configure_deployment"
        )
    return (prepared[0] if prepared else whole), whole


@torch.no_grad()
def _shipped(network: nn.Module, whole: nn.Module, inputs: Inputs) -> nn.Module:
    """Return ``network``; ExportError if it is a part of ``whole``, which computes more."""
    if network is whole:
        return network
    device = next((tensor.device for tensor in (*network.parameters(), *network.buffers())), inputs[0].device)
    given = tuple(value.to(device) for value in resized(inputs, 2))
    with evaluating(whole):
        computed, alone = (as_outputs(one(*given)) for one in (whole, network))
    if len(computed) != len(alone) or not all(map(torch.equal, computed, alone)):
        raise ExportError(
            f"{type(whole).__name__}.forward computes more than the part of it that was trained with rounding, and a program would lose that: let the part "
            "compute all of it, or define configure_deployment"
        )
    return network


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _parameters(network: nn.Module, example: Inputs | None) -> list[str]:
    """Return the names of ``forward``'s positional parameters.

    There are as many as ``example`` has, else those without a default. Raises ExportError if ``forward`` takes any
    number and no example says how many.
    """
    parameters = _signature(network).parameters.values()
    named = [one for one in parameters if one.kind in _POSITIONAL]
    repeated = [one.name for one in parameters if one.kind is inspect.Parameter.VAR_POSITIONAL]
    if example is not None:
        names = [one.name for one in named] + repeated * len(example)
        return names[: len(example)]
    if repeated:
        raise ExportError(
            f"forward takes any number of inputs (*{repeated[0]}), so it is not known how many of a batch are its: set "
            "example_input_array, or define configure_deployment"
        )
    return [one.name for one in named if one.default is one.empty]


def _signature(network: nn.Module) -> inspect.Signature:
    return inspect.signature((network.float_model if isinstance(network, PreparedModel) else network).forward)


def _example(example: Any, network: nn.Module) -> Inputs:
    """Return the inputs that a module sets as its example.

    Raises ExportError for what is no example, or names inputs that the network does not take.
    """
    if isinstance(example, Mapping):
        names = [one.name for one in _signature(network).parameters.values() if one.kind in _POSITIONAL]
        given = [name for name in names if name in example]
        if len(given) < len(example) or given != names[: len(given)]:
            raise ExportError(
                f"example_input_array has {', '.join(map(str, example))}, and the positional inputs are {', '.join(names)}: leave none "
                "out before another, or define configure_deployment"
            )
        example = [example[name] for name in given]
    try:
        return as_inputs(example)
    except TypeError as error:
        raise ExportError(f"example_input_array: {error}") from error


def _inputs(batch: Any, names: Sequence[str]) -> Inputs:
    """Return the network's inputs of a batch; ExportError if it holds others."""
    found: Any = batch
    if isinstance(batch, Mapping):
        if missing := [name for name in names if name not in batch]:
            raise ExportError(
                f"the network takes {', '.join(missing)}, and a batch holds {', '.join(map(str, batch))}: define configure_deployment"
            )
        found = [batch[name] for name in names]
    elif not isinstance(batch, Tensor) and isinstance(batch, Sequence):
        found = batch[: len(names)]
    try:
        return as_inputs(found)
    except TypeError as error:
        raise ExportError(f"the inputs cannot be taken from a batch: {error}; define configure_deployment") from error


def _training_batches(module: Module, data: DataModule | None) -> Iterator[Any]:
    """Yield the training batches of ``data``, else of the module's own loader, if it has one."""
    source: Any = module if data is None else data
    if not _has_loader(source):
        return
    yield from _batches(source, "fit", "train_dataloader")


def _validation_batches(module: Module, data: DataModule | None) -> Iterator[Any]:
    """Yield the validation batches of ``data``, else of the module's own loader."""
    yield from _batches(module if data is None else data, "validate", "val_dataloader")


def _batches(source: Any, stage: str, hook: str) -> Iterator[Any]:
    source.prepare_data()
    source.setup(stage)
    yield from _loaded(source, hook)


def _loaded(source: Any, hook: str) -> Iterable[Any]:
    """Return the batches of a loader; ExportError if the hook gives several."""
    loader = getattr(source, hook)()
    if isinstance(loader, Mapping) or (
        isinstance(loader, Sequence) and any(isinstance(one, DataLoader) for one in loader)
    ):
        raise ExportError(
            f"{type(source).__name__}.{hook} gives several loaders, and it is not known whose batches are the network's "
            "inputs: define configure_deployment"
        )
    return () if loader is None else loader


def _has_loader(source: Module | DataModule, hook: str = "train_dataloader") -> bool:
    return getattr(type(source), hook) is not getattr(DataHooks, hook)
