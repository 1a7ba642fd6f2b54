"""Propose the corners of a QR code from its finder patterns, as start values of `grid`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import permutations

import numpy as np
import numpy.typing as npt

from arclight.fabric.extras import require

cv2 = require("cv2", extra="vision")

Floats = npt.NDArray[np.float32]
Vector = npt.NDArray[np.float64]

SCALE_STEP = 1.22
"""Ratio of one module size to the next that is tried: a template still fits well between two."""
ENOUGH_MODULE_PX = 2.5
"""Pixels per module that are enough to compare: larger patterns are looked for in a reduced picture."""
MIN_CORRELATION = 0.35
"""Least correlation with a finder pattern."""
MAX_PATTERNS, MAX_IN_PAIRS = 10, 6
_APART = 10 / 11
"""Half widths of a square's rings as radii of circles of about the same area."""


@dataclass(frozen=True)
class FinderPattern:
    """Hold a candidate finder pattern: centre (x, y), pixels per module, its correlation in [-1, 1]."""

    centre: Vector
    module_px: float
    correlation: float


@dataclass(frozen=True)
class Proposal:
    """Hold a code's corners (4, 2), clockwise from its own top left, and the version estimated from its size."""

    corners: Vector
    version: int


def propose(picture: Floats, largest: int) -> list[Proposal]:
    """Return proposals up to version ``largest`` for the code that fills most of ``picture`` (H, W).

    Three patterns give a parallelogram; two give three squares, for a code of which one pattern is hidden.
    """
    patterns = find_patterns(picture, largest)
    return [
        Proposal(corners, version)
        for origin, across, down, module in (*_triples(patterns), *_pairs(patterns[:MAX_IN_PAIRS]))
        for version, corners in _codes(origin, across, down, module, largest)
    ]


def find_patterns(picture: Floats, largest: int) -> list[FinderPattern]:
    """Return the likeliest finder patterns of a code that fills most of ``picture``, best first."""
    extent = max(picture.shape) / 1.4
    low, high = max(1.0, 0.6 * extent / (17 + 4 * largest)), 1.25 * extent / 21
    steps = max(2, int(np.ceil(np.log(high / low) / np.log(SCALE_STEP))))
    pad = int(np.ceil(2 * high))
    framed = cv2.copyMakeBorder(picture, pad, pad, pad, pad, cv2.BORDER_REPLICATE)  # a pattern may be cut by the edge
    found = [p for module in np.geomspace(low, high, steps) for p in _peaks(framed, float(module), pad)]
    kept: list[FinderPattern] = []
    for pattern in sorted(found, key=lambda p: -p.correlation):
        if all(not _same(pattern, other) for other in kept):
            kept.append(pattern)
        if len(kept) == MAX_PATTERNS:
            break
    return kept


def _same(a: FinderPattern, b: FinderPattern) -> bool:
    apart = float(np.hypot(*(a.centre - b.centre)))
    return apart <= 2.5 * min(a.module_px, b.module_px) and 0.45 < a.module_px / b.module_px < 2.2


@cache
def _rings(module_px: float) -> tuple[Floats, Floats]:
    """Draw a finder pattern with its light border as rings, which fit in any turn; and its mask.

    The pattern has a mean of 0 and a sum of squares of 1 under the mask, and is 0 outside.
    """
    half = int(np.ceil(4.5 * module_px))
    y, x = np.mgrid[-half : half + 1, -half : half + 1].astype(np.float32) / module_px
    radius = np.hypot(x, y)
    ring = np.floor(radius * _APART + 0.5)
    pattern = np.where((ring == 2) | (ring > 3), 1, -1).astype(np.float32)
    soft, mask = cv2.GaussianBlur(pattern, (0, 0), 0.35 * module_px), (radius < 4.4).astype(np.float32)
    soft = (soft - (soft * mask).sum() / mask.sum()) * mask
    return np.asarray(soft / np.sqrt((soft * soft).sum()), np.float32), mask


