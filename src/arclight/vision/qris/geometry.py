"""Where a flat thing appears in a picture: turned, tilted, bent around a bottle, and where its points go."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from arclight.vision.qris.drawing import Item, cv2
from arclight.vision.qris.symbols import Image, Points

Matrix = npt.NDArray[np.float64]


def project(points: npt.ArrayLike, matrix: Matrix) -> npt.NDArray[np.float64]:
    """Points (N, 2) through a 3 x 3 homography."""
    flat = np.asarray(points, np.float64)
    moved = np.column_stack([flat, np.ones(len(flat))]) @ matrix.T
    return np.asarray(moved[:, :2] / moved[:, 2:])


def outline(corners: Points, steps: int = 6) -> npt.NDArray[np.float64]:
    """Points along the edges of a quadrilateral, so that its hull stays right when the edges bend."""
    along = np.linspace(0, 1, steps, endpoint=False)[:, None]
    ends = np.roll(corners, -1, axis=0)
    return np.concatenate([a * (1 - along) + b * along for a, b in zip(corners.astype(float), ends, strict=True)])


@dataclass(frozen=True)
class Bend:
    """A sheet around an upright cylinder: ``angle`` is half of what it covers, radians; ``bow`` lifts its middle."""

    width: float
    angle: float
    bow: float

    @property
    def seen(self) -> float:
        """Width of the bent sheet as seen, pixels."""
        return self.width * float(np.sin(self.angle)) / self.angle

    def forward(self, points: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Where points of the flat sheet are seen."""
        flat = np.asarray(points, np.float64)
        theta = (flat[:, 0] / self.width * 2 - 1) * self.angle
        x = (np.sin(theta) / np.sin(self.angle) + 1) * self.seen / 2
        return np.column_stack([x, flat[:, 1] + self._lift(theta)])

    def _lift(self, theta: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        rise = (np.cos(theta) - np.cos(self.angle)) / (1 - np.cos(self.angle))
        return np.asarray(abs(self.bow) - self.bow * rise if self.bow > 0 else -self.bow * rise)

    def warp(self, image: Image, *, shaded: bool) -> Image:
        """The picture of the bent sheet; its sides darker where ``shaded``."""
        height, width = image.shape[0] + round(abs(self.bow)), max(2, round(self.seen))
        across = (np.arange(width) + 0.5) / width * 2 - 1
        theta = np.arcsin(across * np.sin(self.angle))
        source_x = ((theta / self.angle + 1) * self.width / 2 - 0.5).astype(np.float32)
        map_x = np.repeat(source_x[None], height, axis=0)
        map_y = np.arange(height, dtype=np.float32)[:, None] - self._lift(theta).astype(np.float32)[None]
        bent = cv2.remap(image, map_x, map_y, cv2.INTER_LINEAR, borderMode=cv2.BORDER_CONSTANT)
        if shaded:
            shade = np.repeat((0.45 + 0.55 * np.cos(theta)).astype(np.float32)[None], height, axis=0)
            bent = cv2.multiply(bent, cv2.merge([shade] * 3), dtype=cv2.CV_8U)
        return np.asarray(bent, np.uint8)


@dataclass(frozen=True)
class Placed:
    """An item and the way from its own pixels to the scene's."""

    item: Item
    matrix: Matrix
    bend: Bend | None = None
    outlines: list[npt.NDArray[np.float64]] = field(default_factory=list)

    def to_scene(self, points: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Points of the flat item, as drawn, in scene pixels."""
        return project(self.bend.forward(points) if self.bend else points, self.matrix)


def bend_item(rng: np.random.Generator, item: Item) -> tuple[Item, Bend]:
    """The item as it looks around a bottle or cup; corners of its codes stay those of the flat item."""
    height, width = item.image.shape[:2]
    bend = Bend(float(width), float(rng.uniform(0.35, 1.15)), float(rng.normal(0, 0.06)) * height)
    bent = replace(item, image=bend.warp(item.image, shaded=True), mask=bend.warp(item.mask, shaded=False))
    return bent, bend


def view(rng: np.random.Generator, width: float, height: float, *, steep: float) -> Matrix:
    """Homography of a sheet seen from a random side; ``steep`` scales the tilt (1 reaches 60 degrees now and then)."""
    pitch, yaw = np.radians(np.clip(rng.normal(0, 22, 2) * steep, -60, 60))
    turn = rng.normal(0, 0.14) if rng.random() < 0.6 else rng.uniform(-np.pi, np.pi)
    cos, sin = np.cos, np.sin
    about_x = np.array([[1, 0, 0], [0, cos(pitch), -sin(pitch)], [0, sin(pitch), cos(pitch)]])
    about_y = np.array([[cos(yaw), 0, sin(yaw)], [0, 1, 0], [-sin(yaw), 0, cos(yaw)]])
    about_z = np.array([[cos(turn), -sin(turn), 0], [sin(turn), cos(turn), 0], [0, 0, 1]])
    rotation = about_x @ about_y @ about_z
    reach = max(width, height)
    distance = reach * rng.uniform(1.3, 4.0)
    centred = np.array([[1, 0, -width / 2], [0, 1, -height / 2], [0, 0, 1.0]])
    plane = np.column_stack([rotation[:, 0], rotation[:, 1], [0, 0, 0]])
    plane[2] /= distance
    plane[2, 2] = 1.0
    return np.asarray(plane @ centred)


def scaled_to(matrix: Matrix, factor: float, shift: npt.ArrayLike = (0.0, 0.0)) -> Matrix:
    """``matrix`` followed by a scaling about the origin and a shift."""
    x, y = np.asarray(shift, float)
    return np.array([[factor, 0, x], [0, factor, y], [0, 0, 1.0]]) @ matrix
