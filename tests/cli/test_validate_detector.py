"""``arclight validate`` of a detector leaves a page in its run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.vision.conftest import detector_run

from arclight.cli.command import main


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return detector_run(tmp_path_factory.mktemp("runs") / "tiny" / "1")


def test_validation_writes_a_page_and_its_numbers(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", str(run), "--json", str(tmp_path / "scores.json")]) == 0
    assert f"The report is {run / 'validate.html'}" in capsys.readouterr().out
    numbers = json.loads((run / "validate.json").read_text())
    logged = json.loads((tmp_path / "scores.json").read_text())[0]
    assert numbers["metrics"]["map50"] == pytest.approx(logged["val/map50"], abs=1e-6)
    assert numbers["images"] == 6
    assert (numbers["checkpoint"], numbers["step"]) == ("last.ckpt", 1)
    assert set(numbers["classes"]) == {"code", "text"}
    assert set(numbers["stage_ms"]) == {"decode", "preprocess", "network", "postprocess"}
    html = (run / "validate.html").read_text("utf-8")
    assert "tiny 1" in html
    assert "last.ckpt" in html


def test_the_page_is_written_to_the_given_path(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = tmp_path / "alone.ckpt"
    (run / "checkpoints" / "last.ckpt").rename(alone)
    try:
        assert main(["validate", str(run / "recipe.toml"), "--checkpoint", str(alone)]) == 0
        assert "The report is" not in capsys.readouterr().out, "a checkpoint of no run has no place for it"
        page = tmp_path / "pages" / "p.html"
        assert main(["validate", str(run / "recipe.toml"), "--checkpoint", str(alone), "--report", str(page)]) == 0
    finally:
        alone.rename(run / "checkpoints" / "last.ckpt")
    assert page.is_file()
    assert page.with_suffix(".json").is_file()


@pytest.mark.parametrize(
    "words", ["--report {}/p.json", "--report {}/p.html --json {}/p.json", "--json {run}/validate.json"]
)
def test_the_numbers_of_the_page_replace_no_other_file(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    assert main(["validate", str(run), *words.format(*[tmp_path] * 2, run=run).split()]) == 2
    assert "the numbers of the page are written there" in capsys.readouterr().err


def test_a_page_of_no_detector_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["validate", "lm-debug", "--checkpoint", str(tmp_path), "--report", str(tmp_path / "p.html")]
    assert main(words) == 2
    assert "written for detectors, and this is a task of kind" in capsys.readouterr().err
