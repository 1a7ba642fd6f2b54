"""A federation's server on a socket: HTTP on loopback, HTTPS with registered nodes elsewhere."""

from __future__ import annotations

import logging
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from arclight.fabric.extras import require
from arclight.federated.blobs.folder import FolderStore
from arclight.federated.errors import FederatedError
from arclight.federated.transports.bodies import BODY, Body
from arclight.federated.transports.guard import Guard
from arclight.federated.transports.http_app import App
from arclight.federated.transports.keys import Registry, fingerprint_of
from arclight.federated.transports.settings import Listening
from arclight.federated.transports.trust import check_certificate

if TYPE_CHECKING:
    from arclight.federated.transports.in_process import Answers

log = logging.getLogger(__name__)

UVICORN = ((0, 49), (0, 54))
"""Oldest and newest whose connections are known well enough to be taken over for uploads (see `bodies`); Flower 1.41 wants the oldest."""
_START = 30.0
_GRACE = 1
"""Seconds that are given to what is under way when the server stops."""
_IDLE = 75
"""Seconds that an unused connection stays open; clients close theirs before."""


class HttpServer:
    """Answers nodes from a thread of its own, from `start` to `stop` (or in a ``with`` block).

    spool: where blobs come in, if ``server.blobs`` is no folder; a temporary one by default. bound: a socket that listens already,
    in the place of one at ``listening``'s host and port: connections may wait there before the server is up.
    Raises FederatedError for a certificate that no node would believe, and for a file of nodes that cannot be read.
    """

    def __init__(
        self,
        server: Answers,
        listening: Listening | None = None,
        spool: FolderStore | None = None,
        bound: socket.socket | None = None,
    ) -> None:
        self._listening = listening or Listening()
        if self._listening.certificate is not None and self._listening.private_key is not None:
            check_certificate(self._listening.certificate, self._listening.private_key)
        registry = Registry(self._listening.nodes) if self._listening.nodes else None
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if spool is None and isinstance(server.blobs, FolderStore):
            spool = server.blobs
        elif spool is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="arclight-spool-")
            spool = FolderStore(self._temporary.name)
        if registry is not None and (free := registry.unbound()):
            log.warning(
                "%s lets %s speak for any client: name theirs in its line (arclight federate keys node --client N)",
                self._listening.nodes, ", ".join(free),
            )  # fmt: skip
        guard = Guard(registry, self.fingerprint or "", server.run)
        self._app = App(server, guard, self._listening.limits, spool)
        self._uvicorn: Any = None
        self._thread: threading.Thread | None = None
        self._socket = bound

    def __enter__(self) -> HttpServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def port(self) -> int:
        if self._socket is None:
            raise FederatedError("a server has a port once it is started")
        return int(self._socket.getsockname()[1])

    @property
    def address(self) -> str:
        """Where nodes reach it, with the host name that it was given."""
        host = self._listening.host
        scheme = "https" if self._listening.certificate else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def fingerprint(self) -> str | None:
        """Of the certificate, for nodes to pin; None without TLS."""
        return fingerprint_of(self._listening.certificate) if self._listening.certificate else None

    def start(self) -> None:
        """Bind and answer. Raises OSError where the address is taken, FederatedError where it does not come up."""
        uvicorn = require("uvicorn", extra="federated")
        oldest, newest = UVICORN
        if not oldest <= tuple(map(int, uvicorn.__version__.split(".")[:2])) <= newest:
            raise FederatedError(
                f"a federated server needs uvicorn {'.'.join(map(str, oldest))} to {'.'.join(map(str, newest))}, and "
                f'{uvicorn.__version__} is installed: `pip install "uvicorn=={".".join(map(str, newest))}.*"`'
            )
        host, port = self._listening.host, self._listening.port
        if self._socket is None:
            self._socket = bind(host, port)
        config = uvicorn.Config(
            self._app.starlette(),
            http=_protocol(self._listening.limits.silence),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=1024,
            limit_concurrency=self._listening.limits.connections,
            timeout_keep_alive=_IDLE,
            timeout_graceful_shutdown=_GRACE,
            ssl_certfile=self._listening.certificate,
            ssl_keyfile=self._listening.private_key,
            ssl_context_factory=_newest_tls if self._listening.certificate else None,
        )
        self._uvicorn = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._uvicorn.run, kwargs={"sockets": [self._socket]}, name="arclight-http", daemon=True
        )
        self._thread.start()
        deadline = time.monotonic() + _START
        while not self._uvicorn.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                self.stop()
                raise FederatedError(f"the server on {host}:{port} did not come up within {_START:.0f} s")
            time.sleep(0.005)

    def stop(self) -> None:
        """Stop answering: what is under way is given a second, then cut; nodes try again until a server is there."""
        if self._uvicorn is not None and self._thread is not None:
            self._uvicorn.should_exit = True
            self._thread.join(_START)
        if self._socket is not None:
            self._socket.close()
        self._app.close()
        if self._temporary is not None:
            self._temporary.cleanup()


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises OSError where the address is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise OSError(error.errno, f"{host}:{port} cannot be listened on: {error.strerror}") from error


def _newest_tls(config: Any, make: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    """Both ends are ours: nothing older is spoken."""
    context = make()
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _protocol(patience: float) -> Any:
    """Uvicorn's protocol, but a connection on which no request comes to the end of its headers in time is closed, and the application
    may take in large bodies by itself (see `bodies`).
    """
    require("httptools", extra="federated")
    base: Any = require("uvicorn.protocols.http.httptools_impl", extra="federated").HttpToolsProtocol

    class Timely(base):
        _closing: Any = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._closing = self.loop.call_later(patience, transport.close)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            under_way = self.cycle is not None and not self.cycle.response_complete
            if under_way and self._closing is not None:
                self._closing.cancel()
                self._closing = None
            elif not under_way and self._closing is None:  # part of a further request's headers
                self._closing = self.loop.call_later(patience, self.transport.close)

        def on_headers_complete(self) -> None:
            super().on_headers_complete()
            self.scope["extensions"] = {BODY: partial(Body, self, self.cycle)}

        def shutdown(self) -> None:
            super().shutdown()
            if self.cycle is None or self.cycle.response_complete:  # over TLS nobody may be there to say goodbye to
                self.loop.call_later(_GRACE / 2, self.transport.abort)

        def connection_lost(self, exc: Exception | None) -> None:
            if self._closing is not None:
                self._closing.cancel()
            super().connection_lost(exc)

    return Timely
