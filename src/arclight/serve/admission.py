"""Admit or refuse requests: bounded bodies, few worker threads behind a short queue.

`app` reads bodies by `read_body` and runs requests by `Workers`; `models` and `tasks` keep times in a `LatencyWindow`. `app`, `middleware`
and `tasks` raise `Refusal`, whose JSON is OpenAI's on the paths of its API and ``{"error": sentence}`` elsewhere: clients read both, so both
stay.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import coroutine
from typing import Any, Protocol, TypeVar

from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from arclight.fabric.extras import require
from arclight.serve.request_log import record_of
from arclight.serve.settings import Limits

T = TypeVar("T")
TEXT = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings")
"""Paths of OpenAI's API with a body. Refusals here and below /v1/models have the form of that API (`failure`)."""


class Refusal(Exception):  # noqa: N818 (it is an answer, not a fault of ours)
    """Refusal of a request: a status other than 200, and a sentence for the client."""

    def __init__(self, status: int, sentence: str, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence
        self.headers = headers

    def response(self, scope: Scope) -> JSONResponse:
        """Return the response to the request of ``scope``, and note the sentence for its log.

        It has the form of the request's protocol.
        """
        record_of(scope).refused = self.sentence
        is_openai = scope["path"] in TEXT or scope["path"].startswith("/v1/models")
        content = failure(self) if is_openai else {"error": self.sentence}
        return JSONResponse(content, status_code=self.status, headers=self.headers)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""
        await self.response(scope)(scope, receive, send)


def failure(refusal: Refusal) -> dict[str, Any]:
    """Return a refusal as clients of OpenAI's API read it."""
    status = refusal.status
    kind = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": refusal.sentence, "type": kind, "param": None, "code": status}}


def one_sentence(error: Exception | str) -> str:
    """Format a message for a client: one line, a capital first and a full stop last."""
    text = " ".join(str(error).split())
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def busy(sentence: str, retry_after_s: int, status: int = 429) -> Refusal:
    """Return a refusal, with Retry-After, of a request that is fine but cannot be taken now.

    The server is full or stops, or the API key was used too often. ``status``: 429 or 503.
    """
    wait = "a second" if retry_after_s == 1 else f"{retry_after_s} seconds"
    return Refusal(
        status, f"{sentence}; send the request again in {wait}.", headers={"Retry-After": str(retry_after_s)}
    )


HeaderValues = Mapping[bytes, Sequence[bytes]]
"""Values of a request's headers by their names in lower case, in the order in which they were sent."""
_HEADERS = "arclight.headers"


def headers_of(scope: Scope) -> HeaderValues:
    """Return the headers of a request, grouped once."""
    found: dict[bytes, list[bytes]] | None = scope.get(_HEADERS)
    if found is None:
        scope[_HEADERS] = found = {}
        for name, value in scope["headers"]:
            found.setdefault(name, []).append(value)
    return found


IDENTITY, ZERO = [b"identity"], [b"0"]


class Buffered:
    """Bytes of all uploads held at one time; a client beyond the limit is refused for now."""

    def __init__(self, limit: int, retry_after_s: Callable[[], int]) -> None:
        self.limit = limit
        self.held = 0
        self._retry_after_s = retry_after_s

    def upload(self) -> Upload:
        """Open an empty body, whose bytes count until its block ends."""
        return Upload(self)

    def has_room(self, size_bytes: int) -> bool:
        """Return True if `hold` would count them."""
        return self.held + size_bytes <= self.limit

    def hold(self, size_bytes: int) -> None:
        """Count bytes until `release`; raises Refusal 429 if there is no room for them."""
        if not self.has_room(size_bytes):
            raise busy("Other uploads fill the server's memory", self._retry_after_s())
        self.held += size_bytes

    def release(self, size_bytes: int) -> None:
        """Count bytes no more."""
        self.held -= size_bytes


class Upload:
    """The body of a request as it arrives."""

    __slots__ = ("_buffered", "body")

    def __init__(self, buffered: Buffered) -> None:
        self.body = bytearray()
        self._buffered = buffered

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, *_: object) -> None:
        self._buffered.release(len(self.body))

    def append(self, piece: bytes) -> None:
        """Keep a piece; raises Refusal 429 if it does not fit into the server's memory."""
        self._buffered.hold(len(piece))
        self.body += piece


