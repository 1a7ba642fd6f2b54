"""Compare two detectors on the same images, with bootstrap intervals, and write a page.

``arclight compare`` calls `compare`, `write_comparison` and `as_json` for detectors. Resampling is seeded: the same records give the same
intervals. Keys of `as_json` stay; the page's layout is free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from arclight import __version__
from arclight.fabric.atomic_replace import replace_text
from arclight.trainer.run.report import Section, cards, fact_list, figure, page, size_text, table
from arclight.vision.results.analysis import (
    ERROR_KINDS,
    ImageErrors,
    analyse_errors,
    count_mistakes,
    image_errors,
    mistakes,
    rows_of_class,
    summarise,
)
from arclight.vision.results.metrics import (
    IOU_THRESHOLDS,
    RECALL_GRID,
    Bools,
    DetectionResults,
    Floats,
    ImageRecord,
    Ints,
    match,
    precision_at_recall,
)
from arclight.vision.results.records import name_of
from arclight.vision.results.validation_page import COLOUR_KEYS, image_element, marked_image

METRICS = {"map50_95": "mAP 50-95", "map50": "mAP 50"}
"""Scores that are compared, and what the page calls them."""
SHOWN = 6
"""Images of each kind on the page."""
CONFIDENCE_LEVEL = 0.95
_CELLS = 2_000_000  # numbers held at a time


class Interval(NamedTuple):
    """Score of detectors a and b, and the 95 % confidence interval of the difference ``b - a``."""

    a: float
    b: float
    low: float
    """Lower end of the interval of ``b - a``."""
    high: float

    @property
    def difference(self) -> float:
        return self.b - self.a

    @property
    def certain(self) -> bool:
        """Return True if the interval does not contain 0."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Comparison:
    """Scores of two detectors on the same images."""

    metrics: dict[str, Interval]
    """Intervals by name in `METRICS`."""
    classes: list[Interval | None]
    """mAP 50-95 of each class; None for one without true boxes."""
    labels: Ints
    """(C,) true boxes."""
    resamples: int


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """One of two compared detectors: its results, times and size."""

    name: str
    results: DetectionResults
    """With records."""
    stage_ms: Mapping[str, Sequence[float]]
    """Times of single images by stage of prediction (`analysis.stage_times`)."""
    size_bytes: int
    """Bytes of its weights."""
    image_size: int


# -- intervals ---------------------------------------------------------------------------------------------------------


def compare(
    a: Sequence[ImageRecord], b: Sequence[ImageRecord], num_classes: int, *, resamples: int = 1000, seed: int = 0
) -> Comparison:
    """Compare records of the same images in the same order, with paired bootstrap intervals.

    Images are resampled. Each resample draws as many images with replacement, the same for both (Efron and Tibshirani
    1993, "An Introduction to the Bootstrap", chapter 13, percentile intervals); a class that it leaves out does not
    count in its means. Raises ValueError if the images are not the same.
    """
    if [one.path for one in a] != [one.path for one in b]:
        raise ValueError("the two were measured on different images")
    weights = np.random.default_rng(seed).multinomial(len(a), np.full(len(a), 1 / max(len(a), 1)), size=resamples)
    ap, drawn = np.full((2, num_classes, len(IOU_THRESHOLDS)), np.nan), []
    for side, records in enumerate((a, b)):
        by_class = [_class_scores(records, c) for c in range(num_classes)]
        for c, scores in enumerate(by_class):
            if scores.labels.any():
                ap[side, c] = precision_at_recall(scores.hits, int(scores.labels.sum())).mean(axis=1)
        drawn.append(np.stack([_resampled(scores, weights) for scores in by_class], axis=1))
    metrics = {}
    for name, overlaps in (("map50_95", slice(None)), ("map50", slice(0, 1))):
        means = [_nanmean(of[:, :, overlaps].mean(axis=2), axis=1) for of in drawn]
        metrics[name] = _interval(_nanmean(ap[:, :, overlaps].mean(axis=2), axis=1), means[1] - means[0])
    by_class_means = [of.mean(axis=2) for of in drawn]
    labels = np.bincount(
        np.concatenate([np.empty(0), *(one.true[:, 0] for one in a)]).astype(np.int64), minlength=num_classes
    )
    classes = [
        _interval(ap[:, c].mean(axis=1), by_class_means[1][:, c] - by_class_means[0][:, c]) if labels[c] else None
        for c in range(num_classes)
    ]
    return Comparison(metrics, classes, labels, resamples)


