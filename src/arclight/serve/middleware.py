"""ASGI middleware around every request: metrics, security headers, answers to clients still sending."""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from arclight.serve.admission import Refusal

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


class Envelope:
    """Counts every answer, adds the security headers, and turns a fault of ours into a 500 with one sentence."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, paths: frozenset[str]) -> None:
        self.app = app
        self.metrics = metrics
        self.paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        # Addresses that clients make up must not become labels: each would stay in memory for good.
        path = scope["path"] if scope["path"] in self.paths else "other"
        begun, answered = time.perf_counter(), False
        in_flight = int(path == "/detect")
        self.metrics.in_flight += in_flight

        async def send_counted(message: Message) -> None:
            nonlocal answered, in_flight
            if message["type"] == "http.response.start":
                answered = True
                self.metrics.in_flight -= in_flight
                in_flight = 0
                self.metrics.answered(path, message["status"], time.perf_counter() - begun)
                MutableHeaders(scope=message).update(SECURITY_HEADERS)
            await send(message)

        try:
            await self.app(scope, receive, send_counted)
        except Exception:
            log.exception("%s %s failed", scope["method"], path)
            if answered:
                raise
            refusal = Refusal(500, "The server failed on this request; its log has the details.")
            await refusal.response()(scope, receive, send_counted)
        finally:
            self.metrics.in_flight -= in_flight


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
                async with asyncio.timeout(idle_s):  # wait_for could lose the outer deadline, see uploads.chunks
                    message = await receive()
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass
class Metrics:
    """Counters since the server started; only the event loop's thread writes them."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Answers by (path, status)."""
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    """Detections by latency: one count for each bound of BUCKETS_S, the last for everything slower."""
    seconds: float = 0.0
    in_flight: int = 0
    rejected: int = 0

    def answered(self, path: str, status: int, seconds: float) -> None:
        self.requests[path, status] += 1
        self.rejected += status == 429
        if path == "/detect":
            self.buckets[bisect_left(BUCKETS_S, seconds)] += 1
            self.seconds += seconds

    def exposition(self) -> str:
        lines = [*head("arclight_requests_total", "counter", "Answers sent, by path and status.")]
        for (path, status), count in sorted(self.requests.items()):
            lines.append(f'arclight_requests_total{{path="{path}",status="{status}"}} {count}')
        lines += head("arclight_detect_seconds", "histogram", "Time from request to answer of /detect.")
        total = 0
        for bound, count in zip((*BUCKETS_S, "+Inf"), self.buckets, strict=True):
            total += count
            lines.append(f'arclight_detect_seconds_bucket{{le="{bound}"}} {total}')
        lines += [f"arclight_detect_seconds_sum {self.seconds:.6f}", f"arclight_detect_seconds_count {total}"]
        lines += head("arclight_in_flight", "gauge", "Requests to /detect not answered yet.")
        lines.append(f"arclight_in_flight {self.in_flight}")
        lines += head("arclight_rejected_total", "counter", "Requests refused because the server was full (429).")
        lines.append(f"arclight_rejected_total {self.rejected}")
        return "\n".join(lines) + "\n"


def head(name: str, kind: str, help_text: str) -> tuple[str, str]:
    return f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"
