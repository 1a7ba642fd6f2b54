"""Read cameras, network streams and the screen in threads, reconnecting after a loss.

`image_source` calls `live_input` for what a user names, and reads all live inputs together by `LiveStreams`. Of each only the newest frame
is kept, or all of them. A live input ends when it is closed, when nothing has come for too long, or with the file behind its address.
What a text means (`live_input`), and that names hold no password, must stay.
"""

from __future__ import annotations

import importlib
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np

from arclight.fabric.extras import MissingExtraError, require
from arclight.vision.data.images import SUFFIXES, Image
from arclight.vision.inputs.memory_images import SourceError
from arclight.vision.inputs.reader_thread import ReaderThread

cv2 = require("cv2", extra="vision")
log = logging.getLogger(__name__)

SCHEMES = ("rtsp", "rtsps", "http", "https")

QUEUE_FRAMES = 32
"""Frames of one stream that wait if every frame is wanted; a full queue holds the stream's reader back."""
RECONNECT_S = 30.0
"""Seconds without a frame after which a stream is given up."""

_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.5, 10.0
_OPEN_TIMEOUT_S, _READ_TIMEOUT_S = 10.0, 5.0
_JOIN_TIMEOUT_S = 2.0
_SCREEN_PERIOD_S = 1 / 30
_POLL_S = 0.2
"""Seconds that a wait lasts between checks for an interrupt."""


class Capture(Protocol):
    """The part of OpenCV's VideoCapture that is used here."""

    def isOpened(self) -> bool: ...  # noqa: N802
    def grab(self) -> bool: ...
    def retrieve(self) -> tuple[bool, Any]: ...
    def get(self, which: int, /) -> float: ...
    def release(self) -> None: ...


@dataclass(frozen=True)
class LiveInput:
    """One camera, address or monitor, as a user named it."""

    name: str
    """Name in messages and results: an address without its password."""
    open: Callable[[], Capture]
    reconnects: bool = True
    """Whether opening is tried again if it fails at first; cameras, monitors and image files are there or not."""
    still: bool = False
    """Whether it is an image file, which has one frame; of an animation the first."""


def live_input(source: str | int) -> LiveInput | None:
    """Return the live input named by ``source``, or None if it names none.

    It is a camera (``0``), an address (``rtsp://...``), a monitor (``screen``, ``screen 2``) or a part of one (``screen 2 LEFT
    TOP WIDTH HEIGHT``, pixels from its corner). Raises SourceError for addresses of other schemes, MissingExtraError for the screen if
    mss is not installed.
    """
    if isinstance(source, int) or re.fullmatch(r"\d{1,3}", source):
        return LiveInput(f"camera {source}", lambda: cv2.VideoCapture(int(source)), reconnects=False)
    if screen := re.fullmatch(r"screen(?: (\d+))?(?: (\d+) (\d+) (\d+) (\d+))?", source):
        number, *part = screen.groups()
        return _screen(source, int(number or 0), [int(side) for side in part if side is not None])
    if "://" not in source:
        return None
    scheme = source.partition("://")[0].lower()
    if scheme not in SCHEMES:
        raise SourceError(
            f"{source} is not a source: addresses start with {', '.join(SCHEMES)}; give files by their path"
        )
    name = shown_address(source)
    still = scheme.startswith("http") and name.lower().endswith(SUFFIXES)
    return LiveInput(name, lambda: _open_address(source), reconnects=not still, still=still)


def shown_address(address: str) -> str:
    """Return an address without user, password and query, which often hold secrets."""
    try:
        parts = urlsplit(address)
    except ValueError as error:
        scheme = address.partition("://")[0]  # what follows may hold a password
        raise SourceError(f"the {scheme} address cannot be read ({error}): write it as {scheme}://host/path") from error
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _open_address(address: str) -> Capture:
    limits = {cv2.CAP_PROP_OPEN_TIMEOUT_MSEC: _OPEN_TIMEOUT_S, cv2.CAP_PROP_READ_TIMEOUT_MSEC: _READ_TIMEOUT_S}
    options = [number for which, seconds in limits.items() for number in (which, int(seconds * 1000))]
    capture: Capture = cv2.VideoCapture(address, cv2.CAP_FFMPEG, options)
    return capture


