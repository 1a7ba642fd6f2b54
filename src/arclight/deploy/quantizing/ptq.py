"""Quantize a trained float model after training, by one of several recipes.

`quantize` is public (``arclight.deploy``); ``arclight quantize`` calls it through `deployment`. In: a float model, a recipe of ``deploy.settings``,
and batches or an example; out: a `QuantizedModel`, which `qat` and `rounded_linear` also make, and which ``export`` takes. Its tensors keep the float
model's names. A result below its bound of quality raises.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from arclight.deploy.capture import (
    FreeDimensions,
    Inputs,
    as_inputs,
    as_outputs,
    capture,
    copied_inputs,
    free_dimensions,
    frozen_copy,
    in_float32,
    quiet,
    trial_run,
)
from arclight.deploy.errors import QuantizeError
from arclight.deploy.parity import Parity, Parts, compare
from arclight.deploy.programs import processor
from arclight.deploy.quantizing import batch_norm, pt2e
from arclight.deploy.quantizing.bfloat16 import round_layers
from arclight.deploy.quantizing.graphs import (
    NamedGraphs,
    fold_layer_weights,
    fold_weights,
    number_paddings,
    pickle_graph,
    shared_copy,
    stored_tensor,
    unpickle_graph,
)
from arclight.deploy.quantizing.linear import quantize_linears
from arclight.deploy.quantizing.placement import STEM_CHANNELS, PlacementQuantizer, module_name, weighted
from arclight.deploy.quantizing.sensitivity import Search, noise_by_layer, search
from arclight.deploy.settings import (
    PLACEMENTS,
    BFloat16,
    DynamicInt8,
    Int8,
    LowBit,
    Quantization,
    Target,
    WeightOnly,
    is_calibrated,
)
from arclight.fabric.strategies.root_module import RoundsOwnWeights

log = logging.getLogger(__name__)
_NOT_RUN = "the model cannot be run on its own data, {given}: {error}; give inputs as its forward takes them"

_Skippable = Int8 | DynamicInt8 | WeightOnly | LowBit
Metric = Callable[[Callable[..., Any]], float]
"""Takes a model, or a program, and returns its score on data of its own, such as an accuracy; more is better."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores of a model before and after quantization, and what may be lost."""

    metric: Metric
    float_model: float
    quantized_model: float
    max_drop: float | None
    search: Search | None = None
    """How layers were chosen that stay in float for the score; None if it was kept without any."""

    def check(self, score: float, of: str) -> None:
        """Raise QuantizeError for a ``score`` that is not finite, or drops beyond ``max_drop``.

        The drop is from the float model's score.
        """
        _check_finite(score, of)
        if not self.fits(score):
            raise self.refusal(
                score, of, "keep sensitive modules in float with skip, take more bits, or train with prepare_qat"
            )

    def fits(self, score: float) -> bool:
        """Return True if ``score`` is lower than the float model's by no more than ``max_drop``."""
        return self.max_drop is None or self.float_model - score <= self.max_drop

    def refusal(self, score: float, of: str, way: str) -> QuantizeError:
        """Make the error of a ``score`` that is too low, with ``way`` as the remedy."""
        return QuantizeError(
            f"the metric of the {of} is {score:.4g}, the float model's {self.float_model:.4g}: it drops by more than "
            f"max_drop={self.max_drop:g}; {way}"
        )


def _check_finite(score: float, of: str) -> None:
    if not math.isfinite(score):
        raise QuantizeError(f"the metric of the {of} is {score}: let it return a finite number for any model")


