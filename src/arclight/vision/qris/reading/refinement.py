"""Refine module grids by gradient ascent of their correlation with the fixed modules.

Steps are those of enhanced correlation (Evangelidis and Psarakis 2008), damped as Marquardt (1963) does, over the projective map of a
grid and, if asked, the bows of its edges. One grid alone costs little less than ten together. What fixed modules leave open, above
all the corner of a small code that has no finder pattern, is decided by how stiff a grid is: perspective and bows cost correlation.

`grid_search` and `decode` call it on proposals. Steps and stiffness may be tuned on the benchmark of photos.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from arclight.fabric.extras import require
from arclight.vision.qris.reading.finder_patterns import Floats
from arclight.vision.qris.reading.grid import MAX_VERSION, Grid, homographies, template

cv2 = require("cv2", extra="vision")

Doubles = npt.NDArray[np.float64]
Versions = npt.NDArray[np.intp]

ENOUGH_GAIN = 1e-4
"""Gain in correlation of a step below which a grid has arrived."""
LEAST_DEPTH = 0.15
"""Least depth of the nearest corner as a share of the farthest one's: what leans more is no code that can be read."""
DAMPING, LEAST_DAMPING, MAX_DAMPING = 0.01, 1e-4, 10.0


@dataclass(frozen=True)
class Stiffness:
    """Penalty in correlation for a grid that leans or bows.

    ``lean`` times the square of how much farther one edge is than the opposite one, as a share; ``bow`` times the square of an
    edge's bow in sides of the code, None if edges stay straight.
    """

    lean: float = 0.0
    bow: float | None = None


FREE = Stiffness()
"""Stiffness of the search: any perspective, straight edges."""


@dataclass(frozen=True)
class Templates:
    """Templates of N versions, padded to one length P."""

    linear: Floats
    """(N, 3, P), see `grid.UnitPoints`."""
    bows: Floats
    """(N, 4, P)"""
    expected: Floats
    """(N, P), of mean 0 and length 1; 0 beyond a version's own points."""
    weight: Floats
    """(N, P): 1 on a version's own points, 0 beyond."""
    counts: Floats
    """(N,) points of each version."""

    @classmethod
    def of(cls, versions: Versions) -> Templates:
        """Gather the templates of ``versions`` (N,)."""
        every, rows = _every_template(), versions - 1
        most = int(every.counts[rows].max())
        return cls(
            every.linear[rows, :, :most], every.bows[rows, :, :most],
            every.expected[rows, :most], every.weight[rows, :most], every.counts[rows],
        )  # fmt: skip


@cache
def _every_template() -> Templates:
    made = [template(version) for version in range(1, MAX_VERSION + 1)]
    count, most = len(made), max(len(one.expected) for one in made)
    linear, bows = np.zeros((count, 3, most), np.float32), np.zeros((count, 4, most), np.float32)
    expected, weight = np.zeros((count, most), np.float32), np.zeros((count, most), np.float32)
    linear[:, 2] = 1
    for row, one in enumerate(made):
        own = len(one.expected)
        linear[row, :, :own], bows[row, :, :own] = one.points.linear, one.points.bows
        expected[row, :own], weight[row, :own] = one.expected / np.sqrt(one.energy), 1
    return Templates(linear, bows, expected, weight, weight.sum(1))


class Slopes:
    """A picture beside its derivatives across and down, to be sampled together."""

    def __init__(self, picture: Floats) -> None:
        self.picture = picture
        across, down = (cv2.Scharr(picture, cv2.CV_32F, *way, scale=1 / 32) for way in ((1, 0), (0, 1)))
        self.layers = np.dstack([picture, across, down])


def _corners(maps: Doubles) -> Doubles:
    placed = maps @ np.array([[0.0, 1, 1, 0], [0, 0, 1, 1], [1, 1, 1, 1]])
    return np.asarray((placed[:, :2] / np.maximum(placed[:, 2:], 0.05)).transpose(0, 2, 1))


