"""Compute corners, hulls, smallest rectangles and exact IoU of rotated boxes in float64.

A rotated box is xywhr: centre x, centre y, width, height in any one unit of length, and the angle r in radians from the x axis to
its width; as y points down, a positive angle turns clockwise as it is seen. (w, h, r), (w, h, r + pi) and (h, w, r + pi / 2) are
one box: `regularise` gives the one with w >= h and r in [-pi / 4, 3 pi / 4), as ultralytics does.

``data.labels``, ``data.dataset``, ``data.lint.checks``, ``tasks.detection`` and ``tasks.processing`` call these, the metrics and plots of
rotated boxes, and ``qris.reading.scanner`` to refuse corners that form no quadrilateral. The form of `regularise` must stay: results
and training targets have it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

_PAIRS = 1 << 16  # boxes compared exactly at a time: bounds memory


def regularise(xywhr: ArrayLike) -> Floats:
    """Regularise boxes (n, 5) to width >= height and an angle in [-pi / 4, 3 pi / 4).

    They cover the same pixels.
    """
    boxes = np.array(xywhr, np.float64).reshape(-1, 5)
    upright = boxes[:, 2] < boxes[:, 3]
    boxes[upright, 2:4] = boxes[upright][:, [3, 2]]
    turned = boxes[:, 4] + np.where(upright, math.pi / 2, 0.0) + math.pi / 4
    boxes[:, 4] = np.mod(turned, math.pi) - math.pi / 4
    return boxes


def corners_of(xywhr: ArrayLike) -> Floats:
    """Compute the corners (n, 4, 2) of boxes (n, 5), in the direction of a positive angle."""
    boxes = np.asarray(xywhr, np.float64).reshape(-1, 5)
    along = np.stack((np.cos(boxes[:, 4]), np.sin(boxes[:, 4])), 1)
    width = along * boxes[:, 2:3] / 2
    height = np.stack((-along[:, 1], along[:, 0]), 1) * boxes[:, 3:4] / 2
    signs = ((-1, -1), (1, -1), (1, 1), (-1, 1))
    return np.stack([boxes[:, :2] + across * width + down * height for across, down in signs], 1)


def hulls_of(xywhr: ArrayLike) -> Floats:
    """Compute the upright boxes (n, 4) xyxy around rotated ones (n, 5)."""
    corners = corners_of(xywhr)
    return np.concatenate((corners.min(1), corners.max(1)), 1)


def smallest_rectangles(points: ArrayLike) -> Floats:
    """Return the rectangle of least area (n, 5) around each set of k points (n, k, 2).

    Rectangles are regularised. One of its sides lies along a side of the convex hull (Freeman and Shapira 1975): the
    directions of all pairs of points are tried, the hull's among them. Points on one line have a rectangle without
    area.
    """
    sets = np.asarray(points, np.float64)
    pairs = np.array(list(itertools.combinations(range(sets.shape[1]), 2)))
    sides = sets[:, pairs[:, 1]] - sets[:, pairs[:, 0]]
    angles = np.arctan2(sides[..., 1], sides[..., 0])  # (n, pairs)
    along = np.stack((np.cos(angles), np.sin(angles)), -1)
    across = np.stack((-along[..., 1], along[..., 0]), -1)
    low, high = [], []
    for axis in (along, across):
        reach = np.einsum("nkc,npc->npk", sets, axis)
        low.append(reach.min(-1))
        high.append(reach.max(-1))
    size = np.stack((high[0] - low[0], high[1] - low[1]), -1)
    best = np.argmin(size.prod(-1), 1)
    rows = np.arange(len(sets))
    u, v = ((low[axis] + high[axis])[rows, best, None] / 2 for axis in (0, 1))
    centre = u * along[rows, best] + v * across[rows, best]
    return regularise(np.concatenate((centre, size[rows, best], angles[rows, best, None]), 1))


def refusal_of_quadrilateral(points: Floats) -> str | None:
    """Return the reason why corners (4, 2) form no convex quadrilateral, or None.

    Corners go in turn around an object.
    """
    sides = np.roll(points, -1, axis=0) - points
    turns = sides[:, 0] * np.roll(sides[:, 1], -1) - sides[:, 1] * np.roll(sides[:, 0], -1)
    scale = float(np.abs(sides).max(initial=0.0)) ** 2
    left, right = turns > 1e-9 * scale, turns < -1e-9 * scale
    if not left.any() and not right.any():
        return "its four corners lie on one line: it has no area"
    if left.any() and right.any():
        crosses = left.sum() == right.sum()
        return (
            "its sides cross: list the corners in turn around the object"
            if crosses
            else "its corners are not convex: an oriented box has four corners that stick out"
        )
    return None


@dataclass(frozen=True, eq=False)
class OrientedBoxes:
    """Rotated boxes of one image, in its pixels."""

    xywhr: NDArray[np.float32]
    """(k, 5) centre x, centre y, width >= height, angle in [-pi / 4, 3 pi / 4) radians, clockwise from the x axis."""

    def __post_init__(self) -> None:
        array = regularise(self.xywhr).astype(np.float32)
        array.setflags(write=False)
        object.__setattr__(self, "xywhr", array)

    def __len__(self) -> int:
        return len(self.xywhr)

    def __getitem__(self, chosen: Any) -> OrientedBoxes:
        """Return some of the boxes, indexed as by NumPy."""
        return OrientedBoxes(self.xywhr[np.atleast_1d(np.arange(len(self))[chosen])])

    @property
    def corners(self) -> NDArray[np.float32]:
        """(k, 4, 2) corners in turn, clockwise; they may lie beside the image."""
        return corners_of(self.xywhr).astype(np.float32)

    def label_corners(self, shape: tuple[int, int]) -> list[Floats | None]:
        """Return each box's corners (4, 2) as shares of the image, as YOLO labels have them.

        ``shape``: (height, width) of the image. A corner that lies outside is moved to the nearest place of the image;
        None for a box of which nothing is left.
        """
        height, width = shape
        shares = (corners_of(self.xywhr) / (width, height)).clip(0, 1)
        return [None if refusal_of_quadrilateral(points) is not None else points for points in shares]


# ---------------------------------------------------------------- exact overlap


def rotated_iou(a: ArrayLike, b: ArrayLike) -> Floats:
    """Compute the exact IoU (n, m) of rotated boxes a (n, 5) and b (m, 5).

    It is 0 if a box has no area. The common area is that of the polygon that both share, in float64; pairs whose hulls do not
    meet are left at 0.
    """
    first, second = (np.asarray(boxes, np.float64).reshape(-1, 5) for boxes in (a, b))
    iou = np.zeros((len(first), len(second)))
    hulls_a, hulls_b = hulls_of(first), hulls_of(second)
    sides = np.minimum(hulls_a[:, None, 2:], hulls_b[None, :, 2:]) - np.maximum(
        hulls_a[:, None, :2], hulls_b[None, :, :2]
    )
    areas_a, areas_b = first[:, 2] * first[:, 3], second[:, 2] * second[:, 3]
    rows, columns = np.nonzero((sides > 0).all(-1) & (areas_a[:, None] > 0) & (areas_b[None] > 0))
    corners_a, corners_b = corners_of(first), corners_of(second)
    for start in range(0, len(rows), _PAIRS):
        i, j = rows[start : start + _PAIRS], columns[start : start + _PAIRS]
        common = _common_areas(corners_a[i], corners_b[j])
        iou[i, j] = common / (areas_a[i] + areas_b[j] - common)
    return iou


def _cross(a: Floats, b: Floats) -> Floats:
    product: Floats = a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0]
    return product


def _common_areas(a: Floats, b: Floats) -> Floats:
    """Compute the areas (n,) common to pairs of convex quadrilaterals (n, 4, 2).

    Corners go in the direction of a positive angle. The common polygon's corners are the corners of each that lie in
    the other and the places where sides cross; sorted around their middle, the shoelace formula gives their area.
    """
    middle = a.mean(1, keepdims=True)  # near the origin, where float64 is finest
    a, b = a - middle, b - middle
    sides_a, sides_b = np.roll(a, -1, 1) - a, np.roll(b, -1, 1) - b
    scale = np.maximum(np.abs(a).max((1, 2)), np.abs(b).max((1, 2)))
    tolerance = 1e-12 * (scale**2)[:, None, None]

    def inside(points: Floats, corners: Floats, sides: Floats) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = (_cross(sides[:, None], points[:, :, None] - corners[:, None]) >= -tolerance).all(-1)
        return found

    turned = _cross(sides_a[:, :, None], sides_b[:, None])  # (n, 4, 4)
    apart = b[:, None] - a[:, :, None]
    parallel = np.abs(turned) <= tolerance
    divisor = np.where(parallel, 1.0, turned)
    t = _cross(apart, sides_b[:, None]) / divisor
    u = _cross(apart, sides_a[:, :, None]) / divisor
    meets = ~parallel & (t >= 0) & (t <= 1) & (u >= 0) & (u <= 1)
    crossings = (a[:, :, None] + t[..., None] * sides_a[:, :, None]).reshape(len(a), 16, 2)
    points = np.concatenate((a, b, crossings), 1)
    valid = np.concatenate((inside(a, b, sides_b), inside(b, a, sides_a), meets.reshape(len(a), 16)), 1)
    count = valid.sum(1)
    filler = points[np.arange(len(points)), valid.argmax(1)]  # a point twice adds no area
    points = np.where(valid[..., None], points, filler[:, None])
    centre = (points * valid[..., None]).sum(1) / np.maximum(count, 1)[:, None]
    around = points - centre[:, None]
    order = np.argsort(np.arctan2(around[..., 1], around[..., 0]), 1)
    ring = np.take_along_axis(around, order[..., None], 1)
    area = _cross(ring, np.roll(ring, -1, 1)).sum(1) / 2
    return np.where(count >= 3, np.abs(area), 0.0)
