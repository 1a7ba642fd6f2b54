"""How far training has come: a handful of integers, advanced before anything is saved."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from arclight.checkpoint import CheckpointError
from arclight.trainer.plain import known_fields


@dataclass
class Progress:
    """Position of a fit. A checkpoint holds these numbers as they are; a resume starts from them."""

    epoch: int = 0
    """Epochs completed, which is the number of the one under way."""
    batch: int = 0
    """Batches of this epoch that are done."""
    global_step: int = 0
    """Optimizer updates completed."""
    batches: int = 0
    """Batches seen in all."""
    samples: int = 0
    """Samples in them, on this process."""
    tokens: int = 0
    """Tokens in them, on this process, where batches begin with a tensor (B, T) of token ids."""
    validated_at: int = -1
    """Batches of this epoch that were done at its last validation, -1 before the first."""
    plateau_step: int = -1
    """``global_step`` up to which schedulers that watch a value at every update have been stepped, -1 where that is not known."""
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

    def next_epoch(self) -> None:
        self.epoch, self.batch, self.validated_at, self.ended = self.epoch + 1, 0, -1, False
