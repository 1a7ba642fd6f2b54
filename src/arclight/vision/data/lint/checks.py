"""Lint a data set: files, boxes, classes, anchors, duplicate and near-duplicate images.

``arclight data lint`` calls `lint`; ``tasks.settings`` logs a short form of it before a detector is trained; `mend` and `sheet` read the
`LintReport`. Names of checks and keys of `as_dict` are public; a new check is an entry of `CHECKS`, and of ``mend._undecided`` if a person
must decide.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from arclight.vision.anchor_limits import ANCHOR_T, GOOD_RECALL
from arclight.vision.data.data_yaml import DataSpec
from arclight.vision.data.images import SUFFIXES
from arclight.vision.data.labels import (
    DatasetError,
    DatasetReport,
    FileProblem,
    KeypointShape,
    LabelledImages,
    cache_folder,
    check_labels,
    label_path,
)
from arclight.vision.data.lint.fingerprints import (
    Fingerprints,
    equal_files,
    fingerprint_all,
    linked_groups,
    similar_pairs,
)
from arclight.vision.rotated import rotated_iou

_LOG = logging.getLogger("arclight")

MIN_SIDE_PX = 3.0
"""Boxes with a side below this many pixels at the training size are too small to be learned."""
NEAR_EQUAL_IOU = 0.9
"""Overlap from which two boxes of an image are taken for one object labelled twice."""
UPRIGHT = math.radians(0.5)
"""Angle (radians) below which an oriented box counts as upright: rounding turns small boxes by as much."""
COVERING = 0.99
"""Share of both sides from which a box covers its whole image."""
MIN_CLASS_BOXES = 10
"""Training boxes of a class below which little is learned of it."""
MAX_IMBALANCE = 100
"""How many times as many boxes the commonest class may have as another."""

Severity = Literal["error", "warning", "note"]


class Check(NamedTuple):
    """One kind of fault: how much it matters, and its heading."""

    severity: Severity
    title: str


CHECKS: dict[str, Check] = {
    "split": Check("error", "splits that cannot be used"),
    "corrupt-image": Check("error", "images that cannot be read; they are skipped"),
    "malformed-row": Check("error", "label rows that cannot be read; they are skipped"),
    "shared-label": Check("error", "label files of several images each"),
    "same-split": Check("error", "images listed in two splits"),
    "leak": Check("error", "images that an earlier split has, too"),
    "contradiction": Check("error", "equal images with different boxes"),
    "orphan-label": Check("warning", "label files without an image"),
    "listed-twice": Check("warning", "images listed twice in one split; they are used once"),
    "duplicate-image": Check("warning", "image files of equal bytes in one split"),
    "repeated-row": Check("warning", "label rows that repeat another one; they are used once"),
    "near-equal-box": Check("warning", "boxes that all but equal another one of their class and image"),
    "disputed-box": Check("warning", "boxes that another class of their image has, too"),
    "tiny-box": Check("warning", "boxes too small at the training size"),
    "upright-box": Check("warning", "splits of oriented boxes that are all upright"),
    "covering-box": Check("warning", "boxes that cover their whole image"),
    "class": Check("warning", "classes with too few boxes"),
    "anchors": Check("warning", "anchors that do not fit the boxes"),
    "odd-image": Check("note", "images that decoding changes"),
    "exif-turn": Check("note", "images that EXIF turns"),
    "similar-images": Check("note", "images of one split that look the same"),
    "cut-box": Check("note", "boxes cut at the edge of their image"),
    "missing-label": Check("note", "images without a label file; they count as background"),
}
"""Checks by name, in the order of reports."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that a check found, in one file or about the data set."""

    check: str
    path: str
    line: int = 0
    """Line of the file, from 1; 0 means the file as a whole."""
    message: str
    split: str = ""
    image: str = ""
    """The image that it is about, if that is not ``path``."""
    other: str = ""
    """The second image of a pair."""
    boxes: tuple[tuple[float, float, float, float], ...] = ()
    """The boxes it is about: (cx, cy, w, h), shares of the image."""
    badness: float = 0.0
    """Larger is worse, within a check."""

    @property
    def severity(self) -> Severity:
        return CHECKS[self.check].severity

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}" if self.line else f"{self.path}: {self.message}"


