"""Lay the module grid of a QR code over a small, blurred, tilted or bent picture of one.

Every QR code of a version has the same finder, timing and alignment patterns (ISO/IEC 18004, 6.3). A grid
is right when the picture, sampled where those modules should be, correlates with what they should be.
Candidates are parallelograms that just fit a detector's box, in every orientation, and what finder patterns
propose; the best are refined by the cross-entropy method (Rubinstein and Kroese 2004) over the corners and the bows of the edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from arclight.fabric.extras import require
from arclight.vision.qris.reading.finder_patterns import Floats, propose

cv2 = require("cv2", extra="vision")

Box = tuple[float, float, float, float]

MAX_VERSION = 16
"""A payment code has at most version 15; larger codes seldom come small or blurred."""
LEAST_NEAR, LEAST_SCORE = 0.38, 0.48
"""Least correlation after the first refinements and at the end: what scores lower was never read."""
OUTDONE, SAME_GRID = 0.25, 0.7
"""How far below the best a grid is no rival any more; within how many modules at every corner two grids are one."""
BEHIND = 0.12
"""How far below the best on the sharp picture a grid is not refined any more: the gap to the true one only widens."""
PLAIN = 1e-5
"""An area whose variance is a smaller share of its mean square is plain: what float32 leaves of it is rounding, which would fit best of all."""
_COARSE_VERSIONS = (1, 2, 3, 5, 7, 10, 14)


@dataclass(frozen=True)
class UnitPoints:
    """Points (P, 2) of the unit square, as the map of a grid takes them: made once, used for every grid."""

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
    """Fixed modules of one version: their places in the unit square, and the brightness expected there."""

    points: UnitPoints
    wanted: Floats
    """(P,) brightness around a mean of 0: low where a module is dark."""
    sums: Floats
    """(P, 2): ones and ``wanted``, which a product with samples sums up and compares at once."""
    energy: float
    """Sum of the squares of ``wanted``."""


@dataclass(frozen=True)
class Grid:
    """A grid found in a picture: four corners, then four bows of edges, (8, 2) pixels; its ``score``."""

    version: int
    shape: Floats
    score: float

    @property
    def corners(self) -> Floats:
        """Of the code, clockwise from its own top left, (4, 2) pixels."""
        return self.shape[:4]

    @property
    def modules(self) -> int:
        return side_in_modules(self.version)


def side_in_modules(version: int) -> int:
    """Return the modules along a side."""
    return 17 + 4 * version


def alignment_centres(version: int) -> list[int]:
    """Rows (and columns) on which alignment patterns are centred (ISO/IEC 18004, annex E)."""
    if version == 1:
        return []
    last, count = 10 + 4 * version, version // 7 + 2
    step = -(-(last - 6) // (count - 1))
    step = 26 if version == 32 else step + step % 2
    return [6, *(last - step * i for i in range(count - 2, -1, -1))]


@cache
def fixed_modules(version: int) -> npt.NDArray[np.int8]:
    """Return +1 dark, -1 light, 0 data for each module and one ring of quiet zone, (n + 2, n + 2)."""
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
def template(version: int) -> Template:
    """Return the fixed modules of a version, and the light border around the finder patterns."""
    fixed = fixed_modules(version)
    rows, columns = np.nonzero(fixed)
    points = (np.stack([columns, rows], 1) - 0.5) / side_in_modules(version)
    values = fixed[rows, columns].astype(np.float32)
    wanted = values.mean() - values
    sums = np.stack([np.ones_like(wanted), wanted], 1)
    return Template(UnitPoints.of(points.astype(np.float32)), wanted, sums, float(wanted @ wanted))


class Scratch:
    """Arrays that the rounds of one search write over: fresh ones would cost more than what is computed in them."""

    def __init__(self, grids: int, points: int) -> None:
        self.placed = np.empty((3 * grids, points), np.float32)
        self.moved = np.empty((2 * grids, points), np.float32)
        self.seen = np.empty((grids, points), np.float32)


def project_grid(shapes: Floats, points: UnitPoints, scratch: Scratch | None = None) -> tuple[Floats, Floats]:
    """Map points of the unit square into the picture under each of ``shapes`` (N, 8, 2).

    Gives x and y, each (N, P), which lie in ``scratch`` if it is given.

    The projective map of the unit square to four corners (Heckbert 1989, 2.2.3), then each edge bowed by a
    parabola that fades towards the opposite edge.
    """
    a, b, c, d = (shapes[:, i] for i in range(4))  # of (0, 0), (1, 0), (1, 1), (0, 1)
    e1, e2, s = b - c, d - c, a - b + c - d
    cross = e1[:, 0] * e2[:, 1] - e1[:, 1] * e2[:, 0]
    cross = np.where(np.abs(cross) < 1e-6, 1e-6, cross)
    g = ((s[:, 0] * e2[:, 1] - s[:, 1] * e2[:, 0]) / cross)[:, None]
    h = ((e1[:, 0] * s[:, 1] - e1[:, 1] * s[:, 0]) / cross)[:, None]
    count = len(shapes)
    scratch = scratch or Scratch(count, points.linear.shape[1])
    maps = np.empty((3, count, 3), np.float32)  # rows of each homography: of x, of y, and of the depth of a point
    maps[:2, :, 0] = (b - a + g * b).T
    maps[:2, :, 1] = (d - a + h * d).T
    maps[:2, :, 2] = a.T
    maps[2, :, 0], maps[2, :, 1], maps[2, :, 2] = g[:, 0], h[:, 0], 1
    x, y, depth = np.matmul(maps.reshape(3 * count, 3), points.linear, out=scratch.placed).reshape(3, count, -1)
    np.maximum(depth, 0.05, out=depth)
    x /= depth
    y /= depth
    if shapes[:, 4:].any():
        bows = shapes[:, 4:].transpose(2, 0, 1).reshape(2 * count, 4)
        moved_x, moved_y = np.matmul(bows, points.bows, out=scratch.moved).reshape(2, count, -1)
        x += moved_x
        y += moved_y
    return x, y


def sample_bilinear(picture: Floats, x: Floats, y: Floats, out: Floats | None = None) -> Floats:
    """Interpolate the picture at places of any shape, such as (N, P), into ``out`` if it is given."""
    seen = cv2.remap(picture, x, y, cv2.INTER_LINEAR, dst=out, borderMode=cv2.BORDER_REPLICATE)
    return np.asarray(seen, np.float32)


def template_correlation(picture: Floats, shapes: Floats, version: int, scratch: Scratch | None = None) -> Floats:
    """Score the fit of each of ``shapes`` (N, 8, 2): correlation with the version's template, (N,) in [-1, 1]; 0 on a plain area."""
    fixed = template(version)
    scratch = scratch or Scratch(len(shapes), len(fixed.wanted))
    seen = sample_bilinear(picture, *project_grid(shapes, fixed.points, scratch), scratch.seen)
    sums = seen @ fixed.sums
    squares = np.einsum("ij,ij->i", seen, seen)
    spread = squares - sums[:, 0] ** 2 / seen.shape[1]
    norm = np.sqrt(np.maximum(spread, 0) * fixed.energy) + 1e-6
    fit = np.clip(sums[:, 1] / norm, -1, 1)
    fit[spread <= PLAIN * squares] = 0
    return np.asarray(fit, np.float32)


