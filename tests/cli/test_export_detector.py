"""Exporting a detector from the shell: one ONNX file, or a program folder of the format that is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.vision.conftest import detector_run

from arclight.deploy import Program

Typed = Callable[[str], tuple[int, str, str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of a detector that was trained for one step."""
    return detector_run(tmp_path_factory.mktemp("runs") / "tiny" / "1")


@pytest.mark.slow
def test_a_folder_is_written_for_openvino_and_read_by_every_verb(run: Path, folder: Path, typed: Typed) -> None:
    pytest.importorskip("openvino")
    status, out, err = typed(f"export {run} --out v1.5 --format openvino")
    assert status == 0, err
    assert "wrote v1.5: fp32" in out
    program = Program.load("v1.5")
    assert program.runtime == "openvino"
    assert program.metadata["parity"]["against"] == "fp32"
    photos = run.parent / "set" / "images" / "val"
    status, out, err = typed(f"predict {photos} --program v1.5 --json found.json")
    assert status == 0, err
    assert len(json.loads(Path("found.json").read_text())) == 6


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--out file.pt", "a program is an ONNX file or a folder; call it file.onnx or file"),
        ("--out p.onnx --format openvino", "--format writes a folder; call it p, or leave --format out"),
        ("--out full --format onnx", "full exists and is not a program"),
        (
            "--out p --format tensorrt",
            "format 'tensorrt' is not written: nothing here runs tensorrt programs, whatever is installed",
        ),
    ],
)
def test_places_that_are_no_program_are_refused(run: Path, folder: Path, typed: Typed, words: str, told: str) -> None:
    Path("full").mkdir()
    Path("full/notes.txt").write_text("mine")
    status, _, err = typed(f"export {run} {words}")
    assert status == 2
    assert told in err
    assert Path("full/notes.txt").read_text() == "mine"
