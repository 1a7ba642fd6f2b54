"""Data sets of drawn shapes, one for each vision task: a few large discs and squares on noise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np

NAMES = ("disc", "square")
SIDE = 64
CORNERS = ((-1, -1), (1, -1), (1, 1), (-1, 1))


class Shape:
    """A disc or a square: its class, and its outline in pixels."""

    def __init__(self, rng: np.random.Generator, label: int) -> None:
        self.label = label
        self.radius = float(rng.uniform(10, 15))
        self.centre = rng.uniform(self.radius + 2, SIDE - self.radius - 2, 2)

    @property
    def outline(self) -> np.ndarray:
        """(n, 2) points in pixels."""
        angles = (
            np.linspace(0, 2 * np.pi, 24, endpoint=False) if self.label == 0 else np.pi / 4 + np.arange(4) * np.pi / 2
        )
        reach = self.radius * (1 if self.label == 0 else np.sqrt(2))
        return self.centre + reach * np.stack((np.cos(angles), np.sin(angles)), 1)

    @property
    def turned(self) -> np.ndarray:
        """(4, 2) corners of a rectangle in pixels, turned by an angle that is the shape's own."""
        angle, length = self.centre.sum(), self.radius * np.array([0.95, 0.5])
        along = np.array([np.cos(angle), np.sin(angle)])
        across = np.array([-along[1], along[0]])
        return np.array([self.centre + a * length[0] * along + b * length[1] * across for a, b in CORNERS])

    def draw(self, image: np.ndarray) -> None:
        self._fill(image, self.outline)

    def draw_turned(self, image: np.ndarray) -> None:
        self._fill(image, self.turned)

    def _fill(self, image: np.ndarray, outline: np.ndarray) -> None:
        points = (outline * 16).round().astype(np.int32)
        cv2.fillPoly(image, [points], (230, 60, 40) if self.label == 0 else (40, 70, 220), cv2.LINE_AA, shift=4)


def box_row(shape: Shape) -> str:
    return f"{shape.label} " + " ".join(f"{v / SIDE:.6f}" for v in (*shape.centre, 2 * shape.radius, 2 * shape.radius))


def polygon_row(shape: Shape) -> str:
    return f"{shape.label} " + " ".join(f"{v / SIDE:.6f}" for v in shape.outline.flatten())


def corner_row(shape: Shape) -> str:
    """The corners of a rectangle of unlike sides, turned by an angle of its own, that `draw_turned` draws: OpenCV counts from pixels' middles."""
    return f"{shape.label} " + " ".join(f"{(v + 0.5) / SIDE:.6f}" for v in shape.turned.flatten())


def cornered_row(shape: Shape) -> str:
    """The box around the rectangle that `draw_turned` draws, and its four corners in turn."""
    points = (shape.turned + 0.5) / SIDE
    low, high = points.min(0), points.max(0)
    numbers = (*(low + high) / 2, *(high - low), *(value for point in points for value in (*point, 2)))
    return f"{shape.label} " + " ".join(f"{value:.6f}" for value in numbers)


def keypoint_row(shape: Shape) -> str:
    """Middle, upper and right end of the shape; the right end of every other one is not labelled."""
    points = [shape.centre, shape.centre - (0, shape.radius), shape.centre + (shape.radius, 0)]
    there = [f"{x / SIDE:.6f} {y / SIDE:.6f} 2" for x, y in points]
    return " ".join([box_row(shape), *there[:2], there[2] if shape.label else "0 0 0"])


def draw_objects(
    root: Path, row: Callable[[Shape], str], train: int = 6, val: int = 6, same: bool = True, head: str = ""
) -> Path:
    """Write a YOLO data set whose rows ``row`` writes; ``same``: the validation images are the training images again."""
    for split, count in (("train", train), ("val", val)):
        rng = np.random.default_rng(0 if same else len(split))
        for folder in ("images", "labels"):
            (root / folder / split).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            image = rng.integers(90, 140, (SIDE, SIDE, 3)).astype(np.uint8)
            shape = Shape(rng, number % 2)
            (shape.draw_turned if row in (corner_row, cornered_row) else shape.draw)(image)
            assert cv2.imwrite(str(root / "images" / split / f"{number}.png"), image[:, :, ::-1])
            (root / "labels" / split / f"{number}.txt").write_text(row(shape) + "\n")
    (root / "data.yaml").write_text(f"train: images/train\nval: images/val\nnames: [{', '.join(NAMES)}]\n{head}")
    return root / "data.yaml"


def draw_folders(root: Path, train: int = 6, val: int = 6) -> Path:
    """Write a data set of folders with the class of the one shape in each image."""
    for split, count in (("train", train), ("val", val)):
        rng = np.random.default_rng(0)
        for number in range(count):
            image = rng.integers(90, 140, (SIDE, SIDE, 3)).astype(np.uint8)
            shape = Shape(rng, number % 2)
            shape.draw(image)
            folder = root / split / NAMES[shape.label]
            folder.mkdir(parents=True, exist_ok=True)
            assert cv2.imwrite(str(folder / f"{number}.png"), image[:, :, ::-1])
    return root
