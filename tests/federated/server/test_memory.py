"""The server's memory does not go with the number of clients."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]


def peak(megabytes: int, clients: int, strategy: str) -> tuple[float, float]:
    """Resident memory of a server's process in MB: with all imported, and at most over a whole run."""
    command = [sys.executable, "-m", "tests.federated.server.peak", str(megabytes), str(clients), strategy]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    return said["imported"], said["peak"]


@pytest.mark.slow
def test_eight_clients_take_no_more_memory_than_two(tmp_path: Path) -> None:
    size = 64
    _, two = peak(size, 2, "FedAvg")
    imported, eight = peak(size, 8, "FedAvg")
    assert (eight - two) / 6 <= 0.02 * size
    assert eight - imported <= 2.2 * size


@pytest.mark.slow
def test_a_strategy_with_momentum_takes_little_more(tmp_path: Path) -> None:
    size = 64
    imported, most = peak(size, 2, "FedNesterov")
    assert most - imported <= 2.2 * size
