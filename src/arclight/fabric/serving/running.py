"""Run a uvicorn server, in the caller's thread or in one of its own.

``serve.server`` calls `run_server`; ``serve.servable`` and ``federated.transports.http_server`` make a `BackgroundServer`. The caller binds
the socket, so that the port is known before requests are answered.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any

_STOP_S = 30.0
"""Seconds after which `BackgroundServer.stop` waits no longer for a server that does not end."""


def run_server(server: Any, listening: socket.socket, *, handshake_s: float) -> None:
    """Run a ``uvicorn.Server`` on a bound socket until it ends.

    Handshakes of TLS may take ``handshake_s`` seconds.
    """
    with asyncio.Runner(loop_factory=_loop_class(handshake_s)) as runner:
        runner.run(server.serve(sockets=[listening]))


def _loop_class(handshake_s: float) -> type[asyncio.AbstractEventLoop]:
    """Return uvicorn's kind of loop with a bound on handshakes, which uvicorn does not set."""
    base: Any = asyncio.SelectorEventLoop
    if sys.platform == "win32":
        base = asyncio.ProactorEventLoop
    with suppress(ImportError):  # not there for Windows
        from uvloop import Loop as base  # noqa: N813

    class BoundedHandshakes(base):
        async def create_server(self, *given: Any, ssl: Any = None, **options: Any) -> Any:
            if ssl is not None:
                options["ssl_handshake_timeout"] = handshake_s
            return await super().create_server(*given, ssl=ssl, **options)

    return BoundedHandshakes


class BackgroundServer:
    """Answer requests from a thread of its own, from `start` to `stop` (or in a ``with`` block).

    ``server`` is a ``uvicorn.Server``, ``listening`` a bound socket, which `stop` closes. Signals stay those of the caller. Handshakes
    of TLS may take ``handshake_s`` seconds.
    """

    def __init__(self, server: Any, listening: socket.socket, *, start_s: float, name: str, handshake_s: float) -> None:
        self._server = server
        self._listening = listening
        self._start_s = start_s
        self._thread = threading.Thread(
            target=run_server, args=(server, listening), kwargs={"handshake_s": handshake_s}, name=name, daemon=True
        )

    def __enter__(self) -> BackgroundServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Return once requests are answered.

        Raises TimeoutError, having stopped, if that takes more than ``start_s`` seconds.
        """
        self._thread.start()
        deadline = time.monotonic() + self._start_s
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                self.stop()
                raise TimeoutError(f"The server didn't start within {self._start_s:g} seconds.")
            time.sleep(0.005)

    def stop(self) -> None:
        """End the server; requests in progress get the time that its configuration grants them."""
        self._server.should_exit = True
        self._thread.join(_STOP_S)
        self._listening.close()
