"""Simulate the camera of a scene: perspective, bent sheets, light, blur and noise.

`scene`, `fraud` and `motion` photograph through this. Labels are projected by the same matrix as pixels. Another order of random draws
changes every generated data set.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from arclight.vision.data.images import Image
from arclight.vision.qris.scenes.backgrounds import Field, clouds, soften, white_noise
from arclight.vision.qris.scenes.drawing import Sprite, cv2
from arclight.vision.qris.scenes.symbols import Points


def photograph(rng: np.random.Generator, scene: Image, finest: float | None) -> Image:
    """Photograph ``scene`` (S, S, 3) as a phone would.

    Blur stays below what ``finest``, pixels per module, can bear.
    """
    return through_lens(rng, light(rng, scene), finest)


def through_lens(rng: np.random.Generator, picture: Image, finest: float | None) -> Image:
    """Add the effects of one exposure: glare, focus, motion blur, noise and sharpening.

    ``finest``: pixels per module of the smallest code in the picture.
    """
    if rng.random() < 0.15:
        picture = _glare(rng, picture)
    limit = 2.0 if finest is None else float(np.clip(finest * rng.uniform(0.3, 1.3), 0.3, 5.0))
    if rng.random() < 0.45:
        picture = soften(picture, float(rng.uniform(0.2, 0.7)) * limit)
    if rng.random() < 0.12:
        picture = _motion(rng, picture, limit * float(rng.uniform(1.0, 2.5)))
    if rng.random() < 0.75:
        picture = _grain(rng, picture)
    if rng.random() < 0.25:  # phones sharpen
        picture = cv2.addWeighted(picture, 1.6, cv2.GaussianBlur(picture, (0, 0), 1.0), -0.6, 0)
    return np.asarray(picture, np.uint8)


def light(rng: np.random.Generator, scene: Image) -> Image:
    """Light a scene unevenly: a shadow's edge, the lamp's colour, exposure and contrast."""
    size = scene.shape[0]
    coarse = 32
    y, x = np.mgrid[0:coarse, 0:coarse].astype(np.float32) / coarse - 0.5
    slope = rng.normal(0, 0.3, 2)
    field = 1.0 + slope[0] * x + slope[1] * y
    if rng.random() < 0.3:  # vignette or a spot of light
        centre = rng.uniform(-0.4, 0.4, 2)
        distance = np.hypot(x - centre[0], y - centre[1])
        field *= 1.0 - rng.uniform(0.2, 1.0) * np.minimum(distance, 0.9)
    field = np.repeat(np.clip(field, 0.15, 1.9)[..., None], 3, axis=2) * _cast(rng)
    field = cv2.resize(field.astype(np.float32), (size, size), interpolation=cv2.INTER_LINEAR)
    if rng.random() < 0.25:
        field *= _shadow(rng, size)[..., None]
    picture = cv2.multiply(scene, field, dtype=cv2.CV_8U)
    gamma, low, high = rng.uniform(0.65, 1.3), rng.uniform(0, 35), rng.uniform(225, 275)
    if rng.random() < 0.08:  # a dim place
        high *= rng.uniform(0.35, 0.7)
        low *= 0.5
    curve = low + (high - low) * (np.arange(256) / 255) ** gamma
    return np.asarray(cv2.LUT(picture, curve.clip(0, 255).round().astype(np.uint8)), np.uint8)


def _cast(rng: np.random.Generator) -> Field:
    """Draw gains of red, green and blue, from daylight to a warm lamp."""
    warmth = rng.normal(0.03, 0.07) + (rng.uniform(0.1, 0.3) if rng.random() < 0.1 else 0)
    gains = np.array([1 + warmth, 1 + rng.normal(0, 0.02), 1 - 1.3 * warmth], np.float32)
    return gains.clip(0.3, 1.6)


def _shadow(rng: np.random.Generator, size: int) -> Field:
    """Return a darker region with a soft edge, or blinds' stripes: (size, size) factors."""
    small = 80
    mask = np.zeros((small, small), np.float32)
    if rng.random() < 0.25:
        x = np.arange(small, dtype=np.float32)
        stripes = np.sin((x[:, None] * rng.normal() + x[None] * rng.normal()) * 0.5) > rng.uniform(-0.3, 0.5)
        mask[:] = stripes
    else:
        corners = rng.uniform(-0.4, 1.4, (int(rng.integers(3, 7)), 2)) * small
        cv2.fillPoly(mask, [cv2.convexHull(corners.astype(np.int32))], 1.0)
    mask = cv2.GaussianBlur(mask, (0, 0), float(rng.uniform(0.3, 6)))
    return np.asarray(1 - rng.uniform(0.2, 0.65) * cv2.resize(mask, (size, size), interpolation=cv2.INTER_LINEAR))


def _glare(rng: np.random.Generator, picture: Image) -> Image:
    """Return a streak or blob of reflected light, as lamination and glass show."""
    size, small = picture.shape[0], 96
    mask = np.zeros((small, small), np.float32)
    centre = tuple(int(v) for v in rng.integers(0, small, 2))
    axes = (int(rng.integers(2, 10)), int(rng.integers(6, 60)))
    cv2.ellipse(mask, centre, axes, float(rng.uniform(0, 180)), 0, 360, 1.0, -1)
    mask = cv2.GaussianBlur(mask, (0, 0), float(rng.uniform(1, 6)))
    mask = cv2.resize(mask * rng.uniform(60, 230), (size, size), interpolation=cv2.INTER_LINEAR)
    return np.asarray(cv2.add(picture, cv2.merge([cv2.convertScaleAbs(mask)] * 3)), np.uint8)


