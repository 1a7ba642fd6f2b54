"""Read, check and cache labels in YOLO format; report and skip faulty lines.

`dataset`, `lint`, ``formats.annotations`` and ``arclight data`` read labels by `check_labels`. The format of rows and the place of label
files (`label_path`) are YOLO's and must stay; a change of the cache's content needs a new `CACHE_FORMAT`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import repeat
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from arclight.vision.data.image_headers import ImageError, ImageHeader, file_header
from arclight.vision.data.images import MAX_PIXELS
from arclight.vision.rotated import refusal_of_quadrilateral, smallest_rectangles

TOLERANCE = 1e-3
"""Coordinates up to this far outside [0, 1] come from rounding and are clipped; beyond it a row is malformed."""

CACHE_FORMAT = 3

Points = NDArray[np.float32]


@dataclass(frozen=True)
class KeypointShape:
    """Shape of the keypoints behind each box: ``kpt_shape`` and ``flip_idx`` of a data.yaml."""

    count: int
    dims: int
    """Numbers of each: 2 for x y, 3 for x y v, v being 0 (not labelled), 1 (hidden) or 2 (seen)."""
    flip: tuple[int, ...] | None = None
    """Number of the keypoint that each becomes in a mirror; None if the file does not say, and images are not mirrored."""
    hulled: bool = False
    """Whether the keypoints are four corners. The box is their hull if all four are labelled."""

    def __str__(self) -> str:
        return f"{self.count} keypoints of {self.dims} numbers"


TaskGeometry = Literal["boxes", "polygons", "keypoints", "corners", "oriented"]
"""What a task learns from rows of labels: boxes, of which every row has one, polygons alone, boxes with keypoints, boxes around four
corners, or oriented boxes."""
Geometry = TaskGeometry | KeypointShape
"""What rows of labels are read as: a `TaskGeometry`, or boxes with keypoints of a `KeypointShape` behind them."""


class DatasetError(ValueError):
    """Error of a data set that cannot be used: what is wrong, where, and what to do."""


@dataclass(frozen=True)
class FileProblem:
    """One fault in one file; ``line`` counts from 1, 0 means the file as a whole."""

    path: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}" if self.line else f"{self.path}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class DatasetReport:
    """Report on one split of a data set; ``print`` it, or take it as data with ``as_dict``."""

    name: str
    images: int
    """Usable images."""
    boxes: int
    missing_labels: int
    """Usable images without a label file: they count as background."""
    empty_labels: int
    """Usable images whose label file has no rows: background as well."""
    corrupt: tuple[FileProblem, ...]
    """Images that cannot be read, skipped."""
    malformed: tuple[FileProblem, ...]
    """Label rows (or whole files, line 0) that cannot be read, skipped."""
    out_of_range: int
    """How many of ``malformed`` have a coordinate outside [0, 1]."""
    clipped: int
    """Boxes that reached out of their image and were cut at its edge."""
    duplicate_rows: int
    """Rows that repeat another one of their file, skipped."""
    duplicate_images: int
    """Images listed more than once, used once."""
    shared_labels: tuple[FileProblem, ...]
    """Label files that several images have by their names (a.jpg and a.png): all are used, though one must be wrong."""
    repeated: tuple[FileProblem, ...] = ()
    """The ``duplicate_rows``, by line."""
    cut: tuple[FileProblem, ...] = ()
    """The ``clipped`` boxes, by line."""
    turned: tuple[FileProblem, ...] = ()
    """Images that their EXIF orientation turns; labels are of the image as it is seen."""
    odd: tuple[FileProblem, ...] = ()
    """Images of which decoding changes something: 16 bits, CMYK, transparency, several pictures, a single pixel."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.name}: {_count(self.images, 'image')}, {_count(self.boxes, 'box', 'boxes')}"]
        if self.missing_labels or self.empty_labels:
            lines.append(
                f"  background: {self.missing_labels} without a label file, {self.empty_labels} with an empty one"
            )
        skipped = [(self.duplicate_images, "image listed twice"), (self.duplicate_rows, "repeated row")]
        lines += [f"  skipped: {number} x {what}" for number, what in skipped if number]
        if self.clipped:
            lines.append(f"  cut at the edge of the image: {_count(self.clipped, 'box', 'boxes')}")
        for heading, problems in (
            (f"skipped: {_count(len(self.corrupt), 'corrupt image')}", self.corrupt),
            (f"skipped: {_count(len(self.malformed), 'malformed label row')}", self.malformed),
            (f"shared: {_count(len(self.shared_labels), 'label file')} of several images each", self.shared_labels),
        ):
            if problems:
                lines.append(f"  {heading}")
                lines += [f"    {problem}" for problem in problems[:5]]
            if len(problems) > 5:
                lines.append(f"    and {len(problems) - 5} more")
        return "\n".join(lines)


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


