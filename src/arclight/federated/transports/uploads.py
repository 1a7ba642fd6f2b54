"""Bodies of requests, taken in within limits of size and time."""

from __future__ import annotations

import asyncio
import errno
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import AbstractContextManager, ExitStack, aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from arclight.fabric.extras import require
from arclight.federated.blobs.blob_store import PIECE_BYTES, BlobStore
from arclight.federated.blobs.folder import FolderStore
from arclight.federated.blobs.partial_blob import BusyError, PartialBlob
from arclight.federated.errors import BlobError
from arclight.federated.transports.settings import Limits

if TYPE_CHECKING:
    from starlette.requests import Request


_RANGE = re.compile(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15})")
_NOTHING = re.compile(r"bytes \*/(\d{1,15})")
"""All has come before and only waits to be verified."""
PART = 32 << 20
"""Bytes of a blob that nodes send at once: a refusal is read after at most as many, and a slow line holds nothing up."""
_ROOM, _LEAST = 4 << 20, 1 << 16
"""Bytes of memory for all blobs that come in at the same time, and for each of very many."""
RECEIVED, BUSY = "x-arclight-received", "x-arclight-busy"


T = TypeVar("T")
Taking = Callable[[int], AbstractContextManager[None]]


def length_of(request: Request, largest: int, what: str) -> int:
    """Bytes of a body that is about to come. Raises Refusal where it does not say, or is too large."""
    said = request.headers.get("content-length")
    if said is None:
        raise Refusal(411, f"{what} comes with a Content-Length")
    if int(said) > largest:
        raise Refusal(413, f"{what} of {said} bytes is larger than the {largest} that this server takes")
    return int(said)


async def whole_body(request: Request, limits: Limits, largest: int) -> bytes:
    """A small body at once."""
    length_of(request, largest, "a message")
    return b"".join([piece async for piece in timely(request, limits)])


class UploadHandler:
    """Blobs that nodes put.

    store: where they belong. spool: where they come in; the store itself, if that is a folder.
    """

    def __init__(self, store: BlobStore, spool: FolderStore, limits: Limits, threads: Executor) -> None:
        self._store, self._spool, self._limits, self._threads = store, spool, limits, threads
        self._open: list[str] = []
        self._resting: dict[str, tuple[PartialBlob, asyncio.TimerHandle]] = {}
        """Blobs of which a part has come and the next is not yet here: what was hashed need not be hashed again."""

    def close(self) -> None:
        """Let go of what rests; nobody may be sending any more."""
        for incoming, timer in self._resting.values():
            timer.cancel()
            incoming.close()
        self._resting.clear()

    def progress(self, digest: str) -> dict[str, str]:
        """What has come of a blob that is not there yet, as headers; they also say whether someone is just sending it."""
        said = {RECEIVED: str(self._spool.received(digest))}
        return said | ({BUSY: "1"} if digest in self._open else {})

    async def receive(self, request: Request, digest: str, taking: Taking) -> int:
        """Take a blob in, or the rest of one; the status to answer with. Raises Refusal, and keeps what is good of it.

        taking: entered with the blob's bytes while it comes; it may refuse.
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
                await self._in_thread(lambda: held.enter_context(taking(total)))
                return await self._receive(request, digest, length, start, total)
        finally:
            self._open.remove(digest)

    async def _receive(self, request: Request, digest: str, length: int, start: int, total: int) -> int:
        try:
            incoming = await self._in_thread(partial(self._begin, digest, self._wake(digest)))
            if incoming is None:
                return 200
            good = True
            try:
                if start == 0:
                    incoming.restart()
                elif incoming.offset != start:
                    headers = {RECEIVED: str(incoming.offset)}
                    raise Refusal(409, f"byte {incoming.offset} comes next of blob {digest[:12]}, not {start}", headers)
                await self._take(request, length, incoming)
                if incoming.offset < total:
                    return 202
                good = False  # what is wrong with it, or has become a blob, is not to be gone on with
                await self._in_thread(partial(self._finish, digest, incoming))
                return 201
            except OSError:
                good = False
                raise
            finally:
                self._rest(digest, incoming) if good and incoming.offset else incoming.close()
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

    def _rest(self, digest: str, incoming: PartialBlob) -> None:
        if len(self._resting) >= self._limits.uploads:
            incoming.close()
            return
        timer = asyncio.get_running_loop().call_later(self._limits.silence, self._let_go, digest)
        self._resting[digest] = incoming, timer

    def _wake(self, digest: str) -> PartialBlob | None:
        incoming, timer = self._resting.pop(digest, (None, None))
        if timer is not None:
            timer.cancel()
        return incoming

    def _let_go(self, digest: str) -> None:
        if (incoming := self._wake(digest)) is not None:
            incoming.close()

    async def _take(self, request: Request, length: int, incoming: PartialBlob) -> None:
        """Write what comes; the next piece comes in while one is written. Of what breaks off, all that came is kept."""
        writing: asyncio.Future[None] | None = None
        try:
            room = min(2 * PIECE_BYTES, max(_ROOM // len(self._open), _LEAST))
            async with aclosing(large(request, length, self._limits, room)) as pieces:
                async for piece in pieces:
                    if writing is not None:
                        await writing
                    writing = self._in_thread(partial(incoming.write, (piece,)))
        finally:
            if writing is not None:
                await writing

    def _begin(self, digest: str, rested: PartialBlob | None) -> PartialBlob | None:
        """None where the blob is there already."""
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


def _place(said: str | None, length: int) -> tuple[int, int]:
    """Where the body goes in the blob, and the blob's bytes."""
    if said is None:
        return 0, length
    if length == 0 and (nothing := _NOTHING.fullmatch(said.strip())):
        return int(nothing[1]), int(nothing[1])
    match = _RANGE.fullmatch(said.strip())
    start, last, total = map(int, match.groups()) if match else (0, 0, 0)
    if not match or last - start + 1 != length or last >= total:
        raise Refusal(400, f"a body of {length} bytes cannot be the part {said[:100]!r} of a blob")
    return start, total


