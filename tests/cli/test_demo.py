"""``arclight demo`` on a few small scenes: every step runs, and a sticker fraud is found at the end."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

cv2 = pytest.importorskip("cv2")
pytest.importorskip("segno")
pytest.importorskip("zxingcpp")

from arclight.cli.command import main  # noqa: E402
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


HOLD = """
import sys
from pathlib import Path
from arclight.cli.commands.demo import _lock
with _lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_two_demos_in_one_folder_are_refused_without_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = tmp_path / "demo" / "data" / "data.yaml"
    drawn.parent.mkdir(parents=True)
    drawn.write_text("of the other demo")
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "demo")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdin is not None
    assert other.stdout is not None
    try:
        assert other.stdout.readline() == "held\n"
        assert main(["demo", "--root", str(tmp_path), "--scenes", "1"]) == 2
        assert (
            f"another arclight demo (process {other.pid} on {platform.node()}) is at work in {tmp_path / 'demo'}: wait until it has ended, or name "
            "another folder with --root" in capsys.readouterr().err
        )
        assert drawn.read_text() == "of the other demo"
    finally:
        other.kill()  # what held the folder need not end in order
        other.communicate()
    ran: list[str] = []
    monkeypatch.setattr(demo.Demo, "_run", lambda self: ran.append(str(self.folder)))
    assert main(["demo", "--root", str(tmp_path)]) == 0
    assert ran == [str(tmp_path / "demo")]


def test_demos_without_epochs_are_refused_before_anything_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--root", str(tmp_path / "runs"), "--epochs", "0"]) == 2
    assert "--epochs 0: train for 1 or more" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
