"""Define true precision: parameters and arithmetic in float16, bfloat16 or float64.

`names` makes them for ``precision="bf16-true"``, ``"16-true"`` and ``"64-true"``, or users do. Modules are converted once, inputs and
outputs at each step. `HalfPrecision` and `DoublePrecision` are Lightning's names and stay; `TruePrecision` is their base, and that of
`BitsandbytesPrecision`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from arclight.fabric.precision.base import DefaultDtype, Precision, floats_to


class TruePrecision(Precision):
    """Compute everything in ``dtype``: parameters, inputs, and tensors that a step makes.

    Fabric's modules return outputs in torch's default type.
    """

    def convert_module(self, module: nn.Module) -> nn.Module:
        with torch.no_grad():  # complex tensors keep their type, which Module.to would not let them
            converted: nn.Module = module._apply(lambda t: t.to(self.dtype) if t.is_floating_point() else t)
        return converted

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return DefaultDtype(self.dtype)

    def convert_input(self, data: Any) -> Any:
        return floats_to(data, self.dtype)

    def forward_context(self) -> AbstractContextManager[Any]:
        return DefaultDtype(self.dtype)

    def convert_output(self, data: Any) -> Any:
        return floats_to(data, torch.get_default_dtype())


class HalfPrecision(TruePrecision):
    """Everything in 16 bits, ``bf16-true`` or ``16-true``. Raises ValueError for another name."""

    def __init__(self, precision: str = "16-true") -> None:
        types = {"bf16-true": torch.bfloat16, "16-true": torch.float16}
        if precision not in types:
            raise ValueError(f"HalfPrecision(precision={precision!r}): choose '16-true' or 'bf16-true'")
        self.precision, self.dtype = precision, types[precision]


class DoublePrecision(TruePrecision):
    """Everything in float64."""

    precision = "64-true"
    dtype = torch.float64
