"""Receive uploads of blobs within limits of size, time and memory.

`http_server` gives it requests that put a blob, and reads messages by `whole_body`; `http_client` sends parts of `PART` bytes. Clients are untrusted:
of a blob no more than a chunk or two is kept in memory, and it counts once its hash is right. Status codes and headers are the protocol.
"""

from __future__ import annotations

import asyncio
import errno
import re
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from arclight.federated.blobs.blob_store import CHUNK_BYTES, BlobStore
from arclight.federated.blobs.folder import FolderStore
from arclight.federated.blobs.partial_blob import BusyError, PartialBlob
from arclight.federated.errors import BlobError
from arclight.federated.transports.settings import Limits

if TYPE_CHECKING:
    from starlette.requests import Request


_RANGE = re.compile(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15})")
_NOTHING = re.compile(r"bytes \*/(\d{1,15})")
"""All bytes have come before; only the check of the hash is left."""
PART = 32 << 20
"""Bytes of a blob that nodes send in one request: a refusal is read after at most so many, and a slow connection blocks nothing."""
_MEMORY_BYTES, _LEAST_BYTES = 4 << 20, 1 << 16
"""Bytes of memory for all blobs that come in at the same time, and the least for each if they are very many."""
RECEIVED, BUSY = "x-arclight-received", "x-arclight-busy"


T = TypeVar("T")
UploadReservation = Callable[[int], AbstractContextManager[None]]


def length_of(request: Request, largest: int, what: str) -> int:
    """Return the bytes of a body that is about to come.

    Raises Refusal if it does not say, or is too large.
    """
    header = request.headers.get("content-length")
    if header is None:
        raise Refusal(411, f"{what} comes with a Content-Length")
    if int(header) > largest:
        raise Refusal(413, f"{what} of {header} bytes is larger than the {largest} that this server takes")
    return int(header)


async def whole_body(request: Request, limits: Limits, largest: int) -> bytes:
    """Read a small body at once."""
    length_of(request, largest, "a message")
    return b"".join([chunk async for chunk in timely(request, limits)])


