"""Launched processes end once their result is delivered."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests import warm

STUCK = """
import atexit, threading
from arclight.fabric import launchers

launchers._EXIT_LIMIT_S = 0.2
atexit.register(threading.Event().wait)  # as a flush of a stream that was locked when the process was forked
launchers._end_process()
"""


def test_an_exit_function_that_never_returns_holds_no_process() -> None:
    assert warm.run("-c", STUCK, timeout=120).returncode == 0


def test_exit_functions_run_before_a_process_ends() -> None:
    program = STUCK.replace("threading.Event().wait)", "lambda: print('said', flush=True))")
    done = warm.run("-c", program, timeout=120, check=True)
    assert done.stdout == "said\n"


FORKED = """
import atexit, tempfile
from pathlib import Path
from arclight.fabric.environments import LightningEnvironment
from arclight.fabric.launchers import MultiProcessingLauncher

def rank():
    own = tempfile.TemporaryDirectory()
    atexit.register(lambda: print("own", Path(own.name).exists(), flush=True))
    kept.append(own)  # alive until the process ends
    return own.name

kept, inherited = [], tempfile.TemporaryDirectory()
atexit.register(lambda: print("parent", Path(inherited.name).exists(), flush=True))
made = MultiProcessingLauncher(LightningEnvironment(), 1, "fork").launch(rank)
print(Path(inherited.name).exists(), Path(made).exists())
"""


@pytest.mark.slow
def test_a_forked_process_runs_its_own_exit_functions_and_not_those_of_its_parent() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], timeout=120, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["own True", "True False", "parent True"], done.stderr
