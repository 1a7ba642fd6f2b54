"""Read and write COCO's json: boxes, polygons, keypoints and run-length masks.

``arclight data import`` calls `read_coco`, ``export`` `write_coco`; `annotations` is what they read into and write from. Files are untrusted:
names may not leave their folder, and sizes of masks are checked before memory is taken.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arclight.fabric.extras import require
from arclight.vision.data.data_yaml import MAX_KEYPOINTS
from arclight.vision.data.formats.annotations import (
    AnnotatedImage,
    AnnotatedSet,
    Annotation,
    Polygon,
    box_in_image,
    checked_size,
    locate,
    safe_name,
)
from arclight.vision.data.formats.run_lengths import decode_mask
from arclight.vision.data.images import MAX_PIXELS
from arclight.vision.data.labels import DatasetError, FileProblem, KeypointShape

cv2 = require("cv2", extra="vision")

MAX_POINTS = 100_000
"""Most corners of an object's outline, over all of its parts."""
_FINE = 4
"""Factor by which masks are enlarged before they are traced: outlines then lie an eighth of a pixel inside the mask's edge."""
_MAX_FINE_PIXELS = 4_000_000
SPLIT_WORDS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}


def is_coco(path: Path) -> bool:
    """Return True for a .json file, or a folder that holds such files as COCO's data sets do."""
    return path.suffix == ".json" if path.is_file() else bool(_json_files(path))


def _json_files(folder: Path) -> list[Path]:
    """Return the annotation files in ``folder``, its ``annotations`` or its folders of splits.

    The latter is Roboflow's layout.
    """
    places = [folder, folder / "annotations", *(folder / word for word in SPLIT_WORDS)]
    found = [file for place in places if place.is_dir() for file in sorted(place.glob("*.json"))]
    return [file for file in found if split_of(file) is not None or file.parent == folder]


def split_of(file: Path) -> str | None:
    """Return the split that a file's name, or its folder's name, contains; None without one."""
    for text in (file.stem.lower(), file.parent.name.lower()):
        words = "".join(letter if letter.isalpha() else " " for letter in text).split()
        if found := [SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS]:
            return found[-1]
    return None


def read_coco(
    source: Path,
    *,
    images: Path | None = None,
    masks: bool = False,
    keep_crowds: bool = False,
    keypoints: bool = False,
) -> AnnotatedSet:
    """Read a COCO file, or a folder of them, one per split (instances_val2017.json).

    A file whose name has no split is train.
    images: the folder that names of images are relative to, or that has such a folder of each split; searched around the
    file where not given. masks: trace outlines of
    run-length masks, too. keep_crowds: take crowds for objects. keypoints: read keypoints; without it they are counted as passed
    over. Class ids may have gaps: classes are numbered in their order, and ids of one name are one class.

    Raises DatasetError for a file that is not COCO's, names that leave the folder, and if no image is found. Annotations
    that cannot be read are listed in ``skipped``.
    """
    files = [source] if source.is_file() else _json_files(source)
    if not files:
        raise DatasetError(
            f"{source}: no .json file with train, val or test in its name, nor in {source / 'annotations'}"
        )
    documents: dict[str, tuple[Path, dict[str, Any]]] = {}
    for file in files:
        split = split_of(file) or "train"
        if split in documents:
            raise DatasetError(
                f"{documents[split][0]} and {file} are both {split} by their names: import one of them by itself"
            )
        documents[split] = file, _document(file)
    numbers, names = _categories(dict(documents.values()))
    result = AnnotatedSet(names, {}, keypoints=_keypoint_shape(dict(documents.values())) if keypoints else None)
    for split, (file, document) in documents.items():
        reader = _Reader(file, numbers, masks, keep_crowds, result.keypoints, result.skipped)
        result.splits[split] = list(reader.images(document, images))
        result.passed_over = dict(Counter(result.passed_over) + Counter(reader.passed_over))
    return result


def _document(file: Path) -> dict[str, Any]:
    try:
        content: Any = json.loads(file.read_text("utf-8-sig"))
    except OSError as error:
        raise DatasetError(f"{file}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{file} is not JSON: {error}") from error
    for key in ("images", "annotations", "categories"):
        if not isinstance(content, dict) or not isinstance(content.get(key), list):
            raise DatasetError(f"{file} is not COCO's: it has no list {key!r}")
        for place, entry in enumerate(content[key]):
            if not isinstance(entry, dict):
                raise DatasetError(f"{file}: {key}[{place}] is {type(entry).__name__}, not a table")
    return dict(content)


