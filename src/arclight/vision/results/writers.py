"""Write results of many images as they come: videos, labels, crops, tables and JSON.

``arclight predict`` passes each `Prediction` to all writers that were asked for; each is a context. `JsonFile`, `CsvFile` and videos get their
final name when the context ends, after an interrupt too, with what was written so far; after an error an older file of that name stays as it
was. The video of a file gets its name as soon as the next video begins. JSON lines grow in place; images and labels are written one by one.
Keys, columns and file names stay: other programs read them.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, Self

from arclight.fabric.extras import require
from arclight.vision.data.images import Image
from arclight.vision.results.detections import Detections, write_image
from arclight.vision.results.draw import draw_shape
from arclight.vision.results.image_class import Classification
from arclight.vision.tracking.counting import Count, ZoneCount

cv2 = require("cv2", extra="vision")

DEFAULT_FPS = 25.0
"""Frames per second of a written video whose source does not state them."""


@dataclass(frozen=True)
class Prediction:
    """The objects of one image, and its names in files."""

    name: str
    """Unique: the path of the image, with the number of the frame in a video."""
    stem: str
    """The same, fit to be part of a file's name."""
    source: str
    """The file, camera or address that the image came from."""
    index: int | None
    """Number of the frame in its video or stream; None for images."""
    fps: float | None
    """Frames per second of the frames that are predicted on, after any stride; None if it is not known."""
    image: Image
    found: Detections | Classification
    counts: tuple[Count, ...] = ()
    """Lines and zones, with what was counted in this source until this image."""
    candidates: Detections | None = None
    """The objects, and doubtful ones beside them, if these were asked for."""

    @property
    def doubtful(self) -> Detections:
        """All that was found, doubtful objects among them if they were asked for."""
        found = self.found if self.candidates is None else self.candidates
        assert isinstance(found, Detections)
        return found

    def marked(self) -> Image:
        """Draw the results, and lines and zones with their counts, on the image."""
        image = self.found.plot()
        for count in self.counts:
            draw_shape(image, count.points, str(count), closed=isinstance(count, ZoneCount))
        return image


class Names:
    """Give images unique names.

    It remembers a few words for each source, not for each frame.
    """

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._turns: dict[str, int] = {}
        self._stems: dict[tuple[str, int], str] = {}
        self._used: set[str] = set()
        self._videos: set[str] = set()

    def of(self, path: str, index: int | None) -> tuple[str, str]:
        """Return a unique name, and its stem, for the next image of ``path``.

        A source that is read again is counted.
        """
        position = 0 if index is None else index
        if position <= self._last.get(path, -1):
            self._turns[path] += 1
        self._last[path] = position
        turn = self._turns.setdefault(path, 1)
        if (stem := self._stems.get((path, turn))) is None:
            stem = self._stems[path, turn] = self._new_stem(path, video=index is not None)
        name = path if turn == 1 else f"{path} ({turn})"
        if index is None:
            return name, stem
        of_frame = f"{stem}-{index}"
        return f"{name}#{index}", f"{of_frame} frame" if of_frame in self._used else of_frame

    def _new_stem(self, path: str, *, video: bool) -> str:
        own = re.sub(r"[^\w .()\[\]-]", "_", Path(path).stem) or "_"  # of an address, say
        stem, number = own, 1
        while (
            stem in self._used or stem.rpartition("-")[0] in self._videos
        ):  # the name of another, or of a video's frame
            number += 1
            stem = f"{own} {number}" if video or own in self._videos else f"{own}-{number}"
        self._used.add(stem)
        if video:
            self._videos.add(stem)
        return stem


class Writer(Protocol):
    """A context that takes predictions."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def write(self, prediction: Prediction) -> None: ...


class _FileWriter:
    """A text file that takes its name at the end.

    Pipes and devices, such as /dev/stdout, are written as they are.
    """

    errors = "surrogateescape"
    """Handling of names of files, which are bytes and need not be text."""

    def __init__(self, path: Path) -> None:
        self.path = path
        in_place = path.exists() and not path.is_file()
        self._partial = path if in_place else path.with_name(f".{path.name}.{os.getpid()}")

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.stream: IO[str] = self._partial.open("w", newline="", encoding="utf-8", errors=self.errors)
        self.start()
        return self

    def start(self) -> None:
        """Write what comes before the first prediction."""

    def end(self) -> None:
        """Write what comes behind the last one."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.stream:
            self.end()
        if self._partial == self.path:
            return
        if kind is None or issubclass(kind, KeyboardInterrupt):
            self._partial.replace(self.path)
        else:
            self._partial.unlink()


class JsonObject(_FileWriter):
    """Writer of one JSON object, member by member; no member stays in memory."""

    errors = "backslashreplace"  # an escape in JSON

    def __init__(self, path: Path, *, escaped: bool = True) -> None:
        """Initialise the writer of ``path``.

        escaped: write letters beyond ASCII as escapes.
        """
        super().__init__(path)
        self.escaped = escaped

    def start(self) -> None:
        self._before = "{\n"

    def add(self, name: str, value: Any) -> None:
        key, text = (json.dumps(one, indent=2, ensure_ascii=self.escaped) for one in (name, value))
        self.stream.write(f"{self._before}  {key}: " + text.replace("\n", "\n  "))
        self._before = ",\n"

    def end(self) -> None:
        self.stream.write("{}\n" if self._before == "{\n" else "\n}\n")


class JsonFile(JsonObject):
    """Writer of one JSON object: image names to the lists of their objects."""

    def write(self, prediction: Prediction) -> None:
        self.add(prediction.name, prediction.found.to_json())


