"""Python programs in processes of their own that do not import torch again: forked from a process that has done so and nothing else.

To start Python and to import what nearly all programs here import takes seconds of processor time; a fork takes a hundredth of that. What a
program meets is otherwise as in a fresh interpreter: its own process, arguments, folder, environment, streams and end. What it spawns by
multiprocessing comes from there as well, unless the test says ``spawns``: it is pickled and unpickled as always, and has the program's
folder, environment and output. Tests of imports, of start-up, of what the environment says to libraries while they load, and of how
programs end that have started others have to start an interpreter.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing as mp
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Mapping
from contextlib import ExitStack
from multiprocessing import context as contexts
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any

import pytest
from tests.ports import free_port

PRELOADED = [
    "pytest", "numpy", "pydantic", "pydantic.main", "rich.console", "rich.live", "rich.progress",
    "torch", "torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.utils.data",
    "arclight", "arclight.cli", "arclight.cli.command", "arclight.cli.commands.run", "arclight.cli.commands.train",
    "arclight.trainer.trainer", "arclight.trainer.loop.session",
    "arclight.trainer.callbacks.checkpoint.model_checkpoint", "arclight.trainer.callbacks.monitoring.model_summary",
    "arclight.federated.server.server", "arclight.federated.clients.node", "arclight.federated.clients.trainer_learner",
    "arclight.federated.transports.http_client", "arclight.federated.transports.http_server", "uvicorn", "httptools", "urllib3",
    "arclight.parallel", "arclight.parallel.strategy", "arclight.parallel.model.parallelize", "arclight.text", "arclight.fabric.strategies",
    "arclight.text.language_model", "arclight.vision.tasks.detection", "arclight.cli.federate.run_report",
    "arclight.trainer.callbacks", "starlette.applications", "cryptography.x509", "safetensors.torch",
    "onnxscript.function_libs.torch_lib.ops", "torch.export._trace",
]  # fmt: skip
"""The optimizers of torch import its compiler, its summary of sharded tensors their algebra, and its ONNX exporter 500 functions: two thirds of a
short run's time."""

GRACE = 30.0
"""Seconds that ranks have to say what is wrong after one of them has failed."""


SERVER = "ARCLIGHT_TESTS_FORK_SERVER"
"""Where workers of the suite find the address of the one fork server, which the process that starts them has started."""


def start_server() -> None:
    """Start the fork server for the workers that this process starts: each would need half a gigabyte, and seconds, for its own."""
    context()
    forkserver.ensure_running()
    address = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]
    assert address is not None
    os.environ[SERVER] = address


def find_server() -> None:
    """Use the fork server of the process that has started this one, if it has; programs that tests start know nothing of it."""
    if (address := os.environ.pop(SERVER, None)) is not None:
        forkserver._forkserver._forkserver_address = address  # type: ignore[attr-defined]
        # what the server gives each process to keep, to learn when the last has ended: it ends with the one that started it
        forkserver._forkserver._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # type: ignore[attr-defined]
        forkserver._forkserver.ensure_running = resource_tracker.ensure_running  # type: ignore[method-assign]


def context() -> Any:
    """Of multiprocessing: processes are forked from the one that has all of that."""
    found = mp.get_context("forkserver")
    found.set_forkserver_preload(PRELOADED)
    return found


class _Process(contexts.ForkServerProcess):
    """A process in place of a spawned one, with the environment and the streams of the one that starts it."""

    def __getstate__(self) -> dict[str, Any]:
        streams = [mp.reduction.DupFd(number) for number in (1, 2)]
        return self.__dict__ | {"_environment": dict(os.environ), "_streams": streams}

    def _bootstrap(self, parent_sentinel: int | None = None) -> Any:
        gc.freeze()
        for number, stream in enumerate(self.__dict__.pop("_streams"), start=1):
            os.dup2(stream.detach(), number)
        os.environ.clear()
        os.environ.update(self.__dict__.pop("_environment"))
        _share_server()
        return super()._bootstrap(parent_sentinel)  # type: ignore[misc]


class Forked(contexts.ForkServerContext):
    """A context of multiprocessing for ``spawn``: what is started finds all of that imported."""

    Process = _Process

    def get_context(self, method: str | None = None) -> Any:
        return self

    def __reduce__(self) -> tuple[type[Forked], tuple[()]]:
        return Forked, ()


