"""Analyse a detector's results: scores by object size, TIDE errors, calibration, timing.

`validation_page` shows all of it, `comparison` parts; `Detector` and ``arclight compare`` measure `stage_times`. Sizes and IoU thresholds are
those of COCO and TIDE: a change makes the numbers incomparable with published ones.

Shapes: C classes, T = 10 IoU thresholds, k predictions and m true boxes of an image.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from arclight.vision.boxes import box_iou
from arclight.vision.data.images import ImageError, decode_image
from arclight.vision.results.metrics import (
    CONFIDENCE_GRID,
    IOU_THRESHOLDS,
    MAX_DETECTIONS,
    Bools,
    DetectionResults,
    Floats,
    ImageRecord,
    Ints,
    assign,
    precision_at_recall,
)

SIZES: dict[str, tuple[float, float]] = {
    "small": (0.0, 32.0**2),
    "medium": (32.0**2, 96.0**2),
    "large": (96.0**2, 1e10),
}
"""COCO's size classes: from and to an area in square pixels of the image, both included."""

ErrorKind = Literal["classification", "localisation", "both", "duplicate", "background", "missed"]
ERROR_KINDS: tuple[ErrorKind, ...] = ("classification", "localisation", "both", "duplicate", "background", "missed")
CORRECT = -1
"""The kind of a prediction that is a true positive, in place of an index into `ERROR_KINDS`."""
FOREGROUND_IOU, BACKGROUND_IOU = 0.5, 0.1
"""TIDE's thresholds: a prediction matches a true box from the first on, and is background up to the second."""

CALIBRATION_BINS = 10
CALIBRATION_FLOOR = 0.05
"""Smallest confidence that calibration counts: the many boxes below it are noise, and would hide the error of the others."""


# -- by size -----------------------------------------------------------------------------------------------------------


def average_precision_by_size(records: Sequence[ImageRecord], num_classes: int) -> dict[str, Floats]:
    """Compute the average precision (C, T) for each of `SIZES` of objects.

    NaN for a class without a true box of that size. As COCO's protocol (pycocotools) with box areas: true boxes of
    other sizes are ignored (matched predictions are neither right nor wrong), and so are unmatched predictions of other
    sizes.
    """
    found: dict[str, Floats] = {}
    by_class = [rows_of_class(records, c) for c in range(num_classes)]
    for name, (low, high) in SIZES.items():
        ap = np.full((num_classes, len(IOU_THRESHOLDS)), np.nan)
        for c, images in enumerate(by_class):
            scores, hits, counted, positives = [np.empty(0)], [_no_hits()], [_no_hits()], 0
            for predicted, true, iou in images:
                outside = _outside(true[:, 1:], low, high)
                taken = assign(iou, ignored=outside)
                dismissed = (taken >= 0) & outside[taken] if len(true) else np.zeros_like(taken, np.bool_)
                dismissed |= (taken < 0) & _outside(predicted[:, :4], low, high)[:, None]
                scores.append(predicted[:, 4])
                hits.append((taken >= 0) & ~dismissed)
                counted.append(~dismissed)
                positives += int((~outside).sum())
            if positives:
                order = np.argsort(-np.concatenate(scores), kind="stable")
                all_hits, all_counted = np.concatenate(hits)[order], np.concatenate(counted)[order]
                for t in range(len(IOU_THRESHOLDS)):
                    kept = all_hits[all_counted[:, t], t]
                    ap[c, t] = precision_at_recall(kept[:, None], positives).mean()
        found[name] = ap
    return found


def _no_hits() -> Bools:
    return np.empty((0, len(IOU_THRESHOLDS)), np.bool_)


def _outside(boxes: Floats, low: float, high: float) -> Bools:
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    outside: Bools = (area < low) | (area > high)
    return outside


def rows_of_class(records: Sequence[ImageRecord], c: int) -> list[tuple[Floats, Floats, Floats]]:
    """Return predictions (k, 6), true boxes (m, 5) and IoU (k, m) of class ``c`` per image.

    Images without the class are left out, and predictions beyond the limit.
    """
    rows = []
    for record in records:
        predicted = record.predicted[record.predicted[:, 5] == c][:MAX_DETECTIONS]
        true = record.true[record.true[:, 0] == c]
        if len(predicted) or len(true):
            rows.append((predicted, true, overlap(predicted, true)))
    return rows


def overlap(predicted: Floats, true: Floats) -> Floats:
    """Compute (k, m) intersection over union of predictions (k, 6) and true boxes (m, 5)."""
    iou: Floats = box_iou(torch.from_numpy(predicted[:, :4].copy()), torch.from_numpy(true[:, 1:].copy())).numpy()
    return iou


# -- errors ------------------------------------------------------------------------------------------------------------