def _screen(name: str, monitor: int, part: list[int]) -> LiveInput:
    try:
        mss = importlib.import_module("mss")
    except ModuleNotFoundError as error:
        raise MissingExtraError("mss is not installed; the screen is read with it: pip install mss") from error
    return LiveInput(name, lambda: _ScreenCapture(mss.mss(), monitor, part), reconnects=False)


class _ScreenCapture:
    """A monitor as a capture; 0 is all monitors together.

    ``part``: left, top, width and height of what is read; empty for all of it.
    """

    def __init__(self, grabber: Any, monitor: int, part: list[int]) -> None:
        self.grabber, self.monitor, self.part = grabber, monitor, part

    def isOpened(self) -> bool:  # noqa: N802
        if self.monitor >= len(self.grabber.monitors):
            return False
        if not self.part:
            return True
        left, top, width, height = self.part
        whole = self.grabber.monitors[self.monitor]
        return bool(0 < width <= whole["width"] - left and 0 < height <= whole["height"] - top)

    def grab(self) -> bool:
        time.sleep(_SCREEN_PERIOD_S)  # a screen gives as many pictures as one takes
        return True

    def retrieve(self) -> tuple[bool, Any]:
        area = self.grabber.monitors[self.monitor]
        if self.part:
            left, top, width, height = self.part
            area = {"left": area["left"] + left, "top": area["top"] + top, "width": width, "height": height}
        bgra = np.asarray(self.grabber.grab(area))
        return True, np.ascontiguousarray(bgra[..., :3])

    def get(self, which: int, /) -> float:
        return 0.0

    def release(self) -> None:
        self.grabber.close()


@dataclass(frozen=True)
class LiveFrame:
    """One frame of a live input."""

    name: str
    index: int
    """Number among the frames that the input gave, from 0; those that were dropped leave gaps."""
    fps: float
    """Frames per second that the input promises; 0 where it promises none."""
    image: Image


