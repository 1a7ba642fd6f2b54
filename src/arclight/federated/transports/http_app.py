"""The server's side of HTTP: messages, and blobs that go on from where they broke off.

    GET  /v1/challenge         a text for a node to sign before it joins
    POST /v1/message           a message in JSON, the answer in JSON; an Ask may be held
    HEAD /v1/blobs/<digest>    200 with Content-Length, or 404 with X-Arclight-Received: bytes of it that came already,
                               and X-Arclight-Busy while more are coming
    GET  /v1/blobs/<digest>    the blob, or the Range of it that is asked for
    PUT  /v1/blobs/<digest>    the blob, or with Content-Range the rest of it

All but the first, and joining, need ``Authorization: Bearer <session>``. What is refused is answered with ``{"error": text}``.
A digest is the right to read the blob: nobody can guess one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from arclight.fabric.extras import require
from arclight.federated.blobs.digests import checked
from arclight.federated.blobs.folder import FolderStore
from arclight.federated.errors import BlobError, FederatedError, LinkError, ProtocolError, RefusedError, SessionError
from arclight.federated.protocol import VERSION, Ask, Join, Secure, Wait, read
from arclight.federated.transports.bodies import Refusal
from arclight.federated.transports.guard import Guard
from arclight.federated.transports.receiving import PART, Uploads, whole_body
from arclight.federated.transports.settings import Limits

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

    from arclight.federated.transports.in_process import Answers

CHALLENGE = "x-arclight-challenge"
_RANGE = re.compile(r"bytes=(\d{1,15})-(\d{0,15})")
_BESIDES = 32
"""Threads for messages that are not held."""
_SOON = 1.0
_BRIEFLY = 0.05
"""Seconds that an ask takes beyond those that are held."""

log = logging.getLogger(__name__)


class App:
    """The requests that nodes make, answered for ``server``; `starlette` is the application."""

    def __init__(self, server: Answers, guard: Guard, limits: Limits, spool: FolderStore) -> None:
        self._server, self._guard, self._limits = server, guard, limits
        self._threads = ThreadPoolExecutor(limits.held + _BESIDES, thread_name_prefix="arclight-answers")
        self._files = ThreadPoolExecutor(8, thread_name_prefix="arclight-blobs")
        self._held = 0
        self._lock = threading.Lock()
        self._uploads = Uploads(server.blobs, spool, limits, self._files)

    def starlette(self) -> Starlette:
        routing = require("starlette.routing", extra="federated")
        applications = require("starlette.applications", extra="federated")
        blob = "/v1/blobs/{digest:path}"
        routes = [
            routing.Route("/v1/challenge", self._telling(self._challenge), methods=["GET"]),
            routing.Route("/v1/message", self._telling(self._message), methods=["POST"]),
            routing.Route(blob, self._telling(self._put), methods=["PUT"]),
            routing.Route(blob, self._telling(self._get), methods=["GET", "HEAD"]),
        ]
        made: Starlette = applications.Starlette(routes=routes)
        return made

    def close(self) -> None:
        self._uploads.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._files.shutdown(wait=False, cancel_futures=True)

    def _telling(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """What goes wrong becomes an answer that says so; a connection whose request was not read to its end is closed."""

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
        said = {"challenge": self._guard.challenge(), "version": VERSION, "run": self._guard.run}
        return _response(json.dumps(said), "application/json")

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
        if isinstance(message, Ask) or (isinstance(message, Secure) and message.wait > 0):
            return self._hold(message)
        answer = self._server.answer(message)
        if isinstance(message, Join):
            self._guard.joined(message, answer)
        return answer.to_json()

    def _hold(self, ask: Ask | Secure) -> str:
        with self._lock:
            full = self._held >= self._limits.held
            self._held += not full
        if full:
            return self._soon(ask)
        try:
            return self._server.answer(ask).to_json()
        finally:
            with self._lock:
                self._held -= 1

    def _soon(self, ask: Ask | Secure) -> str:
        """Give what there is, and hold nothing: who is held may wait for just those that are not."""
        answer = self._server.answer(replace(ask, wait=min(ask.wait, _BRIEFLY)))
        if isinstance(answer, Wait):
            answer = replace(answer, seconds=_SOON, about="other nodes: the server holds as many asks as it can")
        return answer.to_json()

    async def _put(self, request: Request) -> Response:
        token, digest = _token(request), _digest(request)
        taking = partial(self._server.taking, self._guard.node_of(token), token, digest)
        status = await self._uploads.receive(request, digest, taking)
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
        pieces = await loop.run_in_executor(self._files, partial(self._server.blobs.read, digest, start, stop - start))
        return _timely_stream(self._ahead(iter(pieces)), status, headers, self._limits)

    async def _ahead(self, pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
        """The pieces, the next of which is read while one is sent."""
        loop = asyncio.get_running_loop()
        coming = loop.run_in_executor(self._files, next, pieces, None)
        while (piece := await coming) is not None:
            coming = loop.run_in_executor(self._files, next, pieces, None)
            yield piece


def _timely_stream(pieces: AsyncIterator[bytes], status: int, headers: dict[str, str], limits: Limits) -> Response:
    """An answer of many pieces that is broken off if whoever asked for it does not take them in time."""
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

    made: Response = Timely(pieces, status, headers=headers, media_type="application/octet-stream")
    return made


def _token(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _digest(request: Request) -> str:
    try:
        return checked(request.path_params["digest"])
    except BlobError as error:
        raise Refusal(400, str(error)) from error


def _part(asked: str | None, size: int) -> tuple[int, int]:
    """First byte, and the one after the last, of what a Range header asks for."""
    if asked is None:
        return 0, size
    match = _RANGE.fullmatch(asked.strip())
    start = int(match[1]) if match else size
    stop = min(size, int(match[2]) + 1) if match and match[2] else size
    if start >= stop:
        raise Refusal(416, f"a blob of {size} bytes has no {asked[:100]!r}", {"content-range": f"bytes */{size}"})
    return start, stop


def _refused(request: Request, status: int, why: str, headers: dict[str, str] | None = None) -> Response:
    """An answer to a request that may not have been read to its end.

    The rest of a short one is passed over, so that whoever sends it comes to read the answer; after others the connection ends.
    """
    said = request.headers.get("content-length", "0" if request.method in ("GET", "HEAD") else "")
    short = status != 408 and said.isdigit() and int(said) <= PART
    ending = {} if short else {"connection": "close"}
    return _response(json.dumps({"error": why}), "application/json", status=status, headers=(headers or {}) | ending)


def _response(
    text: str, kind: str | None = None, *, status: int = 200, headers: dict[str, Any] | None = None
) -> Response:
    made: Response = require("starlette.responses", extra="federated").Response(
        text, status, headers=headers, media_type=kind
    )
    return made
