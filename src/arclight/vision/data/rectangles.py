"""Group images of similar aspect ratios into rectangular batches with little padding.

The data module of detection gives its training loader an `AspectOrder` as sampler; `dataset` pads each sample to the frame that its
`FramedIndex` names. Random numbers come from torch's generator only, in an order that must stay: a resumed run sees the same batches, and
checkpoints hold the group size of their epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Sampler

from arclight.vision.data.letterbox import Frame, scaled_shape


class FramedIndex(NamedTuple):
    """A sample of a rectangular training batch."""

    sample: int
    """Number of the sample."""
    frame: Frame
    """Frame of the whole batch, on all ranks."""


class ResumedEpoch(NamedTuple):
    """An epoch that was begun before the run was resumed, perhaps with batches of another size."""

    epoch: int
    group: int
    """Samples of each group of like aspect ratios in it."""


def scaled_sides(shapes: ArrayLike, size: int) -> NDArray[np.int64]:
    """Return (k, 2) heights and widths of ``shapes`` (k, 2) scaled to a longer side of ``size``.

    Sides are at least 1 pixel.
    """
    different, place = np.unique(np.asarray(shapes, np.int64).reshape(-1, 2), axis=0, return_inverse=True)
    scaled = np.array([scaled_shape((height, width), size)[1:] for height, width in different.tolist()], np.int64)
    return scaled[place.reshape(-1)]


def smallest_frame(shapes: ArrayLike, size: int, stride: int) -> Frame:
    """Return the smallest multiples of ``stride`` that hold images of ``shapes`` (k, 2).

    ``size``: longer side of the scaled images, in pixels.
    """
    height, width = -(-scaled_sides(shapes, size).max(0) // stride) * stride
    return int(height), int(width)


class AspectOrder(Sampler[FramedIndex]):
    """Sample training images in batches of similar aspect ratios, over all ranks together.

    Which of them share a batch, and the order of batches, change with each epoch. Images beyond the last full batch are drawn at random and
    come last, so that ``drop_last`` drops no shape more often than others. Draws from torch's generator.

    shapes: gives (height, width) of the sample at each place of an epoch. batch: samples of a step on all ranks. sides: lengths of the
    longer side, of which each batch draws one. begun: an epoch that was begun with another number of samples per batch. A run that
    resumes in the middle of it with another world size keeps its order to the end, so that each sample is read once.
    """

    def __init__(
        self,
        shapes: Callable[[int], Sequence[tuple[int, int]]],
        batch: int,
        *,
        sides: Sequence[int],
        stride: int,
        begun: ResumedEpoch | None = None,
    ) -> None:
        self._shapes, self._sides, self._stride = shapes, list(sides), stride
        self.batch, self.epoch, self._begun = batch, 0, begun
        self._length = len(shapes(0))
        if begun is not None:
            self.resume(begun)

    def resume(self, begun: ResumedEpoch) -> None:
        """Keep the groups of an epoch that was begun."""
        self.epoch, self._begun = begun.epoch, begun

    @property
    def group(self) -> int:
        """Return the number of samples of a group of like aspect ratios in this epoch."""
        return self._begun.group if self._begun is not None and self._begun.epoch == self.epoch else self.batch

    def __len__(self) -> int:
        return self._length

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[FramedIndex]:
        shapes = np.asarray(self._shapes(self.epoch), np.int64)
        order = self._order(shapes)
        for start in range(0, len(order), self.batch):
            members = order[start : start + self.batch]
            side = self._sides[int(torch.randint(len(self._sides), ()))]
            frame = smallest_frame(shapes[members], side, self._stride)
            yield from (FramedIndex(member, frame) for member in members.tolist())

    def _order(self, shapes: NDArray[np.int64]) -> NDArray[np.int64]:
        # images that a batch of their own would pad alike are interchangeable
        frames = -(-scaled_sides(shapes, max(self._sides)) // self._stride)
        drawn = torch.randperm(len(shapes)).numpy()
        whole = len(drawn) - len(drawn) % self.group
        grouped, rest = drawn[:whole], drawn[whole:]
        ratio = frames[grouped, 0] / frames[grouped, 1]
        groups = grouped[np.argsort(ratio, kind="stable")].reshape(-1, self.group)
        return np.concatenate((groups[torch.randperm(len(groups)).numpy()].ravel(), rest))
