"""Bodies of requests, taken in within limits of size and time."""

from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import AbstractContextManager, ExitStack, aclosing
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from arclight.federated.blobs.digests import PIECE
from arclight.federated.blobs.folder import FolderStore
from arclight.federated.blobs.incoming import BusyError, Incoming
from arclight.federated.blobs.store import BlobStore
from arclight.federated.errors import BlobError
from arclight.federated.transports.bodies import Refusal, large, timely
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


class Uploads:
    """Blobs that nodes put.

    store: where they belong. spool: where they come in; the store itself, if that is a folder.
    """

    def __init__(self, store: BlobStore, spool: FolderStore, limits: Limits, threads: Executor) -> None:
        self._store, self._spool, self._limits, self._threads = store, spool, limits, threads
        self._open: list[str] = []
        self._resting: dict[str, tuple[Incoming, asyncio.TimerHandle]] = {}
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

    def _rest(self, digest: str, incoming: Incoming) -> None:
        if len(self._resting) >= self._limits.uploads:
            incoming.close()
            return
        timer = asyncio.get_running_loop().call_later(self._limits.silence, self._let_go, digest)
        self._resting[digest] = incoming, timer

    def _wake(self, digest: str) -> Incoming | None:
        incoming, timer = self._resting.pop(digest, (None, None))
        if timer is not None:
            timer.cancel()
        return incoming

    def _let_go(self, digest: str) -> None:
        if (incoming := self._wake(digest)) is not None:
            incoming.close()

    async def _take(self, request: Request, length: int, incoming: Incoming) -> None:
        """Write what comes; the next piece comes in while one is written. Of what breaks off, all that came is kept."""
        writing: asyncio.Future[None] | None = None
        try:
            room = min(2 * PIECE, max(_ROOM // len(self._open), _LEAST))
            async with aclosing(large(request, length, self._limits, room)) as pieces:
                async for piece in pieces:
                    if writing is not None:
                        await writing
                    writing = self._in_thread(partial(incoming.write, (piece,)))
        finally:
            if writing is not None:
                await writing

    def _begin(self, digest: str, rested: Incoming | None) -> Incoming | None:
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

    def _finish(self, digest: str, incoming: Incoming) -> None:
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
