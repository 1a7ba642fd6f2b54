"""Define image classification data sets, one folder per class, and their collated batches.

`ClassificationData` (``tasks.classification``) opens them. Out: images (N, 3, S, S) uint8 and class numbers. A batch is a function of
Python's random state and the indices, whatever the number of workers. Classes are numbered by their sorted names, which checkpoints keep.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from arclight.fabric.extras import require
from arclight.vision.data import augment as augmentation
from arclight.vision.data.augment_settings import CropAugment
from arclight.vision.data.data_yaml import did_you_mean
from arclight.vision.data.image_headers import file_header
from arclight.vision.data.images import MAX_PIXELS, SUFFIXES, Image, ImageError, decode_image, decode_reduced
from arclight.vision.data.labels import DatasetError, FileProblem

cv2 = require("cv2", extra="vision")
log = logging.getLogger(__name__)

SPLITS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}
"""Folders in which a split is looked for, in order."""
MAX_SUBSTITUTES = 10
"""Random crops that are drawn until one fits into the image; then its middle square is taken."""


@dataclass(frozen=True)
class ClassifiedImage:
    """One image of a batch."""

    image: Tensor
    """(3, S, S) uint8 RGB."""
    target: int
    """Class number."""
    path: str


@dataclass(frozen=True, kw_only=True)
class FolderReport:
    """Report on one split of a data set; ``print`` it."""

    name: str
    images: int
    corrupt: tuple[FileProblem, ...]
    """Images that cannot be read, skipped."""
    empty: tuple[str, ...]
    """Classes without an image in this split."""

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.images:,} images"]
        if self.empty:
            lines.append(f"  without an image: {', '.join(self.empty)}")
        lines += [f"  skipped {problem}" for problem in self.corrupt[:5]]
        if len(self.corrupt) > 5:
            lines.append(f"  and {len(self.corrupt) - 5} more")
        return "\n".join(lines)


def class_names(root: Path) -> list[str]:
    """Return the names of the class folders of the train split, sorted.

    Without a train split those of any other are taken. Raises DatasetError.
    """
    if not root.is_dir():
        raise DatasetError(
            f"{root} is not a folder{did_you_mean(root)}; a data set is DATA/train/CLASS/image.jpg, and so for val"
        )
    for split in SPLITS:
        folder = _folder(root, split)
        if folder is not None:
            names = sorted(
                found.name for found in folder.iterdir() if found.is_dir() and not found.name.startswith(".")
            )
            if len(names) < 2:
                raise DatasetError(
                    f"{folder} has folders of {len(names)} classes, and at least 2 are needed: {folder}/CLASS/image.jpg"
                )
            return names
    raise DatasetError(
        f"{root} has no folder train: a data set is {root}/train/CLASS/image.jpg, and so for val and test"
    )


def _folder(root: Path, split: str) -> Path | None:
    return next((root / name for name in SPLITS[split] if (root / name).is_dir()), None)


def collate(samples: Sequence[ClassifiedImage]) -> dict[str, Any]:
    """Collate samples to ``images`` (N, 3, S, S) uint8, ``targets`` (N,) and ``paths``.

    ``targets`` are class numbers.
    """
    return {
        "images": torch.stack([sample.image for sample in samples]) if samples else torch.empty(0, dtype=torch.uint8),
        "targets": torch.tensor([sample.target for sample in samples], dtype=torch.int64),
        "paths": [sample.path for sample in samples],
    }


class ImageFolder(Dataset[ClassifiedImage]):
    """Images with one class each: centre crops, or with ``augment`` random resized crops.

    What ``__getitems__`` returns is a function of the state of Python's ``random`` and the indices. A damaged image is reported
    once and counted in ``damaged``; in training the next readable one stands in for it, without ``augment`` its batch goes without it.
    """

    def __init__(
        self,
        images: Sequence[Path],
        targets: Sequence[int],
        *,
        image_size: int = 224,
        augment: CropAugment | None = None,
        cache: bool = False,
        report: FolderReport | None = None,
    ) -> None:
        if len(images) != len(targets) or not images:
            raise DatasetError(
                f"{len(images)} images and classes of {len(targets)}: each image needs one, and one must be"
            )
        self.images, self.targets, self.report = list(images), list(targets), report
        self.image_size, self.augment = image_size, augment
        self.epochs: float | None = None
        self._damaged = torch.zeros(len(self.images), dtype=torch.uint8).share_memory_()
        self._kept: dict[int, Image] | None = {} if cache else None

    @classmethod
    def open(cls, root: Path | str, split: str, names: Sequence[str], **settings: Any) -> ImageFolder:
        """Open ``split`` (train, val or test) of the folder ``root`` and check the images' headers.

        Raises DatasetError for a folder that is none of the classes ``names``, and if nothing can be used.
        """
        root = Path(root)
        folder = _folder(root, split)
        if folder is None:
            raise DatasetError(f"{root} has no {split!r} split: put its images into {root / split}/CLASS")
        if unknown := sorted(
            {f.name for f in folder.iterdir() if f.is_dir() and not f.name.startswith(".")} - set(names)
        ):
            raise DatasetError(f"{folder / unknown[0]}: {unknown[0]!r} is not a class; there are {', '.join(names)}")
        images: list[Path] = []
        targets: list[int] = []
        corrupt: list[FileProblem] = []
        for number, name in enumerate(names):
            for path in sorted(p for p in (folder / name).rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file()):
                try:
                    file_header(path).check(MAX_PIXELS)
                except (ImageError, OSError) as error:
                    corrupt.append(
                        FileProblem(str(path), 0, (isinstance(error, OSError) and error.strerror) or str(error))
                    )
                else:
                    images.append(path)
                    targets.append(number)
        if not images:
            example = f", for example {corrupt[0]}" if corrupt else ""
            raise DatasetError(f"{split}: no image in {folder} can be read{example}")
        missing = tuple(name for number, name in enumerate(names) if number not in set(targets))
        report = FolderReport(name=split, images=len(images), corrupt=tuple(corrupt), empty=missing)
        return cls(images, targets, report=report, **settings)

    @property
    def damaged(self) -> int:
        """Images found damaged while loading, by all worker processes together."""
        return int(self._damaged.sum())

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> ClassifiedImage:
        """Return one sample.

        Raises DatasetError for a damaged image; with ``augment`` another image stands in for it.
        """
        samples = self.__getitems__([index])
        if not samples:
            raise DatasetError(f"{self.images[index]} cannot be decoded: remove it, or repair it")
        return samples[0]

    def __getitems__(self, indices: Sequence[int]) -> list[ClassifiedImage]:
        """Return the samples of one batch.

        Without ``augment`` damaged images are left out, so that a batch may be empty.
        """
        if self.augment is None:
            return [
                self._sample(int(i), central_square(image, self.image_size))
                for i in indices
                if (image := self._decoded(int(i))) is not None
            ]
        rng = np.random.default_rng(random.getrandbits(128))
        samples = []
        for index in map(int, indices):
            image, sound = self._first_sound(index)
            samples.append(self._sample(sound, random_view(image, self.image_size, rng, self.augment)))
        return samples

    def _first_sound(self, index: int) -> tuple[Image, int]:
        """Return the image at ``index``, or the first readable one after it, and its index."""
        for candidate in chain(range(index, len(self)), range(index)):
            if (image := self._decoded(candidate)) is not None:
                return image, candidate
        raise DatasetError(f"none of the {len(self)} images can be read any more; the first is {self.images[0]}")

    def _sample(self, index: int, square: Image) -> ClassifiedImage:
        planes = torch.from_numpy(np.ascontiguousarray(square.transpose(2, 0, 1)))
        return ClassifiedImage(planes, self.targets[index], str(self.images[index]))

    def _decoded(self, index: int) -> Image | None:
        """Return a decoded image; None if it is damaged.

        For training a large JPEG is decoded at a reduced size.
        """
        if self._damaged[index]:
            return None
        if self._kept is not None and index in self._kept:
            return self._kept[index]
        try:
            image = (
                decode_image(self.images[index])
                if self.augment is None
                else decode_reduced(self.images[index], 2 * self.image_size)[0]
            )
        except (ImageError, OSError) as error:
            self._damaged[index] = 1
            log.warning(
                "%s: %s; %s",
                self.images[index],
                error,
                "no metric counts it" if self.augment is None else "the next sound image stands in for it",
            )
            return None
        if self._kept is not None:
            self._kept[index] = image
        return image


def central_square(image: Image, size: int) -> Image:
    """Cut out the middle square of an image, at ``size`` pixels."""
    height, width = image.shape[:2]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return _resized(image[top : top + side, left : left + side], size)


def random_view(image: Image, size: int, rng: np.random.Generator, augment: CropAugment) -> Image:
    """Return a random resized crop of ``size`` pixels, with random colours and flips.

    The crop follows Szegedy et al. 2014.
    """
    height, width = image.shape[:2]
    for _ in range(MAX_SUBSTITUTES):
        area = height * width * rng.uniform(augment.min_area, 1.0)
        ratio = math.exp(rng.uniform(-math.log(4 / 3), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top, left = int(rng.integers(0, height - h + 1)), int(rng.integers(0, width - w + 1))
            view = _resized(image[top : top + h, left : left + w], size)
            break
    else:
        view = central_square(image, size)
    if rng.random() < augment.fliplr:
        view = cv2.flip(view, 1)
    if rng.random() < augment.flipud:
        view = cv2.flip(view, 0)
    return augmentation.hsv_jitter(view, rng, augment)


def _resized(image: Image, size: int) -> Image:
    interpolation = cv2.INTER_AREA if image.shape[0] > size else cv2.INTER_LINEAR
    resized: Image = cv2.resize(image, (size, size), interpolation=interpolation)
    return resized