class UploadHandler:
    """Receive blobs that nodes put.

    store: where they belong. spool: where they come in; the store itself, if that is a folder.
    """

    def __init__(self, store: BlobStore, spool: FolderStore, limits: Limits, threads: Executor) -> None:
        self._store, self._spool, self._limits, self._threads = store, spool, limits, threads
        self._open: list[str] = []
        self._paused: dict[str, tuple[PartialBlob, asyncio.TimerHandle]] = {}
        """Blobs of which a part has come and the next is not yet here: what was hashed need not be hashed again."""

    def close(self) -> None:
        """Close paused uploads; nobody may be sending any more."""
        for incoming, timer in self._paused.values():
            timer.cancel()
            incoming.close()
        self._paused.clear()

    def progress(self, digest: str) -> dict[str, str]:
        """Return the headers that describe how much of a blob has come, and whether more is coming."""
        headers = {RECEIVED: str(self._spool.received(digest))}
        return headers | ({BUSY: "1"} if digest in self._open else {})

    async def receive(self, request: Request, digest: str, reserve_upload: UploadReservation) -> int:
        """Receive a blob, or the rest of one; return the status to answer with.

        Raises Refusal, and keeps what is good of it.

        reserve_upload: entered with the blob's bytes while it comes; it may refuse.
        """
        length = length_of(request, self._limits.blob_bytes, "a blob")
        start, total = _place(request.headers.get("content-range"), length)
        if total > self._limits.blob_bytes:
            raise Refusal(
                413, f"a blob of {total} bytes is larger than the {self._limits.blob_bytes} that this server takes"
            )
        if len(self._open) >= self._limits.uploads:
            raise Refusal(503, f"{len(self._open)} blobs are being received already: come back", {"retry-after": "1"})
        self._open.append(digest)
        try:
            with ExitStack() as held:
                await self._in_thread(lambda: held.enter_context(reserve_upload(total)))
                return await self._receive(request, digest, start, total)
        finally:
            self._open.remove(digest)

    async def _receive(self, request: Request, digest: str, start: int, total: int) -> int:
        try:
            incoming = await self._in_thread(partial(self._open_blob, digest, self._resume(digest)))
            if incoming is None:
                return 200
            good = True
            try:
                if start == 0:
                    incoming.restart()
                elif incoming.offset != start:
                    headers = {RECEIVED: str(incoming.offset)}
                    raise Refusal(409, f"byte {incoming.offset} comes next of blob {digest[:12]}, not {start}", headers)
                await self._write(request, incoming)
                if incoming.offset < total:
                    return 202
                good = False  # what is wrong with it, or has become a blob, is not to be gone on with
                await self._in_thread(partial(self._finish, digest, incoming))
                return 201
            except OSError:
                good = False
                raise
            finally:
                self._pause(digest, incoming) if good and incoming.offset else incoming.close()
        except BusyError as error:
            raise Refusal(423, str(error), {"retry-after": "1"}) from error
        except BlobError as error:
            raise Refusal(422, str(error)) from error
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise Refusal(507, str(error)) from error
            raise

    def _in_thread(self, do: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._threads, do)

    def _pause(self, digest: str, incoming: PartialBlob) -> None:
        if len(self._paused) >= self._limits.uploads:
            incoming.close()
            return
        timer = asyncio.get_running_loop().call_later(self._limits.silence, self._expire, digest)
        self._paused[digest] = incoming, timer

    def _resume(self, digest: str) -> PartialBlob | None:
        incoming, timer = self._paused.pop(digest, (None, None))
        if timer is not None:
            timer.cancel()
        return incoming

    def _expire(self, digest: str) -> None:
        if (incoming := self._resume(digest)) is not None:
            incoming.close()

    async def _write(self, request: Request, incoming: PartialBlob) -> None:
        """Write a body as it arrives, and keep all that came of a broken one."""
        batch, size, writing = list[bytes](), 0, None
        room = min(CHUNK_BYTES, max(_MEMORY_BYTES // (2 * len(self._open)), _LEAST_BYTES))
        try:
            async for chunk in timely(request, self._limits):
                batch.append(chunk)
                size += len(chunk)
                if size >= room:
                    if writing is not None:
                        await writing
                    writing = self._in_thread(partial(incoming.write, batch))
                    batch, size = [], 0
        finally:
            if writing is not None:
                await writing
            if batch:
                await self._in_thread(partial(incoming.write, batch))

    def _open_blob(self, digest: str, rested: PartialBlob | None) -> PartialBlob | None:
        """Return the partial blob to write to; None if the blob is there already."""
        if rested is None and self._store.size(digest) is not None:
            return None
        incoming = rested or self._spool.receive(digest)
        try:
            if self._store.size(digest) is None:
                return incoming
        except BaseException:
            incoming.close()
            raise
        incoming.give_up()  # someone else has just finished it
        return None

    def _finish(self, digest: str, incoming: PartialBlob) -> None:
        incoming.finish()
        if self._store is not self._spool:
            self._store.put(digest, self._spool.file(digest))
            self._spool.remove(digest)


def _place(header: str | None, length: int) -> tuple[int, int]:
    """Return the body's offset in the blob, and the blob's bytes."""
    if header is None:
        return 0, length
    if length == 0 and (nothing := _NOTHING.fullmatch(header.strip())):
        return int(nothing[1]), int(nothing[1])
    match = _RANGE.fullmatch(header.strip())
    start, last, total = map(int, match.groups()) if match else (0, 0, 0)
    if not match or last - start + 1 != length or last >= total:
        raise Refusal(400, f"a body of {length} bytes cannot be the part {header[:100]!r} of a blob")
    return start, total


class Refusal(Exception):  # noqa: N818 - an answer, not a fault
    """A request that is answered with this status and this text."""

    def __init__(self, status: int, why: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(why)
        self.status, self.headers = status, headers or {}


class _Pace:
    """Measure whether a body comes fast enough."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self._began = limits, time.monotonic()

    def wait(self) -> asyncio.Timeout:
        return asyncio.timeout(self._limits.silence)

    def stopped(self, came: int) -> Refusal:
        return Refusal(408, f"nothing came for {self._limits.silence} s, after {came} bytes")

    def check(self, came: int) -> None:
        passed, slowest = time.monotonic() - self._began, self._limits.slowest
        if passed > self._limits.silence and came < slowest * passed:
            raise Refusal(
                408, f"{came} bytes in {passed:.0f} s is slower than the {slowest} a second that are waited for"
            )


async def timely(request: Request, limits: Limits) -> AsyncIterator[bytes]:
    """Yield the body as it comes.

    Raises Refusal for one that stops or crawls, ClientDisconnect for one that breaks off.
    """
    stream, came, pace = aiter(request.stream()), 0, _Pace(limits)
    while True:
        try:
            async with pace.wait():
                chunk = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise pace.stopped(came) from None
        came += len(chunk)
        pace.check(came)
        yield chunk
