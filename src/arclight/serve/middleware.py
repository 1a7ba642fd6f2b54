"""Wrap requests in ASGI middleware: identifier, metrics, security headers, access.

`app` makes one `Front` around its endpoints, with an `Access` of its own, of `server` or of `servable`. Names of headers are public and stay.

A small tensor request that has come whole, to a fast model whose batches pay, goes through `Front.take`, the endpoint of its path
(`app.TensorEndpoint.add`), `batching.Batcher` and `Exchange.write`, without a task. Any other tensor request goes through `Front.answer` to
its endpoint, and all other requests through FastAPI's middleware and `Front.answer` to their routes.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from arclight.serve.admission import HeaderValues, Refusal, busy, headers_of
from arclight.serve.metrics import OTHER, Metrics, RouteLabels
from arclight.serve.protocol import WRITE, Write
from arclight.serve.request_log import HEADER, RequestLog, open_record
from arclight.serve.settings import Limits, is_loopback

log = logging.getLogger("arclight.serve")

SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; media-src blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(self), microphone=(), geolocation=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


_SECURITY = [(name.lower().encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]
_SECURITY_LINES = b"".join(b"%b: %b\r\n" % pair for pair in _SECURITY)
REQUEST_ID = HEADER.lower().encode()


class Front:
    """ASGI entry of the server: identifies, counts, logs and admits every HTTP request.

    It adds security headers, too. POST requests to a path of ``direct`` go straight to its endpoint, all others
    through the application of FastAPI, whose work around a request costs several times that of a small program. An
    unexpected error is logged and answered by a 500 with one sentence.
    """

    def __init__(
        self,
        *,
        direct: Mapping[str, Endpoint],
        access: Access,
        limits: Limits,
        metrics: Metrics,
        route_labels: Mapping[str, RouteLabels],
        is_draining: Callable[[], bool],
        request_log: RequestLog | None = None,
    ) -> None:
        self.direct = direct
        self.access = access
        self.rates = Rates(len(access.keys), limits.requests_per_s)
        self.linger_s = limits.linger_s
        self.metrics = metrics
        self.route_labels = route_labels
        self.is_draining = is_draining
        self.request_log = request_log

    def around(self, app: ASGIApp) -> ASGIApp:
        """Return ASGI middleware: `answer`, with ``app`` for requests without an endpoint."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                scope.pop(WRITE, None)  # it would pass over middleware outside of this, which may change what is sent
                await self.answer(scope, receive, send, app)
            else:
                await app(scope, receive, send)

        return answer

    def endpoint(self, scope: Scope) -> Endpoint | None:
        """Return what answers a request directly; None if the application does."""
        return self.direct.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None

    async def answer(self, scope: Scope, receive: Receive, send: Send, app: ASGIApp | None = None) -> None:
        """Answer a request by `endpoint`, or by ``app`` if given."""
        exchange = Exchange(self, scope, receive, send)

        async def work() -> None:
            self._admit(scope["path"], exchange.headers)
            exchange.is_admitted = True
            endpoint = self.endpoint(scope)
            if endpoint is not None:
                await endpoint(exchange)
            elif app is not None:
                await app(scope, exchange.receive, exchange.send)

        await self._complete(exchange, work())

    def take(self, scope: Scope, body: bytes, by_task: Callable[[ASGIApp], None]) -> bool:
        """Answer a quick request without a task; see `protocol.Take`."""
        endpoint, headers = self.endpoint(scope), headers_of(scope)
        if endpoint is None or self.is_draining() or not endpoint.is_quick(headers, len(body)):
            return False
        try:
            self._admit(scope["path"], headers)
        except Refusal:  # a task sends it
            return False
        exchange = Exchange(self, scope, _ended, _ended)
        exchange.is_admitted = True
        exchange.keep(body)

        def finish(outcome: Outcome) -> None:
            if isinstance(outcome, Exception) or not exchange.write(*outcome):
                by_task(partial(self._conclude, exchange, outcome))
            else:
                exchange.end()

        try:
            endpoint.add(exchange, body, finish)
        except Exception as error:  # else the parser would tell the client that its request is invalid
            finish(error)
        return True

    async def _conclude(self, exchange: Exchange, outcome: Outcome, scope: Scope, receive: Receive, send: Send) -> None:
        """Send an outcome that `take` could not: an application of ASGI."""
        exchange.connect(receive, send)

        async def work() -> None:
            if isinstance(outcome, Exception):
                raise outcome
            await exchange.answer(*outcome)

        await self._complete(exchange, work())

    async def _complete(self, exchange: Exchange, work: Awaitable[None]) -> None:
        """Wait for the end of a request's work; answer its errors, and that the server ends."""
        try:
            await work
        except Refusal as refusal:
            await refusal.answer(exchange.scope, exchange.receive, exchange.send)
        except asyncio.CancelledError:  # the server ends, and uvicorn would call it an error of the application
            if exchange.status is not None:
                raise
            stopping = busy("The server stops", 1, status=503)
            with suppress(asyncio.CancelledError):  # again, as the loop ends while this lingers
                await stopping.answer(exchange.scope, exchange.receive, exchange.send)
        except Exception:
            request_id = exchange.record.id
            log.exception("%s %s failed, request %s", exchange.scope["method"], exchange.labels.path, request_id)
            if exchange.status is not None:
                raise
            fault = Refusal(500, f"The server failed on this request; its log has the details under {request_id}.")
            await fault.answer(exchange.scope, exchange.receive, exchange.send)
        finally:
            exchange.end()

    def _admit(self, path: str, headers: HeaderValues) -> None:
        """Raise Refusal for a request that may not pass, or not yet."""
        key = self.access.check(path, headers)
        if key is not None and (wait_s := self.rates.take(key)):
            raise busy("This API key has sent too many requests", max(1, math.ceil(wait_s)))


