"""Outcomes of torchao's tests, read from a report of pytest itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.torchao_tests import outcome

TESTS = """
import unittest, pytest
class TestOne(unittest.TestCase):
    def test_passes(self): pass
    def test_fails(self): self.assertEqual(1, 2)
    @unittest.skip("elsewhere")
    def test_is_skipped(self): pass
@pytest.fixture
def broken(): raise ValueError("no")
def test_cannot_start(broken): pass
"""


def test_outcomes_are_read_by_name_with_the_first_line_of_the_error(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "test_some.py"]
    subprocess.run(command, cwd=tmp_path, check=False, capture_output=True)
    found = outcome(ElementTree.parse(report).getroot())
    assert (found.passed, found.skipped) == ({"TestOne.test_passes"}, {"TestOne.test_is_skipped"})
    assert found.failed["TestOne.test_fails"].startswith("AssertionError: 1 != 2")
    assert "ValueError: no" in found.failed["test_some.test_cannot_start"]
