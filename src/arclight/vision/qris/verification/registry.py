"""Read a registry of places and their payment codes: CSV, JSON or TOML, checked row by row.

A place may have a picture of its print: `RegisteredPrint` holds its features, `compare_prints` lays it over a photo.

``arclight scan`` reads a table by it, ``arclight demo`` makes one of drawn places, `verifier` compares with it. Fields of `Place` are columns
of the tables and keys of results: they stay.
"""

from __future__ import annotations

import csv
import io
import json
import re
import tomllib
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from arclight.fabric.extras import require
from arclight.vision.data.images import Image
from arclight.vision.qris.payload.codec import Payload
from arclight.vision.qris.payload.rules import QRIS, QRIS_TAG, TOP
from arclight.vision.qris.reading.finder_patterns import Floats

cv2 = require("cv2", extra="vision")

MAX_ROWS = 200_000
MAX_BYTES = 64_000_000
_LISTED = 20  # problems that an error spells out
_SHOWN = 200  # characters of a faulty value that an error repeats


class RegistryError(ValueError):
    """A registry cannot be read; ``problems`` names file and row of each fault."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        more = len(self.problems) - _LISTED
        super().__init__("; ".join(self.problems[:_LISTED]) + (f"; and {more} more" if more > 0 else ""))


@dataclass(frozen=True, kw_only=True)
class Place:
    """One row of the registry: a place, and the contents of its printed code.

    Fields left empty are not compared.
    """

    name: str
    nmid: str
    guids: tuple[str, ...] = ()
    """Acquirers, such as ``COM.GO-JEK.WWW``; the code names at least one of them and no other."""
    pan: str | None = None
    city: str | None = None
    terminal: str | None = None
    kind: Literal["static", "dynamic"] = "static"
    """Whether its code carries an amount; printed codes have none."""
    poster: Path | None = None
    """A picture of the print, seen from the front."""

    @classmethod
    def of(cls, payload: Payload, *, poster: Path | None = None) -> Place:
        """Register the name, NMID, city and account of a payload that is known to be genuine.

        Raises ValueError for a payload without an NMID, and for one of several accounts: each of these needs a row.
        """
        pans = [account.value or account.fields.get("01") for account in payload.accounts if account.tag != QRIS_TAG]
        if payload.nmid is None:
            raise ValueError(f"the payload of {payload.merchant_name!r} names no NMID; only a QRIS can be registered")
        if len(pans) != 1:
            raise ValueError(f"the payload of {payload.nmid} names {len(pans)} accounts; give one Place for each")
        return cls(name=payload.merchant_name, nmid=payload.nmid, city=payload.city, pan=pans[0], poster=poster)

    def to_json(self) -> dict[str, Any]:
        """Return plain lists, text and None."""
        poster = None if self.poster is None else str(self.poster)
        return {one.name: getattr(self, one.name) for one in fields(self)} | {
            "guids": list(self.guids), "poster": poster,
        }  # fmt: skip


_NMID = QRIS["02"].pattern
_PATTERNS = {
    "name": (TOP["59"].pattern, TOP["59"].expects),
    "nmid": (_NMID, QRIS["02"].expects),
    "pan": (r"[0-9]{8,19}", "8 to 19 digits"),
    "city": (TOP["60"].pattern, TOP["60"].expects),
    "terminal": (r"[ -~]{1,25}", "1 to 25 printable characters"),
    "kind": (r"static|dynamic", "static or dynamic"),
}
_COLUMNS = [one.name for one in fields(Place)]


@dataclass(frozen=True)
class Registry:
    """Places, looked up by the identifiers that a payload carries."""

    places: tuple[Place, ...]

    @classmethod
    def read(cls, path: Path | str) -> Registry:
        """Read a registry: ``.csv`` with a header, ``.json`` list of objects, or ``.toml``.

        A ``.toml`` has ``[[place]]`` tables. ``name`` and ``nmid`` are required; ``guids`` (divided by ``;`` in CSV),
        ``pan``, ``city``, ``terminal``, ``kind`` and ``poster`` (a picture, its path relative to the file's folder) are
        not. Rows of one NMID are its terminals and acquirers. Raises RegistryError that names every row at fault, also
        those that contradict each other; OSError if the file cannot be opened.
        """
        file = Path(path)
        rows = _rows(file)
        if not rows:
            raise RegistryError([f"{file}: holds no places"])
        if len(rows) > MAX_ROWS:
            raise RegistryError([f"{file}: {len(rows)} rows; at most {MAX_ROWS} are read"])
        problems: list[str] = []
        places: list[tuple[str, Place]] = []
        for where, row in rows:
            faults, place = _place(row, file.parent)
            problems += [f"{where}: {fault}" for fault in faults]
            if place is not None:
                places.append((where, place))
        if problems := problems + list(_contradictions(places)):
            raise RegistryError(problems)
        return cls(tuple(place for _, place in places))

    @cached_property
    def _by_nmid(self) -> dict[str, tuple[Place, ...]]:
        return {nmid: tuple(group) for nmid, group in _grouped((place.nmid, place) for place in self.places).items()}

    @cached_property
    def _by_pan(self) -> dict[str, Place]:
        return {place.pan: place for place in self.places if place.pan}

    @cached_property
    def _by_name(self) -> dict[str, tuple[Place, ...]]:
        named = _grouped((letters(place.name), place) for place in self.places)
        return {name: tuple(group) for name, group in named.items()}

    def of_nmid(self, nmid: str) -> tuple[Place, ...]:
        return self._by_nmid.get(nmid, ())

    def of_pan(self, pan: str) -> Place | None:
        return self._by_pan.get(pan)

    def of_name(self, name: str) -> tuple[Place, ...]:
        """Return the places whose names have the same letters and digits, whatever case and marks."""
        return self._by_name.get(letters(name), ()) if letters(name) else ()

    def named(self, word: str) -> tuple[Place, ...]:
        """Return the rows of the place of this NMID or name.

        Raises RegistryError if there is none, or several.
        """
        found = self.of_nmid(word) or self.of_name(word)
        if len({place.nmid for place in found}) != 1:
            what = "several places have" if found else "no place has"
            raise RegistryError([f"{what} the NMID or name {word!r}; give the NMID of one that is in the registry"])
        return found


def letters(text: str) -> str:
    """Normalise a name to its letters and digits, in upper case and without accents."""
    return "".join(c for c in unicodedata.normalize("NFKD", text.upper()) if c.isalnum())


def _grouped(pairs: Iterable[tuple[str, Any]]) -> dict[str, list[Any]]:
    groups: dict[str, list[Any]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def _rows(file: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """Return (place in the file, row) for every row.

    Raises RegistryError for what is no such table.
    """
    readers = {".csv": _csv_rows, ".json": _json_rows, ".toml": _toml_rows}
    if file.suffix.lower() not in readers:
        raise RegistryError([f"{file}: a registry is a .csv, .json or .toml file"])
    if file.stat().st_size > MAX_BYTES:
        raise RegistryError([f"{file}: {file.stat().st_size / 1e6:.0f} MB; at most {MAX_BYTES / 1e6:.0f} MB are read"])
    try:
        text = file.read_text(encoding="utf-8-sig")
        return list(readers[file.suffix.lower()](file, text))
    except UnicodeDecodeError as error:
        raise RegistryError([f"{file}: not UTF-8 text (byte {error.start})"]) from None
    except (csv.Error, ValueError, RecursionError) as error:  # errors of json and tomllib are ValueErrors
        if isinstance(error, RegistryError):
            raise
        raise RegistryError([f"{file}: {error}"]) from None


def _csv_rows(file: Path, text: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True, restkey="", restval=None)
    _unique([str(name).strip() for name in reader.fieldnames or ()])
    for row in reader:
        where = f"{file} line {reader.line_num}"
        if "" in row or None in row.values():
            columns = len(reader.fieldnames or ())
            raise RegistryError([f"{where}: has another number of values than the header's {columns} columns"])
        values: dict[str, Any] = {str(key).strip(): value.strip() for key, value in row.items() if value.strip()}
        if "guids" in values:
            values["guids"] = [guid.strip() for guid in values["guids"].split(";") if guid.strip()]
        yield where, values


def _json_rows(file: Path, text: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    rows = json.loads(text, object_pairs_hook=_object)
    if not isinstance(rows, list):
        raise RegistryError([f"{file}: need a list of objects, one for each place"])
    for number, row in enumerate(rows, 1):
        yield f"{file} row {number}", row


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _unique([key for key, _ in pairs])
    return dict(pairs)


def _unique(names: Sequence[str]) -> None:
    """Raise ValueError for a field given twice, which would overwrite the first value."""
    seen: set[str] = set()
    for name in names:
        if name and name in seen:
            raise ValueError(f"field {_shown(name)} is given more than once")
        seen.add(name)


def _shown(value: object) -> str:
    """Return a value as an error shows it, cut where it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # of numbers with thousands of digits, and of nested lists
        return f"a {type(value).__name__} too large to show"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _toml_rows(file: Path, text: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    document = tomllib.loads(text)
    rows = document.pop("place", [])
    if document or not isinstance(rows, list):
        raise RegistryError([f"{file}: need [[place]] tables and nothing else; found {', '.join(document) or 'place'}"])
    for number, row in enumerate(rows, 1):
        yield f"{file} [[place]] {number}", row


def _place(row: Any, folder: Path) -> tuple[list[str], Place | None]:
    """Return a row's faults, and its place if there are none."""
    if not isinstance(row, Mapping):
        return [f"need an object with name and nmid, found {type(row).__name__}"], None
    faults = [f"unknown field {_shown(key)}; there are {', '.join(_COLUMNS)}" for key in row if key not in _COLUMNS]
    faults += [f"{key} is missing" for key in ("name", "nmid") if not row.get(key)]
    for key, (pattern, expects) in _PATTERNS.items():
        value = row.get(key)
        if value not in (None, "") and not (isinstance(value, str) and re.fullmatch(pattern, value, re.DOTALL)):
            faults.append(f"{key}: expected {expects}, found {_shown(value)}")
    guids = [] if row.get("guids") in (None, "") else row["guids"]
    if not isinstance(guids, list) or not all(isinstance(g, str) and re.fullmatch(r"[ -~]{1,32}", g) for g in guids):
        faults.append(f"guids: expected a list of names of 1 to 32 printable characters, found {_shown(guids)}")
    poster = row.get("poster")
    if poster is not None and not isinstance(poster, str):
        faults.append(f"poster: expected the path of a picture, found {_shown(poster)}")
    elif poster and not _is_file(folder / poster):
        faults.append(f"poster: there is no picture at {_shown(str(folder / poster))}")
    if faults:
        return faults, None
    known = {key: row[key] for key in _PATTERNS if row.get(key)}
    return [], Place(**known, guids=tuple(guids), poster=folder / poster if poster else None)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name too long, a folder that may not be looked into
        return False


def _contradictions(places: list[tuple[str, Place]]) -> Iterator[str]:
    """Yield pairs of rows that cannot both be true, or say the same twice."""
    first_with: dict[tuple[str, str], tuple[str, Place]] = {}
    first_of_pan: dict[str, tuple[str, Place]] = {}
    first_of_row: dict[tuple[Any, ...], str] = {}
    for where, place in places:
        for field in ("name", "city"):
            if not (here := getattr(place, field)):
                continue
            other, known = first_with.setdefault((field, place.nmid), (where, place))
            if letters(here) != letters(there := getattr(known, field)):
                yield f"{where}: {field} {here!r} contradicts {there!r} of the same NMID ({other})"
        if place.pan:
            other, known = first_of_pan.setdefault(place.pan, (where, place))
            if known.nmid != place.nmid:
                yield f"{where}: PAN {place.pan} is that of {known.nmid} as well ({other})"
        key = (place.nmid, place.pan, place.terminal, place.guids)
        other = first_of_row.setdefault(key, where)
        if other != where:
            yield f"{where}: repeats {other}: same NMID, PAN, terminal and acquirers"


@dataclass(frozen=True)
class PrintComparison:
    """Position of a photographed code relative to its registered print, by shared features.

    Features are outside the code.
    """

    shared: int
    """Features that agree on one view of the whole sheet."""
    moved: float
    """Mean distance of the code's corners from where the registered print has them, in sides of the code."""
    turned_deg: float
    scaled: float
    """Side of the code over that of the registered print's."""


MIN_SHARED = 14
"""Features that two pictures must share to be taken for the same print: different prints share at most eight by chance."""
_WORKING_SIDE = 1000


@dataclass(frozen=True)
class RegisteredPrint:
    """A print as the registry has it: its features, and the corners of its code, pixels."""

    places: Floats
    descriptors: npt.NDArray[np.uint8]
    corners: Floats

    @classmethod
    def of(cls, poster: Image, corners: npt.ArrayLike) -> RegisteredPrint:
        """Extract the features of a picture whose code has these (4, 2) corners."""
        places, descriptors = _features(poster, np.asarray(corners, np.float32))
        return cls(places, descriptors, np.asarray(corners, np.float32))


def _features(image: Image, corners: Floats) -> tuple[Floats, npt.NDArray[np.uint8]]:
    """Return ORB features outside a code: positions (N, 2) in pixels, descriptors (N, 32)."""
    scale = min(1.0, _WORKING_SIDE / max(image.shape[:2]))
    grey = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY) if image.ndim == 3 else image
    small = cv2.resize(grey, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA) if scale < 1 else grey
    mask = np.full(small.shape, 255, np.uint8)
    middle = corners.mean(0)
    cv2.fillPoly(mask, [((middle + (corners - middle) * 1.12) * scale).astype(np.int32)], 0)
    points, descriptors = cv2.ORB_create(nfeatures=1500, fastThreshold=8).detectAndCompute(small, mask)
    if descriptors is None:
        return np.zeros((0, 2), np.float32), np.zeros((0, 32), np.uint8)
    return np.array([point.pt for point in points], np.float32) / np.float32(scale), descriptors


def compare_prints(image: Image, corners: npt.ArrayLike, registered: RegisteredPrint) -> PrintComparison | None:
    """Align the registered print with a photo of a code; None if the photo does not show it.

    ``corners``: (4, 2) of the code in the photo.
    """
    own = np.asarray(corners, np.float32)
    places, descriptors = _features(image, own)
    if min(len(places), len(registered.places)) < MIN_SHARED:
        return None
    pairs = cv2.BFMatcher(cv2.NORM_HAMMING).knnMatch(registered.descriptors, descriptors, k=2)
    good = [pair[0] for pair in pairs if len(pair) == 2 and pair[0].distance < 0.8 * pair[1].distance]
    if len(good) < MIN_SHARED:
        return None
    source = np.array([registered.places[match.queryIdx] for match in good], np.float32)
    target = np.array([places[match.trainIdx] for match in good], np.float32)
    side = float(np.sqrt(abs(cv2.contourArea(own))))
    cv2.setRNGSeed(0)
    matrix, inliers = cv2.findHomography(source, target, cv2.RANSAC, max(2.0, side / 60), maxIters=3000)
    if matrix is None or int(inliers.sum()) < MIN_SHARED:
        return None
    expected = cv2.perspectiveTransform(registered.corners[None], matrix)[0]
    # Compared as seen from the front: a tilt would shorten distances along one axis alone.
    square = np.array([[0, 0], [1, 0], [1, 1], [0, 1]], np.float32)
    flat = cv2.perspectiveTransform(expected[None], cv2.getPerspectiveTransform(own, square))[0]
    way = flat - square
    across = (flat[1] - flat[0] + flat[2] - flat[3]) / 2
    size = float(np.hypot(*across))
    if not np.isfinite(flat).all() or not 0.2 < size < 5:
        return None
    turned = float(np.degrees(np.arctan2(across[1], across[0])))
    return PrintComparison(int(inliers.sum()), float(np.linalg.norm(way, axis=1).mean()), turned, 1 / size)
