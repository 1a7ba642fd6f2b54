"""Ranks that are killed, sleep or stop in the middle of a training step, in real runs of several processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

import pytest
from tests import warm
from tests.waiting import patiently

SCRIPT = Path(__file__).with_name("training_script.py")


def run(
    root: Path, fault: str, devices: int = 2, restarts: int | None = None, seconds: float = 300
) -> subprocess.CompletedProcess[str]:
    """The script by itself, or with ``restarts`` under elastic launch."""
    root.mkdir()
    own = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {key: value for key, value in os.environ.items() if key not in own} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable]
    if restarts is not None:
        command += [
            "-m",
            "torch.distributed.run",
            "--nnodes=1",
            f"--nproc-per-node={devices}",
            f"--max-restarts={restarts}",
        ]
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--monitor-interval=0.2"]
    command += [str(SCRIPT), str(root), fault, str(devices), str(seconds)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)


def samples(root: Path, devices: int = 2) -> tuple[dict[int, list[int]], list[int]]:
    """Step -> the samples that count for it, of all ranks; and the attempts."""
    found: dict[int, dict[int, list[int]]] = {}
    attempts = set()
    for rank in range(devices):
        for line in (root / f"samples-{rank}.jsonl").read_text().splitlines():
            row = json.loads(line)
            attempts.add(row["attempt"])
            found.setdefault(row["step"], {})[rank] = row["samples"]  # a later attempt's replaces what it did again
    return {step: list(chain(*(ranks[rank] for rank in sorted(ranks)))) for step, ranks in found.items()}, sorted(
        attempts
    )


def first_steps(root: Path) -> list[int]:
    """The first step of each attempt on rank 0."""
    rows = [json.loads(line) for line in (root / "samples-0.jsonl").read_text().splitlines()]
    return [
        next(row["step"] for row in rows if row["attempt"] == number) for number in sorted({r["attempt"] for r in rows})
    ]


@pytest.mark.slow
def test_a_killed_rank_changes_nothing_under_elastic_launch(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for undisturbed in warm.run_ranks(2, SCRIPT, tmp_path / "a", "none", "2", "300", timeout=300):
        assert undisturbed.returncode == 0, undisturbed.stderr
    disturbed = run(tmp_path / "b", "kill", restarts=2)
    assert disturbed.returncode == 0, disturbed.stderr
    wanted, once = samples(tmp_path / "a")
    found, twice = samples(tmp_path / "b")
    assert (once, twice) == ([0], [0, 1])
    assert 4 < first_steps(tmp_path / "b")[1] <= 8, "it went on from a checkpoint and not from the start"
    assert found == wanted
    assert list(found) == list(range(1, 13))
    for epoch in (0, 1):  # of five steps: every sample once, nothing twice, nothing left out
        assert sorted(chain(*(found[step] for step in range(5 * epoch + 1, 5 * epoch + 6)))) == list(range(40))
    assert (tmp_path / "a/digest").read_text() == (tmp_path / "b/digest").read_text()


def left_over(output: str) -> list[int]:
    return [int(number) for number in re.findall(r"process (\d+)", output) if Path(f"/proc/{number}").exists()]


def names_rank_1(errors: str, where: str, root: Path) -> None:
    sentence = re.search(
        r"RankMissingError: rank (\d) has waited \d+ s at (.*) for rank 1 \((.*), process \d+\), which (.*)", errors
    )
    assert sentence is not None, errors
    assert sentence[1] in "02"
    assert "blocks.1" in sentence[2] or "Block" in sentence[2]
    assert re.search("all_gather|reduce_scatter|unshard", sentence[2]), sentence[2]
    assert where in sentence[4]
    assert "step=6.ckpt" in [path.name for path in (root / "c").iterdir()]


def test_a_missing_rank_is_named_with_the_collective_that_waits_for_it(tmp_path: Path) -> None:
    def check(seconds: float) -> None:
        root = tmp_path / f"{seconds}"
        root.mkdir()
        with ExitStack() as stack:
            ranks = warm.start_ranks(stack, 3, SCRIPT, root, "sleep", "3", str(seconds))
            assert all(ranks[rank].wait(300) != 0 for rank in (0, 2))  # long before the sleep ends
            names_rank_1(ranks[0].said()[1] + ranks[2].said()[1], "oversleep", root)

    patiently(check, 5, 90)


@pytest.mark.slow
def test_a_run_that_starts_its_ranks_ends_where_one_of_them_has_stopped(tmp_path: Path) -> None:
    """It cannot even say where it is; one that only sleeps ends with a run in tests of Fabric."""

    def check(seconds: float) -> None:
        done = run(tmp_path / f"{seconds}", "stop", 3, seconds=seconds)
        for number in left_over(done.stdout):  # a stopped process cannot end by itself
            os.kill(number, signal.SIGKILL)
        assert done.returncode not in (0, None)
        names_rank_1(done.stderr, "does not answer", tmp_path / f"{seconds}")

    patiently(check, 12, 90)
