"""Train a model with rounded weights and activations, and convert it to few bits afterwards.

`prepare_qat` and `convert` are public (``arclight.deploy``); `callback` prepares a run's model by `with_fake_quantization`, `deployment` calls
`convert`, and ``verifying.conversion`` takes `capture_as` and `round_biases`. A state dict has the float model's names and, beside them, ranges and
the bits of weights under `RANGES`: these are in checkpoints and must stay.
"""

from __future__ import annotations

import copy
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule, Node

from arclight.deploy import failures
from arclight.deploy.capture import (
    FreeDimensions,
    Inputs,
    as_inputs,
    batch_size,
    check_shared_batch,
    copied_model,
    dimensions_to_export,
    frozen_copy,
    in_float32,
    is_view,
    quiet,
    resized,
)
from arclight.deploy.errors import ExportError, QuantizeError
from arclight.deploy.parity import Parts
from arclight.deploy.quantizing import batch_norm, pt2e
from arclight.deploy.quantizing.graphs import NAME, NamedGraphs, number_paddings, stored_tensor
from arclight.deploy.quantizing.observers import MovingRange, PerChannelBiasRange, PerChannelWeightRange
from arclight.deploy.quantizing.placement import PROFILES, PlacementQuantizer, module_name, stored_weights
from arclight.deploy.quantizing.ptq import (
    QuantizedModel,
    accept,
    check_float,
    chosen_target,
    distances,
    for_processor,
    placement,
)
from arclight.deploy.quantizing.rounded_linear import quantize_trained, round_linears, trained_linears
from arclight.deploy.settings import PLACEMENTS, DynamicInt8, Int8, LowBit, Quantization, Target, WeightOnly
from arclight.fabric.distributed.hang_report import is_collective_error
from arclight.fabric.distributed.sharding import full_tensor
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.memory import is_out_of_memory
from arclight.fabric.modules import keeping_modes

log = logging.getLogger(__name__)
aten = torch.ops.aten
LARGEST_BATCH = 2**20
"""A captured dimension counts as free if its upper bound is larger."""
RANGES = "fake_quantize"
"""Name of the submodule in which a prepared model holds its ranges."""
WEIGHT_BITS = "weight_bits"
"""Name of the buffer beside the ranges that holds the bits of weights."""
RECORD = f"{RANGES}.{WEIGHT_BITS}"
"""Name of that buffer in the state dict."""
_RECIPES = {8: "Int8(reduce_range=False)", 7: "Int8(reduce_range=True)", 4: "LowBit(activation_bits=4)"}
"""Maps the bits of weights to the recipe that rounds to them."""


