"""Gather values on rank 0 over the group's key-value store, without a collective.

The background thread of `AsyncSaver` calls it (``Strategy.exchange`` makes it): collectives of a second thread could interleave with those
of training. In: a JSON value from each rank; out: all of them on rank 0. Keys in the store may change.
"""

from __future__ import annotations

import json
import time
from typing import Any

from arclight.fabric.distributed.watchdog import FAILED_KEY

_POLL_S = 0.02


class StoreGather:
    """Gather one JSON value of each rank on rank 0; every rank calls the object equally often.

    Returns the values in order of ranks on rank 0, and an empty list at once on the others. Raises TimeoutError on rank 0 for ranks that
    do not report within ``timeout`` seconds, or earlier if a rank has failed or :meth:`limit_wait` was called.
    """

    def __init__(self, store: Any, rank: int, world_size: int, timeout: float, name: str) -> None:
        self._store, self._rank, self._world_size, self._timeout = store, rank, world_size, timeout
        self._name, self._round = name, 0
        self._limit_s: float | None = None

    def limit_wait(self, seconds: float) -> None:
        """Shorten the wait, also one in progress, to ``seconds`` from now."""
        self._limit_s = time.monotonic() + seconds

    def __call__(self, value: Any) -> list[Any]:
        self._round += 1
        keys = [f"arclight/exchange/{self._name}/{self._round}/{rank}" for rank in range(self._world_size)]
        if self._rank != 0:
            self._store.set(keys[self._rank], json.dumps(value))
            return []
        keys = keys[1:]
        deadline = time.monotonic() + self._timeout
        while not self._store.check(keys):
            if self._store.check([FAILED_KEY]):
                self.limit_wait(min(5.0, self._timeout) if self._limit_s is None else self._limit_s - time.monotonic())
            if time.monotonic() > min(deadline, self._limit_s or deadline):
                missing = [rank for rank, key in enumerate(keys, 1) if not self._store.check([key])]
                raise TimeoutError(f"rank {', '.join(map(str, missing))} did not report that its part is done")
            time.sleep(_POLL_S)
        others = [json.loads(self._store.get(key)) for key in keys]
        for key in keys:
            self._store.delete_key(key)
        return [value, *others]
