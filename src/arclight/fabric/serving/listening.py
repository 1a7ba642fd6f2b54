"""Reserve the address that a server will listen on, and bound the heads of its requests.

``arclight serve`` and federated servers call this first, so that a wrong address ends the command before anything is
loaded or written.
"""

from __future__ import annotations

import errno
import socket
from typing import Any

from arclight.fabric.extras import require


class AddressError(OSError):
    """Raised if an address cannot be listened on; ``errno`` is the system's number, if any."""

    @classmethod
    def of(cls, host: str, port: int, error: OSError) -> AddressError:
        """Return the error for an ``error`` that ``bind`` or ``listen`` raised, with advice."""
        in_use = error.errno == errno.EADDRINUSE
        advice = "another program listens there; name another port" if in_use else error.strerror
        return cls._with_errno(f"{host}:{port} cannot be listened on: {advice}", error.errno)

    @classmethod
    def _with_errno(cls, message: str, number: int | None) -> AddressError:
        made = cls(message)  # one argument: the message is printed without a number before it
        made.errno = number
        return made


def reserve_address(host: str, port: int) -> socket.socket:
    """Bind a TCP socket to an address, with port 0 to any free port.

    It refuses connections until ``listen`` is called.

    Accepted connections send small answers at once (TCP_NODELAY). Raises AddressError if the address is in use, unknown, or not of this
    machine.
    """
    if not 0 <= port <= 65535:
        raise AddressError(f"port {port} is none: give one from 0 (any free port) to 65535")
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        reserved = socket.socket(family, kind, protocol)
    except UnicodeError as error:  # raised by the encoding of host names, as for a..b
        raise AddressError._with_errno(
            f"{host} is not an address: no machine can have this name", socket.EAI_NONAME
        ) from error
    except OSError as error:
        raise AddressError._with_errno(f"{host} is not an address: {error.strerror or error}", error.errno) from error
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # accepted connections inherit it; Nagle's algorithm would hold small answers back until the client acknowledges, up to 40 ms
        reserved.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reserved.bind(address)
    except OSError as error:
        reserved.close()
        raise AddressError.of(host, port, error) from error
    return reserved


MAX_HEAD_BYTES = 65_536
"""Bytes of a request's line and headers, or of what follows a chunked body: as many as h11 takes."""


def http_protocol(extra: str, *, head_s: float) -> Any:
    """Return uvicorn's protocol for httptools, with bounds on the heads of requests.

    By itself httptools keeps headers of any size.

    A head has at most ``MAX_HEAD_BYTES``. A connection is closed ``head_s`` seconds after it was made, or after the first byte of a further
    request, if the head has not ended by then; ``timeout_keep_alive`` of uvicorn bounds the time between two requests.

    ``extra`` installs uvicorn and httptools.
    """
    base: Any = _one_by_one(extra)

    class Bounded(base):
        _head_bytes = 0
        """Bytes received since the last head or part of a body was complete."""
        _head_timer: Any = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._head_timer = self.loop.call_later(head_s, transport.close)

        def data_received(self, data: bytes) -> None:
            self._head_bytes += len(data)
            super().data_received(data)
            is_answered = self.cycle is None or self.cycle.response_complete
            if not is_answered:
                if self._head_timer is not None:
                    self._head_timer.cancel()
                    self._head_timer = None
            elif self._head_timer is None:  # part of a further request's head
                self._head_timer = self.loop.call_later(head_s, self.transport.close)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(f"The request's headers exceed {MAX_HEAD_BYTES} bytes; send shorter ones.")

        def on_headers_complete(self) -> None:
            self._head_bytes = 0
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._head_bytes = 0
            super().on_body(body)

        def connection_lost(self, exc: Exception | None) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
            super().connection_lost(exc)

    return Bounded


MAX_WAITING = 8
"""Requests of one connection that wait for their turn while more is read: who reads on notices that the client has left."""


def _one_by_one(extra: str) -> Any:
    """Return uvicorn's protocol, bounded in requests that wait on one connection.

    It reads on with each answer, and keeps all that comes: nothing is read while ``MAX_WAITING`` requests of the connection wait. It tells
    the last one that has come that the client has left: the one that is answered is told, too. It answers what is no request at once, which
    a client would take for the answer to a request before it: those are answered, and the connection is closed.
    """
    require("httptools", extra=extra)
    flow: Any = require("uvicorn.protocols.http.flow_control", extra=extra).FlowControl
    protocol: Any = require("uvicorn.protocols.http.httptools_impl", extra=extra).HttpToolsProtocol

    class Reading(flow):
        pipeline: Any = ()

        def resume_reading(self) -> None:
            if len(self.pipeline) < MAX_WAITING:
                super().resume_reading()

    class OneByOne(protocol):
        _under_way: Any = None
        """The request that is answered."""
        _is_malformed = False
        """Whether what came after the last request is none: nothing more is parsed."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.flow = Reading(transport)
            self.flow.pipeline = self.pipeline

        def _start_asgi_task(self, cycle: Any, app: Any) -> None:
            self._under_way = cycle
            super()._start_asgi_task(cycle, app)

        def data_received(self, data: bytes) -> None:
            if not self._is_malformed:
                super().data_received(data)

        def send_400_response(self, msg: str) -> None:
            """Refuse a malformed request: by an answer in its turn, or by closing the connection."""
            if self._is_malformed:
                return
            last, self._is_malformed = self.cycle, True
            if last is not None and last.more_body and last is not self._under_way:  # it breaks off while it waits
                self.pipeline.popleft()
                last = self.pipeline[0][0] if self.pipeline else self._under_way
            if last is None or last.response_complete or (last.more_body and not last.response_started):
                super().send_400_response(msg)
            elif last.more_body:
                self.transport.close()
            else:
                last.keep_alive = False

        def connection_lost(self, exc: Exception | None) -> None:
            if self._under_way is not None and not self._under_way.response_complete:
                self._under_way.disconnected = True
                self._under_way.message_event.set()
            super().connection_lost(exc)

    return OneByOne
