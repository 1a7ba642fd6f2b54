"""Read the frames of video files."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path

from arclight.fabric.extras import require
from arclight.vision.data.images import Image, ImageError

cv2 = require("cv2", extra="vision")

VIDEO_SUFFIXES = (".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".mpg", ".mpeg", ".wmv", ".asf", ".ts")

_HEAD_BYTES = 4096
_ASF = bytes.fromhex("3026b2758e66cf11")
_TS_PACKET = 188
_QUICKTIME = (b"ftyp", b"moov", b"mdat", b"free", b"wide", b"skip", b"pnot")
_TEXT_FORMATS = (b"#ext", b"<mpd", b"ffconcat", b"c=in ip", b"[playlist]", b"<asx")
"""How the text files begin, or what they hold, that name other files and addresses to FFmpeg (lower case)."""


def check_container(path: Path) -> None:
    """Raise ImageError unless a file begins as video containers do: FFmpeg looks at content, never at the name.

    A playlist (HLS, DASH, SDP, concat) that is named .mp4 would make it open the files and addresses in it.
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
    """Yield (number, frames per second, RGB image) of every ``vid_stride``-th frame, holding one at a time.

    ``problem`` is called with a sentence for frames that cannot be decoded and for a video that ends early; ImageError is raised
    for a file that is no video, has no frame, or frames above ``max_pixels``.
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
