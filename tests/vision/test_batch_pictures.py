"""Pictures of what is trained on: batches with their labels after augmentation, and the labels of a data set."""

from __future__ import annotations

import json
import random
import types
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import cv2
import numpy as np
import pytest
import torch
from tests.vision.drawn import (
    box_row,
    corner_row,
    cornered_row,
    draw_folders,
    draw_objects,
    keypoint_row,
    polygon_row,
)

from arclight.trainer.run.folder import RunFolder, read_json
from arclight.vision.data.augment_settings import NoAugment
from arclight.vision.data.images import decode_image
from arclight.vision.results.draw import PALETTE
from arclight.vision.results.plots import DetectionPlots, draw_batch, label_chart
from arclight.vision.tasks.settings import (
    ClassificationTask,
    CornersTask,
    DetectionTask,
    OrientedDetectionTask,
    PoseTask,
    SegmentationTask,
)

CASES: dict[str, tuple[Any, Any, str]] = {
    "detect": (DetectionTask, box_row, ""),
    "segment": (SegmentationTask, polygon_row, ""),
    "pose": (PoseTask, keypoint_row, "kpt_shape: [3, 3]\n"),
    "corners": (CornersTask, cornered_row, "kpt_shape: [4, 3]\n"),
    "obb": (OrientedDetectionTask, corner_row, ""),
}


def batch_of(task: Any, count: int) -> tuple[dict[str, Any], list[str]]:
    data = task.data_class()(task)
    opened = data.open_for_training()
    random.seed(0)
    return data.collate(opened.__getitems__(list(range(count)))), data.names


def cells(sheet: np.ndarray, side: int, count: int) -> list[np.ndarray]:
    """The pictures of a sheet of four columns with names below."""
    found = []
    for place in range(count):
        top, left = 8 + place // 4 * (side + 28), 8 + place % 4 * (side + 8)
        found.append(sheet[top : top + side, left : left + side])
    return found


@pytest.mark.parametrize("head", CASES)
def test_labels_of_every_task_are_drawn_where_their_objects_are(head: str, tmp_path: Path) -> None:
    kind, row, more = CASES[head]
    data = draw_objects(tmp_path, row, train=6, head=more)
    batch, names = batch_of(kind(data=data, image_size=64, augment=NoAugment(), cache_labels=False, workers=0), 6)
    before = batch["images"].clone()
    sheet = draw_batch(batch, names, head)
    assert sheet.shape == (2 * 348 + 8, 4 * 328 + 8, 3)
    assert np.array_equal(batch["images"], before)
    for place, cell in enumerate(cells(sheet, 320, 6)):
        rows = batch["targets"][batch["targets"][:, 0] == place, 1:].numpy()
        label, cx, cy, w, h = (rows[0, :5] * (1, 320, 320, 320, 320)).tolist()
        near = np.abs(cell.astype(int) - PALETTE[int(label)]).max(-1) < 30
        reach = max(w, h) / 2 + 12
        ys, xs = np.nonzero(near)
        assert len(xs) > 100, "an outline in the colour of its class"
        outside = (np.abs(xs - cx) > reach) | (np.abs(ys - cy) > reach)
        assert ys[outside].max(initial=0) < max(cy - h / 2 + 24, 24), "only its name, which stands above"


