"""Small YOLO data sets, drawn for each test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from arclight.trainer import Trainer
from arclight.vision.data.labels import label_path
from arclight.vision.tasks.detection import DetectionData, Detector
from arclight.vision.tasks.settings import DetectionTask

SMALL = """
anchors: [[20,20, 26,26], [30,30, 40,40]]
backbone: [[-1, 1, Conv, [8, 3, 2]], [-1, 1, Conv, [16, 3, 2]], [-1, 1, Conv, [24, 3, 2]], [-1, 1, Conv, [24]]]
head: [[-1, 1, Conv, [32, 3, 2]], [[3, 4], 1, Detect, [nc, anchors]]]
"""
"""A network of strides 8 and 16, for tests of what is done with a detector: exporting it takes a third of the time of yolov5n."""
RECIPE = """
name = "tiny"
[task]
kind = "detection"
data = "{data}"
model = "{model}"
image_size = 64
batch_size = 4
workers = 0
cache_labels = false
[trainer]
max_epochs = 1
accelerator = "cpu"
enable_progress_bar = false
"""


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


def detector_run(folder: Path, seed: int = 0) -> Path:
    """Make ``folder`` the run of a detector after one step, on small photos in ``folder``/../set; returns it."""
    folder.mkdir(parents=True)
    data = folder.parent / "set"
    write_dataset(data, 6, "val")
    yaml = write_dataset(data, 8)
    model = folder.parent / "small.yaml"
    model.write_text(SMALL)
    (folder / "recipe.toml").write_text(RECIPE.format(data=yaml, model=model))
    task = DetectionTask(
        data=yaml, model=str(model), image_size=64, batch_size=8, workers=0, memory_format="contiguous", cache_labels=False
    )  # fmt: skip
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        max_steps=1, limit_val_batches=0,
    )  # fmt: skip
    torch.manual_seed(seed)
    trainer.fit(Detector(task, ["code", "text"]), datamodule=DetectionData(task))
    trainer.save_checkpoint(folder / "checkpoints" / "last.ckpt")
    return folder


@pytest.fixture(name="write_dataset")
def write_dataset_fixture() -> Callable[..., Path]:
    return write_dataset


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The data.yaml of eight images, all fine."""
    return write_dataset(tmp_path)