@dataclass(frozen=True)
class LintReport:
    """All findings on a data set; ``print`` it, or take it as data with ``as_dict``."""

    file: Path
    names: tuple[str, ...]
    splits: dict[str, LabelledImages]
    findings: tuple[Finding, ...]
    look_alikes: list[list[tuple[str, Path]]]
    """Groups of two or more images that look the same, directly or through others: (split, image)."""
    image_size: int
    anchor_recall: float | None
    seconds: dict[str, float] = field(default_factory=dict)
    """Time per stage."""
    keypoints: KeypointShape | None = None
    """Keypoints that rows have behind their boxes."""

    @property
    def errors(self) -> int:
        return sum(finding.severity == "error" for finding in self.findings)

    @property
    def warnings(self) -> int:
        return sum(finding.severity == "warning" for finding in self.findings)

    def by_check(self) -> dict[str, list[Finding]]:
        """Return findings by check, in the order of ``CHECKS``, the worst first."""
        grouped: dict[str, list[Finding]] = {name: [] for name in CHECKS}
        for finding in self.findings:
            grouped[finding.check].append(finding)
        return {name: sorted(found, key=lambda finding: -finding.badness) for name, found in grouped.items() if found}

    def class_counts(self) -> dict[str, list[int]]:
        """Return boxes per class, by split."""
        return {split: _class_counts(found, len(self.names)) for split, found in self.splits.items()}

    def as_dict(self) -> dict[str, Any]:
        return {
            "data": str(self.file),
            "names": list(self.names),
            "image_size": self.image_size,
            "errors": self.errors,
            "warnings": self.warnings,
            "splits": {
                split: {"images": found.report.images, "boxes": found.report.boxes}
                for split, found in self.splits.items()
            },
            "boxes_per_class": self.class_counts(),
            "anchor_recall": self.anchor_recall,
            "seconds": {stage: round(value, 3) for stage, value in self.seconds.items()},
            "findings": [{"severity": finding.severity, **asdict(finding)} for finding in self.findings],
        }

    def __str__(self) -> str:
        lines = [
            f"{split}: {found.report.images:,} images, {found.report.boxes:,} boxes"
            for split, found in self.splits.items()
        ]
        for name, found in self.by_check().items():
            check = CHECKS[name]
            lines.append(f"{check.severity}: {len(found):,} x {name}: {check.title}")
            lines += [f"    {finding}" for finding in found[:5]]
            lines += [f"    and {len(found) - 5:,} more"] * (len(found) > 5)
        if self.anchor_recall is not None:
            lines.append(
                f"anchors answer for {self.anchor_recall:.1%} of the training boxes at {self.image_size} pixels"
            )
        notes = len(self.findings) - self.errors - self.warnings
        lines.append(f"errors: {self.errors:,}, warnings: {self.warnings:,}, notes: {notes:,}")
        return "\n".join(lines)


Anchors = Sequence[tuple[float, float]]
Hashes = Literal["all", "cached", "none"]
Progress = Callable[[int, int], None]


def lint(
    spec: DataSpec,
    *,
    image_size: int = 640,
    anchors: Anchors = (),
    hashes: Hashes = "all",
    cache: bool = True,
    progress: Progress | None = None,
    rows: Literal["boxes", "oriented"] = "boxes",
) -> LintReport:
    """Check all splits of a data set; nothing of it is changed.

    image_size: the training size, pixels: the longer side of an image is scaled to it. anchors: (width, height), pixels at
    that size, whose fit is measured; none for detectors without. hashes: decode all images and compare them ("all"), compare
    those that an earlier call has hashed ("cached"), or only files of equal bytes ("none"). cache: keep labels and hashes
    beside the labels, so that only changed files are read again; see ``check_labels``. rows: what they must be, boxes or polygons, or
    the four corners of oriented boxes.
    """
    report = _lint_labels(spec, image_size, anchors, cache, rows=rows)
    return _with_look_alikes(report, hashes, cache, progress)


