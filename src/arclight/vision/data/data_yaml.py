"""Read and write data.yaml: class names and image folders, running and downloading nothing.

`dataset`, ``tasks`` and the commands ``arclight data`` and ``compare`` read it by `read_data_yaml`; `formats`, `lint`, `splitting` and
`public_sets` write one. Keys are those of YOLOv5 and ultralytics and must stay; the file is untrusted.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arclight.fabric.extras import require
from arclight.vision.data.images import SUFFIXES
from arclight.vision.data.labels import DatasetError, Geometry, KeypointShape, TaskGeometry

SINGLE_CLASS = "object"
"""Name of the class of detectors that take all classes for one (``single_class``)."""
_SHOWN = reprlib.Repr()
_SHOWN.maxlevel = 2  # a few lines of references to lists of references stand for more text than memory holds


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """Content of a data.yaml: class names, and the folders, images and .txt lists of each split."""

    file: Path
    names: tuple[str, ...]
    train: tuple[Path, ...] = ()
    val: tuple[Path, ...] = ()
    test: tuple[Path, ...] = ()
    keypoints: KeypointShape | None = None
    """Keypoints that rows have behind their boxes (``kpt_shape``, ``flip_idx``); None for none."""

    def geometry(self, wanted: TaskGeometry = "boxes") -> Geometry:
        """Return the geometry of the label rows for a task that learns ``wanted``.

        Rows with keypoints have boxes, too. Raises DatasetError for rows that do not have it.
        """
        if wanted in ("keypoints", "corners"):
            shape = self.pose_shape()
            if wanted == "corners" and shape.count != 4:
                raise DatasetError(
                    f"{self.file} has {shape}, and this task learns four corners: write kpt_shape: [4, 2] or [4, 3], or train a pose"
                )
            return shape
        if wanted != "boxes" and self.keypoints is not None:
            learnt, row = {
                "polygons": ("outlines", "class x1 y1 x2 y2 x3 y3 ..."), "oriented": ("oriented boxes", "class x1 y1 x2 y2 x3 y3 x4 y4"),
            }[wanted]  # fmt: skip
            raise DatasetError(
                f"{self.file} has kpt_shape: its rows are boxes with keypoints, and this task learns {learnt}; leave it out and write "
                f"rows {row}"
            )
        return wanted if self.keypoints is None else self.keypoints

    def pose_shape(self) -> KeypointShape:
        """Return the keypoints of label rows.

        Raises DatasetError if the file declares none.
        """
        if self.keypoints is None:
            raise DatasetError(
                f"{self.file} has no kpt_shape, and this task learns keypoints: write for example `kpt_shape: [17, 3]` and rows "
                "class cx cy w h x1 y1 v1 x2 y2 v2 ..."
            )
        return self.keypoints

    def images(self, split: str) -> list[Path]:
        """Return the image files of ``split`` (train, val or test), sorted within each folder.

        Raises DatasetError.
        """
        entries: tuple[Path, ...] = {"train": self.train, "val": self.val, "test": self.test}[split]
        if not entries:
            raise DatasetError(f"{self.file} has no {split!r} split; add for example `{split}: images/{split}`")
        found = [image for entry in entries for image in _images_of(entry)]
        if not found:
            raise DatasetError(f"{self.file}: {split}: no image in {', '.join(map(str, entries))}")
        return found


def merges_classes(found: Sequence[str], names: Sequence[str]) -> bool:
    """Return True if a network takes all classes of a data set for one (``single_class``).

    found: the network's class names. names: those of the data set.
    """
    return list(found) == [SINGLE_CLASS] != list(names)


def first_names(names: Sequence[str], most: int = 8) -> str:
    """List the first ``most`` of the names of classes, with dots for the others."""
    return ", ".join(names[:most]) + ", ..." * (len(names) > most)


def read_data_yaml(path: str | Path) -> DataSpec:
    """Read a data.yaml, or that of a folder.

    Its keys are ``names``, ``train``, ``val``, ``test`` and an optional ``path``. Relative places are relative to
    ``path``, and that to the folder of the file. A split is a folder, an image, a ``.txt`` list of images (relative to
    the list), or several of those. ``kpt_shape``, ``flip_idx`` and ``nc`` are read if they are there; other keys are ignored. Raises
    DatasetError.
    """
    yaml = require("yaml", extra="vision")
    file = Path(path)
    if file.is_dir():
        file /= "data.yaml"
    try:
        text = file.read_text("utf-8-sig")
        # All scalars as text: a class called `no` stays "no", and nothing but text, lists and mappings can come out.
        loader = yaml.BaseLoader(text)
        node = loader.get_single_node()
        _merge_keys(file, node)
        content = None if node is None else loader.construct_document(node)
    except OSError as error:
        raise DatasetError(f"{file}: {error.strerror or error}{did_you_mean(file)}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise DatasetError(f"{file} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise DatasetError(f"{file} must have the keys names, train and val; it holds {type(content).__name__}")
    names = _names(file, content)
    path_of_splits = content.get("path") or ""
    if not isinstance(path_of_splits, str):
        raise DatasetError(f"{file}: path must be one folder, not {_SHOWN.repr(path_of_splits)}")
    root = file.parent / path_of_splits
    splits = {}
    for split in ("train", "val", "test"):
        entries = content.get(split) or []
        entries = [entries] if isinstance(entries, str) else entries
        if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
            raise DatasetError(
                f"{file}: {split} must be a folder, a .txt list, or several of those, not {_SHOWN.repr(entries)}"
            )
        splits[split] = tuple(root / entry for entry in entries)
    return DataSpec(file=file, names=names, keypoints=_keypoint_shape(file, content), **splits)


def _merge_keys(file: Path, root: Any) -> None:
    """Bring in the keys that ``<<`` names in the file's mapping and in that of its classes.

    That is YAML's merge type. A mapping's own keys come before those that it brings in. root: the file's YAML node. Raises DatasetError for a
    key, or the number of a class, that one mapping gives twice, as one would be lost, and for anything but mappings behind ``<<``.
    """
    if root is None or root.id != "mapping":
        return
    _merge_mapping(file, root, "there is the key")
    for key, value in root.value:
        if key.value == "names" and value.id == "mapping":
            _merge_mapping(file, value, "names has the number")


def _merge_mapping(file: Path, mapping: Any, what: str) -> None:
    found: dict[Any, tuple[Any, Any]] = {}
    waiting, seen = [mapping], set[int]()
    while waiting:  # each mapping once: references to references to mappings stand for more keys than memory holds
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        own = set[Any]()
        for key, value in one.value:
            name, place = key.value if key.id == "scalar" else key, f"{file}:{key.start_mark.line + 1}"
            if name in own and key.id == "scalar":  # of others, that are no keys, nothing can be made
                raise DatasetError(f"{place}: {what} {name[:40]} twice: leave one out")
            own.add(name)
            if name != "<<" or key.style is not None:  # in quotes it is a key like any other
                found.setdefault(name, (key, value))
                continue
            sources = value.value if value.id == "sequence" else [value]
            if any(source.id != "mapping" for source in sources):
                raise DatasetError(f"{place}: << brings in the keys of other mappings: write for example `<<: *base`")
            waiting += reversed(sources)
    mapping.value = list(found.values())


MAX_KEYPOINTS = 1000


def _keypoint_shape(file: Path, content: dict[str, Any]) -> KeypointShape | None:
    """Read ``kpt_shape`` and ``flip_idx``. Raises DatasetError."""
    shape, flip = content.get("kpt_shape"), content.get("flip_idx")
    if shape is None:
        if flip:
            raise DatasetError(f"{file}: flip_idx says how keypoints are mirrored, and there is no kpt_shape")
        return None
    if not (isinstance(shape, list) and len(shape) == 2 and all(isinstance(n, str) and n.isdecimal() for n in shape)):
        raise DatasetError(
            f"{file}: kpt_shape must be [keypoints, 2 or 3], for example [17, 3]; it is {_SHOWN.repr(shape)}"
        )
    count, dims = map(int, shape)
    if dims not in (2, 3) or not 1 <= count <= MAX_KEYPOINTS:
        raise DatasetError(
            f"{file}: kpt_shape is [{count}, {dims}]: there are 1 to {MAX_KEYPOINTS} keypoints, of 2 numbers (x y) or 3 (x y v)"
        )
    if not flip:
        return KeypointShape(count, dims)
    given = flip if isinstance(flip, list) else [flip]
    numbers = [int(n) if isinstance(n, str) and n.isdecimal() else -1 for n in given]
    if sorted(numbers) != list(range(count)) or any(numbers[numbers[n]] != n for n in numbers):
        raise DatasetError(
            f"{file}: flip_idx must pair the keypoints 0 to {count - 1} that a mirror exchanges, each once; it is {_SHOWN.repr(flip)}"
        )
    return KeypointShape(count, dims, tuple(numbers))


def write_data_yaml(
    folder: Path,
    names: Sequence[str],
    splits: Mapping[str, str | list[str]],
    keypoints: KeypointShape | None = None,
) -> Path:
    """Write ``folder``/data.yaml: class names, and the images of each split.

    Places of images are relative to ``folder``.
    """
    yaml = require("yaml", extra="vision")
    content: dict[str, Any] = {"path": ".", **splits, "names": list(names)}
    if keypoints is not None:
        content["kpt_shape"] = [keypoints.count, keypoints.dims]
        if keypoints.flip is not None:
            content["flip_idx"] = list(keypoints.flip)
    file = folder / "data.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120), "utf-8")
    return file


def _names(file: Path, content: dict[str, Any]) -> tuple[str, ...]:
    names = content.get("names")
    if isinstance(names, dict):
        numbers = [str(number) for number in range(len(names))]
        if sorted(names) != sorted(numbers):
            raise DatasetError(f"{file}: names must number the classes 0 to {len(names) - 1}, not {', '.join(names)}")
        names = [names[number] for number in numbers]
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise DatasetError(
            f"{file}: names must list the classes, for example `names: [qr_code]`; it is {_SHOWN.repr(names)}"
        )
    count = content.get("nc")
    if count is not None and count != str(len(names)):
        raise DatasetError(f"{file}: nc is {count} but names has {len(names)} classes; nc may be left out")
    return tuple(names)


def _images_of(entry: Path) -> list[Path]:
    if entry.is_dir():
        return sorted(path for path in entry.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if entry.suffix == ".txt" and entry.is_file():
        # Names of files are bytes, whatever the encoding of the list is.
        lines = entry.read_text("utf-8-sig", errors="surrogateescape").splitlines()
        return [entry.parent / line.strip() for line in lines if line.strip()]
    if entry.is_file():
        return [entry]
    raise DatasetError(f"{entry} does not exist{did_you_mean(entry)}; nothing is ever downloaded")


def did_you_mean(path: Path) -> str:
    """Suggest existing names close to a missing ``path``, as the end of an error message."""
    parent = path.parent
    if not parent.is_dir():
        return f" (nor does {parent})"
    close = difflib.get_close_matches(path.name, [found.name for found in parent.iterdir()], n=3)
    return f"; did you mean {' or '.join(close)}?" if close else ""