class PreparedModel(NamedGraphs):
    """A model that computes as the converted model will, with gradients.

    Its submodules, parameters and buffers are the model's, by the same names; ranges of activations are beside them, in
    ``fake_quantize``. Training and evaluation mode have a graph each, captured in that mode, which round in the same
    ranges: so a model may return something else in evaluation, as detectors do.

    ``settled``: ``recipe`` with the bits of weights that it may leave open (`for_processor`). They are recorded beside the ranges;
    ``load_state_dict`` raises MisconfigurationError for weights that were trained in others. Without a record, as in older state dicts,
    they count as trained in 8 bits where ``recipe`` leaves them open, else in those that it names.
    """

    def __init__(
        self, model: nn.Module, example: Inputs, recipe: Quantization, target: Target, *, settled: Quantization
    ) -> None:
        modes = _modes(model)
        graphs, quantizer = _graphs(model, example, settled, target)
        super().__init__(graphs)
        self.__dict__.update(
            float_model=model, recipe=settled, example=example, target=target, _captured=(recipe, settled, modes)
        )  # the model's tensors are registered below
        self.weight_bits = quantizer.weight_bits
        self._unrecorded_bits = self.weight_bits if recipe == settled else 8
        self.quantized_layers = tuple(quantizer.quantized_layers)
        self.float_layers = tuple(quantizer.float_layers)
        if RANGES in model._modules:
            raise QuantizeError(f"the model has a submodule called {RANGES}, which is where ranges are held: rename it")
        self._modules.update(model._modules)
        self._parameters.update(model._parameters)
        self._buffers.update(model._buffers)
        self._non_persistent_buffers_set |= model._non_persistent_buffers_set
        ranges = _tie_ranges(graphs)
        # int64, as ranges have it: changes of type leave it as it is
        ranges.register_buffer(WEIGHT_BITS, torch.tensor(self.weight_bits, device=example[0].device))
        self._modules[RANGES] = ranges
        self._adopt_constants()
        self._own = frozenset(_entries(self).keys() - _entries(model).keys())
        self.bind()
        self.training = model.training
        self.called = False
        self._set_first_ranges()

    float_model: nn.Module
    """The model that was prepared; it shares its tensors with this one."""
    recipe: Quantization
    target: Target
    """The runtime whose integer kernels it will run on."""
    example: Inputs
    """The inputs it was captured on."""
    _captured: tuple[Quantization, Quantization, dict[str, bool]]
    """What it was captured with beside those: the recipe, that with its bits settled, and the modes of the model's modules."""
    weight_bits: int
    """Bits that weights are rounded to."""
    called: bool
    """Whether it has computed anything; methods and submodules of the model compute without rounding."""
    evaluates_int8 = False
    """Whether evaluation mode runs the converted model, made of the weights at its first batch; see `evaluate_int8`."""
    _own: frozenset[str]
    """Names of tensors that are registered here and not in the model: the ranges, and constants of the graphs."""
    _int8: QuantizedModel | None = None
    _batch_norm_frozen = False

    def evaluate_int8(self, enabled: bool) -> None:
        """Set whether evaluation mode runs the converted int8 model, or rounds in the graph.

        The next batch converts the weights. It is not registered here: the state dict is that of training, whenever it
        is saved.
        """
        self.__dict__.update(evaluates_int8=enabled, _int8=None)

    def forward(self, *inputs: Tensor) -> Any:
        self.called = True
        self._bind_own()
        if self.evaluates_int8 and not self.training:
            if self._int8 is None:
                with torch.inference_mode(False), torch.autocast(inputs[0].device.type, enabled=False):
                    self.__dict__["_int8"] = _converted(self).to(inputs[0].device)
            return self._int8(*inputs)  # type: ignore[misc]
        try:
            return self.graphs["training" if self.training else "inference"](*inputs)
        except RuntimeError as error:
            captured, given = ([tuple(value.shape[1:]) for value in values] for values in (self.example, inputs))
            if captured == given or _is_of_machine(error):
                raise
            raise QuantizeError(
                f"the graph was captured on inputs whose samples have shapes {captured}, and cannot compute those of {given}: give samples of one "
                "shape (photos: task.rect = false), or example inputs of this one"
            ) from error

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "float_model" not in self.__dict__:
                raise
            return getattr(self.__dict__["float_model"], name)

    def __reduce__(self) -> tuple[Callable[..., PreparedModel], tuple[Any, ...]]:
        """Pickle the float model and ranges, as for spawned ranks; graphs are captured again.

        Torch's pickles lose their notes. Raises QuantizeError if a layer or tensor was put here since: the float
        model does not have it.
        """
        self._bind_own()
        ours, captured = _entries(self), _entries(self.float_model)
        if put := [name for name, value in ours.items() if captured.get(name) is not value and name not in self._own]:
            raise QuantizeError(
                f"the prepared model cannot be pickled: {put[0]} was put into it after it was prepared; put that into the model before, or "
                "beside the prepared model"
            )
        ranges = self._modules[RANGES].state_dict()  # type: ignore[union-attr]
        observing = all(module.observing for module in self.ranges())
        now = (ranges, _modes(self), observing, self._batch_norm_frozen)
        return _captured_again, (self.float_model, self.example, self.target, *self._captured, *now)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> PreparedModel:
        super()._apply(fn, recurse)
        self._bind_own()
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *strict_and_misfits: Any
    ) -> None:
        """Raise MisconfigurationError for weights trained in other bits, before copying any."""
        inside = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
        self.check_trained_alike(inside)
        ranges = [value for name, value in inside.items() if name.startswith(f"{RANGES}.")]
        if ranges and RECORD not in inside:
            state_dict[prefix + RECORD] = torch.tensor(self.weight_bits, device=ranges[0].device)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *strict_and_misfits)

    def training_records(self) -> tuple[str, ...]:
        return (RECORD,)

    def check_trained_alike(self, weights: Mapping[str, Tensor]) -> None:
        """Raise MisconfigurationError for weights that were trained in other bits.

        See `RecordsTraining`.
        """
        if RECORD in weights:
            self.check_bits(int(weights[RECORD]))
        elif any(name.startswith(f"{RANGES}.") for name in weights):
            self.check_bits(self._unrecorded_bits, recorded=False)

    def check_bits(self, found: int | None = None, *, recorded: bool = True) -> None:
        """Raise MisconfigurationError unless ``found`` bits are those of this model's weights.

        By default they are those on record.
        """
        found = int(self._modules[RANGES].get_buffer(WEIGHT_BITS)) if found is None else found  # type: ignore[union-attr]
        if found == self.weight_bits:
            return
        if {found, self.weight_bits} == {7, 8}:
            what = f"the run was trained with reduce_range={found == 7}, which is {self.weight_bits == 7} here"
        else:
            what = f"the run was trained with weights of {found} bits, which have {self.weight_bits} here"
        way_out = f"give {_RECIPES[found]}" if found in _RECIPES else "their record is damaged"
        if not recorded:
            way_out += f", or {_RECIPES[self.weight_bits]} if these weights, which have no record of their bits, were trained with that"
        raise MisconfigurationError(f"{what}, by the recipe or this processor: {way_out}")

    def _bind_own(self) -> None:
        """Bind the registered tensors to model and graphs.

        Torch and FSDP replace the tensors that these read.
        """
        for kind in ("_parameters", "_buffers"):
            registered = getattr(self, kind)
            for reader in (self.float_model, *self.graphs.values()) if registered else ():
                own = getattr(reader, kind)
                own.update({name: value for name, value in registered.items() if name in own})

    def ranges(self) -> list[MovingRange]:
        """List the ranges of activations, each once."""
        return [module for module in self._modules[RANGES].modules() if isinstance(module, MovingRange)]  # type: ignore[union-attr]

    def observe(self, enabled: bool) -> None:
        """Set whether training updates the ranges of activations."""
        for module in self.ranges():
            module.observing = enabled

    def synchronize(self, enabled: bool) -> None:
        """Set whether ranges are those of the batches of all ranks, or of this one's.

        With all ranks, each has to call the model as often.
        """
        for module in self.ranges():
            module.synchronized = enabled

    def running_statistics(self) -> list[Tensor]:
        """List the running means and variances that training updates, not those of frozen norms."""
        norms = (node for node in self.graphs["training"].graph.nodes if node.target is aten.batch_norm.default)
        moved = (node for node in norms if node.args[batch_norm.TRAINING])
        stored = {
            str(node.args[place].target) for node in moved for place in (3, 4) if isinstance(node.args[place], Node)
        }
        return [value for name, value in self.named_buffers() if name in stored]

    def freeze_batch_norm(self, frozen: bool) -> None:
        """Set whether batch norms use running statistics in training, or the batch's.

        The program will use the running ones.
        """
        self._batch_norm_frozen = frozen
        batch_norm.use_batch_statistics(self.graphs["training"], not frozen)

    def _adopt_constants(self) -> None:
        """Register tensors that capturing has made of constants, under a name for each graph."""
        own = {name for name, _ in (*self.named_parameters(), *self.named_buffers())}
        for kind, graph in self.graphs.items():
            for node in graph.graph.nodes:
                if node.op == "get_attr" and node.target not in own:
                    value: Any = graph
                    for part in str(node.target).split("."):
                        value = getattr(value, part)
                    if isinstance(value, Tensor):
                        node.target = f"constant_{kind}_{str(node.target).replace('.', '_')}"
                        self.register_buffer(node.target, value.detach(), persistent=False)
            graph.recompile()

    @torch.no_grad()
    def _set_first_ranges(self) -> None:
        """Initialise the ranges by the example inputs, unrounded, in evaluation mode."""
        modules = [m for m in self._modules[RANGES].modules() if isinstance(m, MovingRange | PerChannelWeightRange)]  # type: ignore[union-attr]
        modes = [module.training for module in modules]
        for module in modules:
            module.rounding = False
            module.train()
        self.graphs["inference"](*self.example)
        for module, mode in zip(modules, modes):
            module.rounding = True
            module.train(mode)


