"""Model the module grid of a QR code, and measure how well a picture fits one.

Every QR code of a version has the same finder, timing and alignment patterns (ISO/IEC 18004, 6.3). A grid
is right when the picture, sampled where those modules should be, correlates with what they should be. Grids may be tilted and bent.
`grid_search` proposes grids, `refinement` moves them to where they fit best, `decode` and `video` read under them. `fixed_modules` is the
standard's and must stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from arclight.fabric.extras import require
from arclight.vision.qris.reading.finder_patterns import Floats

cv2 = require("cv2", extra="vision")

FloatT = TypeVar("FloatT", bound=np.floating)
Box = tuple[float, float, float, float]

MAX_VERSION = 16
"""A payment code has at most version 15; larger codes seldom come small or blurred."""
PLAIN = 1e-5
"""An area whose variance is a smaller share of its mean square is plain, and correlates with nothing: what is left of it is rounding."""


@dataclass(frozen=True)
class UnitPoints:
    """Points (P, 2) of the unit square, prepared for the map of any grid."""

    linear: Floats
    """(3, P): x, y, 1."""
    bows: Floats
    """(4, P): how far the bow of each edge (top, right, bottom, left) moves a point."""

    @classmethod
    def of(cls, points: Floats) -> UnitPoints:
        x, y = points[:, 0], points[:, 1]
        bow_x, bow_y = 4 * x * (1 - x), 4 * y * (1 - y)
        bows = np.stack([bow_x * (1 - y), bow_y * x, bow_x * y, bow_y * (1 - x)])
        return cls(np.stack([x, y, np.ones_like(x)]), bows)


@dataclass(frozen=True)
class Template:
    """Fixed modules of one version: their places in the unit square, and expected brightness."""

    points: UnitPoints
    expected: Floats
    """(P,) brightness around a mean of 0: low where a module is dark."""
    sums: Floats
    """(P, 2): ones and ``expected``, which a product with samples sums up and compares at once."""
    energy: float
    """Sum of the squares of ``expected``."""


@dataclass(frozen=True)
class Grid:
    """Grid found in a picture: ``shape`` (8, 2) of four corners and four edge bows, and score.

    Corners and bows are in pixels.
    """

    version: int
    shape: Floats
    score: float

    @property
    def corners(self) -> Floats:
        """Return the code's corners, clockwise from its own top left, (4, 2) pixels."""
        return self.shape[:4]

    @property
    def modules(self) -> int:
        return side_in_modules(self.version)


def side_in_modules(version: int) -> int:
    """Return the modules along a side."""
    return 17 + 4 * version