@dataclass(frozen=True)
class LabelledImages:
    """Usable images of one split, in order, with their boxes and, if asked for, their outlines."""

    images: list[Path]
    labels: list[NDArray[np.float32]]
    """Per image (n, 5): class, cx, cy, w, h; coordinates in [0, 1] of the image as it is seen."""
    shapes: NDArray[np.int32]
    """(N, 2): height and width of each image, pixels."""
    report: DatasetReport
    lines: list[NDArray[np.int32]]
    """Per image (n,): the line of its label file that each box stands in, from 1."""
    outlines: list[list[Points]] | None = None
    """Per image the outline (k, 2) of each of its boxes, or its keypoints (K, 2), NaN if not labelled, in [0, 1] of the
    image; None for boxes alone."""
    oriented: bool = False
    """Whether the outlines are the four corners of oriented boxes."""

    @cached_property
    def rotated_px(self) -> list[NDArray[np.float64]]:
        """The rotated boxes (n, 5) of each image, in its pixels, where boxes are oriented."""
        corners = [np.array(of_image, np.float64).reshape(-1, 4, 2) for of_image in self.outlines or ()]
        return [smallest_rectangles(points * shape[::-1]) for points, shape in zip(corners, self.shapes, strict=True)]


@dataclass
class LabelRows:
    """The readable rows of one label file and the faults of the others."""

    rows: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 5), np.float32))
    outlines: list[Points] = field(default_factory=list)
    problems: list[FileProblem] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    """The line of each row, from 1."""
    repeated: list[FileProblem] = field(default_factory=list)
    cut: list[FileProblem] = field(default_factory=list)
    out_of_range: int = 0
    missing: bool = False
    empty: bool = False

    @property
    def clipped(self) -> int:
        return len(self.cut)

    @property
    def duplicates(self) -> int:
        return len(self.repeated)


class _OutOfRangeError(ValueError):
    pass


def label_path(image: Path) -> Path:
    """Return the label file of ``image``: its last folder ``images`` becomes ``labels``.

    Without such a folder it lies beside the image.
    """
    parts = list(image.parent.parts)
    for index in range(len(parts) - 1, -1, -1):
        if parts[index] == "images":
            parts[index] = "labels"
            break
    return Path(*parts, image.stem + ".txt")


def names_below(images: Sequence[Path]) -> list[PurePosixPath]:
    """Name ``images`` relative to the folder that holds them all; no name has a ``..``."""
    places = [Path(os.path.abspath(image)) for image in images]
    top = os.path.commonpath([place.parent for place in places])
    return [PurePosixPath(place.relative_to(top).as_posix()) for place in places]