class Exchange:
    """One request and its answer: ASGI's `receive` and `send`, counted, with headers added.

    While the server drains, each answer closes its connection, so that none is idle when the listener closes.

    An answer before the end of an upload (such as 404, 413 or 429) lingers. Closing a socket with unread data resets the connection, and the
    reset may overtake the answer: the client would see a broken connection in place of the reason. So the answer's end is sent only after the
    rest of the upload has been read and dropped, has paused for two seconds, or has taken ``linger_s``.
    """

    __slots__ = (
        "_begun", "_front", "_is_sending", "_is_unread", "_lingers", "_receive", "_received", "_send", "_sent", "headers", "is_admitted", "labels",
        "record", "scope", "status",
    )  # fmt: skip

    def __init__(self, front: Front, scope: Scope, receive: Receive, send: Send) -> None:
        self._begun = time.perf_counter()
        self.labels = labels = front.route_labels.get(scope["path"], OTHER)
        self.scope, self.headers = scope, headers_of(scope)
        self.record = open_record(scope, self.headers.get(REQUEST_ID, ()), labels.model)
        self.status: int | None = None
        """Status of the answer once it has begun."""
        self.is_admitted = False
        """Whether the client may send this request now, so that only a full server refuses it by a 429."""
        self._front, self._receive, self._send = front, receive, send
        self._received = self._sent = 0
        self._is_unread = b"transfer-encoding" in self.headers or self.headers.get(b"content-length", [b"0"]) != [b"0"]
        # A client that asks for permission to send (Expect: 100-continue) is silent until the body is asked for.
        self._is_sending = b"expect" not in self.headers
        self._lingers = False
        front.metrics.received(labels)

    async def receive(self) -> Message:
        """Return the next piece of the request."""
        self._is_sending = True
        message = await self._receive()
        self._received += len(message.get("body", b""))
        self._is_unread = message["type"] == "http.request" and message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """Send a piece of the answer."""
        if message["type"] == "http.response.start":
            message = self._started(message)
        else:
            self._sent += len(message.get("body", b""))
            if self._lingers and not message.get("more_body", False):
                await self._send({**message, "more_body": True})
                message = {"type": "http.response.body", "body": b"", "more_body": False}
                try:
                    await drop_upload(self.receive, total_s=self._front.linger_s, idle_s=2.0)
                except asyncio.CancelledError:  # the server ends
                    await self._send(message)
                    raise
        await self._send(message)

    async def answer(self, content: bytes, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Send an answer of status 200."""
        if self.write(content, headers):
            return
        length = (b"content-length", b"%d" % len(content))
        await self.send({"type": "http.response.start", "status": 200, "headers": [*headers, length]})
        await self.send({"type": "http.response.body", "body": content})

    def write(self, content: bytes, headers: Sequence[tuple[bytes, bytes]]) -> bool:
        """Send a 200 response by one call of the protocol; return False if that cannot.

        Then nothing was sent; see `protocol.Write`.
        """
        write: Write | None = self.scope.get(WRITE)
        if write is None or self._is_unread or self._front.is_draining():
            return False
        lines = b"".join([b"%b: %b\r\n" % pair for pair in headers])
        if not write(
            self.scope, b"%b%bx-request-id: %b\r\n" % (lines, _SECURITY_LINES, self.record.id.encode()), content
        ):
            return False
        self._count(200)
        self._sent = len(content)
        return True

    def keep(self, body: bytes) -> None:
        """Count the bytes of a body that came whole."""
        self._received, self._is_unread = len(body), False

    def connect(self, receive: Receive, send: Send) -> None:
        """Continue with ``receive`` and ``send``."""
        self._receive, self._send = receive, send

    def _started(self, message: Message) -> Message:
        """Count an answer whose head is sent; return the head with the headers of the server."""
        self._count(message["status"])
        headers = [*message["headers"], *_SECURITY, (REQUEST_ID, self.record.id.encode())]  # no route sets any of them
        self._lingers = self._is_unread and self._is_sending
        if self._is_unread or self._front.is_draining():
            headers = [(name, value) for name, value in headers if name != b"connection"] + [(b"connection", b"close")]
        return {**message, "headers": headers}

    def _count(self, status: int) -> None:
        self.status = status
        seconds = time.perf_counter() - self._begun
        self._front.metrics.answered(self.labels, status, seconds, admitted=self.is_admitted)

    def end(self) -> None:
        """Count and log the request, which is over."""
        front, scope = self._front, self.scope
        if self.status is None:
            front.metrics.finish(self.labels)
        if front.request_log is not None:
            route: str = getattr(scope.get("route"), "path", self.labels.path)
            front.request_log.write(
                self.record, method=scope["method"], route=route, status=self.status,
                seconds=time.perf_counter() - self._begun, received=self._received, sent=self._sent,
            )  # fmt: skip


async def _ended(*_: Any) -> Any:
    raise RuntimeError("a request that was taken without a task has no messages")


Outcome = tuple[bytes, Sequence[tuple[bytes, bytes]]] | Exception
"""Content and headers of an answer of status 200, or why there is none."""


class Endpoint(Protocol):
    """Answer the requests to one path."""

    async def __call__(self, exchange: Exchange) -> None:
        """Answer a request; raises Refusal."""

    def is_quick(self, headers: HeaderValues, size_bytes: int) -> bool:
        """Return True if `add` may take a request whose body has come whole."""

    def add(self, exchange: Exchange, body: bytes, on_done: Callable[[Outcome], None]) -> None:
        """Compute an answer soon, and give it to ``on_done``."""


async def drop_upload(receive: Receive, *, total_s: float, idle_s: float) -> None:
    """Read and discard the rest of a request body, until it ends or a deadline passes."""
    try:
        async with asyncio.timeout(total_s):
            while True:
                async with asyncio.timeout(idle_s):  # wait_for could lose the outer deadline, see admission.read_body
                    message = await receive()
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return


@dataclass(frozen=True, kw_only=True)
class Access:
    """Check who may use a server: Host and Origin, and API keys."""

    loopback_only: bool = False
    """Whether the Host header must name loopback: a web page that points a name of its own at 127.0.0.1 sends that name.
    An Origin header, which browsers add to what pages send, must name loopback as well."""
    keys: tuple[str, ...] = field(default=(), repr=False)
    """API keys, one of which a request must have; empty: none is needed."""
    _digests: tuple[bytes, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_digests", tuple(hashlib.sha256(key.encode()).digest() for key in self.keys))

    def check(self, path: str, headers: HeaderValues) -> int | None:
        """Check access; return the index of the request's key, or None if it needs none.

        Health and the page (`OPEN`) need no key. Raises Refusal 401, 403 or 421 for a request that may not pass.
        """
        if self.loopback_only:
            hosts = headers.get(b"host", ())
            if len(hosts) != 1 or not names_loopback(hosts[0]):
                raise Refusal(421, "This server answers on this machine only; use the Host localhost or 127.0.0.1.")
            origins = headers.get(b"origin", ())
            if not all(names_loopback(origin.partition(b"://")[2]) for origin in origins):
                raise Refusal(403, "This server answers no pages of other sites; send the request without an Origin.")
        if not self.keys or path in OPEN:
            return None
        scheme, _, given = headers.get(b"authorization", (b"",))[0].partition(b" ")
        digest = hashlib.sha256(given.strip()).digest()
        equal = [hmac.compare_digest(digest, one) for one in self._digests]  # all of them, and of one length
        if scheme.lower() != b"bearer" or not any(equal):
            sentence = "The API key is missing or wrong; send the header Authorization: Bearer KEY."
            raise Refusal(401, sentence, headers={"WWW-Authenticate": "Bearer"})
        return equal.index(True)


class Rates:
    """Limit each key's requests: ``per_s`` on average, twice as many at once (token bucket)."""

    def __init__(self, keys: int, per_s: float) -> None:
        self.per_s = per_s
        self._most = max(1.0, 2 * per_s)
        self._left = [self._most] * keys
        self._seen_s = [time.monotonic()] * keys

    def take(self, key: int) -> float:
        """Count a request; return 0, or the seconds after which it would pass."""
        now = time.monotonic()
        left = min(self._most, self._left[key] + (now - self._seen_s[key]) * self.per_s)
        self._seen_s[key] = now
        self._left[key] = left - 1 if left >= 1 else left
        return 0.0 if left >= 1 else (1 - left) / self.per_s


PAGE = Path(__file__).parent / "page"
OPEN = {"/health", "/v2/health/live", "/v2/health/ready", "/"} | {
    f"/{file.relative_to(PAGE).as_posix()}" for file in PAGE.rglob("*") if file.is_file()
}
"""Paths that need no key: health, and the page, which asks for the key itself."""


@lru_cache(maxsize=64)  # every request names its host
def names_loopback(host: bytes) -> bool:
    """Return True if a Host header, with or without a port, names this machine."""
    return is_loopback(host_name(host.decode("latin-1")))


def host_name(host: str) -> str:
    """Return the name or address in a Host header, without its port."""
    bracketed = re.fullmatch(r"\[([0-9A-Fa-f:.]+)\](:\d*)?", host)
    return bracketed[1] if bracketed else re.sub(r":\d*$", "", host).lower()