def _lint_labels(
    spec: DataSpec,
    image_size: int,
    anchors: Anchors,
    cache: bool,
    anchor_t: float = ANCHOR_T,
    rows: Literal["boxes", "oriented"] = "boxes",
) -> LintReport:
    """Check what headers, labels and lists say, which decodes no image."""
    started = time.perf_counter()
    splits: dict[str, LabelledImages] = {}
    findings: list[Finding] = []
    listed: dict[str, list[Path]] = {}
    for split in ("train", "val", "test"):
        if not getattr(spec, split):
            continue
        try:
            listed[split] = spec.images(split)
            splits[split] = check_labels(
                listed[split], len(spec.names), name=split, cache=cache, geometry=spec.geometry(rows)
            )
        except DatasetError as error:  # the other splits are looked at as well
            findings.append(Finding(check="split", path=str(spec.file), message=str(error), split=split))
    for split, found in splits.items():
        findings += _of_files(split, found, listed[split])
        findings += _of_boxes(split, found, image_size)
        findings += _of_angles(spec, split, found)
    findings += _orphans(listed)
    findings += _of_classes(spec, splits)
    recall = None
    if len(anchors) and "train" in splits and splits["train"].report.boxes:
        recall = best_possible_recall(splits["train"], image_size, anchors, anchor_t)
        findings += _of_anchors(spec, recall, image_size)
    findings += _in_two_splits(spec, splits)
    seconds = {"headers and labels": time.perf_counter() - started}
    return LintReport(
        spec.file, spec.names, splits, tuple(findings), [], image_size, recall, seconds, keypoints=spec.keypoints
    )


def _with_look_alikes(report: LintReport, hashes: Hashes, cache: bool, progress: Progress | None = None) -> LintReport:
    """Compare the images of a report."""
    started = time.perf_counter()
    more, groups = _look_alikes(report.splits, hashes, cache, progress)
    seconds = {**report.seconds, "duplicates": time.perf_counter() - started}
    return replace(report, findings=(*report.findings, *more), look_alikes=groups, seconds=seconds)


MAX_COMPARED_AT_FIT = 20_000
"""Images above which a fit does not decode all of them to compare them: `arclight data lint` does."""
_SAID_AT_FIT = ("corrupt-image", "malformed-row", "shared-label")


def log_before_fit(
    spec: DataSpec,
    image_size: int,
    anchors: Anchors,
    *,
    cache: bool = True,
    anchor_t: float = ANCHOR_T,
    rows: Literal["boxes", "oriented"] = "boxes",
) -> None:
    """Lint the train and val splits that a fit reads, and log errors and warnings.

    Unchanged files are read from caches.
    anchor_t: how many times wider, narrower, taller or flatter than an anchor a box may be. Raises DatasetError for a split that
    cannot be used, before any image is decoded.
    """
    spec = replace(spec, test=())
    report = _lint_labels(spec, image_size, anchors, cache, anchor_t, rows)
    if unusable := [finding for finding in report.findings if finding.check == "split"]:
        raise DatasetError(unusable[0].message)
    images = sum(found.report.images for found in report.splits.values())
    report = _with_look_alikes(
        report, "none" if not cache else "all" if images <= MAX_COMPARED_AT_FIT else "cached", cache
    )
    for name, found in report.by_check().items():
        if CHECKS[name].severity != "note" and name not in _SAID_AT_FIT:  # those are said when the data set is opened
            _LOG.warning("%d x %s: %s, for example %s", len(found), name, CHECKS[name].title, found[0])


