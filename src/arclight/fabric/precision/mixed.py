"""Define mixed precision: float32 parameters, autocast to 16 bits, gradient scaling.

`names` makes it for ``precision="16-mixed"`` and ``"bf16-mixed"``, or users do; `Float8Precision` derives from it. Loops, Fabric and
strategies call it around forward, backward and step. Class name and arguments are Lightning's and stay; the scaler's state is in
checkpoints.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer

from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.precision.base import Precision, Step, floats_to


class MixedPrecision(Precision):
    """Keep parameters in float32 and autocast to a half type: ``16-mixed`` or ``bf16-mixed``.

    Small gradients underflow in float16, so that the loss is scaled up by ``scaler`` (one is made if none is given) and
    steps whose gradients overflowed are skipped. The scale follows steps when the next loss is scaled (or the state is saved), not before:
    several optimizers may step after one backward, and all unscale by what it was scaled by. Raises ValueError for another name, or
    a scaler for bfloat16, which needs none.
    """

    def __init__(self, precision: str, device: str, scaler: torch.amp.GradScaler | None = None) -> None:
        if precision not in ("16-mixed", "bf16-mixed"):
            raise ValueError(
                f"Passed `MixedPrecision(precision={precision!r})`. Precision must be '16-mixed' or 'bf16-mixed'"
            )
        if scaler is not None and precision == "bf16-mixed":
            raise ValueError(f"`precision='bf16-mixed'` does not use a scaler, found {scaler}")
        self.precision, self.device = precision, device
        self.compute_dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float16
        self.scaler = torch.amp.GradScaler(device) if precision == "16-mixed" and scaler is None else scaler
        self._stepped: list[Optimizer] = []
        """Optimizers whose steps the scale has yet to follow."""

    def forward_context(self) -> AbstractContextManager[Any]:
        # Weight casts are not cached: a cache entry made under no_grad would cut the graph of a later forward.
        return torch.autocast(self.device, self.compute_dtype, cache_enabled=False)

    def convert_output(self, data: Any) -> Any:
        return floats_to(data, torch.get_default_dtype())

    def wrap(self, step: Step) -> Step:
        device, dtype = self.device, self.compute_dtype

        def run(*arguments: Any, **options: Any) -> Any:
            with torch.autocast(device, dtype, cache_enabled=False):
                return step(*arguments, **options)

        return run  # type: ignore[return-value]

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        self._update_scale()
        return super().scale(loss)

    def backward(self, tensor: torch.Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        super().backward(self.scale(tensor), model, *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        if self.scaler is None:
            return optimizer.step(**kwargs)
        if isinstance(optimizer, LBFGS):
            raise MisconfigurationError(
                "AMP and the LBFGS optimizer are not compatible: it calls the loss several times in a step, and scaled "
                "gradients need one call; use precision='bf16-mixed'"
            )
        if optimizer in self._stepped:
            self._update_scale()
        output = self.scaler.step(optimizer, **kwargs)
        self._stepped.append(optimizer)
        return output

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        if self.scaler is not None:
            if optimizer in self._stepped:
                self._update_scale()
            self.scaler.unscale_(optimizer)

    def _update_scale(self) -> None:
        """Raise or lower the scale by the steps since it was last updated."""
        if self.scaler is not None and self._stepped:
            self.scaler.update()
            self._stepped.clear()

    def state_dict(self) -> dict[str, Any]:
        self._update_scale()
        return self.scaler.state_dict() if self.scaler is not None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._update_scale()
        if self.scaler is not None and state_dict:
            self.scaler.load_state_dict(state_dict)
