"""Define the interface of precisions; full precision adds nothing to a step.

The Trainer's loops, `Fabric` and strategies call a precision at each step; `mixed`, `true_precision`, `low_bit` and users' own derive from
`Precision`. Names of methods are Lightning's and stay; ``state_dict`` is in checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

Step = TypeVar("Step", bound=Callable[..., Any])


class Precision:
    """Base class of precisions: parameters and arithmetic in float32.

    A user's own is passed in ``plugins=``.
    """

    precision: str = "32-true"
    """Its name in ``precision=``."""

    dtype = torch.float32
    """The type that parameters are stored in (`TransformerEnginePrecision` has ``weights_dtype`` instead)."""

    scaler: torch.amp.GradScaler | None = None

    @property
    def name(self) -> str:
        return str(self.precision)

    # -- modules and tensors ---------------------------------------------------------------------------------------

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert ``module`` to this precision's storage type (in place)."""
        return module

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Return a context in which new floating tensors get this precision's storage type."""
        return nullcontext()

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Return a context in which new modules' parameters get this precision's storage type."""
        return self.tensor_init_context()

    # -- forward ---------------------------------------------------------------------------------------------------

    def convert_input(self, data: Any) -> Any:
        """Return a batch with its floating tensors in the type that the model computes in."""
        return data

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the context in which forward runs."""
        return nullcontext()

    def convert_output(self, data: Any) -> Any:
        """Convert the floating tensors of a forward's output to the dtype of losses."""
        return data

    def wrap(self, step: Step) -> Step:
        """Wrap ``step`` in the forward context; return it unchanged if there is none."""
        if type(self).forward_context is Precision.forward_context:
            return step

        def run(*arguments: Any, **options: Any) -> Any:
            with self.forward_context():
                return step(*arguments, **options)

        return run  # type: ignore[return-value]

    # -- backward and step -----------------------------------------------------------------------------------------

    def pre_backward(self, tensor: torch.Tensor, module: nn.Module | None) -> None:
        """Run before :meth:`backward`."""

    def backward(self, tensor: torch.Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of ``tensor``; further arguments are those of ``Tensor.backward``."""
        tensor.backward(*args, **kwargs)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return ``loss`` as :meth:`backward` scales it; for a backward of another kind."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def post_backward(self, tensor: torch.Tensor, module: nn.Module | None) -> None:
        """Run after :meth:`backward`."""

    def optimizer_step(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        """Call ``optimizer.step(**kwargs)`` on unscaled gradients."""
        return optimizer.step(**kwargs)

    def main_params(self, optimizer: Optimizer) -> Iterator[nn.Parameter]:
        """Yield the parameters that ``optimizer`` changes."""
        return (parameter for group in optimizer.param_groups for parameter in group["params"])

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Unscale the gradients before they are clipped."""

    # -- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of :meth:`state_dict`."""

    def teardown(self) -> None:
        """Release what is no longer needed."""


class DefaultDtype(AbstractContextManager[None]):
    """Context in which new floating tensors get ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __enter__(self) -> None:
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *exception: object) -> None:
        torch.set_default_dtype(self.before)


def floats_to(data: Any, dtype: torch.dtype) -> Any:
    """Return ``data`` with its floating tensors in ``dtype``."""
    from arclight.fabric.batches import map_tensors

    return map_tensors(data, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
