"""Launch the other processes of a run, and end all of them when one fails.

`ParallelStrategy.launcher` chooses one; ``trainer.loop.session`` and ``trainer.fabric.fabric`` call ``launch``. `MultiProcessingLauncher`
returns rank 0's result after all ranks have ended; `SubprocessLauncher` (the default) waits for no child: each process returns its own.
``environments.clusters`` reads LOCAL_RANK, NODE_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the children: they stay.
``cli.commands.doctor``, ``serve.models`` and ``trainer.data.checks`` use `available_cores`.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arclight.fabric.distributed.hang_report import RankMissingError
from arclight.fabric.distributed.watchdog import before_exit, explain_failure, failed_first, stop_watchdog
from arclight.fabric.environments import ClusterEnvironment


class Launcher:
    """Launcher of one process, which runs the function in this one."""

    runs_in_this_process = True
    """True if the function runs in this process too, so that its effects are seen here."""

    is_interactive_compatible = True
    """Whether it works in a notebook and at a prompt."""

    def launch(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Run ``function(*arguments, **options)`` on all ranks of this node.

        Returns this process's result if the function runs in it (`runs_in_this_process`), else rank 0's.
        """
        return function(*arguments, **options)


class RankFailedError(RuntimeError):
    """Another rank failed and ended the run; its own traceback says why."""


