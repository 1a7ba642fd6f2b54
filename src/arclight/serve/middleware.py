"""ASGI middleware around every request: its identifier, metrics, security headers, access, answers to clients still sending."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from arclight.serve.admission import Refusal, busy
from arclight.serve.metrics import OTHER, Address, Metrics
from arclight.serve.request_log import HEADER, RequestLog, open_record
from arclight.serve.settings import is_loopback

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
REQUEST_ID = HEADER.lower().encode()


class Envelope:
    """Identifies and counts every request, adds the security headers, and turns a fault of ours into a 500 with one sentence.

    While the server drains, each answer closes its connection: none is left idle for a next request when the listener closes.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: Metrics,
        addresses: Mapping[str, Address],
        is_draining: Callable[[], bool],
        request_log: RequestLog | None = None,
    ) -> None:
        self.app = app
        self.metrics = metrics
        self.addresses = addresses
        self.is_draining = is_draining
        self.request_log = request_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        address = self.addresses.get(scope["path"], OTHER)
        record = open_record(scope, address.model)
        identifier = (REQUEST_ID, record.id.encode())
        begun, status, received, sent = time.perf_counter(), None, 0, 0
        self.metrics.received(address)

        async def receive_counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            return message

        async def send_counted(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
                self.metrics.answered(address, message["status"], time.perf_counter() - begun)
                self.metrics.ended(address)
                message["headers"] = [*message["headers"], *_SECURITY, identifier]  # no route sets any of them
                if self.is_draining():
                    MutableHeaders(scope=message)["Connection"] = "close"
            else:
                sent += len(message.get("body", b""))
            await send(message)

        try:
            await self.app(scope, receive_counted, send_counted)
        except Exception:
            log.exception("%s %s failed, request %s", scope["method"], address.path, record.id)
            if status is not None:
                raise
            refusal = Refusal(500, f"The server failed on this request; its log has the details under {record.id}.")
            await refusal.answer(scope, receive, send_counted)
        finally:
            if status is None:
                self.metrics.ended(address)
            if self.request_log is not None:
                route: str = getattr(scope.get("route"), "path", address.path)
                self.request_log.write(
                    record, method=scope["method"], route=route, status=status,
                    seconds=time.perf_counter() - begun, received=received, sent=sent,
                )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Access:
    """Rules on who may use a server."""

    loopback_only: bool = False
    """Whether the Host header must name loopback: a web page that points a name of its own at 127.0.0.1 sends that name.
    Origin, which browsers add to what pages send, must name it as well: other pages may not make this machine work."""
    keys: tuple[str, ...] = field(default=(), repr=False)
    """API keys, any of which a request must have; none: anybody may pass."""
    _digests: tuple[bytes, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_digests", tuple(hashlib.sha256(key.encode()).digest() for key in self.keys))

    def check(self, path: str, headers: Headers) -> int | None:
        """Return the place of a request's key among the keys; None where it needs none: health and the page may be asked by anybody.

        Raises Refusal for a request that may not pass.
        """
        if self.loopback_only:
            hosts = headers.getlist("host")
            if len(hosts) != 1 or not is_loopback(host_name(hosts[0])):
                raise Refusal(421, "This server answers on this machine only; use the Host localhost or 127.0.0.1.")
            origins = headers.getlist("origin")
            if not all(is_loopback(host_name(origin.partition("://")[2])) for origin in origins):
                raise Refusal(403, "This server answers no pages of other sites; send the request without an Origin.")
        if not self.keys or path in OPEN:
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(given.strip().encode()).digest()
        equal = [hmac.compare_digest(digest, one) for one in self._digests]  # all of them, and of one length
        if scheme.lower() != "bearer" or not any(equal):
            sentence = "The API key is missing or wrong; send the header Authorization: Bearer KEY."
            raise Refusal(401, sentence, headers={"WWW-Authenticate": "Bearer"})
        return equal.index(True)


class Rates:
    """Requests that each key may send: ``per_s`` on average, and what two seconds allow at once."""

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
"""What is answered without the key: health, and the page, which asks for the key itself."""


@lru_cache(maxsize=64)
def host_name(host: str) -> str:
    """Return the name or address in a Host header, without its port."""
    bracketed = re.fullmatch(r"\[([0-9A-Fa-f:.]+)\](:\d*)?", host)
    return bracketed[1] if bracketed else re.sub(r":\d*$", "", host).lower()


class Admittance:
    """Answers requests that the rules of access refuse, and those of keys that have sent too many."""

    def __init__(self, app: ASGIApp, *, access: Access, requests_per_s: float) -> None:
        self.app = app
        self.access = access
        self.rates = Rates(len(access.keys), requests_per_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._admit(scope["path"], Headers(scope=scope))
            except Refusal as refusal:
                await refusal.answer(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _admit(self, path: str, headers: Headers) -> None:
        """Raise Refusal for a request that may not pass, or not yet."""
        key = self.access.check(path, headers)
        if key is not None and (wait_s := self.rates.take(key)):
            raise busy("This API key has sent too many requests", max(1, math.ceil(wait_s)))


class Lingering:
    """Lets an answer that comes before the end of an upload (413, 429, 404) reach the client.

    Closing a socket that holds unread data resets the connection, and the reset may overtake the answer: the client
    would see a broken connection instead of the reason. So the answer is sent whole, and its end only after the rest
    of the upload has been read and dropped, or has paused for two seconds, or has used up ``linger_s``.
    """

    def __init__(self, app: ASGIApp, *, linger_s: float) -> None:
        self.app = app
        self.linger_s = linger_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        unread = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
        # A client that asks for permission to send (Expect: 100-continue) is silent until the body is asked for.
        sending = "expect" not in headers
        early = False

        async def watched_receive() -> Message:
            nonlocal unread, sending
            sending = True
            message = await receive()
            unread = message["type"] == "http.request" and message.get("more_body", False)
            return message

        async def lingering_send(message: Message) -> None:
            nonlocal early
            if message["type"] == "http.response.start" and unread:
                MutableHeaders(scope=message)["Connection"] = "close"
                early = sending
            if early and message["type"] == "http.response.body" and not message.get("more_body", False):
                await send({**message, "more_body": True})
                await drop_upload(receive, total_s=self.linger_s, idle_s=2.0)
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        await self.app(scope, watched_receive, lingering_send)


async def drop_upload(receive: Receive, *, total_s: float, idle_s: float) -> None:
    """Read the rest of a request body and keep nothing, until it ends or one of the deadlines passes."""
    try:
        async with asyncio.timeout(total_s):
            while True:
                async with asyncio.timeout(idle_s):  # wait_for could lose the outer deadline, see admission.read_body
                    message = await receive()
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return
