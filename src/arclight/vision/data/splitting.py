"""Divide images into splits by fraction, keeping those together that belong together.

``arclight data split`` calls this. A list of images and fractions come in; lists of paths (`write_split_lists`) or copies in class
folders (`write_class_folders`) go out. The same seed must give the same split of the same images, and a new image should move few others.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from arclight.vision.data.data_yaml import DataSpec, write_data_yaml
from arclight.vision.data.images import SUFFIXES
from arclight.vision.data.labels import DatasetError
from arclight.vision.data.lint.fingerprints import Progress, equal_files, fingerprint_all, linked_groups, similar_pairs


@dataclass(frozen=True)
class Splits:
    """Images by split, in their given order, and the number of groups of two or more among them."""

    images: dict[str, list[Path]]
    groups: int
    """Groups of two or more images that were kept together."""
    damaged: dict[Path, str]
    """Images that cannot be decoded, and why: they are in no split."""


def split_images(
    images: Sequence[Path], fractions: Mapping[str, float], *, seed: int = 0, group: str | None = None,
    look_alikes: bool = True, strata: Mapping[Path, str] | None = None, progress: Progress | None = None,
) -> Splits:  # fmt: skip
    """Split ``images`` by ``fractions`` (split to share, adding up to 1), seeded by ``seed``.

    group: a regular expression that is searched for in each image's path. Images with the same match (of its first parenthesis, if it has
    one) come into the same split; images without a match are on their own. look_alikes: keep images together that look the same, which
    decodes all of them; else only files of equal bytes. strata: maps image to class; each class is split by these fractions (stratified).

    Large groups are placed first, each in the split that lacks most of its class, so that fractions are met as nearly as groups allow. Raises
    DatasetError for fractions that do not add up, a pattern that is none, and splits that would stay empty.
    """
    if any(not 0 < share <= 1 for share in fractions.values()) or not math.isclose(
        sum(fractions.values()), 1, abs_tol=1e-6
    ):
        raise DatasetError(
            f"fractions are {', '.join(map(str, fractions.values()))}: each is above 0, and they add up to 1"
        )
    images = list(dict.fromkeys(images))
    pairs = [(found[0], other) for found in equal_files(images) for other in found[1:]]
    pairs += _pairs_by_pattern(images, group) if group is not None else []
    damaged: dict[int, str] = {}
    if look_alikes:
        fingerprints = fingerprint_all(images, progress=progress)
        damaged = fingerprints.errors
        pairs += [(int(first), int(second)) for first, second in similar_pairs(fingerprints)[0]]
    groups = linked_groups(len(images), pairs)
    several = {index for members in groups for index in members}
    units = [*groups, *([index] for index in range(len(images)) if index not in several)]
    units = [members for unit in units if (members := [index for index in unit if index not in damaged])]
    # Which unit comes when depends on its first image's name, so that a new image does not move the others about.
    names = {unit[0]: _drawn(seed, images[unit[0]]) for unit in units}
    units.sort(key=lambda unit: (-len(unit), names[unit[0]]))
    total = sum(map(len, units))
    placed: dict[str, list[int]] = {split: [] for split in fractions}
    stratum_of = {unit[0]: "" if strata is None else strata[images[unit[0]]] for unit in units}
    sizes, filled = Counter[str](), Counter[tuple[str, str]]()
    for unit in units:
        sizes[stratum_of[unit[0]]] += len(unit)
    for unit in units:
        stratum = stratum_of[unit[0]]
        lacking = {split: share * sizes[stratum] - filled[stratum, split] for split, share in fractions.items()}
        split = max(lacking, key=lambda split: lacking[split])
        filled[stratum, split] += len(unit)
        placed[split] += unit
    if empty := [split for split, members in placed.items() if not members]:
        raise DatasetError(
            f"{empty[0]} would stay empty: {total:,} images form {len(units):,} groups that stay together, and there are "
            f"{len(fractions)} splits"
        )
    result = {split: [images[index] for index in sorted(members)] for split, members in placed.items()}
    kept = sum(len(unit) > 1 for unit in units)
    return Splits(result, kept, {images[index]: why for index, why in damaged.items()})


def _pairs_by_pattern(images: Sequence[Path], group: str) -> list[tuple[int, int]]:
    try:
        pattern = re.compile(group)
    except re.error as error:
        raise DatasetError(f"{group!r} is not a regular expression: {error}") from error
    firsts: dict[str, int] = {}
    pairs = []
    for index, image in enumerate(images):
        if found := pattern.search(image.as_posix()):
            key = found[1] if pattern.groups and found[1] is not None else found[0]
            pairs.append((firsts.setdefault(key, index), index))
    if not pairs:
        raise DatasetError(f"{group!r} matches no path, for example {images[0].as_posix()}: it would group nothing")
    return pairs


def _drawn(seed: int, image: Path) -> bytes:
    return hashlib.blake2b(f"{seed}/{image.name}".encode(errors="surrogateescape")).digest()


def write_split_lists(spec: DataSpec, splits: Mapping[str, Sequence[Path]], to: Path) -> Path:
    """Write a .txt list of images per split, and a data.yaml of them; return the data.yaml.

    Classes are those of ``spec``. Images and labels stay where they are. Paths are relative where ``to`` holds the
    images, else absolute. Raises DatasetError if one of the files exists.
    """
    files = {split: to / f"{split}.txt" for split in splits}
    for file in (*files.values(), to / "data.yaml"):
        if file.exists():
            raise DatasetError(f"{file} exists already; name another folder, or delete it first")
    to.mkdir(parents=True, exist_ok=True)
    top = Path(os.path.abspath(to))
    for split, images in splits.items():
        places = [Path(os.path.abspath(image)) for image in images]  # a link to an image has its label beside the link
        lines = (place.relative_to(top).as_posix() if place.is_relative_to(top) else str(place) for place in places)
        files[split].write_text("".join(f"{line}\n" for line in lines), "utf-8", errors="surrogateescape")
    return write_data_yaml(to, spec.names, {split: file.name for split, file in files.items()}, spec.keypoints)


def class_folders(source: Path) -> dict[Path, str]:
    """Return the images of a folder of class folders, with their classes.

    Empty if ``source`` is no such folder.
    """
    if not source.is_dir() or (source / "data.yaml").exists():
        return {}
    folders = sorted(place for place in source.iterdir() if place.is_dir() and not place.name.startswith("."))
    found = {
        file: folder.name
        for folder in folders
        for file in sorted(folder.rglob("*"))
        if file.suffix.lower() in SUFFIXES and file.is_file()
    }
    return (
        found if len(set(found.values())) > 1 and not {"train", "images"} & {folder.name for folder in folders} else {}
    )


def write_class_folders(
    classes: Mapping[Path, str], splits: Mapping[str, Sequence[Path]], source: Path, to: Path
) -> None:
    """Copy images to ``to``/SPLIT/CLASS, all of them or none.

    Raises DatasetError if ``to`` holds something.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise DatasetError(f"{to} holds something already; name a folder that is empty or does not exist")
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent, prefix=f".{to.name}.") as unfinished:
        folder = Path(unfinished) / "set"
        for split, images in splits.items():
            for name in sorted(set(classes.values())):
                (folder / split / name).mkdir(parents=True)
            for image in images:
                target = folder / split / image.relative_to(source)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(image, target)
        if to.exists():
            to.rmdir()
        folder.replace(to)