class ImageErrors(NamedTuple):
    """Errors in one image, without predictions beyond `MAX_DETECTIONS` of their class."""

    predicted: Floats
    """(k, 6) the predictions, most confident first."""
    kinds: Ints
    """(k,) index into `ERROR_KINDS`, or `CORRECT`."""
    target: Ints
    """(k,) the true box that a prediction matches, or would match with the right class or location; -1 for none."""
    undetected: Bools
    """(m,) true boxes that no prediction matches (false negatives)."""
    missed: Bools
    """(m,) those of them that no prediction with a wrong class or location would match either: TIDE's errors of kind "missed"."""


def image_errors(record: ImageRecord, confidence: float = 0.0) -> ImageErrors:
    """Classify the errors in an image, among predictions of at least ``confidence``.

    Kinds and thresholds are those of TIDE (Bolya et al. 2020, "TIDE: A General Toolbox for Identifying Object Detection
    Errors", section 2.2); a prediction that fits several is, as in the authors' program, a localisation error before a
    classification error before a duplicate.
    """
    rows = record.predicted[record.predicted[:, 4] >= confidence]
    rank = np.zeros(len(rows), np.int64)
    for c in np.unique(rows[:, 5]):
        rank[rows[:, 5] == c] = np.arange((rows[:, 5] == c).sum())
    rows, true = rows[rank < MAX_DETECTIONS], record.true
    iou, same = overlap(rows, true), rows[:, 5:6] == true[None, :, 0]
    kinds, target = np.full(len(rows), ERROR_KINDS.index("background")), np.full(len(rows), -1)
    undetected = np.ones(len(true), np.bool_)
    if not len(true):
        return ImageErrors(rows, kinds, target, undetected, undetected.copy())
    for c in np.unique(true[:, 0]):
        p, t = np.flatnonzero(rows[:, 5] == c), np.flatnonzero(true[:, 0] == c)
        taken = assign(iou[np.ix_(p, t)])[:, 0]
        kinds[p[taken >= 0]], target[p[taken >= 0]] = CORRECT, t[taken[taken >= 0]]
        undetected[t[taken[taken >= 0]]] = False
    own, other = np.where(same, iou, 0.0), np.where(same, 0.0, iou)
    wrong = kinds != CORRECT
    rules: tuple[tuple[ErrorKind, Bools, Floats | None], ...] = (
        ("localisation", (own.max(1) >= BACKGROUND_IOU) & (own.max(1) <= FOREGROUND_IOU), own),
        ("classification", other.max(1) >= FOREGROUND_IOU, other),
        ("duplicate", own.max(1) >= FOREGROUND_IOU, None),
        ("background", iou.max(1) <= BACKGROUND_IOU, None),
        ("both", np.ones(len(rows), np.bool_), None),
    )
    for kind, applies, towards in rules:
        chosen = wrong & applies
        kinds[chosen] = ERROR_KINDS.index(kind)
        if towards is not None:
            target[chosen] = towards[chosen].argmax(1)
        wrong = wrong & ~applies
    missed = undetected.copy()
    missed[target[(kinds != CORRECT) & (target >= 0)]] = False
    return ImageErrors(rows, kinds, target, undetected, missed)


@dataclass(frozen=True)
class ErrorAnalysis:
    """Errors of a detector by kind, and what each kind costs."""

    counts: dict[ErrorKind, int]
    cost: dict[ErrorKind, float]
    """How much mAP50 would rise if only the errors of a kind were corrected (TIDE's delta AP)."""
    map50: float


class _Scored(NamedTuple):
    """Predictions of all images: confidence, class, and True for true positives."""

    scores: Floats
    classes: Ints
    hits: Bools


def analyse_errors(records: Sequence[ImageRecord], num_classes: int) -> ErrorAnalysis:
    """Count errors by kind, and compute the AP that each kind costs (TIDE, section 2.3).

    Corrected means: a prediction with a wrong class or location becomes a true positive, unless its true box is matched already or
    by a more confident prediction with such an error; predictions of the other kinds are removed; missed boxes no longer count.
    """
    found = [image_errors(record) for record in records]
    labels = np.concatenate([np.empty(0), *(record.true[:, 0] for record in records)]).astype(np.int64)
    counts = np.bincount(labels, minlength=num_classes)
    scores = np.concatenate([np.empty(0), *(one.predicted[:, 4] for one in found)])
    classes = np.concatenate([np.empty(0), *(one.predicted[:, 5] for one in found)]).astype(np.int64)
    kinds = np.concatenate([np.empty(0, np.int64), *(one.kinds for one in found)])
    correct = kinds == CORRECT
    base = _map50(_Scored(scores, classes, correct), counts)
    cost: dict[ErrorKind, float] = {}
    for number, kind in enumerate(ERROR_KINDS):
        hits, kept, new_classes, positives = correct.copy(), np.ones(len(kinds), np.bool_), classes.copy(), counts
        if kind == "missed":
            lost = [record.true[one.missed, 0] for record, one in zip(records, found, strict=True)]
            positives = counts - np.bincount(
                np.concatenate([np.empty(0), *lost]).astype(np.int64), minlength=num_classes
            )
        elif kind in ("classification", "localisation"):
            corrected, corrected_classes = _correct(records, found, number)
            kept = (kinds != number) | corrected
            hits |= corrected
            new_classes = np.where(corrected, corrected_classes, classes)
        else:
            kept = kinds != number
        cost[kind] = _map50(_Scored(scores[kept], new_classes[kept], hits[kept]), positives) - base
    numbers = {kind: int((kinds == number).sum()) for number, kind in enumerate(ERROR_KINDS)}
    numbers["missed"] = int(sum(one.missed.sum() for one in found))
    return ErrorAnalysis(numbers, cost, base)


