"""Estimate the curvature of the loss from two consecutive optimizer steps.

A recipe's ``[[monitors]]`` builds it (`Curvature` of ``callbacks.settings``), or users pass it. Keys of logged values stay. Between two
steps it keeps weights and gradients in memory; training keeps its bits.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from arclight.fabric.distributed.dtensor import is_sharded
from arclight.fabric.errors import MisconfigurationError
from arclight.trainer.callbacks.monitoring.step_monitor import StepMonitor

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer


class CurvatureMonitor(StepMonitor):
    """Log Barzilai-Borwein step sizes and the gradient's Lipschitz constant every n steps.

    The keys are ``curvature/bb_long``, ``curvature/bb_short`` and ``curvature/lipschitz``.

    With s and y the changes of weights and of gradients (before they are clipped) from the step before: the long and the short step
    size of Barzilai and Borwein (1988), s.s / s.y and s.y / y.y, and the local Lipschitz constant of the gradient, |y| / |s|. On a
    quadratic with the Hessian H, 1 / bb_long is a Rayleigh quotient of H and lipschitz is at most its largest eigenvalue. The two
    gradients are those of two batches, so y has their noise in it.

    Between the two steps the weights and gradients of the first are kept, in memory. No pass is added and training keeps its bits.
    Steps that leave the weights as they are give no estimate. Raises MisconfigurationError before the first step for several optimizers, and
    if weights are sharded or cut into stages.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        super().__init__(every_n_steps)
        self._reset()

    def _reset(self) -> None:
        self._kept_at = -1
        self._kept: dict[Tensor, tuple[Tensor, Tensor]] = {}
        self._values: dict[str, float] = {}

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        if len(trainer.optimizers) > 1:
            raise MisconfigurationError(
                f"curvature is estimated along the steps of one optimizer, and this run has {len(trainer.optimizers)}: leave it out"
            )
        if trainer.strategy.in_stages or is_sharded(pl_module):
            raise MisconfigurationError(
                "curvature needs all weights on each process, and here they are sharded or cut into stages: leave it out, or train on "
                'strategy = "ddp" or a plan with dp_replicate alone'
            )
        self._reset()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Module, optimizer: Optimizer) -> None:
        step = trainer.global_step + 1
        if self._kept_at == step - 1 and self.is_due(step):
            self._values = self._estimates()
        if self.is_due(step + 1):
            held = (parameter for group in optimizer.param_groups for parameter in group["params"])
            self._kept = {p: (p.detach().clone(), p.grad.detach().clone()) for p in held if p.grad is not None}
            self._kept_at = step
        else:
            self._kept = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._values and self.is_due(trainer.global_step):
            self.publish(trainer, pl_module, self._values)
            self._values = {}

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._reset()

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        self._reset()

    @torch.no_grad()
    def _estimates(self) -> dict[str, float]:
        pairs = [
            ((p.detach().double() - weight.double()).flatten(), (p.grad.double() - gradient.double()).flatten())
            for p, (weight, gradient) in self._kept.items()
            if p.grad is not None
        ]
        if not pairs:
            return {}
        products = torch.stack([torch.stack((s.dot(s), s.dot(y), y.dot(y))) for s, y in pairs])
        return estimates(*products.sum(0).tolist())


def estimates(ss: float, sy: float, yy: float) -> dict[str, float]:
    """Return the estimates from the products s.s, s.y and y.y, without divisions by zero."""
    found = {"bb_long": (ss, sy), "bb_short": (sy, yy), "lipschitz": (math.sqrt(yy), math.sqrt(ss))}
    return {f"curvature/{name}": over / under for name, (over, under) in found.items() if ss and under}
