"""Agree on the step before which all ranks stop, without a collective.

``strategies.base`` holds one, the Trainer's loops (and a user's own, by ``should_stop``) ask it at each step, the watchdog's thread polls
it if there are several processes. All ranks must stop at the same position: otherwise they wait for each other in a collective.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol


class Store(Protocol):
    """Part of torch.distributed's key-value store that a stop signal needs."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


class StopSignal:
    """Request a stop on any rank, and agree on the one position where all ranks stop.

    A loop counts its positions (steps, batches: any integer that grows in the same way on every rank) and passes
    each through here before it goes on::

        stop.position = position  # two plain attributes: a loop that is not asked to stop pays for no call
        if stop.asked and stop.due(position):
            break

    or simply ``if stop.due(position): break``. No rank stops before the others can follow: on a request,
    every rank's watchdog thread sets ``asked`` and only then publishes which position its loop has passed; the first
    position that no rank has passed is where all of them stop. A loop that arrives there too early waits
    for the positions of the others, a fraction of a second. Nothing of this touches a device or a process group.
    """

    def __init__(self) -> None:
        self.position = -1
        """The last position that the loop has passed."""
        self.asked = False
        """Whether a stop has been requested on any rank, and this one knows: see :meth:`due`."""
        self.reason = ""
        """The reason, in the requester's words."""
        self._store: Store | None = None
        self._rank, self._world_size, self._timeout = 0, 1, 60.0
        self._run = 0
        self._requested: str | None = None
        self._agreed: int | None = None
        self._decided = threading.Event()
        self._lost = ""
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return (StopSignal, ())  # a new process starts with a new signal

    def connect(self, store: Store, rank: int, world_size: int, timeout: float = 60.0) -> None:
        """Share requests with other ranks through ``store``.

        Each waits ``timeout`` seconds for the others' positions.
        """
        with self._lock:
            self._store, self._rank, self._world_size, self._timeout = store, rank, world_size, timeout

    def succeed(self, other: StopSignal) -> None:
        """Take the place of ``other`` in the same processes. All ranks must do so."""
        with other._lock, self._lock:
            self._store, self._rank, self._world_size = other._store, other._rank, other._world_size
            self._timeout, self._run, self._lost = other._timeout, other._run, other._lost
            other._store = None

    def begin(self) -> None:
        """Start counting again, for another loop; all ranks must do so.

        A request that came too late is dropped.
        """
        with self._lock:
            if self._store is not None and not self.asked:
                self._store.set(self._key(f"position/{self._rank}"), "ended")
            self._run += 1
            self.position, self.asked, self.reason, self._requested, self._agreed = -1, False, "", None, None
            self._decided.clear()

    def request(self, reason: str = "") -> None:
        """Request all ranks to stop at the next position that none of them has passed.

        Safe in a signal handler and any thread.
        """
        self._requested = reason
        if self._store is None:
            self.reason, self._agreed = reason, self.position  # whatever the loop comes to next
            self._decided.set()
            self.asked = True

    def due(self, position: int) -> bool:
        """Return True if all ranks stop before whatever follows ``position``.

        Raises TimeoutError, naming them, if ranks leave this one without an answer.
        """
        self.position = position
        if not self.asked:
            return False
        if not self._decided.wait(self._timeout) or self._lost:
            raise TimeoutError(f"a stop was asked for ({self.reason or 'no reason given'}), but {self._silent()}")
        return self._agreed is not None and position >= self._agreed

    def _silent(self) -> str:
        if self._lost:
            return f"the other ranks are out of reach: {self._lost}"
        store = self._store
        assert store is not None
        ranks = [str(rank) for rank in range(self._world_size) if not store.check([self._key(f"position/{rank}")])]
        return f"rank {', '.join(ranks)} did not answer within {self._timeout:g} s"

    def _key(self, name: str) -> str:
        return f"arclight/stop/{self._run}/{name}"

    # -- the watching thread ---------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Exchange requests and positions with other ranks; return True to poll again soon."""
        with self._lock:
            store = self._store
            if store is None or self._decided.is_set():
                return False
            if self._requested is not None and not store.check([self._key("request")]):
                store.set(
                    self._key("request"),
                    f"rank {self._rank}: {self._requested}" if self._requested else f"rank {self._rank}",
                )
            if not self.asked:
                if not store.check([self._key("request")]):
                    return False
                self.reason = store.get(self._key("request")).decode()
                self.asked = True  # before the position is read: from here on the loop passes nothing unseen
                store.set(self._key(f"position/{self._rank}"), str(self.position))
            keys = [self._key(f"position/{rank}") for rank in range(self._world_size)]
            if not store.check(keys):
                return True
            positions = [store.get(key).decode() for key in keys]
            self._agreed = None if "ended" in positions else max(map(int, positions)) + 1
            self._decided.set()
            return False

    def lose(self, why: str) -> None:
        """Record that the other ranks are out of reach, so that a wait for them raises."""
        self._lost = why
        self._decided.set()


def wait_until(condition: Callable[[], bool], seconds: float, interval: float = 0.02) -> bool:
    """Return True if ``condition`` came true within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval)
    return True