async def read_body(headers: HeaderValues, receive: Receive, upload: Upload, limits: Limits) -> None:
    """Fill ``upload`` from the network; raises Refusal 400, 408, 413, 415 or 429."""
    if headers.get(b"content-encoding", IDENTITY) != IDENTITY:
        raise Refusal(415, "The body is compressed; send it as it is, without Content-Encoding.")
    if int(headers.get(b"content-length", ZERO)[0]) > limits.body_bytes:
        raise _too_large(limits)
    deadline = time.monotonic() + limits.body_total_s
    more = True
    while more:
        try:
            message = await within(receive(), limits.body_idle_s, deadline)
        except TimeoutError:
            raise Refusal(408, "The upload stalled or took too long; send it again over a faster connection.") from None
        if message["type"] == "http.disconnect":
            raise Refusal(400, "The connection closed before the whole upload had arrived.")
        piece, more = message.get("body", b""), message.get("more_body", False)
        if len(upload.body) + len(piece) > limits.body_bytes:
            raise _too_large(limits)
        upload.append(piece)


async def within(arriving: Awaitable[T], timeout_s: float, deadline: float) -> T:
    """Return what arrives within ``timeout_s`` and before ``deadline``; raises TimeoutError.

    What is there already, as small bodies are, costs no timer.
    """
    steps = arriving.__await__()
    try:
        awaited = steps.send(None)
    except StopIteration as arrived:
        found: T = arrived.value
        return found
    # not wait_for, which in Python 3.11 may lose the cancellation when the server ends as a piece arrives
    async with asyncio.timeout(min(timeout_s, deadline - time.monotonic())):
        return await _resumed(steps, awaited)


@coroutine
def _resumed(steps: Generator[Any, Any, T], awaited: Any) -> Generator[Any, Any, T]:
    """Resume a coroutine that waits for ``awaited``."""
    try:
        while True:
            try:
                sent = yield awaited
            except GeneratorExit:
                steps.close()
                raise
            except BaseException as error:
                awaited = steps.throw(error)
            else:
                awaited = steps.send(sent)
    except StopIteration as ended:
        found: T = ended.value
        return found


def _too_large(limits: Limits) -> Refusal:
    return Refusal(413, f"The upload is larger than {size_text(limits.body_bytes)}; send less.")


def image_bytes(body: bytes, content_type: str, field: str = "file") -> bytes:
    """Return the image in a request body, raw or as ``field`` of a form; raises Refusal 400."""
    if content_type.partition(";")[0].strip().lower() == "multipart/form-data":
        body = file_field(body, content_type, field)
    if not body:
        raise Refusal(
            400, f"The request has no image; send the file's bytes as the body or as the form field {field!r}."
        )
    return body


MAX_FORM_PARTS = 16
# a client's mistakes are answered; without a handler, Python would print the parser's warnings of them
logging.getLogger("python_multipart").addHandler(logging.NullHandler())


def file_field(body: bytes, content_type: str, field: str) -> bytes:
    """Return the first file named ``field``; raises Refusal 400 for a malformed form, or none."""
    multipart = require("python_multipart.multipart", extra="serve")
    _, options = multipart.parse_options_header(content_type)
    found: list[bytes] = []
    parts = 0

    def keep(part: Any) -> None:
        nonlocal parts
        parts += 1
        if parts > MAX_FORM_PARTS:  # parsing is slow if every part is small
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