def parse_labels(text: str, path: str, num_classes: int, geometry: Geometry = "boxes") -> LabelRows:
    """Parse a label file: boxes ``class cx cy w h``, or polygons ``class x1 y1 x2 y2 ...``.

    The box of a polygon is its hull; of ``geometry`` polygons, rows of boxes are faults, and of oriented all that are not four
    corners ``class x1 y1 x2 y2 x3 y3 x4 y4`` in turn around a convex shape. With keypoints all rows are boxes with
    keypoints behind them, ``class cx cy w h x1 y1 [v1] x2 y2 [v2] ...``. ``path`` names the file in the problems found.
    """
    result = LabelRows()
    boxes: dict[tuple[Any, ...], int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split()
        if not fields:
            continue
        try:
            row, clipped, outline = _parse_row(fields, num_classes, geometry)
        except ValueError as error:
            result.problems.append(FileProblem(path, number, str(error)))
            result.out_of_range += isinstance(error, _OutOfRangeError)
            continue
        # NaN is unlike itself: None stands for it
        if (key := (*row, *(None if math.isnan(value) else value for value in outline))) in boxes:
            result.repeated.append(FileProblem(path, number, f"repeats line {boxes[key]}"))
            continue
        boxes[key] = number
        if geometry != "boxes":
            result.outlines.append(np.array(outline, np.float32).reshape(-1, 2))
        if clipped:
            result.cut.append(FileProblem(path, number, "the box reaches out of its image: it is cut at the edge"))
    result.empty = not boxes and not result.problems
    if boxes:
        result.rows, result.lines = np.array([row[:5] for row in boxes], np.float32), list(boxes.values())
    return result


def _parse_row(
    fields: list[str], num_classes: int, geometry: Geometry
) -> tuple[tuple[float, ...], bool, tuple[float, ...]]:
    """Parse one label row: (class, cx, cy, w, h), if the box was clipped, and its outline.

    Raises ValueError saying why not.
    """
    try:
        values = [float(text) for text in fields]
    except ValueError:
        bad = next(text for text in fields if not _is_number(text))
        raise ValueError(f"{bad[:40]!r} is not a number") from None
    label, coordinates = values[0], values[1:]
    if isinstance(geometry, KeypointShape):
        if len(values) != (wanted := 5 + geometry.count * geometry.dims):
            raise ValueError(
                f"{len(values)} numbers: with kpt_shape [{geometry.count}, {geometry.dims}] a row has {wanted}, "
                f"class cx cy w h and {geometry}"
            )
        row, clipped, _ = _parse_row(fields[:5], num_classes, "boxes")
        return row, clipped, _keypoints(fields[5:], values[5:], geometry)
    if geometry == "oriented" and len(values) != 9:
        what = "a box of 5 numbers, which has no angle" if len(values) == 5 else f"{len(values)} numbers"
        raise ValueError(
            f"{what}, and this task learns oriented boxes: write the four corners, class x1 y1 x2 y2 x3 y3 x4 y4"
        )
    if len(values) != 5 and (len(values) < 7 or len(values) % 2 == 0):
        raise ValueError(
            f"{len(values)} numbers: a box has 5 (class cx cy w h), a polygon 1 + 2 for each of 3 or more points"
        )
    if len(values) == 5 and geometry == "polygons":
        raise ValueError("a box, and this task learns outlines: write a polygon, class x1 y1 x2 y2 x3 y3 ...")
    if not (label.is_integer() and 0 <= label < num_classes):
        raise ValueError(f"unknown class {fields[0][:40]}: the data set has classes 0 to {num_classes - 1}")
    for place, (text, value) in enumerate(zip(fields[1:], coordinates)):
        if not -TOLERANCE <= value <= 1 + TOLERANCE:  # also true of nan
            if not math.isfinite(value):
                raise ValueError(f"{text[:40]} is not a coordinate")
            if len(values) == 5 and place >= 2 and value < 0:
                raise ValueError(f"negative size {text[:40]}")
            raise _OutOfRangeError(
                f"coordinate {text[:40]} is outside [0, 1]: values are shares of the image, not pixels"
            )
    if len(values) == 5:
        cx, cy, width, height = coordinates
        edges = (cx - width / 2, cy - height / 2, cx + width / 2, cy + height / 2)
        # Half of a size that may be a rounding error too large, beside a centre that may be one off.
        clipped = min(edges) < -1.5 * TOLERANCE or max(edges) > 1 + 1.5 * TOLERANCE
    else:
        xs, ys = coordinates[0::2], coordinates[1::2]
        edges, clipped = (min(xs), min(ys), max(xs), max(ys)), False
    left, top, right, bottom = (min(max(edge, 0.0), 1.0) for edge in edges)
    if right <= left or bottom <= top:
        raise ValueError("the box has no area")
    outline = () if geometry == "boxes" else tuple(min(max(value, 0.0), 1.0) for value in coordinates)
    if geometry == "oriented" and (why := refusal_of_quadrilateral(np.array(outline).reshape(4, 2))) is not None:
        raise ValueError(why)
    return (label, (left + right) / 2, (top + bottom) / 2, right - left, bottom - top), clipped, outline


def _keypoints(fields: list[str], values: list[float], shape: KeypointShape) -> tuple[float, ...]:
    """Check keypoints and return their coordinates, NaN for those that are not labelled.

    Raises ValueError.
    """
    found: list[float] = []
    for number in range(shape.count):
        place = slice(number * shape.dims, (number + 1) * shape.dims)
        texts, (x, y, *visible) = fields[place], values[place]
        if visible and visible[0] not in (0, 1, 2):
            raise ValueError(f"keypoint {number + 1} has visibility {texts[2][:40]}: it is 0, 1 or 2")
        for text, value in zip(texts, (x, y)):
            if not math.isfinite(value):
                raise ValueError(f"{text[:40]} is not a coordinate")
            if not -TOLERANCE <= value <= 1 + TOLERANCE:
                raise _OutOfRangeError(
                    f"keypoint {number + 1} has coordinate {text[:40]}, outside [0, 1]: values are shares of the image, not "
                    "pixels; of a keypoint that is not in the image write 0 0 0"
                )
        labelled = visible[0] > 0 if visible else True
        found += [min(max(value, 0.0), 1.0) if labelled else math.nan for value in (x, y)]
    return tuple(found)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# ---------------------------------------------------------------- a whole split


def check_labels(
    images: Sequence[Path],
    num_classes: int,
    *,
    name: str = "images",
    cache: bool = True,
    geometry: Geometry = "boxes",
) -> LabelledImages:
    """Read the labels of ``images`` and check the images themselves by their headers and ends.

    With ``cache`` the result is kept in ``<name>.cache.npz`` (``<name>.<geometry>.cache.npz`` unless boxes) beside the folder of labels, or
    in it if the images are there too (a plain NumPy archive, nothing pickled), and used again until a file's name, size or time of change differs; where
    that folder cannot be written the result is computed each time, with a warning. Images without boxes are background, be it
    all of them. Raises DatasetError if nothing usable is found: no image, no label file, or no row that can be read.
    """
    unique = list(dict.fromkeys(images))
    if not unique:
        raise DatasetError(f"{name}: there are no images")
    if isinstance(geometry, KeypointShape):
        kind = f".keypoints-{geometry.count}x{geometry.dims}"
    else:
        kind = "" if geometry == "boxes" else f".{geometry}"
    file = cache_folder(unique[0]) / f"{name}{kind}.cache.npz"
    fingerprint = _fingerprint(unique, num_classes, len(images)) + kind
    found = _read_cache(file, fingerprint, unique) if cache else None
    if found is None:
        found = _scan(unique, num_classes, name, len(images) - len(unique), geometry)
        if cache:
            _write_cache(file, fingerprint, unique, found)
    if found.report.boxes == 0 and (found.report.malformed or not found.report.empty_labels):
        raise DatasetError(_nothing_usable(unique, found.report))
    return replace(found, oriented=geometry == "oriented")


def _scan(images: list[Path], num_classes: int, name: str, duplicate_images: int, geometry: Geometry) -> LabelledImages:
    # Threads wait for slow disks together; on a fast one this is bound by Python and they do no harm.
    with ThreadPoolExecutor(8) as pool:
        scanned = list(pool.map(_scan_one, images, repeat(num_classes), repeat(geometry)))
    usable = [(image, header, rows) for image, (header, rows) in zip(images, scanned) if not isinstance(header, str)]
    every = [rows for _, rows in scanned]
    report = DatasetReport(
        name=name,
        images=len(usable),
        boxes=sum(len(rows.rows) for _, _, rows in usable),
        missing_labels=sum(rows.missing for _, _, rows in usable),
        empty_labels=sum(rows.empty for _, _, rows in usable),
        corrupt=tuple(
            FileProblem(str(image), 0, why) for image, (why, _) in zip(images, scanned) if isinstance(why, str)
        ),
        malformed=tuple(problem for rows in every for problem in rows.problems),
        out_of_range=sum(rows.out_of_range for rows in every),
        clipped=sum(rows.clipped for rows in every),
        duplicate_rows=sum(rows.duplicates for rows in every),
        duplicate_images=duplicate_images,
        shared_labels=_shared_labels([image for image, _, _ in usable]),
        repeated=tuple(problem for rows in every for problem in rows.repeated),
        cut=tuple(problem for rows in every for problem in rows.cut),
        turned=tuple(
            FileProblem(str(image), 0, f"EXIF orientation {header.orientation} turns it: labels are of what is seen")
            for image, header, _ in usable
            if header.orientation != 1
        ),
        odd=tuple(FileProblem(str(image), 0, why) for image, header, _ in usable for why in header.oddities()),
    )
    shapes = np.array([header.shape for _, header, _ in usable], np.int32).reshape(-1, 2)
    lines = [np.array(rows.lines, np.int32) for _, _, rows in usable]
    outlines = None if geometry == "boxes" else [rows.outlines for _, _, rows in usable]
    return LabelledImages(
        [image for image, _, _ in usable], [rows.rows for _, _, rows in usable], shapes, report, lines, outlines
    )


def _shared_labels(images: list[Path]) -> tuple[FileProblem, ...]:
    owners: dict[Path, list[Path]] = {}
    for image in images:
        owners.setdefault(label_path(image), []).append(image)
    return tuple(
        FileProblem(str(path), 0, f"is the label file of {', '.join(image.name for image in several)}")
        for path, several in owners.items()
        if len(several) > 1 and path.exists()
    )


def _scan_one(image: Path, num_classes: int, geometry: Geometry) -> tuple[ImageHeader | str, LabelRows]:
    """Return the header of the image, or why it cannot be used, and its labels."""
    header: ImageHeader | str
    try:
        header = file_header(image)
        header.check(MAX_PIXELS)
    except ImageError as error:
        header = str(error)
    except OSError as error:
        header = error.strerror or str(error)
    path = label_path(image)
    try:
        return header, parse_labels(path.read_text("utf-8-sig"), str(path), num_classes, geometry)
    except FileNotFoundError:
        return header, LabelRows(missing=True)
    except (OSError, UnicodeDecodeError) as error:
        reason = "not a text file" if isinstance(error, UnicodeDecodeError) else error.strerror or str(error)
        return header, LabelRows(problems=[FileProblem(str(path), 0, reason)])


def _nothing_usable(images: list[Path], report: DatasetReport) -> str:
    if report.images == 0:
        return f"{report.name}: none of {len(images)} images can be read, for example {report.corrupt[0]}"
    if report.missing_labels == report.images:
        wanted = label_path(images[0])
        return f"{report.name}: none of {report.images} images has a label file; for {images[0]} it would be {wanted}"
    return f"{report.name}: all {len(report.malformed)} label rows are malformed, for example {report.malformed[0]}"


# ---------------------------------------------------------------- cache


def cache_folder(image: Path) -> Path:
    """Return the cache folder of a split whose first image is ``image``."""
    folder = label_path(image).parent
    return folder if folder == image.parent else folder.parent


def _fingerprint(images: list[Path], num_classes: int, listed: int) -> str:
    digest = hashlib.sha256(f"{CACHE_FORMAT} {num_classes} {listed} {TOLERANCE} {MAX_PIXELS}".encode())
    for image in images:
        for path in (image, label_path(image)):
            try:
                found = os.stat(path)
                digest.update(f"\n{path} {found.st_size} {found.st_mtime_ns}".encode(errors="surrogateescape"))
            except OSError:
                digest.update(f"\n{path} absent".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _write_cache(file: Path, fingerprint: str, images: list[Path], found: LabelledImages) -> None:
    usable = set(found.images)
    try:
        save_arrays(
            file,
            fingerprint=np.array(fingerprint),
            report=np.array(json.dumps(found.report.as_dict())),
            usable=np.array([image in usable for image in images]),
            counts=np.array([len(rows) for rows in found.labels], np.int64),
            rows=np.concatenate([np.zeros((0, 5), np.float32), *found.labels]),
            lines=np.concatenate([np.zeros(0, np.int32), *found.lines]),
            shapes=found.shapes,
            **_flat(found.outlines),
        )
    except OSError as error:
        warnings.warn(
            f"labels are not cached: {file}: {error.strerror or error}; they are read again each time", stacklevel=4
        )


def save_arrays(file: Path, **arrays: Any) -> None:
    """Write arrays to ``file`` (.npz), whole or not at all."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as stream:
            np.savez(stream, **arrays)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def _flat(outlines: list[list[Points]] | None) -> dict[str, Any]:
    """Flatten outlines to plain arrays: all points, and the number of points of each."""
    if outlines is None:
        return {}
    every = [points for of_image in outlines for points in of_image]
    return {
        "points": np.concatenate([np.zeros((0, 2), np.float32), *every]),
        "lengths": np.array([len(points) for points in every], np.int64),
    }


def _unflat(stored: Mapping[str, NDArray[Any]], counts: list[int]) -> list[list[Points]]:
    """Split the stored points of `_flat` into outlines, for images of ``counts`` boxes.

    Raises ValueError if there are not as many.
    """
    every = iter(np.split(stored["points"], np.cumsum(stored["lengths"])[:-1]) if len(stored["lengths"]) else [])
    if sum(counts) != len(stored["lengths"]):
        raise ValueError("outlines and boxes are not as many")
    return [[next(every) for _ in range(count)] for count in counts]


def _read_cache(file: Path, fingerprint: str, images: list[Path]) -> LabelledImages | None:
    """Load an earlier scan of exactly these files; None if there is none, or it cannot be read."""
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
            if str(stored["fingerprint"]) != fingerprint:
                return None
            report = json.loads(str(stored["report"]))
            for key in ("corrupt", "malformed", "shared_labels", "repeated", "cut", "turned", "odd"):
                report[key] = tuple(FileProblem(**problem) for problem in report[key])
            ends = np.cumsum(stored["counts"])[:-1]
            labels, lines = np.split(stored["rows"], ends), np.split(stored["lines"], ends)
            kept = [image for image, usable in zip(images, stored["usable"], strict=True) if usable]
            outlines = _unflat(stored, [len(rows) for rows in labels]) if "points" in stored else None
            return LabelledImages(kept, labels, stored["shapes"], DatasetReport(**report), lines, outlines)
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None
