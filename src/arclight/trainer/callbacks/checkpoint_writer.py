"""Carrying out what a ModelCheckpoint planned, at once or in the background."""

from __future__ import annotations

import os
from collections.abc import Container
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from arclight.checkpoint import CheckpointError
from arclight.checkpoint.remote import place
from arclight.fabric.strategies.sharded import ShardedStrategy
from arclight.trainer.callbacks.checkpoint_files import copy_checkpoint, is_within, link_checkpoint, remove_checkpoint
from arclight.trainer.callbacks.checkpoint_record import Plan
from arclight.trainer.checkpoint.checkpoint_io import AsyncCheckpointIO

if TYPE_CHECKING:
    from concurrent.futures import Future

    from arclight.trainer.checkpoint.checkpoint_io import CheckpointIO
    from arclight.trainer.trainer import Trainer


@dataclass
class Writer:
    """One save at a time: :meth:`write` begins it, :meth:`take` gives the plan back once it is complete."""

    asynchronous: bool | None
    """None: where processes write their own shares, and there is more than one."""
    plan: Plan | None = None
    """What is being written."""
    _future: Future[Any] | None = None
    _before: CheckpointIO | None = None

    def begin(self, trainer: Trainer) -> None:
        """Let ``trainer`` write in the background, if asked to."""
        self.plan = self._future = None
        strategy = trainer.strategy
        sharded = strategy.world_size > 1 and isinstance(strategy, ShardedStrategy) and strategy.saves_shares
        wanted = sharded if self.asynchronous is None else self.asynchronous
        if wanted and not isinstance(trainer.checkpoint_io, AsyncCheckpointIO):
            self._before, trainer.checkpoint_io = trainer.checkpoint_io, AsyncCheckpointIO(trainer.checkpoint_io)

    def end(self, trainer: Trainer, failed: bool = False) -> None:
        """Give the trainer back what it wrote with; other ranks' parts are not waited for long where the run has ``failed``."""
        if failed and isinstance(trainer.checkpoint_io, AsyncCheckpointIO):
            trainer.checkpoint_io.hurry()
        if self._before is not None:
            writer, trainer.checkpoint_io, self._before = trainer.checkpoint_io, self._before, None
            writer.teardown()

    def write(self, trainer: Trainer, plan: Plan, weights_only: bool) -> None:
        """Write the checkpoint of ``plan``, or begin to. A collective: every rank must call it."""
        if path := plan.path or plan.last:
            trainer.save_checkpoint(path, weights_only)
            self._future = getattr(trainer.checkpoint_io, "in_flight", None)
        self.plan = plan

    def is_complete(self, trainer: Trainer) -> bool:
        """Whether every rank knows without asking that nothing is being written any more."""
        if not isinstance(trainer.checkpoint_io, AsyncCheckpointIO):
            return True
        return trainer.world_size == 1 and (self._future is None or self._future.done())

    def take(self, trainer: Trainer, wait: bool = True) -> Plan | None:
        """The plan whose checkpoint is complete; None where there is none, or (without ``wait``) it is still written.

        Raises CheckpointError on every rank where writing in the background failed.
        """
        plan, future = self.plan, self._future
        if plan is None or not (wait or self.is_complete(trainer)):
            return None
        self.plan = self._future = None
        io, error = trainer.checkpoint_io, None
        if isinstance(io, AsyncCheckpointIO):
            try:
                if future is not None:
                    io.wait() if io.in_flight is future else future.result()
            except Exception as problem:  # whatever it is, every rank must hear of it
                error = problem
            if message := trainer.strategy.broadcast(None if error is None else str(error) or repr(error)):
                raise CheckpointError(message) from error
        return plan


def finish(trainer: Trainer, plan: Plan, folder: str, link: bool, keep: Container[str] = ()) -> None:
    """Bring ``last`` up to date and drop what the complete checkpoint replaces, but for ``keep``. For rank 0."""
    if plan.path and plan.last:
        (link_checkpoint if link else copy_checkpoint)(place(plan.path), place(plan.last))
    resumed = trainer.ckpt_path
    begun_from = "" if resumed is None else str(resumed) if "://" in str(resumed) else os.path.abspath(resumed)
    for path in plan.drop:  # never reach into another run's folder, nor take away what this one began from
        if is_within(path, folder) and path != begun_from and path not in keep:
            remove_checkpoint(place(path))
    for path in plan.superseded:
        if is_within(path, folder) and path not in keep:
            remove_checkpoint(place(path))
