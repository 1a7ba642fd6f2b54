"""The plan: into how many parts each dimension of the work is cut (no torch here: a recipe is read without it)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


class PlanError(ValueError):
    """A plan that cannot be carried out, said before anything is built: what does not fit, and what would."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one model is spread over ``pp * dp_replicate * dp_shard * cp * tp`` processes.

    The mesh has its dimensions in that order, the innermost (fastest links) last. ``ep`` is no dimension of its own: it
    borrows from ``dp_shard * cp``.
    """

    dp_replicate: int = 1
    """Groups that hold the same weights and other samples."""
    dp_shard: int = 1
    """Processes over which weights, gradients and optimizer state of such a group are spread (FSDP)."""
    cp: int = 1
    """Parts that each sequence is cut into (context parallel)."""
    tp: int = 1
    """Parts that each layer's matrices are cut into (tensor and sequence parallel)."""
    pp: int = 1
    """Pipeline stages that the layers are cut into."""
    ep: int = 1
    """Parts that the experts of a mixture are shared out to; divides dp_shard * cp."""

    def __post_init__(self) -> None:
        for name in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise PlanError(f"{name} must be a positive integer, got {value!r}")
        if (self.dp_shard * self.cp) % self.ep:
            raise PlanError(
                f"ep = {self.ep} must divide dp_shard * cp = {self.dp_shard * self.cp}: experts are shared out among those processes"
            )

    @property
    def world_size(self) -> int:
        """Processes that the plan needs."""
        return prod((self.dp_replicate, self.dp_shard, self.cp, self.tp, self.pp))

    @property
    def data_parallel(self) -> int:
        """Processes that read different samples."""
        return self.dp_replicate * self.dp_shard
