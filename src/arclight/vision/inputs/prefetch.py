"""Read ahead in a thread, a bounded number of items."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterable
from typing import TypeVar

T = TypeVar("T")

_POLL_S = 0.1
"""How long the reading thread waits for room before it looks whether anybody still wants items."""


def prefetch(items: Iterable[T], depth: int) -> Generator[T, None, None]:
    """Iterate ``items`` in a thread of its own, at most ``depth`` ahead of the consumer, in order.

    What reading raises is raised here, behind the items before it. Closing the iterator ends the thread after its present item.
    """
    if depth < 1:
        yield from items
        return
    ready: queue.Queue[tuple[bool, T | BaseException | None]] = queue.Queue(depth)
    closed = threading.Event()

    def put(entry: tuple[bool, T | BaseException | None]) -> bool:
        while not closed.is_set():
            try:
                ready.put(entry, timeout=_POLL_S)
            except queue.Full:
                continue
            return True
        return False

    def read() -> None:
        try:
            for item in items:
                if not put((True, item)):
                    return
            put((False, None))
        except BaseException as error:  # raised again by the consumer
            put((False, error))

    threading.Thread(target=read, name="arclight-prefetch", daemon=True).start()
    try:
        while True:
            more, entry = ready.get()
            if more:
                yield entry  # type: ignore[misc]
            elif isinstance(entry, BaseException):
                raise entry
            else:
                return
    finally:
        closed.set()
