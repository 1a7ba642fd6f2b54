"""Train linear layers with the rounding of recipes that need no calibration.

Weights are rounded by output or in groups; activations, where the recipe rounds them, in the range of each call. `qat` calls `round_linears`, which
puts a `RoundedLinear` in the place of each layer: it computes what the recipe's kernel will, and gradients pass straight through the rounding. Its
state dict must stay that of ``nn.Linear``. `deployment` and `callback` find such layers by `trained_linears`; `quantize_trained` (``convert``) rounds
the same weights by the same functions of `linear`, so that the program's integers are those of training.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parameter import UninitializedParameter

from arclight.deploy.capture import as_inputs, capture, free_dimensions, frozen_copy, in_float32
from arclight.deploy.errors import QuantizeError
from arclight.deploy.parity import Parts
from arclight.deploy.quantizing.graphs import fold_layer_weights
from arclight.deploy.quantizing.linear import (
    check_groups,
    dynamic_weight,
    linear_dynamic,
    linear_grouped,
    pack,
    quantize_linears,
    round_dynamic,
    round_groups,
    unpack,
    weight_bits,
)
from arclight.deploy.quantizing.placement import check_skip, inside
from arclight.deploy.quantizing.ptq import QuantizedModel, accept, distances
from arclight.deploy.settings import DynamicInt8, LowBit, WeightOnly
from arclight.fabric.distributed.sharding import gathered_copy
from arclight.fabric.strategies.root_module import RoundsOwnWeights

log = logging.getLogger(__name__)
LinearRecipe = DynamicInt8 | WeightOnly | LowBit


class _StraightThrough(torch.autograd.Function):
    """Return the rounded value, and pass its gradient on to the value (Bengio et al. 2013)."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, rounded: Tensor) -> Tensor:
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


_CALLED = -1
"""Key of `_keep_called` among the forward hooks of a layer; torch's own keys are from 0 on."""


def _keep_called(module: nn.Module, args: Any, output: Any) -> None:
    """Do nothing: a hook keeps torch's fused layers from reading the weight without a call."""