def rectify(picture: Floats, grid: Grid, *, cell: int = 6, quiet: int = 4) -> Floats:
    """Return the code seen straight on, ``cell`` pixels per module, with ``quiet`` modules around it."""
    size = (grid.modules + 2 * quiet) * cell
    x, y = project_grid(grid.shape[None], _raster(grid.modules, cell, quiet))
    return sample_bilinear(picture, x.reshape(size, size), y.reshape(size, size))


@cache
def _raster(modules: int, cell: int, quiet: int) -> UnitPoints:
    """Centres of the pixels of a rectified code."""
    size = (modules + 2 * quiet) * cell
    along = ((np.arange(size, dtype=np.float32) + 0.5) / cell - quiet) / modules
    return UnitPoints.of(np.stack(np.meshgrid(along, along), -1).reshape(-1, 2).astype(np.float32))


def _shapes(quads: npt.NDArray[np.generic]) -> Floats:
    """Clockwise quadrilaterals (N, 4, 2) in all four turns, edges straight: (4 N, 8, 2).

    A mirrored code needs no shapes of its own: the fixed modules are symmetric about the main diagonal.
    """
    ordered = np.concatenate([np.roll(quads, turn, axis=1) for turn in range(4)])
    return np.concatenate([ordered, np.zeros_like(ordered)], 1).astype(np.float32)


def clockwise(quad: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Return the corners in the order in which a clock's hand passes them."""
    x, y = quad.T
    area = np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))
    return quad if area > 0 else quad[::-1]