class QuantizedModel(NamedGraphs):
    """A model whose layers compute on few bits; call it like the model it came from.

    In PyTorch it simulates the rounding in float32, slowly; ``export`` makes the fast program. It is a module
    without gradients whose tensors have the names that they have in the model, so it can take the place of the model
    in a Module that is validated or tested: ``module.model = quantized; trainer.validate(module)``.
    """

    def __init__(
        self,
        graph: GraphModule,
        *,
        reference: nn.Module,
        recipe: Quantization,
        example: Inputs,
        quantized_layers: Sequence[str],
        float_layers: Sequence[str],
        batches: int,
        target: Target,
        quantizer: str | None = None,
        trained: bool = False,
    ) -> None:
        tensors = fold_weights(graph)
        super().__init__({"inference": graph})
        self.register_by_name(tensors)
        self.bind()
        fields = {
            "reference": reference,
            "recipe": recipe,
            "example": example,
            "quantized_layers": tuple(quantized_layers),
            "float_layers": tuple(float_layers),
            "batches": batches,
            "target": target,
            "quantizer": quantizer,
            "trained": trained,
            "sqnr_db": math.nan,
            "scores": None,
            "seconds": math.nan,
        }
        self.__dict__.update(fields)  # not by attribute: the reference is no part of this module's state
        self.eval().requires_grad_(False)

    reference: nn.Module
    """A private copy of the float model, in evaluation mode."""
    recipe: Quantization
    """The settings it was made with."""
    example: Inputs
    """The inputs it was captured on."""
    quantized_layers: tuple[str, ...]
    """Layers with weights that are rounded, by module name."""
    float_layers: tuple[str, ...]
    """Layers with weights that stay in float32, of whatever kind."""
    batches: int
    """Calibration batches that were run, or training batches that ranges were taken from; 0 for recipes without ranges."""
    target: Target
    """The runtime whose integer kernels it is made for."""
    quantizer: str | None
    """Class of the quantizer that was given; None for the placement of ``target``."""
    trained: bool
    """Whether the weights, and ranges if it has any, were trained with this rounding."""
    sqnr_db: float
    """Signal-to-noise ratio of the noisiest output against the float model on the first calibration batch (or the example), decibels."""
    scores: Scores | None
    """Scores of both models, if a metric was given."""
    seconds: float
    """Wall time that quantization took."""

    @property
    def graph(self) -> GraphModule:
        """Return the quantized computation."""
        return self.graphs["inference"]

    def forward(self, *inputs: Tensor) -> Any:
        # what a caller computes in fewer bits, say under autocast, is no part of the program
        with torch.no_grad(), torch.autocast(inputs[0].device.type, enabled=False):
            return self.graph(*(value.float() if value.is_floating_point() else value for value in inputs))

    def __reduce__(self) -> tuple[Callable[..., QuantizedModel], tuple[Any, ...]]:
        """Pickle the graph's nodes, tensors and settings, as for spawned ranks.

        Raises QuantizeError for what would be lost.
        """
        if put := [name for name, module in self.named_modules() if name and type(module) is not nn.Module]:
            raise QuantizeError(
                f"the quantized model cannot be pickled: {put[0]} was put into it after it was made; put that beside it"
            )
        fields = {name: value for name, value in self.__getstate__().items() if name not in _REGISTERED}
        return _unpickled, (pickle_graph(self.graph), dict(self.state_dict(keep_vars=True)), fields)

    def train(self, mode: bool = True) -> QuantizedModel:
        """Stay in evaluation mode.

        Integers have no gradients, and batch norms and dropout are gone.
        """
        del mode
        super().train(False)
        return self


_REGISTERED = ("graphs", "_parameters", "_buffers", "_modules")
"""Attributes that a pickle does not hold as fields: nodes and tensors of the graph stand for them."""


def _unpickled(pickled: bytes, tensors: Mapping[str, Tensor], fields: Mapping[str, Any]) -> QuantizedModel:
    """Build a model from its pickle."""
    quantized = QuantizedModel.__new__(QuantizedModel)
    NamedGraphs.__init__(quantized, {"inference": unpickle_graph(pickled)})
    quantized.register_by_name(tensors)
    quantized.bind()
    quantized.__dict__.update(fields)
    return quantized.eval()


