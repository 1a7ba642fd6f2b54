"""Ports of loopback for servers that tests start."""

from __future__ import annotations

import socket

_held: list[socket.socket] = []


def free_port() -> int:
    """Return a port that no other process is given as long as this one lives.

    It stays bound here without listening, which a server that reuses addresses, as all of ours do, does not notice; a port that
    was only looked up may be some client's by the time that a server listens.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    _held.append(held)
    return int(held.getsockname()[1])
