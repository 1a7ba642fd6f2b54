"""Measure norms and kurtosis of modules' outputs during training.

A recipe's ``[[monitors]]`` builds it (`Activations` of ``callbacks.settings``), or users pass it. Keys of logged values stay; training
must not change: no random numbers are drawn.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from arclight.fabric.errors import MisconfigurationError
from arclight.parallel.blocks import repeated_blocks
from arclight.trainer.callbacks.monitoring.step_monitor import StepMonitor

if TYPE_CHECKING:
    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer


class ActivationMonitor(StepMonitor):
    """Log ``activations/<module>/norm`` and ``kurtosis`` of every n-th optimizer step.

    The norm is the L2 norm of a feature vector, mean over samples and positions; features are the last dimension of a module's output
    (its first tensor), or the second of four and more, as in (N, C, H, W). The kurtosis is the fourth central moment of all numbers
    over the square of the second: 3 for normal ones, more if few are large (outliers that cost quantized models their
    accuracy), 1 at least. Both are means over the step's passes and over ranks.

    modules: a regular expression that whole names match; empty: the repeated blocks. Hooks are on the modules during measured steps
    only, and training keeps its bits. Raises MisconfigurationError before the first step if no module is called so, under
    torch.compile, which would compile hooked modules again, for stages of a pipeline, and for modules inside of blocks that
    tensor parallelism cuts, whose outputs are parts of features.
    """

    def __init__(self, every_n_steps: int = 50, modules: str = "") -> None:
        super().__init__(every_n_steps)
        try:
            self._pattern = re.compile(modules)
        except re.error as error:
            raise MisconfigurationError(f"modules = {modules!r} is not a regular expression: {error}") from error
        self.modules = modules
        self._measured: dict[str, nn.Module] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._sums: dict[str, Tensor] = {}
        self._step = -1

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        if trainer.strategy.in_stages:
            raise MisconfigurationError(
                "activations need the whole model on each process: leave them out under plan.pp"
            )
        everything = dict(pl_module.named_modules())
        if any(
            module._compiled_call_impl is not None or hasattr(module, "_orig_mod") for module in everything.values()
        ):
            raise MisconfigurationError(
                "activations are measured by hooks, for which a compiled model compiles again: leave one out"
            )
        named = everything.items() if self.modules else repeated_blocks(pl_module)
        self._measured = {name: module for name, module in named if not self.modules or self._pattern.fullmatch(name)}
        plan = getattr(trainer.strategy, "plan", None)
        whole = {module for _, module in repeated_blocks(pl_module)}
        inner = next((name for name, module in self._measured.items() if module not in whole), None)
        if inner is not None and plan is not None and plan.tp > 1:
            raise MisconfigurationError(
                f"plan.tp = {plan.tp} cuts features of modules such as {inner!r} among processes, and a part of a vector has another norm: leave "
                "modules out, which measures whole blocks"
            )
        if not self._measured:
            wanted = f"is called {self.modules!r}" if self.modules else "is a repeated block"
            raise MisconfigurationError(
                f"no module {wanted}: set modules to a regular expression of names, such as {next(reversed(everything))!r}"
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        if not self._handles and self.is_due(trainer.global_step + 1):
            self._step = trainer.global_step + 1
            device = trainer.strategy.root_device
            for name, module in self._measured.items():
                self._sums[name] = torch.zeros(3, dtype=torch.float32, device=device)
                self._handles.append(module.register_forward_hook(self._hook(name)))

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self._handles or trainer.global_step < self._step:  # a window of several batches goes on
            return
        names, sums = list(self._sums), torch.stack(list(self._sums.values()))
        self._remove()
        norms, kurtoses, passes = trainer.strategy.all_reduce(sums, reduce_op="sum").T.tolist()
        values: dict[str, float] = {}
        for name, norm, kurtosis, count in zip(names, norms, kurtoses, passes, strict=True):
            if count:
                values |= {f"activations/{name}/norm": norm / count, f"activations/{name}/kurtosis": kurtosis / count}
        self.publish(trainer, pl_module, values)

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._remove()

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        self._remove()

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._sums = [], {}

    def _hook(self, name: str) -> Any:
        def add(module: nn.Module, inputs: Any, output: Any) -> None:
            tensor = first_tensor(output)
            if module.training and tensor is not None:  # a validation within the step is no part of it
                self._sums[name] += norm_and_kurtosis(tensor)

        return add


def first_tensor(output: Any) -> Tensor | None:
    """Return the first tensor of a module's output."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() and output.numel() and output.ndim else None
    parts: Iterable[Any] = (
        output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else ()
    )
    return next((found for part in parts if (found := first_tensor(part)) is not None), None)


@torch.no_grad()
def norm_and_kurtosis(output: Tensor) -> Tensor:
    """Return the mean norm, the kurtosis and 1, to be summed over batches: (3,) float32.

    The kurtosis of equal numbers is NaN.
    """
    x = (output.full_tensor() if isinstance(output, DTensor) else output).detach().float()
    norm = x.norm(dim=1 if x.ndim >= 4 else -1).mean()
    square = (x - x.mean()).square()
    return torch.stack((norm, square.square().mean() / square.mean().square(), torch.ones_like(norm)))