class _Climb:
    """State of `climb`: of each grid the best map and bows so far, and the next step from there."""

    def __init__(self, slopes: Slopes, near: Sequence[Grid], stiffness: Stiffness) -> None:
        self.layers, self.stiffness = slopes.layers, stiffness
        self.templates = Templates.of(np.array([grid.version for grid in near], np.intp))
        shapes = np.stack([grid.shape for grid in near])
        count, self.bowed = len(near), stiffness.bow is not None
        self.size = 16 if self.bowed else 8
        self.maps, self.bows = homographies(shapes.astype(np.float64)), np.zeros((count, 2, 4))
        if self.bowed:
            self.bows += shapes[:, 4:].transpose(0, 2, 1)
        self.centre = shapes[:, :4].mean(1, dtype=np.float64)[:, :, None]
        side = np.hypot(*(shapes[:, 2] - shapes[:, 0]).T) / 1.42
        self.curb = (stiffness.bow or 0.0) / side.astype(np.float64) ** 2
        self.tried_maps, self.tried_bows = self.maps, self.bows
        self.score, self.worth = np.full(count, -1.0), np.full(count, -np.inf)
        self.damping = np.full(count, DAMPING)
        self.normal, self.sides = np.zeros((count, self.size, self.size)), np.zeros((count, self.size, 2))
        self.energy, self.agreement = np.ones(count), np.ones(count)
        self.slope = np.empty((count, self.size, self.templates.linear.shape[2]), np.float32)

    def look(self) -> bool:
        """Evaluate the tried maps and keep the better ones; return True if any may still gain."""
        own = self.templates
        placed = self.tried_maps.astype(np.float32) @ own.linear
        inverse = 1 / np.maximum(placed[:, 2], 0.05)
        flat = placed[:, :2] * inverse[:, None]
        x, y = (flat + self.tried_bows.astype(np.float32) @ own.bows if self.bowed else flat).transpose(1, 0, 2)
        seen = cv2.remap(self.layers, x, y, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)
        bright = seen[..., 0]
        bright = (bright - (np.einsum("ij,ij->i", bright, own.weight) / own.counts)[:, None]) * own.weight
        energy = np.einsum("ij,ij->i", bright, bright).astype(np.float64)
        agreement = np.einsum("ij,ij->i", bright, own.expected).astype(np.float64)
        score = agreement / np.sqrt(np.maximum(energy, own.counts))  # a spread of less than a grey level is none
        worth = score - self.curb * (self.tried_bows**2).sum((1, 2))
        worth -= self.stiffness.lean * (self.tried_maps[:, 2, :2] ** 2).sum(1)
        lean = self.tried_maps[:, 2, :2]  # the corners are at depths 1, 1 + g, 1 + h and 1 + g + h
        nearest, farthest = 1 + np.minimum(lean, 0).sum(1), 1 + np.maximum(lean, 0).sum(1)
        better = (worth > self.worth) & (nearest > LEAST_DEPTH * farthest)
        open_ = np.where(better, worth - self.worth > ENOUGH_GAIN, self.damping * 10 < MAX_DAMPING)
        self.damping = np.where(better, np.maximum(self.damping / 5, LEAST_DAMPING), self.damping * 10)
        self.maps[better], self.bows[better] = self.tried_maps[better], self.tried_bows[better]
        self.score[better], self.worth[better] = score[better], worth[better]
        self.energy[better], self.agreement[better] = energy[better], agreement[better]
        if not open_.any():
            return False
        self._derive(better, seen, inverse, flat, bright)
        return True

    def _derive(
        self, better: npt.NDArray[np.bool_], seen: Floats, inverse: Floats, flat: Floats, bright: Floats
    ) -> None:
        """Compute the derivatives of brightness by the parameters: the map's, then the bows'.

        The map is taken about the centre.
        """
        own, slope = self.templates, self.slope
        across, down = seen[..., 1] * own.weight, seen[..., 2] * own.weight
        near_x, near_y = across * inverse, down * inverse
        away = flat - self.centre.astype(np.float32)
        turn = -(near_x * away[:, 0] + near_y * away[:, 1])
        np.multiply(near_x[:, None], own.linear, out=slope[:, :3])
        np.multiply(near_y[:, None], own.linear, out=slope[:, 3:6])
        np.multiply(turn[:, None], own.linear[:, :2], out=slope[:, 6:8])
        if self.bowed:
            np.multiply(across[:, None], own.bows, out=slope[:, 8:12])
            np.multiply(down[:, None], own.bows, out=slope[:, 12:])
        total = slope.sum(2)
        normal = slope @ slope.transpose(0, 2, 1) - total[:, :, None] * (total / own.counts[:, None])[:, None]
        sides = slope @ np.stack([bright, own.expected], 2)
        self.normal[better], self.sides[better] = normal[better], sides[better]

    def step(self) -> None:
        """Set the maps to try next."""
        count, lean = len(self.score), 2 * self.stiffness.lean * self.energy
        damped, pull = self.normal.copy(), np.zeros((count, self.size, 1))
        damped[:, range(self.size), range(self.size)] *= 1 + self.damping[:, None]
        damped[:, range(self.size), range(self.size)] += 1e-6
        damped[:, (6, 7), (6, 7)] += lean[:, None]
        pull[:, 6:8, 0] = lean[:, None] * self.maps[:, 2, :2]
        if self.bowed:
            curb = 2 * self.curb * self.energy
            damped[:, range(8, 16), range(8, 16)] += curb[:, None]
            pull[:, 8:, 0] = curb[:, None] * self.bows.reshape(count, 8)
        solved = np.linalg.solve(damped, np.concatenate([self.sides, pull], 2))
        explained = self.sides.transpose(0, 2, 1) @ solved[..., :2]
        share = (self.energy - explained[:, 0, 0]) / np.maximum(self.agreement - explained[:, 0, 1], 1e-6)
        move = solved[..., 1] * share[:, None] - solved[..., 0] - solved[..., 2]
        self.tried_maps, self.tried_bows = self.maps.copy(), self.bows
        self.tried_maps.reshape(count, 9)[:, :8] += move[:, :8]
        self.tried_maps[:, :2, :2] += self.centre * move[:, None, 6:8]
        if self.bowed:
            self.tried_bows = self.bows + move[:, 8:].reshape(count, 2, 4)


