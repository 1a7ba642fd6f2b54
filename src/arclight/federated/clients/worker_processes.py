"""Train a node's clients in worker processes, which are watched, and restarted if they die.

Node and worker exchange JSON over a pipe. The node sends ``open`` (which run), ``fit``, ``evaluate``, ``cancel`` and ``close``; the
worker sends ``ready``, ``progress``, ``done`` and ``failed``. A pipe that ends means that the node has died: the worker ends at once.

``arclight federate join`` trains by its `ProcessExecutor`. The messages of the pipe are private: both ends are of one version.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import multiprocessing
import os
import queue
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight.federated.errors import CancelledError, ClientError, FederatedError
from arclight.federated.protocol import Evaluate, Evaluated, Fit, Message, Update, read

if TYPE_CHECKING:
    from arclight.federated.blobs.folder import FolderStore
    from arclight.federated.clients.client import Client
    from arclight.federated.clients.learner import Progress

    Make = Callable[[str], Client]

log = logging.getLogger(__name__)

_POLL_S = 0.1
"""Seconds between checks whether work was cancelled."""
_STOP_TIMEOUT_S = 20.0
"""Seconds a worker gets to stop cancelled work or exit before it is killed."""
_FREE_TIMEOUT_S = 3600.0
"""Seconds to wait for a free worker."""
_ATTEMPTS = 3
"""Attempts at one request before its client is reported as failed."""
_PROGRESS_INTERVAL_S = 0.1
"""Seconds between two reports of progress."""
_NODE_DIED_STATUS = 3
"""Exit status of a worker whose node has died."""


class WorkerDiedError(FederatedError):
    """A worker process has ended without being asked to."""


class ProcessExecutor:
    """Implement `Executor` with ``count`` workers, each of ``ranks`` processes (FSDP, DDP, ...).

    Clients need a ``build`` function, which is called once in each worker that trains them. In their place: a function that
    gives the client of a name there, for ``names``, or for any client of the run without ``names``. A client stays with its worker while
    that is free; its state is on the disk, so any other can go on. resident: how many clients' learners a worker keeps in
    memory, by default all. start_timeout_s: seconds that new processes may take to come up.
    """

    def __init__(
        self,
        clients: Sequence[Client] | Callable[[str], Client],
        count: int = 1,
        ranks: int = 1,
        *,
        names: Sequence[str] = (),
        resident: int | None = None,
        start_timeout_s: float = 300.0,
    ) -> None:
        if count < 1 or ranks < 1:
            raise FederatedError(f"an executor needs at least one worker of one process, got {count} of {ranks}")
        made = () if callable(clients) else tuple(clients)
        if here := [client.name for client in made if client.is_made_here]:
            raise FederatedError(
                f"client {here[0]!r} was given a module of this process, which workers cannot train: give it build=<a function that "
                "returns module and datamodule>"
            )
        self.clients, self.slots = tuple(client.name for client in made) or tuple(names), count
        self._free = threading.Condition()
        self._groups = [WorkerGroup(clients, ranks, number, resident, start_timeout_s) for number in range(count)]
        self._busy: set[int] = set()
        atexit.register(self.close)

    @property
    def pids(self) -> list[list[int]]:
        """List process ids of each worker's ranks; empty for one that is not running."""
        return [group.pids for group in self._groups]

    def open(self, folder: Path, run: str) -> None:
        for group in self._groups:
            group.open(folder, run)

    def fit(self, order: Fit, weights: FolderStore, progress: Progress) -> Update:
        with self._group(order.client, saved=order.checkpoint_every_steps > 0) as group:
            update = group.run(order, weights.folder, progress)
        assert isinstance(update, Update)
        return update

    def evaluate(self, order: Evaluate, weights: FolderStore) -> Evaluated:
        with self._group(order.client) as group:
            evaluated = group.run(order, weights.folder, lambda steps, loss: None)
        assert isinstance(evaluated, Evaluated)
        return evaluated

    def close(self) -> None:
        atexit.unregister(self.close)
        for group in self._groups:
            group.close()

    @contextmanager
    def _group(self, client: str, saved: bool = True) -> Iterator[WorkerGroup]:
        """Borrow a free worker: the client's last, or the least used if its state is ``saved``."""
        with self._free:
            if not self._free.wait_for(lambda: self._best(client, saved) is not None, timeout=_FREE_TIMEOUT_S):
                raise FederatedError(f"no worker has become free for client {client} within {_FREE_TIMEOUT_S:g} s")
            number = self._best(client, saved)
            assert number is not None
            for group in self._groups:
                group.clients.discard(client)
            self._groups[number].clients.add(client)
            self._busy.add(number)
        try:
            yield self._groups[number]
        finally:
            with self._free:
                self._busy.discard(number)
                self._free.notify_all()

    def _best(self, client: str, saved: bool) -> int | None:
        free = [number for number in range(len(self._groups)) if number not in self._busy]
        mine = [number for number, group in enumerate(self._groups) if client in group.clients]
        if mine and (mine[0] in free or not saved):
            return mine[0] if mine[0] in free else None
        return min(free, key=lambda number: len(self._groups[number].clients), default=None)