class SubprocessLauncher(Launcher):
    """Launch the same command for every other local rank, and run the function in this process.

    Each child runs the script from its start and reaches this call with ``LOCAL_RANK`` set. A cluster environment that creates
    processes itself has started all of them: then none is launched. If one process fails all are ended, also after the function has
    returned.
    """

    is_interactive_compatible = False

    def __init__(self, environment: ClusterEnvironment, num_processes: int, num_nodes: int = 1) -> None:
        self.environment, self.num_processes, self.num_nodes = environment, num_processes, num_nodes
        self.children: list[subprocess.Popen[bytes]] = []

    def launch(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self.environment.validate_settings(self.num_processes, self.num_nodes)
        if not self.environment.creates_processes_externally and not self.children:
            self._start_children()
        divide_threads(self.num_processes)
        try:
            return function(*arguments, **options)
        except BaseException as problem:
            error = explain_failure(problem)
            if not self.children:
                if error is problem:
                    raise
                raise error from problem
            first = failed_first() if isinstance(error, Exception) else None
            self._stop_children()
            if first is not None and first > 0 and not isinstance(error, RankMissingError):
                raise RankFailedError(f"rank {first} failed; its traceback is above") from error
            if error is problem:
                raise
            raise error from problem

    def _start_children(self) -> None:
        if self.environment.local_rank() != 0:
            raise RuntimeError(
                f"this process attempted to launch new distributed processes with `local_rank > 0` ({self.environment.local_rank()}): either "
                f"LOCAL_RANK was changed by hand, or {type(self.environment).__name__}.creates_processes_externally should be True"
            )
        divide_threads(self.num_processes)
        os.environ["MASTER_ADDR"] = self.environment.main_address
        os.environ["MASTER_PORT"] = str(self.environment.main_port)
        os.environ["NODE_RANK"] = str(self.environment.node_rank())
        os.environ["LOCAL_RANK"] = "0"
        os.environ["WORLD_SIZE"] = str(self.num_processes * self.num_nodes)
        for rank in range(1, self.num_processes):
            self.children.append(subprocess.Popen(_this_command(), env={**os.environ, "LOCAL_RANK": str(rank)}))
        threading.Thread(target=self._watch, name="arclight-children", daemon=True).start()
        atexit.register(self._at_exit)
        before_exit.append(self._stop_children)

    def _watch(self) -> None:
        """End this process when a child fails, as a collective might never return."""
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
    """Return the command line that started this program."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name != "__main__":
        return [sys.executable, "-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]
    return [sys.executable, *sys.argv]


class MultiProcessingLauncher(Launcher):
    """Run the function in new processes and return rank 0's result.

    The start method is ``spawn``, ``fork`` or ``forkserver``. Arguments and the result are pickled between processes of this one run, as
    torch.multiprocessing does. New interpreters start with this one's random generators and switches of torch. Raises ValueError for a
    method that this platform lacks.
    """

    runs_in_this_process = False

    def __init__(self, environment: ClusterEnvironment, num_processes: int, start_method: str = "spawn") -> None:
        import torch.multiprocessing as mp

        if start_method not in mp.get_all_start_methods():
            raise ValueError(
                f"The start method {start_method!r} is not available on this platform; there are {', '.join(mp.get_all_start_methods())}"
            )
        self.environment, self.num_processes, self._start_method = environment, num_processes, start_method

    @property
    def is_interactive_compatible(self) -> bool:  # type: ignore[override]
        return self._start_method == "fork"  # the others import the main module, which a notebook has not

    def launch(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        import torch.multiprocessing as mp
        from torch.multiprocessing.spawn import start_processes

        if "LOCAL_RANK" in os.environ:
            return function(*arguments, **options)
        self._check()
        context = mp.get_context(self._start_method)
        queue, taken = context.SimpleQueue(), context.Event()
        shared = {"MASTER_ADDR": self.environment.main_address, "MASTER_PORT": str(self.environment.main_port)}
        state = None if self._start_method == "fork" else _interpreter_state()
        parent = None if self._start_method == "forkserver" else os.getpid()
        job = _Job(self.num_processes, shared, state, parent, function, arguments, options)
        processes = start_processes(
            _entry,
            args=(job, queue, taken),
            nprocs=self.num_processes,
            join=False,
            start_method=self._start_method,
        )
        del os.environ["MASTER_PORT"]  # the next launch meets elsewhere: this port may be in use for a while
        result = None
        while not processes.join(timeout=0.2):  # raises with the child's traceback when one fails
            if not queue.empty():
                result = queue.get()
                taken.set()
        return result

    def _check(self) -> None:
        import torch
        import torch.multiprocessing as mp

        if self._start_method != "spawn" and (torch.cuda._is_in_bad_fork() or torch.cuda.is_initialized()):
            raise RuntimeError(
                f"Cannot re-initialize CUDA in forked subprocess: CUDA is already initialized in this process. With "
                f"start_method={self._start_method!r} nothing may touch a CUDA device before (not even a tensor's .cuda()); "
                "restart the program or notebook, or use strategy='ddp_spawn'"
            )
        if self._start_method != "fork" and getattr(mp.current_process(), "_inheriting", False):
            raise RuntimeError(
                f"start_method={self._start_method!r} imports your script in each new process, so it requires that your script guards "
                'the main part: put what it does in a function and call that under `if __name__ == "__main__":`'
            )


def _interpreter_state() -> dict[str, Any]:
    """Return random generators and torch's switches, which a new interpreter lacks."""
    import torch

    from arclight.fabric.seeding import rng_state

    return {
        "rng": rng_state(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
    }


def _restore_interpreter(state: dict[str, Any]) -> None:
    import torch

    from arclight.fabric.seeding import set_rng_state

    set_rng_state(state["rng"])
    torch.use_deterministic_algorithms(state["deterministic"], warn_only=state["warn_only"])
    torch.backends.cudnn.benchmark = state["benchmark"]


@dataclass
class _Job:
    """Job of the new processes, and the state that they start from."""

    num_processes: int
    shared: dict[str, str]
    state: dict[str, Any] | None
    """Random generators and switches of torch; None for forked processes, which have all of it."""
    parent: int | None
    """The process that waits for them; None if another, that lives as long as it, starts them."""
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


def _entry(local_rank: int, job: _Job, queue: Any, taken: Any) -> None:
    exit_with_parent(job.parent)
    os.environ.update(job.shared, LOCAL_RANK=str(local_rank))
    divide_threads(job.num_processes)
    if job.state is None:
        _drop_inherited_exit_functions()
    else:
        _restore_interpreter(job.state)
    try:
        result = job.function(*job.arguments, **job.options)
        if local_rank == 0:
            queue.put(result)
            taken.wait(_GRACE)  # tensors in it lie in memory that goes with this process
    except Exception as problem:
        error = explain_failure(problem)
        if failed_first() is not None:  # the parent shows what ends first: let that be the one which failed first
            time.sleep(_GRACE)
        if error is problem:
            raise
        raise error from problem
    finally:
        leave_group()
    _end_process()


_PR_SET_PDEATHSIG = 1
_EXIT_LIMIT_S = 60.0
"""Seconds that exit functions have in a launched process whose result is delivered."""


def exit_with_parent(parent: int | None = None) -> None:
    """End this process when its parent has gone, for whatever reason.

    It gets SIGTERM, on which a run saves and ends in order, and SIGKILL if it is still there a while later (in a collective
    that nobody else enters, for one). Linux sends the signal itself; elsewhere a thread that looks for the parent does.
    ``parent``: the process that has to be it, if that is known; it may have gone before this is called.
    """
    parent = os.getppid() if parent is None else parent
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    threading.Thread(target=_watch_parent, args=(parent,), name="arclight-parent", daemon=True).start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE)
    os.kill(os.getpid(), signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)


def _drop_inherited_exit_functions() -> None:
    """Drop a forked process' inherited exit functions, which delete its parent's folders."""
    atexit._clear()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]  # of what this process makes


