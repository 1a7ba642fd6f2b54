"""Launchers: start the other processes of a run and wait for them."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from arclight.fabric.environments import ClusterEnvironment, free_port


class Launcher:
    """Runs a function in this process; nothing to start."""

    runs_in_this_process = True

    def launch(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


class SubprocessLauncher(Launcher):
    """Starts the same command once more for every other local rank, then runs the function here as rank 0.

    Each child runs the script from its start and reaches this call with ``LOCAL_RANK`` set. A child that
    fails ends the whole run: this process is stopped with the child's exit status named.
    """

    def __init__(self, num_processes: int, environment: ClusterEnvironment) -> None:
        self.num_processes, self.environment = num_processes, environment
        self.children: list[subprocess.Popen[bytes]] = []

    def launch(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if "LOCAL_RANK" in os.environ and not self.children:
            return function(*arguments)  # this is one of the children
        if not self.children:
            self._start_children()
        finished = threading.Event()
        threading.Thread(target=self._watch, args=(finished,), daemon=True).start()
        try:
            return function(*arguments)
        except BaseException:
            finished.set()
            self._stop_children()
            raise
        finally:
            finished.set()

    def _start_children(self) -> None:
        os.environ["MASTER_ADDR"] = self.environment.main_address
        os.environ["MASTER_PORT"] = str(self.environment.main_port)
        os.environ["LOCAL_RANK"] = "0"
        for rank in range(1, self.num_processes):
            self.children.append(subprocess.Popen(_this_command(), env={**os.environ, "LOCAL_RANK": str(rank)}))

    def _watch(self, finished: threading.Event) -> None:
        while not finished.wait(0.5):
            for rank, child in enumerate(self.children, 1):
                if child.poll() not in (None, 0):
                    sys.stderr.write(
                        f"arclight: local rank {rank} ended with status {child.returncode}; stopping the run\n"
                    )
                    sys.stderr.flush()
                    self._stop_children()
                    os._exit(1)  # the main thread may be inside a collective that will never return

    def _stop_children(self) -> None:
        for child in self.children:
            if child.poll() is None:
                child.terminate()
        deadline = time.monotonic() + 5
        for child in self.children:
            try:
                child.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()


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
        queue = mp.get_context(self.start_method).SimpleQueue()
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        processes = mp.start_processes(
            _entry,
            args=(shared, function, arguments, queue),
            nprocs=self.num_processes,
            join=False,
            start_method=self.start_method,
        )
        result = None
        while not processes.join(timeout=0.2):  # raises with the child's traceback when one fails
            if not queue.empty():
                result = queue.get()
        return queue.get() if not queue.empty() else result


def _entry(
    local_rank: int, shared: dict[str, str], function: Callable[..., Any], arguments: tuple[Any, ...], queue: Any
) -> None:
    os.environ.update(shared, LOCAL_RANK=str(local_rank))
    try:
        result = function(*arguments)
        if local_rank == 0:
            queue.put(result)
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

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
