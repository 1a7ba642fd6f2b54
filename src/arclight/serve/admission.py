"""Admit or refuse requests: bounded bodies, few worker threads behind a short queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from arclight.fabric.extras import require
from arclight.serve.settings import Limits


class Refusal(Exception):  # noqa: N818 (it is an answer, not a fault of ours)
    """An answer other than 200, with the sentence for the client."""

    def __init__(self, status: int, sentence: str, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence
        self.headers = headers

    def response(self) -> JSONResponse:
        return JSONResponse({"error": self.sentence}, status_code=self.status, headers=self.headers)


def one_sentence(error: Exception) -> str:
    """Format an error's message for a client: one line, a capital first and a full stop last."""
    text = " ".join(str(error).split())
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def busy(sentence: str) -> Refusal:
    """Make a 429: the request is fine, the server is full; the client may come back in a second."""
    return Refusal(429, sentence, headers={"Retry-After": "1"})


MOST_FORM_PARTS = 16


class Buffered:
    """Bytes of all uploads held at one time; a client beyond the limit is refused for now."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0

    @contextmanager
    def upload(self) -> Iterator[bytearray]:
        """Open an empty body to ``append`` to; its bytes count until the block ends."""
        body = bytearray()
        try:
            yield body
        finally:
            self.held -= len(body)

    def append(self, body: bytearray, chunk: bytes) -> None:
        if self.held + len(chunk) > self.limit:
            raise busy("Other uploads fill the server's memory; send the photo again in a moment.")
        self.held += len(chunk)
        body += chunk


async def read_body(request: Request, body: bytearray, buffered: Buffered, limits: Limits) -> None:
    """Fill ``body`` from the network; raises Refusal 400, 408, 413, 415 or 429."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise Refusal(415, "The body is compressed; send the image file itself, without Content-Encoding.")
    too_large = Refusal(413, f"The upload is larger than {in_words(limits.body_bytes)}; send a smaller photo.")
    if int(request.headers.get("content-length", 0)) > limits.body_bytes:
        raise too_large
    try:
        async with asyncio.timeout(limits.body_total_s):
            async for chunk in chunks(request, limits.body_idle_s):
                if len(body) + len(chunk) > limits.body_bytes:
                    raise too_large
                buffered.append(body, chunk)
    except TimeoutError:
        raise Refusal(
            408, "The upload stalled or took too long; send the photo again over a faster connection."
        ) from None
    except ClientDisconnect:
        raise Refusal(400, "The connection closed before the whole photo had arrived.") from None


async def chunks(request: Request, idle_s: float) -> AsyncIterator[bytes]:
    """Pieces of the body as they arrive; raises TimeoutError when none comes for ``idle_s``."""
    stream = request.stream()
    while True:
        try:
            # not wait_for: in Python 3.11 it loses a cancellation, such as that of the total deadline, which comes
            # at the same moment as a piece, and a client that sends byte by byte could then go on for ever
            async with asyncio.timeout(idle_s):
                piece = await anext(stream)
        except StopAsyncIteration:
            return
        yield piece


def image_bytes(body: bytes, content_type: str, field: str = "file") -> bytes:
    """Return the image in a request body, raw or as ``field`` of a form; raises Refusal 400."""
    if content_type.partition(";")[0].strip().lower() == "multipart/form-data":
        body = file_field(body, content_type, field)
    if not body:
        raise Refusal(
            400, f"The request has no image; send the file's bytes as the body or as the form field {field!r}."
        )
    return body


def file_field(body: bytes, content_type: str, field: str) -> bytes:
    """Return the first file named ``field``; raises Refusal 400 for a malformed form, or none."""
    multipart = require("python_multipart.multipart", extra="serve")
    _, options = multipart.parse_options_header(content_type)
    found: list[bytes] = []
    parts = 0

    def keep(part: Any) -> None:
        nonlocal parts
        parts += 1
        if parts > MOST_FORM_PARTS:  # parsing is slow where every part is small
            raise Refusal(400, f"The form has too many fields; send one file in the form field {field!r}.")
        if part.field_name == field.encode() and isinstance(part, multipart.File):
            part.file_object.seek(0)
            found.append(part.file_object.read())

    config = {"MAX_MEMORY_FILE_SIZE": len(body) + 1}  # else large files go to the disk
    try:
        parser = multipart.FormParser(
            "multipart/form-data", keep, keep, boundary=options.get(b"boundary"), config=config
        )
        parser.write(body)
        parser.finalize()
    except multipart.FormParserError:
        raise Refusal(400, f"The multipart form is malformed; send one file in the form field {field!r}.") from None
    if not found:
        raise Refusal(400, f"The form has no file in the field {field!r}; put the photo there.")
    return found[0]


def in_words(count: int) -> str:
    """Return a size for people: ``25 MB``."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"


T = TypeVar("T")


class Workers:
    """Runs blocking functions in at most ``count`` threads with at most ``queue`` callers waiting."""

    def __init__(self, count: int, queue: int) -> None:
        self.queue = queue
        self.waiting = 0
        self._free = asyncio.Semaphore(count)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="arclight-serve")

    async def run(self, work: Callable[[], T], *, abandoned: Callable[[], Awaitable[bool]]) -> T:
        """Return the result of ``work()``; raises Refusal 429 when the queue is full.

        ``abandoned`` is asked when a worker becomes free: work whose client has left is not done.
        """
        if self._free.locked() and self.waiting >= self.queue:
            raise busy("All workers are busy and the queue is full; send the photo again in a moment.")
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        try:
            if await abandoned():
                raise Refusal(400, "The connection closed before the photo's turn came.")
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._free.release()

    def close(self) -> None:
        """Wait for running work; drop what has not begun."""
        self._threads.shutdown(wait=True, cancel_futures=True)
