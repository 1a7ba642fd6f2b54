"""Hold annotated images of any format; write them as, or read them from, a YOLO data set.

`coco` and `voc` read into an `AnnotatedSet`, which ``arclight data import`` writes as YOLO files; ``export`` reads these back for `coco`. A new
format is a reader beside `coco`, and a branch in ``cli.commands.data``.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from arclight.vision.data.data_yaml import DataSpec, write_data_yaml
from arclight.vision.data.image_headers import ImageError, file_header
from arclight.vision.data.images import MAX_PIXELS, SUFFIXES
from arclight.vision.data.labels import (
    DatasetError,
    FileProblem,
    KeypointShape,
    check_labels,
    label_path,
    names_below,
    parse_labels,
)

Polygon = NDArray[np.float64]
"""(n, 2): x and y of each corner, pixels."""
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Annotation:
    """One object: its class, its box, and its outline where the source has one."""

    label: int
    box_xyxy_px: tuple[float, float, float, float]
    polygons: tuple[Polygon, ...] = ()
    """Parts of the outline; none for a box alone."""
    keypoints: tuple[tuple[float, float, int], ...] = ()
    """x and y in pixels, and 0 (not labelled), 1 (hidden) or 2 (seen), of each keypoint, if it has any."""


@dataclass(frozen=True)
class AnnotatedImage:
    """An image file, its place in its split, and its objects."""

    file: Path
    name: PurePosixPath
    width: int
    height: int
    annotations: tuple[Annotation, ...]


@dataclass
class AnnotatedSet:
    """Data set that was read: classes, images by split, and what was skipped."""

    names: list[str]
    splits: dict[str, list[AnnotatedImage]]
    skipped: list[FileProblem] = field(default_factory=list)
    """Annotations and images that could not be read, and why."""
    passed_over: dict[str, int] = field(default_factory=dict)
    """What was left out on purpose, and how many there were: crowds, difficult objects, images in no list."""
    keypoints: KeypointShape | None = None
    """Keypoints that every object has, if any have."""

    def __str__(self) -> str:
        lines = [
            f"{split}: {len(images):,} images, {sum(len(image.annotations) for image in images):,} objects"
            for split, images in self.splits.items()
        ]
        lines += [f"passed over: {number:,} {what}" for what, number in self.passed_over.items()]
        if self.skipped:
            lines.append(f"skipped: {len(self.skipped):,}")
            lines += [f"    {problem}" for problem in self.skipped[:5]]
            lines += [f"    and {len(self.skipped) - 5:,} more"] * (len(self.skipped) > 5)
        return "\n".join(lines)


def safe_name(text: object, place: str) -> PurePosixPath:
    """Check a file name from a foreign data set and return it as a relative path.

    Raises DatasetError for one that leaves its folder.
    """
    if not isinstance(text, str) or not text or "\0" in text:
        raise DatasetError(f"{place}: {str(text)[:80]!r} is not the name of a file")
    path = PurePosixPath(text.replace("\\", "/"))
    if not path.parts:
        raise DatasetError(f"{place}: {text[:80]!r} is a folder, not the name of a file")
    if path.is_absolute() or ".." in path.parts or ":" in path.parts[0]:
        raise DatasetError(f"{place}: {text[:80]!r} leaves the folder of images: names are relative and have no ..")
    return path


def size_of(file: Path) -> tuple[int, int]:
    """Return width and height of an image as it is seen. Raises ImageError and OSError."""
    header = file_header(file)
    header.check(MAX_PIXELS)
    height, width = header.shape
    return width, height


def box_in_image(
    left: float, top: float, right: float, bottom: float, width: int, height: int
) -> tuple[float, float, float, float]:
    """Clip a box to its image.

    Raises ValueError, with the reason, if nothing is left of it.
    """
    if not np.isfinite((left, top, right, bottom)).all():
        raise ValueError(f"the box {left}, {top}, {right}, {bottom} has a coordinate that is NaN or infinite")
    if right <= left or bottom <= top:
        raise ValueError(f"the box of {right - left:g} x {bottom - top:g} pixels has no area")
    cut = max(left, 0.0), max(top, 0.0), min(right, float(width)), min(bottom, float(height))
    if cut[2] <= cut[0] or cut[3] <= cut[1]:
        raise ValueError(
            f"the box {left:g}, {top:g}, {right:g}, {bottom:g} is outside of its image, {width} x {height}"
        )
    return cut


def joined_outline(polygons: Sequence[Polygon]) -> Polygon:
    """Join the parts of an outline into one polygon, with bridges over the shortest gaps.

    The bridges have no area, so that the ring encloses what its parts enclose.
    """
    ring = polygons[0]
    for part in polygons[1:]:
        here, there = _nearest(ring, part)
        ring = np.concatenate((ring[: here + 1], part[there:], part[: there + 1], ring[here:]))
    return ring


def _nearest(ring: Polygon, part: Polygon) -> tuple[int, int]:
    """Return the places of the two corners with the shortest gap.

    Distances are computed in blocks: between all pairs they take gigabytes.
    """
    found = (math.inf, 0, 0)
    rows = max(1, _MAX_GAPS // len(part))
    for start in range(0, len(ring), rows):
        gaps = ((ring[start : start + rows, None] - part[None]) ** 2).sum(-1)
        here, there = divmod(int(gaps.argmin()), len(part))
        found = min(found, (float(gaps[here, there]), start + here, there))
    return found[1:]


_MAX_GAPS = 1 << 19
"""Most distances that are held at one time."""


# ---------------------------------------------------------------- YOLO


def write_yolo(
    found: AnnotatedSet, to: Path, *, polygons: bool = False, symlink: bool = False, progress: Progress | None = None
) -> Path:
    """Write a YOLO data set into the new folder ``to``; return its data.yaml.

    polygons: rows are outlines, a box's being its corners; else boxes, with keypoints if the objects have them. symlink: refer to the images
    instead of copying them.
    The folder appears complete or not at all. Raises DatasetError where it holds something, and for outlines of objects with
    keypoints: a row has one or the other.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise DatasetError(f"{to} holds something already; name a folder that is empty or does not exist")
    if polygons and found.keypoints is not None:
        raise DatasetError(f"rows have outlines or {found.keypoints}, not both: import one of them")
    if not found.names or not any(found.splits.values()):
        raise DatasetError(f"there are {len(found.names)} classes and no image: nothing to write into {to}")
    total, done = sum(map(len, found.splits.values())), 0
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent, prefix=f".{to.name}.") as unfinished:
        folder = Path(unfinished) / "set"
        for split, images in found.splits.items():
            taken: dict[PurePosixPath, PurePosixPath] = {}
            for image in images:
                name = _name_to_find(image)
                label = name.with_suffix(".txt")
                if label in taken:
                    raise DatasetError(
                        f"{split}: {taken[label]} and {image.name} would share the label file {label}: rename one"
                    )
                taken[label] = image.name
                target = folder / "images" / split / name
                _write_image(image, target, symlink)
                _write_labels(image, label_path(target), polygons, found.keypoints)
                done += 1
                if progress is not None and (done % 64 == 0 or done == total):
                    progress(done, total)
        places: dict[str, str | list[str]] = {
            split: f"images/{split}" for split, images in found.splits.items() if images
        }
        write_data_yaml(folder, found.names, places, found.keypoints)
        if to.exists():
            to.rmdir()
        folder.replace(to)
    return to / "data.yaml"


