"""How a module takes part in its own optimization: what it may override, and what it calls in a step that runs its optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.optim import Optimizer

if TYPE_CHECKING:
    from arclight.trainer.loop.optimizers import ManagedOptimizer
    from arclight.trainer.module import Module


class Optimizing:
    """Backward, clipping and optimizers of a :class:`~arclight.trainer.module.Module`."""

    automatic_optimization: bool
    trainer: Any
    _fabric: Any
    _fabric_optimizers: list[Any]

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Backward in a ``training_step`` that runs its optimizers itself; scales the loss where precision asks for it.

        Raises MisconfigurationError in automatic optimization.
        """
        from arclight.trainer.loop.gradients import manual_backward

        manual_backward(self.trainer, cast("Module", self), loss, *args, **kwargs)

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Optimizer | ManagedOptimizer,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Run the optimizer. The closure, which every override must pass on or call, runs forward and backward."""
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
        scheduler.step() if metric is None else scheduler.step(metric)

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        self.clip_gradients(
            optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm=gradient_clip_algorithm
        )

    def clip_gradients(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip the gradients of ``optimizer``'s parameters by their global ``norm`` or element ``value``.

        In manual optimization call it between backward and step. Raises MisconfigurationError where the trainer was told to
        clip in another way.
        """
        from arclight.trainer.loop.gradients import clip_as_asked

        if self._fabric is not None:
            by_value = (gradient_clip_algorithm or "norm") == "value"
            limits = {
                "clip_val": gradient_clip_val if by_value else None,
                "max_norm": None if by_value else gradient_clip_val,
            }
            self._fabric.clip_gradients(self, optimizer, **limits)
            return
        clip_as_asked(self.trainer, optimizer, gradient_clip_val, gradient_clip_algorithm)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """The optimizer, or the list of them. Their ``step`` runs hooks, takes out the scale of 16-bit gradients and is counted.

        With ``use_pl_optimizer=False`` they are as ``configure_optimizers`` returned them.
        """
        optimizers: list[Any]
        if self._fabric is not None:
            optimizers = self._fabric_optimizers
        else:
            optimizers = list(self.trainer.managed_optimizers if use_pl_optimizer else self.trainer.optimizers)
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def lr_schedulers(self) -> Any:
        """The scheduler, the list of them, or None."""
        schedulers = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return None if not schedulers else schedulers[0] if len(schedulers) == 1 else schedulers

    def toggle_optimizer(self, optimizer: Optimizer | ManagedOptimizer) -> None:
        """Let only ``optimizer``'s parameters require gradients, until :meth:`untoggle_optimizer`."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        others = [
            p for o in self.trainer.optimizers for group in o.param_groups for p in group["params"] if id(p) not in own
        ]
        self.__dict__.setdefault("_toggled", []).extend((p, p.requires_grad) for p in others)
        for parameter in others:
            parameter.requires_grad = False

    def untoggle_optimizer(self, optimizer: Optimizer | ManagedOptimizer) -> None:
        for parameter, required in reversed(self.__dict__.pop("_toggled", [])):
            parameter.requires_grad = required

    @contextmanager
    def toggled_optimizer(self, optimizer: Optimizer | ManagedOptimizer) -> Iterator[None]:
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)
