"""Serve a federation: plain HTTP on loopback, elsewhere over TLS to registered nodes.

    GET  /v1/challenge         a text for a node to sign before it joins
    POST /v1/message           a message in JSON, the answer in JSON; a WorkRequest or a SecureSumRequest may be held
    HEAD /v1/blobs/<digest>    200 with Content-Length, or 404 with X-Arclight-Received: bytes of it that came already,
                               and X-Arclight-Busy while more are coming
    GET  /v1/blobs/<digest>    the blob, or the Range of it that is asked for
    PUT  /v1/blobs/<digest>    the blob, or with Content-Range the next part of it (202 until the last)

All but the first, and joining, need ``Authorization: Bearer <session>``. What is refused is answered with ``{"error": text}``.
A node may read any blob whose digest it knows: nobody can guess one.

`Server.serve` and ``arclight federate serve`` start it. Paths, headers and status codes are the protocol: `http_client` and nodes of the same
`protocol.VERSION` rely on them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import ssl
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from arclight.fabric.extras import require
from arclight.fabric.serving.certificates import fingerprint_of
from arclight.fabric.serving.listening import AddressError, http_protocol, reserve_address
from arclight.fabric.serving.running import BackgroundServer
from arclight.federated.blobs.blob_store import check_digest
from arclight.federated.blobs.folder import FolderStore
from arclight.federated.errors import BlobError, FederatedError, LinkError, ProtocolError, RefusedError, SessionError
from arclight.federated.protocol import VERSION, Join, SecureSumRequest, Wait, WorkRequest, read
from arclight.federated.transports.authentication import Authenticator
from arclight.federated.transports.keys import Registry
from arclight.federated.transports.settings import Limits, Listening
from arclight.federated.transports.tls import check_certificate
from arclight.federated.transports.uploads import PART, Refusal, UploadHandler, whole_body

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

    from arclight.federated.transports.link import ServerApi


log = logging.getLogger(__name__)

UVICORN = ((0, 49), (0, 54))
"""Oldest and newest whose protocol class is known to fit `_protocol`; Flower 1.41 wants the oldest."""
_START_TIMEOUT_S = 30.0
_GRACE_S = 1
"""Seconds that are given to what is under way when the server stops."""
_BACKLOG = 1024
"""Connections that wait to be accepted."""
_IDLE_TIMEOUT_S = 75
"""Seconds that an unused connection stays open; clients close theirs before."""


class HttpServer:
    """Answer nodes from a thread of its own, from `start` to `stop` (or in a ``with`` block).

    spool: where blobs come in, if ``server.blobs`` is no folder; a temporary one by default. bound: a socket that listens already,
    in the place of one at ``listening``'s host and port: connections may wait there before the server is up.
    Raises FederatedError for a certificate that no node would believe, and for a file of nodes that cannot be read.
    """

    def __init__(
        self,
        server: ServerApi,
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
        guard = Authenticator(registry, self.fingerprint or "", server.run)
        self._app = App(server, guard, self._listening.limits, spool)
        self._running: BackgroundServer | None = None
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
        """Return the address by which nodes reach it, with the host name that it was given."""
        host = self._listening.host
        scheme = "https" if self._listening.certificate else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def fingerprint(self) -> str | None:
        """Return the certificate's fingerprint, for nodes to pin; None without TLS."""
        return fingerprint_of(self._listening.certificate, extra="federated") if self._listening.certificate else None

    def start(self) -> None:
        """Bind and answer.

        Raises AddressError for an address that cannot be listened on, FederatedError if it does not come up.
        """
        uvicorn = require("uvicorn", extra="federated")
        oldest, newest = UVICORN
        if not oldest <= tuple(map(int, uvicorn.__version__.split(".")[:2])) <= newest:
            raise FederatedError(
                f"a federated server needs uvicorn {'.'.join(map(str, oldest))} to {'.'.join(map(str, newest))}, and "
                f'{uvicorn.__version__} is installed: `pip install "uvicorn=={".".join(map(str, newest))}.*"`'
            )
        host, port = self._listening.host, self._listening.port
        if self._socket is None:
            self._socket = listen(host, port)
        config = uvicorn.Config(
            self._app.starlette(),
            http=_protocol(self._listening.limits.silence),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            limit_concurrency=self._listening.limits.connections,
            timeout_keep_alive=_IDLE_TIMEOUT_S,
            timeout_graceful_shutdown=_GRACE_S,
            ssl_certfile=self._listening.certificate,
            ssl_keyfile=self._listening.private_key,
            ssl_context_factory=_newest_tls if self._listening.certificate else None,
        )
        running = BackgroundServer(
            uvicorn.Server(config), self._socket, start_s=_START_TIMEOUT_S, name="arclight-http",
            handshake_s=self._listening.limits.silence,
        )  # fmt: skip
        try:
            running.start()
        except TimeoutError as error:
            self.stop()
            raise FederatedError(
                f"the server on {host}:{port} did not come up within {_START_TIMEOUT_S:.0f} s"
            ) from error
        self._running = running

    def stop(self) -> None:
        """Stop answering: requests under way get a second, then they are cut.

        Nodes try again until a server is there.
        """
        if self._running is not None:
            self._running.stop()
        elif self._socket is not None:
            self._socket.close()
        self._app.close()
        if self._temporary is not None:
            self._temporary.cleanup()