class _Reader:
    """Reader of one live input, with its waiting frames.

    ``ready`` is the condition that all readers share.
    """

    def __init__(
        self, source: LiveInput, ready: threading.Condition, *, vid_stride: int, every_frame: bool, reconnect_s: float,
        max_pixels: int,
    ) -> None:  # fmt: skip
        self.source, self.ready = source, ready
        self.vid_stride, self.every_frame = vid_stride, every_frame
        self.reconnect_s, self.max_pixels = reconnect_s, max_pixels
        self.waiting: deque[LiveFrame] = deque()
        self.closing = False
        self.ended = False
        self.failure: str | None = None
        """Why it ended, if it should not have."""
        self._index = 0
        self.thread = ReaderThread(self._run, f"arclight-{source.name}", end=self.close)

    def close(self) -> None:
        """Stop the thread after its present frame."""
        with self.ready:
            self.closing = True
            self.ready.notify_all()

    def _run(self) -> None:
        try:
            self._read_until_lost()
        except Exception as error:  # told to the consumer, which raises it
            self.failure = f"{self.source.name}: {error}"
        finally:
            with self.ready:
                self.ended = True
                self.ready.notify_all()

    def _read_until_lost(self) -> None:
        delay, last_s = _FIRST_DELAY_S, time.monotonic()
        while not self.closing:
            before = self._index
            if self._read_connected():
                return
            if self._index > before:
                delay, last_s = _FIRST_DELAY_S, time.monotonic()
            what = "was cut" if self._index else "cannot be opened"
            if not self._index and not self.source.reconnects:
                state = "an image" if self.source.still else "used by no other program"
                self.failure = f"{self.source.name} {what}: is it there, and {state}?"
                return
            if time.monotonic() - last_s + delay > self.reconnect_s:
                self.failure = f"{self.source.name} {what}, and no frame came for {self.reconnect_s:g} s: is it on, and named rightly?"
                return
            if self.closing:
                return
            log.warning("%s %s; trying again in %g s", self.source.name, what, delay)
            with self.ready:
                self.ready.wait_for(lambda: self.closing, timeout=delay)
            delay = min(2 * delay, _LONGEST_DELAY_S)

    def _read_connected(self) -> bool:
        """Read frames until the input ends (True) or the connection does (False)."""
        capture = self.source.open()
        try:
            if not capture.isOpened():
                return False
            fps, promised = capture.get(cv2.CAP_PROP_FPS), capture.get(cv2.CAP_PROP_FRAME_COUNT)
            first = self._index
            while not self.closing and capture.grab():
                if (self._index - first) % self.vid_stride == 0:
                    decoded, frame = capture.retrieve()
                    if decoded:
                        self._put(fps, frame)
                    elif self.source.still:
                        raise SourceError("not an image that can be read")
                self._index += 1
                if self.source.still:
                    return True
            read = self._index - first
            return promised > 0 and read > 0 and read >= promised - max(2, promised // 50)  # a file at an address
        finally:
            capture.release()

    def _put(self, fps: float, frame: Any) -> None:
        if frame.shape[0] * frame.shape[1] > self.max_pixels:
            raise SourceError(f"frames of {frame.shape[0] * frame.shape[1] / 1e6:.1f} million pixels are too large")
        image = cv2.cvtColor(frame, cv2.COLOR_BGR2RGB)
        with self.ready:
            if self.every_frame:
                self.ready.wait_for(lambda: self.closing or len(self.waiting) < QUEUE_FRAMES)
            else:
                self.waiting.clear()
            self.waiting.append(LiveFrame(self.source.name, self._index, fps, image))
            self.ready.notify_all()


class LiveStreams:
    """Several live inputs, read together while it is open; `batches` yields their frames.

    ``every_frame``: keep all frames, with a bounded queue that holds the reader back (a live camera then drops frames at its own
    end); else only the newest of each input waits. An input without a frame for ``reconnect_s``, or one that cannot be read, is given
    up, and its name handed to ``problem`` with a sentence. `batches` raises SourceError at the end if every input was given up.
    """

    def __init__(
        self, inputs: list[LiveInput], *, problem: Callable[[str, str], None], max_pixels: int, vid_stride: int = 1,
        every_frame: bool = False, reconnect_s: float = RECONNECT_S,
    ) -> None:  # fmt: skip
        self.problem = problem
        self._ready = threading.Condition()
        self._readers = [
            _Reader(
                source, self._ready, vid_stride=vid_stride, every_frame=every_frame, reconnect_s=reconnect_s,
                max_pixels=max_pixels,
            )
            for source in inputs
        ]  # fmt: skip

    def __enter__(self) -> LiveStreams:
        for reader in self._readers:
            reader.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for reader in self._readers:
            reader.close()
        deadline = time.monotonic() + _JOIN_TIMEOUT_S
        for reader in self._readers:
            reader.thread.join(max(0.0, deadline - time.monotonic()))  # one that waits for its network ends by itself

    def batches(self, size: int, stopped: Callable[[], bool]) -> Iterator[list[LiveFrame]]:
        """Yield lists of the frames that wait, at most ``size``, until ``stopped``.

        Each list has at least one frame, and takes one of each input in turn.
        """
        failures: list[str] = []
        inputs = len(self._readers)
        while self._readers and not stopped():
            frames = self._take(size, stopped)
            for reader in [reader for reader in self._readers if reader.ended and not reader.waiting]:
                self._readers.remove(reader)
                if reader.failure is not None:
                    failures.append(reader.failure)
                    self.problem(reader.source.name, reader.failure)
            if frames:
                yield frames
        if failures and len(failures) == inputs:
            raise SourceError(failures[-1])

    def _take(self, size: int, stopped: Callable[[], bool]) -> list[LiveFrame]:
        frames: list[LiveFrame] = []
        with self._ready:
            while not (stopped() or any(reader.waiting or reader.ended for reader in self._readers)):
                self._ready.wait(_POLL_S)
            while len(frames) < size and (full := [reader for reader in self._readers if reader.waiting]):
                for reader in full[: size - len(frames)]:
                    frames.append(reader.waiting.popleft())
            # whoever was served goes behind the others, so that none starves where inputs are more than ``size``
            served = {frame.name for frame in frames}
            self._readers.sort(key=lambda reader: reader.source.name in served)
            self._ready.notify_all()
        return frames
