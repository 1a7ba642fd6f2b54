"""Undo blur, motion and uneven light on the modules of a code, by what its fixed modules should look like.

Every code carries some two hundred modules that are known beforehand: finder, timing and alignment patterns (ISO/IEC 18004, 6.3).
A linear filter that turns the picture around these into +1 (dark) and -1 (light) undoes on all others whatever the camera did
alike everywhere. It is fitted by ridge regression, and refitted on its own surest decisions, as decision-directed equalizers of
modems are (Lucky 1966).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from arclight.vision.qris.finders import Floats
from arclight.vision.qris.grid import Grid, cv2, fixed_modules, flattened

FLAT = 2.0
"""Least spread of brightness, grey levels, by which a window is scaled: noise on plain paper is no contrast."""


@dataclass(frozen=True, kw_only=True)
class Equalizer:
    """Fit a filter on a code's fixed modules and apply it to all.

    The filter sees ``reach`` modules to every side, ``cells`` x ``cells`` samples of each, after brightness and contrast were
    made even over ``window`` modules. ``ridge`` is the penalty on its weights per known module; ``rounds`` is how often it is
    fitted again on its own decisions.
    """

    reach: int
    cells: int
    window: int
    ridge: float
    rounds: int = 0

    def dark(self, picture: Floats, grid: Grid) -> npt.NDArray[np.bool_]:
        """Return which modules of ``grid`` in ``picture`` (H, W) are dark, (n, n)."""
        features = self._features(picture, grid)
        wanted = fixed_modules(grid.version).reshape(-1).astype(np.float64)
        known = wanted != 0
        penalty = np.diag([self.ridge * known.sum()] * (features.shape[1] - 1) + [1e-6])
        fixed = features[known]
        guess = features @ np.linalg.solve(fixed.T @ fixed + penalty, fixed.T @ wanted[known])
        penalty *= len(features) / known.sum() / 3
        for _ in range(self.rounds):
            trust = np.where(known, 1.0, np.abs(guess).clip(0, 1) ** 2)[:, None] * features
            guess = features @ np.linalg.solve(
                trust.T @ features + penalty, trust.T @ np.where(known, wanted, np.sign(guess))
            )
        size = grid.modules + 2
        return np.asarray(guess.reshape(size, size)[1:-1, 1:-1] > 0)

    def _features(self, picture: Floats, grid: Grid) -> npt.NDArray[np.float64]:
        """Samples around every module and one ring of quiet zone, and a constant: ((n + 2)^2, features)."""
        even = self._even(flattened(picture, grid, cell=self.cells, quiet=self.reach + 1))
        size, reach = (grid.modules + 2) * self.cells, self.reach * self.cells
        shifts = range(2 * reach + self.cells)
        columns = [
            even[y : y + size : self.cells, x : x + size : self.cells].reshape(-1) for y in shifts for x in shifts
        ]
        return np.column_stack([*columns, np.ones_like(columns[0])]).astype(np.float64)

    def _even(self, seen: Floats) -> Floats:
        """Brightness less its mean over the window, in units of its spread there."""
        side = self.window * self.cells | 1
        mean = cv2.blur(seen, (side, side))
        spread = cv2.blur(seen * seen, (side, side)) - mean * mean
        return np.asarray((seen - mean) / np.sqrt(np.maximum(spread, FLAT**2)), np.float32)


def stamped(dark: npt.NDArray[np.bool_], version: int) -> npt.NDArray[np.bool_]:
    """Return ``dark`` (n, n) with the fixed modules as the standard has them, though a finger or glare hid them."""
    fixed = fixed_modules(version)[1:-1, 1:-1]
    return np.asarray(np.where(fixed == 0, dark, fixed > 0))
