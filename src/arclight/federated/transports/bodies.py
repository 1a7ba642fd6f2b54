"""Bodies of requests, as they come, within limits of time.

Those of uploads come by a protocol of asyncio with buffers of its own, which stands in the place of uvicorn's as long as they last:
what the network gives is written once, to where hashing and the disk read it. Before and after, the connection is uvicorn's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Any

from arclight.fabric.extras import require

if TYPE_CHECKING:
    from starlette.requests import Request

    from arclight.federated.transports.settings import Limits

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
