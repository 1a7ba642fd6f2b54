"""``arclight compare``: runs and programs side by side, and the exit status for whoever builds on it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.vision.conftest import detector_run

from arclight import Trainer
from arclight.cli.command import main
from arclight.cli.comparing import detectors as command
from arclight.vision.data.dataset import DetectionDataset, collate, read_data_yaml
from arclight.vision.results.metrics import DetectionResults
from arclight.vision.results.records import RecordingMetrics
from arclight.vision.tasks.deployment import export_module
from arclight.vision.tasks.detection import DetectionData, Detector

OWN = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import arclight as al
from arclight.deploy.deployment import Deployment


class Net(al.Module):
    def __init__(self, hidden: int = 32):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(16, hidden), nn.ReLU(), nn.Linear(hidden, 4))


class Points(al.DataModule):
    def setup(self, stage):
        x = torch.randn(80, 16, generator=torch.Generator().manual_seed(0))
        self.samples = TensorDataset(x, (x.sum(1) > 0).long())

    def train_dataloader(self):
        return DataLoader(self.samples, 16)

    val_dataloader = train_dataloader


class Shifted(Net):
    def __init__(self, hidden: int = 32):
        super().__init__(hidden)
        with torch.no_grad():
            self.model[2].bias += 1


class Scored(Net):
    def configure_deployment(self, data, batches):
        return Deployment(model=self.model, example_inputs=torch.ones(2, 16), metric=lambda network: float(len(network(torch.ones(3, 16)))))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run ``1`` and a program of it, and their data set."""
    folder = tmp_path_factory.mktemp("runs")
    detector = Detector.load(detector_run(folder / "1") / "checkpoints" / "last.ckpt")
    export_module(detector, folder / "1.onnx", DetectionData(detector.settings).calibration_dataset())
    return folder