def _categories(documents: Mapping[Path, dict[str, Any]]) -> tuple[dict[int, int], list[str]]:
    """Return number by id, and names: the classes of all files, in the order of their ids.

    Ids of one name are one class: files of a data set may number it differently, and some tools list it as its own
    superclass, too.
    """
    known: dict[int, tuple[str, Path]] = {}
    for file, document in documents.items():
        for place, category in enumerate(document["categories"]):
            number, name = category.get("id"), category.get("name")
            if type(number) is not int or not isinstance(name, str) or not name:
                raise DatasetError(f"{file}: categories[{place}] needs a whole number as id, and a name")
            if number in known and known[number][0] != name:
                before, other = known[number]
                raise DatasetError(f"{file}: category {number} is {name!r}, and {before!r} in {other}")
            known[number] = name, file
    order = sorted(known)
    names = list(dict.fromkeys(known[number][0] for number in order))
    places = {name: place for place, name in enumerate(names)}
    return {number: places[known[number][0]] for number in order}, names


def _keypoint_shape(documents: Mapping[Path, dict[str, Any]]) -> KeypointShape:
    """Return the keypoints of all files, as classes list them or else annotations have them.

    Raises DatasetError for none, and for several numbers of them.
    """
    listed = [category.get("keypoints") for document in documents.values() for category in document["categories"]]
    counts = {len(names) for names in listed if isinstance(names, list) and names}
    if not counts:
        given = [entry.get("keypoints") for document in documents.values() for entry in document["annotations"]]
        counts = {len(marks) // 3 for marks in given if isinstance(marks, list) and len(marks) >= 3}
    if len(counts) != 1 or max(counts) > MAX_KEYPOINTS:
        found = f"objects of {' and of '.join(map(str, sorted(counts)))} keypoints" if counts else "no keypoints"
        raise DatasetError(
            f"{', '.join(map(str, documents))}: there are {found}, and rows of YOLO have one number of them, at most "
            f"{MAX_KEYPOINTS}: import boxes, without keypoints"
        )
    return KeypointShape(counts.pop(), 3)


@dataclass
class _Reader:
    """Reads one file's images and annotations."""

    file: Path
    numbers: dict[int, int]
    masks: bool
    keep_crowds: bool
    keypoints: KeypointShape | None
    skipped: list[FileProblem]
    passed_over: dict[str, int] = field(default_factory=dict)

    def images(self, document: dict[str, Any], folder: Path | None) -> Iterator[AnnotatedImage]:
        names = [
            safe_name(entry.get("file_name"), f"{self.file}: images[{i}]") for i, entry in enumerate(document["images"])
        ]
        folders = self._folders(names) if folder is None else [folder, *(folder / part for part in self._parts())]
        found: dict[int, tuple[Path, PurePosixPath, int, int]] = {}
        for place, (entry, name) in enumerate(zip(document["images"], names)):
            number = entry.get("id")
            if type(number) is not int or number in found:
                raise DatasetError(
                    f"{self.file}: images[{place}] has the id {str(number)[:40]}: ids are whole numbers, once each"
                )
            if (file := locate(name, folders)) is None:
                self._skip(f"images[{place}]: {name} is not in {', '.join(map(str, folders))}")
                continue
            declared = entry.get("width"), entry.get("height")
            size = declared if type(declared[0]) is int and type(declared[1]) is int else None
            if (actual := checked_size(file, size, f"{self.file.name}: images[{place}]", self.skipped)) is not None:
                found[number] = (file, name, *actual)
        if names and not found:
            raise DatasetError(
                f"{self.file}: none of its {len(names):,} images can be used, {self.skipped[-1]}; name their folder with --images"
            )
        objects = self._objects(document, found, {entry["id"] for entry in document["images"]})
        for number, (file, name, width, height) in found.items():
            yield AnnotatedImage(file, name, width, height, tuple(objects.get(number, ())))

    def _folders(self, names: list[PurePosixPath]) -> list[Path]:
        """Return the folders that may hold the images of an annotation file.

        They are beside or above the file, in `images`, or named after the last word of the file's name.
        """
        above = [self.file.parent, self.file.parent.parent]
        inner = [top / "images" for top in above]
        places = [
            *above,
            *inner,
            *(top / part for top in (*above, *inner) for part in self._parts()),
        ]
        having = [place for place in dict.fromkeys(places) if any((place / name).is_file() for name in names[:20])]
        return having or [self.file.parent]

    def _parts(self) -> tuple[str, str]:
        """Return the names that the folder of the file's split may have, such as val2017 and val."""
        word = self.file.stem.rpartition("_")[2]
        return word, split_of(self.file) or word

    def _objects(
        self, document: dict[str, Any], images: Mapping[int, tuple[Path, PurePosixPath, int, int]], listed: set[int]
    ) -> dict[int, list[Annotation]]:
        objects: dict[int, list[Annotation]] = {}
        for place, entry in enumerate(document["annotations"]):
            owner = entry.get("image_id")
            if owner not in listed if isinstance(owner, int) else True:
                self._skip(f"annotations[{place}]: there is no image {str(owner)[:40]}")
                continue
            if owner not in images:
                continue  # said once, of the image
            if entry.get("iscrowd") in (1, True) and not self.keep_crowds:
                self._pass_over("crowds")
                continue
            _, _, width, height = images[owner]
            try:
                objects.setdefault(owner, []).append(self._object(entry, width, height))
            except ValueError as error:
                self._skip(f"annotations[{place}] of {images[owner][1]}: {error}")
        return objects

    def _object(self, entry: dict[str, Any], width: int, height: int) -> Annotation:
        """Read one annotation. Raises ValueError saying why it cannot be."""
        category = entry.get("category_id")
        if type(category) is not int or category not in self.numbers:
            raise ValueError(f"there is no category {str(category)[:40]}")
        box: Any = entry.get("bbox")
        outline, without_box = entry.get("segmentation"), not box
        if box and not (isinstance(box, list) and len(box) == 4 and all(map(_is_number, box))):
            raise ValueError(f"bbox is {str(box)[:60]}, not four numbers: left, top, width, height")
        polygons: tuple[Polygon, ...] = ()
        if isinstance(outline, list) and outline:
            try:
                # [[]] is some tools' word for none
                polygons = _bounded(_polygon(part) for part in outline if part != [])
            except ValueError:
                if without_box or self.masks:
                    raise
        elif isinstance(outline, dict) and (self.masks or without_box):
            polygons = _bounded(mask_polygons(decode_mask(outline, width, height, MAX_PIXELS)))
        elif outline and not isinstance(outline, list | dict):
            raise ValueError(f"segmentation is {type(outline).__name__}, not polygons or a run-length mask")
        if without_box and not polygons:
            raise ValueError("it has neither a bbox nor a segmentation")
        if without_box:
            points = np.concatenate(polygons)
            left, top, right, bottom = (float(edge) for edge in (*points.min(0), *points.max(0)))
        else:
            left, top, right, bottom = (float(box[0]), float(box[1]), float(box[0] + box[2]), float(box[1] + box[3]))
        marks = self._keypoints(entry.get("keypoints"), width, height)
        return Annotation(
            self.numbers[category], box_in_image(left, top, right, bottom, width, height), polygons, marks
        )

    def _keypoints(self, marks: Any, width: int, height: int) -> tuple[tuple[float, float, int], ...]:
        """Read the keypoints of one annotation, zeros for those not labelled or not in the image.

        Raises ValueError.
        """
        if self.keypoints is None:
            if isinstance(marks, list) and any(marks[2::3]):
                self._pass_over("objects' keypoints (--keypoints imports them)")
            return ()
        if not marks:
            return ((0.0, 0.0, 0),) * self.keypoints.count
        if not (isinstance(marks, list) and len(marks) == 3 * self.keypoints.count and all(map(_is_number, marks))):
            raise ValueError(
                f"its keypoints are {str(marks)[:60]}, not x, y and visibility of each of {self.keypoints.count}"
            )
        if not np.isfinite(marks).all():
            raise ValueError("a keypoint has a coordinate that is NaN or infinite")
        found = []
        for x, y, visible in zip(marks[::3], marks[1::3], marks[2::3], strict=True):
            if visible not in (0, 1, 2):
                raise ValueError(f"a keypoint has visibility {str(visible)[:40]}: it is 0, 1 or 2")
            inside = visible > 0 and 0 <= x <= width and 0 <= y <= height
            found.append((float(x), float(y), int(visible)) if inside else (0.0, 0.0, 0))
        return tuple(found)

    def _pass_over(self, what: str) -> None:
        self.passed_over[what] = self.passed_over.get(what, 0) + 1

    def _skip(self, reason: str) -> None:
        self.skipped.append(FileProblem(str(self.file), 0, reason))


def _is_number(value: Any) -> bool:
    if isinstance(value, int):  # of json, which bounds none
        return not isinstance(value, bool) and abs(value) < 10**12
    return isinstance(value, float)


def _polygon(values: Any) -> Polygon:
    if not isinstance(values, list) or len(values) < 6 or len(values) % 2 or not all(map(_is_number, values)):
        raise ValueError("a polygon is a list of x1, y1, x2, y2, x3, y3, ...: 3 corners or more")
    points = np.array(values, np.float64).reshape(-1, 2)
    if not np.isfinite(points).all():
        raise ValueError("a polygon has a coordinate that is NaN or infinite")
    return points


def _bounded(polygons: Iterable[Polygon]) -> tuple[Polygon, ...]:
    """Return the parts of an outline; raises ValueError for too many corners.

    `joined_outline` compares each with all others.
    """
    parts = tuple(polygons)
    if (corners := sum(map(len, parts))) > MAX_POINTS:
        raise ValueError(f"an outline of {corners:,} corners is too large: at most {MAX_POINTS:,}")
    return parts


# ---------------------------------------------------------------- masks


def mask_polygons(mask: NDArray[np.uint8]) -> tuple[NDArray[np.float64], ...]:
    """Trace the outer outlines of a mask (H, W) as polygons (n, 2), pixels; holes are filled."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    if not len(rows):
        return ()
    top, left = int(rows[0]), int(columns[0])
    crop = mask[top : rows[-1] + 1, left : columns[-1] + 1]
    # A contour goes through the middles of pixels: of small ones, it is next to the edge of the mask.
    fine = _FINE if crop.size <= _MAX_FINE_PIXELS else 1
    enlarged = np.ascontiguousarray(crop.repeat(fine, 0).repeat(fine, 1))
    contours, _ = cv2.findContours(enlarged, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
    found = []
    for contour in contours:
        points = (contour.reshape(-1, 2).astype(np.float64) + 0.5) / fine + (left, top)
        if len(points) >= 3:
            found.append(points)
    return tuple(found)


# ---------------------------------------------------------------- write


def write_coco(found: AnnotatedSet, to: Path) -> list[Path]:
    """Write ``to``/instances_<split>.json for each split; return the files.

    Images stay where they are. Image names are relative to the common folder of their split; categories are numbered
    from 0, as the classes are. Raises DatasetError if one of the files exists.
    """
    files = {split: to / f"instances_{split}.json" for split in found.splits}
    for file in files.values():
        if file.exists():
            raise DatasetError(f"{file} exists already; name another folder, or delete it first")
    to.mkdir(parents=True, exist_ok=True)
    for split, images in found.splits.items():
        document = {
            "info": {"description": f"{split} split"},
            "licenses": [],
            "categories": [_category(number, name, found.keypoints) for number, name in enumerate(found.names)],
            "images": [
                {"id": number, "file_name": str(image.name), "width": image.width, "height": image.height}
                for number, image in enumerate(images, 1)
            ],
            "annotations": list(_rows(images)),
        }
        temporary = files[split].with_name(f".{files[split].name}")
        temporary.write_text(json.dumps(document) + "\n", "utf-8")
        temporary.replace(files[split])
    return list(files.values())


def _category(number: int, name: str, keypoints: KeypointShape | None) -> dict[str, Any]:
    """Describe a class as a COCO category; keypoints are named by their number, from 0."""
    category: dict[str, Any] = {"id": number, "name": name}
    if keypoints is not None:
        category |= {"keypoints": [str(place) for place in range(keypoints.count)], "skeleton": []}
    return category


def _rows(images: list[AnnotatedImage]) -> Iterator[dict[str, Any]]:
    pairs = ((number, annotation) for number, image in enumerate(images, 1) for annotation in image.annotations)
    for row, (number, annotation) in enumerate(pairs, 1):
        left, top, right, bottom = annotation.box_xyxy_px
        areas = [_area(part) for part in annotation.polygons]
        marked = {
            "keypoints": [round(value, 3) for point in annotation.keypoints for value in point],
            "num_keypoints": sum(point[2] > 0 for point in annotation.keypoints),
        }
        yield {
            "id": row,
            "image_id": number,
            "category_id": annotation.label,
            "bbox": [round(value, 3) for value in (left, top, right - left, bottom - top)],
            "area": round(sum(areas) if areas else (right - left) * (bottom - top), 3),
            "iscrowd": 0,
            "segmentation": [part.round(3).ravel().tolist() for part in annotation.polygons],
            **(marked if annotation.keypoints else {}),
        }


def _area(polygon: Polygon) -> float:
    x, y = polygon.T
    return float(abs(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))) / 2)