def parallelograms(box: Box, steps: int = 9) -> Floats:
    """Parallelograms whose hull is about ``box`` (x0, y0, x1, y1), in all turns: (N, 8, 2)."""
    share = np.linspace(0, 1, steps)
    p, q = (v.ravel() for v in np.meshgrid(share, share, indexing="ij"))
    fat = np.abs(1 - p - q + 2 * p * q) > 0.25  # area as a share of the box: slivers are no codes
    p, q, zero = p[fat], q[fat], np.zeros(int(fat.sum()))
    corners = ((p, zero), (zero + 1, q), (1 - p, zero + 1), (zero, 1 - q))
    unit = np.stack([np.stack(corner, -1) for corner in corners], 1) - 0.5
    quads = np.concatenate([unit * scale for scale in (0.88, 0.96, 1.04)])
    x0, y0, x1, y1 = box
    return _shapes(quads * [x1 - x0, y1 - y0] + [(x0 + x1) / 2, (y0 + y1) / 2])


def refine(picture: Floats, near: Grid, *, rounds: int, bow: float, spread: float = 0.033, count: int = 64) -> Grid:
    """Refine ``near``: sample grids of its version around it, keep the best sixth, ``rounds`` times.

    ``spread`` and ``bow`` are how far corners may move and edges may bow at first, as shares of the code's diagonal.
    """
    start = near.shape
    size = start.size
    reach = float(np.hypot(*(start[2] - start[0])) + np.hypot(*(start[3] - start[1]))) / 2
    mean = start.reshape(-1).astype(np.float64)
    covariance = np.diag(np.repeat([spread * reach, bow * reach], size // 2) ** 2)
    best, best_score = start, -1.0
    scratch = Scratch(count, len(template(near.version).wanted))
    for drawn in _draws(rounds, count, size):
        covariance.flat[:: size + 1] += 1e-6
        tries = mean + drawn @ np.linalg.cholesky(covariance).T
        tries[0] = best.reshape(-1)
        shapes = tries.reshape(count, *start.shape).astype(np.float32)
        fit = template_correlation(picture, shapes, near.version, scratch)
        elite = np.argsort(-fit)[: count // 6]
        if fit[elite[0]] > best_score:
            best, best_score = shapes[elite[0]], float(fit[elite[0]])
        chosen = tries[elite]
        mean = chosen.sum(0) / len(elite)
        centred = chosen - mean
        # Half of the old spread stays on the diagonal: ten samples alone would collapse the search too early.
        kept = 0.2 * np.diagonal(covariance)
        covariance = centred.T @ centred * (0.6 / len(elite))
        covariance.flat[:: size + 1] += kept
    return Grid(near.version, best, best_score)


@cache
def _draws(rounds: int, count: int, size: int) -> npt.NDArray[np.float64]:
    """Draw standard normal numbers (rounds, count, size), the same ones for every grid."""
    drawn = np.random.default_rng(0).standard_normal((rounds, count, size))
    drawn.flags.writeable = False
    return drawn


def find_grids(picture: Floats, box: Box, largest: int, quads: Sequence[npt.NDArray[np.generic]] = ()) -> list[Grid]:
    """Find the likeliest grids of one code near ``box`` (xyxy pixels), best first, to be finished.

    ``largest`` is the highest version tried.

    ``quads`` are corners (4, 2) that other finders propose; any of them may be the first. From coarse to fine: all
    proposals on a blurred picture, the best of them refined there, then on the sharp one.
    """
    extent = max(box[2] - box[0], box[3] - box[1])
    soft = cv2.GaussianBlur(picture, (0, 0), max(0.5, extent / 60))  # wrong by half a module should still score
    rough = _rough(picture, soft, box, largest, quads)
    near = [_right_version(soft, refine(soft, grid, rounds=6, bow=0.01), largest) for grid in rough]
    return _sharpened(picture, _rivals(sorted(near, key=_worst_last))[:6], largest)


NEAR_SPREAD, LEAST_SOFT = 0.05, 0.5
"""How far roughly known corners are tried from where they are said to be, a standard deviation in sides of the code; and the least
correlation on the blurred picture there that is followed further."""


def grids_near(picture: Floats, quad: Floats, largest: int) -> list[Grid]:
    """Find the likeliest grids of the code whose corners are about ``quad`` (4, 2), clockwise from any; best first, to be finished.

    A third of the work of `find_grids`, or less where nothing there looks like a grid.
    """
    side = float(np.hypot(*(quad - np.roll(quad, 1, axis=0)).T).mean())
    soft = cv2.GaussianBlur(picture, (0, 0), max(0.5, side / 50))
    moved = _draws(1, 16, 8)[0].reshape(-1, 4, 2) * (NEAR_SPREAD * side)
    moved[0] = 0
    shapes = _shapes(quad + moved)
    rough: list[Grid] = []
    for version in range(1, largest + 1):
        fit = template_correlation(soft, shapes, version)
        for turn in np.array_split(np.arange(len(shapes)), 4):
            best = turn[int(np.argmax(fit[turn]))]
            rough.append(Grid(version, shapes[best], float(fit[best])))
    rough = sorted(rough, key=_worst_last)[:6]
    near = [_right_version(soft, refine(soft, grid, rounds=4, bow=0.01), largest) for grid in rough]
    near = [refine(soft, grid, rounds=5, bow=0.01) for grid in _rivals(sorted(near, key=_worst_last))[:2]]
    return _sharpened(picture, [grid for grid in near if grid.score >= LEAST_SOFT], largest)


def follow_grids(picture: Floats, grids: Sequence[Grid], largest: int) -> list[Grid]:
    """Find grids again that were found in another view of the same code, given in pixels of ``picture``; as `find_grids`."""
    return _sharpened(picture, _rivals(list(grids))[:2], largest)


def _sharpened(picture: Floats, near: list[Grid], largest: int) -> list[Grid]:
    """Refine grids on the sharp picture that were refined on the blurred one; best first."""
    sharp = (_right_version(picture, refine(picture, grid, rounds=8, bow=0.02), largest) for grid in near)
    return sorted(sharp, key=_worst_last)


def finish_grids(picture: Floats, near: list[Grid]) -> list[Grid]:
    """Refine the likeliest of ``near`` (best first) until they fit; none where no likely one is left."""
    bows = (0.01, 0.05)  # flat things first of all; then sheets around bottles, whose freedom would blur a flat fit
    best = [grid for grid in near[:3] if grid.score > max(LEAST_NEAR, near[0].score - BEHIND)]
    found = sorted((refine(picture, grid, rounds=14, bow=bow) for grid in best for bow in bows), key=_worst_last)
    if not found or found[0].score < LEAST_SCORE:
        return []
    fine = (refine(picture, found[0], rounds=20, bow=b, spread=s, count=96) for s, b in ((0.006, 0.006), (0.012, 0.02)))
    return sorted([*fine, *(grid for grid in found if grid.score > found[0].score - 0.1)], key=_worst_last)


def _rivals(near: list[Grid]) -> list[Grid]:
    """Drop from ``near`` (best first) the same grids found again, and those that the best one leaves far behind."""
    kept: list[Grid] = []
    for grid in near:
        if grid.score < near[0].score - OUTDONE:
            break
        module = float(np.hypot(*(grid.corners[2] - grid.corners[0]))) / (1.42 * grid.modules)
        if all(
            grid.version != other.version or np.abs(grid.corners - other.corners).max() > SAME_GRID * module
            for other in kept
        ):
            kept.append(grid)
    return kept


def _rough(
    picture: Floats, soft: Floats, box: Box, largest: int, quads: Sequence[npt.NDArray[np.generic]]
) -> list[Grid]:
    """Return the ten proposals that fit the blurred picture best, of all sources and versions."""
    shapes = parallelograms(box)
    if quads:
        shapes = np.concatenate([shapes, _shapes(np.stack([clockwise(quad) for quad in quads]))])
    proposed: dict[int, list[Floats]] = {version: [shapes] for version in _COARSE_VERSIONS if version <= largest}
    for proposal in propose(picture, largest):
        straight = np.concatenate([proposal.corners, np.zeros((4, 2))])[None].astype(np.float32)
        proposed.setdefault(proposal.version, []).append(straight)
    rough: list[Grid] = []
    apart = 0.08 * max(picture.shape) / 1.4
    for version, parts in sorted(proposed.items()):
        shapes = np.concatenate(parts)
        fit = template_correlation(soft, shapes, version)
        kept: list[Grid] = []
        for index in np.argsort(-fit)[:40]:
            grid = Grid(version, shapes[index], float(fit[index]))
            if all(np.abs(grid.corners - other.corners).max() > apart for other in kept):
                kept.append(grid)
            if len(kept) == 3:
                break
        rough += kept
    return sorted(rough, key=_worst_last)[:10]


def _right_version(picture: Floats, grid: Grid, largest: int) -> Grid:
    """Return the same grid as the neighbouring version that fits best: finder patterns alone say little about it."""
    around = range(max(1, grid.version - 2), min(largest, grid.version + 2) + 1)
    tried = [Grid(v, grid.shape, float(template_correlation(picture, grid.shape[None], v)[0])) for v in around]
    return min(tried, key=_worst_last)


def _worst_last(grid: Grid) -> float:
    return -grid.score
