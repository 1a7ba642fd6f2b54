"""Replace linear layers by ones that multiply, or store weights, in 8 or 4 bits.

``Float8Precision`` needs torchao, ``TransformerEnginePrecision`` NVIDIA's package, ``BitsandbytesPrecision`` bitsandbytes. `names` makes the
first two for ``precision="float8"`` and ``"transformer-engine"``; users pass objects of all three as plugins; ``parallel.strategy`` asks for
`Float8Precision`. Class names and arguments are Lightning's and stay, except `Float8Precision`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from arclight.fabric.extras import require
from arclight.fabric.precision.base import DefaultDtype, Precision, floats_to
from arclight.fabric.precision.mixed import MixedPrecision
from arclight.fabric.precision.true_precision import TruePrecision
from arclight.fabric.rank_zero import rank_zero_warn


class Float8Precision(MixedPrecision):
    """Multiply linear layers in float8, with all else as under ``bf16-mixed``.

    Parameters stay in float32. ``filter(layer, name)`` says which linear layers; by default those whose sizes are multiples of 16, which
    the hardware needs. Scales are computed from each tensor at each call. GPUs from compute capability 8.9 and processors multiply in 8
    bits; elsewhere, or with ``emulate=True``, values are rounded to 8 bits and multiplied in 16: the same kind of numbers, no gain in
    speed. Needs torchao (the extra ``deploy``). Raises ValueError for a model in which no layer is converted.
    """

    def __init__(
        self, device: str = "cuda", filter: Callable[[nn.Linear, str], bool] | None = None, emulate: bool | None = None
    ) -> None:
        super().__init__("bf16-mixed", device)
        self.precision = "float8"
        self.filter = filter or _sizes_fit
        self.emulate = not _multiplies_in_float8(device) if emulate is None else emulate
        if self.emulate and emulate is None:
            rank_zero_warn(
                f"this {device} device does not multiply in float8: values are rounded to it and multiplied in bfloat16"
            )

    def convert_module(self, module: nn.Module) -> nn.Module:
        float8 = require("torchao.float8", extra="deploy")
        if isinstance(module, nn.Linear):
            raise TypeError("Float8Precision replaces layers inside a module: wrap a lone Linear, nn.Sequential(layer)")
        float8.convert_to_float8_training(
            module,
            config=float8.Float8LinearConfig(emulate=self.emulate),
            module_filter_fn=lambda layer, name: isinstance(layer, nn.Linear) and self.filter(layer, name),
        )
        layers = require("torchao.float8.float8_linear", extra="deploy").Float8Linear
        if not any(isinstance(layer, layers) for layer in module.modules()):
            raise ValueError(
                "precision='float8' converts linear layers whose sizes are multiples of 16, and this model has none; use "
                "'bf16-mixed', or Float8Precision(filter=...) to choose others"
            )
        return module


def _sizes_fit(layer: nn.Linear, name: str) -> bool:
    return layer.in_features % 16 == 0 and layer.out_features % 16 == 0


def _multiplies_in_float8(device: str) -> bool:
    if device == "cuda":
        return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
    return device == "cpu"


_TRANSFORMER_ENGINE_AVAILABLE = find_spec("transformer_engine") is not None


class TransformerEnginePrecision(Precision):
    """Replace Linear and LayerNorm layers by Transformer Engine's, which multiply in float8.

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


_BITSANDBYTES_AVAILABLE = find_spec("bitsandbytes") is not None

_MODES = ("nf4", "nf4-dq", "fp4", "fp4-dq", "int8", "int8-training")


class BitsandbytesPrecision(TruePrecision):
    """Replace linear layers by bitsandbytes' own, with quantized weights.

    Weights are quantized when they are moved to a CUDA GPU. ``mode``: ``nf4`` or ``fp4`` (with ``-dq`` the scales are quantized too),
    ``int8`` for inference, ``int8-training``. ``dtype`` is what is computed in: float16 for the int8 modes, else bfloat16 if the GPU has
    it. Layers whose names begin with one of ``ignore_modules`` stay as they are. Raises ModuleNotFoundError without bitsandbytes,
    ValueError for another mode or type.
    """

    def __init__(self, mode: str, dtype: torch.dtype | None = None, ignore_modules: set[str] | None = None) -> None:
        if not _BITSANDBYTES_AVAILABLE:
            raise ModuleNotFoundError(
                "BitsandbytesPrecision needs bitsandbytes and a CUDA GPU: pip install bitsandbytes; "
                "to ship a model in 8 bits see arclight.deploy"
            )
        if mode not in _MODES:
            raise ValueError(f"BitsandbytesPrecision(mode={mode!r}): choose one of {', '.join(_MODES)}")
        if dtype is None:
            bf16 = not mode.startswith("int8") and torch.cuda.is_available() and torch.cuda.is_bf16_supported()
            dtype = torch.bfloat16 if bf16 else torch.float16
        if mode.startswith("int8") and dtype is not torch.float16:
            raise ValueError(f"{mode!r} only works with `dtype=torch.float16`, but you chose `{dtype}`")
        self.mode, self.dtype, self.ignore_modules = mode, dtype, set(ignore_modules or ())
        self.precision = f"bitsandbytes-{mode}"

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Replace the linear layers. Raises TypeError if there are none."""
        if not any(isinstance(layer, nn.Linear) for layer in module.modules()):
            raise TypeError("BitsandbytesPrecision quantizes Linear layers, and your model has no Linear layers")
        import bitsandbytes

        there = (bitsandbytes.nn.Linear8bitLt, bitsandbytes.nn.Linear4bit)
        if not any(isinstance(layer, there) for layer in module.modules()):
            self._replace(module, bitsandbytes.nn, "")
        return module

    def _replace(self, module: nn.Module, layers: Any, prefix: str) -> None:
        for name, layer in module.named_children():
            full = f"{prefix}{name}"
            if any(full.startswith(ignored) for ignored in self.ignore_modules):
                continue
            if isinstance(layer, nn.Linear):
                setattr(module, name, self._quantized(layer, layers))
            else:
                self._replace(layer, layers, f"{full}.")

    def _quantized(self, layer: nn.Linear, layers: Any) -> nn.Module:
        size = layer.in_features, layer.out_features
        bias = layer.bias is not None
        replacement: nn.Module
        if self.mode.startswith("int8"):
            training = self.mode == "int8-training"
            threshold = 0.0 if training else 6.0
            replacement = layers.Linear8bitLt(*size, bias=bias, has_fp16_weights=training, threshold=threshold)
            if training:
                replacement.weight.data = layer.weight.data
            else:
                replacement.weight = layers.Int8Params(layer.weight.data, has_fp16_weights=False, requires_grad=False)
        else:
            kind, _, double = self.mode.partition("-")
            options = {"compress_statistics": bool(double), "quant_type": kind}
            replacement = layers.Linear4bit(*size, bias=bias, compute_dtype=self.dtype, **options)
            replacement.weight = layers.Params4bit(layer.weight.data, requires_grad=False, **options)
        if bias:
            replacement.bias = nn.Parameter(layer.bias.data.to(self.dtype), requires_grad=layer.bias.requires_grad)
        return replacement
