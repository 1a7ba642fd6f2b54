"""What nodes have put and no update that counts refers to yet: whose it is, and how much of it there may be."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from arclight.federated.blobs.folder import FolderStore
from arclight.federated.errors import LinkError, RefusedError


@dataclass(slots=True)
class _Put:
    size: int
    heard: float
    open: int = 0
    """Requests in which it is coming now."""


class Intake:
    """Blobs by the node that put them. What counts is the server's own, and not in here any more."""

    def __init__(self, blobs: FolderStore) -> None:
        self._blobs, self._lock = blobs, threading.Lock()
        self._of: dict[str, dict[str, _Put]] = {}
        """Node to its blobs, those that it has been silent about for longest first."""
        self._read: Counter[str] = Counter()
        """Blobs of updates that are being looked at."""
        self._since: set[str] = set()
        """Those, and all that were since the server has last asked what is `kept`."""

    @contextmanager
    def taking(self, node: str, digest: str, size: int, room: int) -> Iterator[None]:
        """While a blob comes, or a part of it. What the node has put before and not used makes room for it, the oldest first.

        room: bytes that all of it may take. Raises RefusedError for a blob that has none, LinkError while others of the node's
        are coming that have taken it.
        """
        if (put := self._begin(node, digest, size, room)) is None:
            yield
            return
        try:
            yield
        finally:
            with self._lock:
                put.open, put.heard = put.open - 1, time.monotonic()

    def _begin(self, node: str, digest: str, size: int, room: int) -> _Put | None:
        """None for what is here and no node's: the server's own, which does not go with whoever says it again."""
        if size > room:
            raise RefusedError(
                "too_large",
                f"blob {digest[:12]} has {size:,} bytes: all updates of node {node}'s clients together need {room:,} at most",
            )
        with self._lock:
            if not any(digest in theirs for theirs in self._of.values()) and self._blobs.size(digest) is not None:
                return None
            mine = self._of.setdefault(node, {})
            put = mine.pop(digest, None) or _Put(size, 0.0)
            put.size = max(put.size, size)
            left = room - put.size - sum(other.size for other in mine.values())
            for old in [old for old, other in mine.items() if not other.open and not self._read[old]]:
                if left < 0 and self._dropped(node, old):
                    left += mine.pop(old).size
            mine[digest] = put
            if left < 0:
                if not put.open:
                    del mine[digest]
                raise LinkError(f"node {node} is sending as much as it may at once ({room:,} bytes): come back")
            put.open, put.heard = put.open + 1, time.monotonic()
            return put

    @contextmanager
    def reading(self, digests: list[str]) -> Iterator[None]:
        """While an update with these blobs is looked at: an older one may have had the same, and be over now."""
        with self._lock:
            self._read.update(digests)
            self._since.update(digests)
        try:
            yield
        finally:
            with self._lock:
                self._read.subtract(digests)
                self._read = +self._read

    def remove(self, digest: str) -> None:
        """Remove what nobody needed when the server last asked what is `kept`, unless an update with it has come since."""
        with self._lock:
            if digest not in self._since:
                self._blobs.remove(digest)

    def counts(self, digests: Collection[str]) -> None:
        """An update with these blobs was taken: they are the server's."""
        with self._lock:
            for mine in self._of.values():
                for digest in digests:
                    mine.pop(digest, None)

    def refused(self, node: str, digests: Collection[str]) -> None:
        """An update with these blobs was not taken: what nobody else has put goes."""
        with self._lock:
            mine = self._of.get(node, {})
            for digest in digests:
                if digest in mine and not mine[digest].open and self._dropped(node, digest):
                    del mine[digest]

    def kept(self, silent: float) -> set[str]:
        """Blobs of nodes that were sending within the last ``silent`` seconds; what others have left is removed."""
        since, found, left = time.monotonic() - silent, set[str](), set[str]()
        with self._lock:
            self._since = set(self._read)
            for node, mine in list(self._of.items()):
                if any(put.open or put.heard > since for put in mine.values()):
                    found |= mine.keys()
                else:
                    left |= self._of.pop(node).keys()
            for digest in left - found:
                self._blobs.discard(digest)
        return found

    def _dropped(self, node: str, digest: str) -> bool:
        """Remove what a node has put, unless another one has the same; False where that cannot be now."""
        others = any(digest in theirs for name, theirs in self._of.items() if name != node) or self._read[digest] > 1
        return others or self._blobs.discard(digest)
