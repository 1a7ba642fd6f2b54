"""Mix training images of further data sets into each epoch, each with a weight.

Tables ``mix`` of a recipe (``tasks.settings``) are `MixedData`, whose field names must stay; `dataset` maps the places of an epoch to images by
`EpochMix`, whose random orders must stay, or resumed runs see other images. No torch or OpenCV here: a recipe is read without them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from arclight._intervals import Checked, Interval

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from arclight.vision.data.data_yaml import DataSpec


@dataclass(frozen=True, kw_only=True)
class MixedData(Checked):
    """A further data set whose training images are mixed into each epoch."""

    data: Path
    """The data set: a data.yaml with train and names."""
    weight: Annotated[float, Interval(gt=0, le=1000)] = 1.0
    """Images drawn from it in each epoch, per image of the task's own data set."""
    classes: dict[str, str] = dataclasses.field(default_factory=dict)
    """Which of the task's classes each of its classes is, where their names differ, such as {qr_code = "qr"}."""

    def class_numbers(self, spec: DataSpec, names: Sequence[str]) -> list[int]:
        """Return the number in ``names`` of each class of ``spec``.

        Raises DatasetError for a class that is none of them.
        """
        from arclight.vision.data.labels import DatasetError

        if unknown := [name for name in self.classes if name not in spec.names]:
            raise DatasetError(f"mix: {spec.file} has no class {unknown[0]!r}; it has {', '.join(spec.names)}")
        renamed = [self.classes.get(name, name) for name in spec.names]
        for name, own in zip(spec.names, renamed, strict=True):
            if own not in names:
                raise DatasetError(
                    f"mix: class {name!r} of {spec.file} is not one of {', '.join(names)}: say which it is, "
                    f'classes = {{{name} = "{names[0]}"}}'
                )
        return [list(names).index(name) for name in renamed]


class EpochMix:
    """Map the places of an epoch to images: all of the first source, the others by weight.

    Each further source is gone through in a random order, a new one each time around, over as many epochs as that takes. An
    image is a function of the place and the epoch alone: not of the process, nor of what was loaded before.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float]) -> None:
        """Initialise the mix for sources of ``sizes`` images, the first of which is used in full.

        ``weights``: of each source but the first, as a share of the first one's images.
        """
        self.sizes = tuple(sizes)
        self.counts = (sizes[0], *(max(1, round(weight * sizes[0])) for weight in weights))

    def __len__(self) -> int:
        return sum(self.counts)

    def image(self, place: int, epoch: int) -> int:
        """Return the number of the image, over all sources, that lies at ``place`` in ``epoch``."""
        source, first = 0, 0
        while place >= self.counts[source]:
            place -= self.counts[source]
            first += self.sizes[source]
            source += 1
        if source == 0:
            return place
        turn, position = divmod(epoch * self.counts[source] + place, self.sizes[source])
        return first + int(_order(source, turn, self.sizes[source])[position])


@functools.lru_cache(maxsize=32)
def _order(source: int, turn: int, size: int) -> NDArray[Any]:
    import numpy as np

    return np.random.default_rng((source, turn)).permutation(size)