# ---------------------------------------------------------------- files


def _of_files(split: str, found: LabelledImages, listed: Sequence[Path]) -> Iterator[Finding]:
    report: DatasetReport = found.report
    owners = {str(label_path(image)): str(image) for image in found.images}
    for check, problems in (
        ("corrupt-image", report.corrupt),
        ("malformed-row", report.malformed),
        ("shared-label", report.shared_labels),
        ("repeated-row", report.repeated),
        ("cut-box", report.cut),
        ("odd-image", report.odd),
        ("exif-turn", report.turned),
    ):
        for problem in problems:
            yield _of_problem(check, split, problem, owners)
    for image, times in Counter(listed).items():
        if times > 1:
            yield Finding(
                check="listed-twice", path=str(image), message=f"is listed {times} times in {split}", split=split
            )
    if report.missing_labels:
        for image in found.images:
            if not label_path(image).exists():
                message = f"has no label file {label_path(image).name}"
                yield Finding(check="missing-label", path=str(image), message=message, split=split)


def _of_problem(check: str, split: str, problem: FileProblem, owners: dict[str, str]) -> Finding:
    return Finding(
        check=check, path=problem.path, line=problem.line, message=problem.reason, split=split,
        image=owners.get(problem.path, ""),
    )  # fmt: skip


def _orphans(listed: dict[str, list[Path]]) -> Iterator[Finding]:
    """Find label files of images that are in no split and not beside the others either."""
    labels = {label_path(image): split for split, images in listed.items() for image in images}
    folders: dict[Path, tuple[str, Path]] = {}
    for split, images in listed.items():
        for image in images:
            folders.setdefault(label_path(image).parent, (split, image.parent))
    for folder, (split, images_folder) in folders.items():
        if folder == images_folder or not folder.is_dir():
            continue  # beside the images lie other texts: lists, licences
        there = images_folder.iterdir() if images_folder.is_dir() else ()
        unlisted = {
            "classes",
            *(file.stem for file in there if file.suffix.lower() in SUFFIXES),
        }  # labelImg's classes.txt
        for file in sorted(folder.iterdir()):
            if file.suffix == ".txt" and file not in labels and file.stem not in unlisted:
                message = f"there is no image {file.stem}.* in {images_folder}"
                yield Finding(check="orphan-label", path=str(file), message=message, split=split)


def _in_two_splits(spec: DataSpec, splits: dict[str, LabelledImages]) -> Iterator[Finding]:
    names = list(splits)
    places = {split: {image.resolve(): image for image in found.images} for split, found in splits.items()}
    for position, first in enumerate(names):
        for second in names[position + 1 :]:
            both = [path for path in places[first] if path in places[second]]
            if both:
                message = f"{len(both):,} images are in {first} and in {second}, for example {places[first][both[0]]}"
                yield Finding(
                    check="same-split", path=str(spec.file), message=message, split=second, image=str(both[0])
                )


# ---------------------------------------------------------------- boxes


def sizes_px(found: LabelledImages, image_size: int) -> NDArray[np.float32]:
    """Return width and height (M, 2) of all boxes of a split at the training size, pixels."""
    counts = [len(rows) for rows in found.labels]
    shapes = np.repeat(found.shapes.astype(np.float32), counts, axis=0)
    if found.oriented:
        scales = image_size / found.shapes.max(1, initial=1)
        turned = [boxes[:, 2:4] * scale for boxes, scale in zip(found.rotated_px, scales, strict=True)]
        return np.concatenate([np.zeros((0, 2)), *turned]).astype(np.float32)
    sizes = np.concatenate([np.zeros((0, 2), np.float32), *(rows[:, 3:5] for rows in found.labels)])
    scaled: NDArray[np.float32] = sizes * shapes[:, ::-1] * (image_size / shapes.max(1, initial=1)[:, None])
    return scaled


