"""The guide's examples run as they stand."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import warm
from tests.test_readme import block

from arclight.cli.command import main


def test_python(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(block("python", "docs/vision.md"))
    lines = warm.run("example.py", cwd=tmp_path, timeout=600, check=True).stdout.splitlines()
    assert sum(line.endswith("('qr_code',)") for line in lines) == 6
    assert (tmp_path / "detector.ckpt").is_dir()


def test_commands_on_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for line in block("sh", "docs/vision.md").splitlines():
        verb, *words = line.partition("  #")[0].split()
        assert verb == "arclight"
        assert main(words) == 0, line
    assert (tmp_path / "worst.html").is_file()
    assert (tmp_path / "mended/data.yaml").is_file()