def _motion(rng: np.random.Generator, picture: Image, length: float) -> Image:
    """Blur along a line of ``length`` pixels, as a moving hand gives."""
    reach = max(1, int(np.ceil(length / 2)))
    kernel = np.zeros((2 * reach + 1, 2 * reach + 1), np.float32)
    turn = rng.uniform(0, np.pi)
    step = np.array([np.cos(turn), np.sin(turn)]) * length / 2
    start, end = np.array([reach, reach]) - step, np.array([reach, reach]) + step
    cv2.line(
        kernel, tuple(start.round().astype(int).tolist()), tuple(end.round().astype(int).tolist()), 1.0, 1, cv2.LINE_AA
    )
    return np.asarray(cv2.filter2D(picture, -1, kernel / kernel.sum()), np.uint8)


def _grain(rng: np.random.Generator, picture: Image) -> Image:
    """Add sensor noise: mostly in brightness, sometimes blotchy or in colour."""
    size = picture.shape[0]
    strength = float(rng.exponential(4.0))
    strength = min(strength, 22.0)
    noise = white_noise(rng, size, size)
    if rng.random() < 0.3:
        noise = cv2.GaussianBlur(noise, (0, 0), 0.8) * 2
    if rng.random() < 0.35:
        layers = [noise, white_noise(rng, size, size), white_noise(rng, size, size)]
        return np.asarray(cv2.add(picture, cv2.merge(layers) * np.float32(strength), dtype=cv2.CV_8U), np.uint8)
    grey = noise * np.float32(strength)
    return np.asarray(cv2.add(picture, cv2.merge([grey, grey, grey]), dtype=cv2.CV_8U), np.uint8)


def surface_light(rng: np.random.Generator, image: Image) -> Image:
    """Return the light on one thing: brighter or darker than its surroundings, and uneven."""
    gain = float(np.clip(rng.normal(0.92, 0.13), 0.45, 1.2))
    if rng.random() < 0.5:
        return np.asarray(cv2.convertScaleAbs(image, alpha=gain), np.uint8)
    uneven = clouds(rng, 32, roughness=0.4) * np.float32(rng.uniform(0.1, 0.5))
    field = cv2.resize((gain + 0.1 - uneven).astype(np.float32), image.shape[1::-1], interpolation=cv2.INTER_LINEAR)
    return np.asarray(cv2.multiply(image, cv2.merge([field, field, field]), dtype=cv2.CV_8U), np.uint8)


Matrix = npt.NDArray[np.float64]


def project(points: npt.ArrayLike, matrix: Matrix) -> npt.NDArray[np.float64]:
    """Project points (N, 2) by a 3 x 3 homography."""
    flat = np.asarray(points, np.float64)
    moved = np.column_stack([flat, np.ones(len(flat))]) @ matrix.T
    return np.asarray(moved[:, :2] / moved[:, 2:])


def outline(corners: Points, steps: int = 6) -> npt.NDArray[np.float64]:
    """Return points along the edges of a quadrilateral, to keep its hull when edges bend."""
    along = np.linspace(0, 1, steps, endpoint=False)[:, None]
    ends = np.roll(corners, -1, axis=0)
    return np.concatenate([a * (1 - along) + b * along for a, b in zip(corners.astype(float), ends, strict=True)])


@dataclass(frozen=True)
class Bend:
    """Bend of a sheet around an upright cylinder.

    ``angle`` is half of what it covers, in radians; ``bow`` lifts its middle.
    """

    width: float
    angle: float
    bow: float

    @property
    def seen(self) -> float:
        """Width of the bent sheet as seen, pixels."""
        return self.width * float(np.sin(self.angle)) / self.angle

    def forward(self, points: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Map points of the flat sheet to where they are seen."""
        flat = np.asarray(points, np.float64)
        theta = (flat[:, 0] / self.width * 2 - 1) * self.angle
        x = (np.sin(theta) / np.sin(self.angle) + 1) * self.seen / 2
        return np.column_stack([x, flat[:, 1] + self._lift(theta)])

    def _lift(self, theta: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        rise = (np.cos(theta) - np.cos(self.angle)) / (1 - np.cos(self.angle))
        return np.asarray(abs(self.bow) - self.bow * rise if self.bow > 0 else -self.bow * rise)

    def warp(self, image: Image, *, shaded: bool) -> Image:
        """Return the picture of the bent sheet; its sides darker where ``shaded``."""
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
class PlacedSprite:
    """An item and the way from its own pixels to the scene's."""

    item: Sprite
    matrix: Matrix
    bend: Bend | None = None
    outlines: list[npt.NDArray[np.float64]] = field(default_factory=list)

    def to_scene(self, points: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Map points of the flat item, as drawn, to scene pixels."""
        return project(self.bend.forward(points) if self.bend else points, self.matrix)


def bend_sprite(rng: np.random.Generator, item: Sprite) -> tuple[Sprite, Bend]:
    """Bend the item as around a bottle or cup; its codes keep their flat corners."""
    height, width = item.image.shape[:2]
    bend = Bend(float(width), float(rng.uniform(0.35, 1.15)), float(rng.normal(0, 0.06)) * height)
    bent = replace(item, image=bend.warp(item.image, shaded=True), mask=bend.warp(item.mask, shaded=False))
    return bent, bend


def view(rng: np.random.Generator, width: float, height: float, *, steep: float) -> Matrix:
    """Draw the homography of a sheet seen from a random side; ``steep`` scales the tilt."""
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
    """Return ``matrix`` followed by a scaling about the origin and a shift."""
    x, y = np.asarray(shift, float)
    return np.array([[factor, 0, x], [0, factor, y], [0, 0, 1.0]]) @ matrix
