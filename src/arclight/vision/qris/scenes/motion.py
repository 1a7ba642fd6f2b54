"""Draw clips: a moving hand-held camera over a scene with codes.

Each frame has its own blur, glare and noise; the scene is lit once.

The guide tries the reading of videos on such a clip (docs/vision.md), and ``benchmarks/qr_photos.py`` measures it; no command draws one. Another
order of random draws changes these clips.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from arclight.vision.data.images import Image
from arclight.vision.qris.scenes.backgrounds import background
from arclight.vision.qris.scenes.camera import Matrix, light, outline, project, through_lens
from arclight.vision.qris.scenes.drawing import cv2
from arclight.vision.qris.scenes.scene import Canvas, SceneCode, add_carrier, finest_module, seen_code

WORLD = 1.5
"""Side of the drawn world by default, in sides of a frame: the camera sees a part of it at a time."""


REACH = 0.2
"""How far the camera wanders in a clip by default, in sides of the world: as a hand that hovers over codes does in a second or two."""


@dataclass(frozen=True)
class ClipFrame:
    """One frame, (size, size, 3) RGB, and the codes whole in it; ``ids`` identify them."""

    image: Image
    codes: list[SceneCode]
    ids: list[int]


def draw_clip(
    rng: np.random.Generator,
    size: int = 640,
    frames: int = 16,
    codes: int = 6,
    *,
    reach: float = REACH,
    world: float = WORLD,
) -> list[ClipFrame]:
    """Draw ``frames`` frames of a moving camera over up to ``codes`` carriers of codes.

    The camera pans, turns and comes closer. ``reach`` is how far it wanders, in sides of the world: from a hand that
    hovers (0) to a walk along a counter (0.5). ``world`` is the side of the world in sides of a frame: frames that were
    taken from afar show 1.7 of them, and so all of a smaller world.
    """
    stage = Canvas(np.ascontiguousarray(background(rng, round(world * size))))
    for _ in range(codes):
        add_carrier(rng, stage, size * float(np.exp(rng.uniform(np.log(0.1), np.log(0.3)))))
    stage.canvas = light(rng, stage.canvas)
    views = _path(rng, size, world, frames, reach)
    return [_frame(rng, stage, views[index], views[max(0, index - 1)], size) for index in range(frames)]


def _path(rng: np.random.Generator, size: int, world: float, frames: int, reach: float) -> list[Matrix]:
    """Return the homography from the world to each frame of a smooth, shaking camera path."""
    knots = 4
    at = np.linspace(0, knots - 1, frames)

    def smooth(low: float, high: float) -> np.ndarray:
        return np.asarray(np.interp(at, np.arange(knots), rng.uniform(low, high, knots)))

    half, side = 0.5 / world, round(world * size)
    start = rng.uniform(0.5 - reach / 2, 0.5 + reach / 2, 2)
    x, y = (np.clip(place + smooth(-reach / 2, reach / 2), half, 1 - half) for place in start)
    zoom, turn = np.exp(smooth(np.log(0.6), np.log(1.15))), smooth(-0.2, 0.2)
    tilt = np.stack([smooth(-0.22, 0.22), smooth(-0.22, 0.22)], 1)
    shake = rng.normal(0, 0.004, (frames, 2)) * side
    views = []
    for index in range(frames):
        cos, sin = np.cos(turn[index]) * zoom[index], np.sin(turn[index]) * zoom[index]
        centre = np.array([x[index], y[index]]) * side + shake[index]
        turned = np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1.0]]) @ np.array(
            [[1, 0, -centre[0]], [0, 1, -centre[1]], [0, 0, 1.0]]
        )
        tilted = np.eye(3)
        tilted[2, :2] = tilt[index] / size
        views.append(np.array([[1, 0, size / 2], [0, 1, size / 2], [0, 0, 1.0]]) @ tilted @ turned)
    return views


def _frame(rng: np.random.Generator, stage: Canvas, matrix: Matrix, before: Matrix, size: int) -> ClipFrame:
    image = cv2.warpPerspective(stage.canvas, matrix, (size, size), flags=cv2.INTER_AREA, borderMode=cv2.BORDER_REFLECT)
    codes, ids = [], []
    for number, code in enumerate(stage.codes):
        corners = project(code.corners, matrix)
        if ((corners >= 0) & (corners < size)).all():
            codes.append(seen_code(size, corners, outline(corners.astype(np.float32)), code.content, code.modules))
            ids.append(number)
    smeared = _smear(image, matrix, before, float(rng.uniform(0, 0.12)), size)
    return ClipFrame(through_lens(rng, smeared, finest_module(codes)), codes, ids)


def _smear(image: Image, matrix: Matrix, before: Matrix, exposure: float, size: int) -> Image:
    """Blur along the camera's motion, for the share ``exposure`` of the frame time."""
    middle = np.array([[size / 2, size / 2]])
    inverse: Matrix = np.linalg.inv(matrix).astype(np.float64)
    way = (project(project(middle, inverse), before) - middle)[0] * exposure
    length = float(np.hypot(*way))
    if length < 1:
        return image
    reach = int(np.ceil(length / 2))
    kernel = np.zeros((2 * reach + 1,) * 2, np.float32)
    ends = (np.array([reach, reach]) + np.outer([-0.5, 0.5], way)).round().astype(int)
    cv2.line(kernel, tuple(ends[0].tolist()), tuple(ends[1].tolist()), 1.0, 1, cv2.LINE_AA)
    return np.asarray(cv2.filter2D(image, -1, kernel / kernel.sum()), np.uint8)