class WorkerGroup:
    """Run one worker: a process, or several that train together."""

    def __init__(
        self,
        clients: Sequence[Client] | Callable[[str], Client],
        ranks: int,
        number: int,
        resident: int | None,
        start_timeout_s: float,
    ) -> None:
        self._made = clients if callable(clients) else tuple(clients)
        self._ranks, self._number = ranks, number
        self._resident, self._start_timeout_s = resident, start_timeout_s
        self.clients: set[str] = set()
        """Clients whose newest order was run by this worker."""
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._opened: tuple[Path, str] | None = None

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def open(self, folder: Path, run: str) -> None:
        if self._opened != (folder, run):
            self._opened = (folder, run)
            if self._processes:
                self._send_command({"do": "open", "folder": str(folder), "run": run})

    def run(self, order: Fit | Evaluate, weights: Path, progress: Progress) -> Message:
        """Run an order in the group's processes, restarting them if they die.

        Raises ClientError for an error of the client's code and after `_ATTEMPTS` deaths, CancelledError if ``progress`` said so.
        """
        message = {"do": order.kind, "client": order.client, "order": order.to_json(), "weights": str(weights)}
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._launch()
                self._send_command(message)
                return self._follow(order.client, progress)
            except WorkerDiedError as error:
                self._kill()
                log.warning(
                    "%s; %s resumes from its newest state (attempt %d of %d)", error, order.client, attempt, _ATTEMPTS
                )
                last = error
        raise ClientError(f"{last}; so did those before: {_ATTEMPTS} in all", retryable=True)

    def close(self) -> None:
        """End the processes, in order if they can."""
        with suppress(WorkerDiedError):
            if self._processes:
                self._send_command(
                    {"do": "cancel", "why": "the node ends"}
                )  # what is under way goes on when the node is back
                self._send_command({"do": "close"})
        for process in self._processes:
            process.join(_STOP_TIMEOUT_S / 4)
        self._kill()

    # -- processes ---------------------------------------------------------------------------------------------------

    def _launch(self) -> None:
        if self._processes:
            return
        log.info("worker %d starts with %d processes", self._number, self._ranks)
        context = multiprocessing.get_context("spawn")
        for environment in self._environments():
            here, there = context.Pipe()
            process = context.Process(
                target=run_worker,
                args=(self._made, there, environment, self._resident),
                name=f"arclight-worker-{self._number}",
            )
            process.start()
            there.close()  # the worker's end is the worker's alone, so that its death ends the pipe
            self._processes.append(process)
            self._pipes.append(here)
        until = time.monotonic() + self._start_timeout_s
        for rank, pipe in enumerate(self._pipes):
            while not pipe.poll(_POLL_S):
                self._check(
                    until, f"worker {self._number}, rank {rank}, has not started within {self._start_timeout_s:g} s"
                )
            if self._read(rank)["is"] != "ready":
                raise FederatedError(f"worker {self._number}, rank {rank}, spoke before it was ready")
        if self._opened is not None:
            self._send_command({"do": "open", "folder": str(self._opened[0]), "run": self._opened[1]})

    def _environments(self) -> list[dict[str, str]]:
        if self._ranks == 1:
            return [{}]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(self._ranks), "NODE_RANK": "0"}
        shared |= {"LOCAL_WORLD_SIZE": str(self._ranks), "GROUP_RANK": "0"}
        return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(self._ranks)]

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join(_STOP_TIMEOUT_S)
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _check(self, until: float, about: str) -> None:
        """Raise WorkerDiedError if a process has ended, or time is up."""
        for rank, process in enumerate(self._processes):
            if not process.is_alive():
                raise WorkerDiedError(f"worker {self._number}, rank {rank}, {_ending(process.exitcode)}")
        if time.monotonic() > until:
            self._kill()
            raise FederatedError(about)

    # -- talking -----------------------------------------------------------------------------------------------------

    def _send_command(self, what: Mapping[str, Any]) -> None:
        for rank in range(len(self._pipes)):
            self._send(rank, what)

    def _send(self, rank: int, what: Mapping[str, Any]) -> None:
        try:
            self._pipes[rank].send_bytes(json.dumps(what).encode())
        except OSError as error:
            raise self._died(rank) from error

    def _read(self, rank: int) -> dict[str, Any]:
        try:
            message: dict[str, Any] = json.loads(self._pipes[rank].recv_bytes())
        except (EOFError, OSError) as error:
            raise self._died(rank) from error
        return message

    def _died(self, rank: int) -> WorkerDiedError:
        process = self._processes[rank]
        process.join(2)
        return WorkerDiedError(f"worker {self._number}, rank {rank}, {_ending(process.exitcode)}")

    def _follow(self, client: str, progress: Progress) -> Message:
        """Wait until all ranks are done, while ``progress`` may cancel."""
        answers: dict[int, dict[str, Any]] = {}
        cancelled: CancelledError | None = None
        steps, until = 0, float("inf")
        while len(answers) < len(self._pipes):
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            news: list[tuple[int, float | None]] = [(steps, None)]
            for pipe in wait(waiting, timeout=_POLL_S):
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                message = self._read(rank)
                if message["is"] == "progress":
                    steps = message["steps"]
                    news.append((steps, message["loss"]))
                else:
                    answers[rank] = message  # from here on others may wait for it in an exchange that never comes
                    until = min(until, time.monotonic() + _STOP_TIMEOUT_S)
            if time.monotonic() > until:
                break
            if cancelled is None and 0 not in answers:
                try:
                    for done, loss in news:
                        progress(done, loss)
                except CancelledError as error:
                    cancelled, until = error, time.monotonic() + _STOP_TIMEOUT_S
                    self._send(0, {"do": "cancel", "why": str(error)})
        return self._outcome(client, answers, cancelled)

    def _outcome(self, client: str, answers: dict[int, dict[str, Any]], cancelled: CancelledError | None) -> Message:
        failed = {rank: message for rank, message in sorted(answers.items()) if message["is"] == "failed"}
        if len(answers) < len(self._pipes) or (failed and self._ranks > 1):
            self._kill()  # processes that are not all at one place cannot go on together
        if cancelled is not None and (failed or 0 not in answers):
            raise cancelled
        if failed:
            message = failed.get(0) or next(iter(failed.values()))
            if message["cancelled"]:
                raise CancelledError(message["error"])
            log.info("worker %d, client %s:\n%s", self._number, client, message["trace"])
            raise ClientError(message["error"], retryable=message["retryable"])
        if 0 not in answers:
            raise ClientError(f"the worker of {client} did not answer", retryable=True)
        return read(answers[0]["message"])