def test_masks_shade_their_objects_and_no_others(tmp_path: Path) -> None:
    data = draw_objects(tmp_path, polygon_row, train=4)
    batch, names = batch_of(
        SegmentationTask(data=data, image_size=64, augment=NoAugment(), cache_labels=False, workers=0), 4
    )
    for place, cell in enumerate(cells(draw_batch(batch, names, "segment"), 320, 4)):
        (row,) = batch["targets"][batch["targets"][:, 0] == place].tolist()
        x, y = round(row[2] * 320), round(row[3] * 320)
        object_colour = batch["images"][place][:, y // 5, x // 5].numpy().astype(int)
        assert cell[y, x].tolist() == pytest.approx(((object_colour + PALETTE[int(row[1])]) / 2).tolist(), abs=6)


def test_classes_of_whole_images_and_images_without_objects_are_drawn(tmp_path: Path) -> None:
    task = ClassificationTask(data=draw_folders(tmp_path / "folders", train=6), image_size=64, workers=0)
    batch, names = batch_of(task, 5)
    assert draw_batch(batch, names, "classify").shape == (2 * 348 + 8, 4 * 328 + 8, 3)
    data = draw_objects(tmp_path / "set", keypoint_row, train=2, head="kpt_shape: [3, 3]\n")
    for file in (tmp_path / "set/labels/train").glob("*.txt"):
        file.write_text("")
    batch, names = batch_of(PoseTask(data=data, image_size=64, augment=NoAugment(), cache_labels=False, workers=0), 2)
    sheet = draw_batch(batch, names, "pose")
    assert np.abs(cells(sheet, 320, 1)[0].mean() - batch["images"][0].float().mean().item()) < 2


def test_a_chart_of_labels_counts_classes_and_places() -> None:
    names = [f"class {number}" for number in range(20)]
    labels = [np.array([[number, 0.25, 0.75, 0.1, 0.9]] * (20 - number), np.float32) for number in range(20)]
    drawn = label_chart([*labels, np.zeros((0, 5), np.float32)], names)
    root = ET.fromstring(drawn)
    texts = ["".join(one.itertext()) for one in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "210 boxes in 21 images, 1 of them without any" in texts
    assert texts.count("class 0") == 1
    assert "9 others" in texts
    assert "45" in texts  # 9 + 8 + ... + 1 of them
    titles = [one.text for one in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == ["210", "210"]


@pytest.mark.parametrize("batches", [0, 2])
def test_the_first_batches_of_a_run_are_drawn_unless_turned_off(tmp_path: Path, batches: int) -> None:
    task = DetectionTask(data=draw_objects(tmp_path, box_row), image_size=64, cache_labels=False, workers=0)
    batch, names = batch_of(task, 4)
    data = task.data_class()(task)
    data.train = data.open_for_training()
    plots, captions = tmp_path / "plots", {}
    plots.mkdir()
    trainer: Any = types.SimpleNamespace(
        is_global_zero=True, loggers=[0], current_epoch=0, datamodule=data, strategy=types.SimpleNamespace(in_stages=False),
        run_folder=types.SimpleNamespace(plots=plots, caption_plot=captions.__setitem__),
    )  # fmt: skip
    module: Any = types.SimpleNamespace(names=names, head="detect")
    drawer = DetectionPlots(batches)
    drawer.on_train_start(trainer, module)
    for batch_idx in range(4):
        drawer.on_train_batch_start(trainer, module, batch, batch_idx)
    trainer.current_epoch = 1
    drawer.on_train_batch_start(trainer, module, batch, 0)
    wanted = {"labels.svg", "train_batch0.jpg", "train_batch1.jpg"} if batches else set()
    assert {path.name for path in plots.iterdir()} == wanted == set(captions)
    if batches:
        assert decode_image(plots / "train_batch0.jpg").shape == draw_batch(batch, names, "detect").shape


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), cv2.error("bad image")])
def test_a_picture_that_cannot_be_written_ends_no_run(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error

    trainer: Any = types.SimpleNamespace(
        is_global_zero=True, loggers=[0], current_epoch=0, strategy=types.SimpleNamespace(in_stages=False),
        datamodule=types.SimpleNamespace(train=types.SimpleNamespace(labels=[np.ones((1, 5), np.float32)])),
        run_folder=types.SimpleNamespace(plots=tmp_path, caption_plot=fail),
    )  # fmt: skip
    module: Any = types.SimpleNamespace(names=["code", "text"], head="detect")
    batch = {"images": torch.zeros(1, 3, 32, 32, dtype=torch.uint8), "targets": torch.zeros(0, 6), "paths": ["a.jpg"]}
    drawer = DetectionPlots(3)

    def fit() -> None:
        drawer.on_train_start(trainer, module)
        for number in range(3):
            drawer.on_train_batch_start(trainer, module, batch, number)

    warned = []
    for _ in range(2):
        with pytest.warns(UserWarning, match="was not drawn") as caught:
            fit()
        warned += [str(one.message) for one in caught]
    assert len(warned) == 2
    assert not list(tmp_path.iterdir()), "no picture without a caption, or a part of one"
    assert all(str(tmp_path / "labels.svg") in text and str(error) in text for text in warned)
    trainer.run_folder.caption_plot = lambda *_: None
    monkeypatch.setattr("arclight.vision.results.plots.draw_batch", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        drawer.on_train_batch_start(trainer, module, batch, 0)


def test_a_folder_that_cannot_be_made_ends_no_run(tmp_path: Path) -> None:
    class Full:
        @property
        def plots(self) -> Path:
            raise OSError(28, "No space left on device", str(tmp_path / "plots"))

    trainer: Any = types.SimpleNamespace(
        is_global_zero=True, loggers=[0], run_folder=Full(),
        datamodule=types.SimpleNamespace(train=types.SimpleNamespace(labels=[np.ones((1, 5), np.float32)])),
    )  # fmt: skip
    with pytest.warns(UserWarning, match=r"labels\.svg was not drawn .*No space left on device: .*plots"):
        DetectionPlots(3).on_train_start(trainer, types.SimpleNamespace(names=["code", "text"], head="detect"))


@pytest.mark.parametrize("number", range(4))
def test_charts_that_cannot_be_written_end_no_run(tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk is full from the start, or when the second, third or fourth file is written; what is there stays whole."""
    task = DetectionTask(data=draw_objects(tmp_path, box_row), image_size=64, cache_labels=False, workers=0)
    data = task.data_class()(task)
    data.val = data.open_for_validation("val")
    module = task.module_class()(task, **data.network_arguments)
    folder = RunFolder(tmp_path, "run")
    metrics = module._build_metrics()
    module.results = metrics.compute()
    for name in ("pr_curve.svg", "confusion_matrix.svg", "predictions.jpg"):
        (folder.plots / name).write_text("of a run before")
    folder.caption_plot("labels.svg", "labels")
    trainer: Any = types.SimpleNamespace(
        is_global_zero=True, loggers=[0], datamodule=data, strategy=types.SimpleNamespace(in_stages=False), run_folder=folder
    )  # fmt: skip
    opened, written = Path.open, []

    def limited(path: Path, mode: str = "r", *how: Any, **more: Any) -> Any:
        file = opened(path, mode, *how, **more)
        if mode != "wb":
            return file
        if len(written) == number:
            with file:
                file.write(b"a part")
            raise OSError(28, "No space left on device")
        written.append(path)
        return file

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", limited)
        with pytest.warns(UserWarning, match="was not drawn .*No space left") as caught:
            DetectionPlots().on_train_end(trainer, module)
    assert len(caught) == 1
    files = {path.name for path in folder.plots.iterdir()}
    assert files == {"pr_curve.svg", "confusion_matrix.svg", "predictions.jpg", "captions.json"}
    assert all(len((folder.plots / name).read_bytes()) > 10 for name in files)
    assert read_json(folder.plots / "captions.json")["labels.svg"] == "labels"
    replaced = [name for name in files if (folder.plots / name).read_bytes() != b"of a run before"]
    assert len(replaced) == number + 1, "captions, and what was written"


def test_captions_of_batches_stay_behind_those_of_results(tmp_path: Path) -> None:
    (tmp_path / "captions.json").write_text(json.dumps({"train_batch0.jpg": "batch", "pr_curve.svg": "an older one"}))
    trainer: Any = types.SimpleNamespace(
        is_global_zero=True, loggers=[0], datamodule=None, strategy=types.SimpleNamespace(in_stages=False),
        run_folder=types.SimpleNamespace(plots=tmp_path),
    )  # fmt: skip
    module: Any = types.SimpleNamespace(
        results=1, write_charts=lambda folder: {"pr_curve.svg": "curve"}, parameters=lambda: iter(())
    )
    DetectionPlots(3).on_train_end(trainer, module)
    assert list(read_json(tmp_path / "captions.json").items()) == [
        ("pr_curve.svg", "curve"),
        ("train_batch0.jpg", "batch"),
    ]
