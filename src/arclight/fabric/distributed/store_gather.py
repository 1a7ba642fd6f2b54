"""Gather values on rank 0 without a collective: over the group's store, from any thread."""

from __future__ import annotations

import json
import time
from typing import Any

from arclight.fabric.distributed.watchdog import FAILED_KEY

_INTERVAL = 0.02


class StoreGather:
    """Called once for each round on every rank, in the same order, with a value that JSON can hold; gives rank 0 all of them.

    The others get an empty list at once. Raises TimeoutError on rank 0 for ranks that tell nothing within ``timeout`` seconds,
    or soon after a rank has failed or :meth:`limit_wait` was called.
    """

    def __init__(self, store: Any, rank: int, world_size: int, timeout: float, name: str) -> None:
        self._store, self._rank, self._world_size, self._timeout = store, rank, world_size, timeout
        self._name, self._round = name, 0
        self._limit_s: float | None = None

    def limit_wait(self, seconds: float) -> None:
        """Wait no longer than ``seconds`` from now."""
        self._limit_s = time.monotonic() + seconds

    def __call__(self, value: Any) -> list[Any]:
        self._round += 1
        keys = [f"arclight/exchange/{self._name}/{self._round}/{rank}" for rank in range(self._world_size)]
        if self._rank != 0:
            self._store.set(keys[self._rank], json.dumps(value))
            return []
        own, keys = value, keys[1:]
        deadline = time.monotonic() + self._timeout
        while not self._store.check(keys):
            if self._store.check([FAILED_KEY]):
                self.limit_wait(min(5.0, self._timeout) if self._limit_s is None else self._limit_s - time.monotonic())
            if time.monotonic() > min(deadline, self._limit_s or deadline):
                missing = [rank for rank, key in enumerate(keys, 1) if not self._store.check([key])]
                raise TimeoutError(f"rank {', '.join(map(str, missing))} did not say that its part is done")
            time.sleep(_INTERVAL)
        found = [json.loads(self._store.get(key)) for key in keys]
        for key in keys:
            self._store.delete_key(key)
        return [own, *found]
