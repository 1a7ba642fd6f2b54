"""Hold the instance masks of one image: build, compare and outline them.

A mask is kept as the part of the image in which it may be (a bitmap and its corner): a hundred objects of a photo take the
memory of their boxes, not of a hundred photos.

`Detections` holds one, ``tasks.processing`` makes it of prototypes, `metrics` of outlines too; `plots` and `draw` read it. Pixels of a mask
decide scores, which a test compares with pycocotools.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from arclight.fabric.extras import require
from arclight.vision.data.formats.run_lengths import encode_mask

if TYPE_CHECKING:
    from arclight.vision.data.letterbox import Letterbox

Bits = NDArray[np.bool_]
Floats = NDArray[np.float64]


class Patch(NamedTuple):
    """One mask: False outside of ``bits``."""

    left: int
    top: int
    bits: Bits
    """(h, w), with its first pixel at (left, top) of the image."""


@dataclass(frozen=True, eq=False)
class Masks:
    """Masks of k objects of an image of ``shape`` (height, width)."""

    patches: tuple[Patch, ...]
    shape: tuple[int, int]

    @classmethod
    def from_prototypes(
        cls,
        coefficients: ArrayLike,
        prototypes: ArrayLike,
        xyxy: ArrayLike,
        shape: tuple[int, int],
        stride: float = 4.0,
        placed: Letterbox = (1.0, 0, 0),
    ) -> Masks:
        """Build masks of boxes (k, 4) from ``prototypes`` (P, h, w) and ``coefficients`` (k, P).

        ``stride``: pixels of the letterboxed square per cell of the prototypes. Boxes are in pixels of an image of
        ``shape``, and ``placed`` says how that went into the square. A pixel belongs to the mask if the logit there,
        between cells bilinear, is above 0.
        """
        cv2 = require("cv2", extra="vision")
        mixed = np.asarray(prototypes, np.float32)
        scale, pad_x, pad_y = placed
        patches = []
        for weights, (left, top, width, height) in zip(
            np.asarray(coefficients, np.float32), _whole_pixels(xyxy, shape)
        ):
            if not width or not height:
                patches.append(Patch(left, top, np.zeros((height, width), np.bool_)))
                continue
            # the cells around the box alone: mixing all of them would cost as much for small objects as for large ones
            x0, x1 = ((x * scale + pad_x) / stride for x in (left, left + width))
            y0, y1 = ((y * scale + pad_y) / stride for y in (top, top + height))
            first_x, first_y = max(int(x0) - 1, 0), max(int(y0) - 1, 0)
            near = mixed[:, first_y : int(y1) + 3, first_x : int(x1) + 3]
            logits = np.tensordot(weights, near, 1)
            # pixel i has its centre at i + 0.5, and so has a cell: the map from a patch to cells, for OpenCV, which counts centres
            step = scale / stride
            across = (0.5 * scale + left * scale + pad_x) / stride - 0.5 - first_x
            down = (0.5 * scale + top * scale + pad_y) / stride - 0.5 - first_y
            flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
            matrix = np.array([[step, 0, across], [0, step, down]])
            patch = cv2.warpAffine(logits, matrix, (width, height), flags=flags, borderMode=cv2.BORDER_REPLICATE)
            patches.append(Patch(left, top, patch > 0))
        return cls(tuple(patches), shape)

    @classmethod
    def from_outlines(cls, outlines: Sequence[ArrayLike], shape: tuple[int, int]) -> Masks:
        """Fill outlines (k, 2) in pixels, by the even-odd rule where one crosses itself."""
        cv2 = require("cv2", extra="vision")
        patches = []
        for outline in outlines:
            points = np.asarray(outline, np.float64).reshape(-1, 2)
            low, high = points.min(0) - 1, points.max(0) + 1
            ((left, top, width, height),) = _whole_pixels([(*low, *high)], shape)
            canvas = np.zeros((height, width), np.uint8)
            if canvas.size:
                pixels = ((points - (left, top) - 0.5).clip(-(2**14), 2**14) * 16).round().astype(np.int32)
                cv2.fillPoly(canvas, [pixels], 1, shift=4)
            patches.append(Patch(left, top, canvas.astype(np.bool_)))
        return cls(tuple(patches), shape)

    def __len__(self) -> int:
        return len(self.patches)

    def __getitem__(self, chosen: Any) -> Masks:
        """Return some of the masks, indexed as by NumPy."""
        picked = np.atleast_1d(np.arange(len(self))[chosen])
        return Masks(tuple(self.patches[i] for i in picked), self.shape)

    def __iter__(self) -> Iterator[Bits]:
        """Yield each mask as an array (height, width)."""
        for left, top, bits in self.patches:
            whole = np.zeros(self.shape, np.bool_)
            whole[top : top + bits.shape[0], left : left + bits.shape[1]] = bits
            yield whole

    @property
    def data(self) -> Bits:
        """(k, height, width)."""
        return np.array(list(self), np.bool_).reshape(len(self), *self.shape)

    @property
    def areas(self) -> NDArray[np.int64]:
        """(k,) pixels of each mask."""
        return np.array([np.count_nonzero(bits) for _, _, bits in self.patches], np.int64)

    @property
    def xy(self) -> list[NDArray[np.float32]]:
        """Outline (n, 2) of each mask's largest piece in pixels, without holes.

        An empty mask has no points.
        """
        cv2 = require("cv2", extra="vision")
        outlines = []
        for left, top, bits in self.patches:
            found, _ = cv2.findContours(bits.astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
            largest = max(found, key=cv2.contourArea, default=np.zeros((0, 1, 2), np.int32))
            outlines.append((largest.reshape(-1, 2) + (left + 0.5, top + 0.5)).astype(np.float32))
        return outlines

    @property
    def rle(self) -> list[dict[str, Any]]:
        """Each mask as COCO's compressed run lengths: ``{"size": [height, width], "counts": text}``."""
        return [encode_mask(bits, left, top, self.shape) for left, top, bits in self.patches]

    @property
    def xyn(self) -> list[NDArray[np.float32]]:
        """The same as shares of the image's width and height."""
        height, width = self.shape
        return [(points / (width, height)).astype(np.float32) for points in self.xy]


