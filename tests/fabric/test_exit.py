"""Launched processes end once their result is delivered."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading

import pytest
from tests import warm

from arclight.fabric import launchers

PR_SET_NAME = 15

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


GLOO = """
import atexit
import torch
import torch.distributed as dist
from arclight.fabric.launchers import leave_group

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
atexit.register(leave_group)
referred = dist.group.WORLD  # the group outlives its destruction
work = dist.all_reduce_coalesced([torch.zeros(1) for _ in range(3000)], async_op=True)
work.wait()
del work
"""


@pytest.mark.slow
@pytest.mark.parametrize("run", range(3))
def test_gloos_threads_release_their_tensors_before_the_interpreter_ends(run: int) -> None:
    """Without a wait two of three runs were aborted: hence several."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", GLOO], timeout=120, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(sys.platform != "linux", reason="states of threads are read from /proc")
def test_a_busy_thread_of_gloo_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "_GLOO_LIMIT_S", 300.0)
    running, stop, idle = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        ctypes.CDLL(None).prctl(PR_SET_NAME, b"pt_gloo_runloop")
        running.set()
        while not stop.is_set():
            sum(range(1000))
        idle.wait()  # a group's thread stays after its work

    thread = threading.Thread(target=work)
    waiting = threading.Thread(target=launchers._wait_for_gloo)
    thread.start()
    try:
        assert running.wait(60)
        waiting.start()
        waiting.join(launchers._GLOO_LOOK_INTERVAL_S * launchers._GLOO_LOOKS * 6)
        assert waiting.is_alive()
        stop.set()
        waiting.join(60)
        assert not waiting.is_alive()
    finally:
        stop.set()
        idle.set()
        thread.join()