def fork_spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have processes that this one spawns forked from the server."""
    context()
    monkeypatch.setitem(contexts._concrete_contexts, "spawn", Forked())  # type: ignore[attr-defined]


def _share_server() -> None:
    """Have this process, which was forked by a server, and those that it starts use that server as well: Python starts one more in each."""
    forkserver._forkserver.ensure_running = resource_tracker.ensure_running  # type: ignore[method-assign]
    contexts._concrete_contexts["spawn"] = Forked()  # type: ignore[attr-defined]


class Program:
    """A Python program, ``script.py ...``, ``-m module ...`` or ``-c code ...``, that runs; the part of subprocess.Popen that is needed."""

    def __init__(
        self, *words: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None, merged: bool = False,
        spawns: bool = False,
    ) -> None:  # fmt: skip
        """cwd, env: folder and environment, by default those of this process; merged: errors go where output goes.

        spawns: what it spawns starts Python, as outside of tests.
        """
        self.args = list(map(str, words))
        self._out: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the program)
        self._err: IO[bytes] = self._out if merged else tempfile.TemporaryFile()  # noqa: SIM115
        streams = [mp.reduction.DupFd(stream.fileno()) for stream in (self._out, self._err)]
        given = (self.args, os.fspath(cwd or Path.cwd()), dict(os.environ if env is None else env), spawns, *streams)
        self._passed = 0
        self._process: BaseProcess = context().Process(target=_run, args=given)
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout, *self.said())
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.pid is not None and self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def said(self) -> tuple[str, str]:
        """Output and errors so far."""
        return _text(self._out), "" if self._err is self._out else _text(self._err)

    def until(self, words: str, timeout: float) -> str:
        """The next line that has ``words``; lines before it are passed over."""
        deadline = time.monotonic() + timeout
        while True:
            ended = self.returncode is not None
            text = self.said()[0]
            line_end = text.find("\n", self._passed)
            while line_end >= 0:
                line, self._passed = text[self._passed : line_end], line_end + 1
                if words in line:
                    return line
                line_end = text.find("\n", self._passed)
            assert not ended, f"{self.args} has ended without {words!r}: {text}"
            assert time.monotonic() < deadline, f"{self.args} has not said {words!r} within {timeout:g} s: {text}"
            time.sleep(0.02)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Output behind the lines that `until` has passed, and errors, at the program's end."""
        self.wait(timeout)
        out, err = self.said()
        return out[self._passed :], err

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever it does, it ends."""
        self.kill()
        self._process.join(60)


def run(
    *words: str | Path, timeout: float, cwd: Path | None = None, env: Mapping[str, str] | None = None,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """A program to its end, as by subprocess.run with its streams captured."""
    with Program(*words, cwd=cwd, env=env) as program:
        program.wait(timeout)
        done = subprocess.CompletedProcess(program.args, program.wait(0), *program.said())
    if check:
        assert done.returncode == 0, done.stderr
    return done


def start_ranks(
    stack: ExitStack, count: int, *words: str | Path, env: Mapping[str, str] | None = None
) -> list[Program]:
    """A program in ``count`` processes that meet as under torchrun, until ``stack`` is closed; by rank."""
    port = free_port()
    given = dict(os.environ if env is None else env)
    given |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
    }
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    return [stack.enter_context(Program(*words, env=given | rank)) for rank in ranks]


def run_ranks(
    count: int, *words: str | Path, timeout: float, env: Mapping[str, str] | None = None
) -> list[subprocess.CompletedProcess[str]]:
    """A program in ``count`` processes that meet as under torchrun, to its end in all of them; by rank."""
    until = time.monotonic() + timeout
    with ExitStack() as stack:
        programs = start_ranks(stack, count, *words, env=env)
        while any(program.returncode is None for program in programs) and time.monotonic() < until:
            if any(program.returncode for program in programs):  # the others may wait for it
                until = min(until, time.monotonic() + GRACE)
            time.sleep(0.02)
    return [subprocess.CompletedProcess(one.args, one.wait(0), *one.said()) for one in programs]


def _text(stream: IO[bytes]) -> str:
    size = os.fstat(stream.fileno()).st_size
    return os.pread(stream.fileno(), size, 0).decode(errors="replace")


def _run(words: list[str], cwd: str, env: dict[str, str], spawns: bool, out: Any, err: Any) -> None:
    gc.freeze()  # a search for garbage would copy every page of what was imported before the fork
    for number, stream in enumerate((out, err), start=1):
        os.dup2(stream.detach(), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.setsid()
    mp.set_start_method(None, force=True)  # this process was started in a way of its own; what it starts is not
    if not spawns:
        _share_server()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if env.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    sys.path[:0] = [os.path.abspath(path) for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    try:
        _interpret(*words)
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:  # multiprocessing leaves both out
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def _interpret(kind: str, *rest: str) -> None:
    """As Python does with its command line."""
    if kind == "-m":
        sys.argv, sys.path[:0] = ["-m", *rest[1:]], [""]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv, sys.path[:0] = ["-c", *rest[1:]], [""]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv, sys.path[:0] = [kind, *rest], [os.path.dirname(os.path.abspath(kind))]
        runpy.run_path(kind, run_name="__main__")
