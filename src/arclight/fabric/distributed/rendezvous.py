"""Open the key-value store of the rendezvous, apart from keys of earlier elastic restarts.

An elastic launcher restarts all processes when one is lost, with the same store: keys of the lost ones (addresses, stop
requests, failures) would be read as current. A node's restart count does not tell attempts apart, since nodes count by themselves.
"""

from __future__ import annotations

import datetime
import os
import time
import uuid
from typing import Any

import torch.distributed as dist

from arclight.fabric.distributed.hang_report import RankMissingError

_INTERVAL = 0.02


def open_rendezvous_store(address: str, port: int, rank: int, world_size: int, timeout: datetime.timedelta) -> Any:
    """Open the store of all processes, which is in rank 0, when all of them are there.

    Raises RankMissingError with the ranks that did not come within ``timeout``.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]  # documented, though not listed
            address, port, world_size, rank == 0, timeout, wait_for_workers=False, multi_tenant=True
        )  # fmt: skip
    except dist.DistNetworkError as error:
        if rank == 0:  # the port is taken, or no port of this host: torch says so
            raise
        raise RankMissingError(
            f"rank 0 did not come to the meeting of all processes within {timeout.total_seconds():g} s: nothing answers at "
            f"{address}:{port}, where it would be"
        ) from error
    store.set(f"arclight/here/{rank}", "1")
    keys = [f"arclight/here/{other}" for other in range(world_size)]
    while not store.check(keys):
        if time.monotonic() > deadline:
            missing = ", ".join(str(other) for other, key in enumerate(keys) if not store.check([key]))
            raise RankMissingError(
                f"rank {missing} did not come to the meeting of all {world_size} processes at {address}:{port} within "
                f"{timeout.total_seconds():g} s: it has not started, or has ended"
            )
        time.sleep(_INTERVAL)
    return store


def reuses_agent_store() -> bool:
    """Return True if the store of this process's launcher may be one of an attempt before."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def agree_on_attempt(store: Any, rank: int, world_size: int, timeout: float) -> str:
    """Return a name that all ranks of this attempt get and nobody had before; every rank calls this.

    Each rank greets with a number of its own, and rank 0 answers every new greeting with the name until all have confirmed
    it: names and numbers are drawn again, so that nothing old can be taken for an answer. Raises TimeoutError with the ranks
    that did not come.
    """
    deadline = time.monotonic() + timeout
    if rank:
        number = uuid.uuid4().hex
        store.set(f"arclight/greeting/{rank}", number)
        answer = f"arclight/answer/{rank}/{number}"
        while not store.check([answer]):
            _pause(deadline, "rank 0 did not come to the meeting of all processes")
        name: str = store.get(answer).decode()
        store.set(f"arclight/confirmed/{name}/{rank}", "1")
        return name
    name = uuid.uuid4().hex
    answered: dict[int, str] = {}
    while missing := [r for r in range(1, world_size) if not store.check([f"arclight/confirmed/{name}/{r}"])]:
        for other in missing:
            if not store.check([f"arclight/greeting/{other}"]):
                continue
            number = store.get(f"arclight/greeting/{other}").decode()
            if answered.get(other) != number:
                answered[other] = number
                store.set(f"arclight/answer/{other}/{number}", name)
        _pause(deadline, f"rank {', '.join(map(str, missing))} did not come to the meeting of all processes")
    return name


def _pause(deadline: float, problem: str) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(problem)
    time.sleep(_INTERVAL)
