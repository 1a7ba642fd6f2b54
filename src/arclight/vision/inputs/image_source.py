"""Iterate over images for prediction: files, memory, stdin, videos, cameras and streams.

``arclight predict``, ``arclight scan``, `Detector.track` and ``tracking.tracks`` iterate over an `ImageSource`. In: a path, pattern, address,
camera number or images; out: `Frame` objects. A new kind of source goes into `_expand`; what an existing text means must stay.
"""

from __future__ import annotations

import glob
import itertools
import logging
import queue
import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from arclight.fabric.extras import require
from arclight.vision.data.data_yaml import did_you_mean
from arclight.vision.data.images import MAX_PIXELS, SUFFIXES, Image, ImageError, decode_image
from arclight.vision.data.labels import FileProblem
from arclight.vision.inputs.live import RECONNECT_S, LiveInput, LiveStreams, live_input
from arclight.vision.inputs.memory_images import (
    SourceError,
    checked_array,
    is_pil,
    is_tensor,
    memory_image,
    tensor_images,
)
from arclight.vision.inputs.reader_thread import ReaderThread

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image as PILImage

cv2 = require("cv2", extra="vision")
log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_FPS = 1000
"""A higher number in a stream's header is the resolution of its clock, not a frame rate."""

VIDEO_SUFFIXES = (".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".mpg", ".mpeg", ".wmv", ".asf", ".ts")

_HEAD_BYTES = 4096
_ASF = bytes.fromhex("3026b2758e66cf11")
_TS_PACKET = 188
_QUICKTIME = (b"ftyp", b"moov", b"mdat", b"free", b"wide", b"skip", b"pnot")
_TEXT_FORMATS = (b"#ext", b"<mpd", b"ffconcat", b"c=in ip", b"[playlist]", b"<asx")
"""Marks, in lower case, of text files (playlists, descriptions) by which FFmpeg would open other files and addresses."""
_POLL_S = 0.1
"""Seconds that the reading thread waits for room, and its consumer for an item, between checks whether the other has ended."""

One: TypeAlias = "str | Path | int | Image | bytes | torch.Tensor | PILImage"
Source: TypeAlias = "One | Sequence[One]"


@dataclass(frozen=True)
class Frame:
    """One image of a source."""

    path: str
    """The file, the address without password and query, ``camera 0``, ``screen``, or ``array 0``, ``image 1``, ... for images in memory."""
    index: int | None
    """Number of the frame in its video or stream, from 0; None for images."""
    image: Image
    """(height, width, 3) RGB uint8."""
    fps: float | None = None
    """Frames per second of its video or stream, before any stride; None for images, and if it is not known."""

    @property
    def name(self) -> str:
        """The path, and the number of the frame in it if there is one: ``clip.mp4#12``."""
        return self.path if self.index is None else f"{self.path}#{self.index}"


class StandardInput:
    """Paths of images and videos, one a line of standard input, read as they come."""

    def __str__(self) -> str:
        return "standard input"


class ImageSource:
    """Iterable of the images of a ``source``, as one ``Frame`` each, or in ``batches``.

    source: an image or video file, a folder (searched recursively, sorted), a pattern such as ``shots/*.jpg`` (``**``
    for any depth); an array (height, width, 3) RGB or (height, width) grey, both uint8; a tensor (3, height, width) or
    (N, 3, height, width), uint8 or float in [0, 1]; a PIL image; the bytes of an image file; ``-`` for paths by line of standard
    input; a camera's number; an address (rtsp, http); ``screen``; a file of sources by line that ends in ``.streams``; or a list
    of any of those. Addresses are opened only if they are named so or in a ``.streams`` file: none of standard input's lines, and none
    that a playlist or another file of images names. Cameras, addresses and the screen come last, together, and most have no end.

    vid_stride: of a video or stream, only every so-many-th frame. max_frames: end after so many images and frames. every_frame: of
    streams keep each frame instead of the newest (see :class:`LiveStreams`). reconnect_s: give a stream up after so long without a
    frame. prefetch: images of files and memory decoded ahead in a thread.

    A file that cannot be read and a stream that is lost are reported, skipped and added to ``skipped``. Raises SourceError at once for
    a source that does not exist, holds no image, or cannot be one; and at the end if every stream was lost.
    """

    def __init__(
        self, source: Source, *, vid_stride: int = 1, max_pixels: int = MAX_PIXELS, max_frames: int | None = None,
        every_frame: bool = False, reconnect_s: float = RECONNECT_S, prefetch: int = 0,
    ) -> None:  # fmt: skip
        for name, value in (("vid_stride", vid_stride), ("max_frames", max_frames)):
            if value is not None and value < 1:
                raise SourceError(f"{name} is {value}; it must be at least 1")
        self.vid_stride, self.max_pixels, self.max_frames = vid_stride, max_pixels, max_frames
        self.every_frame, self.reconnect_s, self.prefetch = every_frame, reconnect_s, prefetch
        self.skipped: list[FileProblem] = []
        self._stopped = self._awaits_line = False
        parts = source if isinstance(source, list | tuple) else [source]
        self.inputs = _distinct([found for part in parts for found in _expand(part)])
        """Files, images in memory and live inputs, in order."""
        if not self.inputs:
            raise SourceError("the list of sources is empty")

    @property
    def live(self) -> list[LiveInput]:
        """The cameras, addresses and monitors among the inputs."""
        return [item for item in self.inputs if isinstance(item, LiveInput)]

    def stop(self) -> None:
        """Stop the iteration after the images already read.

        Signal handlers and other threads may call it.
        """
        self._stopped = True

    def __iter__(self) -> Iterator[Frame]:
        with closing(self.batches(1)) as batches:
            for batch in batches:
                yield from batch

    def batches(self, size: int) -> Generator[list[Frame], None, None]:
        """Yield batches of ``size`` images, in order.

        Live inputs give the frames that are there, at least one.
        """
        if size < 1:
            raise SourceError(f"a batch has at least 1 image, got {size}")
        self.skipped.clear()
        self._stopped = False
        left = self.max_frames
        with closing(self._batches(size)) as batches:
            for batch in batches:
                if left is not None:
                    batch, left = batch[:left], left - len(batch)
                yield batch
                if self._stopped or (left is not None and left <= 0):
                    return

    def _batches(self, size: int) -> Generator[list[Frame], None, None]:
        still = prefetch(self._still(), self.prefetch, lambda: self._stopped, lambda: self._awaits_line)
        with closing(still) as frames:
            while batch := list(itertools.islice(frames, size)):
                yield batch
        if self._stopped or not self.live:
            return
        streams = LiveStreams(
            self.live, problem=self._problem, max_pixels=self.max_pixels, vid_stride=self.vid_stride,
            every_frame=self.every_frame, reconnect_s=self.reconnect_s,
        )  # fmt: skip
        with streams:
            for found in streams.batches(size, stopped=lambda: self._stopped):
                yield [Frame(one.name, one.index, one.image, _known(one.fps)) for one in found]

    def _still(self) -> Generator[Frame, None, None]:
        """Yield the frames of all inputs that end by themselves."""
        numbers = itertools.count()
        for item in self.inputs:
            if isinstance(item, StandardInput):
                for path in self._lines():
                    yield from self._file(path)
            elif isinstance(item, Path):
                yield from self._file(item)
            elif not isinstance(item, LiveInput):
                name = f"{'array' if isinstance(item, np.ndarray) else 'image'} {next(numbers)}"
                try:
                    yield Frame(name, None, memory_image(item, self.max_pixels))
                except ImageError as error:
                    self._problem(name, str(error))

    def _file(self, path: Path) -> Generator[Frame, None, None]:
        try:
            if path.suffix.lower() not in VIDEO_SUFFIXES:
                yield Frame(str(path), None, decode_image(path, max_pixels=self.max_pixels))
                return
            frames = read_video(
                path,
                vid_stride=self.vid_stride,
                max_pixels=self.max_pixels,
                problem=lambda reason: self._problem(str(path), reason),
            )
            with closing(frames):
                for index, fps, image in frames:
                    yield Frame(str(path), index, image, _known(fps))
        except (ImageError, OSError) as error:
            self._problem(str(path), (error.strerror if isinstance(error, OSError) else None) or str(error))

    def _lines(self) -> Iterator[Path]:
        """Yield the files that lines of standard input name.

        Lines that name none are skipped and reported.
        """
        lines = iter(sys.stdin)
        for number in itertools.count(1):
            self._awaits_line = True
            line = next(lines, None)
            self._awaits_line = False
            if line is None or self._stopped:
                return
            if not (text := line.rstrip("\r\n")):
                continue
            try:
                yield from _files(text)
            except SourceError as error:
                self._problem("standard input", str(error), number)

    def _problem(self, path: str, reason: str, line: int = 0) -> None:
        self.skipped.append(FileProblem(path, line, reason))
        log.warning("skipped %s: %s", f"line {line} of {path}" if line else path, reason)


def _known(fps: float) -> float | None:
    return fps if 0 < fps <= MAX_FPS else None


def _distinct(inputs: list[Any]) -> list[Any]:
    """Number live inputs of one shown name, such as addresses that differ in ``?channel=2``."""
    turns = Counter[str]()
    for place, item in enumerate(inputs):
        if isinstance(item, LiveInput):
            turns[item.name] += 1
            if (turn := turns[item.name]) > 1:
                inputs[place] = replace(item, name=f"{item.name} ({turn})")
    return inputs


def _expand(source: Any) -> list[Any]:
    """Return the inputs that one source stands for, at least one. Raises SourceError."""
    if isinstance(source, np.ndarray):
        return [checked_array(source)]
    if is_tensor(source):
        return list(tensor_images(source))
    if isinstance(source, bytes | bytearray | memoryview):
        return [bytes(source)]
    if is_pil(source):
        return [source]
    if not isinstance(source, str | Path | int) or isinstance(source, bool):
        raise SourceError(
            f"{type(source).__name__} is not a source of images: give a path, a pattern, an array, a tensor, a PIL image, bytes, "
            "the number of a camera, or a list"
        )
    if isinstance(source, int):
        return [live_input(source)]
    if isinstance(source, str) and not Path(source).expanduser().exists():  # a file of this name comes first
        if source == "-":
            return [StandardInput()]
        if (live := live_input(source)) is not None:
            return [live]
    if Path(source).suffix == ".streams" and Path(source).is_file():
        try:
            lines = [line.strip() for line in Path(source).read_text(encoding="utf-8-sig").splitlines()]
        except UnicodeDecodeError as error:
            raise SourceError(
                f"{source} is not UTF-8 text: write one source a line, such as rtsp://camera/stream"
            ) from error
        named = [line for line in lines if line and not line.startswith("#")]
        if not named:
            raise SourceError(f"{source} names no source: write one a line, such as rtsp://camera/stream")
        return [found for line in named for found in _listed(line, Path(source))]
    return list(_files(source))


def _listed(line: str, file: Path) -> list[Any]:
    if line == "-" or Path(line).suffix == ".streams":
        raise SourceError(f"{file} names {line}: name standard input and lists themselves")
    return _expand(line)


def _files(source: str | Path) -> list[Path]:
    """Return the files of a path, folder or pattern, at least one.

    Raises SourceError.
    """
    if "://" in str(source):
        raise SourceError(f"{source} is an address: give a file or folder on this machine here")
    path = Path(source).expanduser()
    if path.is_dir():
        endings = (*SUFFIXES, *VIDEO_SUFFIXES)
        files = sorted(found for found in path.rglob("*") if found.suffix.lower() in endings and found.is_file())
        if not files:
            raise SourceError(f"no image or video in {path} (endings looked for: {' '.join(endings)})")
        return files
    if path.exists():
        return [path]
    if glob.has_magic(str(path)):
        matches = sorted(Path(found) for found in glob.glob(str(path), recursive=True) if Path(found).is_file())
        if not matches:
            raise SourceError(f"no file matches {source}")
        return matches
    raise SourceError(f"{source} does not exist{did_you_mean(path)}")


# -- videos --------------------------------------------------------------------------------------------------------


def check_container(path: Path) -> None:
    """Raise ImageError unless a file begins as a video container does.

    FFmpeg looks at content, never at the name. A playlist (HLS, DASH, SDP, concat) that is named .mp4 would make it
    open the files and addresses in it.
    """
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    text = head.partition(b"\0")[0].lower()  # FFmpeg's tests for these formats end at the first zero byte
    if found := next((mark for mark in _TEXT_FORMATS if mark in text), None):
        raise ImageError(
            f"not a video: it is a playlist or description ({found.decode()!r} stands in it) that names other files or "
            "addresses, which are not followed; name those themselves"
        )
    known = (
        head[4:8] in _QUICKTIME  # ISO 14496-12, QuickTime
        or (head[:4] == b"RIFF" and head[8:11] == b"AVI")
        or head[:4] == b"\x1a\x45\xdf\xa3"  # Matroska, WebM
        or head[:4] in (b"\0\0\1\xba", b"\0\0\1\xb3")  # MPEG program and video streams
        or head[:8] == _ASF
        or (len(head) > _TS_PACKET and head[0] == head[_TS_PACKET] == 0x47)
        or (len(head) > _TS_PACKET + 8 and head[4] == head[_TS_PACKET + 8] == 0x47)  # with time stamps (.m2ts)
    )
    if not known:
        raise ImageError(
            f"not a video that can be read: it starts with {head[:16]!r}; MP4, MOV, AVI, Matroska, WebM, MPEG and WMV are read"
        )


def read_video(
    path: Path, *, vid_stride: int, max_pixels: int, problem: Callable[[str], None]
) -> Generator[tuple[int, float, Image], None, None]:
    """Yield (number, frames per second, RGB image) of every ``vid_stride``-th frame.

    Only one frame is in memory at a time. ``problem`` is called with a sentence for frames that cannot be decoded and
    for a video that ends early; ImageError is raised for a file that is no video, has no frame, or frames above
    ``max_pixels``.
    """
    check_container(path)
    # The absolute path, and FFmpeg by name: "concat:..." is a protocol of FFmpeg's, "%03d" a pattern to another reader.
    video = cv2.VideoCapture(str(path.absolute()), cv2.CAP_FFMPEG)
    try:
        size = int(video.get(cv2.CAP_PROP_FRAME_WIDTH)) * int(video.get(cv2.CAP_PROP_FRAME_HEIGHT))
        if not video.isOpened() or size <= 0:
            raise ImageError("not a video that can be read")
        if size > max_pixels:
            raise ImageError(f"video frames of {size / 1e6:.1f} million pixels are too large")
        fps, promised = video.get(cv2.CAP_PROP_FPS), video.get(cv2.CAP_PROP_FRAME_COUNT)
        index = 0
        while video.grab():
            if index % vid_stride == 0:
                decoded, frame = video.retrieve()
                if decoded:
                    yield index, fps, cv2.cvtColor(frame, cv2.COLOR_BGR2RGB, dst=frame)
                else:
                    problem(f"frame {index} cannot be decoded: it is left out")
            index += 1
        if index == 0:
            raise ImageError("the video has no frame that can be read")
        if index < promised - max(2, promised // 50):  # some containers only estimate their length
            problem(f"the video ends after {index} of {int(promised)} frames: it is cut or damaged")
    finally:
        video.release()


# -- reading ahead -------------------------------------------------------------------------------------------------


def prefetch(
    items: Iterable[T],
    depth: int,
    stopped: Callable[[], bool] = lambda: False,
    idle: Callable[[], bool] = lambda: False,
) -> Generator[T, None, None]:
    """Prefetch ``items`` in a thread, at most ``depth`` ahead of the consumer, in order.

    What reading raises is raised here, behind the items before it. Closing the iterator ends the thread after its present item.
    If the next item does not come, as from a pipe in which nobody writes, it is waited for until ``stopped``; the thread that
    waits for it is ``idle``, and does not hold up the end of the program.
    """
    if depth < 1:
        yield from items
        return
    ready: queue.Queue[tuple[bool, T | BaseException | None]] = queue.Queue(depth)
    closed = threading.Event()

    def put(entry: tuple[bool, T | BaseException | None]) -> bool:
        while not closed.is_set():
            try:
                ready.put(entry, timeout=_POLL_S)
            except queue.Full:
                continue
            return True
        return False

    def read() -> None:
        try:
            for item in items:
                if not put((True, item)):
                    return
            put((False, None))
        except BaseException as error:  # raised again by the consumer
            put((False, error))

    ReaderThread(read, "arclight-prefetch", end=closed.set, idle=idle).start()
    try:
        while True:
            try:
                more, entry = ready.get(timeout=_POLL_S)
            except queue.Empty:
                if stopped():
                    return
                continue
            if more:
                yield entry  # type: ignore[misc]
            elif isinstance(entry, BaseException):
                raise entry
            else:
                return
    finally:
        closed.set()
