"""Matrix products of linear layers in 8 bits, through torchao."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from arclight.fabric.extras import require
from arclight.fabric.precision.mixed import MixedPrecision
from arclight.fabric.rank_zero import rank_zero_warn


class Float8Precision(MixedPrecision):
    """Linear layers multiply in float8, everything else as under ``bf16-mixed``; parameters stay in float32.

    ``filter(layer, name)`` says which linear layers; by default those whose sizes are multiples of 16, which the
    hardware needs. Scales are taken from each tensor anew. GPUs from compute capability 8.9 and processors multiply in 8 bits;
    elsewhere, or with ``emulate=True``, values are rounded to 8 bits and multiplied in 16: the same kind of numbers, no gain
    in speed. Needs torchao (the extra ``deploy``). Raises ValueError for a model in which no layer is converted.
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
