"""Report a failure to the other ranks of a pipeline, so that they stop with its place.

Only `engine` uses it. A report is a key in the store that the ranks met by; it is read while a rank waits for its device or for an exchange,
and after it lost a neighbour. Users get a `StageLostError` with rank, stage and micro-batch.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from arclight.fabric.distributed.hang_report import RankMissingError, is_collective_error

PATIENCE = 2.0
"""Seconds that a process which lost a neighbour waits for the report of the one that failed first."""

BETWEEN_QUESTIONS = 0.05
"""Seconds between two polls of the store while a device is waited for: each is a message to the rank that hosts the store."""
LATE = 0.02
"""Largest delay in noticing that a device is done, as a share of the wait; the device idles meanwhile."""


class StageLostError(RankMissingError):
    """Error of a process that waited for another, which failed, ended or did not come.

    The message says for what it waited.
    """


class FailureStore:
    """Share failures and facts between the processes of one pipeline, through their store.

    No collective is used: it is the store through which the processes have met.

    Every process makes the `FailureStore` objects of a group in the same order.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int) -> None:
        self.rank = rank
        self.ranks = dist.get_world_size(group)
        _made[group.group_name] = number = _made.get(group.group_name, 0) + 1
        self._store = dist.distributed_c10d.PrefixStore(
            f"arclight/pipeline/{group.group_name}/{number}", dist.distributed_c10d._get_default_store()
        )
        self._turn = 0

    def exchange(self, value: Any, timeout: datetime.timedelta) -> list[Any]:
        """Exchange JSON values with all processes, in order of their ranks.

        Raises StageLostError, naming those that do not come in time.
        """
        self._turn += 1
        self._store.set(f"{self._turn}/{self.rank}", json.dumps(value))
        keys = [f"{self._turn}/{rank}" for rank in range(self.ranks)]
        deadline, pause = time.monotonic() + timeout.total_seconds(), 0.0005
        while not self._store.check(keys):  # a wait that is over would write a warning of torch's for each second
            if (first := self.first_failure()) is not None:
                raise StageLostError(f"process {self.rank} stops because of another: {first}")
            if time.monotonic() > deadline:
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                raise StageLostError(
                    f"process {self.rank} is about to run micro-batches of a new shape (or with other parameters frozen) and has waited "
                    f"{timeout.total_seconds():.0f} s for {_named(missing)} to say the same: give all processes of a pipeline the same "
                    "batches, and freeze parameters on all of them"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return [json.loads(self._store.get(key)) for key in keys]

    def report(self, message: str) -> None:
        """Leave word of this process's failure, unless another has failed before."""
        self._store.compare_set("failed", "", json.dumps([self.rank, message]))

    def first_failure(self) -> str | None:
        """Give the message of the process that failed first; None for none, or this one."""
        if not self._store.check(["failed"]):
            return None
        rank, message = json.loads(self._store.get("failed"))
        return None if rank == self.rank else str(message)


_made: dict[str, int] = {}


def _named(ranks: list[int]) -> str:
    return f"process{'es' if len(ranks) > 1 else ''} {' and '.join(map(str, ranks))}"


def failure_to_raise(board: FailureStore | None, error: BaseException, where: str, waiting: bool) -> BaseException:
    """Return the error to raise in place of ``error``, and store it for other processes.

    It happened at ``where``.

    waiting: whether nothing was computed then, so that it was another process that did not come.
    """
    if board is None or not (waiting and is_collective_error(error)):
        error.add_note(where)
        if board is not None:
            _store_failure(board, f"{where}: {type(error).__name__}: {error}".rstrip(": "))
        return error
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    if (first := _first(board)) is not None:
        found = StageLostError(f"{where}, and stops because of another: {first}")
    else:
        found = StageLostError(f"{where}: {reason}")
        _store_failure(board, str(found))
    found.__cause__ = error
    return found


def _store_failure(board: FailureStore, message: str) -> None:
    with suppress(RuntimeError):  # the store is in a process that may have ended
        board.report(message)


def _first(board: FailureStore) -> str | None:
    """Ask for the first failure, waiting a moment: connections close faster than it is reported."""
    deadline = time.monotonic() + PATIENCE
    with suppress(RuntimeError):
        while (found := board.first_failure()) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return found
    return None


def abort_peers(group: dist.ProcessGroup, device: torch.device) -> None:
    """Abort what processes of ``group`` wait for from this one.

    They get an error now, and not when their time is over.
    """
    if "nccl" in dist.get_backend(group):
        group.abort()
        return
    # gloo has no abort that others notice; but it closes all connections of a group when a receive is late. One from a process that
    # has gone fails at once and closes none, so each is tried.
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for peer in ((rank + distance) % size for distance in range(1, size)):
        with suppress(RuntimeError):
            group.recv([torch.empty(1, device=device)], peer, 2**30).wait(datetime.timedelta(milliseconds=1))


class DeviceSteps:
    """The steps that a device is still at while the host is ahead of it.

    NCCL's operations do not hold up the host: a step returns while its messages are on their way, and one that never comes would be met
    wherever a number is read next, until a watchdog ends the process. So the host waits for the step before the last here, which costs
    nothing while the device keeps up, and polls for failures of other ranks meanwhile.
    """

    AHEAD = 2
    """Steps that the host may be ahead."""

    def __init__(self, board: FailureStore, timeout: datetime.timedelta, record: Callable[[], Any]) -> None:
        """Initialise without steps.

        record: gives an event (``query()`` says if it has happened) behind all that the device was given so far.
        """
        self._board, self._timeout, self._record = board, timeout, record
        self._events: list[Any] = []

    def add(self) -> None:
        """Note the end of a step."""
        self._events.append(self._record())

    def wait(self, left: int = AHEAD - 1) -> None:
        """Wait until no more than ``left`` steps are in flight.

        Raises StageLostError if another process has failed, or in time.
        """
        began = checked = time.monotonic()
        while len(self._events) > left:
            if self._events[0].query():
                del self._events[0]
                continue
            now = time.monotonic()
            late = now - began > self._timeout.total_seconds()
            if now - checked >= BETWEEN_QUESTIONS or late:
                checked = now
                if (first := self._board.first_failure()) is not None:
                    raise StageLostError(f"process {self._board.rank} stops because of another: {first}")
            if late:
                raise StageLostError(
                    f"process {self._board.rank} has waited {self._timeout.total_seconds():.0f} s for its device to end a step whose "
                    "messages to or from other stages do not come"
                )
            time.sleep(min(max(0.0001, LATE * (now - began)), 0.05))


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> datetime.timedelta:
    """Give the timeout of operations of ``group``."""
    found: datetime.timedelta = group._get_backend(device).options._timeout
    return found
