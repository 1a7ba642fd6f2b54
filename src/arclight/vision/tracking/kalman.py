"""Predict where a box will be: a Kalman filter, and the motion that a tracker assumes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class KalmanState:
    """Gaussian belief about a state, and one step of time or measurement (Kalman 1960)."""

    x: Vector
    """Mean (n,)."""
    P: Matrix
    """Covariance (n, n)."""

    def predict(self, F: Matrix, Q: Matrix) -> KalmanState:
        """Advance one step: x' = F x, P' = F P F^T + Q."""
        return KalmanState(F @ self.x, F @ self.P @ F.T + Q)

    def update(self, z: Vector, H: Matrix, R: Matrix) -> KalmanState:
        """Weigh in a measurement z = H x + noise of covariance R."""
        S = H @ self.P @ H.T + R
        K = np.linalg.solve(S, H @ self.P).T
        P = self.P - K @ S @ K.T
        return KalmanState(self.x + K @ (z - H @ self.x), (P + P.T) / 2)


@dataclass(frozen=True)
class Motion:
    """The motion of boxes: transition, measurement and noise of a filter."""

    F: Matrix
    H: Matrix
    measure: Callable[[Vector], Vector]
    """Box xyxy (4,) to measurement."""
    box: Callable[[Vector], Vector]
    """State to box xyxy (4,)."""
    Q: Callable[[Vector], Matrix]
    R: Callable[[Vector], Matrix]
    P: Callable[[Vector], Matrix]
    """Covariance of a state that was measured once."""

    def start(self, box: Vector) -> KalmanState:
        """Believe in a box of unknown velocity."""
        z = self.measure(box)
        x = np.zeros(len(self.F))
        x[: len(z)] = z
        return KalmanState(x, self.P(x))

    def predict(self, state: KalmanState) -> KalmanState:
        return state.predict(self.F, self.Q(state.x))

    def update(self, state: KalmanState, box: Vector) -> KalmanState:
        return state.update(self.measure(box), self.H, self.R(state.x))


def constant_velocity(states: int, measured: int) -> tuple[Matrix, Matrix]:
    """F adds the last components of a state, its velocities, to the first ones; H measures the first ``measured``."""
    F = np.eye(states) + np.eye(states, k=measured)
    return F, np.eye(measured, states)


def without_velocity(state: KalmanState, component: int) -> KalmanState:
    """Return the state with one component of its mean at 0."""
    x = state.x.copy()
    x[component] = 0
    return replace(state, x=x)
