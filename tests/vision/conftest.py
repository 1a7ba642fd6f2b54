"""Small YOLO data sets, drawn for each test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest

from arclight.vision.data.labels import label_path


def write_dataset(root: Path, count: int = 8, split: str = "train", suffix: str = ".jpg") -> Path:
    """Photos of noise of different shapes, each with one to three boxes; returns the data.yaml."""
    numbers = np.random.default_rng(0)
    for index in range(count):
        image = root / "images" / split / f"{index:03d}{suffix}"
        image.parent.mkdir(parents=True, exist_ok=True)
        height, width = numbers.integers(60, 140, 2)
        pixels = cv2.resize(numbers.integers(0, 256, (8, 8, 3), dtype=np.uint8), (int(width), int(height)))
        assert cv2.imwrite(str(image), pixels)
        rows = [f"{n % 2} {0.3 + 0.2 * n} 0.5 {0.2 + 0.02 * index} 0.4" for n in range(1 + index % 3)]
        label = label_path(image)
        label.parent.mkdir(parents=True, exist_ok=True)
        label.write_text("\n".join(rows) + "\n")
    yaml = root / "data.yaml"
    yaml.write_text("train: images/train\nval: images/val\nnames: [code, text]\n")
    return yaml


@pytest.fixture(name="write_dataset")
def write_dataset_fixture() -> Callable[..., Path]:
    return write_dataset


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The data.yaml of eight images, all fine."""
    return write_dataset(tmp_path)