def _write_image(image: AnnotatedImage, target: Path, symlink: bool) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if symlink:
        target.symlink_to(image.file.resolve())
    else:
        shutil.copyfile(image.file, target)


def _name_to_find(image: AnnotatedImage) -> PurePosixPath:
    """Return the name of an image with an ending by which data sets find images."""
    if image.name.suffix.lower() in SUFFIXES:
        return image.name
    return image.name.with_name(f"{image.name.name}.{file_header(image.file).format.lower()}")


def _write_labels(image: AnnotatedImage, target: Path, polygons: bool, keypoints: KeypointShape | None) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    size = np.array([image.width, image.height], np.float64)
    rows = []
    for annotation in image.annotations:
        left, top, right, bottom = annotation.box_xyxy_px
        if polygons:
            corners = np.array([(left, top), (right, top), (right, bottom), (left, bottom)])
            outline = joined_outline(annotation.polygons) if annotation.polygons else corners
            values = np.clip(outline / size, 0, 1).ravel()
        else:
            values = np.array([(left + right) / 2, (top + bottom) / 2, right - left, bottom - top]) / np.tile(size, 2)
        if keypoints is not None:
            marks = np.array(annotation.keypoints, np.float64) / (*size, 1.0)
            values = np.concatenate((values, marks[:, : keypoints.dims].ravel()))
        rows.append(f"{annotation.label} {' '.join(f'{value:.7g}' for value in values)}\n")
    target.write_text("".join(rows), "utf-8")


