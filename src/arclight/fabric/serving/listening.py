"""Bind a server's socket before it starts, and limit size and duration of request headers.

``serve.server``, ``serve.servable`` and ``federated.transports.http_server`` reserve addresses by it; ``arclight serve`` does so before it
loads the program, ``arclight federate serve`` before the run has a folder, so that a wrong address ends the command. ``serve.protocol``
and ``http_server`` take `http_protocol`. ``cli.federate.network`` reads `AddressError.errno`: it stays.
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

    It refuses connections until ``listen`` is called. Accepted connections send small answers at once (TCP_NODELAY). Raises AddressError
    if the address is in use, unknown, or not of this machine.
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


def http_protocol(extra: str, *, head_s: float) -> Any:
    """Return uvicorn's protocol for httptools with bounds on requests (`protocol.Bounded`).

    httptools alone keeps headers of any size. A head has at most ``protocol.MAX_HEAD_BYTES``. A connection is closed ``head_s`` seconds
    after it was made, or after the first byte of a further request, if the head has not ended by then; ``timeout_keep_alive`` of uvicorn
    bounds the time between two requests.

    ``extra`` installs uvicorn and httptools.
    """
    for package in ("httptools", "uvicorn"):
        require(package, extra=extra)
    from arclight.fabric.serving.protocol import Bounded

    return type("BoundedHeads", (Bounded,), {"head_s": head_s})
