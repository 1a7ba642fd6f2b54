"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Small test models are faster on one thread, and two workers of the suite then share the machine fairly.
os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or "1"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real photos and texts beside the project; tests that need it skip where it is missing."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"real data is not here: {folder} does not exist")
    return folder