BODY = "arclight.body"
"""In a scope's ``extensions``: given how many bytes of a body are still to come, and how many may be in memory, makes their `Body`."""


class Refusal(Exception):  # noqa: N818 - an answer, not a fault
    """A request that is answered with this status and these words."""

    def __init__(self, status: int, why: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(why)
        self.status, self.headers = status, headers or {}


class _Pace:
    """How long what comes may take."""

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
    """The body as it comes. Raises Refusal for one that stops or crawls, ClientDisconnect for one that breaks off."""
    stream, came, pace = aiter(request.stream()), 0, _Pace(limits)
    while True:
        try:
            async with pace.wait():
                piece = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise pace.stopped(came) from None
        came += len(piece)
        pace.check(came)
        yield piece


async def large(request: Request, length: int, limits: Limits, room: int) -> AsyncGenerator[memoryview]:
    """As `timely`, for a body of ``length`` bytes. No piece may be used any more once the next but one is asked for.

    room: bytes that it may take in memory. To be closed (``contextlib.aclosing``): what has not come by then is passed over.
    """
    pace = _Pace(limits)
    try:
        async with pace.wait():
            message = await request.receive()  # which also lets a client go on that waits for that
    except TimeoutError:
        raise pace.stopped(0) from None
    first = message.get("body", b"")
    body: Body = request.scope["extensions"][BODY](length - len(first), room)
    try:
        yield memoryview(first)
        yield memoryview(body.before)
        while body.left:
            try:
                async with pace.wait():
                    await body.full()
            except TimeoutError:
                if not body.filled:
                    raise pace.stopped(length - body.left) from None
            yield body.take()
            if body.lost:
                raise require("starlette.requests", extra="federated").ClientDisconnect
            pace.check(length - body.left)
    finally:
        body.release()


class Body(asyncio.BufferedProtocol):
    """The rest of a request's body, which comes by uvicorn's connection ``http`` and is no business of its parser.

    It comes into one buffer while another may still be read.
    """

    def __init__(self, http: Any, cycle: Any, rest: int, room: int) -> None:
        self._http, self._flow = http, http.flow
        self.before, cycle.body = bytes(cycle.body), bytearray()
        """What uvicorn has taken in already."""
        self.left = rest - len(self.before)
        """Bytes that are still to come."""
        self.filled = 0
        """Bytes that came since the last piece was taken."""
        self.lost: bool = cycle.disconnected
        """The connection has broken off."""
        self._buffers = [memoryview(bytearray(min(room // 2, self.left))) for _ in range(2)]
        self._wanted, self._changed = True, asyncio.Event()
        if self.left and not self.lost:
            self._flow.pause_reading()
            http.transport.set_protocol(self)

    async def full(self) -> None:
        """Wait until a buffer is, or nothing more will come."""
        self._flow.resume_reading()
        if not self.lost:
            await self._changed.wait()

    def take(self) -> memoryview:
        """What came; no more comes until `full` is waited for again."""
        self._flow.pause_reading()
        self._changed.clear()
        piece, self.filled = self._buffers[0][: self.filled], 0
        self._buffers.reverse()
        return piece

    def release(self) -> None:
        """Pass over what is still to come."""
        self._wanted, self.filled = False, 0

    # -- called by the transport ---------------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffers[0][self.filled : self.filled + self.left]

    def buffer_updated(self, nbytes: int) -> None:
        self.left -= nbytes
        if self._wanted:
            self.filled += nbytes
            if self.filled == len(self._buffers[0]) or not self.left:
                self._flow.pause_reading()
                self._changed.set()
        if not self.left:
            self._http.transport.set_protocol(self._http)
            self._http.parser = require("httptools", extra="federated").HttpRequestParser(self._http)
            self._http.on_message_complete()

    def eof_received(self) -> None:
        pass

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._changed.set()
        self._http.connection_lost(exc)

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._http.resume_writing()
