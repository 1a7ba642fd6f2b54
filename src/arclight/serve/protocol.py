"""Extend uvicorn's protocol: take whole requests without a task, write answers by one call.

`server` gives `direct_protocol` to uvicorn with ``Application.take`` of `app`; `middleware` finds a `Write` in the request's scope. This is
speed alone: plain ASGI gives the same answers, which tests compare, and what cannot be taken or written must be left unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any

from arclight.fabric.serving.listening import http_protocol

WRITE = "arclight.write"
"""Key of a request's scope under which the protocol has a `Write`."""
Write = Callable[[MutableMapping[str, Any], bytes, bytes], bool]
"""Write an answer of status 200 to the request of a scope: header lines with their ends, and content. ASGI messages would take two system
calls, and check each header. Returns False, having done nothing, if ASGI messages are needed: the client reads too slowly, has left, or
the connection ends with this answer.
"""
FIRST_REQUEST_S = 1.0
"""Seconds in which a connection that was made just before the listener closed must have sent its first request."""
Take = Callable[[MutableMapping[str, Any], bytes, Callable[[Any], None]], bool]
"""Answer a request that has come whole. Gets its scope, its body, and a function that starts an ASGI application as a task for it.

Returns False, having done nothing, for a request that needs a task from its beginning.
"""


def direct_protocol(*, head_s: float, take: Take) -> Any:
    """Return uvicorn's protocol that asks ``take`` first for each complete request.

    It extends `http_protocol`; the application gets the requests that are not taken, and those whose body comes in pieces.
    """
    base: Any = http_protocol("serve", head_s=head_s)

    class Direct(base):
        _coming: Any = None
        """The request to answer next, whose body has not ended among the bytes that are parsed."""

        def _parse_on(self) -> None:
            super()._parse_on()
            if self._coming is not None:
                cycle, self._coming = self._coming, None
                super()._start_asgi_task(cycle, self.app)

        def _start_asgi_task(self, cycle: Any, app: Any) -> None:
            """Start a request whose head is there; one that may be taken waits for its body."""
            self._under_way = cycle
            cycle.scope[WRITE] = self._write
            needs_task = app is not self.app or cycle.waiting_for_100_continue
            if not needs_task and not cycle.more_body:
                self._start(cycle)
            elif not needs_task and self._is_parsing:
                self._coming = cycle
            else:
                super()._start_asgi_task(cycle, app)

        def on_message_complete(self) -> None:
            super().on_message_complete()
            if self._coming is not None:
                cycle, self._coming = self._coming, None
                self._start(cycle)

        def _start(self, cycle: Any) -> None:
            by_task = partial(super()._start_asgi_task, cycle)
            if not take(cycle.scope, cycle.body, by_task):
                by_task(self.app)

        def shutdown(self) -> None:
            """End the connection; a new one stays a moment, for a request may be on its way."""
            self.loop.call_later(FIRST_REQUEST_S if self.cycle is None else 0.0, super().shutdown)

        def _write(self, scope: MutableMapping[str, Any], headers: bytes, content: bytes) -> bool:
            cycle = self._under_way
            if cycle.scope is not scope or self.flow.write_paused or self.transport.is_closing():
                return False
            if cycle.disconnected or cycle.response_started or not cycle.keep_alive:
                return False
            cycle.response_started = cycle.response_complete = True
            own = b"".join([b"%b: %b\r\n" % pair for pair in cycle.default_headers])
            size = b"content-length: %d\r\n\r\n" % len(content)
            self.transport.write(b"".join((b"HTTP/1.1 200 OK\r\n", own, headers, size, content)))
            cycle.message_event.set()
            cycle.on_response()
            return True

    return Direct
