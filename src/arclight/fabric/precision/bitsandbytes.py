"""Weights of linear layers in 4 or 8 bits through bitsandbytes, for those who have it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from arclight.fabric.precision.true_precision import TruePrecision

_BITSANDBYTES_AVAILABLE = find_spec("bitsandbytes") is not None

_MODES = ("nf4", "nf4-dq", "fp4", "fp4-dq", "int8", "int8-training")


class BitsandbytesPrecision(TruePrecision):
    """Linear layers become bitsandbytes' own, whose weights are quantized when they arrive on a CUDA GPU.

    ``mode``: ``nf4`` or ``fp4`` (with ``-dq`` the scales are quantized too), ``int8`` for inference, ``int8-training``. ``dtype`` is
    what is computed in: float16 for the int8 modes, else bfloat16 where the GPU has it. Layers whose names begin with one of
    ``ignore_modules`` stay as they are. Raises ModuleNotFoundError without bitsandbytes, ValueError for another mode or type.
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
        """Replace the linear layers. Raises TypeError where there are none."""
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
