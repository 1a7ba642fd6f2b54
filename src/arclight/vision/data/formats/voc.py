"""Read Pascal VOC's xml; refuse document types, which could define entities.

``arclight data import`` calls `read_voc`, which gives the `AnnotatedSet` of `annotations`. Files are untrusted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.parsers import expat

from arclight.vision.data.formats.annotations import (
    AnnotatedImage,
    AnnotatedSet,
    Annotation,
    box_in_image,
    checked_size,
    locate,
    safe_name,
)
from arclight.vision.data.images import SUFFIXES
from arclight.vision.data.labels import DatasetError, FileProblem

MAX_BYTES = 16 * 2**20
MAX_DEPTH = 32
_LISTS = {"train": ("train",), "val": ("val", "valid"), "test": ("test",)}


def is_voc(path: Path) -> bool:
    """Return True for a folder with xml files, or an ``Annotations`` folder of them."""
    return path.is_dir() and any(True for place in (path / "Annotations", path) for _ in place.glob("*.xml"))


@dataclass
class _Element:
    """One element of a file, with the line that it starts in."""

    tag: str
    line: int
    text: str = ""
    children: list[_Element] = field(default_factory=list)

    def find(self, tag: str) -> _Element | None:
        return next((child for child in self.children if child.tag == tag), None)

    def value(self, tag: str) -> str:
        found = self.find(tag)
        return "" if found is None else found.text.strip()


def _parse(file: Path) -> _Element:
    """Parse an XML file.

    Raises ValueError for a document type, for too deep nesting, and for what is not XML.
    """
    if file.stat().st_size > MAX_BYTES:
        raise ValueError(f"{file.stat().st_size / 1e6:.0f} MB are too large for the annotation of an image")
    root = _Element("", 0)
    path = [root]
    parser = expat.ParserCreate()
    parser.buffer_text = True

    def start(tag: str, _: dict[str, str]) -> None:
        if len(path) > MAX_DEPTH:
            raise ValueError(f"line {parser.CurrentLineNumber}: elements lie more than {MAX_DEPTH} deep")
        path[-1].children.append(_Element(tag, parser.CurrentLineNumber))
        path.append(path[-1].children[-1])

    def text(data: str) -> None:
        path[-1].text += data

    def refuse(*_: object) -> None:
        raise ValueError(
            f"line {parser.CurrentLineNumber}: a document type (DOCTYPE) is not read: it can define entities"
        )

    parser.StartElementHandler, parser.EndElementHandler = start, lambda _: path.pop()
    parser.CharacterDataHandler, parser.StartDoctypeDeclHandler = text, refuse
    try:
        parser.Parse(file.read_bytes(), True)
    except LookupError as error:
        raise ValueError(f"line 1: {error}") from error
    except expat.ExpatError as error:
        raise ValueError(f"line {error.lineno}: not XML: {expat.ErrorString(error.code)}") from error
    return root.children[0]


def read_voc(
    source: Path, *, images: Path | None = None, names: Sequence[str] = (), keep_difficult: bool = False
) -> AnnotatedSet:
    """Read a Pascal VOC folder, or a folder of xml files beside their images.

    VOC's has ``Annotations``, ``JPEGImages`` and the lists of ``ImageSets/Main``: train, val and test, or trainval for both of the first.
    images: folder of the images. names: the classes, in order; those found, sorted, where not given. keep_difficult: take objects
    marked difficult, too. Without lists all images are train.

    Coordinates are pixels counted from 1, both ends included, as VOC's own, unless one of the data set is 0 or a fraction: then they
    are edges, as tools of today write them. Raises DatasetError for a source without images; files and objects that cannot be
    read are listed in ``skipped``.
    """
    folder = source / "Annotations" if (source / "Annotations").is_dir() else source
    result = AnnotatedSet(list(names), {})
    documents: dict[Path, _Element] = {}
    for file in sorted(folder.glob("*.xml")):
        try:
            document = _parse(file)
        except (ValueError, OSError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            result.skipped.append(FileProblem(str(file), 0, reason))
        else:
            if document.tag == "annotation":
                documents[file] = document
            else:
                result.skipped.append(
                    FileProblem(str(file), document.line, f"<{document.tag[:40]}> is not an <annotation>")
                )
    if not documents:
        example = f", for example {result.skipped[0]}" if result.skipped else ""
        raise DatasetError(f"{folder}: no xml file of VOC's can be read{example}")
    if not names:
        objects = (child for document in documents.values() for child in document.children if child.tag == "object")
        result.names = sorted({name for child in objects if (name := child.value("name"))})
    offset = 1.0 if _counts_from_one(documents) else 0.0
    places = [images] if images is not None else [source / "JPEGImages", source / "images", folder, source]
    found: dict[str, AnnotatedImage] = {}
    for file, document in documents.items():
        reader = _Reader(file, result, keep_difficult, offset)
        if (image := reader.image(document, places)) is not None:
            found[file.stem] = image
    if not found:
        raise DatasetError(f"{source}: no image can be used, {result.skipped[-1]}; name their folder with --images")
    result.splits = _splits(source, found, result)
    return result


def _splits(source: Path, found: dict[str, AnnotatedImage], result: AnnotatedSet) -> dict[str, list[AnnotatedImage]]:
    """Divide images as the lists say; what is in none of them is counted as passed over.

    Without any list all images are train.
    """
    lists = {
        split: [file for stem in stems if (file := _list_of(source, stem)).is_file()] for split, stems in _LISTS.items()
    }
    if not lists["train"] and not lists["val"] and (both := _list_of(source, "trainval")).is_file():
        lists["train"] = [both]
    stems: dict[str, list[str]] = {split: [] for split in lists}
    for split, files in lists.items():
        for file in files:
            listed = [line.split()[0] for line in file.read_text("utf-8-sig").splitlines() if line.strip()]
            stems[split] += listed
            if lacking := [stem for stem in listed if stem not in found]:
                message = f"{len(lacking):,} images of it cannot be used, {lacking[0]} first"
                result.skipped.append(FileProblem(str(file), 0, message))
    used = {split: [stem for stem in dict.fromkeys(listed) if stem in found] for split, listed in stems.items()}
    if not any(used.values()):
        return {"train": list(found.values())}
    if left := len(found.keys() - set().union(*used.values())):
        result.passed_over["images in no list of ImageSets/Main"] = left
    return {split: [found[stem] for stem in listed] for split, listed in used.items() if listed}


def _list_of(source: Path, stem: str) -> Path:
    return source / "ImageSets/Main" / f"{stem}.txt"


_EDGES = ("xmin", "ymin", "xmax", "ymax")


def _counts_from_one(documents: dict[Path, _Element]) -> bool:
    """Return True if pixels count from 1, as VOC's do: no coordinate is 0 or a fraction."""
    for document in documents.values():
        for child in document.children:
            box = child.find("bndbox") if child.tag == "object" else None
            values = [box.value(edge) for edge in _EDGES] if box is not None else []
            if not all(_whole_number(text) for text in values if text):
                return False
    return True


