"""Processes of one gloo group that run functions of a test's file, one after another: started once for a whole module of tests."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch

PATIENCE = 100.0
"""Seconds that a function may take on all ranks; a collective in it has to end within half of that."""
GRACE = 10.0
"""Seconds that ranks have to end once one of them has failed."""


class Ranks:
    """``ranks(function, *arguments)`` runs ``function(rank, *arguments)`` on all of them and gives their results by rank.

    Trainers and Fabrics in it find themselves started from outside, as under torchrun. Functions travel by name, results
    by pickle. A function that fails on a rank, or does not end, fails the test with that rank's traceback; the processes
    are then started anew.
    """

    def __init__(self, count: int = 2) -> None:
        self.count = count
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answers: list[Any] = [None] * self.count
        until, first = time.monotonic() + PATIENCE, ""
        waiting = dict(zip(self._pipes, range(self.count), strict=True))
        while waiting and (left := until - time.monotonic()) > 0:
            for pipe in connection.wait([*waiting], left):
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    answers[rank] = ("failed", f"it ended with status {self._status(rank)}")
                if answers[rank][0] == "failed" and not first:
                    first, until = f"rank {rank}: {answers[rank][1]}", min(until, time.monotonic() + GRACE)
        stuck = [f"rank {rank} is here:\n{self._stack(rank)}" for rank in waiting.values()]
        if first or stuck:
            self.close()
            raise AssertionError("\n".join([first, *stuck]))
        return [answer[1] for answer in answers]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        context = multiprocessing.get_context("fork")
        for rank in range(self.count):
            own, others = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.count, port, others, self._folder / str(rank)))
            process.start()
            others.close()
            self._processes.append(process)
            self._pipes.append(own)

    def _status(self, rank: int) -> int | None:
        self._processes[rank].join(GRACE)
        status: int | None = self._processes[rank].exitcode
        return status

    def _stack(self, rank: int) -> str:
        os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        return (self._folder / str(rank)).read_text()


def _serve(rank: int, count: int, port: int, pipe: Any, stacks: Path) -> None:
    from arclight import Fabric
    from arclight.fabric.rank_zero import rank_zero_only
    from arclight.fabric.strategies import DDPStrategy

    torch.set_num_threads(1)
    del rank_zero_only.rank  # a run in the process that this one is a copy of may have fixed it
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "tests",
    }  # fmt: skip
    with stacks.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        strategy = DDPStrategy(timeout=timedelta(seconds=PATIENCE / 2))
        Fabric(accelerator="cpu", devices=count, strategy=strategy).launch()
        while True:
            function, arguments = pipe.recv()
            try:
                pipe.send(("done", function(rank, *arguments)))
            except BaseException:
                pipe.send(("failed", traceback.format_exc()))
