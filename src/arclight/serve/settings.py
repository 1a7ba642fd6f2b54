"""Define the limits of one server, and check its API keys and host.

`server`, `app` and `servable` take a `Limits`; `admission`, `middleware`, `models` and `tasks` read it. ``arclight serve`` makes a flag
``--limits.NAME`` of each field, with its docstring as help: names and units stay, defaults may change.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds on one request and on all requests together.

    A client beyond them gets a 4xx, or 503 for open connections and deadlines.
    """

    body_bytes: int = 25_000_000
    """Largest request body, bytes."""
    json_bytes: int = 5_000_000
    """Largest JSON in a request, bytes: reading 24 million short lists takes seconds. Send larger tensors as raw bytes after the JSON."""
    pixels: int = 50_000_000
    """Largest image, pixels; read from the file's header before anything is decoded."""
    codes: int = 40
    """Boxes of a photo in which a code is looked for, the surest first: an unreadable one may take half a second."""
    buffered_bytes: int = 200_000_000
    """Bodies held in memory at one time, bytes, over all clients."""
    workers: int = 2
    """Worker threads: requests, or batches of tensor requests, that are computed at the same time. Texts have a thread of their own."""
    threads: int = 0
    """CPU threads of one request to a program; 0: an equal share of the cores for each of ``requests``, or of ``workers`` if that number is not
    known (in OpenVINO all cores then). Language programs keep all cores, and programs that torch runs share its threads."""
    requests: int = 0
    """Requests that one program computes at once, each on an equal share of the cores, while others wait; 0: the number with the most requests
    per second, measured when an exported program is loaded, unless ``threads`` is given. Language programs compute all of theirs together."""
    queue: int = 16
    """Requests that may wait for a worker; the next one is answered 429."""
    refusal_s: float = 0.3
    """How long a client waits for a 429 where the queue for workers or the memory is full, seconds; its upload is dropped by then. A client that
    asks again at once would take the cores from those that are served."""
    batch: int = 16
    """Most rows of tensor requests that one call of a program computes. They are batched only if that is faster and changes no answer by more
    than 1e-4 of its largest element, both measured when the program is loaded; 1: each request by itself."""
    streams: int = 8
    """Texts that a language model generates at the same time; ``queue`` more wait for it."""
    prefix_cache_bytes: int = 200_000_000
    """KV caches of past prompts that each language model holds, bytes, so that prompts with the same beginning need not be read again;
    0: none, for clients that must not learn from the time of an answer what others have sent."""
    deadline_s: float = 10.0
    """Seconds after an upload has ended in which a worker must be free (else 429 or 503); codes of a photo not tried by then are named as such,
    and embeddings not begun by then are answered 503. Texts must be begun in as long after they were queued."""
    head_s: float = 10.0
    """Longest time until the end of a request's headers, seconds, from the connection or the first byte of a further request; over TLS, from
    the end of its handshake, which may take as long."""
    keep_alive_s: float = 5.0
    """How long a connection stays open between two requests, seconds; set it above that of a proxy or load balancer before the server."""
    body_idle_s: float = 10.0
    """Longest pause within an upload, seconds."""
    body_total_s: float = 60.0
    """Longest upload, seconds."""
    linger_s: float = 20.0
    """How long the rest of a refused upload is read and dropped, seconds, so that its sender gets to see the answer."""
    reader_stall_s: float = 60.0
    """How long a client may take nothing of an answer before its connection is closed, seconds (on Linux)."""
    connections: int = 512
    """Open connections; beyond them a client is answered 503."""
    reload_s: float = 2.0
    """Pause between looks at the programs' files, seconds; one that was replaced is loaded once its files are the same at two looks."""
    requests_per_s: float = 100.0
    """Requests per second that one API key may send on average, and twice as many at once; beyond them it is answered 429."""
    drain_s: float = 1.0
    """How long a server that has got SIGTERM still takes requests, unready, seconds: so that load balancers notice."""
    shutdown_s: float = 10.0
    """How long requests in progress may take to finish after the listener has closed, seconds."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not math.isfinite(value) or (type(field.default) is int and type(value) is not int):
                kind = "whole" if type(field.default) is int else "finite"
                raise ValueError(f"limits.{field.name} must be a {kind} number, not {value}")
            if value < 0 or (value == 0 and field.name not in ("queue", "threads", "requests", "prefix_cache_bytes")):
                raise ValueError(f"limits.{field.name} must be above 0, not {value}")
        if self.body_bytes > self.buffered_bytes:
            raise ValueError(
                f"limits.buffered_bytes ({self.buffered_bytes}) must hold at least one body of "
                f"limits.body_bytes ({self.body_bytes})"
            )
        if self.requests > self.workers:
            raise ValueError(
                f"limits.requests ({self.requests}) at once are more than limits.workers ({self.workers}) can work on: raise workers too"
            )


def check_keys(api_key: str | Sequence[str] | None) -> tuple[str, ...]:
    """Check API keys and return them.

    Raises ValueError for one that is easily guessed, and for none if some are meant.
    """
    keys = () if api_key is None else (api_key,) if isinstance(api_key, str) else tuple(api_key)
    for key in keys:
        if not re.fullmatch(r"[!-~]{16,}", key):
            raise ValueError(f"an API key needs at least 16 printable ASCII characters without blanks, not {len(key)}")
    if api_key is not None and not keys:
        raise ValueError("there is no API key: write one on each line")
    return keys


def is_loopback(host: str) -> bool:
    """Return True if only this machine reaches ``host``.

    Of names, only localhost counts as such.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