def _of_angles(spec: DataSpec, split: str, found: LabelledImages) -> Iterator[Finding]:
    """Yield a finding if all oriented boxes of a split are upright.

    Their angles were lost, or a detector without angles will do.
    """
    if found.oriented and found.report.boxes:
        angles = np.concatenate([boxes[:, 4] for boxes in found.rotated_px])
        if (np.abs(np.sin(2 * angles)) < math.sin(2 * UPRIGHT)).all():
            message = f"all {found.report.boxes:,} boxes of {split} are upright, no angle can be learned from them: use kind = detection"
            yield Finding(check="upright-box", path=str(spec.file), message=message, split=split)


def _of_boxes(split: str, found: LabelledImages, image_size: int) -> Iterator[Finding]:
    counts = np.array([len(rows) for rows in found.labels])
    starts = np.concatenate(([0], np.cumsum(counts)))
    sizes = sizes_px(found, image_size)
    rows = np.concatenate([np.zeros((0, 5), np.float32), *found.labels])
    for place in np.flatnonzero(sizes.min(1, initial=np.inf) < MIN_SIDE_PX):
        width, height = sizes[place]
        message = f"the box is {width:.1f} x {height:.1f} pixels at the training size of {image_size}"
        yield _of_box("tiny-box", split, found, starts, int(place), message, -float(min(width, height)))
    for place in np.flatnonzero((rows[:, 3:5] >= COVERING).all(1)):
        yield _of_box("covering-box", split, found, starts, int(place), "the box covers the whole image", 0.0)
    turned = found.rotated_px if found.oriented else None
    for index in np.flatnonzero(counts > 1):
        for first, second, iou in _near_equal(found.labels[index], None if turned is None else turned[index]):
            a, b = found.labels[index][[first, second]]
            line = found.lines[index][[first, second]]
            check = "near-equal-box" if a[0] == b[0] else "disputed-box"
            of = "" if a[0] == b[0] else f", of class {a[0]:.0f} and here of class {b[0]:.0f}"
            message = f"the box all but equals that of line {line[0]} (IoU {iou:.2f}){of}"
            yield Finding(
                check=check, path=str(label_path(found.images[index])), line=int(line[1]), message=message,
                split=split, image=str(found.images[index]), boxes=(_box(a), _box(b)), badness=float(iou),
            )  # fmt: skip


def _of_box(
    check: str, split: str, found: LabelledImages, starts: NDArray[np.int64], place: int, message: str, badness: float
) -> Finding:
    index = int(np.searchsorted(starts, place, "right")) - 1
    row = place - int(starts[index])
    return Finding(
        check=check, path=str(label_path(found.images[index])), line=int(found.lines[index][row]), message=message,
        split=split, image=str(found.images[index]), boxes=(_box(found.labels[index][row]),), badness=badness,
    )  # fmt: skip


def _box(row: NDArray[np.float32]) -> tuple[float, float, float, float]:
    cx, cy, width, height = (float(value) for value in row[1:5])
    return cx, cy, width, height


def _near_equal(rows: NDArray[np.float32], turned: NDArray[np.float64] | None = None) -> list[tuple[int, int, float]]:
    """Find boxes of one image that nearly equal an earlier one: (earlier row, row, IoU).

    ``turned``: rotated boxes (n, 5) to compare instead.
    """
    low, high = rows[:, 1:3] - rows[:, 3:5] / 2, rows[:, 1:3] + rows[:, 3:5] / 2
    area = rows[:, 3] * rows[:, 4]
    found = []
    for start in range(0, len(rows), 512):  # bounded memory for an image of very many boxes
        part = slice(start, start + 512)
        if turned is None:
            sides = np.minimum(high[part, None], high[None]) - np.maximum(low[part, None], low[None])
            overlap = np.maximum(sides, 0).prod(2)
            iou = overlap / (area[part, None] + area[None] - overlap)
        else:
            iou = rotated_iou(turned[part], turned)
        later, earlier = np.nonzero(iou >= NEAR_EQUAL_IOU)
        seen: set[int] = set()
        for row, other in zip((later + start).tolist(), earlier.tolist()):
            if other < row and row not in seen:  # a stack of equal boxes is named once a box
                seen.add(row)
                found.append((other, row, float(iou[row - start, other])))
    return found


