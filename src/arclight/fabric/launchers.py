"""Launchers: start the other processes of a run and wait for them."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from arclight.fabric.environments import ClusterEnvironment, find_free_network_port
from arclight.fabric.watching import end_watch, failed_first


class Launcher:
    """Runs a function in this process; nothing to start."""

    runs_in_this_process = True

    def launch(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


class RankFailedError(RuntimeError):
    """Another rank failed and ended the run; its own traceback says why."""


class SubprocessLauncher(Launcher):
    """Starts the same command once more for every other local rank, then runs the function here as rank 0.

    Each child runs the script from its start and reaches this call with ``LOCAL_RANK`` set. One process that fails
    ends all of them, also after the function has returned: nothing is left running.
    """

    def __init__(self, num_processes: int, environment: ClusterEnvironment) -> None:
        self.num_processes, self.environment = num_processes, environment
        self.children: list[subprocess.Popen[bytes]] = []

    def launch(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if "LOCAL_RANK" in os.environ and not self.children:
            return function(*arguments)  # this is one of the children
        if not self.children:
            self._start_children()
        try:
            return function(*arguments)
        except BaseException as error:
            first = failed_first() if isinstance(error, Exception) else None
            self._stop_children()
            if first is not None and first > 0:
                raise RankFailedError(f"rank {first} failed; its traceback is above") from error
            raise

    def _start_children(self) -> None:
        os.environ["MASTER_ADDR"] = self.environment.main_address
        os.environ["MASTER_PORT"] = str(self.environment.main_port)
        os.environ["LOCAL_RANK"] = "0"
        for rank in range(1, self.num_processes):
            self.children.append(subprocess.Popen(_this_command(), env={**os.environ, "LOCAL_RANK": str(rank)}))
        threading.Thread(target=self._watch, name="arclight-children", daemon=True).start()
        atexit.register(self._at_exit)

    def _watch(self) -> None:
        """End this process when a child fails: its main thread may be inside a collective that will never return."""
        while any(child.poll() is None for child in self.children):
            time.sleep(0.2)
            failed = next((pair for pair in enumerate(self.children, 1) if pair[1].poll() not in (None, 0)), None)
            if failed is None or self._stopping:
                continue
            for _ in range(_GRACE * 5):  # most back ends let the main thread know: it ends better by itself
                time.sleep(0.2)
                if self._stopping:
                    return
            rank, child = failed
            if child.returncode > 0:
                sys.stderr.write(f"arclight: local rank {rank} {_ending(child.returncode)}; stopping the run\n")
            self._stop_children()
            sys.stderr.flush()
            os._exit(1)

    def _at_exit(self) -> None:
        if getattr(sys, "last_value", None) is not None:  # this process fails after the function returned
            self._stop_children()

    _stopping = False

    def _stop_children(self) -> None:
        self._stopping = True
        for rank, child in enumerate(self.children, 1):
            if child.poll() is None:
                child.terminate()
            elif child.returncode < 0:  # it could not say so itself
                sys.stderr.write(f"arclight: local rank {rank} {_ending(child.returncode)}\n")
        deadline = time.monotonic() + _GRACE
        for child in self.children:
            try:
                child.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()


_GRACE = 5
"""Seconds that processes have to end by themselves."""


def _ending(status: int) -> str:
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _this_command() -> list[str]:
    """The command line that started this program."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name != "__main__":
        return [sys.executable, "-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]
    return [sys.executable, *sys.argv]


class MultiProcessingLauncher(Launcher):
    """Runs the function in new processes (``spawn`` or ``fork``) and brings rank 0's result back.

    Arguments and the result travel by pickle between processes of this one run, as torch.multiprocessing does.
    """

    runs_in_this_process = False

    def __init__(self, num_processes: int, start_method: str = "spawn") -> None:
        self.num_processes, self.start_method = num_processes, start_method

    def launch(self, function: Callable[..., Any], *arguments: Any) -> Any:
        import torch.multiprocessing as mp

        if "LOCAL_RANK" in os.environ:
            return function(*arguments)
        context = mp.get_context(self.start_method)
        queue, taken = context.SimpleQueue(), context.Event()
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_network_port())}
        processes = mp.start_processes(
            _entry,
            args=(shared, function, arguments, queue, taken),
            nprocs=self.num_processes,
            join=False,
            start_method=self.start_method,
        )
        result = None
        while not processes.join(timeout=0.2):  # raises with the child's traceback when one fails
            if not queue.empty():
                result = queue.get()
                taken.set()
        return result


def _entry(
    local_rank: int,
    shared: dict[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    queue: Any,
    taken: Any,
) -> None:
    os.environ.update(shared, LOCAL_RANK=str(local_rank))
    try:
        result = function(*arguments)
        if local_rank == 0:
            queue.put(result)
            taken.wait(_GRACE)  # tensors in it lie in memory that goes with this process
    except Exception:
        if failed_first() is not None:  # the parent shows what ends first: let that be the one which failed first
            time.sleep(_GRACE)
        raise
    finally:
        leave_group()
    _end_process()


def _end_process() -> None:
    """End a process whose result is delivered, without taking the interpreter apart: threads of gloo that still look
    for it while it goes have aborted such processes.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def leave_group() -> None:
    """Leave the process group, if there is one: gloo's threads abort a process that ends while they still run."""
    import torch.distributed as dist

    end_watch()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