class _ClassScores(NamedTuple):
    """Predictions of a class in all images, most confident first."""

    images: Ints
    """(n,) number of the image."""
    hits: Bools
    """(n, T)"""
    labels: Ints
    """(images,) true boxes."""


def _class_scores(records: Sequence[ImageRecord], c: int) -> _ClassScores:
    scores, images, hits = [np.empty(0)], [np.empty(0, np.int64)], [np.empty((0, len(IOU_THRESHOLDS)), np.bool_)]
    labels = np.zeros(len(records), np.int64)
    for number, record in enumerate(records):
        for predicted, true, iou in rows_of_class([record], c):
            scores.append(predicted[:, 4])
            images.append(np.full(len(predicted), number))
            hits.append(match(iou))
            labels[number] = len(true)
    order = np.argsort(-np.concatenate(scores), kind="stable")
    return _ClassScores(np.concatenate(images)[order], np.concatenate(hits)[order], labels)


def _resampled(scores: _ClassScores, weights: Ints) -> Floats:
    """Compute average precision (resamples, T) with image i counted ``weights[:, i]`` times.

    NaN without true boxes.
    """
    positives = weights @ scores.labels
    ap = np.zeros((len(weights), len(IOU_THRESHOLDS)))
    step = max(1, _CELLS // max(len(scores.images), 1))
    for start in range(0, len(weights) if len(scores.images) else 0, step):
        rows = slice(start, start + step)
        counted = weights[rows][:, scores.images]
        seen = np.cumsum(counted, axis=1)
        needed = _hits_needed(positives[rows])
        for t in range(len(IOU_THRESHOLDS)):
            found = np.cumsum(counted * scores.hits[:, t], axis=1)
            precision = found / (seen + np.spacing(1))
            precision = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
            ap[rows, t] = _at_first(found, needed, precision).mean(axis=1)
    return np.where(positives[:, None] > 0, ap, np.nan)


def _hits_needed(positives: Ints) -> Ints:
    """Return (R, 101) the hits needed to reach each recall, of ``positives`` (R,) true boxes."""
    count = np.maximum(positives, 1)[:, None]
    needed = np.ceil(RECALL_GRID * count).astype(np.int64)
    needed += needed / count < RECALL_GRID  # rounding, as the division of the score itself has it
    needed -= (needed > 0) & ((needed - 1) / count >= RECALL_GRID)
    return needed


def _at_first(found: Ints, needed: Ints, precision: Floats) -> Floats:
    """Return (R, 101) each row's precision where ``found`` (R, n) first reaches ``needed``.

    ``found`` ascends; 0 where it never does.
    """
    rows, n = found.shape
    offset = np.arange(rows)[:, None] * (max(int(found.max(initial=0)), int(needed.max(initial=0))) + 2)
    first = np.searchsorted((found + offset).ravel(), (needed + offset).ravel(), side="left").reshape(needed.shape)
    first -= np.arange(rows)[:, None] * n
    reached = first < n
    return np.where(reached, np.take_along_axis(precision, np.where(reached, first, 0), axis=1), 0.0)


def _nanmean(values: Floats, axis: int) -> Floats:
    """Compute the mean of the finite values along ``axis``; NaN for none."""
    there = np.isfinite(values)
    count = there.sum(axis=axis)
    mean: Floats = np.where(count > 0, np.where(there, values, 0).sum(axis=axis) / np.maximum(count, 1), np.nan)
    return mean


def _interval(both: Floats, differences: Floats) -> Interval:
    there = differences[np.isfinite(differences)]
    tail = (1 - CONFIDENCE_LEVEL) / 2
    low, high = np.quantile(there, (tail, 1 - tail)) if len(there) else (np.nan, np.nan)
    return Interval(float(both[0]), float(both[1]), float(low), float(high))


# -- images ------------------------------------------------------------------------------------------------------------


class ImagePair(NamedTuple):
    """Findings of both in one image, each at its own confidence of the best F1."""

    a: ImageErrors
    b: ImageErrors
    record_a: ImageRecord
    record_b: ImageRecord

    @property
    def mistakes(self) -> tuple[int, int]:
        return count_mistakes(self.a), count_mistakes(self.b)


def differing_images(a: DetectionResults, b: DetectionResults, count: int = SHOWN) -> dict[str, list[ImagePair]]:
    """Pick images, up to ``count`` of each kind: b worse than a, b better, and both bad.

    Worse is by the number of mistakes.
    """
    pairs = [
        ImagePair(image_errors(one, a.confidence), image_errors(other, b.confidence), one, other)
        for one, other in zip(a.records, b.records, strict=True)
    ]

    def more(pair: ImagePair) -> int:
        of_a, of_b = pair.mistakes
        return of_b - of_a

    worse = sorted((pair for pair in pairs if more(pair) > 0), key=lambda pair: -more(pair))[:count]
    better = sorted((pair for pair in pairs if more(pair) < 0), key=more)[:count]
    shown = {pair.record_a.path for pair in (*worse, *better)}
    both = [pair for pair in pairs if min(pair.mistakes) > 0 and pair.record_a.path not in shown]
    both.sort(key=lambda pair: -sum(pair.mistakes))
    return {"worse": worse, "better": better, "both": both[:count]}


# -- the page ----------------------------------------------------------------------------------------------------------


def write_comparison(
    path: Path, found: Comparison, a: Evaluated, b: Evaluated, names: Sequence[str], *, facts: Mapping[str, str]
) -> None:
    """Write the page of a comparison to ``path``: a file that needs no network and no other one."""
    main = found.metrics["map50_95"]
    headline: dict[str, float | str] = {
        "mAP 50-95, A to B": _signed(main.difference),
        "mAP 50, A to B": f"{_signed(found.metrics['map50'].difference)}",
        "time of an image, B over A": _ratio(_total_ms(b), _total_ms(a)),
        "weights, B over A": _ratio(b.size_bytes, a.size_bytes),
    }
    sections = [
        Section("Scores", score_table(found, a, b)),
        Section("Classes", class_table(found, names)),
        Section("Errors", error_table(a, b, len(names))),
        Section("Speed and size", speed_table(a, b)),
        *image_sections(a, b, names),
    ]
    seen = {"A": a.name, "B": b.name, **facts, "images": f"{a.results.images:,}"}
    html = page(
        "A beside B", "Comparison", sections, facts=fact_list(seen.items()), cards=cards(headline, {}), version=__version__
    )  # fmt: skip
    replace_text(path, html, durable=False)


def as_json(found: Comparison, a: Evaluated, b: Evaluated, names: Sequence[str]) -> dict[str, Any]:
    """Collect the numbers of a comparison for programs; one that is NaN or infinite is None."""

    def interval(one: Interval | None) -> dict[str, float | None] | None:
        if one is None:
            return None
        values = {**one._asdict(), "difference": one.difference}
        return {name: value if math.isfinite(value) else None for name, value in values.items()}

    def side(one: Evaluated) -> dict[str, Any]:
        median = {stage: float(np.median(times)) for stage, times in one.stage_ms.items() if len(times)}
        return {"name": one.name, "size_bytes": one.size_bytes, "image_size": one.image_size, "stage_ms": median}

    return {
        "a": side(a),
        "b": side(b),
        "metrics": {name: interval(one) for name, one in found.metrics.items()},
        "classes": {name: interval(one) for name, one in zip(names, found.classes, strict=True)},
        "images": a.results.images,
        "resamples": found.resamples,
    }


def score_table(found: Comparison, a: Evaluated, b: Evaluated) -> str:
    rows = [
        [METRICS[name], _score(one.a), _score(one.b), _signed(one.difference), _range(one), _verdict(one)]
        for name, one in found.metrics.items()
    ]
    for title, field in (
        ("precision", "precision"),
        ("recall", "recall"),
        ("F1", "f1"),
        ("at confidence", "confidence"),
    ):
        one, other = getattr(a.results, field), getattr(b.results, field)
        rows.append([title, _score(one), _score(other), _signed(other - one), "", ""])
    note = (
        f"The interval holds the difference with a confidence of 95 %: {found.resamples:,} times as many images were drawn again "
        "with replacement, the same for A and B. It knows nothing of another training run's luck. Precision, recall and F1 are each "
        "at the confidence where its own F1 is best."
    )
    listed = table(["score", "A", "B", "B - A", "95 % interval", ""], rows, numbers=(1, 2, 3, 4))
    return f"{listed}<figcaption>{escape(note)}</figcaption>"


def class_table(found: Comparison, names: Sequence[str]) -> str:
    """Tabulate mAP 50-95 by class; where B lost most first."""
    there = [(names[c], int(found.labels[c]), one) for c, one in enumerate(found.classes) if one is not None]
    if len(there) < 2:
        return ""
    rows = [
        [escape(name), f"{boxes:,}", _score(one.a), _score(one.b), _signed(one.difference), _range(one), _verdict(one)]
        for name, boxes, one in sorted(there, key=lambda row: row[2].difference)
    ]
    return table(["class", "boxes", "A", "B", "B - A", "95 % interval", ""], rows, numbers=(1, 2, 3, 4, 5))


def error_table(a: Evaluated, b: Evaluated, num_classes: int) -> str:
    """Tabulate what each kind of error costs both."""
    one, other = (analyse_errors(side.results.records, num_classes) for side in (a, b))
    if not math.isfinite(one.map50):
        return ""
    rows = [
        [
            f'<b class="whole">{kind}</b>', f"{one.cost[kind]:.3f}", f"{other.cost[kind]:.3f}",
            _signed(other.cost[kind] - one.cost[kind]),
        ]
        for kind in ERROR_KINDS
    ]  # fmt: skip
    note = "The mAP 50 that each kind of error costs: what it would gain if these alone were mended (TIDE, Bolya et al. 2020)."
    return table(["error", "A", "B", "B - A"], rows, numbers=(1, 2, 3)) + f"<figcaption>{escape(note)}</figcaption>"


def speed_table(a: Evaluated, b: Evaluated) -> str:
    rows = []
    for stage in a.stage_ms:
        if len(a.stage_ms[stage]) and len(b.stage_ms[stage]):
            one, other = (float(np.median(side.stage_ms[stage])) for side in (a, b))
            rows.append([f"{stage}, ms", f"{one:.1f}", f"{other:.1f}", _ratio(other, one)])
    if rows:
        rows.append(
            ["<b>image, ms</b>", f"{_total_ms(a):.1f}", f"{_total_ms(b):.1f}", _ratio(_total_ms(b), _total_ms(a))]
        )
    rows.append(["weights", size_text(a.size_bytes), size_text(b.size_bytes), _ratio(b.size_bytes, a.size_bytes)])
    rows.append(["input, px", str(a.image_size), str(b.image_size), _ratio(b.image_size, a.image_size)])
    note = "Medians of single images, on the machine that wrote this page; A and B took turns."
    return table(["", "A", "B", "B over A"], rows, numbers=(1, 2, 3)) + f"<figcaption>{escape(note)}</figcaption>"


def image_sections(a: Evaluated, b: Evaluated, names: Sequence[str]) -> list[Section]:
    titles = {"worse": "B does worse", "better": "B does better", "both": "Both do badly"}
    sections = []
    for kind, pairs in differing_images(a.results, b.results).items():
        figures = [html for pair in pairs if (html := pair_figure(pair, names))]
        if figures:
            sections.append(Section(titles[kind], f'{COLOUR_KEYS}<div class="plots pairs">{"".join(figures)}</div>'))
    return sections


def pair_figure(pair: ImagePair, names: Sequence[str]) -> str:
    """Show an image twice, with the detections of A and of B; empty if it cannot be read."""
    pictures = [marked_image(pair.record_a, pair.a, names), marked_image(pair.record_b, pair.b, names)]
    if pictures[0] is None or pictures[1] is None:
        return ""
    name = name_of(pair.record_a)
    halves = "".join(
        f"<div>{image_element(f'{name}, {side}', picture)}<figcaption><b>{side}</b> {escape(summarise(mistakes(errors)))}</figcaption></div>"
        for side, picture, errors in zip("AB", pictures, (pair.a, pair.b), strict=True)
        if picture is not None
    )
    return figure(name, f'<div class="pair">{halves}</div>', css="wide")


def _total_ms(one: Evaluated) -> float:
    return float(sum(np.median(times) for times in one.stage_ms.values() if len(times)))


def _ratio(one: float, other: float) -> str:
    return f"{one / other:.2f} x" if other else "-"


def _score(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "-"


def _signed(value: float) -> str:
    return f"{value:+.3f}" if math.isfinite(value) else "-"


def _range(one: Interval) -> str:
    return f"{one.low:+.3f} to {one.high:+.3f}" if math.isfinite(one.low) else "-"


def _verdict(one: Interval) -> str:
    if not one.certain:
        return '<span class="tag">may be chance</span>'
    return '<span class="tag good">B is better</span>' if one.low > 0 else '<span class="tag bad">B is worse</span>'
