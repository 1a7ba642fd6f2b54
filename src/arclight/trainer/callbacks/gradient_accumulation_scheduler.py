"""Change the number of accumulated batches at given epochs.

Users pass it as a callback; it sets the trainer's ``accumulate_grad_batches``, for which ``loop.fit`` builds the step again. Name and
arguments are Lightning's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.rank_zero import rank_zero_warn
from arclight.trainer.callback import Callback
from arclight.trainer.loop.hooks import overridden
from arclight.trainer.module import Module

if TYPE_CHECKING:
    from arclight.trainer.trainer import Trainer


class GradientAccumulationScheduler(Callback):
    """Accumulate ``scheduling[epoch]`` batches from that epoch on (counted from 0).

    Before the first epoch that is named it is 1.

    ``GradientAccumulationScheduler({4: 2})`` steps after every batch in epochs 0 to 3 and after every second one later.
    The trainer's own ``accumulate_grad_batches`` must be 1, and is so again after fit.
    Raises TypeError for an empty schedule, MisconfigurationError for epochs below 0 and numbers of batches below 1,
    and when training begins RuntimeError for manual optimization, ValueError for a trainer with a number of its own.
    """

    def __init__(self, scheduling: dict[int, int]) -> None:
        if not scheduling:
            raise TypeError("GradientAccumulationScheduler({}): give a number of batches for at least one epoch")
        if any(not isinstance(epoch, int) or epoch < 0 for epoch in scheduling):
            raise MisconfigurationError(f"Epoch should be an int greater than or equal to 0. Got {list(scheduling)}.")
        if any(not isinstance(count, int) or count < 1 for count in scheduling.values()):
            raise MisconfigurationError(
                f"Accumulation factor should be an int greater than 0. Got {list(scheduling.values())}."
            )
        self.scheduling = {0: 1} | scheduling
        self.epochs = sorted(self.scheduling)
        self._in_charge = False

    def going_to_accumulate_grad_batches(self) -> bool:
        """Return True if any epoch accumulates."""
        return any(count > 1 for count in self.scheduling.values())

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Return the number of batches that ``epoch`` accumulates."""
        return self.scheduling[max(start for start in self.epochs if start <= epoch)]

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        if not pl_module.automatic_optimization:
            raise RuntimeError(
                "Automatic gradient accumulation and the `GradientAccumulationScheduler` are not for manual optimization: "
                "leave out the callback, or let the Trainer optimize"
            )
        own = [name for name in ("optimizer_step", "optimizer_zero_grad") if overridden(pl_module, name, Module)]
        if own and self.going_to_accumulate_grad_batches():
            rank_zero_warn(
                f"{type(pl_module).__name__} has its own {' and '.join(own)}, and gradients are accumulated: the hooks will "
                "not be called on every batch, but on every optimization step"
            )
        if trainer.accumulate_grad_batches != 1:
            raise ValueError(
                "You have set `accumulate_grad_batches` and are using the `GradientAccumulationScheduler`: leave one of "
                "the two out"
            )
        self._in_charge = True

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Module) -> None:
        trainer.use_accumulation(self.get_accumulate_grad_batches(trainer.current_epoch))

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        self._restore_accumulation(trainer)

    def teardown(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        self._restore_accumulation(trainer)

    def _restore_accumulation(self, trainer: Trainer) -> None:
        if self._in_charge:
            trainer.use_accumulation(1)
            self._in_charge = False