# ---------------------------------------------------------------- classes and anchors


def _class_counts(found: LabelledImages, num_classes: int) -> list[int]:
    classes = np.concatenate([np.zeros(0, np.float32), *(rows[:, 0] for rows in found.labels)]).astype(np.int64)
    return [int(count) for count in np.bincount(classes, minlength=num_classes)]


def _of_classes(spec: DataSpec, splits: dict[str, LabelledImages]) -> Iterator[Finding]:
    for name, times in Counter(spec.names).items():
        if times > 1:
            message = f"{times} classes are called {name!r}: results cannot tell them apart"
            yield Finding(check="class", path=str(spec.file), message=message, badness=1.0)
    if "train" not in splits:
        return
    counts = {split: _class_counts(found, len(spec.names)) for split, found in splits.items()}
    most = max(counts["train"])
    for number, name in enumerate(spec.names):
        boxes = counts["train"][number]
        elsewhere = [
            f"{counts[split][number]:,} in {split}" for split in counts if split != "train" and counts[split][number]
        ]
        if not boxes and elsewhere:
            message = f"has no box in train, and {' and '.join(elsewhere)}: it cannot be learned"
        elif not boxes:
            message = "has no box in any split: it cannot be learned"
        elif boxes < MIN_CLASS_BOXES:
            message = f"has {boxes} boxes in train: too few to be learned well"
        elif boxes * MAX_IMBALANCE < most:
            message = f"has {boxes:,} boxes in train, and the commonest class {most:,}"
        else:
            continue
        message = f"class {number} ({name}) {message}"
        yield Finding(check="class", path=str(spec.file), message=message, split="train", badness=-boxes)


def best_possible_recall(found: LabelledImages, image_size: int, anchors: Anchors, anchor_t: float = ANCHOR_T) -> float:
    """Compute the share of a split's boxes that some anchor can match at the training size."""
    sizes, shapes = sizes_px(found, image_size), np.asarray(anchors, np.float32)
    reached = np.zeros(len(sizes), bool)
    for anchor in shapes:
        ratio = sizes / anchor
        reached |= np.maximum(ratio, 1 / np.maximum(ratio, 1e-9)).max(1) < anchor_t
    return float(reached.mean())


def _of_anchors(spec: DataSpec, recall: float, image_size: int) -> Iterator[Finding]:
    if recall < GOOD_RECALL:
        message = (
            f"the anchors answer for {recall:.1%} of the training boxes at {image_size} pixels: "
            'train with anchors = "fitted", or at another image_size'
        )
        yield Finding(check="anchors", path=str(spec.file), message=message, split="train", badness=1 - recall)


# ---------------------------------------------------------------- images that look the same


@dataclass(frozen=True)
class _Image:
    """One image of the data set, with its place among all."""

    split: str
    path: Path
    rows: NDArray[np.float32]