def listen(host: str, port: int) -> socket.socket:
    """Listen on an address; nodes that connect wait until a server answers.

    Raises AddressError.
    """
    bound = reserve_address(host, port)
    try:
        bound.listen(_BACKLOG)
    except OSError as error:
        bound.close()
        raise AddressError.of(host, port, error) from error
    return bound


def _newest_tls(config: Any, make: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    """Make a context of TLS 1.3 alone: both ends are ours."""
    context = make()
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _protocol(head_s: float) -> Any:
    """Make uvicorn close connections whose request headers do not come in time."""
    base: Any = http_protocol("federated", head_s=head_s)

    class Ending(base):
        def shutdown(self) -> None:
            super().shutdown()
            if self.cycle is None or self.cycle.response_complete:  # over TLS nobody may be there to say goodbye to
                self.loop.call_later(_GRACE_S / 2, self.transport.abort)

    return Ending


CHALLENGE = "x-arclight-challenge"
_RANGE = re.compile(r"bytes=(\d{1,15})-(\d{0,15})")
_OTHER_THREADS = 32
"""Threads for messages that are not held."""
_RETRY_AFTER_S = 1.0
_BRIEF_HOLD_S = 0.05
"""Seconds that a work request takes beyond those that are held."""


class App:
    """Answer the requests of nodes for ``server``; `starlette` is the application."""

    def __init__(self, server: ServerApi, guard: Authenticator, limits: Limits, spool: FolderStore) -> None:
        self._server, self._guard, self._limits = server, guard, limits
        self._threads = ThreadPoolExecutor(limits.held + _OTHER_THREADS, thread_name_prefix="arclight-answers")
        self._files = ThreadPoolExecutor(8, thread_name_prefix="arclight-blobs")
        self._held = 0
        self._lock = threading.Lock()
        self._uploads = UploadHandler(server.blobs, spool, limits, self._files)

    def starlette(self) -> Starlette:
        routing = require("starlette.routing", extra="federated")
        applications = require("starlette.applications", extra="federated")
        blob = "/v1/blobs/{digest:path}"
        routes = [
            routing.Route("/v1/challenge", self._explained(self._challenge), methods=["GET"]),
            routing.Route("/v1/message", self._explained(self._message), methods=["POST"]),
            routing.Route(blob, self._explained(self._put), methods=["PUT"]),
            routing.Route(blob, self._explained(self._get), methods=["GET", "HEAD"]),
        ]
        made: Starlette = applications.Starlette(routes=routes)
        return made

    def close(self) -> None:
        self._uploads.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._files.shutdown(wait=False, cancel_futures=True)

    def _explained(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Turn errors of a handler into answers.

        Close connections whose request was not read to its end.
        """

        async def handle(request: Request) -> Response:
            try:
                return await handler(request)
            except Refusal as error:
                return _refused(request, error.status, str(error), error.headers)
            except SessionError as error:
                return _refused(request, 401, str(error))
            except RefusedError as error:
                return _refused(request, 413, str(error))
            except BlobError as error:
                return _refused(request, 404, str(error))
            except asyncio.CancelledError:  # uvicorn stops, and waits no longer for what is held
                return _refused(request, 503, "the server stops; ask again when it is back")
            except LinkError as error:  # the server cannot answer now; it will
                return _refused(request, 503, str(error))
            except FederatedError as error:
                return _refused(request, 400, str(error))
            except require("starlette.requests", extra="federated").ClientDisconnect:
                return _refused(request, 400, "the connection broke off")
            except Exception as error:
                log.exception("%s %s failed", request.method, request.url.path)
                return _refused(request, 500, f"the server failed at this: {type(error).__name__}; its log says more")

        return handle

    async def _challenge(self, request: Request) -> Response:
        content = {"challenge": self._guard.challenge(), "version": VERSION, "run": self._guard.run}
        return _response(json.dumps(content), "application/json")

    async def _message(self, request: Request) -> Response:
        token = _token(request)
        if token:
            self._guard.node_of(token)  # before anything is read
        known = min(self._limits.message_bytes, self._server.largest_message)
        body = await whole_body(request, self._limits, known if token else self._limits.join_bytes)
        loop = asyncio.get_running_loop()
        text = await loop.run_in_executor(self._threads, self._answer, body, token, request.headers.get(CHALLENGE, ""))
        return _response(text, "application/json")

    def _answer(self, body: bytes, token: str, challenge: str) -> str:
        message = read(body)
        try:
            self._guard.check(message, token, challenge)
        except SessionError:
            raise
        except ProtocolError as error:
            raise Refusal(403, str(error)) from error
        if isinstance(message, WorkRequest) or (isinstance(message, SecureSumRequest) and message.hold_s > 0):
            return self._hold(message)
        answer = self._server.answer(message)
        if isinstance(message, Join):
            self._guard.joined(message, answer)
        return answer.to_json()

    def _hold(self, ask: WorkRequest | SecureSumRequest) -> str:
        with self._lock:
            full = self._held >= self._limits.held
            self._held += not full
        if full:
            return self._answer_soon(ask)
        try:
            return self._server.answer(ask).to_json()
        finally:
            with self._lock:
                self._held -= 1

    def _answer_soon(self, ask: WorkRequest | SecureSumRequest) -> str:
        """Answer at once with what there is.

        Nodes that are held may wait for just those that are not.
        """
        answer = self._server.answer(replace(ask, hold_s=min(ask.hold_s, _BRIEF_HOLD_S)))
        if isinstance(answer, Wait):
            answer = replace(
                answer, retry_after_s=_RETRY_AFTER_S, waiting_for="other nodes: the server holds as many asks as it can"
            )
        return answer.to_json()

    async def _put(self, request: Request) -> Response:
        token, digest = _token(request), _digest(request)
        reserve_upload = partial(self._server.reserve_upload, self._guard.node_of(token), token, digest)
        status = await self._uploads.receive(request, digest, reserve_upload)
        return _response("", status=status)

    async def _get(self, request: Request) -> Response:
        self._guard.node_of(_token(request))
        digest = _digest(request)
        loop = asyncio.get_running_loop()
        size = await loop.run_in_executor(self._files, self._server.blobs.size, digest)
        if size is None:
            progress = await loop.run_in_executor(self._files, self._uploads.progress, digest)
            raise Refusal(404, f"there is no blob {digest[:12]} here", progress)
        start, stop = _part(request.headers.get("range"), size)
        headers = {"accept-ranges": "bytes", "content-length": str(stop - start)}
        if "range" in request.headers:
            headers["content-range"] = f"bytes {start}-{stop - 1}/{size}"
        status = 206 if "range" in request.headers else 200
        if request.method == "HEAD":
            return _response("", status=status, headers=headers)
        chunks = await loop.run_in_executor(self._files, partial(self._server.blobs.read, digest, start, stop - start))
        return _timely_stream(self._prefetched(iter(chunks)), status, headers, self._limits)

    async def _prefetched(self, chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
        """Yield chunks, reading the next while one is sent."""
        loop = asyncio.get_running_loop()
        coming = loop.run_in_executor(self._files, next, chunks, None)
        while (chunk := await coming) is not None:
            coming = loop.run_in_executor(self._files, next, chunks, None)
            yield chunk


def _timely_stream(chunks: AsyncIterator[bytes], status: int, headers: dict[str, str], limits: Limits) -> Response:
    """Stream an answer that is broken off if it is not taken in time."""
    base: Any = require("starlette.responses", extra="federated").StreamingResponse

    class Timely(base):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            async def sent(message: Any) -> None:
                seconds = limits.silence + len(message.get("body", b"")) / limits.slowest
                await asyncio.wait_for(send(message), seconds)

            try:
                await super().__call__(scope, receive, sent)
            except TimeoutError:  # the connection ends with it, as the answer is not whole
                log.warning(
                    "%s does not take the blob that it asked for; the connection is closed", scope.get("client")
                )

    made: Response = Timely(chunks, status, headers=headers, media_type="application/octet-stream")
    return made


def _token(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _digest(request: Request) -> str:
    try:
        return check_digest(request.path_params["digest"])
    except BlobError as error:
        raise Refusal(400, str(error)) from error


def _part(header: str | None, size: int) -> tuple[int, int]:
    """Return the first byte, and the one after the last, of a Range header."""
    if header is None:
        return 0, size
    match = _RANGE.fullmatch(header.strip())
    start = int(match[1]) if match else size
    stop = min(size, int(match[2]) + 1) if match and match[2] else size
    if start >= stop:
        raise Refusal(416, f"a blob of {size} bytes has no {header[:100]!r}", {"content-range": f"bytes */{size}"})
    return start, stop


def _refused(request: Request, status: int, why: str, headers: dict[str, str] | None = None) -> Response:
    """Answer a request that may not have been read to its end.

    The rest of a short one is passed over, so that its sender reads the answer; after others the connection ends.
    """
    length = request.headers.get("content-length", "0" if request.method in ("GET", "HEAD") else "")
    short = status != 408 and length.isdigit() and int(length) <= PART
    ending = {} if short else {"connection": "close"}
    return _response(json.dumps({"error": why}), "application/json", status=status, headers=(headers or {}) | ending)


def _response(
    text: str, kind: str | None = None, *, status: int = 200, headers: dict[str, Any] | None = None
) -> Response:
    made: Response = require("starlette.responses", extra="federated").Response(
        text, status, headers=headers, media_type=kind
    )
    return made