def _whole_pixels(xyxy: ArrayLike, shape: tuple[int, int]) -> Iterator[tuple[int, int, int, int]]:
    """Yield left, top, width and height of the pixels that each box (k, 4) touches in the image."""
    height, width = shape
    boxes = np.nan_to_num(np.asarray(xyxy, np.float64).reshape(-1, 4)).clip(0, (width, height, width, height))
    low, high = np.floor(boxes[:, :2]).astype(int), np.ceil(boxes[:, 2:]).astype(int)
    for (left, top), (right, bottom) in zip(low.tolist(), high.tolist()):
        yield left, top, max(right - left, 0), max(bottom - top, 0)


def mask_iou(a: Masks, b: Masks) -> Floats:
    """Compute (n, m) intersection over union of masks; 0 if both are empty."""
    iou = np.zeros((len(a), len(b)))
    of_a, of_b = a.areas, b.areas
    for i, one in enumerate(a.patches):
        for j, other in enumerate(b.patches):
            common = _common(one, other)
            if common:
                iou[i, j] = common / (of_a[i] + of_b[j] - common)
    return iou


def _common(one: Patch, other: Patch) -> int:
    """Count the pixels of both masks."""
    left, top = max(one.left, other.left), max(one.top, other.top)
    right = min(one.left + one.bits.shape[1], other.left + other.bits.shape[1])
    bottom = min(one.top + one.bits.shape[0], other.top + other.bits.shape[0])
    if right <= left or bottom <= top:
        return 0
    first, second = (
        patch.bits[top - patch.top : bottom - patch.top, left - patch.left : right - patch.left]
        for patch in (one, other)
    )
    return int(np.count_nonzero(first & second))
