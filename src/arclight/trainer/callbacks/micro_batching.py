"""Split batches that do not fit in memory into micro-batches that do.

Users pass it as a callback; ``loop.step`` takes the step that `build_step` returns. For a loss that is a mean over samples it must give
the gradients of the whole batch, up to rounding. Its state, the size found, is in checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from arclight.fabric.batches import batch_size_of, split_batch
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.memory import free_memory, is_out_of_memory
from arclight.trainer.callback import Callback
from arclight.trainer.loop.gradients import loss_of
from arclight.trainer.loop.hooks import overridden
from arclight.trainer.loop.step import Step, StepBuilder, StepParts, needs_closure
from arclight.trainer.module import Module

if TYPE_CHECKING:
    from arclight.trainer.trainer import Trainer


class MicroBatching(Callback):
    """Repeat a training step that runs out of memory in micro-batches, and keep to them.

    The batch is cut along the first dimension of its tensors, or by the module's ``part_of_batch(batch, start, stop)``, into
    parts of at most ``micro_batch_size`` samples, a number that is halved, with a notice, until the step succeeds;
    None to begin with whole batches. Each part's loss counts by its samples and the optimizer steps once, so that for
    a loss that is a mean over samples the gradients are those of the whole batch. What mixes samples (batch
    normalization, contrastive losses) sees the parts only. ``training_step`` and the hooks around backward run once
    for each part. A step that failed in backward had logged already: that batch counts twice in its epoch's means.

    Raises MisconfigurationError with manual optimization, a module without an optimizer, several processes (of which one
    alone could fail), ``accumulate_grad_batches`` above 1, optimizers that take a closure and an overridden
    ``optimizer_step``; the error itself if the batch cannot be cut any smaller.
    """

    def __init__(self, micro_batch_size: int | None = None) -> None:
        if micro_batch_size is not None and micro_batch_size < 1:
            raise MisconfigurationError(f"micro_batch_size must be at least 1, or None, got {micro_batch_size}")
        self.micro_batch_size = micro_batch_size

    def state_dict(self) -> dict[str, Any]:
        return {"micro_batch_size": self.micro_batch_size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.micro_batch_size = state_dict["micro_batch_size"]

    def build_step(self, trainer: Trainer, module: Module, forward: Step) -> Step:
        """Return the function that the loop calls per batch."""
        self._check(trainer, module)
        optimizer = trainer.optimizers[0]
        parts, progress = StepBuilder(trainer, module).parts(optimizer), trainer.progress

        def step(batch: Any, index: int) -> Any:
            size = batch_size_of(batch)
            while True:
                try:
                    output = _backward_in_parts(
                        trainer, forward, parts, batch, index, size, self.micro_batch_size or size
                    )
                except RuntimeError as error:
                    if not self._smaller(trainer, size, error):
                        raise
                else:
                    break
                optimizer.zero_grad(set_to_none=True)  # after the error is gone, with all that its frames held
                free_memory()
            if output is None:
                return None
            parts.update()
            progress.global_step += 1
            return output

        return step

    def _smaller(self, trainer: Trainer, size: int, error: RuntimeError) -> bool:
        """Halve the micro-batch if that is possible; return True to try again."""
        tried = min(size, self.micro_batch_size or size)
        if not is_out_of_memory(error) or tried <= 1:
            return False
        self.micro_batch_size = (tried + 1) // 2
        trainer.log_warning(
            f"out of memory with {tried} samples at once: from here on a batch is run in parts of at most "
            f"{self.micro_batch_size} samples, with one optimizer step for all of them"
        )
        return True

    def _check(self, trainer: Trainer, module: Module) -> None:
        optimizers: list[Optimizer] = trainer.optimizers
        obstacles = {
            "manual optimization": not module.automatic_optimization,
            "a module without an optimizer": not optimizers,
            "several processes": trainer.world_size > 1,
            "accumulate_grad_batches above 1": trainer.accumulate_grad_batches > 1 or trainer.window.count > 0,
            "an overridden optimizer_step": overridden(module, "optimizer_step", Module),
            "an optimizer that takes a closure": any(needs_closure(optimizer) for optimizer in optimizers),
        }
        for obstacle, there in obstacles.items():
            if there:
                raise MisconfigurationError(
                    f"MicroBatching does not go together with {obstacle}: leave out one of them, and choose a batch size that fits"
                )


def _backward_in_parts(
    trainer: Trainer, forward: Step, parts: StepParts, batch: Any, index: int, size: int, at_most: int
) -> Any:
    """Run forward and backward on each micro-batch, and return the last one's output.

    Its loss is that of the whole batch; None if no micro-batch had a loss. The gradients are those of the whole
    batch.
    """
    current, output = trainer.logged.batch, None
    total: torch.Tensor | None = None
    for action in parts.zero_first:
        action()
    for part, samples in split_batch(trainer.lightning_module, batch, size, -(-size // at_most)):
        if part is not batch:
            current.set(part)
        newest = forward(part, index)
        loss = loss_of(newest)
        if loss is None:
            continue
        share = samples / size
        parts.run_backward(loss, loss if share == 1 else loss * share)
        weighed = loss.detach() * share
        output, total = newest, weighed if total is None else total + weighed
    if total is None:
        return None
    current.set(batch)
    trainer.report_loss(total)
    return {**output, "loss": total} if isinstance(output, Mapping) else total
