"""Run a uvicorn server in a thread beside the program that needs it."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

_STOP_S = 30.0
"""Seconds after which `stop` waits no longer for a server that does not end."""


class BackgroundServer:
    """Answer requests from a thread of its own, from `start` to `stop` (or in a ``with`` block).

    ``server`` is a ``uvicorn.Server``, ``listening`` a bound socket, which `stop` closes. Signals stay those of the caller.
    """

    def __init__(self, server: Any, listening: socket.socket, *, start_s: float, name: str) -> None:
        self._server = server
        self._listening = listening
        self._start_s = start_s
        self._thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name=name, daemon=True)

    def __enter__(self) -> BackgroundServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Return once requests are answered; raises TimeoutError, having stopped, if that takes more than ``start_s`` seconds."""
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
