"""The guide's example runs as it stands."""

from __future__ import annotations

from pathlib import Path

from tests import warm
from tests.test_readme import block


def test_python(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(block("python", "docs/vision.md"))
    lines = warm.run("example.py", cwd=tmp_path, timeout=600, check=True).stdout.splitlines()
    assert sum(line.endswith("('qr_code',)") for line in lines) == 6
    assert (tmp_path / "detector.ckpt").is_dir()
