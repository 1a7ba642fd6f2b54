"""Pause a fit after a number of steps, so that the next fit continues it bit for bit.

The callback of federated clients (``federated.clients.round_callback``) derives from it: a round ends in a pause.
``loop.hooks.checkpoints_last`` orders it after all other callbacks. The next fit must give the bits of an unbroken one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from arclight.fabric.errors import MisconfigurationError
from arclight.trainer.callback import Callback
from arclight.trainer.loop.progress import StopRun

if TYPE_CHECKING:
    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer


class Pause(Callback):
    """Pause a fit after ``steps`` more optimizer steps and keep the state to resume it from.

    It may be anywhere within an epoch::

        pause = Pause()
        trainer = Trainer(callbacks=[pause], max_epochs=-1)
        pause.steps = 50
        trainer.fit(module, datamodule=data)
        trainer.fit(module, datamodule=data, ckpt_path=pause.state)  # 50 more

    A paused fit runs teardown and saves loggers but skips the epoch-end and train-end hooks. A validation that is due
    at that moment is the first thing that the next fit does. With ``steps=None`` fits run to their limits. Set the same
    ``steps`` in all processes.
    """

    runs_last = runs_after_checkpoints = True

    def __init__(self, steps: int | None = None) -> None:
        self.steps = steps
        self.state: dict[str, Any] | None = None
        """Result of :meth:`Trainer.capture` at the pause, for ``ckpt_path``; None if the newest fit was not paused."""
        self._until: int | None = None

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        if stage != "fit":
            return
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"Pause(steps={self.steps}): a fit is broken off after one step at least")
        if self.steps is not None and not trainer.strategy.launcher.runs_in_this_process:
            raise MisconfigurationError(
                f"strategy={trainer.strategy.name!r} trains in processes that end with the fit, and the state to continue from ends "
                "with them: start the processes from outside (torchrun), or use a strategy that lives in this one"
            )
        self.state, self._until = None, None

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._until = None if self.steps is None else trainer.global_step + self.steps

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._break_off(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._break_off(trainer)  # the step of a window that ends with its epoch may come after the last batch's hooks

    def _break_off(self, trainer: Trainer) -> None:
        if self._until is None or trainer.global_step < self._until:
            return
        self._until = None
        self.state = trainer.capture()
        trainer.checkpoint_io.teardown()
        for logger in trainer.loggers if trainer.is_global_zero else []:
            logger.save()
        raise StopRun