def alignment_centres(version: int) -> list[int]:
    """Return the rows (and columns) of alignment pattern centres (ISO/IEC 18004, annex E)."""
    if version == 1:
        return []
    last, count = 10 + 4 * version, version // 7 + 2
    step = -(-(last - 6) // (count - 1))
    step = 26 if version == 32 else step + step % 2
    return [6, *(last - step * i for i in range(count - 2, -1, -1))]


@cache
def fixed_modules(version: int) -> npt.NDArray[np.int8]:
    """Return +1 dark, -1 light, 0 data per module and one ring of quiet zone, (n + 2, n + 2)."""
    size = side_in_modules(version)
    fixed = np.zeros((size + 2, size + 2), np.int8)
    finder = np.full((9, 9), -1, np.int8)
    finder[1:8, 1:8] = 1
    finder[2:7, 2:7] = -1
    finder[3:6, 3:6] = 1
    fixed[7, 1:-1] = fixed[1:-1, 7] = 1 - 2 * (np.arange(size) % 2)
    for row, column in ((0, 0), (0, size - 7), (size - 7, 0)):
        fixed[row : row + 9, column : column + 9] = finder
    ring = np.maximum.outer(np.abs(np.arange(-2, 3)), np.abs(np.arange(-2, 3)))
    centres = alignment_centres(version)
    for row in centres:
        for column in centres:
            if (row, column) not in {(6, 6), (6, size - 7), (size - 7, 6)}:
                fixed[row - 1 : row + 4, column - 1 : column + 4] = np.where(ring % 2 == 0, 1, -1)
    fixed.flags.writeable = False
    return fixed


@cache
def template(version: int, share: float = 1.0) -> Template:
    """Return the fixed modules of a version, and the light border around the finder patterns.

    Of them only a random ``share``, the same each time.
    """
    fixed = fixed_modules(version)
    rows, columns = np.nonzero(fixed)
    if share < 1:
        few = np.sort(np.random.default_rng(0).permutation(len(rows))[: round(share * len(rows))])
        rows, columns = rows[few], columns[few]
    points = (np.stack([columns, rows], 1) - 0.5) / side_in_modules(version)
    values = fixed[rows, columns].astype(np.float32)
    expected = values.mean() - values
    sums = np.stack([np.ones_like(expected), expected], 1)
    return Template(UnitPoints.of(points.astype(np.float32)), expected, sums, float(expected @ expected))


def homographies(shapes: npt.NDArray[FloatT]) -> npt.NDArray[FloatT]:
    """Return homographies (N, 3, 3) from the unit square to the corners of ``shapes`` (N, 8, 2).

    Heckbert 1989, 2.2.3.
    """
    a, b, c, d = (shapes[:, i] for i in range(4))  # of (0, 0), (1, 0), (1, 1), (0, 1)
    e1, e2, s = b - c, d - c, a - b + c - d
    cross = e1[:, 0] * e2[:, 1] - e1[:, 1] * e2[:, 0]
    cross = np.where(np.abs(cross) < 1e-6, 1e-6, cross)
    g = ((s[:, 0] * e2[:, 1] - s[:, 1] * e2[:, 0]) / cross)[:, None]
    h = ((e1[:, 0] * s[:, 1] - e1[:, 1] * s[:, 0]) / cross)[:, None]
    maps = np.empty((len(shapes), 3, 3), shapes.dtype)  # rows: of x, of y, and of the depth of a point
    maps[:, :2, 0], maps[:, :2, 1], maps[:, :2, 2] = b - a + g * b, d - a + h * d, a
    maps[:, 2, 0], maps[:, 2, 1], maps[:, 2, 2] = g[:, 0], h[:, 0], 1
    return maps


def project_grid(shapes: Floats, points: UnitPoints, maps: Floats | None = None) -> tuple[Floats, Floats]:
    """Map points of the unit square into the picture under each of ``shapes`` (N, 8, 2).

    Gives x and y, each (N, P). ``maps``: the `homographies` of the shapes, if they are known. After the projective map of the unit square
    to four corners, each edge is bowed by a parabola that fades towards the opposite edge.
    """
    count = len(shapes)
    maps = homographies(shapes) if maps is None else maps
    rows = maps.transpose(1, 0, 2).reshape(3 * count, 3).astype(np.float32, copy=False)
    x, y, depth = (rows @ points.linear).reshape(3, count, -1)
    np.maximum(depth, 0.05, out=depth)
    x /= depth
    y /= depth
    if shapes[:, 4:].any():
        bows = shapes[:, 4:].transpose(2, 0, 1).reshape(2 * count, 4)
        moved_x, moved_y = (bows @ points.bows).reshape(2, count, -1)
        x += moved_x
        y += moved_y
    return x, y


def sample_bilinear(picture: Floats, x: Floats, y: Floats) -> Floats:
    """Interpolate the picture at places of any shape, such as (N, P)."""
    seen = cv2.remap(picture, x, y, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)
    return np.asarray(seen, np.float32)


def template_correlation(
    picture: Floats, shapes: Floats, version: int, share: float = 1.0, maps: Floats | None = None
) -> Floats:
    """Correlate ``shapes`` (N, 8, 2) with the version's template, (N,) in [-1, 1].

    It is 0 on a plain area. ``share`` as in `template`, ``maps`` as in `project_grid`.
    """
    fixed = template(version, share)
    seen = sample_bilinear(picture, *project_grid(shapes, fixed.points, maps))
    sums = seen @ fixed.sums
    squares = np.einsum("ij,ij->i", seen, seen)
    spread = squares - sums[:, 0] ** 2 / seen.shape[1]
    norm = np.sqrt(np.maximum(spread, 0) * fixed.energy) + 1e-6
    fit = np.clip(sums[:, 1] / norm, -1, 1)
    fit[spread <= PLAIN * squares] = 0
    return np.asarray(fit, np.float32)


def rectify(picture: Floats, grid: Grid, *, cell: int = 6, quiet: int = 4) -> Floats:
    """Rectify the code: ``cell`` pixels per module, ``quiet`` modules around it."""
    size = (grid.modules + 2 * quiet) * cell
    x, y = project_grid(grid.shape[None], _raster(grid.modules, cell, quiet))
    return sample_bilinear(picture, x.reshape(size, size), y.reshape(size, size))


@cache
def _raster(modules: int, cell: int, quiet: int) -> UnitPoints:
    """Return the pixel centres of a rectified code."""
    size = (modules + 2 * quiet) * cell
    along = ((np.arange(size, dtype=np.float32) + 0.5) / cell - quiet) / modules
    return UnitPoints.of(np.stack(np.meshgrid(along, along), -1).reshape(-1, 2).astype(np.float32))


def clockwise(quad: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Return the corners in the order in which a clock's hand passes them."""
    x, y = quad.T
    area = np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))
    return quad if area > 0 else quad[::-1]