def size_text(count: int) -> str:
    """Return a size for people: ``25 MB``."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"


class Turn:
    """Deadline and presence of one request's client.

    Workers' threads read it.
    """

    def __init__(self, deadline_s: float) -> None:
        self.deadline = time.monotonic() + deadline_s
        self._client_left = False

    def leave(self) -> None:
        """Record that the client has left."""
        self._client_left = True

    @property
    def client_left(self) -> bool:
        """True if the client has left."""
        return self._client_left

    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def is_over(self) -> bool:
        return self._client_left or self.left_s() <= 0


class ServiceTimes:
    """Mean seconds that a request takes, by model; recent requests weigh more."""

    RECENT = 0.2
    """Weight of the newest request in the mean."""

    def __init__(self) -> None:
        self._mean_s: dict[str, float] = {}

    def add(self, model: str, seconds: float) -> None:
        mean = self._mean_s.setdefault(model, seconds)
        self._mean_s[model] = mean + self.RECENT * (seconds - mean)

    def of(self, model: str) -> float:
        """Return the mean; 0 for a model that has answered nothing yet."""
        return self._mean_s.get(model, 0.0)


class LatencyWindow:
    """Median latency of a model's newest small requests.

    Quick ones are computed on the event loop itself: for these a worker's thread costs more than the answer does, and under load it waits
    for Python's lock again and again.
    """

    QUICK_S = 0.001
    """Median seconds below which a request is computed on the loop, where it delays all others."""
    SMALL_BYTES = 16_384
    """Largest body of a small request, bytes."""
    RECENT = 5
    """Newest requests whose median counts, so that one that the machine delayed changes nothing."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=self.RECENT)
        self._median_s = math.inf

    def timed(self, work: Callable[[], T]) -> T:
        """Return the result of ``work()``, a small request, and note its time."""
        started = time.monotonic()
        try:
            return work()
        finally:
            self.add(time.monotonic() - started)

    def add(self, seconds: float) -> None:
        """Record the time of a request."""
        self._seconds.append(seconds)
        self._median_s = sorted(self._seconds)[len(self._seconds) // 2]

    def is_quick(self) -> bool:
        """Return True if the loop may compute the next one; False before any was timed."""
        return self._median_s < self.QUICK_S


class BatchExecutor(Protocol):
    """Compute several requests by one call, such as a batch of one program."""

    @property
    def rows(self) -> int:
        """Return the most rows of one call."""

    def rows_of(self, job: Any) -> int:
        """Return the number of rows of a request, as far as known before it is read; at least 1."""

    def run(self, jobs: Sequence[Any]) -> list[Any]:
        """Return a result or an exception for each; an error of one must leave the others alone."""


class _Entry:
    """A request that waits for a worker, or is worked on."""

    def __init__(self, model: str, work: Callable[[], Any], turn: Turn, together: BatchExecutor | None) -> None:
        loop = asyncio.get_running_loop()
        self.model, self.work, self.turn, self.together = model, work, turn, together
        self.begun: asyncio.Future[None] = loop.create_future()
        self.result: asyncio.Future[Any] = loop.create_future()


class Workers:
    """Thread pool of at most ``count`` workers with a queue of ``queue`` requests (FIFO).

    Waiting requests of one `BatchExecutor` share the worker that the first of them gets, as many as fit into one call.
    """

    def __init__(self, count: int, queue: int) -> None:
        self.count = count
        self.queue = queue
        self.times = ServiceTimes()
        self._held: Counter[str] = Counter()
        """Requests waiting or worked on, by model."""
        self._idle = count
        self._waiting: deque[_Entry] = deque()
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="arclight-serve")

    def wait_s(self) -> float:
        """Estimate the seconds until all requests that are here now have been answered."""
        return sum(number * self.times.of(model) for model, number in self._held.items()) / self.count

    def retry_after_s(self) -> int:
        """Return whole seconds, at least one, until the present requests will be answered."""
        return max(1, math.ceil(self.wait_s()))

    def run_here(self, model: str, work: Callable[[], T]) -> T:
        """Return the result of ``work()``, computed at once on the event loop's own thread.

        It takes no worker and no place in the queue.
        """
        started = time.monotonic()
        try:
            return work()
        finally:
            self.times.add(model, time.monotonic() - started)

    @property
    def has_idle(self) -> bool:
        """True if a request would begin at once."""
        return self._idle > 0

    async def run(
        self,
        model: str,
        work: Callable[[], T],
        *,
        turn: Turn,
        left: Callable[[], Awaitable[None]],
        together: BatchExecutor | None = None,
    ) -> T:
        """Return the result of ``work()``; raises Refusal 429 or 503 if no worker is free in time.

        ``left()`` ends when the client disconnects: its request gives up its place, or ``turn`` tells its work to stop.
        With ``together``, ``work`` is not called but passed to ``together.run``, with that of other waiting requests.
        """
        if not self._idle:
            if len(self._waiting) >= self.queue:
                raise busy("All workers are busy and the queue is full", self.retry_after_s())
            if self.wait_s() > turn.left_s():
                raise busy("The requests that wait already take longer than the deadline", self.retry_after_s())
        watch = asyncio.ensure_future(left())
        watch.add_done_callback(lambda _: None if watch.cancelled() else turn.leave())
        entry = _Entry(model, work, turn, together)
        self._held[model] += 1
        try:
            if self._idle:
                self._idle -= 1
                self._begin([entry])
            else:
                await self._wait(entry, watch)
            found: T = await entry.result
            return found
        except asyncio.CancelledError:  # the server ends
            turn.leave()
            raise
        finally:
            self._held[model] -= 1
            watch.cancel()
            entry.result.cancel()

    async def _wait(self, entry: _Entry, watch: asyncio.Future[None]) -> None:
        """Wait until a request starts, times out or loses its client; the latter two raise Refusal."""
        self._waiting.append(entry)
        try:
            await asyncio.wait({entry.begun, watch}, timeout=entry.turn.left_s(), return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                raise Refusal(400, "The connection closed before the request's turn came.")
            if not entry.begun.done():
                raise busy("No worker was free before the deadline", self.retry_after_s(), status=503)
        except BaseException:
            if not entry.begun.done():  # else the worker came at the same moment
                self._waiting.remove(entry)
            raise

    def _begin(self, entries: list[_Entry]) -> None:
        """Start to compute requests on the worker that was taken for them."""
        started = time.monotonic()
        running = asyncio.get_running_loop().run_in_executor(self._threads, _outcomes, entries)
        running.add_done_callback(lambda done: self._end(entries, done, time.monotonic() - started))
        for entry in entries:
            entry.begun.set_result(None)

    def _end(self, entries: list[_Entry], done: asyncio.Future[list[Any]], seconds: float) -> None:
        """Set the results of requests, and release their worker."""
        self._release()
        outcomes = [None] * len(entries) if done.cancelled() else done.result()
        for entry, outcome in zip(entries, outcomes, strict=True):
            if not entry.turn.client_left:  # else it may have been cut short
                self.times.add(entry.model, seconds / len(entries))
            if entry.result.done():  # nobody waits for it any more
                continue
            if done.cancelled():
                entry.result.cancel()
            elif isinstance(outcome, BaseException):
                entry.result.set_exception(outcome)
            else:
                entry.result.set_result(outcome)

    def _release(self) -> None:
        """Give a worker to the longest-waiting request, and to those batched with it."""
        if not self._waiting:
            self._idle += 1
            return
        first = self._waiting.popleft()
        entries = [first]
        if first.together is not None and first.together.rows > 1:
            entries += self._beside(first, first.together)
            for entry in entries[1:]:
                self._waiting.remove(entry)
        self._begin(entries)

    def _beside(self, first: _Entry, together: BatchExecutor) -> list[_Entry]:
        """Return the waiting requests that fit into one call with ``first``, in order.

        None is taken from behind one that does not fit.
        """
        left, found = together.rows - together.rows_of(first.work), []
        for entry in self._waiting:
            if entry.together is not together:
                continue
            left -= together.rows_of(entry.work)
            if left < 0:
                break
            found.append(entry)
        return found

    def close(self) -> None:
        """Wait for the work in progress, and end the threads."""
        self._threads.shutdown(wait=True, cancel_futures=True)


def _outcomes(entries: Sequence[_Entry]) -> list[Any]:
    """Return a result or an exception for each request, in a worker."""
    together = entries[0].together
    try:
        return [entries[0].work()] if together is None else together.run([entry.work for entry in entries])
    except BaseException as error:
        return [error] * len(entries)
