"""Runs of several processes of which one fails, dies or hangs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests import warm
from tests.waiting import patiently, wait_until

SCRIPT = Path(__file__).with_name("faulty_script.py")


def run(*arguments: str, anew: bool = True) -> subprocess.CompletedProcess[str]:
    """The script's output and status; fails where a process of it is left running. anew: the first rank starts Python."""
    environment = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    if anew:
        command = [sys.executable, str(SCRIPT), *arguments]
        done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=600)
    else:
        done = warm.run(SCRIPT, *arguments, env=environment, timeout=600)
    processes = [int(found) for found in re.findall(r"process (\d+)", done.stdout)]
    assert len(processes) == 2
    ended = lambda: not any(Path(f"/proc/{process}").exists() for process in processes)  # noqa: E731
    wait_until(ended, f"all processes end: {done.stderr}")
    return done


@pytest.mark.parametrize(
    ("start_method", "meeting", "anew"),
    [
        ("popen", "reduce", False),
        *(pytest.param(method, "ddp", True, marks=pytest.mark.slow) for method in ("popen", "spawn")),
    ],
)
def test_the_first_fault_is_shown_once_and_ends_all_ranks(start_method: str, meeting: str, anew: bool) -> None:
    done = run("crash", start_method, "300", meeting, anew=anew)
    assert done.returncode != 0
    assert "finished" not in done.stdout
    assert done.stderr.count("ValueError: the original fault") == 1
    assert done.stderr.count("in crash") == 1
    assert "Connection" not in done.stderr
    if start_method == "popen":
        assert done.stderr.count("Traceback (most recent call last)") == 1
        assert "rank 0 stops because rank 1 failed before it" in done.stderr


WAYS = [("fork", "reduce"), pytest.param("popen", "ddp", marks=pytest.mark.slow)]


@pytest.mark.parametrize(("start_method", "meeting"), WAYS)
def test_a_killed_rank_is_named_and_ends_the_run(start_method: str, meeting: str) -> None:
    done = run("kill", start_method, "300", meeting, anew=start_method == "popen")
    assert done.returncode != 0
    assert "finished" not in done.stdout
    named = (
        "local rank 1 was killed by SIGKILL" if start_method == "popen" else "process 1 terminated with signal SIGKILL"
    )
    assert named in done.stderr


@pytest.mark.parametrize(("start_method", "meeting"), WAYS)
def test_a_hanging_rank_is_named_with_its_stack_and_the_run_ends_in_time(start_method: str, meeting: str) -> None:
    def check(seconds: float) -> None:
        done = run("hang", start_method, str(seconds), meeting, anew=start_method == "popen")
        assert done.returncode != 0
        assert 1 <= done.stderr.count("holds the others up") <= 2  # when it is found out, and by the rank that gave up
        assert "rank 1 (" in done.stderr
        assert "in oversleep" in done.stderr
        assert "time.sleep(600)" in done.stderr
        assert "finished" not in done.stdout

    patiently(check, *((12, 90) if start_method == "popen" else (5, 90)))


@pytest.mark.parametrize(
    ("start_method", "number"),
    [("fork", signal.SIGTERM), ("fork", signal.SIGKILL), pytest.param("spawn", signal.SIGKILL, marks=pytest.mark.slow)],
)
def test_ranks_do_not_outlive_the_process_that_started_them(start_method: str, number: int, tmp_path: Path) -> None:
    """One of them waits in a collective, the other does not mind SIGTERM."""
    with warm.Program(SCRIPT, "orphan", start_method, spawns=True) as program:
        wait_until(lambda: "now" in program.said()[0], "rank 1 is asleep")
        ranks = [int(found) for found in re.findall(r"process (\d+)", program.said()[0])]
        assert len(ranks) == 2
        assert all(Path(f"/proc/{rank}").exists() for rank in ranks)
        program.send_signal(number)
        try:
            wait_until(lambda: not any(map(is_alive, ranks)), "all ranks end")
        finally:
            for rank in filter(is_alive, ranks):
                os.kill(rank, signal.SIGKILL)


def is_alive(process: int) -> bool:
    """Return True if the process runs; a zombie does not."""
    try:
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
