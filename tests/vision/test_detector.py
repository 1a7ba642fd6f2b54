"""A detector as users run it: trained, killed and resumed, saved and opened, exported and served as a program."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from tests import warm

from arclight import checkpoint
from arclight.deploy import Program
from arclight.vision.data.dataset import DetectionDataset, read_data_yaml
from arclight.vision.data.images import decode_image
from arclight.vision.qris.scenes.generate import generate
from arclight.vision.tasks.deployment import evaluate_program, export_detector
from arclight.vision.tasks.detection import Detector

SCRIPT = Path(__file__).parent / "detector_script.py"


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate(tmp_path_factory.mktemp("scenes") / "set", 25, 0, size=128, val_share=0.2, workers=1)


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
    from arclight.vision.tasks.settings import DetectionTask

    first = Detector.load_from_checkpoint(trained / "end.ckpt")
    second = Detector(DetectionTask(data=scenes, weights=trained / "end.ckpt"), names=["a", "b", "c"])
    ours, theirs = second.model.state_dict(), first.model.state_dict()
    same = [name for name in ours if ours[name].shape == theirs[name].shape]
    assert len(same) == len(ours) - 6  # the three heads' weights and biases are for other classes
    assert all(torch.equal(ours[name], theirs[name]) for name in same)


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
