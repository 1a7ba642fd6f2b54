"""``arclight data`` on image data sets: lint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("cv2")

Typed = Callable[[str], tuple[int, str, str]]


@pytest.fixture
def scenes(typed: Typed) -> Path:
    """A sound data set of eight scenes; returns its folder."""
    assert typed("data qris --out scenes --count 8 --seed 5 --size 160")[0] == 0
    return Path("scenes")


def test_lint_reports_draws_and_mends(typed: Typed, scenes: Path) -> None:
    assert typed("data lint scenes --no-cache")[0] == 0
    assert not list(scenes.rglob("*.npz"))
    image = next((scenes / "images/train").iterdir())
    shutil.copy(image, scenes / "images/val/copy.jpg")
    label = scenes / "labels/train" / f"{image.stem}.txt"
    label.write_text(label.read_text() + "0 0.5 0.5 nonsense 0.1\n")
    status, out, _ = typed("data lint scenes --json l.json --sheet s.html --fix new --image-size 320")
    assert status == 1
    assert "error: 1 x leak" in out
    assert f"{label.name}:" in out
    assert "mended copy: new/data.yaml, 2 changes" in out
    found = json.loads(Path("l.json").read_text())
    assert found["errors"] == 3
    assert {one["check"] for one in found["findings"]} >= {"leak", "contradiction", "malformed-row", "missing-label"}
    assert Path("s.html").stat().st_size > 1000
    assert len(list(scenes.rglob("*.hashes.npz"))) == 2
    assert typed("data lint new/data.yaml")[0] == 0
    new = Path("new/labels/train")
    next(new.glob("*.txt")).write_text("0 0.5 0.5 0.2 0.2\n0 0.5 0.5 0.2 0.2\n")
    assert typed("data lint new --no-hashes")[0] == 0
    assert typed("data lint new --no-hashes --strict")[0] == 1
    assert typed("data lint new --model yolov9z")[2].startswith("arclight: --model: 'yolov9z' is not a known detector")
    assert typed("data lint new --image-size 4")[0] == 2