def _end_process() -> None:
    """End a process whose result is delivered, without tearing down the interpreter.

    Threads of gloo that still run during the teardown have aborted such processes.

    A forked process may never get through its exit functions: a stream that another thread of its parent was writing
    at the time of the fork stays locked, and `logging` flushes all of them.
    """
    limit = threading.Timer(_EXIT_LIMIT_S, os._exit, (0,))
    limit.daemon = True
    limit.start()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def leave_group() -> None:
    """Destroy the process group, if any, before gloo's threads can abort the process."""
    import torch.distributed as dist

    stop_watchdog()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    _wait_for_gloo()


_GLOO_LOOKS = 5
"""Looks in a row at which gloo's threads must sleep to count as idle."""
_GLOO_LOOK_INTERVAL_S = 0.01
_GLOO_LIMIT_S = 10.0
"""Seconds after which a process ends though they are busy."""


def _wait_for_gloo() -> None:
    """Wait until gloo's threads are idle, without holding the interpreter's lock.

    Such a thread needs the lock to release the tensors of a collective, on a busy machine long after the collective has returned. If the
    interpreter ends meanwhile, the thread aborts the process. Threads of groups that something still refers to outlive
    `destroy_process_group`. The states are read without the lock, so that a thread that was waiting for it is seen to run.
    """
    deadline = time.monotonic() + _GLOO_LIMIT_S
    idle = 0
    while idle < _GLOO_LOOKS and (states := _gloo_states()) and time.monotonic() < deadline:
        idle = idle + 1 if all(state == "S" for state in states) else 0
        time.sleep(_GLOO_LOOK_INTERVAL_S)


def _gloo_states() -> list[str]:
    """Return the states of gloo's threads as proc(5) has them.

    S is asleep, R runs or waits for a core.
    """
    if sys.platform != "linux":
        return ["S"]  # not known: `_wait_for_gloo` then gives them its looks' time
    states = []
    for stat in Path("/proc/self/task").glob("*/stat"):
        try:
            name, _, rest = stat.read_text(errors="replace").partition("(")[2].rpartition(") ")
        except OSError:  # the thread has ended
            continue
        if "gloo" in name:
            states.append(rest[0])
    return states


def divide_threads(num_processes: int) -> None:
    """Divide this host's cores among its processes, unless OMP_NUM_THREADS is set."""
    if num_processes > 1 and "OMP_NUM_THREADS" not in os.environ:
        import torch

        threads = max(1, available_cores() // num_processes)
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # processes started from here, loaders' workers too


def available_cores() -> int:
    """Count the cores of this host that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
