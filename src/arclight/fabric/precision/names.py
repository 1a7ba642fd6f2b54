"""Resolve ``precision=`` to a class; ``auto`` measures which is fastest.

`selection` calls `resolve_precision`. A name, number or object comes in, a `Precision` goes out. Names (Lightning's, ``auto`` and
``float8``) are in recipes: they must stay. A new one goes into `NAMES` and `resolve_precision`.
"""

from __future__ import annotations

import time

import torch
from torch import nn

from arclight.fabric.precision.base import Precision
from arclight.fabric.precision.mixed import MixedPrecision
from arclight.fabric.precision.true_precision import DoublePrecision, HalfPrecision
from arclight.fabric.registry import installed

_ALIASES = {"32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"}
NAMES = (
    "32-true", "64-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed", "float8", "transformer-engine", "transformer-engine-float16",
)  # fmt: skip


def precision_name(choice: str | int | None) -> str:
    """Return the full name of a precision: ``16`` is ``16-mixed``.

    Raises ValueError for an unknown one.
    """
    name = "32-true" if choice is None else _ALIASES.get(str(choice), str(choice))
    if name not in NAMES and name not in installed("precisions"):
        names = ", ".join([*NAMES, *installed("precisions")])
        raise ValueError(
            f"Precision {choice!r} is invalid. precision={choice!r} is not known; choose auto, {names}, 16, 32, 64 or bf16"
        )
    return name


def resolve_precision(choice: str | int | Precision | None, device: str) -> Precision:
    """Return the precision a user asked for on a kind of device; ``auto`` measures.

    Precisions of installed packages are entry points in the group ``arclight.precisions``, called with the kind of device.
    Raises ValueError for an unknown name.
    """
    if isinstance(choice, Precision):
        return choice
    if choice == "auto":
        choice = faster_precision(device)
    name = precision_name(choice)
    if name in installed("precisions"):
        made: Precision = installed("precisions")[name](device)
        return made
    if name == "32-true":
        return Precision()
    if name == "64-true":
        return DoublePrecision()
    if name == "float8":
        from arclight.fabric.precision.low_bit import Float8Precision

        return Float8Precision(device)
    if name.startswith("transformer-engine"):
        from arclight.fabric.precision.low_bit import TransformerEnginePrecision

        return TransformerEnginePrecision(weights_dtype=torch.float16 if name.endswith("16") else torch.bfloat16)
    return MixedPrecision(name, device) if name.endswith("mixed") else HalfPrecision(name)


def faster_precision(device: str) -> str:
    """Return ``bf16-mixed`` if it is faster on this kind of device, else ``32-true``.

    On a CPU a convolution is timed, forward and backward: bfloat16 must take less than 1/1.2 of the time. On CUDA devices it is chosen if
    they support it, on others never.
    """
    if device == "cuda":
        return "bf16-mixed" if torch.cuda.is_bf16_supported() else "32-true"
    if device != "cpu":
        return "32-true"
    seconds = {dtype: _time_convolution(dtype) for dtype in (torch.float32, torch.bfloat16)}
    return "bf16-mixed" if seconds[torch.bfloat16] < seconds[torch.float32] / 1.2 else "32-true"


def _time_convolution(dtype: torch.dtype) -> float:
    """Time the fastest of five forward and backward passes, in seconds."""
    images = torch.ones(4, 64, 40, 40, dtype=dtype).contiguous(memory_format=torch.channels_last)
    weight = torch.ones(64, 64, 3, 3, dtype=dtype).contiguous(memory_format=torch.channels_last).requires_grad_()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        nn.functional.conv2d(images, weight, padding=1).sum().backward()
        times.append(time.perf_counter() - start)
    return min(times)
