"""Propose the corners of a QR code from its finder patterns, as start values of `grid`.

`grid_search` and `evidence` call it, ``verification.tampering`` `find_patterns` alone. In: a grey image; out: candidate patterns and corners. A
candidate costs time, a missed one the code: thresholds may be tuned on ``benchmarks/qr_photos.py``, but `tampering` was fitted with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    """Candidate finder pattern: centre (x, y), pixels per module, correlation in [-1, 1]."""

    centre: Vector
    module_px: float
    correlation: float


def find_patterns(picture: Floats, largest: int, enough_px: float = ENOUGH_MODULE_PX) -> list[FinderPattern]:
    """Return the likeliest finder patterns of a code that fills most of ``picture``, best first."""
    extent = max(picture.shape) / 1.4
    low, high = max(1.0, 0.6 * extent / (17 + 4 * largest)), 1.25 * extent / 21
    steps = max(2, int(np.ceil(np.log(high / low) / np.log(SCALE_STEP))))
    pad = int(np.ceil(2 * high))
    framed = cv2.copyMakeBorder(picture, pad, pad, pad, pad, cv2.BORDER_REPLICATE)  # a pattern may be cut by the edge
    found = [p for module in np.geomspace(low, high, steps) for p in _peaks(framed, float(module), pad, enough_px)]
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
    """Correlate each place of ``picture`` with a pattern of `_rings`; in [-1, 1].

    It is about 0 on plain areas. As OpenCV's TM_CCOEFF_NORMED under a mask, in half its time: three products in place
    of six.
    """
    centred = picture - np.float32(128)  # sums of squares near 0 lose no digits
    product, total, squares = (
        cv2.matchTemplate(one, other, cv2.TM_CCORR)
        for one, other in ((centred, pattern), (centred, mask), (centred * centred, mask))
    )
    count = mask.sum()
    spread = np.maximum(squares - total * total / count, count)  # of less than a grey level
    return np.asarray(product / np.sqrt(spread), np.float32)


def _peaks(framed: Floats, module_px: float, pad: int, enough_px: float, count: int = 6) -> Iterator[FinderPattern]:
    factor = max(1.0, module_px / enough_px)
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


@dataclass(frozen=True)
class Frames:
    """Hold F places of codes by their finder patterns, (F, 2) each but the last.

    Centres of the top-left patterns, the ways from there to the top-right and the bottom-left ones, and pixels per module (F,).
    """

    origin: Vector
    across: Vector
    down: Vector
    module_px: Vector

    def proposals(self, largest: int) -> tuple[npt.NDArray[np.intp], Vector]:
        """Return versions (M,) that fit the distance of the patterns, and corners (M, 4, 2).

        Centres lie 3.5 modules inside.
        """
        modules = (np.hypot(*self.across.T) + np.hypot(*self.down.T)) / 2 / self.module_px + 7
        likely = (modules - 17) / 4
        first, last = np.maximum(np.floor(likely - 1), 1), np.minimum(np.ceil(likely + 1), largest)
        tried = first[:, None] + np.arange(4)
        frame, column = np.nonzero(tried <= last[:, None])
        version = tried[frame, column].astype(np.intp)
        side = 17.0 + 4 * version[:, None]
        right, below = self.across[frame] / (side - 7), self.down[frame] / (side - 7)
        start = self.origin[frame] - 3.5 * (right + below)
        corners = np.stack([start, start + side * right, start + side * (right + below), start + side * below], 1)
        return version, corners


def triples(patterns: Sequence[FinderPattern]) -> Frames:
    """Return parallelograms of three patterns."""
    chosen = np.array(list(permutations(range(len(patterns)), 3)), np.intp).reshape(-1, 3)
    centres = np.array([pattern.centre for pattern in patterns]).reshape(-1, 2)[chosen]
    sizes = np.array([pattern.module_px for pattern in patterns])[chosen]
    across, down = centres[:, 1] - centres[:, 0], centres[:, 2] - centres[:, 0]
    wide, high = np.hypot(*across.T), np.hypot(*down.T)
    module = sizes.prod(1) ** (1 / 3)
    fits = (np.minimum(wide, high) >= 8 * module) & (sizes.max(1) <= 1.7 * sizes.min(1))
    fits &= (wide > 0.4 * high) & (wide < 2.5 * high)
    fits &= across[:, 0] * down[:, 1] - across[:, 1] * down[:, 0] >= 0.45 * wide * high  # clockwise and no sliver
    return Frames(centres[fits, 0], across[fits], down[fits], module[fits])


def pairs(patterns: Sequence[FinderPattern]) -> Frames:
    """Return candidate squares of two finder patterns, for codes of which the third is hidden.

    They are on either side of the two, and around them as a diagonal.
    """
    chosen = np.array(list(permutations(range(len(patterns)), 2)), np.intp).reshape(-1, 2)
    centres = np.array([pattern.centre for pattern in patterns]).reshape(-1, 2)[chosen]
    sizes = np.array([pattern.module_px for pattern in patterns])[chosen]
    first, second = centres[:, 0], centres[:, 1]
    way, module = second - first, np.sqrt(sizes.prod(1))
    turned = np.stack([-way[:, 1], way[:, 0]], 1)
    apart = np.hypot(*way.T) / module
    fits = (sizes.max(1) <= 1.6 * sizes.min(1)) & (apart >= 8)
    ends = fits & (apart >= 11)
    corner = (first + second + turned) / 2
    return Frames(
        np.concatenate([first[fits], first[fits], corner[ends]]),
        np.concatenate([way[fits], -turned[fits], (first - corner)[ends]]),
        np.concatenate([turned[fits], way[fits], (second - corner)[ends]]),
        np.concatenate([module[fits], module[fits], module[ends]]),
    )
