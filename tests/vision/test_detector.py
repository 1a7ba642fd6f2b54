"""A detector as users run it: trained, killed and resumed, saved and opened, exported and served as a program."""

from __future__ import annotations

import copy
import dataclasses
import math
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tests import warm
from tests.vision.test_architectures import TABLE
from torch import nn

from arclight import checkpoint
from arclight.checkpoint import CheckpointError
from arclight.deploy import Program
from arclight.trainer import Callback, Trainer
from arclight.vision import build_model
from arclight.vision.data.augment_settings import Augment
from arclight.vision.data.dataset import DetectionDataset, read_data_yaml
from arclight.vision.data.images import decode_image
from arclight.vision.qris.scenes.generate import generate
from arclight.vision.tasks.deployment import evaluate_program, export_detector
from arclight.vision.tasks.detection import DetectionData, Detector
from arclight.vision.tasks.settings import DetectionTask

SCRIPT = Path(__file__).parent / "detector_script.py"


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate(tmp_path_factory.mktemp("scenes") / "set", 25, 0, size=128, val_share=0.2, workers=1)


def quiet(folder: Path, **options: Any) -> Trainer:
    return Trainer(
        default_root_dir=folder, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **options,
    )  # fmt: skip


def run(data: Path, root: Path, *flags: str) -> int:
    done = warm.run(SCRIPT, data, root, *flags, timeout=600)
    assert done.returncode in (0, -9), done.stderr
    return done.returncode


@pytest.fixture(scope="module")
def trained(scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trained")
    assert run(scenes, root) == 0
    return root


def test_killed_and_resumed_ends_with_the_same_bits(scenes: Path, trained: Path, tmp_path: Path) -> None:
    """Mid-epoch, with shuffling, mosaics and mixup in two worker processes, and an average of the weights."""
    assert run(scenes, tmp_path, "--die-at-step", "7") == -9
    assert run(scenes, tmp_path, "--resume") == 0
    whole, resumed = checkpoint.load(trained / "end.ckpt"), checkpoint.load(tmp_path / "end.ckpt")
    for entry in ("model", "ema"):
        assert whole[entry].keys() == resumed[entry].keys()
        assert all(torch.equal(tensor, resumed[entry][name]) for name, tensor in whole[entry].items())
    assert (trained / "run" / "1" / "metrics.csv").read_bytes() == (tmp_path / "run" / "1" / "metrics.csv").read_bytes()


def test_the_run_folder_shows_what_it_learned(trained: Path) -> None:
    run_folder = trained / "run" / "1"
    assert {p.name for p in (run_folder / "plots").iterdir()} == {
        "pr_curve.svg",
        "confusion_matrix.svg",
        "predictions.jpg",
        "captions.json",
    }
    header = (run_folder / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"train/loss", "val/map50", "val/map50_95", "val/precision", "val/recall"} <= set(header)


def test_a_checkpoint_opens_as_the_averaged_detector(trained: Path) -> None:
    detector = Detector.load_from_checkpoint(trained / "end.ckpt")
    saved = checkpoint.load(trained / "end.ckpt")["ema"]
    assert detector.names == ["qr_code"]
    assert all(torch.equal(value, saved[name]) for name, value in detector.state_dict().items() if name in saved)


def test_weights_carry_over_to_a_new_task(trained: Path, scenes: Path) -> None:
    first = Detector.load_from_checkpoint(trained / "end.ckpt")
    second = Detector(DetectionTask(data=scenes, weights=trained / "end.ckpt"), names=["a", "b", "c"])
    ours, theirs = second.model.state_dict(), first.model.state_dict()
    same = [name for name in ours if ours[name].shape == theirs[name].shape]
    assert len(same) == len(ours) - 6  # the three heads' weights and biases are for other classes
    assert all(torch.equal(ours[name], theirs[name]) for name in same)


def test_a_tuned_checkpoint_needs_no_other_file(trained: Path, scenes: Path, tmp_path: Path) -> None:
    weights = tmp_path / "w.ckpt"
    shutil.copytree(trained / "end.ckpt", weights)
    task = DetectionTask(data=scenes, image_size=64, weights=weights, batch_size=8, workers=0)
    tuned = Detector(task, names=["qr_code"])
    trainer = quiet(tmp_path, max_steps=1, limit_val_batches=0)
    trainer.fit(tuned, datamodule=DetectionData(task))
    trainer.save_checkpoint(tmp_path / "tuned.ckpt")
    shutil.rmtree(weights)
    opened = Detector.load_from_checkpoint(tmp_path / "tuned.ckpt")
    assert all(torch.equal(value, tuned.state_dict()[name]) for name, value in opened.state_dict().items())
    assert opened.settings.weights is None
    resumed = Detector(task, names=["qr_code"])  # what a recipe builds before a run is resumed
    quiet(tmp_path, max_steps=2, limit_val_batches=0).fit(
        resumed, datamodule=DetectionData(task), ckpt_path=str(tmp_path / "tuned.ckpt")
    )
    with pytest.raises(CheckpointError, match=r"w\.ckpt"):
        Detector(task, names=["qr_code"]).detect([np.zeros((8, 8, 3), np.uint8)])
    with pytest.raises(CheckpointError, match=r"w\.ckpt"):
        quiet(tmp_path, max_steps=1).fit(Detector(task, names=["qr_code"]), datamodule=DetectionData(task))


@pytest.mark.parametrize("name", [None, "float64"])
def test_detect_finds_what_the_model_in_evaluation_mode_does(trained: Path, scenes: Path, name: str | None) -> None:
    detector = Detector.load_from_checkpoint(trained / "end.ckpt")
    if name:
        detector.to(getattr(torch, name))
    detector.train()
    images = [decode_image(path) for path in read_data_yaml(scenes).images("val")]
    unsure = dataclasses.replace(detector.processing, conf_threshold=0.0005, max_det=5)
    batch, context = unsure.preprocess(images)
    exact = copy.deepcopy(detector.model).double().eval()
    with torch.inference_mode():
        expected = unsure.postprocess(exact(torch.from_numpy(batch).double()), context)
    for _ in range(2):  # the second time by the same copy
        found = detector.detect(images, unsure)
        assert detector.training, "a thread beside this one may train or detect"
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours.boxes.conf, theirs.boxes.conf, rtol=3e-2)
    assert detector.detect([]) == []
    with torch.no_grad():
        for conv in detector.model.head.m:
            conv.bias += 1
    assert detector.detect(images, unsure)[0].boxes.conf[0] > found[0].boxes.conf[0], "the copy is made anew"