def _correct(records: Sequence[ImageRecord], found: Sequence[ImageErrors], kind: int) -> tuple[Bools, Ints]:
    """Find the predictions that correcting errors of ``kind`` would make true positives.

    Returns (k,) True for those, and the class of each afterwards. The most confident prediction with an error of any
    kind that could match an undetected box claims it, as in the authors' program.
    """
    corrected, corrected_classes = [np.empty(0, np.bool_)], [np.empty(0, np.int64)]
    for record, one in zip(records, found, strict=True):
        own = np.zeros(len(one.kinds), np.bool_)
        classes = one.predicted[:, 5].astype(np.int64)
        claimed: set[int] = set()
        for p in np.flatnonzero((one.kinds != CORRECT) & (one.target >= 0)).tolist():  # most confident first
            t = int(one.target[p])
            if one.undetected[t] and t not in claimed:
                claimed.add(t)
                if one.kinds[p] == kind:
                    own[p], classes[p] = True, int(record.true[t, 0])
        corrected.append(own)
        corrected_classes.append(classes)
    return np.concatenate(corrected), np.concatenate(corrected_classes)


def _map50(scored: _Scored, counts: Ints) -> float:
    """Compute mAP50, the mean over classes of average precision at an IoU of 0.5.

    NaN without true boxes.
    """
    order = np.argsort(-scored.scores, kind="stable")
    values = []
    for c in np.flatnonzero(counts):
        hits = scored.hits[order[scored.classes[order] == c]]
        values.append(precision_at_recall(hits[:, None], int(counts[c])).mean())
    return float(np.mean(values)) if values else float("nan")


# -- confidence --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calibration:
    """Reliability diagram: mean confidence and precision of boxes in equal bins of confidence."""

    confidence: Floats
    """(bins,) mean confidence; NaN for an empty bin."""
    precision: Floats
    """(bins,) share that matched a true box at an IoU of 0.5; NaN for an empty bin."""
    counts: Ints
    """(bins,) boxes."""
    error: float
    """Expected calibration error: the mean absolute difference of the two, weighted by boxes; NaN without boxes."""


def calibrate(records: Sequence[ImageRecord], floor: float = CALIBRATION_FLOOR) -> Calibration:
    """Compare confidences of at least ``floor`` with how often they were right.

    ECE as in Guo et al. 2017, "On Calibration of Modern Neural Networks", equation 5 (10 bins); for detectors a box counts as
    right where it matches a true one (Kueppers et al. 2020, "Multivariate Confidence Calibration for Object Detection").
    """
    found = [image_errors(record) for record in records]
    scores = np.concatenate([np.empty(0), *(one.predicted[:, 4] for one in found)])
    hits = np.concatenate([np.empty(0, np.bool_), *(one.kinds == CORRECT for one in found)])
    scores, hits = scores[scores >= floor], hits[scores >= floor]
    bins = np.minimum((scores * CALIBRATION_BINS).astype(np.int64), CALIBRATION_BINS - 1)
    counts = np.bincount(bins, minlength=CALIBRATION_BINS)
    sums = (np.bincount(bins, weights=w, minlength=CALIBRATION_BINS) for w in (scores, hits.astype(np.float64)))
    confidence, precision = (np.where(counts > 0, s / np.maximum(counts, 1), np.nan) for s in sums)
    distance = np.abs(confidence - precision)
    error = float(np.nansum(distance * counts) / counts.sum()) if counts.sum() else float("nan")
    return Calibration(confidence, precision, counts.astype(np.int64), error)


class Threshold(NamedTuple):
    """The confidence of a class at which F1 is best, and the scores there."""

    confidence: float
    f1: float
    precision: float
    recall: float


