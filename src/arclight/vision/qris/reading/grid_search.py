"""Search a picture for the module grid of a QR code, coarse to fine.

`decode` calls `find_grids`, `grids_near` and `refined_grids`, and reads the modules of each grid; `evidence` takes `by_version`, `video`
`PLAIN_SCORE`. A box or rough corners come in, grids go out, best first. The search may change if ``benchmarks/qr_photos.py`` reads as many
codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from arclight.fabric.extras import require
from arclight.vision.qris.reading.finder_patterns import Floats, Frames, find_patterns, pairs, triples
from arclight.vision.qris.reading.grid import Box, Grid, clockwise, homographies, template_correlation
from arclight.vision.qris.reading.refinement import Slopes, climb, right_versions

cv2 = require("cv2", extra="vision")

OUTDONE, SAME_GRID = 0.25, 0.7
"""Correlation below the best beyond which a grid is no rival, and distance in modules, at every corner, within which two grids count as
one."""
PLAIN_SCORE = 0.75
"""Correlation from which a grid is surely right: no other proposals are tried."""
ENOUGH_MODULE_PX = 1.5
"""Pixels per module at which finder patterns are looked for here: places about right are enough."""
MAX_IN_PAIRS = 6
MIN_PAIR_CORRELATION = 0.37
"""Least correlation of the two likeliest finder patterns, in their mean, at which grids are looked for: codes that were read had 0.38 and
more, two in seven boxes without a code have less."""
ROUGH, RIVALS = 10, 6
"""Numbers of proposals refined on the blurred picture, and of those refined again on the sharp one."""
MIN_ROUGH_SCORE = 0.16
"""Least correlation with the blurred picture of a proposal that is refined: codes that were read in photos began with 0.19 and more, one of
193 in drawn scenes with less than 0.185."""
MIN_LIKELY_SCORE = 0.3
"""Least correlation with the blurred picture of a place by three finder patterns for it to be refined before others are looked for."""
MIN_SOFT_SCORE = 0.25
"""Least correlation of the best grid refined on the blurred picture for grids to be refined on the sharp one: boxes that were read in photos
had 0.32 and more, nearly all 0.56; four in five boxes without a code have less than this."""
MANY, SHARE = 120, 0.25
"""Proposals of a version beyond which they are compared at a share of the fixed modules, and as many of the best at all of them."""
ROUNDS = 8
_COARSE_VERSIONS = (1, 2, 3, 5, 7, 10, 14)

Quads = Sequence[npt.NDArray[np.generic]]


def shapes_of(quads: npt.NDArray[np.generic]) -> Floats:
    """Return quadrilaterals (N, 4, 2) as shapes (N, 8, 2) of straight edges."""
    return np.concatenate([quads, np.zeros_like(quads)], 1).astype(np.float32)


def turned(quads: npt.NDArray[np.generic]) -> Floats:
    """Return clockwise quadrilaterals (N, 4, 2) in all four rotations, as shapes (4 N, 8, 2).

    A mirrored code needs no shapes of its own: the fixed modules are symmetric about the main diagonal.
    """
    return shapes_of(np.concatenate([np.roll(quads, turn, axis=1) for turn in range(4)]))


@cache
def _unit_parallelograms(steps: int = 9) -> npt.NDArray[np.float64]:
    share = np.linspace(0, 1, steps)
    p, q = (v.ravel() for v in np.meshgrid(share, share, indexing="ij"))
    fat = np.abs(1 - p - q + 2 * p * q) > 0.25  # area as a share of the box: slivers are no codes
    p, q, zero = p[fat], q[fat], np.zeros(int(fat.sum()))
    corners = ((p, zero), (zero + 1, q), (1 - p, zero + 1), (zero, 1 - q))
    unit = np.stack([np.stack(corner, -1) for corner in corners], 1) - 0.5
    return np.concatenate([unit * scale for scale in (0.88, 0.96, 1.04)])


def parallelograms(box: Box) -> Floats:
    """Return parallelograms that fit ``box`` (x0, y0, x1, y1), in all rotations: (N, 8, 2)."""
    x0, y0, x1, y1 = box
    return turned(_unit_parallelograms() * [x1 - x0, y1 - y0] + [(x0 + x1) / 2, (y0 + y1) / 2])


class _Search:
    """Search for the grid of one code in one picture.

    The picture is blurred once: a grid that is wrong by half a module should still score.
    """

    def __init__(self, sharp: Slopes, extent: float, largest: int) -> None:
        self.sharp, self.largest = sharp, largest
        self.soft = Slopes(cv2.GaussianBlur(sharp.picture, (0, 0), max(0.5, extent / 60)))

    def refined(self, rough: Sequence[Grid]) -> list[Grid]:
        """Refine ``rough`` grids on the blurred picture, then the best on the sharp one.

        Best first. Those that fit the blurred picture too badly stay as they are there.
        """
        best = max((grid.score for grid in rough), default=0.0)
        likely = [grid for grid in rough if grid.score >= best - OUTDONE]
        near = right_versions(self.soft.picture, climb(self.soft, likely, rounds=ROUNDS), self.largest)
        near = rivals(sorted(near, key=worst_last))[:RIVALS]
        if not near or near[0].score < MIN_SOFT_SCORE:
            return near
        return refined_grids(self.sharp, near, self.largest)

    def rough(self, proposed: Iterable[tuple[int, Floats]]) -> list[Grid]:
        """Return the proposals of each version that fit the blurred picture best; best first."""
        apart = 0.08 * max(self.sharp.picture.shape) / 1.4
        rough: list[Grid] = []
        mapped, maps = None, np.empty((0, 3, 3), np.float32)
        for version, shapes in proposed:
            if shapes is not mapped:  # many versions are proposed at the same places
                mapped, maps = shapes, homographies(shapes)
            chosen = maps
            if len(shapes) > MANY:
                fit = template_correlation(self.soft.picture, shapes, version, SHARE, maps)
                best = np.argsort(-fit)[:MANY]
                shapes, chosen = shapes[best], maps[best]
            fit = template_correlation(self.soft.picture, shapes, version, maps=chosen)
            order = np.argsort(-fit)[:40]
            order = order[fit[order] >= MIN_ROUGH_SCORE]
            kept = _distinct(shapes[order, :4], apart, 3)
            rough += [Grid(version, shapes[one], float(fit[one])) for one in order[kept]]
        return sorted(rough, key=worst_last)[:ROUGH]


def refined_grids(sharp: Slopes, near: Sequence[Grid], largest: int) -> list[Grid]:
    """Refine on the sharp picture grids found on a blurred one, or in another view; best first.

    Edges of these are straight.
    """
    return sorted(right_versions(sharp.picture, climb(sharp, near, rounds=ROUNDS), largest), key=worst_last)


def _distinct(quads: Floats, apart: float, most: int) -> list[int]:
    """Return the first ``most`` of ``quads`` (N, 4, 2) that differ by ``apart`` at a corner."""
    kept: list[int] = []
    free = np.ones(len(quads), bool)
    while len(kept) < most and free.any():
        first = int(free.argmax())
        kept.append(first)
        free &= np.abs(quads - quads[first]).max((1, 2)) > apart
    return kept


def by_version(frames: Frames, largest: int) -> list[tuple[int, Floats]]:
    versions, corners = frames.proposals(largest)
    shapes = shapes_of(corners)
    return [(int(version), shapes[versions == version]) for version in np.unique(versions)]


def find_grids(sharp: Slopes, box: Box, largest: int, more: Callable[[], Quads] | None = tuple) -> list[Grid]:
    """Find the likeliest grids of one code near ``box`` (xyxy pixels), best first.

    ``largest`` is the highest version tried. None are found where not even two finder patterns are likely. Three patterns lead to most
    grids. If they lead to none beyond doubt, two are tried, parallelograms that just fit the box, and the corners (4, 2) that
    ``more()`` gives, any of which may be the first; unless ``more`` is None, which ends the search there.
    """
    patterns = find_patterns(sharp.picture, largest, ENOUGH_MODULE_PX)
    if sum(pattern.correlation for pattern in patterns[:2]) < 2 * MIN_PAIR_CORRELATION:
        return []
    search = _Search(sharp, max(box[2] - box[0], box[3] - box[1]), largest)
    found, left = [], search.rough(by_version(triples(patterns), largest))
    if more is None or (left and left[0].score >= MIN_LIKELY_SCORE):
        found, left = search.refined(left), []
    if more is None or (found and found[0].score >= PLAIN_SCORE):
        return found
    shapes = parallelograms(box)
    if quads := more():
        shapes = np.concatenate([shapes, turned(np.stack([clockwise(quad) for quad in quads]))])
    proposed = [(version, shapes) for version in _COARSE_VERSIONS if version <= largest]
    proposed += by_version(pairs(patterns[:MAX_IN_PAIRS]), largest)
    return sorted([*found, *search.refined([*left, *search.rough(proposed)])], key=worst_last)


NEAR_SPREAD = 0.05
"""How far roughly known corners are tried from where they are said to be, a standard deviation in sides of the code."""


def grids_near(sharp: Slopes, quad: Floats, largest: int) -> list[Grid]:
    """Find the likeliest grids of the code with the rough corners ``quad`` (4, 2).

    Corners are clockwise from any; else as `find_grids`.
    """
    side = float(np.hypot(*(quad - np.roll(quad, 1, axis=0)).T).mean())
    moved = np.random.default_rng(0).standard_normal((16, 4, 2)) * (NEAR_SPREAD * side)
    moved[0] = 0
    shapes = turned(quad + moved)
    search = _Search(sharp, 1.2 * side, largest)
    return search.refined(search.rough((version, shapes) for version in range(1, largest + 1)))


def rivals(near: list[Grid]) -> list[Grid]:
    """Drop from ``near`` grids (best first) duplicates, and those far worse than the best."""
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


def worst_last(grid: Grid) -> float:
    return -grid.score
