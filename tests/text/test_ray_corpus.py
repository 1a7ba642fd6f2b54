"""Corpora tokenized on a Ray cluster, in a process of their own.

Ray changes the process that joins a cluster for good: children forked from it later crash, SIGTERM ends it by Ray's handler, and log lines
have Ray's format. In a worker of pytest that made 51 other tests fail.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_corpora_are_tokenized_on_ray_as_here() -> None:
    pytest.importorskip("ray")
    script = Path(__file__).with_name("ray_corpus_script.py")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