class RoundedLinear(nn.Linear, RoundsOwnWeights):
    """Linear layer that computes as the kernel of its recipe will, with gradients.

    Its state is that of an ``nn.Linear``.
    """

    recipe: LinearRecipe
    _packed: tuple[tuple[int, int], tuple[Tensor, Tensor]] | None
    """Integers and scales of the weight in evaluation mode, after the address and version of the weight that they were made of."""

    @classmethod
    def of(cls, layer: nn.Linear, recipe: LinearRecipe) -> RoundedLinear:
        """Return a layer with the tensors, hooks and mode of ``layer``."""
        made = cls.__new__(cls)
        hooks = OrderedDict([*layer._forward_hooks.items(), (_CALLED, _keep_called)])
        made.__dict__.update(layer.__dict__, recipe=recipe, _packed=None, _forward_hooks=hooks)
        return made

    def plain(self) -> nn.Linear:
        """Return a layer with these tensors that rounds nothing."""
        made = nn.Linear.__new__(nn.Linear)
        made.__dict__.update(
            {name: value for name, value in self.__dict__.items() if name not in ("recipe", "_packed")}
        )
        made._forward_hooks = OrderedDict((key, hook) for key, hook in self._forward_hooks.items() if key != _CALLED)
        return made

    def forward(self, input: Tensor) -> Tensor:
        if self.training or torch.is_grad_enabled():
            x, weight = self.operands(input)
            return F.linear(x, weight, self.bias)
        integers, scale = self._integers()
        if isinstance(self.recipe, DynamicInt8):
            output, device = linear_dynamic(input, integers, scale, self.bias), input.device.type
            return output.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else output
        bits, integer = weight_bits(self.recipe)
        return linear_grouped(input, integers, scale, self.bias, bits, integer)

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``x`` (..., K) and the weight (N, K) as the kernel multiplies them.

        Gradients pass straight through the rounding. ``text.language_model`` takes them for a loss that multiplies them in chunks.
        """
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            integers, scale = self._round_weight()
            if isinstance(self.recipe, DynamicInt8):
                weight, rounded = integers * scale[:, None], round_dynamic(x.float())
            else:
                bits, integer = weight_bits(self.recipe)
                weight = unpack(integers, scale, bits)
                rounded = round_groups(x.float(), integers.shape[1]) if integer else x
        kept: Tensor = _StraightThrough.apply(self.weight, weight.to(self.weight.dtype))
        taken: Tensor = x if rounded is x else _StraightThrough.apply(x, rounded.to(x.dtype))
        return taken, kept

    def train(self, mode: bool = True) -> RoundedLinear:
        """Forget the integers: the weight may be another when it is evaluated next."""
        self._packed = None
        super().train(mode)
        return self

    def _integers(self) -> tuple[Tensor, Tensor]:
        """Return integers and scales of the weight, kept until the weight's version changes.

        A weight that a hook computes, or that may be sharded (torch.distributed is initialised), is rounded at each call: its version does not tell.
        """
        state = self.weight.data_ptr(), 0 if self.weight.is_inference() else self.weight._version
        counted = "weight" in self._parameters and not torch.distributed.is_initialized()
        if self._packed is not None and self._packed[0] == state and counted:
            return self._packed[1]
        with torch.autocast(self.weight.device.type, enabled=False):
            made = self._round_weight()
        self._packed = state, made
        return made

    def _round_weight(self) -> tuple[Tensor, Tensor]:
        if isinstance(self.recipe, DynamicInt8):
            return dynamic_weight(self.weight, reduced=bool(self.recipe.reduce_range))
        return pack(self.weight, weight_bits(self.recipe)[0], self.recipe.group_size)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": None}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.recipe}"


def round_linears(model: nn.Module, recipe: LinearRecipe) -> nn.Module:
    """Replace the linear layers of ``model`` by rounded ones, and return it.

    If the model is a linear layer itself, its rounded layer is returned. Layers whose weight another module has as well, such as a tied embedding,
    stay as they are, as in `quantize`; subclasses of ``nn.Linear`` stay with a warning. Raises QuantizeError if no layer is left, for a ``skip`` that
    names nothing, for layers without values yet, and for groups that do not divide a layer's inputs.
    """
    names = dict(model.named_modules())
    check_skip(recipe.skip, names, f"{type(model).__name__} has no module of that name")
    linears = {name: one for name, one in names.items() if isinstance(one, nn.Linear) and not inside(name, recipe.skip)}
    if empty := [name for name, one in linears.items() if isinstance(one.weight, UninitializedParameter)]:
        raise QuantizeError(
            f"{', '.join(empty)} of {type(model).__name__} have no weights yet (LazyLinear), and would stay in float: call the model on a batch first, "
            "or name them in skip"
        )
    others = [module for name, module in names.items() if type(module) is not nn.Linear or inside(name, recipe.skip)]
    shared = {id(parameter) for module in others for parameter in module.parameters(recurse=False)}
    chosen = {
        name: module
        for name, module in names.items()
        if type(module) is nn.Linear and id(module.weight) not in shared and not inside(name, recipe.skip)
    }
    if not chosen:
        raise QuantizeError(
            f"{type(recipe).__name__} is for linear layers, and {type(model).__name__} has none whose weight is its own and not in skip. "
            "Convolutions are trained with rounding by int8"
        )
    if not isinstance(recipe, DynamicInt8):
        check_groups({name: layer.in_features for name, layer in chosen.items()}, recipe.group_size)
    if subclasses := {name: type(one).__name__ for name, one in linears.items() if type(one) is not nn.Linear}:
        log.warning(
            "these layers compute in ways of their own, and are trained in float: %s",
            ", ".join(f"{name} ({kind})" for name, kind in subclasses.items()),
        )
    made = {id(layer): RoundedLinear.of(layer, recipe) for layer in chosen.values()}
    _replace(model, made)
    return made.get(id(model), model)


def trained_linears(model: nn.Module) -> tuple[LinearRecipe | None, list[str]]:
    """Return the recipe of the `RoundedLinear` layers of ``model``, and all their names.

    The recipe is that of the first layer, None without any.
    """
    modules = model.named_modules(remove_duplicate=False)
    found = {name: module for name, module in modules if isinstance(module, RoundedLinear)}
    return next((layer.recipe for layer in found.values()), None), list(found)


def _rounding(layer: nn.Module) -> LinearRecipe:
    """Return the recipe of a rounded layer without the fields that change no bit of it."""
    assert isinstance(layer, RoundedLinear)
    return replace(layer.recipe, skip=(), min_sqnr_db=0.0)


def quantize_trained(
    model: nn.Module,
    example: Tensor | Sequence[Tensor],
    *,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    parts: Parts | None = None,
) -> QuantizedModel:
    """Return the model of the program that `RoundedLinear` layers were trained for.

    All else stays in float. Arguments are those of `quantize`. Raises QuantizeError for a layer that the captured graph does not compute as a linear
    layer, and for an output that is noisier than the recipe's ``min_sqnr_db``.
    """
    start = time.perf_counter()
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        model = gathered_copy(model)
    recipe, layers = trained_linears(model)
    assert recipe is not None
    rounding = {name: _rounding(model.get_submodule(name)) for name in layers}
    if others := [name for name, one in rounding.items() if one != rounding[layers[0]]]:
        raise QuantizeError(
            f"{layers[0]} was trained for {rounding[layers[0]]}, and {others[0]} for {rounding[others[0]]}: a program is of one recipe, so train both "
            "for the same, or export each part by itself"
        )
    inputs = in_float32(as_inputs(example))
    reference = _plain(frozen_copy(model))
    free = None if dynamic is None else free_dimensions(reference, inputs, dynamic)
    graph = fold_layer_weights(capture(frozen_copy(reference), inputs, free=free).module())
    quantized_layers, float_layers = quantize_linears(graph, recipe, layers)
    quantized = QuantizedModel(
        graph, reference=reference, recipe=recipe, example=inputs, quantized_layers=quantized_layers, float_layers=float_layers,
        batches=0, target="onnxruntime", trained=True,
    )  # fmt: skip
    quantized.sqnr_db = accept(distances(reference, quantized, inputs, parts), recipe.min_sqnr_db)
    quantized.seconds = time.perf_counter() - start
    return quantized


def _plain(model: nn.Module) -> nn.Module:
    """Put plain layers in the place of the rounded ones, and return the model."""
    if isinstance(model, RoundedLinear):
        return model.plain()
    _replace(model, {id(module): module.plain() for module in model.modules() if isinstance(module, RoundedLinear)})
    return model


def _replace(model: nn.Module, made: Mapping[int, nn.Module]) -> None:
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if id(child) in made:
                module._modules[name] = made[id(child)]
