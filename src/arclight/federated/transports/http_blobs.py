"""The server's blobs over HTTP: each transfer goes on from where it broke off."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight.federated.blobs.digests import PIECE, checked, missing, pieces_of
from arclight.federated.blobs.folder import FolderStore
from arclight.federated.blobs.incoming import BusyError, Incoming
from arclight.federated.errors import BlobError, RefusedError
from arclight.federated.transports.receiving import PART
from arclight.federated.transports.responses import error_of, words_of
from arclight.federated.transports.retrying import Patience, UnavailableError

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse

_ATTEMPTS = 3
"""Transfers of a blob that may arrive damaged before it is given up."""
_SOON = 0.2
_BLOCK = 1 << 17
"""Bytes that are handed to the network at once: over a slow line that has to be done within a timeout."""


class HttpBlobs:
    """As `BlobStore`. What is fetched is kept in ``cache`` until it is forgotten; nodes remove nothing, so `remove` only does that too.

    request: `HttpLink.request`.
    """

    def __init__(self, request: Callable[..., Any], cache: FolderStore, patience: Patience, address: str) -> None:
        self._request, self._cache, self._patience, self._address = request, cache, patience, address

    def size(self, digest: str) -> int | None:
        return self._patience.call(f"tell the size of blob {digest[:12]}", lambda: self._head(checked(digest))[0])

    def read(self, digest: str, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        """As `BlobStore.read`, without keeping it. What comes is not verified, as it is only part of what has the digest."""
        checked(digest)
        left, ended = length, False
        while not ended if left is None else left > 0:
            held: list[bytes] = []
            ended = self._patience.call(f"send blob {digest[:12]}", partial(self._some, digest, offset, left, held))
            yield from held
            got = sum(map(len, held))
            offset += got
            left = None if left is None else left - got

    def put(self, digest: str, source: Path | bytes) -> None:
        checked(digest)
        damaged = seen = 0
        size = len(source) if isinstance(source, bytes) else source.stat().st_size

        def attempt() -> bool:
            nonlocal seen
            found, received, busy = self._head(digest)
            if found is not None:
                return True
            before, seen = seen, received
            if busy:
                raise UnavailableError(
                    "it is receiving the blob from someone else", progress=received > before, after=_SOON
                )
            start = received if received <= size else 0
            try:
                while (whole := self._send(digest, source, start, size)) is None:
                    start = seen = start + PART
                return whole
            except UnavailableError as error:
                raise UnavailableError(str(error), progress=seen > before, after=error.after) from error

        while not self._patience.call(f"take blob {digest[:12]}", attempt):
            damaged += 1
            if damaged == _ATTEMPTS:
                raise BlobError(
                    f"blob {digest[:12]} reached {self._address} damaged {damaged} times, or is not what it is called here: compare "
                    f"its SHA-256 with its name, then look at what lies between"
                )

    def file(self, digest: str) -> Path:
        """As `BlobStore.file`: from the cache, or fetched into it."""
        damaged = 0
        while self._cache.size(digest) is None:
            try:
                self._patience.call(f"send blob {digest[:12]}", lambda: self._fetch(digest))
            except BlobError:
                damaged += 1
                if damaged == _ATTEMPTS or self.size(digest) is None:
                    raise
        return self._cache.file(digest)

    def forget(self, digest: str) -> None:
        self._cache.remove(digest)

    def remove(self, digest: str) -> None:
        self._cache.remove(digest)

    def _head(self, digest: str) -> tuple[int | None, int, bool]:
        """The blob's bytes, if it is there; else those that have come of it, and whether more are coming."""

        def then(response: BaseHTTPResponse) -> tuple[int | None, int, bool]:
            if response.status == 404:
                headers = response.headers
                return None, int(headers.get("x-arclight-received", "0")), "x-arclight-busy" in headers
            if response.status != 200:
                raise error_of(response, self._address)
            return int(response.headers["content-length"]), 0, False

        found: tuple[int | None, int, bool] = self._request("HEAD", f"/v1/blobs/{digest}", then=then)
        return found

    def _send(self, digest: str, source: Path | bytes, start: int, size: int) -> bool | None:
        """Send the next part; None where more are to come, False where the server found that it is not the blob."""
        stop = min(size, start + PART)
        headers = {"content-length": str(stop - start)}
        if stop - start < size:
            headers["content-range"] = f"bytes {start}-{stop - 1}/{size}" if start < size else f"bytes */{size}"

        def then(response: BaseHTTPResponse) -> bool | None:
            status = response.status
            if status == 409:
                raise UnavailableError("it has received another part of the blob meanwhile")
            if status in (200, 201, 202):
                return None if status == 202 else True
            if status == 422:
                return False
            if status == 507:
                raise OSError(errno.ENOSPC, f"{self._address}: {words_of(response)}")
            if status == 413:
                raise RefusedError("too_large", f"{self._address}: {words_of(response)}")
            raise error_of(response, self._address)

        part = (source[start:stop],) if isinstance(source, bytes) else pieces_of(source, start, stop - start, _BLOCK)
        sent: bool | None = self._request("PUT", f"/v1/blobs/{digest}", then=then, body=part, headers=headers)
        return sent

    def _fetch(self, digest: str) -> None:
        """Fetch the rest into the cache."""
        try:
            incoming = self._cache.receive(digest)
        except BusyError as error:  # another thread or process of this node: it has a deadline of its own
            raise UnavailableError(str(error), progress=True) from error
        with incoming:
            if self._cache.size(digest) is not None:
                incoming.give_up()
                return
            start = incoming.offset
            headers = {"range": f"bytes={start}-"} if start else {}
            try:
                self._request("GET", f"/v1/blobs/{digest}", then=partial(self._take, incoming, digest), headers=headers)
            except UnavailableError as error:
                raise UnavailableError(str(error), progress=incoming.offset > start, after=error.after) from error
            incoming.finish()

    def _take(self, incoming: Incoming, digest: str, response: BaseHTTPResponse) -> None:
        if response.status == 416:
            return  # all of it is here already
        if response.status not in (200, 206):
            raise missing(digest, self._address) if response.status == 404 else error_of(response, self._address)
        if response.status == 200:
            incoming.restart()
        while piece := response.read1(PIECE):
            incoming.write((piece,))

    def _some(self, digest: str, offset: int, length: int | None, held: list[bytes]) -> bool:
        """Read up to `PIECE` bytes into ``held``; whether that was the end of the blob."""
        last = offset + min(PIECE, PIECE if length is None else length) - 1
        held.clear()

        def then(response: BaseHTTPResponse) -> bool:
            if response.status == 206:
                held.append(response.data)
                return int(response.headers["content-range"].rpartition("/")[2]) == offset + len(response.data)
            if response.status == 416 and length is None:
                return True
            if response.status == 416:
                raise BlobError(f"blob {digest[:12]} ends {length} bytes before the part that was asked for does")
            raise missing(digest, self._address) if response.status == 404 else error_of(response, self._address)

        headers = {"range": f"bytes={offset}-{last}"}
        ended: bool = self._request("GET", f"/v1/blobs/{digest}", then=then, headers=headers)
        return ended
