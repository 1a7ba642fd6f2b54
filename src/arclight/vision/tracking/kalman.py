"""Predict boxes by a Kalman filter and a tracker's motion model.

`byte_track` and `oc_sort` each define a `Motion`. Letters are those of the literature: F transition, H measurement, Q process noise,
R measurement noise, P covariance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class KalmanState:
    """Gaussian estimate of a state, with the two steps of a Kalman filter (Kalman 1960)."""

    x: Vector
    """Mean (n,)."""
    P: Matrix
    """Covariance (n, n)."""

    def predict(self, F: Matrix, Q: Matrix) -> KalmanState:
        """Advance one time step: x' = F x, P' = F P F^T + Q."""
        return KalmanState(F @ self.x, F @ self.P @ F.T + Q)

    def update(self, z: Vector, H: Matrix, R: Matrix) -> KalmanState:
        """Correct the estimate by a measurement z = H x + noise of covariance R."""
        S = H @ self.P @ H.T + R
        K = np.linalg.solve(S, H @ self.P).T
        P = self.P - K @ S @ K.T
        return KalmanState(self.x + K @ (z - H @ self.x), (P + P.T) / 2)


@dataclass(frozen=True)
class Motion:
    """Motion model of boxes: transition, measurement and noise.

    Q, R and P are functions of the mean, as noise grows with a box.
    """

    F: Matrix
    H: Matrix
    measure: Callable[[Vector], Vector]
    """Box xyxy (4,) to measurement."""
    box: Callable[[Vector], Vector]
    """State to box xyxy (4,)."""
    Q: Callable[[Vector], Matrix]
    R: Callable[[Vector], Matrix]
    P: Callable[[Vector], Matrix]
    """Covariance of a state after its first measurement."""

    def start(self, box: Vector) -> KalmanState:
        """Return the state of a new track from its first box, with a velocity of 0.

        P gives the velocity a large variance.
        """
        z = self.measure(box)
        x = np.zeros(len(self.F))
        x[: len(z)] = z
        return KalmanState(x, self.P(x))

    def predict(self, state: KalmanState) -> KalmanState:
        return state.predict(self.F, self.Q(state.x))

    def update(self, state: KalmanState, box: Vector) -> KalmanState:
        return state.update(self.measure(box), self.H, self.R(state.x))


def constant_velocity(state_size: int, measurement_size: int) -> tuple[Matrix, Matrix]:
    """Return the transition F and the measurement H of a constant-velocity model.

    F adds the velocities (last components) to the positions (first ones), H measures the positions.
    """
    F = np.eye(state_size) + np.eye(state_size, k=measurement_size)
    return F, np.eye(measurement_size, state_size)


def without_velocity(state: KalmanState, component: int) -> KalmanState:
    """Return the state with one component of its mean, a velocity, set to 0."""
    x = state.x.copy()
    x[component] = 0
    return replace(state, x=x)
