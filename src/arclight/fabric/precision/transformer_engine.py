"""8-bit arithmetic through NVIDIA's Transformer Engine, for those who have it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from arclight.fabric.precision.base import DefaultDtype, Precision, floats_to
from arclight.fabric.rank_zero import rank_zero_warn

_TRANSFORMER_ENGINE_AVAILABLE = find_spec("transformer_engine") is not None


class TransformerEnginePrecision(Precision):
    """Linear and LayerNorm layers are replaced by Transformer Engine's, which multiply in float8.

    Parameters are in ``weights_dtype``; what cannot run in float8 runs in ``fallback_compute_dtype``. ``recipe`` is a ``DelayedScaling``
    or its arguments. ``replace_layers=False`` leaves the layers to you. Raises ModuleNotFoundError without transformer_engine;
    ``precision="float8"`` needs only torchao.
    """

    precision = "transformer-engine"

    def __init__(
        self, *, weights_dtype: torch.dtype, recipe: Any = None, replace_layers: bool | None = None,
        fallback_compute_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        if not _TRANSFORMER_ENGINE_AVAILABLE:
            raise ModuleNotFoundError(
                "precision='transformer-engine' needs NVIDIA's package and a Hopper or later GPU: pip install "
                "'transformer_engine[pytorch]'; precision='float8' runs through torchao instead"
            )
        from transformer_engine.common import recipe as recipes

        if recipe is None or isinstance(recipe, Mapping):
            options = dict(recipe or {})
            if "fp8_format" in options:
                options["fp8_format"] = getattr(recipes.Format, options["fp8_format"])
            recipe = recipes.DelayedScaling(**options)
        self.recipe, self.replace_layers, self.weights_dtype = recipe, replace_layers, weights_dtype
        self.fallback_compute_dtype = fallback_compute_dtype or weights_dtype
        if weights_dtype is torch.float16:
            self.precision = "transformer-engine-float16"

    def convert_module(self, module: nn.Module) -> nn.Module:
        there = any("transformer_engine.pytorch" in type(layer).__module__ for layer in module.modules())
        if self.replace_layers is not False and not there:
            _replace_layers(module)
        return module.to(dtype=self.weights_dtype)

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return DefaultDtype(self.weights_dtype)

    def convert_input(self, data: Any) -> Any:
        return floats_to(data, self.weights_dtype)

    def forward_context(self) -> AbstractContextManager[Any]:
        import transformer_engine.pytorch as engine

        stack = ExitStack()
        stack.enter_context(DefaultDtype(self.weights_dtype))
        stack.enter_context(torch.autocast("cuda", self.fallback_compute_dtype))
        stack.enter_context(engine.fp8_autocast(enabled=True, fp8_recipe=self.recipe))
        return stack

    def convert_output(self, data: Any) -> Any:
        return floats_to(data, torch.get_default_dtype())


def _replace_layers(module: nn.Module) -> None:
    import transformer_engine.pytorch as engine

    for name, layer in module.named_children():
        replacement: nn.Module
        if isinstance(layer, nn.Linear):
            if layer.in_features % 8 or layer.out_features % 16:
                rank_zero_warn(
                    f"layer {name!r} stays as it is: float8 needs sizes divisible by 8 and 16, it has "
                    f"{layer.in_features} and {layer.out_features}"
                )
                continue
            replacement = engine.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
        elif isinstance(layer, nn.LayerNorm):
            replacement = engine.LayerNorm(layer.normalized_shape[0], eps=layer.eps)
        else:
            _replace_layers(layer)
            continue
        for parameter in ("weight", "bias"):
            if getattr(layer, parameter) is not None and getattr(replacement, parameter) is not None:
                getattr(replacement, parameter).data = getattr(layer, parameter).data.clone()
        setattr(module, name, replacement)
