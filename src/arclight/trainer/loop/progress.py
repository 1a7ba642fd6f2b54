"""Count the progress of training, in integers that are advanced before anything is saved.

The loops advance it, callbacks and `ValidationSchedule` read it; federated clients set the step (`set_step`). Checkpoints hold its
fields: a new one needs a default. The words of status, entry point and stage are Lightning's, and hooks get them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum

from arclight.checkpoint import CheckpointError
from arclight.trainer.hparams import known_fields


@dataclass
class Progress:
    """Position of a fit, as a checkpoint saves it and a resume restores it."""

    epoch: int = 0
    """Epochs completed, which is the number of the one under way."""
    batch: int = 0
    """Batches of this epoch that are done."""
    global_step: int = 0
    """Optimizer updates completed; batches, of a module without an optimizer."""
    batches: int = 0
    """Batches seen in all."""
    samples: int = 0
    """Samples in them, on this process."""
    tokens: int = 0
    """Tokens in them, on this process, where batches begin with a tensor (B, T) of token ids."""
    validated_at: int = -1
    """Batches of this epoch that were done at its last validation, -1 before the first."""
    plateau_step: int = -1
    """``global_step`` up to which schedulers that watch a value at every update have been stepped, -1 if that is not known."""
    ended: bool = False
    """Whether this epoch's last batch, validation and schedules are done; only its end hooks remain."""

    def state_dict(self) -> dict[str, int | bool]:
        return dataclasses.asdict(self)

    def load_state_dict(self, state: dict[str, int | bool]) -> None:
        if missing := [name for name in ("epoch", "batch", "global_step") if name not in state]:
            raise CheckpointError(f"the checkpoint's progress lacks {', '.join(missing)}: resume from another one")
        for field in dataclasses.fields(self):
            setattr(self, field.name, field.default)
        for name, value in known_fields(Progress, state, "progress").items():
            setattr(self, name, value)
        if self.ended:
            self.next_epoch()

    def set_step(self, step: int) -> None:
        """Set the number of optimizer updates completed, for weights trained elsewhere."""
        self.global_step = step

    def next_epoch(self) -> None:
        self.epoch, self.batch, self.validated_at, self.ended = self.epoch + 1, 0, -1, False


class StopRun(Exception):  # noqa: N818 - no error
    """Raised by a hook once the run has reached its goal, to end it normally."""


class TrainerStatus(StrEnum):
    """State of the newest entry point."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"

    @property
    def stopped(self) -> bool:
        return self in (TrainerStatus.FINISHED, TrainerStatus.INTERRUPTED)


class TrainerFn(StrEnum):
    """The entry points."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class RunningStage(StrEnum):
    """Stage inside an entry point: a fit trains, validates, and may check its validation first."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    @property
    def evaluating(self) -> bool:
        return self in (RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.SANITY_CHECKING)

    @property
    def dataloader_prefix(self) -> str | None:
        """The word before ``_dataloader`` in the hook that gives this stage's data."""
        if self in (RunningStage.VALIDATING, RunningStage.SANITY_CHECKING):
            return "val"
        return self.value


@dataclass
class TrainerState:
    """Status, entry point (None before the first) and stage (None between two)."""

    status: TrainerStatus = TrainerStatus.INITIALIZING
    fn: TrainerFn | None = None
    stage: RunningStage | None = None

    @property
    def finished(self) -> bool:
        return self.status == TrainerStatus.FINISHED

    @property
    def stopped(self) -> bool:
        return self.status.stopped