def climb(slopes: Slopes, near: Sequence[Grid], *, rounds: int, stiffness: Stiffness = FREE) -> list[Grid]:
    """Refine each of ``near`` to a maximum of its correlation, in at most ``rounds`` steps.

    What a grid's ``stiffness`` costs is subtracted.
    """
    if not near:
        return []
    climbing = _Climb(slopes, near, stiffness)
    for _ in range(rounds):
        if not climbing.look():
            break
        climbing.step()
    else:
        climbing.look()
    shapes = np.concatenate([_corners(climbing.maps), climbing.bows.transpose(0, 2, 1)], 1).astype(np.float32)
    return [Grid(grid.version, shapes[i], float(climbing.score[i])) for i, grid in enumerate(near)]


def correlations(picture: Floats, shapes: Floats, versions: Versions) -> Floats:
    """Correlate shapes (N, 8, 2), each of its own version, with their templates: (N,).

    As `grid.template_correlation`.
    """
    own = Templates.of(versions)
    placed = homographies(shapes.astype(np.float64)).astype(np.float32) @ own.linear
    flat = placed[:, :2] / np.maximum(placed[:, 2:], 0.05)
    if shapes[:, 4:].any():
        flat += shapes[:, 4:].transpose(0, 2, 1) @ own.bows
    x, y = flat.transpose(1, 0, 2)
    seen = cv2.remap(picture, x, y, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)
    sums = np.einsum("ij,ij->i", seen, own.weight)
    squares = np.einsum("ij,ij,ij->i", seen, seen, own.weight) - sums * sums / own.counts
    agreement = np.einsum("ij,ij->i", seen, own.expected)
    return np.asarray(np.clip(agreement / np.sqrt(np.maximum(squares, own.counts)), -1, 1), np.float32)


def right_versions(picture: Floats, grids: Sequence[Grid], largest: int) -> list[Grid]:
    """Return grids as the neighbouring versions that fit best.

    Finder patterns alone say little about the version.
    """
    if not grids:
        return []
    versions = np.array([grid.version for grid in grids])[:, None] + np.arange(-2, 3)
    rows, columns = np.nonzero((versions >= 1) & (versions <= largest))
    fit = np.full(versions.shape, -2.0)
    shapes = np.stack([grid.shape for grid in grids])
    fit[rows, columns] = correlations(picture, shapes[rows], versions[rows, columns])
    return [Grid(int(versions[i, k]), grids[i].shape, float(fit[i, k])) for i, k in enumerate(fit.argmax(1))]