def _ending(code: int | None) -> str:
    if code is None:
        return "has closed its pipe"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"has ended with exit status {code}"


def run_worker(
    clients: Sequence[Client] | Make, pipe: Connection, environment: Mapping[str, str], resident: int | None
) -> None:
    """Run a worker process.

    environment: torchrun's variables if it is one of several ranks. resident: see `ClientRunners`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the node decides what ends
    os.environ.update(environment)
    _Worker(
        clients if callable(clients) else {client.name: client for client in clients}.__getitem__,
        pipe,
        int(environment.get("RANK", "0")) == 0,
        resident,
    ).run()


class _Worker:
    def __init__(self, client_of: Make, pipe: Connection, leads: bool, resident: int | None) -> None:
        from arclight.federated.clients.executor import ClientRunners

        self._pipe, self._leads = pipe, leads
        self._runners = ClientRunners(lambda client, folder: client_of(client).learner(folder), resident, leads)
        self._orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._cancelled, self._next_report_at = "", 0.0

    def run(self) -> None:
        threading.Thread(target=self._receive_commands, name="arclight-pipe", daemon=True).start()
        self._send_answer(**{"is": "ready", "pid": os.getpid()})
        while (order := self._orders.get())["do"] != "close":
            if order["do"] == "open":
                self._runners.open(Path(order["folder"]), order["run"])
                continue
            self._cancelled, self._next_report_at = "", 0.0
            try:
                message = self._do(order)
            except CancelledError as error:
                self._send_answer(**{"is": "failed", "cancelled": True, "error": str(error), "retryable": True})
            except Exception as error:  # whatever a client's code raises is reported; the worker goes on
                from arclight.federated.clients.session import as_client_error

                what, trace = as_client_error(error), traceback.format_exc()
                self._send_answer(
                    **{
                        "is": "failed",
                        "cancelled": False,
                        "error": str(what),
                        "retryable": what.retryable,
                        "trace": trace,
                    }
                )
                self._runners.forget(order["client"])
            else:
                self._send_answer(**{"is": "done", "message": message})
        self._runners.close()

    def _receive_commands(self) -> None:
        while True:
            try:
                order = json.loads(self._pipe.recv_bytes())
            except (EOFError, OSError):
                os._exit(_NODE_DIED_STATUS)  # nobody is there to train for, whatever this process is in the middle of
            if order["do"] == "cancel":
                self._cancelled = order["why"]
            else:
                self._orders.put(order)

    def _send_answer(self, **what: Any) -> None:
        try:
            self._pipe.send_bytes(json.dumps(what).encode())
        except OSError:
            os._exit(_NODE_DIED_STATUS)

    def _do(self, order: dict[str, Any]) -> str | None:
        from arclight.federated.blobs.folder import FolderStore
        from arclight.federated.protocol import Evaluate, Fit, read

        request, store = read(order["order"]), FolderStore(order["weights"])
        if isinstance(request, Fit):
            message: Any = self._runners.fit(request, store, self._progress)
        elif isinstance(request, Evaluate):
            message = self._runners.evaluate(request, store)
        else:
            raise FederatedError(f"a worker was given a message {request.kind!r}")
        return None if message is None else message.to_json()

    def _progress(self, steps: int, loss: float | None) -> None:
        if not self._leads:
            return
        if self._cancelled:
            raise CancelledError(self._cancelled)
        now = time.monotonic()
        if now >= self._next_report_at or loss is not None:
            self._next_report_at = now + _PROGRESS_INTERVAL_S
            self._send_answer(**{"is": "progress", "steps": steps, "loss": _finite(loss)})


def _finite(loss: float | None) -> float | None:
    return loss if loss is not None and math.isfinite(loss) else None