def read_yolo(spec: DataSpec) -> AnnotatedSet:
    """Read all splits of a YOLO data set for export, keeping boxes and polygons as such.

    Images and rows that cannot be read are listed in ``skipped``. Raises DatasetError if a split has nothing usable.
    """
    result, shape = AnnotatedSet(list(spec.names), {}, keypoints=spec.keypoints), spec.keypoints
    for split in ("train", "val", "test"):
        if not getattr(spec, split):
            continue
        found = check_labels(spec.images(split), len(spec.names), name=split, cache=False, geometry=spec.geometry())
        result.skipped += [*found.report.corrupt, *found.report.malformed]
        repeated = {problem.path for problem in found.report.repeated}
        images = []
        for image, name, rows, (height, width), lines in zip(
            found.images, names_below(found.images), found.labels, found.shapes, found.lines
        ):
            size = np.array([width, height], np.float64)
            text = label_path(image).read_text("utf-8-sig") if len(rows) else ""
            texts, annotations = text.splitlines(), []
            read = dict(zip(lines.tolist(), rows))
            if shape is None and str(label_path(image)) in repeated:  # of boxes: outlines may differ
                outlined = parse_labels(text, "", len(spec.names), "polygons")
                read |= dict(zip(outlined.lines, outlined.rows))
            for line, row in sorted((line, row.astype(np.float64)) for line, row in read.items()):
                low, high = (row[1:3] - row[3:5] / 2) * size, (row[1:3] + row[3:5] / 2) * size
                values = texts[line - 1].split()[1:]
                box = (float(low[0]), float(low[1]), float(high[0]), float(high[1]))
                if shape is not None:
                    annotations.append(Annotation(int(row[0]), box, keypoints=_keypoints(values[4:], shape, size)))
                    continue
                outline = np.clip(np.array(values, np.float64).reshape(-1, 2), 0, 1) * size
                annotations.append(Annotation(int(row[0]), box, (outline,) if len(values) > 4 else ()))
            images.append(AnnotatedImage(image, name, int(width), int(height), tuple(annotations)))
        result.splits[split] = images
    return result


def _keypoints(
    texts: Sequence[str], shape: KeypointShape, size: NDArray[np.float64]
) -> tuple[tuple[float, float, int], ...]:
    """Return x, y in pixels and visibility of each keypoint of a checked label row.

    Keypoints that are not labelled are zeros.
    """
    rows = np.array(texts, np.float64).reshape(shape.count, shape.dims)
    seen = rows[:, 2] if shape.dims == 3 else np.full(shape.count, 2.0)
    places = np.clip(rows[:, :2], 0, 1) * size * (seen > 0)[:, None]
    return tuple((x, y, int(v)) for (x, y), v in zip(places.tolist(), seen.tolist()))


def read_images(folder: Path, names: Sequence[str]) -> AnnotatedSet:
    """Read a folder of images without labels; folders train, val and test are splits.

    Without such folders all images are train. Raises DatasetError for a folder without images, and one that holds
    folders of classes.
    """
    words = {"train": ("train",), "val": ("val", "valid"), "test": ("test",)}
    places = {split: folder / word for split, among in words.items() for word in among if (folder / word).is_dir()}
    result = AnnotatedSet(list(names), {})
    for split, top in (places or {"train": folder}).items():
        files = sorted(file for file in top.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
        result.splits[split] = []
        for file in files:
            if (size := checked_size(file, None, "", result.skipped)) is not None:
                name = PurePosixPath(file.relative_to(top).as_posix())
                result.splits[split].append(AnnotatedImage(file, name, *size, ()))
    if not any(result.splits.values()):
        raise DatasetError(f"{folder}: no json of COCO's, no xml of VOC's, and no image that can be read")
    if not names:
        raise DatasetError(
            f"{folder} has images and no labels: name the classes that they will be labelled with, --names A,B. Of folders of classes, "
            "`arclight data split` makes a classification data set"
        )
    return result


def locate(name: PurePosixPath, folders: Sequence[Path]) -> Path | None:
    """Return the file ``name`` in the first of ``folders`` that has it."""
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def checked_size(
    file: Path, declared: tuple[int, int] | None, place: str, skipped: list[FileProblem]
) -> tuple[int, int] | None:
    """Return the size of an image; None, with the reason in ``skipped``, if it cannot be used.

    ``declared``: the size that its annotations state, from which the real one must not differ.
    """
    try:
        size = size_of(file)
    except (ImageError, OSError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        skipped.append(FileProblem(str(file), 0, reason))
        return None
    if declared is not None and declared != size:
        message = f"{place} says {declared[0]} x {declared[1]} pixels, the image has {size[0]} x {size[1]}: its objects are left out"
        skipped.append(FileProblem(str(file), 0, message))
        return None
    return size
