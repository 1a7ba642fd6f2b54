"""Small seeded runs of every kind compute what they computed when digests.json was written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.house import digests

ROOT = Path(__file__).resolve().parents[2]


def test_digests_see_names_types_shapes_and_bits() -> None:
    one = torch.tensor([1.0, 2.0])
    others = [one.double(), one[:, None], one + 1e-7, {"a": one}, [one], one.numpy(), one.tolist(), "1", 1, 1.0, None]
    found = [digests.digest(other) for other in (one, *others)]
    assert len(set(found)) == len(found)
    assert digests.digest({"a": one, "b": 2}) == digests.digest({"b": 2, "a": one.clone()})
    assert digests.digest(torch.tensor(-0.0)) != digests.digest(torch.tensor(0.0))
    assert digests.digest(np.zeros(2)) != digests.digest(np.zeros((2, 1)))
    with pytest.raises(TypeError, match="no digest is defined of a set"):
        digests.digest({1, 2})


def test_differences_are_named() -> None:
    assert digests.compare({"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}) == [
        "b: differs",
        "c: is not in the file",
    ]
    assert digests.compare({"a": "1", "b": "2"}, {"a": "1"}) == ["b: is no longer computed"]


@pytest.mark.slow
def test_digests_are_unchanged() -> None:
    kept = json.loads(digests.EXPECTED.read_text())
    if kept["machine"] != digests.machine():
        pytest.skip(
            f"digests are of {kept['machine']}, this is {digests.machine()}: write them here from a commit that is trusted"
        )
    command = [sys.executable, "-m", "tests.house.digests", "--check", str(digests.EXPECTED)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