def test_freeze_leaves_something_to_train(scenes: Path) -> None:
    with pytest.raises(ValueError, match="freeze = 25: yolov5n has 25 layers"):
        Detector(DetectionTask(data=scenes, freeze=25), names=["qr_code"])


@pytest.mark.parametrize(
    ("options", "epochs"),
    [
        ({"max_epochs": 5}, 5),
        ({"max_steps": 7}, 4),  # 20 images in batches of 8, the rest dropped: two steps an epoch
        ({"max_steps": 7, "accumulate_grad_batches": 2}, 7),
        ({"max_steps": 7, "limit_train_batches": 1}, 7),
        ({"max_steps": 7, "max_epochs": 2}, 2),
        ({"max_epochs": -1}, None),
    ],
)
def test_mosaics_end_with_the_run_however_its_length_is_given(
    scenes: Path, tmp_path: Path, options: dict[str, int], epochs: int | None
) -> None:
    task = DetectionTask(data=scenes, image_size=64, batch_size=8, workers=0)
    data = DetectionData(task)
    data.trainer = quiet(tmp_path, **options)
    data.setup("fit")
    assert data.train.epochs == epochs


def test_the_last_epoch_of_a_run_by_steps_has_no_mosaics(scenes: Path, tmp_path: Path) -> None:
    class Seen(Callback):
        def __init__(self) -> None:
            self.open: list[bool] = []

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.open.append(trainer.datamodule.train.mosaic_open)

    task = DetectionTask(data=scenes, image_size=64, batch_size=8, workers=0, augment=Augment(close_mosaic=0.5))
    seen = Seen()
    quiet(tmp_path, max_steps=4, max_epochs=-1, callbacks=[seen], limit_val_batches=0).fit(
        Detector(task, names=["qr_code"]), datamodule=DetectionData(task)
    )
    assert seen.open == [True, True, False, False]


