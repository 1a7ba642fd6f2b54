"""Drain the server on SIGTERM: report not ready, keep answering, then close the listener.

`server.make_server` makes a `DrainingServer` in place of ``uvicorn.Server``; uvicorn calls the overridden methods. ``on_drain`` makes the
readiness endpoints answer 503, and ``Limits.drain_s`` is the time that load balancers have to notice. No accepted request that ends
within ``Limits.shutdown_s`` may fail: tests drain under load.
"""

from __future__ import annotations

import asyncio
import ctypes
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

import uvicorn

from arclight.serve.protocol import FIRST_REQUEST_S


class DrainingServer(uvicorn.Server):
    """Uvicorn server that drains after SIGTERM: it takes requests until load balancers notice.

    SIGINT, a second SIGTERM, and SIGTERM before the start has ended close the listener at once.
    """

    def __init__(self, config: uvicorn.Config, *, on_drain: Callable[[], None], drain_s: float) -> None:
        super().__init__(config)
        self._on_drain = on_drain
        self._drain_s = drain_s
        self._closes_at: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start to drain, or to shut down."""
        if sig != signal.SIGTERM or self._closes_at is not None or not self.started:
            super().handle_exit(sig, frame)
            return
        self._on_drain()
        self._closes_at = time.monotonic() + self._drain_s

    async def on_tick(self, counter: int) -> bool:
        """Shut down once draining has lasted long enough."""
        if self._closes_at is not None and not self.should_exit and time.monotonic() >= self._closes_at:
            super().handle_exit(signal.SIGTERM, None)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the listener, answer the connections made for it, and end as uvicorn does."""
        made = [asyncio.ensure_future(self._connect(one)) for one in self._close(sockets or [])]
        if made:
            await asyncio.wait(made, timeout=FIRST_REQUEST_S)
        await super().shutdown(sockets)

    def _close(self, sockets: list[socket.socket]) -> list[socket.socket]:
        """Close the listener; return the connections not accepted, which the system would reset."""
        kept = [one.dup() for one in sockets]
        for server in self.servers:
            server.close()
        for one in sockets:
            one.close()
        found: list[socket.socket] = []
        for one in kept:
            ignore_new_connections(one)
            found += self._accepted(one)
            one.close()  # at once: where they are not ignored, it resets those that are made in between
        return found

    def _accepted(self, listening: socket.socket) -> Iterator[socket.socket]:
        listening.setblocking(False)
        with suppress(BlockingIOError):
            for _ in range(self.config.backlog):
                yield listening.accept()[0]

    async def _connect(self, connection: socket.socket) -> None:
        """Give a connection to the protocol, as the loop's own listener does."""
        protocol: Any = self.config.http_protocol_class
        state, connections = self.lifespan.state, self.server_state
        connection.setblocking(False)
        with suppress(OSError):  # its client has left
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol(config=self.config, server_state=connections, app_state=state),
                connection,
                ssl=self.config.ssl,
            )


SO_ATTACH_FILTER = 26
"""Linux's socket option of that name, which `socket` does not have."""
DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""Program of one instruction for Linux's packet filter: return 0, the bytes to keep of a packet."""


def ignore_new_connections(listening: socket.socket) -> None:
    """Have Linux ignore attempts to connect to ``listening``.

    Clients repeat them, and are refused once it is closed. Connections made before stay. Other systems, and sandboxes without packet
    filters, go on to make connections.
    """
    if sys.platform != "linux" or listening.family not in (socket.AF_INET, socket.AF_INET6):
        return
    instructions = ctypes.create_string_buffer(DROP_ALL, len(DROP_ALL))
    program = struct.pack("HP", 1, ctypes.addressof(instructions))
    with suppress(OSError):  # a sandbox may have no packet filters
        listening.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
