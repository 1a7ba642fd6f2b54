"""The guide's examples of payment codes run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests import warm
from tests.test_readme import ROOT


def example(name: str) -> str:
    """The Python of the guide that is marked with this name."""
    marked = rf"<!-- tested: {name} -->\n```python\n(.*?)```"
    found = re.search(marked, (ROOT / "docs/vision.md").read_text(), re.DOTALL)
    assert found, f"the guide has no example {name}"
    return found.group(1)


def test_verification(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(example("verify"))
    clean, forged = warm.run("example.py", cwd=tmp_path, timeout=600, check=True).stdout.splitlines()
    assert clean == "match"
    assert forged.startswith("mismatch; ")
    assert "NMID" in forged


def test_poster(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(example("poster"))
    assert warm.run("example.py", cwd=tmp_path, timeout=600, check=True).stdout == "KOPI SENJA 52500 5 INV-7\n"
    assert all((tmp_path / f"bill.{ending}").stat().st_size > 1000 for ending in ("svg", "pdf", "png"))


@pytest.mark.slow
def test_video(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(example("video"))
    lines = warm.run("example.py", cwd=tmp_path, timeout=600, check=True).stdout.splitlines()
    assert [line.split()[0] for line in lines] == [str(number) for number in range(len(lines))]
    assert any(not line.split()[1].startswith("None") for line in lines), lines
