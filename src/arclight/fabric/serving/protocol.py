"""Receive requests of HTTP/1.1 within bounds, by uvicorn's protocol for httptools.

Servers of ``serve`` and ``federated`` get it from `listening.http_protocol`, which alone imports this (it needs uvicorn and httptools). It
overrides methods of uvicorn's class: check it against each new version. The bounds may be tuned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 65_536
"""Most bytes of a request's line and headers, or of the trailers of a chunked body: as many as h11 takes."""
MAX_WAITING = 8
"""Requests of one connection that may wait for their turn; below that, more is read, so that a client that left is noticed."""
PARSED_BYTES = 4096
"""Bytes parsed at a time, apart from bodies of known length: a short request takes fifty times its size once it is parsed."""
_Protocol: Any = HttpToolsProtocol


class Reading(FlowControl):
    """Flow control that reads on only while it may."""

    def __init__(self, transport: Any, may_read: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._may_read = may_read

    def resume_reading(self) -> None:
        if self._may_read():
            super().resume_reading()


class OneByOne(_Protocol):
    """Handle pipelined requests (sent at once on one connection) within bounds.

    Unlike uvicorn's protocol:

    * uvicorn reads on with each answer, and parses and keeps all that arrives. Here nothing is read, and at most `PARSED_BYTES` more are
      parsed, while `MAX_WAITING` requests of the connection wait.
    * When the client leaves, uvicorn tells the newest request only. Here the one that is being answered is told, too.
    * uvicorn answers malformed bytes at once, which a client takes for the answer to an earlier request. Here the earlier requests are
      answered, then the connection is closed.
    * uvicorn loses the body of a request that asks for another protocol (HTTP/2 without TLS). Here it is answered as if it had not asked.
    """

    parser: Any
    _under_way: Any = None
    """The request that is answered."""
    _is_malformed = False
    """True once bytes after the last request are no request: nothing more is parsed."""
    _unparsed: Any = b""
    """Bytes received that wait to be parsed until fewer requests wait."""
    _is_parsing = False
    _body_bytes = 0
    """Bytes of the newest request's body."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.flow = Reading(transport, lambda: not self._unparsed and len(self.pipeline) < MAX_WAITING)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._under_way = cycle
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        self._unparsed = b"".join((self._unparsed, data)) if self._unparsed else data
        self._parse_on()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._unparsed and not self._is_parsing:
            self._parse_on()
            self.flow.resume_reading()

    def _parse_on(self) -> None:
        """Parse what has come, as far as few requests wait."""
        left, self._unparsed, self._is_parsing = self._unparsed, b"", True
        if len(left) > PARSED_BYTES:
            left = memoryview(left)
        while left and len(self.pipeline) < MAX_WAITING and not (self._is_malformed or self.transport.is_closing()):
            size = len(left) if len(left) <= PARSED_BYTES else max(PARSED_BYTES, self._body_left())
            piece, left = left[:size], left[size:]
            self._parse(piece)
        self._is_parsing = False
        if left and not (self._is_malformed or self.transport.is_closing()):
            self._unparsed = bytes(left)
            self.flow.pause_reading()

    def _body_left(self) -> int:
        """Return the bytes still to come of the newest request's body, as far as its head says."""
        if self.cycle is None or not self.cycle.more_body:
            return 0
        length = next((int(value) for name, value in self.cycle.scope["headers"] if name == b"content-length"), 0)
        return length - self._body_bytes

    def _parse(self, piece: Any) -> None:
        """Parse a piece of the received bytes."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(piece[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.logger.warning("Invalid HTTP request received.")
            self.send_400_response("Invalid HTTP request received.")

    def _ignore_upgrade(self, rest: Any) -> None:
        """Parse a request again without its Upgrade, and its body as one of HTTP."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":  # what follows is for no server of HTTP
            self.send_400_response("CONNECT is not supported: this server is not a proxy.")
            return
        lines = [b"%b: %b" % pair for pair in self.headers if pair[0] != b"upgrade"]
        head = b"\r\n".join([b"%b %b HTTP/%b" % (method, self.url, version), *lines, b"", b""])
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as that of uvicorn
        for piece in (head, rest):
            self._parse(piece)

    def on_headers_complete(self) -> None:
        self._body_bytes = 0
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request: by an answer in its turn, else by the end of the connection."""
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
        self._unparsed = b""
        if self._under_way is not None and not self._under_way.response_complete:
            self._under_way.disconnected = True
            self._under_way.message_event.set()
        super().connection_lost(exc)


class Bounded(OneByOne):
    """Protocol whose heads have at most ``MAX_HEAD_BYTES`` and come within ``head_s`` seconds."""

    head_s: float
    _head_bytes = 0
    """Bytes parsed since the last head or part of a body was complete."""
    _head_timer: Any = None
    _is_in_head = False
    """Whether a head has begun among what was parsed, and has not ended."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(self.head_s, transport.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        is_answered = self.cycle is None or self.cycle.response_complete
        if not is_answered:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None
        elif self._head_timer is None:  # part of a further request's head
            self._head_timer = self.loop.call_later(self.head_s, self.transport.close)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if (
            self._is_in_head and self._head_timer is None and self.cycle.response_complete
        ):  # it has come with the request that was answered
            self._head_timer = self.loop.call_later(self.head_s, self.transport.close)

    def _parse(self, piece: Any) -> None:
        self._head_bytes += len(piece)
        super()._parse(piece)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The request's headers exceed {MAX_HEAD_BYTES} bytes; send shorter ones.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True

    def on_headers_complete(self) -> None:
        self._head_bytes, self._is_in_head = 0, False
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        super().connection_lost(exc)
