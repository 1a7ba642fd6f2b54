"""Open the key-value store of a rendezvous, or agree on a new prefix in torchrun's.

``strategies.parallel`` calls this before it creates a process group. An elastic launcher restarts all processes when one is lost and
keeps the store, in which keys of the previous attempt (addresses, stop requests, failures) would be read as current. Restart counts
cannot distinguish attempts, since each node has its own. Keys in the store may change: all ranks run the same version.
"""

from __future__ import annotations

import datetime
import os
import time
import uuid
from typing import Any

import torch.distributed as dist

from arclight.fabric.distributed.hang_report import RankMissingError

_POLL_S = 0.02


def open_rendezvous_store(address: str, port: int, rank: int, world_size: int, timeout: datetime.timedelta) -> Any:
    """Open the store that rank 0 hosts, and wait until all processes have opened it.

    Raises RankMissingError with the ranks that did not join within ``timeout``.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]  # documented, though not listed
            address, port, world_size, rank == 0, timeout, wait_for_workers=False, multi_tenant=True
        )  # fmt: skip
    except dist.DistNetworkError as error:
        if rank == 0:  # the address cannot be bound: torch's message says why
            raise
        raise RankMissingError(
            f"rank 0 did not join the rendezvous within {timeout.total_seconds():g} s: nothing answers at {address}:{port}; check "
            "that it was started, and that this machine can reach the address"
        ) from error
    store.set(f"arclight/here/{rank}", "1")
    keys = [f"arclight/here/{other}" for other in range(world_size)]
    while not store.check(keys):
        if time.monotonic() > deadline:
            missing = ", ".join(str(other) for other, key in enumerate(keys) if not store.check([key]))
            raise RankMissingError(
                f"rank {missing} did not join the rendezvous of {world_size} processes at {address}:{port} within "
                f"{timeout.total_seconds():g} s: it has not started, or has ended; look into its log"
            )
        time.sleep(_POLL_S)
    return store


def reuses_agent_store() -> bool:
    """Return True if the launcher's store may hold keys of an earlier attempt."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def agree_on_attempt(store: Any, rank: int, world_size: int, timeout: float) -> str:
    """Agree on a new name for this attempt, the same on all ranks; every rank calls this.

    Each rank writes a random number as its greeting; rank 0 answers every new greeting with a random name, until all ranks have confirmed
    it. As both are drawn again in each attempt, no old key can be taken for an answer. Raises TimeoutError with the missing ranks.
    """
    deadline = time.monotonic() + timeout
    if rank:
        number = uuid.uuid4().hex
        store.set(f"arclight/greeting/{rank}", number)
        answer = f"arclight/answer/{rank}/{number}"
        while not store.check([answer]):
            _pause(deadline, "rank 0 did not join the rendezvous of all processes")
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
        _pause(deadline, f"rank {', '.join(map(str, missing))} did not join the rendezvous of all processes")
    return name


def _pause(deadline: float, problem: str) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(problem)
    time.sleep(_POLL_S)
