"""The guide's commands that look at results run as they stand."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from tests.test_readme import ROOT
from tests.vision.conftest import detector_run

from arclight.cli.command import main
from arclight.vision.tasks.deployment import export_module
from arclight.vision.tasks.detection import DetectionData, Detector


def commands(section: str) -> list[list[str]]:
    """The words of each command in a section of the guide."""
    text = (ROOT / "docs" / "vision.md").read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
    return [shlex.split(line, comments=True) for line in re.findall(r"^    (arclight .*)", text, re.MULTILINE)]


def test_guide_commands_for_detection_errors_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    detector_run(tmp_path / "runs" / "detect-qris" / "1")
    monkeypatch.chdir(tmp_path)
    found = commands("What a detector gets wrong")
    assert len(found) == 2
    for words in found:
        assert main(words[1:]) == 0
    assert (tmp_path / "runs/detect-qris/1/validate.html").is_file()
    assert (tmp_path / "last-look.html").is_file()


@pytest.mark.slow
def test_guide_commands_for_comparing_detectors_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = detector_run(tmp_path / "runs" / "detect-qris" / "1")
    shutil.copytree(first, first.with_name("2"))
    shutil.copytree(first.parent / "set", tmp_path / "my")
    detector = Detector.load(first / "checkpoints" / "last.ckpt")
    export_module(detector, tmp_path / "detector.onnx", DetectionData(detector.settings).calibration_dataset())
    monkeypatch.chdir(tmp_path)
    shutil.copy("detector.onnx", "int8.onnx")
    found = commands("Is the new one better?")
    assert len(found) == 3
    for words in found:  # how fast a program is, a busy machine cannot say
        assert main(["100" if word == "0.7" else word for word in words[1:]]) == 0
    assert (tmp_path / "beside.html").is_file()


def test_guide_commands_for_labelling_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = detector_run(tmp_path / "runs" / "detect-qris" / "1")
    # a model of one step is sure of nothing: every box is above these thresholds
    thresholds = {name: {"confidence": 0.0} for name in ("code", "text")}
    shutil.copytree(run.parent / "set" / "images" / "val", tmp_path / "new-photos")
    monkeypatch.chdir(tmp_path)
    found = commands("What to label next")
    assert [words[1] for words in found] == ["predict", "validate", "predict"]
    for words in found:
        assert main(words[1:]) == 0
        (run / "validate.json").write_text(json.dumps({"checkpoint": "last.ckpt", "step": 1, "classes": thresholds}))
    assert capsys.readouterr().out.count("label next: new-photos") == 6
    assert len(list((tmp_path / "new-labels").iterdir())) == 6
