"""``arclight demo`` on a few small scenes: every step runs, and a sticker fraud is found at the end."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

cv2 = pytest.importorskip("cv2")
pytest.importorskip("segno")
pytest.importorskip("zxingcpp")

from arclight.cli.commands import demo  # noqa: E402
from arclight.cli.style import console_of  # noqa: E402
from arclight.vision.results.detections import Boxes, Detections  # noqa: E402


def test_a_sticker_on_two_of_four_counters_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blind = SimpleNamespace(  # codes are found without a detector's help
        predict_one=lambda image: Detections(Boxes(np.zeros((0, 4)), np.zeros(0), np.zeros(0)), names=["qr_code"])
    )
    page = demo.Demo(tmp_path, scenes=1, epochs=1, seed=1, console=console_of()).verify(blind)
    assert (
        "verified photos of 4 counters, two of them with a sticker over the code: 2 mismatch" in capsys.readouterr().out
    )
    assert page == tmp_path / "demo" / "fraud" / "page.html"
    names = re.findall(r"<h3>(counter \d): ", page.read_text())
    assert names[:2] == ["counter 2", "counter 4"] or names[:2] == ["counter 4", "counter 2"]


@pytest.mark.slow
def test_the_demo_runs_to_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxruntime")
    demo.demo(["--root", str(tmp_path), "--scenes", "20", "--epochs", "1"])
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert 0 <= summary["decode_rate"] <= 1
    printed = capsys.readouterr().out
    read, readable = re.search(r"(\d+) of \d+ codes read.*?; (\d+) are readable", printed, re.DOTALL).groups()  # type: ignore[union-attr]
    assert 0 < int(read) <= int(readable)
    assert (tmp_path / "demo" / "fraud" / "page.html").exists()