def quantize(
    model: nn.Module,
    calibration: Iterable[Tensor | Sequence[Tensor]] | None = None,
    *,
    recipe: Quantization | None = None,
    example: Tensor | Sequence[Tensor] | None = None,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    parts: Parts | None = None,
    metric: Metric | None = None,
    max_drop: float | None = None,
    target: Target | None = None,
    quantizer: Any = None,
) -> QuantizedModel:
    """Quantize ``model`` by ``recipe``, by default `Int8` with ranges from ``calibration``.

    ``calibration``: batches of the model's positional inputs, each a tensor or a sequence of tensors whose first dimension is the
    batch (floating-point ones are taken in float32, as the model is); None for the recipes that need none (`DynamicInt8`,
    `WeightOnly`, `BFloat16`, `LowBit` with 8-bit activations), which need ``example``. ``example`` (default: the first of them) is
    what the graph is captured on; the batch size stays free, or the dimensions that ``dynamic`` names by input, as in `export`.
    ``parts`` takes the outputs and names tensors in them that are judged each by itself (default: the outputs). ``metric`` scores a model
    on data of its own, more being better; with ``max_drop`` the quantized model, and its program in `export`, may score that much less (a
    program with a largest batch is given as its `Program.in_batches`): if it would score lower, the fewest layers that restore it stay in
    float, found in at most 16 scores; ``scores.search`` names them, and the returned ``recipe`` has them in ``skip``. ``target`` is the
    runtime to place integers for (default: onnxruntime). ``quantizer``: one of torchao's, such as X86InductorQuantizer, that places
    integers in our stead; ``recipe`` then says how much is calibrated and how noisy an output may be, and ``target`` what runs the
    program (default: what the quantizer is for). ``model`` itself is not changed, whatever mode and device it is in.

    Raises QuantizeError for calibration data that is empty, not finite, one value throughout or not needed, a ``skip`` that names nothing,
    a target without kernels for the recipe, signed activations for ONNX Runtime on an x86 processor without AVX-VNNI-INT8, a model
    that is quantized already or has no layer to quantize, a quantizer that rounds nothing, groups that do not divide a layer's
    inputs, an output or part noisier than ``min_sqnr_db``, and a metric that drops too far with all layers but one in float;
    ExportError for a model that cannot be captured.
    """
    recipe = recipe or Int8()
    if max_drop is not None and metric is None:
        raise ValueError(f"max_drop={max_drop} bounds a metric: give metric, a function that scores a model")
    if max_drop is not None and not 0 <= max_drop < math.inf:
        raise ValueError(f"max_drop must be a number from 0, in the unit of the metric, got {max_drop}")
    check_float(model)
    target = chosen_target(recipe, target) if quantizer is None else foreign_target(quantizer, recipe, target)
    recipe = for_processor(recipe, target) if quantizer is None else recipe
    start = time.perf_counter()
    inputs, batches = _inputs(recipe, calibration, example)
    reference = frozen_copy(model)
    as_outputs(trial_run(reference, batches[0] if batches else inputs, QuantizeError, _NOT_RUN))
    # torchao folds batch norms into the graph's weights, so the graph is of a copy of its own
    free = None if dynamic is None else free_dimensions(reference, inputs, dynamic)
    _check_sizes(inputs, batches, free)
    graph = number_paddings(fold_layer_weights(capture(frozen_copy(reference), inputs, free=free).module()))
    source = _Source(
        reference=reference, graph=graph, inputs=inputs, batches=batches, target=target, parts=parts,
        shared=max_drop is not None, quantizer=quantizer,
    )  # fmt: skip
    quantized = source.quantized(recipe)
    if metric is not None:
        quantized = _within(source, quantized, metric, max_drop)
    quantized.sqnr_db = accept(distances(reference, quantized, source.judged, parts), recipe.min_sqnr_db)
    quantized.seconds = time.perf_counter() - start
    return quantized


@dataclass(frozen=True, kw_only=True)
class _Source:
    """A captured model that is quantized once, or with ``shared`` tensors several times."""

    reference: nn.Module
    graph: GraphModule
    inputs: Inputs
    batches: Sequence[Inputs]
    target: Target
    parts: Parts | None
    shared: bool
    quantizer: Any

    @property
    def judged(self) -> Inputs:
        """Return the inputs on which outputs are compared."""
        return self.batches[0] if self.batches else self.inputs

    def rounded(self, recipe: Quantization) -> tuple[GraphModule, list[str], list[str]]:
        """Round the graph; return it, and the layers that are rounded and that are not."""
        graph = shared_copy(self.graph) if self.shared else self.graph
        if is_calibrated(recipe):
            quantizer = placement(recipe, self.target) if self.quantizer is None else self.quantizer
            return _calibrated(graph, self.batches, quantizer, type(self.reference).__name__, self.target)
        assert not isinstance(recipe, Int8)
        return graph, *(round_layers(graph) if isinstance(recipe, BFloat16) else quantize_linears(graph, recipe))

    def quantized(self, recipe: Quantization) -> QuantizedModel:
        graph, quantized_layers, float_layers = self.rounded(recipe)
        return QuantizedModel(
            graph, reference=self.reference, recipe=recipe, example=self.inputs, quantized_layers=quantized_layers,
            float_layers=float_layers, batches=len(self.batches), target=self.target,
            quantizer=None if self.quantizer is None else type(self.quantizer).__name__,
        )  # fmt: skip


