"""Arithmetic of forward and backward: full, half, double, mixed.

A precision is a handful of functions that a loop composes once; full precision adds nothing to a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

Step = TypeVar("Step", bound=Callable[..., Any])


class Precision:
    """Parameters and arithmetic in one dtype, float32 unless a subclass says otherwise."""

    name = "32-true"
    dtype = torch.float32
    scaler: torch.amp.GradScaler | None = None

    def convert_module(self, module: nn.Module) -> nn.Module:
        """``module`` with its parameters in this precision's storage type (in place)."""
        return module

    def convert_input(self, batch: Any) -> Any:
        """``batch`` with its floating tensors in the type that the model computes in."""
        return batch

    def convert_output(self, output: Any) -> Any:
        """What forward gave, with its floating tensors in the type that losses are computed in."""
        return output

    def forward_context(self) -> AbstractContextManager[Any]:
        """Context in which forward runs."""
        return nullcontext()

    def init_context(self) -> AbstractContextManager[Any]:
        """Context in which new modules get parameters of this precision's storage type."""
        return nullcontext() if self.dtype is torch.float32 else DefaultDtype(self.dtype)

    def wrap(self, step: Step) -> Step:
        """``step`` run in the forward context; the very same function where there is nothing to do."""
        return step

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave; full precision keeps no state."""


class HalfPrecision(Precision):
    """Everything in one non-default floating type: ``bf16-true``, ``16-true`` or ``64-true``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dtype = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}[name]

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module.to(self.dtype)

    def convert_input(self, batch: Any) -> Any:
        from arclight.fabric.batches import map_tensors

        return map_tensors(batch, lambda t: t.to(self.dtype) if t.is_floating_point() else t)

    def convert_output(self, output: Any) -> Any:
        return in_default_dtype(output)

    def wrap(self, step: Step) -> Step:
        """``step`` with this type as the default of tensors that it makes itself."""

        def run(*arguments: Any, **options: Any) -> Any:
            with DefaultDtype(self.dtype):
                return step(*arguments, **options)

        return run  # type: ignore[return-value]

    def forward_context(self) -> AbstractContextManager[Any]:
        return DefaultDtype(self.dtype)


DoublePrecision = HalfPrecision
"""Lightning's name for ``64-true``; one class serves every single-type precision here."""


class MixedPrecision(Precision):
    """Parameters in float32, matrix products in a half type under autocast; float16 gradients are scaled on CUDA."""

    def __init__(self, name: str, device: str) -> None:
        self.name, self.device = name, device
        self.compute_dtype = torch.bfloat16 if name == "bf16-mixed" else torch.float16
        if name == "16-mixed":
            self.scaler = torch.amp.GradScaler(device)

    def forward_context(self) -> AbstractContextManager[Any]:
        # Weight casts are not cached: a cache entry made under no_grad would cut the graph of a later forward.
        return torch.autocast(self.device, self.compute_dtype, cache_enabled=False)

    def convert_output(self, output: Any) -> Any:
        return in_default_dtype(output)

    def wrap(self, step: Step) -> Step:
        device, dtype = self.device, self.compute_dtype

        def run(*arguments: Any, **options: Any) -> Any:
            with torch.autocast(device, dtype, cache_enabled=False):
                return step(*arguments, **options)

        return run  # type: ignore[return-value]

    def state_dict(self) -> dict[str, Any]:
        return self.scaler.state_dict() if self.scaler is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)


class ScaledOptimizer:
    """An optimizer for gradients that a scaler has scaled: ``step`` takes the scale out, and skips gradients that overflowed.

    Everything else is the optimizer's own.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        self.optimizer, self.scaler = optimizer, scaler

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)


_ALIASES = {"32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"}
NAMES = ("32-true", "64-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed")


def resolve_precision(choice: str | int | Precision | None, device: str) -> Precision:
    """The precision a user asked for on a kind of device; ``auto`` measures. Raises ValueError for an unknown name."""
    if isinstance(choice, Precision):
        return choice
    if choice == "auto":
        choice = faster_precision(device)
    name = _ALIASES.get(str(choice), str(choice)) if choice is not None else "32-true"
    if name not in NAMES:
        raise ValueError(f"precision={choice!r} is not known; choose auto, {', '.join(NAMES)}, 16, 32, 64, bf16")
    if name == "32-true":
        return Precision()
    return MixedPrecision(name, device) if name.endswith("mixed") else HalfPrecision(name)


def faster_precision(device: str) -> str:
    """``bf16-mixed`` where a convolution's forward and backward is at least a fifth faster in it than in float32."""
    if device == "cuda":
        return "bf16-mixed" if torch.cuda.is_bf16_supported() else "32-true"
    if device != "cpu":
        return "32-true"
    seconds = {dtype: _time_convolution(dtype) for dtype in (torch.float32, torch.bfloat16)}
    return "bf16-mixed" if seconds[torch.bfloat16] < seconds[torch.float32] / 1.2 else "32-true"


def _time_convolution(dtype: torch.dtype) -> float:
    """Seconds of the fastest of five forward and backward passes; the layout is the one that bfloat16 kernels want."""
    images = torch.ones(4, 64, 40, 40, dtype=dtype).contiguous(memory_format=torch.channels_last)
    weight = torch.ones(64, 64, 3, 3, dtype=dtype).contiguous(memory_format=torch.channels_last).requires_grad_()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        nn.functional.conv2d(images, weight, padding=1).sum().backward()
        times.append(time.perf_counter() - start)
    return min(times)


def in_default_dtype(tree: Any) -> Any:
    """``tree`` with its floating tensors in torch's default type."""
    from arclight.fabric.batches import map_tensors

    dtype = torch.get_default_dtype()
    return map_tensors(tree, lambda t: t.to(dtype) if t.is_floating_point() else t)


class DefaultDtype(AbstractContextManager[None]):
    """New floating tensors get ``dtype`` inside the block."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __enter__(self) -> None:
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *exception: object) -> None:
        torch.set_default_dtype(self.before)
