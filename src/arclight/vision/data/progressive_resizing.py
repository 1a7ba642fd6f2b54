"""Define the settings of progressive resizing, without importing torch.

The table ``progressive_resizing`` of a recipe (``tasks.settings``) is one; ``data.dataset`` calls `scale` for the image size of each epoch.
Field names are recipe keys and stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from arclight._intervals import Checked, Fraction, Interval


@dataclass(frozen=True, kw_only=True)
class ProgressiveResizing(Checked):
    """Settings of progressive resizing: train on small images first, then on ever larger ones.

    The fields are those of MosaicML Composer's ProgressiveResizing. The side of an epoch's images, a multiple of the coarsest stride, is
    ``initial_scale`` of image_size until ``delay_fraction`` of all epochs, grows in a straight line, and is image_size in the last
    ``finetune_fraction``, at least in the last epoch.
    """

    initial_scale: Annotated[float, Interval(gt=0, lt=1)] = 0.5
    """Side of the first images, as a share of image_size."""
    delay_fraction: Fraction = 0.5
    """Share of all epochs that begin the training with images of that side."""
    finetune_fraction: Fraction = 0.2
    """Share of all epochs that end the training with images of image_size."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.delay_fraction + self.finetune_fraction > 1:
            raise ValueError(
                f"delay_fraction = {self.delay_fraction:g} and finetune_fraction = {self.finetune_fraction:g} are more than all epochs: "
                "make one of them smaller"
            )

    def scale(self, epoch: int, epochs: int) -> float:
        """Return the share of image_size that images of ``epoch`` (from 0) of ``epochs`` have."""
        last = min(epochs - 1, epochs - round(self.finetune_fraction * epochs))
        first = min(last, round(self.delay_fraction * epochs))
        grown = (epoch - first + 1) / (last - first + 1)
        return self.initial_scale + (1 - self.initial_scale) * min(max(grown, 0.0), 1.0)