@torch.no_grad()
def _within(source: _Source, quantized: QuantizedModel, metric: Metric, max_drop: float | None) -> QuantizedModel:
    """Score both models; return the one with fewest float layers within ``max_drop``.

    Raises QuantizeError if none does.
    """
    before = _scored(metric, source.reference)
    _check_finite(before, "float model")
    after = _scored(metric, quantized)
    _check_finite(after, "quantized model")
    scores = Scores(metric=metric, float_model=before, quantized_model=after, max_drop=max_drop)
    recipe = quantized.recipe
    if scores.fits(after):
        quantized.scores = scores
        return quantized
    assert max_drop is not None
    if source.quantizer is not None:
        way = f"let {type(source.quantizer).__name__} leave sensitive modules in float, or leave it out: placements of a target are searched"
        raise scores.refusal(after, "quantized model", way)
    if isinstance(recipe, BFloat16):
        raise scores.refusal(after, "quantized model", "take the float32 model, or WeightOnly() for its linear layers")
    found = _search(source, recipe, metric, before - max_drop, after)
    if found is None:
        way = f"to keep all layers but one in float does not mend it. {_remedy(recipe, source.target)}"
        raise scores.refusal(after, "quantized model", way)
    fewest, quantized, score = found
    log.info("%d layers stay in float for max_drop=%g: %s", len(fewest.kept), max_drop, ", ".join(fewest.kept))
    quantized.scores = replace(scores, quantized_model=score, search=fewest)
    return quantized


@torch.no_grad()
def judge(quantized: QuantizedModel, metric: Metric, max_drop: float) -> None:
    """Score a model that was trained with rounding beside the float model of its weights.

    Raises QuantizeError if it drops by more than ``max_drop``.
    """
    before, after = _scored(metric, quantized.reference), _scored(metric, quantized)
    _check_finite(before, "float model")
    _check_finite(after, "trained model")
    scores = Scores(metric=metric, float_model=before, quantized_model=after, max_drop=max_drop)
    if not scores.fits(after):
        raise scores.refusal(
            after, "trained model", "train longer, keep sensitive modules in float with [qat] skip, or take more bits"
        )
    quantized.scores = scores


def _scored(metric: Metric, model: nn.Module) -> float:
    """Return the score of ``model``, and restore its evaluation mode on the CPU."""
    try:
        return float(metric(model))
    finally:
        model.cpu().eval().requires_grad_(False)


def _search(
    source: _Source, recipe: _Skippable, metric: Metric, least: float, first: float
) -> tuple[Search, QuantizedModel, float] | None:  # fmt: skip
    """Find the fewest layers to keep in float; return them, the model, and its score.

    Layers that ``skip`` can name are ranked first.
    """
    graph, quantized_layers, _ = source.rounded(recipe)
    names = {module_name(node) for node in graph.graph.nodes}
    sensitivity = noise_by_layer(
        graph, [name for name in quantized_layers if name in names], source.judged, source.parts
    )

    newest: list[
        tuple[QuantizedModel, float]
    ] = []  # that is good enough: each has fewer layers in float than the one before

    def score(kept: tuple[str, ...]) -> float:
        model = source.quantized(_keeping(recipe, kept))
        found = _scored(metric, model)
        _check_finite(found, f"model with {len(kept)} layers in float")
        log.info("%d of %d layers in float: the metric is %.6g", len(kept), len(sensitivity), found)
        if found >= least:
            newest[:] = [(model, found)]
        return found

    fewest = search(sensitivity, score, least, first)
    return None if fewest is None else (fewest, *newest[0])


def _keeping(recipe: _Skippable, kept: Sequence[str]) -> _Skippable:
    return replace(recipe, skip=(*recipe.skip, *kept))


def _remedy(recipe: Quantization, target: Target) -> str:
    """Describe what loses less than ``recipe``."""
    if is_calibrated(recipe):
        made = "Int8()" if isinstance(recipe, Int8) else "LowBit(activation_bits=4)"
        return f"Train it with rounding: prepared = prepare_qat(model, example_inputs, recipe={made}, target={target!r}), then convert(prepared)"
    return (
        "Take WeightOnly(bits=8) or a smaller group_size, or Int8() with calibration data, which prepare_qat can train"
    )