def _look_alikes(
    splits: dict[str, LabelledImages], hashes: Hashes, cache: bool, progress: Progress | None
) -> tuple[list[Finding], list[list[tuple[str, Path]]]]:
    """Find duplicate and near-duplicate images; return findings, and groups of such images."""
    images = [
        _Image(split, path, rows) for split, found in splits.items() for path, rows in zip(found.images, found.labels)
    ]
    findings: list[Finding] = []
    twin_of: dict[int, int] = {}
    distances: dict[tuple[int, int], int] = {}
    for group in equal_files([image.path for image in images]):
        for other in group[1:]:
            twin_of[other] = group[0]
            distances[group[0], other] = 0
            findings += _of_contradiction(images[group[0]], images[other])
    if hashes != "none":
        found = _fingerprints(splits, hashes == "cached", cache, progress)
        for index, why in found.errors.items():
            split, path = images[index].split, str(images[index].path)
            findings.append(Finding(check="corrupt-image", path=path, message=why, split=split))
        for (first, second), distance in zip(*similar_pairs(found)):
            distances.setdefault((int(first), int(second)), int(distance))
    groups = linked_groups(len(images), distances)
    partners: dict[int, list[int]] = defaultdict(list)
    for first, second in distances:
        partners[first].append(second)
        partners[second].append(first)
    for group in groups:
        for index in group[1:]:
            findings += _of_member(images, index, group, partners[index], distances, twin_of)
    return findings, [[(images[index].split, images[index].path) for index in group] for group in groups]


def _of_contradiction(first: _Image, second: _Image) -> Iterator[Finding]:
    if first.path.resolve() != second.path.resolve() and not _same_boxes(first.rows, second.rows):
        message = f"is the same file as {first.path}, and its boxes differ"
        yield Finding(
            check="contradiction", path=str(second.path), message=message, split=second.split, other=str(first.path)
        )


def _of_member(
    images: Sequence[_Image], index: int, group: Sequence[int], partners: Sequence[int],
    distances: dict[tuple[int, int], int], twin_of: dict[int, int],
) -> Iterator[Finding]:  # fmt: skip
    """Yield findings on one image of a group of near-duplicates, against earlier images.

    An image of an earlier split is preferred to one of its own.
    """
    image = images[index]
    before = [other for other in group if other < index and images[other].path.resolve() != image.path.resolve()]
    twin = twin_of.get(index)
    own = [other for other in before if images[other].split == image.split]
    foreign = [other for other in before if images[other].split != image.split]
    exact = [other for other in own if twin is not None and twin_of.get(other, other) == twin]
    if exact:
        yield _of_pair("duplicate-image", image, images[exact[0]], "is the same file as", 0.0)
    for check, others in (("leak", foreign), ("similar-images", own)):
        if not others or (check == "similar-images" and (exact or foreign)):
            continue
        near = sorted((distances[min(index, o), max(index, o)], o) for o in partners if o in others)
        if twin is not None and twin in others:
            verb, other, distance = "is the same file as", twin, 0
        elif near:
            distance, other = near[0]
            verb = f"looks the same ({distance} of 64 bits differ) as"
        else:
            verb, other, distance = "is in a series of look-alikes with", others[0], 64
        yield _of_pair(check, image, images[other], verb, -float(distance))


def _of_pair(check: str, image: _Image, other: _Image, verb: str, badness: float) -> Finding:
    place = "" if other.split == image.split else f" ({other.split})"
    return Finding(
        check=check, path=str(image.path), message=f"{verb} {other.path}{place}", split=image.split,
        other=str(other.path), badness=badness,
    )  # fmt: skip


def _fingerprints(
    splits: dict[str, LabelledImages], only_cached: bool, cache: bool, progress: Progress | None
) -> Fingerprints:
    total, done = sum(len(found.images) for found in splits.values()), 0

    def report(new: int, _: int) -> None:
        if progress is not None:
            progress(done + new, total)

    joined = Fingerprints.empty(0)
    for split, found in splits.items():
        file = cache_folder(found.images[0]) / f"{split}.hashes.npz" if cache and found.images else None
        joined = joined.join(fingerprint_all(found.images, file, only_cached=only_cached, progress=report))
        done += len(found.images)
    return joined


def _same_boxes(first: NDArray[np.float32], second: NDArray[np.float32]) -> bool:
    if len(first) != len(second):
        return False
    first, second = (rows[np.lexsort(np.round(rows.T, 3))] for rows in (first, second))
    return np.allclose(first, second, atol=2e-3)
