"""Collect the outputs of predict, with the sample indices of each batch.

The loop of predict (`evaluation`) fills it; ``trainer.predict`` returns `predictions`, and prediction writers get the indices. Its
attributes are ``trainer.predict_loop``'s, under Lightning's names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from arclight.data import ResumableCombination, ResumableLoader
from arclight.fabric.batches import map_tensors
from arclight.fabric.rank_zero import rank_zero_warn


@dataclass
class Predictions:
    """The state of ``trainer.predict``, for callbacks that write what it gives."""

    loaders: Sequence[ResumableLoader | ResumableCombination] = ()
    return_predictions: bool = False
    """Whether outputs are kept for the caller."""
    keeps: bool = False
    outputs: list[list[Any]] = field(default_factory=list)
    """Outputs of the batches of each loader, on the host."""
    current_batch_indices: Any = None
    """Places in the data set of the samples of the newest batch; None if the data have no such places."""
    epoch_batch_indices: list[list[Any]] = field(default_factory=list)
    """Indices of every batch of each loader, kept for callbacks whose ``interval`` is the epoch."""
    _epochs: bool = False

    @classmethod
    def begin(
        cls, loaders: Sequence[ResumableLoader | ResumableCombination], keep: bool, *, writes: bool, at_epoch_end: bool
    ) -> Predictions:
        """Start collecting a prediction, with batch indices if they are known.

        ``writes``: a callback writes predictions, ``at_epoch_end``: one does so at the end.
        """
        known = [isinstance(loader, ResumableLoader) and loader.track_indices() for loader in loaders]
        if writes and not all(known):
            unknown = loaders[known.index(False)]
            kind = type(unknown.loader if isinstance(unknown, ResumableLoader) else unknown).__name__
            rank_zero_warn(f"Couldn't infer the batch indices fetched from your dataloader: `{kind}`")
        return cls(
            loaders, keep, keep or at_epoch_end, [[] for _ in loaders], None, [[] for _ in loaders], at_epoch_end
        )

    @property
    def predictions(self) -> list[Any]:
        """The outputs of the one loader, or a list of outputs for each of several."""
        return self.outputs[0] if len(self.outputs) == 1 else self.outputs

    def next_batch(self, number: int) -> None:
        """Record the sample indices of the next batch."""
        loader = self.loaders[number]
        indices = loader.indices if isinstance(loader, ResumableLoader) else None
        self.current_batch_indices = indices.popleft() if indices is not None else None
        if self._epochs:
            self.epoch_batch_indices[number].append(self.current_batch_indices)

    def add(self, output: Any, number: int) -> None:
        """Keep an output, if anybody wants it later."""
        if output is None:
            rank_zero_warn("predict returned None if it was on purpose, ignore this warning...")
        if self.keeps:
            self.outputs[number].append(map_tensors(output, _to_host))


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu()
