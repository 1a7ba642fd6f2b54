"""A federated detector is handed on: from a centralised run into a federation, and from any of its rounds to every other verb."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from arclight.checkpoint import load_weights
from arclight.cli.runs import load_vision_module
from arclight.federated.rounds.history import read_history

Typed = Callable[[str], tuple[int, str, str]]

TASK = """
name = "{name}"
seed = 1
[task]
kind = "detection"
data = "photos/data.yaml"
model = "small.yaml"
image_size = 64
batch_size = 4
workers = 0
memory_format = "channels_last"
[trainer]
accelerator = "cpu"
enable_progress_bar = false
"""
CENTRAL = TASK.format(name="central") + "max_steps = 1\nmax_epochs = -1\n"
SITES = (
    TASK.format(name="sites")
    + '[partition]\nkind = "merchant"\n[federation]\nclients = 2\nrounds = 1\nlocal_steps = 1\n'
)
ROUND = "runs/sites/1/rounds/000001"


BIAS = "model.model.5.m.0.bias"


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def photos(folder: Path) -> Path:
    pytest.importorskip("cv2")
    from tests.vision.conftest import SMALL

    from arclight.vision.qris.scenes.generate import generate

    (folder / "small.yaml").write_text(SMALL)
    (folder / "central.toml").write_text(CENTRAL)
    (folder / "sites.toml").write_text(SITES)
    return generate(folder / "photos", 12, 3, size=96, val_share=0.25, workers=1, merchants=4)


def test_a_round_goes_wherever_a_checkpoint_goes(photos: Path, typed: Typed, folder: Path) -> None:
    status, _, err = typed("federate sites.toml")
    assert status == 0, err
    detector = load_vision_module(folder / ROUND)  # as export and quantize do
    assert same(detector.state_dict(), load_weights(ROUND))
    assert (detector.settings.image_size, detector.names) == (64, ["qr_code"])
    assert len(detector.detect([np.zeros((96, 80, 3), np.uint8)])) == 1
    status, _, err = typed(f"validate runs/sites/1/recipe.toml --checkpoint {ROUND} --json values.json")
    assert status == 0, err
    measured = json.loads(Path("values.json").read_text())[0]
    told = read_history(folder / "runs/sites/1")[-1]["metrics"]
    assert measured["val/loss"] == pytest.approx(told["val/loss"], rel=1e-5)
    status, _, err = typed(f"train central.toml --task.weights {ROUND} --task.optimizer.lr 1e-30")
    assert status == 0, err
    went_on = load_weights("runs/central/1/checkpoints/last.ckpt")
    assert torch.equal(went_on[BIAS], load_weights(ROUND)[BIAS])


@pytest.mark.slow
def test_a_round_becomes_an_int8_program(photos: Path, typed: Typed, folder: Path) -> None:
    pytest.importorskip("onnxruntime")
    assert typed("federate sites.toml")[0] == 0
    status, out, err = typed(f"quantize {ROUND} --out round.onnx --calibration-batches 1")
    assert status == 0, err
    assert "wrote round.onnx: int8" in out
    status, out, err = typed("predict photos/images/val --program round.onnx")
    assert status == 0, err
    assert "3 images" in out


@pytest.mark.parametrize("measured_by", ["clients", pytest.param("server", marks=pytest.mark.slow)])
def test_a_federation_begins_with_a_centralised_detector(
    photos: Path, typed: Typed, folder: Path, measured_by: str
) -> None:
    """Its weights, that is: schedules go by the federation's own steps."""
    assert typed("train central.toml")[0] == 0
    start = "runs/central/1/checkpoints/last.ckpt"
    status, _, err = typed(f"federate sites.toml --task.weights {start} --federation.evaluate_on {measured_by}")
    assert status == 0, err
    assert same(load_weights("runs/sites/1/rounds/000000"), load_weights(start))
    history = read_history(folder / "runs/sites/1")
    assert [here["clock"] for here in history] == [0, 1]