def _is_of_machine(error: RuntimeError) -> bool:
    """Return True for out-of-memory errors, and for faults of the device or other ranks.

    Gloo raises them as RuntimeErrors.
    """
    return is_out_of_memory(error) or isinstance(error, torch.AcceleratorError) or is_collective_error(error)


def _captured_again(
    model: nn.Module, example: Inputs, target: Target, recipe: Quantization, settled: Quantization, captured: dict[str, bool],
    ranges: dict[str, Tensor], modes: dict[str, bool], observing: bool, batch_norm_frozen: bool,
) -> PreparedModel:  # fmt: skip
    """Prepare ``model`` again in its captured modes, with the ranges and settings learnt."""
    _set_modes(model, captured)
    inputs = inputs_on(model, example)  # the model may have been moved
    prepared = PreparedModel(model, inputs, recipe, target, settled=settled)
    prepared._modules[RANGES].load_state_dict(ranges)  # type: ignore[union-attr]
    prepared.observe(observing)
    prepared.freeze_batch_norm(batch_norm_frozen)
    _set_modes(prepared, modes)
    return prepared


def _entries(model: nn.Module) -> dict[str, Any]:
    """Return the layers and tensors that are registered in ``model`` itself."""
    return {**model._modules, **model._parameters, **model._buffers}