def best_thresholds(results: DetectionResults) -> list[Threshold | None]:
    """Return each class's confidence threshold with the best F1 at an IoU of 0.5.

    Of equal ones the lowest; None for a class without true boxes or hits.
    """
    found: list[Threshold | None] = []
    for c, count in enumerate(results.labels):
        if not count or not results.f1_curve[c].any():
            found.append(None)
            continue
        best = int(np.argmax(results.f1_curve[c]))
        curves = (results.f1_curve, results.precision_curve, results.recall_curve)
        found.append(Threshold(float(CONFIDENCE_GRID[best]), *(float(curve[c, best]) for curve in curves)))
    return found


# -- labels ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LabelStatistics:
    """True boxes of a data set."""

    per_image: Ints
    """(images,) boxes of each."""
    side: Floats
    """(boxes,) square root of a box's area as a share of its image's."""
    aspect: Floats
    """(boxes,) width over height in pixels."""
    centres: Floats
    """(boxes, 2) x and y as shares of the image."""
    classes: Ints
    """(boxes,)"""
    sizes: dict[str, int]
    """Boxes of each of `SIZES`."""


def label_statistics(records: Sequence[ImageRecord]) -> LabelStatistics:
    """Describe the true boxes of ``records``; boxes of no area have no aspect."""
    true = np.concatenate([np.empty((0, 5)), *(record.true for record in records)])
    shapes = [
        np.tile(np.array([record.shape[1], record.shape[0]], np.float64), (len(record.true), 1)) for record in records
    ]
    scale = np.concatenate([np.empty((0, 2)), *shapes])
    low, high = true[:, 1:3], true[:, 3:5]
    extent = np.maximum(high - low, 0)
    area = extent.prod(axis=1)
    sound = (extent > 0).all(axis=1)
    return LabelStatistics(
        per_image=np.array([len(record.true) for record in records], np.int64),
        side=np.sqrt(area / np.maximum(scale.prod(axis=1), 1)),
        aspect=extent[sound, 0] / extent[sound, 1],
        centres=(low + high) / 2 / np.maximum(scale, 1),
        classes=true[:, 0].astype(np.int64),
        sizes={name: int((~_outside(true[:, 1:], *ends)).sum()) for name, ends in SIZES.items()},
    )


# -- images ------------------------------------------------------------------------------------------------------------


def worst_images(
    records: Sequence[ImageRecord], confidence: float, count: int
) -> list[tuple[ImageRecord, ImageErrors]]:
    """Return up to ``count`` images with the most false negatives and false positives.

    Predictions of at least ``confidence`` count. Images without mistakes are left out; of equal ones those with fewer
    true positives come first, then by path.
    """
    analysed = [(record, image_errors(record, confidence)) for record in records]

    def order(pair: tuple[ImageRecord, ImageErrors]) -> tuple[int, int, str]:
        record, errors = pair
        return -count_mistakes(errors), int((errors.kinds == CORRECT).sum()), record.path

    return sorted((pair for pair in analysed if count_mistakes(pair[1])), key=order)[:count]


def count_mistakes(errors: ImageErrors) -> int:
    """Count the false negatives and false positives of an image."""
    return int(errors.undetected.sum() + (errors.kinds != CORRECT).sum())


def summarise(counts: dict[str, int]) -> str:
    """Describe counts in words: "2 missed, 1 background"; "no mistakes" for none."""
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "no mistakes"


def mistakes(errors: ImageErrors) -> dict[str, int]:
    """Count the mistakes of an image by kind; "missed" counts all undetected boxes here."""
    counts: dict[str, int] = {kind: int((errors.kinds == n).sum()) for n, kind in enumerate(ERROR_KINDS)}
    counts["missed"] = int(errors.undetected.sum())
    return counts


# -- speed -------------------------------------------------------------------------------------------------------------


class Stages(Protocol):
    """Pre- and postprocessing around a network: photos to its input, its output to results."""

    def preprocess(self, images: Sequence[NDArray[Any]]) -> tuple[NDArray[Any], Any]: ...

    def postprocess(self, outputs: Any, context: Any) -> Sequence[Any]: ...


def stage_times(
    paths: Sequence[Path | str], processing: Stages, network: Callable[[torch.Tensor], Any]
) -> dict[str, list[float]]:
    """Measure each stage of prediction on single photos, in ms; the first is a warm-up.

    ``network`` must return when its output is there. Photos that cannot be decoded are left out.
    """
    times: dict[str, list[float]] = {"decode": [], "preprocess": [], "network": [], "postprocess": []}
    warm = False
    for path in paths:
        clock = [time.perf_counter()]
        try:
            photo = decode_image(path)
        except (ImageError, OSError):
            continue
        clock.append(time.perf_counter())
        batch, context = processing.preprocess([photo])
        clock.append(time.perf_counter())
        output = network(torch.from_numpy(batch))
        clock.append(time.perf_counter())
        processing.postprocess(output, context)
        clock.append(time.perf_counter())
        if warm:
            for stage, start, end in zip(times, clock, clock[1:]):
                times[stage].append((end - start) * 1e3)
        warm = True
    return times
