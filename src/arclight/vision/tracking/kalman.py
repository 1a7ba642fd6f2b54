"""Predict where a box will be: a Kalman filter with constant velocity, over the box forms of SORT and DeepSORT."""

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
    """How boxes move: what a filter of them is made of."""

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


def _constant_velocity(states: int, measured: int) -> tuple[Matrix, Matrix]:
    """F adds the last components of a state, its velocities, to the first ones; H measures the first ``measured``."""
    F = np.eye(states) + np.eye(states, k=measured)
    return F, np.eye(measured, states)


def height_scaled() -> Motion:
    """DeepSORT's form, which ByteTrack uses: centre, aspect ratio and height, noise in proportion to the height.

    Wojke et al. 2017; standard deviations of 1/20 of the height in position and 1/160 in velocity.
    """
    position, velocity = 1 / 20, 1 / 160
    F, H = _constant_velocity(8, 4)

    def measure(box: Vector) -> Vector:
        width, height = box[2] - box[0], box[3] - box[1]
        return np.array([(box[0] + box[2]) / 2, (box[1] + box[3]) / 2, width / height, height])

    def to_box(x: Vector) -> Vector:
        half = np.array([x[2] * x[3], x[3]]) / 2
        return np.concatenate((x[:2] - half, x[:2] + half))

    def diagonal(h: float, place: float, aspect: float, speed: float, aspect_speed: float) -> Matrix:
        of_place, of_speed = place * position * h, speed * velocity * h
        spread = [of_place, of_place, aspect, of_place, of_speed, of_speed, aspect_speed, of_speed]
        return np.diag(np.square(spread))

    return Motion(
        F, H, measure, to_box,
        Q=lambda x: diagonal(x[3], 1, 1e-2, 1, 1e-5),
        R=lambda x: np.diag(np.square([position * x[3], position * x[3], 1e-1, position * x[3]])),
        P=lambda x: diagonal(x[3], 2, 1e-2, 10, 1e-5),
    )  # fmt: skip


def area_and_ratio() -> Motion:
    """SORT's form, which OC-SORT uses: centre, area and aspect ratio, of which the ratio has no velocity.

    Bewley et al. 2016; fixed noise.
    """
    F, H = np.eye(7), np.eye(4, 7)
    F[0, 4] = F[1, 5] = F[2, 6] = 1
    Q = np.diag([1, 1, 1, 1, 1e-2, 1e-2, 1e-4])
    R = np.diag([1.0, 1, 10, 10])
    P = np.diag([10.0, 10, 10, 10, 1e4, 1e4, 1e4])

    def measure(box: Vector) -> Vector:
        width, height = box[2] - box[0], box[3] - box[1]
        return np.array([(box[0] + box[2]) / 2, (box[1] + box[3]) / 2, width * height, width / height])

    def to_box(x: Vector) -> Vector:
        width = np.sqrt(x[2] * x[3])
        half = np.array([width, x[2] / width]) / 2
        return np.concatenate((x[:2] - half, x[:2] + half))

    return Motion(F, H, measure, to_box, Q=lambda x: Q, R=lambda x: R, P=lambda x: P)


def without_velocity(state: KalmanState, component: int) -> KalmanState:
    """Return the state with one component of its mean at 0."""
    x = state.x.copy()
    x[component] = 0
    return replace(state, x=x)