class JsonLines(_FileWriter):
    """Writer of JSON lines, one per image: name, frame, width, height and objects.

    Each line is there as soon as its image is done.
    """

    def __enter__(self) -> Self:
        self._partial = self.path  # others follow the file while it grows
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stream.close()  # whatever ended it, whole lines were written

    def write(self, prediction: Prediction) -> None:
        height, width = prediction.image.shape[:2]
        row: dict[str, object] = {
            "image": prediction.source,
            "frame": prediction.index,
            "width": width,
            "height": height,
            "objects": prediction.found.to_json(),
        }
        if prediction.counts:
            row["counts"] = [count.to_json() for count in prediction.counts]
        self.stream.write(json.dumps(row) + "\n")
        self.stream.flush()


class CsvFile(_FileWriter):
    """Writer of a CSV table, a row per object: image, label, confidence, box, id if tracked.

    The box is left, top, right, bottom in pixels.
    """

    def __init__(self, path: Path, tracked: bool) -> None:
        super().__init__(path)
        self.tracked = tracked

    def start(self) -> None:
        self._rows = csv.writer(self.stream)
        columns = ["image", "label", "confidence", "left", "top", "right", "bottom"]
        self._rows.writerow([*columns, "id"] if self.tracked else columns)

    def write(self, prediction: Prediction) -> None:
        for one in prediction.found.to_json():
            row = [prediction.name, one["label"], one["confidence"], *one.get("box_xyxy_px", [""] * 4)]
            self._rows.writerow([*row, one["id"]] if self.tracked else row)


class PlainWriter:
    """A writer with nothing to open or close."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class _FolderWriter(PlainWriter):
    def __init__(self, folder: Path) -> None:
        self.folder = folder


class MarkedImages(_FolderWriter):
    """Every image with its boxes, numbered in order."""

    _count = 0

    def write(self, prediction: Prediction) -> None:
        self._count += 1
        write_image(self.folder / f"{self._count:06d}-{Path(prediction.source).stem}.jpg", prediction.marked())


class HeatMaps(_FolderWriter):
    """Writer of a .png heat map per image, by ``draw``."""

    def __init__(self, folder: Path, draw: Callable[[Image], Image]) -> None:
        super().__init__(folder)
        self.draw = draw

    def write(self, prediction: Prediction) -> None:
        write_image(self.folder / f"{prediction.stem}.png", self.draw(prediction.image))


class Labels(_FolderWriter):
    """Writer of a YOLO label file per image: class and box, or outline, and id if tracked."""

    def write(self, prediction: Prediction) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        text = prediction.found.to_txt(prediction.image.shape)
        (self.folder / f"{prediction.stem}.txt").write_text(text, encoding="utf-8")


class Crops(_FolderWriter):
    """Writer of each object's crop into a folder of its class.

    Boxes without pixels in the image are left out.
    """

    def write(self, prediction: Prediction) -> None:
        assert isinstance(prediction.found, Detections), "a class of a whole image has no box to cut out"
        for number, (label, crop) in enumerate(zip(prediction.found.labels, prediction.found.crops())):
            if crop.size:
                place = re.sub(r"[^\w-]", "_", label) or "_"  # a class may have any name, ".." as well
                write_image(self.folder / place / f"{prediction.stem}-{number}.jpg", crop)


class Videos(_FolderWriter):
    """A marked video (.mp4) for each video and stream; images are passed over.

    A source whose frames change their size goes on in another file: a video has one size.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.written: list[Path] = []
        self._open: dict[str, _Video] = {}
        self._of_files: set[str] = set()

    def write(self, prediction: Prediction) -> None:
        if prediction.index is None:
            return
        frame = prediction.marked()
        source = prediction.name.rpartition("#")[0]
        video = self._open.get(source)
        if video is None or video.shape != frame.shape:
            if video is not None:
                video.close()
            else:
                self._close_files()
            stem = prediction.stem.rpartition("-")[0]
            path = self.folder / f"{stem}.mp4"
            number = 2
            while path in self.written:
                path, number = self.folder / f"{stem}-part{number}.mp4", number + 1
            self.written.append(path)
            video = _Video(path, frame.shape, prediction.fps or DEFAULT_FPS)
            self._open[source] = video
            if Path(prediction.source).is_file():
                self._of_files.add(source)
        video.add(frame)

    def _close_files(self) -> None:
        """Close the videos of files, which come one after another.

        Only streams take turns; each open video holds memory and descriptors.
        """
        for source in self._of_files:
            self._open.pop(source).close()
        self._of_files.clear()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for video in self._open.values():
            video.close(keep=kind is None or issubclass(kind, KeyboardInterrupt))


class _Video:
    def __init__(self, path: Path, shape: tuple[int, ...], fps: float) -> None:
        self.path, self.shape = path, shape
        self._partial = path.with_name(f".{path.stem}.{os.getpid()}.mp4")
        path.parent.mkdir(parents=True, exist_ok=True)
        height, width = (side + side % 2 for side in shape[:2])  # codecs want even sides
        codec = cv2.VideoWriter_fourcc(*"mp4v")
        self._writer = cv2.VideoWriter(str(self._partial.absolute()), cv2.CAP_FFMPEG, codec, fps, (width, height))
        if not self._writer.isOpened():
            raise OSError(f"no video of {width} x {height} pixels can be written to {path}")

    def add(self, frame: Image) -> None:
        height, width = frame.shape[:2]
        bgr = cv2.cvtColor(frame, cv2.COLOR_RGB2BGR)
        if height % 2 or width % 2:
            bgr = cv2.copyMakeBorder(bgr, 0, height % 2, 0, width % 2, cv2.BORDER_REPLICATE)
        self._writer.write(bgr)

    def close(self, *, keep: bool = True) -> None:
        self._writer.release()
        if keep:
            self._partial.replace(self.path)
        else:
            self._partial.unlink(missing_ok=True)