def test_a_run_and_its_program_score_alike(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, numbers = tmp_path / "page.html", tmp_path / "numbers.json"
    words = [
        "compare",
        str(runs / "1"),
        str(runs / "1.onnx"),
        "--data",
        str(runs / "set" / "data.yaml"),
        "--resamples",
        "20",
    ]
    assert main([*words, "--max-drop", "0", "--report", str(page), "--json", str(numbers)]) == 0
    out = capsys.readouterr().out
    assert "mAP 50-95" in out
    assert f"The report is {page}" in out
    found = json.loads(numbers.read_text())
    assert found["images"] == 6
    assert found["resamples"] == 20
    for one in found["metrics"].values():
        assert one["difference"] == pytest.approx(0, abs=1e-6)
    assert found["a"]["size_bytes"] > found["b"]["size_bytes"] / 2 > 0
    assert found["outputs"]["scores"]["sqnr_db"] > 60
    assert found["samples"] == 6
    assert found["latency"]["low"] <= found["latency"]["ratio"] <= found["latency"]["high"]
    assert set(found["b"]["stage_ms"]) == {"decode", "preprocess", "network", "postprocess"}
    assert page.is_file()


def perfect(candidate: Any, options: Any, share: float = 1.0) -> DetectionResults:
    """Results that find ``share`` of the boxes of each image."""
    dataset = DetectionDataset.open(read_data_yaml(options.data), options.split, image_size=64, cache_labels=False)
    batch, metrics = collate(dataset.__getitems__(range(len(dataset)))), RecordingMetrics(2)
    found = []
    for place in range(len(dataset)):
        rows = batch["targets"][batch["targets"][:, 0] == place]
        rows = rows[: int(np.ceil(share * len(rows)))]
        low, high = (rows[:, 2:4] - rows[:, 4:6] / 2) * 64, (rows[:, 2:4] + rows[:, 4:6] / 2) * 64
        found.append(torch.cat((low, high, torch.full((len(rows), 1), 0.9), rows[:, 1:2]), dim=1))
    metrics.observe_batch(found, batch)
    return metrics.compute()


def test_a_drop_beyond_the_bound_is_status_1(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = iter([1.0, 0.5] * 3)
    monkeypatch.setattr(command, "evaluated", lambda candidate, options: perfect(candidate, options, next(names)))
    words = [
        "compare",
        str(runs / "1"),
        str(runs / "1.onnx"),
        "--data",
        str(runs / "set" / "data.yaml"),
        "--resamples",
        "20",
    ]
    assert main(words) == 0, "no bound, no failure"
    assert main([*words, "--max-drop", "0.9"]) == 0
    assert main([*words, "--max-drop", "0.05", "--metric", "map50"]) == 1
    out = capsys.readouterr().out
    assert "in map50: more than max_drop 0.05" in out
    assert "code" in out, "classes are listed, too"


def compared(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    """Compare on two rounds; the status, and all that was said."""
    status = main(["compare", *map(str, words), "--rounds", "2"])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_a_module_of_ones_own_gives_inputs_and_metric(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "own_scored.py").write_text(OWN)
    words = ("own_scored:Net", "own_scored:Shifted", "--data", "own_scored:Points", "--model.hidden", "8")
    numbers = folder / "numbers.json"
    status, out = compared(capsys, *words, "--json", numbers, "--min-sqnr", 20)
    assert status == 1, out
    assert "output 0 of B has" in out
    found = json.loads(numbers.read_text())
    assert found["samples"] == 64
    assert found["scores"] == {}
    assert {one["output"] for one in found["worst"]} == {"0"}
    status, out = compared(capsys, *words, "--max-drop", 0)
    assert (status, "the task gives no metric" in out) == (2, True)
    assert "is judged on its validation data" in compared(capsys, *words, "--split", "test")[1]
    assert "unrecognized" not in out
    status, out = compared(capsys, "own_scored:Scored", "own_scored:Scored", "--max-drop", 0)
    assert (status, "metric" in out) == (0, True)


def test_detectors_of_a_single_class_are_compared_on_the_data_of_all(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were trained on data of two classes, which they call one."""
    settings = Detector.load(runs / "1" / "checkpoints" / "last.ckpt").settings
    detector = Detector(replace(settings, single_class=True), names=["object"])
    trainer = Trainer(max_epochs=0, logger=False, enable_checkpointing=False, accelerator="cpu")
    trainer.fit(detector, torch.utils.data.DataLoader([0]))
    trainer.save_checkpoint(tmp_path / "single.ckpt")
    images = DetectionData(detector.settings).calibration_dataset()
    for name in ("single.onnx", "other.onnx"):
        export_module(detector, tmp_path / name, images)
    data = ("--data", runs / "set" / "data.yaml", "--resamples", 5)
    for one, other in (("single.ckpt", "single.onnx"), ("other.onnx", "single.onnx")):
        status, out = compared(capsys, tmp_path / one, tmp_path / other, *data)
        assert status == 0, out
        assert "mAP 50-95" in out
    assert (
        "has the classes code, text, the detectors find cat"
        in compared(capsys, *[renamed(detector, tmp_path)] * 2, *data)[1]
    )


def renamed(detector: Detector, folder: Path) -> Path:
    """A checkpoint of a network of one class that is no collection of others."""
    trainer = Trainer(max_epochs=0, logger=False, enable_checkpointing=False, accelerator="cpu")
    trainer.fit(Detector(detector.settings, names=["cat"]), torch.utils.data.DataLoader([0]))
    trainer.save_checkpoint(folder / "cat.ckpt")
    return folder / "cat.ckpt"


def test_incomparable_models_are_refused(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    yaml = (runs / "set" / "data.yaml").read_text()
    (tmp_path / "other.yaml").write_text(f"path: {runs / 'set'}\n{yaml}".replace("text", "word"))
    both = [str(runs / "1"), str(runs / "1.onnx")]
    cases = {
        "has the classes code, word, the detectors find code, text": [*both, "--data", str(tmp_path / "other.yaml")],
        "max_drop must be a finite number from 0, got -1.0": [*both, "--data", "x", "--max-drop", "-1"],
        "is not here: name a data.yaml with --data": [both[1], both[1]],
        "Checkpoint file not found": [str(runs / "1"), str(runs / "2"), "--data", str(runs / "set" / "data.yaml")],
        "no 'test' split": [*both, "--data", str(runs / "set" / "data.yaml"), "--split", "test"],
    }
    for message, words in cases.items():
        assert main(["compare", *words]) == 2
        assert message in capsys.readouterr().err
