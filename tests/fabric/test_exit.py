"""Launched processes end once their result is delivered."""

from __future__ import annotations

import subprocess
import sys

STUCK = """
import atexit, threading
from arclight.fabric import launchers

launchers._EXIT_LIMIT_S = 0.2
atexit.register(threading.Event().wait)  # as a flush of a stream that was locked when the process was forked
launchers._end_process()
"""


def test_an_exit_function_that_never_returns_holds_no_process() -> None:
    assert subprocess.run([sys.executable, "-c", STUCK], timeout=120, check=False).returncode == 0


def test_exit_functions_run_before_a_process_ends() -> None:
    program = STUCK.replace("threading.Event().wait)", "lambda: print('said', flush=True))")
    done = subprocess.run([sys.executable, "-c", program], timeout=120, check=True, capture_output=True, text=True)
    assert done.stdout == "said\n"