def _correlation(picture: Floats, pattern: Floats, mask: Floats) -> Floats:
    """Return the correlation in [-1, 1] of each place of ``picture`` with a pattern of `_rings`; about 0 on plain areas.

    As OpenCV's TM_CCOEFF_NORMED under a mask, in half its time: three products in place of six.
    """
    centred = picture - np.float32(128)  # sums of squares near 0 lose no digits
    product, total, squares = (
        cv2.matchTemplate(one, other, cv2.TM_CCORR)
        for one, other in ((centred, pattern), (centred, mask), (centred * centred, mask))
    )
    count = mask.sum()
    spread = np.maximum(squares - total * total / count, count)  # of less than a grey level
    return np.asarray(product / np.sqrt(spread), np.float32)


def _peaks(framed: Floats, module_px: float, pad: int, count: int = 6) -> Iterator[FinderPattern]:
    factor = max(1.0, module_px / ENOUGH_MODULE_PX)
    if factor > 1:
        framed = cv2.resize(framed, None, fx=1 / factor, fy=1 / factor, interpolation=cv2.INTER_AREA)
    small = module_px / factor
    pattern, mask = _rings(round(small, 4))
    if min(framed.shape) <= max(pattern.shape):
        return
    like = _correlation(framed, pattern, mask)
    half, reach = pattern.shape[0] // 2, int(2 * small) + 1
    for _ in range(count):
        y, x = np.unravel_index(int(np.argmax(like)), like.shape)
        if like[y, x] < MIN_CORRELATION:
            return
        centre = (np.array([x, y], np.float64) + half + 0.5) * factor - 0.5 - pad
        yield FinderPattern(centre, module_px, float(like[y, x]))
        like[max(0, y - reach) : y + reach + 1, max(0, x - reach) : x + reach + 1] = 0


_Frame = tuple[Vector, Vector, Vector, float]
"""Centre of the top-left pattern, the ways to the top-right and the bottom-left one, and pixels per module."""


def _triples(patterns: list[FinderPattern]) -> Iterator[_Frame]:
    if len(patterns) < 3:
        return
    chosen = np.array(list(permutations(range(len(patterns)), 3)))
    centres = np.stack([pattern.centre for pattern in patterns])[chosen]
    sizes = np.array([pattern.module_px for pattern in patterns])[chosen]
    across, down = centres[:, 1] - centres[:, 0], centres[:, 2] - centres[:, 0]
    wide, high = np.hypot(*across.T), np.hypot(*down.T)
    module = sizes.prod(1) ** (1 / 3)
    fits = (np.minimum(wide, high) >= 8 * module) & (sizes.max(1) <= 1.7 * sizes.min(1))
    fits &= (wide > 0.4 * high) & (wide < 2.5 * high)
    fits &= across[:, 0] * down[:, 1] - across[:, 1] * down[:, 0] >= 0.45 * wide * high  # clockwise and no sliver
    for one in np.flatnonzero(fits):
        yield centres[one, 0], across[one], down[one], float(module[one])


def _pairs(patterns: list[FinderPattern]) -> Iterator[_Frame]:
    for first, second in permutations(patterns, 2):
        way = second.centre - first.centre
        turned = np.array([-way[1], way[0]])
        module = float(np.sqrt(first.module_px * second.module_px))
        apart = float(np.hypot(*way)) / module
        if max(first.module_px, second.module_px) > 1.6 * min(first.module_px, second.module_px) or apart < 8:
            continue
        yield first.centre, way, turned, module
        yield first.centre, -turned, way, module
        if apart >= 11:  # the ends of a diagonal
            corner = (first.centre + second.centre + turned) / 2
            yield corner, first.centre - corner, second.centre - corner, module


def _codes(origin: Vector, across: Vector, down: Vector, module: float, largest: int) -> Iterator[tuple[int, Vector]]:
    """Yield versions that fit the distance of the patterns, each with its corners.

    Centres lie 3.5 modules inside.
    """
    modules = (float(np.hypot(*across)) + float(np.hypot(*down))) / 2 / module + 7
    likely = (modules - 17) / 4
    for version in range(max(1, int(np.floor(likely - 1))), min(largest, int(np.ceil(likely + 1))) + 1):
        side = 17 + 4 * version
        right, below = across / (side - 7), down / (side - 7)
        start = origin - 3.5 * (right + below)
        corners = np.empty((4, 2))
        corners[0], corners[1] = start, start + side * right
        corners[2], corners[3] = start + side * (right + below), start + side * below
        yield version, corners