def _modes(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def _set_modes(model: nn.Module, modes: Mapping[str, bool]) -> None:
    for name, module in model.named_modules():
        module.training = modes[name]


@overload
def prepare_qat(
    model: nn.Module,
    example_inputs: Tensor | Sequence[Tensor],
    *,
    recipe: Int8 | None = None,
    target: Target | None = None,
) -> PreparedModel: ...


@overload
def prepare_qat(
    model: nn.Module,
    example_inputs: Tensor | Sequence[Tensor],
    *,
    recipe: Quantization,
    target: Target | None = None,
) -> nn.Module: ...


def prepare_qat(
    model: nn.Module,
    example_inputs: Tensor | Sequence[Tensor],
    *,
    recipe: Quantization | None = None,
    target: Target | None = None,
) -> nn.Module:
    """Copy ``model`` with fake quantization inserted, to be trained with any loop and optimizer.

    The copy stays on the model's device and keeps the names of its tensors. ``example_inputs``: positional inputs, batch
    first; their first ranges are those that training moves. Weights are rounded with the scale of the batch norms behind them,
    whose epsilon and momentum stay as they are, as dropout does. ``convert`` makes the int8 model.

    ``recipe``: `Int8`, or `LowBit` with 4-bit activations, whose ranges are trained: a `PreparedModel`. `WeightOnly`, `DynamicInt8` and `LowBit` with
    8-bit activations: the model itself, in which a `RoundedLinear` is in the place of each linear layer. ``target``: as in `quantize`. Raises
    QuantizeError for others, a model that is rounded already, one without a layer to quantize and a ``skip`` that names nothing; ExportError for a
    model whose ranges are to be trained and that torch.export cannot capture in training and in evaluation mode.
    """
    check_float(model)
    recipe = recipe or Int8()
    target = chosen_target(recipe, target)
    inputs, copied = inputs_on(model, example_inputs), copied_model(model)
    return with_fake_quantization(copied, inputs, recipe, target, settled=for_processor(recipe, target))


def with_fake_quantization(
    model: nn.Module, inputs: Inputs | None, recipe: Quantization, target: Target, *, settled: Quantization
) -> nn.Module:  # fmt: skip
    """Insert the fake quantization of ``recipe`` into ``model``, which is changed.

    Only recipes of fixed ranges need ``inputs``.
    """
    if isinstance(settled, DynamicInt8 | WeightOnly | LowBit) and not settled.needs_calibration:
        return round_linears(model, settled)
    assert inputs is not None
    return PreparedModel(model, inputs, recipe, target, settled=settled)


def inputs_on(model: nn.Module, batch: Tensor | Sequence[Tensor]) -> Inputs:
    """Return positional inputs on the device of ``model``; TypeError for anything but tensors."""
    inputs = (batch,) if isinstance(batch, Tensor) else tuple(batch)
    if not inputs or not all(isinstance(value, Tensor) for value in inputs):
        raise TypeError(f"example_inputs must be a tensor or a sequence of tensors, got {type(batch).__name__}")
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    return tuple(value.detach().to(device) for value in inputs)


def convert(
    prepared: nn.Module,
    *,
    example_inputs: Tensor | Sequence[Tensor] | None = None,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    parts: Parts | None = None,
) -> QuantizedModel:
    """Convert a trained model, with ranges as training left them.

    Batch norms are folded and weights become integers.

    ``prepared`` itself is not changed, and can be trained further. If FSDP shards it every rank has to call this, and each gets
    the whole model. The ratio of the noisiest output, or part, against the trained float model is measured on ``example_inputs``, by default those of
    `prepare_qat`; a model of a checkpoint has none, and one of `RoundedLinear` layers is captured on them, with ``dynamic`` as in `quantize`. Raises
    QuantizeError below ``recipe.min_sqnr_db``, and if inputs are needed.
    """
    if not isinstance(prepared, PreparedModel):
        if trained_linears(prepared)[0] is None:
            raise TypeError(f"convert needs what prepare_qat has returned, got {type(prepared).__name__}")
        if example_inputs is None:
            raise QuantizeError("a model with rounded linear layers is captured to be converted: give example_inputs")
        return quantize_trained(prepared, example_inputs, dynamic=dynamic, parts=parts)
    if example_inputs is None and not any(bool(value.any()) for value in prepared.example):
        raise QuantizeError(
            "the model comes from a checkpoint, which keeps no inputs to compare it on: give example_inputs"
        )
    start = time.perf_counter()
    quantized = _converted(prepared, None if example_inputs is None else in_float32(as_inputs(example_inputs)))
    example, reference = quantized.example, quantized.reference
    quantized.sqnr_db = accept(distances(reference, quantized, example, parts), prepared.recipe.min_sqnr_db)
    quantized.seconds = time.perf_counter() - start
    return quantized


def _converted(prepared: PreparedModel, example: Inputs | None = None) -> QuantizedModel:
    """Convert without measuring the loss.

    A model that still trains is scored, however noisy it is.
    """
    prepared.check_bits()  # of weights that were copied in place: from another rank, or in a round of clients
    whole = _whole_parameters(prepared)
    with quiet():  # torch warns of itself
        graph = copy.deepcopy(prepared.graphs["inference"], dict(whole)).cpu()
    example = tuple(value.cpu() for value in prepared.example) if example is None else example
    reference = frozen_copy(copied_model(prepared.float_model, whole) if whole else prepared.float_model)
    for part in graph.modules():
        if isinstance(part, MovingRange):
            part.observing = False  # in whatever mode the model is: the example is no batch of training
    with torch.no_grad():
        batch_norm.fold(graph)
        graph(*example)  # ranges of folded weights
        if PROFILES[PLACEMENTS[prepared.target]].integer_bias:
            round_biases(graph)
        with quiet():
            converted = pt2e.convert(graph)
    return QuantizedModel(
        converted,
        reference=reference,
        recipe=prepared.recipe,
        example=example,
        quantized_layers=prepared.quantized_layers,
        float_layers=prepared.float_layers,
        batches=max((int(r.batches) for r in prepared.ranges()), default=0),
        target=prepared.target,
        trained=True,
    )


def _whole_parameters(prepared: PreparedModel) -> dict[int, Any]:
    """Gather the sharded parameters as a memo for ``copy.deepcopy``; on every rank."""
    prepared._bind_own()
    sharded = [parameter for parameter in prepared.parameters() if isinstance(parameter, DTensor)]
    return {id(shard): nn.Parameter(full_tensor(shard).detach().clone()) for shard in sharded}


def _graphs(
    model: nn.Module, example: Inputs, recipe: Quantization, target: Target
) -> tuple[dict[str, GraphModule], PlacementQuantizer]:
    """Capture ``model`` in training and evaluation mode, and insert fake quantization."""
    captured = {}
    for kind in ("training", "inference"):
        with keeping_modes(model):
            if kind == "inference" or not model.training:  # layers that are frozen in a model that trains stay so
                model.train(kind == "training")
            captured[kind] = capture_as(kind, model, example)
    trained, deployed = (stored_weights(captured[kind]) for kind in ("training", "inference"))
    if left := [name for name, stored in deployed.items() if name and stored and not trained.get(name, True)]:
        log.warning(
            "training computes the weights of these layers with a state, so they stay in float: %s", ", ".join(left)
        )
    graphs = {}
    for kind, graph in captured.items():
        quantizer = placement(recipe, target, qat=True, also_skipped=left)
        with torch.no_grad(), quiet():
            graphs[kind] = pt2e.prepare_qat(graph, quantizer, batch_norm.fuse)
    if not quantizer.quantized_layers:
        kinds = {value.dtype for value in model.parameters() if value.is_floating_point()} - {torch.float32}
        if kinds:
            raise QuantizeError(
                f"the weights of {type(model).__name__} are {', '.join(sorted(map(str, kinds)))}, and are rounded in float32: prepare model.float(), and "
                "train with precision='bf16-mixed' for speed"
            )
        raise QuantizeError(
            f"no layer of {type(model).__name__} can run on integers, so there is nothing to train for; these stay in "
            f"float: {quantizer.float_layers}"
        )
    return graphs, quantizer


def capture_as(
    kind: str, model: nn.Module, example: Inputs, *, free: FreeDimensions | None = None
) -> GraphModule:  # fmt: skip
    """Capture ``model`` in its mode, with gradients; ``kind`` names the purpose in errors.

    The first dimension of inputs may have any size, or those that ``free`` names. Raises ExportError if the model cannot be
    captured, takes its batch size for a constant, or writes into a tensor that others read.
    """
    size = max(2, batch_size(example))
    if free is None:
        check_shared_batch(example)
    inputs = resized(example, size)
    shapes: tuple[dict[int, Any], ...] = tuple({0: Dim.AUTO} if value.dim() else {} for value in inputs)
    if free is not None:
        # batch norms in training refuse a single value
        inputs, shapes = dimensions_to_export(example, free, least=2)

    def export_again() -> ExportedProgram:
        with quiet():
            return torch.export.export(model, inputs, dynamic_shapes=shapes)

    try:
        exported = export_again()
        with quiet():
            graph = exported.module(check_guards=False)
    except Exception as error:  # torch.export raises many kinds, all of them about the model
        hint = "a dimension that the model fixes or bounds cannot be free"
        why = failures.not_captured(error, model, export_again, sizes=hint)
        raise ExportError(f"torch.export cannot capture the model for {kind}: {why}") from error
    assert isinstance(graph, GraphModule)
    for node, value in zip(graph.graph.find_nodes(op="placeholder"), inputs if free is None else ()):
        if value.dim() and len(value) == size and not _is_free(node.meta["val"].shape[0], exported.range_constraints):
            raise ExportError(
                f"for {kind}, the model takes the batch size of {node.name} ({size}) for a constant, so batches of other "
                "sizes would be computed wrongly: use x.shape[0] as it is, without int() and without branches on it"
            )
    _write_out_of_place(graph, kind)
    return number_paddings(graph)


def _is_free(size: Any, ranges: Mapping[Any, Any]) -> bool:
    """Return True if a captured dimension may have any size from 2 on."""
    if isinstance(size, int) or size.node.maybe_as_int() is not None:
        return False
    bounds = ranges.get(size.node.expr)
    return bounds is None or bool(bounds.lower <= 2 and bounds.upper > LARGEST_BATCH)


def _write_out_of_place(graph: GraphModule, kind: str) -> None:
    """Replace in-place operators on values that nothing else reads.

    Raises ExportError for others.
    """
    for node in list(graph.graph.nodes):
        if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
            continue
        target = node.args[0]
        if node.target is aten.batch_norm.default or (isinstance(target, Node) and target.op == "get_attr"):
            continue  # running statistics
        plain = getattr(aten, node.target._schema.name.removeprefix("aten::").removesuffix("_"), None)
        assert isinstance(target, Node)
        alone = target.op == "call_function" and set(target.users) == {node} and not is_view(target)
        if not alone or plain is None or node.target._overloadname not in plain.overloads():
            where = module_name(node) or "the model itself"
            raise ExportError(
                f"for {kind}, {node.target} in {where} writes into a tensor that others read or that is part of another: "
                "quantization-aware training needs it out of place (inplace=False, or y = x + 1 for x += 1)"
            )
        node.target = getattr(plain, node.target._overloadname)
    graph.recompile()


def _tie_ranges(graphs: dict[str, GraphModule]) -> nn.ModuleDict:
    """Tie the ranges of equal values in both graphs; return the ranges by value name."""
    places = {kind: _range_places(graph) for kind, graph in graphs.items()}
    ranges = nn.ModuleDict()
    names: dict[int, str] = {}  # of ranges in the training graph: several values may share one
    chosen: dict[int, nn.Module] = {}
    for key, node in places["inference"].items():
        own = graphs["inference"].get_submodule(str(node.target))
        twin = places["training"].get(key)
        if twin is None:
            raise QuantizeError(
                f"{key} is rounded in evaluation mode and not computed in training, so training cannot set its range: "
                "keep that module in float with recipe.skip"
            )
        other = graphs["training"].get_submodule(str(twin.target))
        if chosen.setdefault(id(own), other) is not other:
            raise QuantizeError(
                f"{key} shares its range with other values in evaluation mode only: keep that module in float with recipe.skip"
            )
    for kind in ("training", "inference"):
        for key, node in places[kind].items():
            own = graphs[kind].get_submodule(str(node.target))
            module = chosen[id(own)] if kind == "inference" else own
            name = names.setdefault(id(module), key.replace(".", "_").replace(" ", "_"))
            ranges[name] = module
            node.target = f"{RANGES}.{name}"
        graphs[kind].delete_all_unused_submodules()
    return ranges


def _range_places(graph: GraphModule) -> dict[str, Node]:
    """Map rounded values, by a name common to both modes, to the nodes that round them."""
    seen: Counter[str] = Counter()
    names: dict[Node, str] = {}
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            names[node] = str(node.target)
        elif node.op == "placeholder":
            names[node] = f"input {node.name}"
        elif batch_norm.SCALED in node.meta:
            names[node] = node.meta[batch_norm.SCALED]
        elif NAME in node.meta:
            names[node] = node.meta[NAME]
        elif isinstance(node.target, torch._ops.OpOverload):
            kind = f"{module_name(node)} {node.target._schema.name.removeprefix('aten::')}".strip()
            names[node] = kind if not seen[kind] else f"{kind} {seen[kind]}"
            seen[kind] += 1
    places: dict[str, Node] = {}
    for node in graph.graph.nodes:
        if node.op == "call_module" and isinstance(graph.get_submodule(str(node.target)), pt2e.OBSERVERS):
            source = node.args[0]
            again = sum(1 for key in places if key.partition(" at ")[0] == names[source])
            places[f"{names[source]} at {again}" if again else names[source]] = node
    return places


def round_biases(graph: GraphModule) -> None:
    """Round biases of layers that multiply integers to int32, as runtimes do."""
    for node in list(graph.graph.nodes):
        if node.target not in batch_norm.FUSABLE or len(node.args) < 3 or not isinstance(node.args[2], Node):
            continue
        if batch_norm.BIAS in node.meta:  # rounded as its quantizer asks
            continue
        source, weight = (_range(graph, arg) for arg in node.args[:2])
        if isinstance(source, MovingRange) and isinstance(weight, PerChannelWeightRange):
            unit = source.calculate_qparams()[0]
            bias = stored_tensor(graph, node.args[2])
            weight.scale = torch.maximum(weight.scale, pt2e.least_weight_scale(bias, unit))
            batch_norm.insert_bias_range(graph, node, PerChannelBiasRange(unit * weight.scale))
    graph.recompile()


def _range(graph: GraphModule, node: Any) -> nn.Module | None:
    return graph.get_submodule(str(node.target)) if isinstance(node, Node) and node.op == "call_module" else None