def test_background_alone_is_measured(scenes: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(scenes.parent, tmp_path / "set")
    for label in (tmp_path / "set" / "labels" / "val").glob("*.txt"):
        label.write_text("")
    task = DetectionTask(data=tmp_path / "set" / scenes.name, image_size=64, batch_size=8, workers=0)
    (metrics,) = quiet(tmp_path).validate(Detector(task, names=["qr_code"]), datamodule=DetectionData(task))
    assert math.isfinite(metrics["val/loss"])
    assert "are background" in caplog.text


def test_a_program_finds_what_the_detector_finds(trained: Path, scenes: Path, tmp_path: Path) -> None:
    detector = Detector.load_from_checkpoint(trained / "end.ckpt")
    photos = DetectionDataset.open(read_data_yaml(scenes), "val", image_size=64, cache_labels=False)
    program = export_detector(detector, tmp_path / "detector.onnx", photos)
    images = [decode_image(path) for path in photos.images]
    batch, context = detector.processing.preprocess(images)
    with torch.inference_mode():
        expected = detector.eval()(torch.from_numpy(batch))
    np.testing.assert_allclose(program(batch), expected.numpy(), rtol=1e-3, atol=1e-3)
    # a detector this young is sure of nothing, so its surest boxes are looked at
    unsure = dataclasses.replace(detector.processing, conf_threshold=0.0005, max_det=5)
    assert [len(found) for found in unsure.postprocess(expected, context)] == [5] * len(images)
    by_hand, named = (
        unsure.postprocess(program(batch), context),
        Program.load(tmp_path / "detector.onnx", processing=unsure).predict(images),
    )
    for ours, theirs, direct in zip(named, unsure.postprocess(expected, context), by_hand, strict=True):
        np.testing.assert_allclose(ours.boxes.conf, theirs.boxes.conf, rtol=1e-2)
        np.testing.assert_array_equal(ours.boxes.xyxy, direct.boxes.xyxy)
    assert evaluate_program(program, photos).images == len(photos)


def test_a_model_file_of_yolov5_opens_without_its_code(tmp_path: Path) -> None:
    """A whole pickled module in half precision, of classes that do not exist here, in the layout that its training writes."""
    there = types.ModuleType("yolo_elsewhere")

    class DetectionModel(nn.Module):
        pass

    DetectionModel.__module__, DetectionModel.__qualname__ = there.__name__, "DetectionModel"
    there.DetectionModel = DetectionModel  # type: ignore[attr-defined]
    torch.manual_seed(0)
    network = build_model("yolov5n", 2, anchors_px=torch.arange(18.0).view(9, 2) * 3 + 5)
    theirs = DetectionModel()
    theirs.model = copy.deepcopy(network.model).half()
    theirs.names, theirs.stride = {0: "cat", 1: "dog"}, torch.tensor([8.0, 16.0, 32.0])
    theirs.yaml = {"nc": 2, "ch": 3, **yaml.safe_load(TABLE.replace("0.50", "0.25").replace("nc: 80", ""))}
    sys.modules[there.__name__] = there
    torch.save({"epoch": -1, "model": theirs, "ema": None, "opt": None, "date": "today"}, tmp_path / "yolov5n.pt")
    del sys.modules[there.__name__]
    detector = Detector.load(tmp_path / "yolov5n.pt")
    assert (detector.settings.model, detector.names) == ("yolov5n", ["cat", "dog"])
    ours = detector.model.state_dict()
    assert len(ours) == 349
    for name, value in network.state_dict().items():
        torch.testing.assert_close(ours[name], value.half().to(value.dtype), rtol=0, atol=0)
    torch.testing.assert_close(detector.model.anchors, network.anchors, rtol=1e-3, atol=0)
    theirs.yaml = {
        **theirs.yaml,
        "head": theirs.yaml["head"][:-1] + [[[17, 20, 23], 1, "Segment", ["nc", "anchors", 32, 256]]],
    }
    sys.modules[there.__name__] = there
    torch.save({"model": theirs}, tmp_path / "seg.pt")
    torch.save({"model": theirs.model.state_dict()}, tmp_path / "weights.pt")
    with pytest.raises(ValueError, match="'Segment' is no block"):
        Detector.load(tmp_path / "seg.pt")
    with pytest.raises(CheckpointError, match="does not say which architecture"):
        Detector.load(tmp_path / "weights.pt")


def test_a_checkpoint_is_loaded_by_the_same_name(trained: Path) -> None:
    assert Detector.load(trained / "end.ckpt").names == ["qr_code"]
