"""Define detection data sets: images with boxes, and their collated batches.

`DetectionData` (``tasks.detection``), ``arclight compare`` and ``demo`` open them. Out: images (N, 3, H, W) uint8 and targets (M, 6 or more).
A batch is a function of Python's random state, the epoch and the indices, whatever the number of workers: tests compare them. An option goes
into the class and, if recipes have it, into ``tasks.settings``.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from arclight.fabric.extras import require
from arclight.vision.data import augment as augmentation
from arclight.vision.data.augment_settings import Augment
from arclight.vision.data.data_yaml import DataSpec, read_data_yaml
from arclight.vision.data.image_headers import file_header
from arclight.vision.data.images import Image, ImageError, decode_image, decode_reduced
from arclight.vision.data.labels import (
    DatasetError,
    DatasetReport,
    KeypointShape,
    LabelledImages,
    Points,
    TaskGeometry,
    check_labels,
)
from arclight.vision.data.letterbox import Frame, Letterbox, letterbox, scaled_shape
from arclight.vision.data.mix import EpochMix, MixedData
from arclight.vision.data.progressive_resizing import ProgressiveResizing
from arclight.vision.data.rectangles import AspectOrder, FramedIndex, ResumedEpoch, smallest_frame
from arclight.vision.data.site_split import SiteSplit
from arclight.vision.rotated import smallest_rectangles

cv2 = require("cv2", extra="vision")
log = logging.getLogger(__name__)
T = TypeVar("T")

__all__ = ["DataSpec", "DatasetError", "DatasetReport", "DetectionDataset", "Sample", "collate", "read_data_yaml"]

MASK_STRIDE = 4
"""Pixels of the square per cell of masks; the default ``stride`` of ``results.masks.Masks.from_prototypes``."""
RECENT_BYTES = 128 * 2**20
"""Most bytes of decoded training images that each process keeps from batch to batch, without ``cache``."""


@dataclass(frozen=True)
class Sample:
    """One image of a batch."""

    image: Tensor
    """(3, S, S) uint8 RGB; (3, H, W) in rectangular batches."""
    targets: Tensor
    """(n, 5) float32: class, cx, cy, w, h in [0, 1] of the square; (n, 5 + 2 K) with K keypoints x, y, NaN if not labelled; (n, 6) of
    oriented boxes, with the angle r in radians, see `rotated`."""
    path: str
    """The file; of a training image, which may hold parts of several, the first one."""
    shape: tuple[int, int] | None = None
    """(height, width) of the original, pixels; None for training images."""
    letterbox: Letterbox | None = None
    """How the original went into the square; None for training images."""
    mask: Tensor | None = None
    """(S / 4, S / 4) int16: 0, or the row of targets that is seen there, counted from 1; None for labels without outlines."""
    outlines: tuple[Points, ...] | None = None
    """Outlines (k, 2) in pixels of the square, one of each target; None for training images and labels without outlines."""


class BatchBuffer(list[Sample]):
    """Samples of one batch that write their images into one tensor (N, 3, H, W).

    All images have ``shape`` (H, W), so that collating copies nothing.
    """

    def __init__(self, shape: tuple[int, int], count: int) -> None:
        super().__init__()
        self.shape = shape
        self.images = torch.empty(count, 3, *shape, dtype=torch.uint8)

    def add(self, image: Image, targets: NDArray[np.float32], path: Path, *placed: Any, **more: Any) -> None:
        """Append a sample, copying ``image`` (H, W, 3) into the tensor.

        ``placed`` are its shape and letterbox.
        """
        planes = self.images[len(self)]
        cv2.split(image, list(planes.numpy()))
        self.append(Sample(planes, torch.from_numpy(targets), str(path), *placed, **more))


def collate(samples: Sequence[Sample]) -> dict[str, Any]:
    """Collate samples: ``images`` (N, 3, S, S) uint8, ``targets`` (M, 6) float32 and ``paths``.

    In rectangular batches ``images`` are (N, 3, H, W), which stands for the square below.

    Rows of targets are ``image in batch, class, cx, cy, w, h``, the last four in [0, 1] of the square, and then as many
    columns as `Sample` has for keypoints; of oriented boxes one row is ``image in batch, class, cx, cy, w, h, r``. Batches of
    validation also have ``shapes`` (height, width) and ``letterbox`` (scale, pad_x, pad_y), one of each per image. Batches of
    outlined objects have ``masks`` (N, S / 4, S / 4) int16 and, for validation, ``outlines``; see `Sample`.
    """
    rows = [torch.nn.functional.pad(sample.targets, (1, 0), value=place) for place, sample in enumerate(samples)]
    if isinstance(samples, BatchBuffer):
        images = samples.images[: len(samples)]
    else:
        images = torch.stack([sample.image for sample in samples])
    batch: dict[str, Any] = {
        "images": images,
        "targets": torch.cat([torch.zeros(0, rows[0].shape[1] if rows else 6), *rows]),
        "paths": [sample.path for sample in samples],
    }
    if all(sample.letterbox is not None for sample in samples):
        batch["shapes"] = [sample.shape for sample in samples]
        batch["letterbox"] = [sample.letterbox for sample in samples]
    if samples and samples[0].mask is not None:
        batch["masks"] = torch.stack([sample.mask for sample in samples if sample.mask is not None])
        if samples[0].outlines is not None:
            batch["outlines"] = [sample.outlines for sample in samples]
    return batch


def draw_masks(outlines: Sequence[Points], size: int) -> Tensor:
    """Draw outlines (k, 2) as an int16 overlap mask (size / 4, size / 4), numbered from 1.

    ``size``: side of the square image in pixels. Where several overlap, the smallest is drawn: it must be in front, or it
    could not be seen at all.
    """
    canvas = np.zeros((size, size), np.int16)
    area = [cv2.contourArea(points.astype(np.float32)) for points in outlines]
    for number in sorted(range(len(outlines)), key=lambda i: -area[i]):
        # OpenCV's coordinates count from the centre of the first pixel, here in sixteenths.
        pixels = ((outlines[number] - 0.5).clip(-size, 2 * size) * 16).round().astype(np.int32)
        cv2.fillPoly(canvas, [pixels], number + 1, shift=4)
    half = MASK_STRIDE // 2
    return torch.from_numpy(np.ascontiguousarray(canvas[half::MASK_STRIDE, half::MASK_STRIDE]))


class _DecodedImage(NamedTuple):
    """A training image at the size of the input, ready to be placed."""

    image: Image
    boxes: augmentation.Boxes
    path: Path


class DetectionDataset(Dataset[Sample]):
    """Images with boxes: letterboxed, or with ``augment`` changed at random for training.

    images: files. labels: per image (n, 5) rows ``class, cx, cy, w, h`` in [0, 1], as ``check_labels`` gives them.
    epochs: length of the run, the last one perhaps in part, whose last share (``augment.close_mosaic``) has no mosaics; see ``set_epoch``.
    cache: keep all training images decoded in memory, at the size of the input. disk_cache: keep them in files of this folder, which
    are there again at the next start; an image that has changed since is decoded again.
    names: of the classes, for what ``augment`` says about them. multi_scale: each training batch has a side of its own, within this
    share of ``image_size`` and a multiple of ``stride``. resizing: the side of an epoch's batches grows with the share of ``epochs`` that
    are over. image_weights: draw training images by how rare their classes are.
    rect: pad each batch no further than to a multiple of ``stride``: without ``augment`` images are sorted by aspect ratio, in training
    `aspect_order` groups them, and nothing is composed to mosaics. shapes: (height, width) of each image, for ``rect`` and
    `box_sizes_px`; read from their headers if not given.
    mix: which of ``images`` an epoch consists of, where some are of further data sets; all of them if not given.
    outlines: per image the outline (k, 2) of each box; with ``keypoints`` the keypoints (K, 2) of each box instead, NaN if one is
    not labelled; with ``oriented`` four corners of each box, which become its smallest rectangle.

    What ``__getitems__`` returns is a function of the state of Python's ``random``, the epoch and the indices: not of
    the process, of what was loaded before, or of caches. Partners for mosaics therefore come from the batch itself
    and from a few images drawn for it. An image that turns out damaged when it is decoded is reported once and counted
    in ``damaged``; in training the next readable one stands in for it, without ``augment`` its batch goes without it.
    """

    def __init__(
        self,
        images: Sequence[Path],
        labels: Sequence[NDArray[np.float32]],
        *,
        image_size: int = 640,
        augment: Augment | None = None,
        epochs: float | None = None,
        cache: bool = False,
        disk_cache: Path | None = None,
        report: DatasetReport | None = None,
        mix: EpochMix | None = None,
        names: Sequence[str] = (),
        multi_scale: float = 0.0,
        resizing: ProgressiveResizing | None = None,
        stride: int = 32,
        image_weights: bool = False,
        rect: bool = False,
        outlines: Sequence[Sequence[Points]] | None = None,
        keypoints: KeypointShape | None = None,
        oriented: bool = False,
        shapes: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        if len(images) != len(labels) or not images:
            raise DatasetError(
                f"{len(images)} images and labels of {len(labels)}: each image needs its own, and one must be"
            )
        _refuse_together(
            mix=mix is not None,
            training=augment is not None,
            image_weights=image_weights,
            cache=cache,
            rect=rect,
            outlined=outlines is not None,
        )
        self.images, self.labels, self.report = list(images), list(labels), report
        self.image_size, self.augment, self.epochs, self.cache = image_size, augment, epochs, cache
        self._files = disk_cache
        self._fixed = frozenset[int]() if augment is None else augmentation.never_mirrored(names, augment)
        self._stride, self._shapes = stride, self._image_shapes(shapes, ordered=augment is None) if rect else None
        self._known_shapes = self._shapes if rect or shapes is None else list(shapes)
        self._sides = batch_sides(image_size, multi_scale, stride)
        self._multi_scale, self._resizing = multi_scale, resizing
        self._weights = draw_weights(self.labels) if image_weights else None
        self.outlines = None if outlines is None else [tuple(of_image) for of_image in outlines]
        self._points = max((len(points) for of_image in self.outlines or () for points in of_image), default=0)
        self.keypoints, self.oriented = keypoints, oriented
        if keypoints is not None:
            self._points = keypoints.count
            _warn_of_no_mirror(keypoints, augment)
        self.mosaic_open = True
        self.mix, self.epoch = mix, 0
        self._damaged = torch.zeros(len(self.images), dtype=torch.uint8).share_memory_()
        self._recent: OrderedDict[int, _DecodedImage] = OrderedDict()
        self._recent_bytes = 0
        if disk_cache is not None:
            disk_cache.mkdir(parents=True, exist_ok=True)
        if cache:
            self._fill_cache()

    @classmethod
    def open(
        cls,
        spec: DataSpec,
        split: str,
        *,
        cache_labels: bool = True,
        selection: SiteSplit | None = None,
        mix: Sequence[MixedData] = (),
        geometry: TaskGeometry = "boxes",
        single_class: bool = False,
        **settings: Any,
    ) -> DetectionDataset:
        """Open the ``split`` (train, val or test) of a data.yaml and check it; see its ``report``.

        ``settings`` are those of the class; ``cache_labels`` keeps labels in the folder of the data set, see
        ``check_labels``; ``selection`` picks one site's images; ``mix`` names further data sets whose training images
        come into each epoch; ``single_class`` takes all classes for class 0. Of rows with keypoints only the boxes are used,
        unless ``geometry`` asks for them. Raises DatasetError if nothing usable is found.
        """
        own_geometry = spec.geometry(geometry)
        found = check_labels(spec.images(split), len(spec.names), name=split, cache=cache_labels, geometry=own_geometry)
        own = range(len(found.images)) if selection is None else selection.of(split, found.images)
        settings = {"names": spec.names, "report": found.report, **settings}
        images, labels = [found.images[i] for i in own], [found.labels[i] for i in own]
        shapes = _pairs(found.shapes[list(own)])
        outlines = None
        if geometry != "boxes" and found.outlines is not None:
            outlines = [found.outlines[i] for i in own]
        keypoints = spec.pose_shape() if geometry in ("keypoints", "corners") else None
        sizes = [len(images)]
        for source in mix:
            added, boxes = _checked(source, spec, geometry, keypoints, cache_labels)
            images += added.images
            shapes += _pairs(added.shapes)
            labels += boxes
            if outlines is not None:
                outlines += added.outlines or []
            sizes.append(len(added.images))
        if single_class:
            settings["names"] = _single_name(settings["names"], settings.get("augment"))
            for rows in labels:
                rows[:, 0] = 0
        mixed = EpochMix(sizes, [source.weight for source in mix]) if mix else None
        if keypoints is not None and geometry == "corners":
            keypoints = replace(keypoints, hulled=True)
        oriented = geometry == "oriented"
        return cls(
            images,
            labels,
            outlines=outlines,
            keypoints=keypoints,
            oriented=oriented,
            mix=mixed,
            shapes=shapes,
            **settings,
        )

    @property
    def damaged(self) -> int:
        """Images found damaged while loading, by all worker processes together."""
        return int(self._damaged.sum())

    def set_epoch(self, epoch: int) -> None:
        """Choose the images, the sides and the use of mosaics of ``epoch``.

        The loader calls it in every process.
        """
        self.epoch = epoch
        if self.augment is not None and self.epochs is not None:
            begun, whole = math.ceil(self.epochs), max(1, int(self.epochs))
            self.mosaic_open = epoch < begun - round(self.augment.close_mosaic * begun)
            if self._resizing is not None:
                strides = self.image_size / self._stride * self._resizing.scale(epoch, whole)
                self._sides = batch_sides(self._stride * max(1, round(strides)), self._multi_scale, self._stride)

    def __len__(self) -> int:
        return len(self.images) if self.mix is None else len(self.mix)

    def __getitem__(self, index: int) -> Sample:
        """Return one sample.

        Raises DatasetError for a damaged image; with ``augment`` another image stands in for it.
        """
        samples = self.__getitems__([index])
        if not samples:
            raise DatasetError(f"{self.images[index]} cannot be decoded: remove it, or repair it")
        return samples[0]

    def __getitems__(self, indices: Sequence[int] | Sequence[FramedIndex]) -> BatchBuffer:
        """Return the samples of one batch.

        Without ``augment`` damaged images are left out, so that a batch may be empty.
        """
        frame = indices[0].frame if len(indices) and isinstance(indices[0], FramedIndex) else None
        indices = [index.sample if isinstance(index, FramedIndex) else index for index in indices]
        if self.augment is None:
            samples = BatchBuffer(self._frame(indices, self.image_size), len(indices))
            for index in indices:
                self._add_letterboxed(samples, int(index))
            return samples
        rng = np.random.default_rng(random.getrandbits(128))
        side = self._sides[0] if len(self._sides) == 1 else int(rng.choice(self._sides))
        if self._weights is not None:
            indices = rng.choice(len(self), size=len(indices), p=self._weights).tolist()
        drawn = rng.integers(len(self), size=max(8 - len(indices), len(indices) // 8))
        pool = np.concatenate((np.asarray(indices), drawn))
        if self._shapes is not None:
            pool = pool[: len(indices)]  # others have other aspect ratios
        if (mix := self.mix) is not None:
            pool = np.array([mix.image(int(place), self.epoch) for place in pool])
        samples = BatchBuffer(frame or self._frame(pool, side), len(indices))
        for index in pool[: len(indices)]:
            self._add_augmented(samples, int(index), pool, rng, self.augment)
        self._drop_oldest()
        return samples

    def box_sizes_px(self) -> NDArray[np.float32]:
        """Return width and height (n, 2) of all boxes, in pixels of the input.

        The longer side of an image has ``image_size`` pixels there; oriented boxes have their own sides. For training images.
        """
        found: list[NDArray[np.floating[Any]]] = [np.zeros((0, 2), np.float32)]
        for index, rows in enumerate(self.labels):
            if not len(rows):
                continue
            shape = _shape_of(self.images[index]) if self._known_shapes is None else self._known_shapes[index]
            sides = np.array(shape[::-1]) * (self.image_size / max(shape))
            if self.oriented and self.outlines is not None:
                found.append(smallest_rectangles(np.array(self.outlines[index], np.float64) * sides)[:, 2:4])
            else:
                found.append(rows[:, 3:5] * sides)
        return np.concatenate(found, dtype=np.float32)

    def _image_shapes(self, given: Sequence[tuple[int, int]] | None, ordered: bool) -> list[tuple[int, int]]:
        """Return (height, width) of each image.

        ``ordered``: first sort images and labels by aspect ratio, stably.
        """
        shapes = [_shape_of(path) for path in self.images] if given is None else list(given)
        if not ordered:
            return shapes
        order = sorted(range(len(shapes)), key=lambda index: shapes[index][0] / shapes[index][1])
        self.images, self.labels = [self.images[i] for i in order], [self.labels[i] for i in order]
        return [shapes[i] for i in order]

    def aspect_order(self, batch: int, begun: ResumedEpoch | None = None) -> AspectOrder:
        """Return the order of training images in rectangular batches; see `AspectOrder`.

        ``batch``: images of a step on all ranks together.
        """
        shapes = self._shapes
        if shapes is None or self.augment is None:
            raise ValueError(
                "only a data set for training in rectangles has an order by aspect ratio: give augment and rect"
            )

        def by_place(epoch: int) -> Sequence[tuple[int, int]]:
            mix = self.mix
            return shapes if mix is None else [shapes[mix.image(place, epoch)] for place in range(len(mix))]

        return AspectOrder(by_place, batch, sides=self._sides, stride=self._stride, begun=begun)

    def _frame(self, images: Sequence[int] | NDArray[np.int64], side: int) -> Frame:
        """Return the height and width of a batch whose images have a longer side of ``side`` pixels."""
        if self._shapes is None:
            return side, side
        return smallest_frame([self._shapes[int(index)] for index in images], side, self._stride)

    def _add_letterboxed(self, samples: BatchBuffer, index: int) -> None:
        try:
            image = decode_image(self.images[index])
        except (ImageError, OSError) as error:
            self._note_damage(index, error, "no metric counts it")
            return
        square, placed = letterbox(image, self.image_size, samples.shape)
        height, width = image.shape[:2]
        scale, pad_x, pad_y = placed
        targets = self.labels[index].copy()
        targets[:, 1:] *= np.array([width, height, width, height]) * scale
        targets[:, 1:3] += (pad_x, pad_y)
        targets[:, 1:] /= np.tile(samples.shape[::-1], 2)
        more: dict[str, Any] = {}
        if self.outlines is not None:
            corner = np.array([pad_x, pad_y], np.float32)
            outlines = tuple(
                points * np.array([width, height], np.float32) * scale + corner for points in self.outlines[index]
            )
            if self.oriented:
                targets = _oriented_targets(self.labels[index][:, :1], outlines, self.image_size)
            elif self.keypoints is None:
                more = {"mask": draw_masks(outlines, self.image_size), "outlines": outlines}
            else:
                points = np.array(outlines, np.float32).reshape(len(targets), 2 * self._points) / self.image_size
                targets = np.concatenate((targets, points), 1, dtype=np.float32)
        samples.add(square, targets, self.images[index], (height, width), placed, **more)

    # Training

    def _add_augmented(
        self, samples: BatchBuffer, index: int, pool: NDArray[np.int64], rng: np.random.Generator, augment: Augment
    ) -> None:
        frame = None if self._shapes is None else samples.shape
        labelled = self._compose(index, pool, rng, augment, frame)
        if self.mosaic_open and rng.random() < augment.mixup:
            other = self._compose(int(rng.choice(pool)), pool, rng, augment, frame)
            labelled = augmentation.mixup(labelled, other, rng)
        if self.mosaic_open and augment.copy_paste and rng.random() < augment.copy_paste:
            source = self._decoded(int(rng.choice(pool)))[:2]
            labelled = augmentation.copy_paste(labelled, source, rng, keypoints=self._marks)
        image, boxes = augmentation.flip(labelled, rng, augment, self._fixed, self.keypoints)
        image = augmentation.hsv_jitter(image, rng, augment)
        side = max(samples.shape)
        if frame is None and side != self.image_size:
            shrinks = side < self.image_size
            image = cv2.resize(image, (side, side), interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)
        targets = boxes[:, :5].copy() if self.keypoints is None else boxes.copy()
        targets[:, 1:3] = (boxes[:, 1:3] + boxes[:, 3:5]) / 2
        targets[:, 3:5] = boxes[:, 3:5] - boxes[:, 1:3]
        targets[:, 1:] /= self.image_size if frame is None else np.tile(frame[::-1], 2)
        outlines = boxes[:, 5:].reshape(-1, max(self._points, 1), 2) * (side / self.image_size)
        if self.oriented:
            seen = [augmentation.clip_outline(points, self.image_size) for points in boxes[:, 5:].reshape(-1, 4, 2)]
            targets = _oriented_targets(boxes[:, :1], seen, self.image_size)
        masked = self.outlines is not None and self.keypoints is None and not self.oriented
        mask = draw_masks(list(outlines), side) if masked else None
        samples.add(image, targets, self._decoded(index).path, mask=mask)

    @property
    def _marks(self) -> augmentation.Keypoints:
        """Return how augmentation reads the points of a row."""
        return self.keypoints is not None and ("corners" if self.keypoints.hulled else True)

    def _compose(
        self, index: int, pool: NDArray[np.int64], rng: np.random.Generator, augment: Augment, frame: Frame | None
    ) -> augmentation.LabelledImage:
        if frame is not None:
            return augmentation.random_affine(self._decoded(index)[:2], rng, augment, frame, fit=True)
        if not (self.mosaic_open and rng.random() < augment.mosaic):
            return augmentation.random_affine(
                self._decoded(index)[:2], rng, augment, self.image_size, keypoints=self._marks
            )
        if augment.mosaic9 and rng.random() < augment.mosaic9:
            nine = [self._decoded(int(member))[:2] for member in (index, *rng.choice(pool, 8))]
            return augmentation.mosaic9(nine, rng, augment, self.image_size, keypoints=self._marks)
        members = rng.permutation([index, *rng.choice(pool, 3)]).tolist()
        return augmentation.mosaic(
            [self._decoded(member)[:2] for member in members], rng, augment, self.image_size, keypoints=self._marks
        )

    def _decoded(self, index: int) -> _DecodedImage:
        decoded = self._recent.get(index)
        if decoded is None:
            decoded = self._recent[index] = self._decode(index)
            self._recent_bytes += decoded.image.nbytes
        self._recent.move_to_end(index)
        return decoded

    def _decode(self, index: int) -> _DecodedImage:
        size = self.image_size
        image, index = self._read_sound(
            index, lambda path: decode_at(path, size) if self._files is None else self._kept(path)
        )
        height, width = image.shape[:2]
        rows = self.labels[index]
        low, high = rows[:, 1:3] - rows[:, 3:5] / 2, rows[:, 1:3] + rows[:, 3:5] / 2
        boxes = np.concatenate((rows[:, :1], low * (width, height), high * (width, height)), 1, dtype=np.float32)
        if self.outlines is not None:
            boxes = np.concatenate(
                (boxes, self._padded(index) * np.tile((width, height), self._points)), 1, dtype=np.float32
            )
        return _DecodedImage(image, boxes, self.images[index])

    def _kept(self, path: Path) -> Image:
        """Read a decoded image from the disk cache; decode it and write it first if it is not there."""
        assert self._files is not None
        seen = path.stat()
        key = hashlib.sha256(
            f"{path.absolute()} {seen.st_size} {seen.st_mtime_ns} {self.image_size}".encode()
        ).hexdigest()
        kept = self._files / f"{key[:32]}.npy"
        try:
            image: Image = np.load(kept, allow_pickle=False)
        except PermissionError as error:  # of the cache, and no fault of the image
            raise DatasetError(f"{kept} cannot be read ({error.strerror}): delete it, or set cache to false") from error
        except (FileNotFoundError, ValueError, EOFError):  # not there yet, or cut off by a full disk
            image = decode_at(path, self.image_size)
            part = kept.with_name(f".{kept.name}.{os.getpid()}.tmp")  # several workers may write it at once
            try:
                with part.open("wb") as file:
                    np.save(file, image)
                os.replace(part, kept)
            except OSError as error:
                raise DatasetError(f"{kept} cannot be written ({error.strerror}): set cache to false") from error
            finally:
                part.unlink(missing_ok=True)
        return image

    def _padded(self, index: int) -> NDArray[np.float32]:
        """Return the outlines of an image as (n, 2 P), padded to the longest of the data set.

        A shorter one repeats its last point.
        """
        assert self.outlines is not None
        rows = [
            np.concatenate((points, np.repeat(points[-1:], self._points - len(points), axis=0)))
            for points in self.outlines[index]
        ]
        return np.array(rows, np.float32).reshape(len(rows), 2 * self._points)

    def _drop_oldest(self) -> None:
        # Only between batches: within one, each image is decoded once whatever its size.
        while not self.cache and self._recent_bytes > RECENT_BYTES:
            _, decoded = self._recent.popitem(last=False)
            self._recent_bytes -= decoded.image.nbytes

    def _fill_cache(self) -> None:
        free = available_memory()
        for index in range(len(self.images)):
            self._decoded(index)
            expected = self._recent_bytes / (index + 1) * len(self.images)
            if index >= min(15, len(self.images) - 1) and free is not None and expected > 0.8 * free:
                raise DatasetError(
                    f"cache=True needs about {expected / 1e9:.1f} GB for {len(self.images)} images of {self.image_size} "
                    f"pixels and {free / 1e9:.1f} GB of memory are free: set cache to false or lower image_size"
                )

    # Damaged files

    def _read_sound(self, index: int, read: Callable[[Path], T]) -> tuple[T, int]:
        """Read the image at ``index``, or the first readable one after it; also returns its index."""
        for candidate in chain(range(index, len(self.images)), range(index)):
            try:
                return read(self.images[candidate]), candidate
            except (ImageError, OSError) as error:
                self._note_damage(candidate, error, "the next sound image stands in for it")
        raise DatasetError(f"none of the {len(self.images)} images can be read any more; the first is {self.images[0]}")

    def _note_damage(self, index: int, error: Exception, consequence: str) -> None:
        if not self._damaged[index]:
            self._damaged[index] = 1
            log.warning("%s: %s; %s", self.images[index], error, consequence)


def _refuse_together(
    *, mix: bool, training: bool, image_weights: bool, cache: bool, rect: bool, outlined: bool
) -> None:
    """Raise ValueError for options of a data set that contradict each other."""
    if mix and image_weights:
        raise ValueError("image_weights and mix both say how often an image is drawn: leave one of them out")
    if mix and not training:
        raise ValueError("mix is for training images: give augment, or leave mix out")
    if cache and not training:
        raise ValueError("cache=True keeps training images; without augment each image is read once: leave it False")
    if rect and outlined:
        raise ValueError("rect=True is for boxes alone: leave it False")
    if rect and image_weights:
        raise ValueError("rect and image_weights both say which images share a batch: leave one of them out")


def _single_name(names: Sequence[str], augment: Augment | None) -> list[str]:
    """Return a name for all classes: one whose images are never mirrored, if there is any.

    No image tells which of them it has.
    """
    fixed = frozenset() if augment is None else augmentation.never_mirrored(names, augment)
    return [names[min(fixed, default=0)]]


def _oriented_targets(classes: NDArray[np.float32], outlines: Sequence[Points], size: int) -> NDArray[np.float32]:
    """Return (n, 6) class and smallest rotated rectangle of each outline (k, 2).

    Rectangles are xywh as shares of ``size`` pixels, and the angle.
    """
    longest = max((len(points) for points in outlines), default=4)
    padded = [np.concatenate((points, np.repeat(points[-1:], longest - len(points), axis=0))) for points in outlines]
    found = smallest_rectangles(np.array(padded, np.float64).reshape(len(outlines), longest, 2))
    found[:, :4] /= size
    return np.concatenate((classes, found), 1, dtype=np.float32)


def _checked(
    source: MixedData, spec: DataSpec, geometry: TaskGeometry, keypoints: KeypointShape | None, cache: bool
) -> tuple[LabelledImages, list[NDArray[np.float32]]]:
    """Check the labels of a mixed-in data set; return them, and its boxes in our classes.

    Classes are those of ``spec``.
    """
    other = read_data_yaml(source.data)
    numbers = np.array(source.class_numbers(other, spec.names), np.float32)
    if keypoints is not None and other.pose_shape().count != keypoints.count:
        raise DatasetError(f"mix: {other.file} has {other.keypoints}, {spec.file} {keypoints}: they must be the same")
    own_geometry = other.geometry(geometry)
    added = check_labels(other.images("train"), len(other.names), name="train", cache=cache, geometry=own_geometry)
    if added.report.corrupt or added.report.malformed or added.report.shared_labels:
        log.warning("mix: %s: %s", source.data, added.report)
    return added, [np.concatenate((numbers[rows[:, :1].astype(int)], rows[:, 1:]), 1) for rows in added.labels]


def _pairs(shapes: NDArray[np.int32]) -> list[tuple[int, int]]:
    return [(height, width) for height, width in shapes.tolist()]


def _shape_of(path: Path) -> tuple[int, int]:
    """Return (height, width) by the image's header, or (1, 1) if it cannot be read.

    Decoding reports such an image later.
    """
    try:
        height, width = file_header(path).shape
    except (ImageError, OSError):
        return 1, 1
    return max(height, 1), max(width, 1)


def decode_at(path: Path, size: int) -> Image:
    """Decode an image so that its longer side has ``size`` pixels."""
    image, (full_height, full_width) = decode_reduced(path, size)
    _, height, width = scaled_shape((full_height, full_width), size)
    if image.shape[:2] != (height, width):
        # After a reduced decode little is left to shrink, where bilinear is as good as area and many times faster.
        far = max(image.shape[:2]) > 2 * size
        image = cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA if far else cv2.INTER_LINEAR)
    return image


def _warn_of_no_mirror(keypoints: KeypointShape, augment: Augment | None) -> None:
    if keypoints.flip is None and augment is not None and (augment.fliplr or augment.flipud):
        log.warning("images are not mirrored: the data set has no flip_idx, which names the mirrored keypoint of each")


def batch_sides(size: int, share: float, stride: int) -> list[int]:
    """List the sides of multi-scale batches: multiples of ``stride`` near ``size``.

    They are within ``share`` of ``size``, which is one of them.
    """
    low, high = math.ceil(size * (1 - share) / stride), math.floor(size * (1 + share) / stride)
    return sorted({size, *(stride * number for number in range(max(low, 1), high + 1))}) if share else [size]


def draw_weights(labels: Sequence[NDArray[np.float32]]) -> NDArray[np.float64]:
    """Compute each image's sampling weight: the sum of its boxes' inverse class frequencies.

    Images of rare classes are drawn more often (YOLOv5's labels_to_image_weights), those of background as often as without weights.
    """
    counts = np.bincount(np.concatenate(labels)[:, 0].astype(int), minlength=1)
    sums = np.array([(1 / counts[rows[:, 0].astype(int)]).sum() for rows in labels])
    empty = sums == 0
    share = 1 - empty.mean()
    weights = np.where(empty, 1 / len(labels), share * sums / max(sums.sum(), 1e-12))
    normalised: NDArray[np.float64] = weights / weights.sum()
    return normalised


def available_memory() -> int | None:
    """Return the available memory in bytes, without swapping, or None if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