@dataclass
class _Reader:
    """Reads one file."""

    file: Path
    result: AnnotatedSet
    keep_difficult: bool
    offset: float

    def image(self, document: _Element, places: Sequence[Path]) -> AnnotatedImage | None:
        """Return the image with its objects; None, with the reason in ``skipped``, if unusable."""
        named = document.find("filename")
        candidates = [self.file.stem + suffix for suffix in SUFFIXES]
        if named is not None and named.text.strip():
            name = safe_name(named.text.strip(), f"{self.file}:{named.line}")
            candidates.insert(0, str(name))
        file = next((found for name in candidates if (found := locate(safe_name(name, str(self.file)), places))), None)
        if file is None:
            self._skip(document.line, f"its image {candidates[0]} is not in {', '.join(map(str, places))}")
            return None
        size = document.find("size")
        declared = (size.value("width"), size.value("height")) if size is not None else ("", "")
        width, height = map(_whole_number, declared)
        known = (width, height) if width and height else None
        actual = checked_size(
            file, known, f"{self.file.name}:{size.line if size is not None else 0}", self.result.skipped
        )
        if actual is None:
            return None
        objects = [self._object(child, *actual) for child in document.children if child.tag == "object"]
        name = safe_name(file.name, str(file))
        return AnnotatedImage(file, name, *actual, tuple(one for one in objects if one is not None))

    def _object(self, element: _Element, width: int, height: int) -> Annotation | None:
        name, box = element.value("name"), element.find("bndbox")
        if element.value("difficult") == "1" and not self.keep_difficult:
            passed = self.result.passed_over
            passed["difficult objects"] = passed.get("difficult objects", 0) + 1
            return None
        if name not in self.result.names:
            self._skip(element.line, f"there is no class {name[:40]!r}")
            return None
        if box is None:
            self._skip(element.line, f"the {name} has no bndbox")
            return None
        try:
            left, top, right, bottom = (_number(box, edge) for edge in _EDGES)
            edges = box_in_image(left - self.offset, top - self.offset, right, bottom, width, height)
        except ValueError as error:
            self._skip(box.line, str(error))
            return None
        return Annotation(self.result.names.index(name), edges)

    def _skip(self, line: int, reason: str) -> None:
        self.result.skipped.append(FileProblem(str(self.file), line, reason))


def _whole_number(text: str) -> int:
    """Return a number of pixels; 0 for a text that is none."""
    return int(text) if text.isdecimal() and len(text) < 10 else 0


def _number(box: _Element, edge: str) -> float:
    text = box.value(edge)
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{edge} is {text[:40]!r}, not a number") from None
    if not math.isfinite(value):
        raise ValueError(f"{edge} is {text[:40]}, NaN or infinite")
    return value