def chosen_target(recipe: Quantization, target: Target | None) -> Target:
    """Return the runtime to quantize for, by default ONNX Runtime.

    Raises QuantizeError for one that has no kernels for ``recipe``.
    """
    alone: Target = "openvino" if isinstance(recipe, BFloat16) else "onnxruntime"
    if target is None:
        return alone
    if target not in tuple(PLACEMENTS):
        near = get_close_matches(str(target), PLACEMENTS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f": there are {', '.join(PLACEMENTS)}"
        raise QuantizeError(f"target {target!r} is not known{hint}")
    if target != alone and not is_calibrated(recipe):
        raise QuantizeError(
            f"{type(recipe).__name__} has kernels only in target {alone!r}, got {target!r}: leave target out, or take Int8()"
        )
    return target


_MADE_FOR: Mapping[str, Target] = {
    "X86InductorQuantizer": "inductor", "ArmInductorQuantizer": "inductor", "XNNPACKQuantizer": "executorch",
}  # fmt: skip
"""Maps a class of torchao's quantizers to the target that runs what it places."""


def foreign_target(quantizer: Any, recipe: Quantization, target: Target | None) -> Target:
    """Return the target that runs what ``quantizer`` places.

    Raises QuantizeError if it is unknown, and for settings that the quantizer would ignore.
    """
    name = type(quantizer).__name__
    if not isinstance(quantizer, pt2e.Quantizer):
        raise QuantizeError(f"quantizer must be a Quantizer of torchao.quantization.pt2e, got {quantizer!r}")
    if not isinstance(recipe, Int8) or recipe.reduce_range or recipe != Int8(
        calibration_batches=recipe.calibration_batches, min_sqnr_db=recipe.min_sqnr_db, reduce_range=recipe.reduce_range
    ):  # fmt: skip
        raise QuantizeError(
            f"{name} decides itself what is rounded and how, and would ignore {recipe}: take Int8(), of which calibration_batches and "
            "min_sqnr_db hold, and configure the quantizer"
        )
    if target is not None:
        return chosen_target(recipe, target)
    for one in (quantizer, *getattr(quantizer, "quantizers", ())):
        if type(one).__name__ in _MADE_FOR:
            return _MADE_FOR[type(one).__name__]
    raise QuantizeError(f"{name} is not known to be for a runtime: give target=, one of {', '.join(PLACEMENTS)}")


def check_float(model: nn.Module) -> None:
    """Raise QuantizeError for a model that is rounded already, or has a part that is."""
    if found := rounded_part(model):
        raise QuantizeError(
            f"the model {found}, which is rounded already: quantize the float model, which a QuantizedModel has as its reference; a "
            "model that was trained with rounding is converted by convert(model)"
        )


def rounded_part(model: nn.Module, kinds: Any = NamedGraphs | RoundsOwnWeights) -> str | None:
    """Describe the first part of ``model`` that rounds, one of ``kinds``; None for float."""
    for name, part in model.named_modules():
        if isinstance(part, kinds):
            return f"holds a {type(part).__name__} ({name})" if name else f"is a {type(part).__name__}"
    return None


_ON_X86 = ("onnxruntime", "openvino", "inductor")
"""Targets whose programs run on processors such as this one, with products of unsigned activations and signed weights."""


def for_processor(recipe: Quantization, target: Target) -> Quantization:
    """Return the recipe with ``reduce_range`` settled for this processor, if it is None.

    It becomes True, for weights of 7 bits, if the target runs on x86 and 8-bit products would overflow here.
    """
    if not isinstance(recipe, Int8 | DynamicInt8) or recipe.reduce_range is not None:
        return recipe
    reduced = target in _ON_X86 and processor.overflows()
    if reduced:
        log.info("weights are rounded to 7 bits: this processor has no VNNI, and sums of 8-bit products would overflow")
    return replace(recipe, reduce_range=reduced)


def placement(
    recipe: Quantization, target: Target, *, qat: bool = False, also_skipped: Sequence[str] = ()
) -> PlacementQuantizer:
    """Return the quantizer of a recipe whose activations have fixed ranges.

    ``also_skipped``: modules that stay in float beside those of the recipe. Raises QuantizeError for another recipe.
    """
    profile = PLACEMENTS[target]
    if isinstance(recipe, Int8):
        bits = 7 if recipe.reduce_range else 8
        return PlacementQuantizer(
            profile=profile, observer=recipe.observer, weight_bits=bits, skip=(*recipe.skip, *also_skipped), qat=qat
        )
    if isinstance(recipe, LowBit) and recipe.needs_calibration:
        return PlacementQuantizer(
            profile=profile, weight_bits=4, activation_bits=4, skip=(*recipe.skip, *also_skipped), qat=qat
        )
    raise QuantizeError(
        f"{recipe} has no ranges of activations that training could learn: take Int8(), or LowBit(activation_bits=4), or "
        "quantize the trained model"
    )


def _inputs(
    recipe: Quantization, calibration: Iterable[Tensor | Sequence[Tensor]] | None, example: Any
) -> tuple[Inputs, list[Inputs]]:  # fmt: skip
    """Return the inputs to capture on, and the calibration batches.

    Raises QuantizeError if they are not what is needed.
    """
    if is_calibrated(recipe):
        if calibration is None:
            raise QuantizeError(
                f"{type(recipe).__name__} takes ranges of activations from calibration batches, and none were given"
            )
        batches = _batches(calibration, recipe.calibration_batches)
        return (in_float32(as_inputs(example)) if example is not None else batches[0]), batches
    if calibration is not None:
        raise QuantizeError(
            f"{type(recipe).__name__} takes no calibration data, and would ignore what was given: leave it out, and give example="
        )
    if example is None:
        raise QuantizeError(
            f"{type(recipe).__name__} needs example=, inputs on which the model is captured and compared"
        )
    inputs = in_float32(as_inputs(example))
    if any(value.is_floating_point() and not value.isfinite().all() for value in inputs):
        raise QuantizeError("the example holds NaN or infinite values: the models cannot be compared on it")
    return inputs, []


def _calibrated(
    graph: GraphModule, batches: Sequence[Inputs], quantizer: Any, name: str, target: Target
) -> tuple[GraphModule, list[str], list[str]]:  # fmt: skip
    """Calibrate ``graph`` on ``batches``; return it, quantized layers and float layers."""
    with torch.no_grad():
        with quiet():
            prepared = pt2e.prepare(graph, quantizer, batch_norm.fold_untrained)
        if not isinstance(quantizer, PlacementQuantizer):
            quantized_layers, float_layers = _foreign_layers(prepared, type(quantizer).__name__)
        else:
            quantized_layers, float_layers = quantizer.quantized_layers, quantizer.float_layers
        if not quantized_layers:
            raise QuantizeError(
                f"no layer of {name} can run on integers: a convolution needs {STEM_CHANNELS} input "
                f"channels, and another layer after it or a kernel of 1x1; these stay in float: {quantizer.float_layers}"
            )
        if target == "onnxruntime":
            _check_signed(prepared, type(quantizer).__name__, quantized_layers)
        calibration_run = Calibration(prepared)
        for batch in batches:
            calibration_run.run(*batch)
        calibration_run.check_ranges()
        _leave_room_for_biases(prepared)
        with quiet():
            converted = pt2e.convert(prepared)
    if any("choose_qparams" in str(node.target) for node in converted.graph.nodes):
        raise QuantizeError(
            f"{type(quantizer).__name__} takes ranges of each call, for which torchao's operators have no kernels in any program: take "
            "DynamicInt8()"
        )
    return converted, quantized_layers, float_layers


def _leave_room_for_biases(prepared: GraphModule) -> None:
    """Raise scales of weights, in place, where a layer's bias would not fit into int32."""
    for node in prepared.graph.nodes:
        edges = node.args[:3]
        if len(edges) < 3 or not all(isinstance(edge, Node) and edge.op == "call_module" for edge in edges):
            continue
        ranges: list[Any] = [prepared.get_submodule(str(edge.target)) for edge in edges]
        activation, weight, bias = ranges
        if not isinstance(bias, pt2e.DerivedRange) or not isinstance(weight, pt2e.PerChannelMinMaxObserver):
            continue
        held, (unit, _) = stored_tensor(prepared, edges[2].args[0]), activation.calculate_qparams()
        weight.max_val = torch.maximum(weight.max_val, pt2e.least_weight_scale(held, unit) * weight.quant_max)


def _foreign_layers(prepared: GraphModule, quantizer: str) -> tuple[list[str], list[str]]:
    """Return the layers of an observed graph that a quantizer rounds, and the others.

    Raises QuantizeError if it rounds none.
    """

    def observes_weight(node: Node) -> bool:
        source = node.args[0] if node.op == "call_module" and node.args else None
        return isinstance(source, Node) and source.op == "get_attr" and stored_tensor(prepared, source).dim() >= 2

    layers = weighted(prepared)
    rounded = {node for node, _ in layers if any(map(observes_weight, node.all_input_nodes))}
    if not rounded:
        raise QuantizeError(
            f"{quantizer} rounds no layer: configure it for those that the model has, {', '.join(name for _, name in layers)}"
        )
    left = [name for node, name in layers if node not in rounded]
    return [name for node, name in layers if node in rounded], list(dict.fromkeys(left))


def _check_signed(prepared: GraphModule, quantizer: str, quantized_layers: Sequence[str]) -> None:
    """Raise QuantizeError for signed activations that are no faster than float32.

    ONNX Runtime on x86 multiplies signed by signed bytes fast with AVX-VNNI-INT8 alone; ARM has instructions for them.
    """
    present = processor.instruction_sets()
    if "avx" not in present or "avx_vnni_int8" in present:
        return

    def is_signed(source: Node) -> bool:
        observer = prepared.get_submodule(str(source.target)) if source.op == "call_module" else None
        if not isinstance(observer, pt2e.OBSERVERS) or getattr(observer, "is_dynamic", False):
            return False
        observed = source.args[0]
        return observer.dtype == torch.int8 and isinstance(observed, Node) and observed.op != "get_attr"

    signed = {name for node, name in weighted(prepared) if any(map(is_signed, node.all_input_nodes))}
    layers = [name for name in quantized_layers if name in signed]
    if layers:
        raise QuantizeError(
            f"{quantizer} gives these layers signed 8-bit activations, which ONNX Runtime multiplies no faster than float32 on this "
            f"processor, as it has no AVX-VNNI-INT8: {', '.join(layers)}; leave quantizer out, since Int8() places unsigned ones, or take "
            "the target that the quantizer is for"
        )


class Calibration(torch.fx.Interpreter):
    """Interpreter that calibrates a prepared graph, batch by batch.

    A value that no observer sees may be infinite: attention masks are. Raises QuantizeError that names the layer of a
    NaN or infinite value.
    """

    def __init__(self, prepared: GraphModule) -> None:
        super().__init__(prepared)
        self.extra_traceback = False  # it would be added to what we say
        self._nodes = tuple(prepared.graph.nodes)
        self._batch = -1
        self._not_finite: set[Node] = set()
        self._inputs: list[tuple[Any, ...]] = []
        self._zero: dict[Node, bool] = {}
        """Observed tensors, and whether they were 0 throughout."""

    def run(self, *inputs: Any, **options: Any) -> Any:
        self._batch += 1
        self._inputs.append(inputs)
        self._not_finite.clear()
        return super().run(*inputs, **options)

    def run_node(self, n: Node) -> Any:
        if n.op == "call_module" and isinstance(self.fetch_attr(str(n.target)), pt2e.OBSERVERS):
            source = n.args[0]
            assert isinstance(source, Node)
            if source in self._not_finite:
                raise QuantizeError(self._problem(source))
            self._zero[source] = self._zero.get(source, True) and not self.env[source].any()
        result = super().run_node(n)
        if isinstance(result, Tensor) and result.is_floating_point() and not result.isfinite().all():
            self._not_finite.add(n)
        return result

    def check_ranges(self) -> None:
        """Raise QuantizeError for an input that was always 0, and warn of layers that were.

        Their ranges would cut off any other value later, and no batch at hand shows it. A layer may be 0 for good, such as the
        last batch norm of a residual branch that starts from 0.
        """
        check_varied([str(node.target) for node in self._nodes if node.op == "placeholder"], self._inputs)
        zero = [node for node, always in self._zero.items() if always]
        inputs = [node.name for node in zero if node.op == "placeholder"]
        if inputs:
            raise QuantizeError(
                f"input {', '.join(inputs)} is 0 in every calibration batch, so no range can be taken from it: give inputs like "
                "those that the model will see"
            )
        layers = dict.fromkeys(_place(node) for node in zero if node.op != "get_attr")
        if layers:
            log.warning(
                "these gave nothing but 0 on all %d calibration batches, so anything else will be cut off to nearly 0: %s; if they "
                "are not 0 for good, calibrate with other samples or keep them in float with skip",
                self._batch + 1,
                ", ".join(layers),
            )

    def _problem(self, node: Node) -> str:
        kind = "NaN" if self.env[node].isnan().any() else "infinite values"
        origins, found = [node], {node}
        while origins:
            earlier = self._not_finite.intersection(origins.pop().all_input_nodes) - found
            found |= earlier
            origins += earlier
        first = next(node for node in self._nodes if node in found)
        return (
            f"calibration batch {self._batch} makes {kind}, first in {_place(first)}, so ranges cannot be chosen: "
            "mend the weights or that operation, or leave such samples out of the calibration data"
        )


def _place(node: Node) -> str:
    return f"layer {module_name(node)!r} ({node.target})" if module_name(node) else f"the model's own {node.target}"


@torch.no_grad()
def distances(
    reference: nn.Module, quantized: QuantizedModel, inputs: Inputs, parts: Parts | None
) -> dict[str, Parity]:  # fmt: skip
    """Compare every output of both models on ``inputs``.

    Raises QuantizeError if one is NaN or infinite.
    """
    wanted, given = as_outputs(reference(*copied_inputs(inputs))), as_outputs(quantized(*inputs))
    try:
        return compare(wanted, given, parts)
    except ValueError as error:
        raise QuantizeError(f"the quantized model cannot be compared with the float model: {error}") from error


def accept(found: Mapping[str, Parity], least_db: float) -> float:
    """Return the ratio of the noisiest output; raise QuantizeError if it is below ``least_db``."""
    noisiest = min(found, key=lambda name: found[name].sqnr_db)
    sqnr_db = found[noisiest].sqnr_db
    if sqnr_db < least_db:
        raise QuantizeError(
            f"quantization leaves output {noisiest} a signal-to-noise ratio of {sqnr_db:.1f} dB, the recipe asks for "
            f"{least_db:.1f}: give calibration data like the real inputs, or keep sensitive modules in float with skip"
        )
    return sqnr_db


def _batches(calibration: Iterable[Tensor | Sequence[Tensor]], most: int) -> list[Inputs]:
    """Return the first ``most`` batches, checked."""
    if isinstance(calibration, Tensor):
        raise QuantizeError("calibration must be an iterable of batches; for a single batch give [batch]")
    batches: list[Inputs] = []
    for i, batch in enumerate(itertools.islice(calibration, most)):
        try:
            inputs = in_float32(as_inputs(batch))
        except TypeError as error:
            raise QuantizeError(f"calibration batch {i}: {error}") from error
        if any(value.numel() == 0 for value in inputs):
            raise QuantizeError(
                f"calibration batch {i} is empty, its inputs have shapes {[tuple(value.shape) for value in inputs]}: ranges "
                "cannot be taken from it"
            )
        if any(value.is_floating_point() and not value.isfinite().all() for value in inputs):
            raise QuantizeError(f"calibration batch {i} holds NaN or infinite values: ranges cannot be taken from it")
        batches.append(inputs)
    if not batches:
        raise QuantizeError("calibration data holds no batch; ranges of activations need at least one")
    return batches


def _check_sizes(example: Inputs, batches: Sequence[Inputs], free: FreeDimensions | None) -> None:
    """Raise QuantizeError for a batch of other sizes than the example's, but for ``free`` ones."""

    def fixed(inputs: Inputs) -> list[list[int | None]]:
        freed = [{0}] * len(inputs) if free is None else free
        return [[None if d in of else size for d, size in enumerate(value.shape)] for value, of in zip(inputs, freed)]

    for i, batch in enumerate(batches):
        if len(batch) != len(example) or fixed(batch) != fixed(example):
            shapes, wanted = ([tuple(value.shape) for value in inputs] for inputs in (batch, example))
            raise QuantizeError(
                f"calibration batch {i} has inputs of shapes {shapes}, and the model is captured on {wanted}: give inputs that differ in the size of the "
                "batch alone, or name other dimensions of any size with dynamic"
            )


def check_varied(names: Sequence[str], batches: Sequence[Inputs]) -> None:
    """Raise QuantizeError if none of the inputs ``names`` varies; warn of a constant one.

    Only floating-point inputs are warned of, as a mask may be constant. Ranges would fit that one value, and outputs on
    it would be close to the float model's, whatever real inputs make. A single number may be what it is.
    """
    columns = [[value.flatten() for value in column] for column in zip(*batches)]
    constant = [all(bool((part == column[0][:1]).all()) for part in column) for column in columns]
    found = [
        f"{name} is {float(column[0][0]):g}"
        for name, column, same in zip(names, columns, constant)
        if same and column[0].is_floating_point() and sum(map(len, column)) > len(column)
    ]
    if not found:
        return
    said = f"input {', input '.join(found)} in every calibration batch"
    if all(constant):
        raise QuantizeError(f"{said}, so no range can be taken from it: give inputs like those that the model will see")
    log.warning("%s: if the model will see other values there, calibrate with such inputs, too", said)
