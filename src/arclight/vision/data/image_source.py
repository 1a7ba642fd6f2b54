"""Iterate over images for prediction: files, folders, globs, videos, arrays, and lists of those."""

from __future__ import annotations

import glob
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from arclight.fabric.extras import require
from arclight.vision.data.data_yaml import did_you_mean
from arclight.vision.data.images import MAX_PIXELS, SUFFIXES, Image, ImageError, decode_image
from arclight.vision.data.labels import FileProblem

cv2 = require("cv2", extra="vision")
log = logging.getLogger(__name__)

VIDEO_SUFFIXES = (".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".mpg", ".mpeg", ".wmv", ".asf", ".ts")

Source = str | Path | Image | Sequence["str | Path | Image"]


class SourceError(ValueError):
    """An input for prediction does not exist or cannot hold images."""


@dataclass(frozen=True)
class Frame:
    """One image to look at."""

    path: str
    """The file, or ``array 0``, ``array 1``, ... for arrays."""
    index: int | None
    """Number of the frame in its video, from 0; None for images."""
    image: Image
    """(height, width, 3) RGB uint8."""


class ImageSource:
    """The images of a ``source``, in order, one at a time: iterate it for each ``Frame``.

    source: an image or video file, a folder (searched recursively, sorted), a pattern such as ``shots/*.jpg`` (``**``
    for any depth), an array (height, width, 3) RGB or (height, width) grey, both uint8, or a list of any of those.
    vid_stride: of a video, only every so-many-th frame.

    A file that cannot be read is reported, skipped and added to ``skipped``. Raises SourceError at once for a source
    that does not exist, holds no image, or is no image.
    """

    def __init__(self, source: Source, *, vid_stride: int = 1, max_pixels: int = MAX_PIXELS) -> None:
        if vid_stride < 1:
            raise SourceError(f"vid_stride is {vid_stride}; it must be at least 1")
        self.vid_stride, self.max_pixels = vid_stride, max_pixels
        self.skipped: list[FileProblem] = []
        parts = source if isinstance(source, list | tuple) else [source]
        self.inputs: list[Path | Image] = [found for part in parts for found in _expand(part)]
        """Files and arrays, in order."""
        if not self.inputs:
            raise SourceError("the list of sources is empty")

    def __iter__(self) -> Iterator[Frame]:
        self.skipped.clear()
        arrays = 0
        for item in self.inputs:
            if isinstance(item, np.ndarray):
                yield Frame(f"array {arrays}", None, item)
                arrays += 1
                continue
            try:
                if item.suffix.lower() in VIDEO_SUFFIXES:
                    yield from self._video(item)
                else:
                    yield Frame(str(item), None, decode_image(item, max_pixels=self.max_pixels))
            except (ImageError, OSError) as error:
                reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
                self.skipped.append(FileProblem(str(item), 0, reason))
                log.warning("skipped %s: %s", item, reason)

    def _video(self, path: Path) -> Iterator[Frame]:
        video = cv2.VideoCapture(str(path))
        try:
            size = int(video.get(cv2.CAP_PROP_FRAME_WIDTH)) * int(video.get(cv2.CAP_PROP_FRAME_HEIGHT))
            if not video.isOpened() or size <= 0:
                raise ImageError("not a video that can be read")
            if size > self.max_pixels:
                raise ImageError(f"video frames of {size / 1e6:.1f} million pixels are too large")
            index = 0
            while video.grab():
                if index % self.vid_stride == 0:
                    decoded, frame = video.retrieve()
                    if not decoded:
                        raise ImageError(f"the video is damaged at frame {index}")
                    yield Frame(str(path), index, cv2.cvtColor(frame, cv2.COLOR_BGR2RGB, dst=frame))
                index += 1
            if index == 0:
                raise ImageError("the video has no frame that can be read")
        finally:
            video.release()


def _expand(source: Any) -> list[Path | Image]:
    """Return the files or the array that one source stands for, at least one. Raises SourceError."""
    if isinstance(source, np.ndarray):
        return [_checked(source)]
    if not isinstance(source, str | Path):
        raise SourceError(
            f"{type(source).__name__} is not a source of images: give a path, a pattern, an array or a list"
        )
    if "://" in str(source):
        raise SourceError(f"{source} is an address; nothing is downloaded: give a file or folder on this machine")
    path = Path(source).expanduser()
    if path.is_dir():
        endings = (*SUFFIXES, *VIDEO_SUFFIXES)
        files = sorted(found for found in path.rglob("*") if found.suffix.lower() in endings and found.is_file())
        if not files:
            raise SourceError(f"no image or video in {path} (endings looked for: {' '.join(endings)})")
        return list(files)
    if path.exists():
        return [path]
    if glob.has_magic(str(path)):
        matches = sorted(Path(found) for found in glob.glob(str(path), recursive=True) if Path(found).is_file())
        if not matches:
            raise SourceError(f"no file matches {source}")
        return list(matches)
    raise SourceError(f"{source} does not exist{did_you_mean(path)}")


def _checked(array: Any) -> Image:
    if (
        array.dtype != np.uint8
        or array.ndim not in (2, 3)
        or (array.ndim == 3 and array.shape[2] != 3)
        or not array.size
    ):
        given = f"array of shape {array.shape} and type {array.dtype}"
        raise SourceError(f"{given}: give uint8 of (height, width, 3) RGB or (height, width) grey")
    return array if array.ndim == 3 else np.repeat(array[:, :, None], 3, axis=2)
