"""Replace large linear layers by 8-bit ones of torchao: float8 per tensor or row, or MXFP8.

`parallelize` calls it first of all steps; it returns at once if the plan does not ask for it. Names of parameters stay.
Weights stay what they are; layers turn them and their inputs into 8 bits at each call. So it composes with what comes after:
a layer sharded by ``tp`` scales its local shard, FSDP gathers weights in their own type.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from arclight.fabric.extras import require
from arclight.parallel.layers.tensor_parallel import declared_styles
from arclight.parallel.plan import Plan, PlanError


def convert_to_float8(model: nn.Module, plan: Plan, device: torch.device) -> list[str]:
    """Convert large linear layers of ``model`` to float8, in place; return their names.

    ``plan.float8`` says how.
    Large: both widths are ``plan.float8_smallest`` or more. Layers whose widths (of the part that ``tp`` leaves) the hardware
    does not take, and the output over the vocabulary, stay. If the device does not multiply in 8 bits, values are rounded to
    them and multiplied in their own type. Raises PlanError if no layer is left, MissingExtraError without torchao.
    """
    if plan.float8 == "none":
        return []
    chosen = _chosen(model, plan)
    if not chosen and plan.pp > 1:
        return []  # a stage may have none
    if not chosen:
        raise PlanError(
            f'float8 = "{plan.float8}" finds no linear layer of {plan.float8_smallest} or more and a multiple of {_multiple(plan)} '
            'on both sides: set float8 = "none", or float8_smallest lower'
        )
    if plan.float8 == "mxfp8":
        for name in chosen:
            _multiply_in_mx(cast(nn.Linear, model.get_submodule(name)), device)
        return chosen
    float8 = require("torchao.float8", extra="deploy")
    config = float8.Float8LinearConfig.from_recipe_name(plan.float8)
    if not _multiplies_in_float8(device):
        config = dataclasses.replace(config, emulate=True)
    float8.convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in chosen)
    return chosen


def _multiple(plan: Plan) -> int:
    return 32 if plan.float8 == "mxfp8" else 16


def _chosen(model: nn.Module, plan: Plan) -> list[str]:
    styles = {module: style for _, module, style in declared_styles(model)}
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or styles.get(module) in ("head", "shared"):
            continue
        outputs, inputs = module.weight.shape
        if min(outputs, inputs) < plan.float8_smallest:
            continue
        outputs //= plan.tp if styles.get(module) == "column" else 1
        inputs //= plan.tp if styles.get(module) in ("row", "part") else 1
        if outputs % _multiple(plan) == 0 and inputs % _multiple(plan) == 0:
            found.append(name)
    return found


def _multiplies_in_float8(device: torch.device) -> bool:
    return device.type == "cpu" or (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9))


def _multiply_in_mx(layer: nn.Linear, device: torch.device) -> None:
    config = require("torchao.prototype.moe_training.config", extra="deploy")
    product = require("torchao.prototype.moe_training.mxfp8_linear", extra="deploy")._to_mxfp8_then_scaled_mm
    real = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (10, 0)
    recipe = config.MXFP8TrainingRecipe.MXFP8_RCEIL if real else config.MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL
    chosen = config.MXFP8TrainingOpConfig.from_recipe(recipe)
    multiply = partial(
        product,
        kernel_preference=chosen.kernel_preference,
        scale_calculation_mode=chosen.scale_calculation_mode,
        wgrad_with_hp=chosen.wgrad_with_hp,
    )
    layer.forward = partial(_mx_linear, layer, multiply)  # type: ignore[method-assign]


def _mx_linear(layer: nn.Linear, multiply: Callable[..., Tensor], x: Tensor) -> Tensor:
    out = multiply(x, layer.weight)
    return out if layer.bias is None else out + layer.bias
