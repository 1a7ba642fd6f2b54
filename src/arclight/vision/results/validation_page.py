"""Write a detector's validation as one self-contained HTML page.

``arclight validate`` calls `write_validation`. In: `DetectionResults`; out: the page, and its numbers for ``validate.json`` and ``--json``. Keys
of the numbers are public (`labelling` reads the thresholds); the layout is free. `comparison` reuses `marked_image`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from arclight import __version__
from arclight.fabric.atomic_replace import replace_text
from arclight.fabric.extras import require
from arclight.trainer.run.report import Section, cards, fact_list, figure, image_source, page, table
from arclight.trainer.run.svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    Series,
    Stack,
    axes,
    line_chart,
    stacked_bars,
)
from arclight.vision.data.images import Image, ImageError, decode_image, encode_jpeg
from arclight.vision.results.analysis import (
    BACKGROUND_IOU,
    CALIBRATION_BINS,
    CALIBRATION_FLOOR,
    CORRECT,
    ERROR_KINDS,
    FOREGROUND_IOU,
    SIZES,
    Calibration,
    ErrorAnalysis,
    ErrorKind,
    ImageErrors,
    LabelStatistics,
    analyse_errors,
    average_precision_by_size,
    best_thresholds,
    calibrate,
    image_errors,
    label_statistics,
    mistakes,
    summarise,
    worst_images,
)
from arclight.vision.results.draw import draw_boxes
from arclight.vision.results.metrics import CONFIDENCE_GRID, DetectionResults, Floats, ImageRecord
from arclight.vision.results.plots import NAMED_CURVES, confusion_matrix, pr_curve
from arclight.vision.results.records import name_of

WORST = 12
"""Most images shown of those with mistakes."""
SHOWN_SIDE = 640
"""Longer side of an image on the page, pixels."""
TIMED = 32
"""Most images whose stages of prediction are timed."""
FOUND, FALSE_ALARM, MISSED = 2, 1, 4
"""Colours of boxes, by number in the palette of `draw`: green, orange, magenta."""
COLOUR_KEYS = '<div class="legend">{}</div>'.format(
    "".join(
        f'<span><i class="c{colour}"></i>{words}</span>'
        for colour, words in ((FOUND, "found"), (FALSE_ALARM, "false alarm"), (MISSED, "missed object"))
    )
)
"""What the colours of boxes mean, as HTML."""
MEANING: dict[ErrorKind, str] = {
    "classification": "right place, wrong class",
    "localisation": f"right class, overlap between {BACKGROUND_IOU} and {FOREGROUND_IOU}",
    "both": "neither place nor class is right",
    "duplicate": "found already, by a more confident box",
    "background": f"no object there: overlaps none by more than {BACKGROUND_IOU}",
    "missed": "an object that no box finds",
}


def write_validation(
    path: Path,
    results: DetectionResults,
    names: Sequence[str],
    *,
    title: str,
    kind: str,
    facts: Mapping[str, str],
    stage_ms: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    """Write the page of ``results`` to ``path``; return its numbers for JSON.

    ``results`` must hold records. ``facts`` stand in its head; ``stage_ms`` are the times of single images by stage of
    prediction (`analysis.stage_times`).
    """
    records = results.records
    sizes = average_precision_by_size(records, len(names))
    errors, calibration = analyse_errors(records, len(names)), calibrate(records)
    numbers = summary(results, names, sizes, errors, calibration, stage_ms)
    sections = [
        Section("Curves", curves(results, names)),
        Section("Classes", class_table(results, names, sizes)),
        Section("Errors", error_section(errors, records, results.confidence)),
        Section("Calibration", calibration_section(calibration)),
        Section("Worst images", worst_section(records, names, results.confidence)),
        Section("Labels", label_section(label_statistics(records), names)),
        Section("Speed", speed_section(stage_ms)),
    ]
    boxes = int(results.labels.sum())
    seen = {"images": f"{results.images:,}", "labelled boxes": f"{boxes:,}", "classes": f"{len(names):,}"}
    headline: dict[str, float | str] = {
        "mAP 50-95": _score(results.map50_95),
        "mAP 50": _score(results.map50),
        "precision": _score(results.precision),
        "recall": _score(results.recall),
        f"F1 at confidence {results.confidence:.3f}": _score(results.f1),
    }
    html = page(
        title, kind, sections, facts=fact_list({**facts, **seen}.items()), cards=cards(headline, {}), version=__version__
    )  # fmt: skip
    replace_text(path, html, durable=False)
    return numbers


def summary(
    results: DetectionResults,
    names: Sequence[str],
    sizes: Mapping[str, Floats],
    errors: ErrorAnalysis,
    calibration: Calibration,
    stage_ms: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    """Collect the numbers of a page for programs; a number that is NaN or infinite is None."""

    def number(value: float) -> float | None:
        return float(value) if math.isfinite(value) else None

    classes = {}
    for c, (name, threshold) in enumerate(zip(names, best_thresholds(results), strict=True)):
        ap = results.average_precision[c]
        by_size = {f"map50_95_{size}": number(_mean(of[c])) for size, of in sizes.items()}
        chosen = {} if threshold is None else threshold._asdict()
        classes[name] = {
            "labels": int(results.labels[c]), "map50_95": number(_mean(ap)), "map50": number(ap[0]), **by_size, **chosen,
        }  # fmt: skip
    return {
        "metrics": {name: number(value) for name, value in results.summary().items()},
        "sizes": {size: number(_mean(of)) for size, of in sizes.items()},
        "errors": {kind: {"count": errors.counts[kind], "cost": number(errors.cost[kind])} for kind in ERROR_KINDS},
        "calibration_error": number(calibration.error),
        "classes": classes,
        "stage_ms": {stage: number(float(np.median(times))) for stage, times in stage_ms.items() if len(times)},
        "images": results.images,
    }


# -- curves and classes ------------------------------------------------------------------------------------------------


def curves(results: DetectionResults, names: Sequence[str]) -> str:
    figures = [
        by_confidence("F1", results.f1_curve, results, names),
        by_confidence("Precision", results.precision_curve, results, names),
        by_confidence("Recall", results.recall_curve, results, names),
    ]
    pictures = "".join(
        f'<figure><img alt="{label}" src="{image_source(draw(results, names).encode(), ".svg")}"></figure>'
        for label, draw in (("Precision and recall", pr_curve), ("Confusion matrix", confusion_matrix))
    )
    return (
        f'<div class="plots">{pictures}</div><h3>By confidence</h3><div class="charts three">{"".join(figures)}</div>'
    )


def by_confidence(title: str, values: Floats, results: DetectionResults, names: Sequence[str]) -> str:
    """Draw a score of each class, and its mean, against the confidence threshold."""
    present = [int(c) for c in np.flatnonzero(results.labels)]
    if not present:
        return ""
    few = len(present) <= NAMED_CURVES - 1
    step = 5  # 201 points a curve are more than a screen shows

    def points(curve: Floats) -> list[tuple[float, float]]:
        last = int(np.max(np.flatnonzero(curve), initial=0))  # no box is left beyond: there is no precision
        shown = np.where(np.arange(len(curve)) <= last, curve, np.nan) if title == "Precision" else curve
        return [(float(x), float(y)) for x, y in zip(CONFIDENCE_GRID[::step], shown[::step], strict=True)]

    series = [
        Series(name=names[c], points=points(values[c]), colour=rank if few else 0, faint=not few)
        for rank, c in enumerate(present)
    ]
    mean = values[present].mean(axis=0)
    if len(present) > 1:
        series.append(Series(name=f"mean of {len(present)} classes", points=points(mean), colour=7 if few else 1))
    best = int(np.argmax(mean)) if title == "F1" else round(results.confidence * (len(CONFIDENCE_GRID) - 1))
    value = f"{'best ' if title == 'F1' else ''}{mean[best]:.3f} at {CONFIDENCE_GRID[best]:.3f}"
    drawing = line_chart(series, label=f"{title} by confidence", x_name="conf.", x_range=(0.0, 1.0), y_range=(0.0, 1.0))
    keys = [(s.colour, s.name) for s in series if not s.faint]
    return figure(title, drawing, value, keys if len(keys) > 1 or not few else ())


def class_table(results: DetectionResults, names: Sequence[str], sizes: Mapping[str, Floats]) -> str:
    """Tabulate AP by class and size, and each class's best threshold; the worst class first."""
    present = [int(c) for c in np.flatnonzero(results.labels)]
    present.sort(key=lambda c: (_mean(results.average_precision[c]), c))
    header = ["class", "boxes", "AP 50-95", "AP 50", "AP 75", *SIZES, "best threshold", "F1", "precision", "recall"]
    thresholds = best_thresholds(results)

    def scores(chosen: Sequence[int]) -> list[str]:
        ap = results.average_precision[list(chosen)]
        overlaps = (_mean(ap), _mean(ap[:, 0]), _mean(ap[:, 5]))
        return [_score(value) for value in (*overlaps, *(_mean(of[list(chosen)]) for of in sizes.values()))]

    rows = []
    if len(present) > 1:
        mean = (results.confidence, results.f1, results.precision, results.recall)
        total = f"{int(results.labels.sum()):,}"
        rows.append(["<b>all classes</b>", total, *scores(present), *(_score(value) for value in mean)])
    for c in present:
        found = thresholds[c]
        best = ["-"] * 4 if found is None else [_score(value) for value in found]
        rows.append([escape(names[c]), f"{int(results.labels[c]):,}", *scores([c]), *best])
    absent = [names[c] for c in range(len(names)) if not results.labels[c]]
    note = (
        "Sizes by area in pixels of the image: small up to 32², medium up to 96², large above (AP 50-95 of each). "
        "The threshold of a class is the confidence at which its F1 is best."
    )
    if absent:
        listed = ", ".join(absent[:12]) + (" …" if len(absent) > 12 else "")
        note += f" Without a labelled box, and so without a score: {listed}."
    return table(header, rows, numbers=range(1, len(header))) + f"<figcaption>{escape(note)}</figcaption>"


# -- errors and calibration --------------------------------------------------------------------------------------------


def error_section(errors: ErrorAnalysis, records: Sequence[ImageRecord], confidence: float) -> str:
    """Tabulate the cost and the number of each kind of error, at ``confidence`` and in all."""
    if not math.isfinite(errors.map50):
        return ""
    seen: Counter[str] = Counter()
    for record in records:
        seen.update(mistakes(image_errors(record, confidence)))
    most = max(*errors.cost.values(), 1e-9)
    rows = [
        [
            f'<b class="whole">{kind}</b>', escape(MEANING[kind]), f"{seen[kind]:,}", f"{errors.counts[kind]:,}", f"{errors.cost[kind]:.3f}",
            f'<span class="meter" style="width:{max(errors.cost[kind], 0) / most * 160:.0f}px"></span>',
        ]
        for kind in sorted(ERROR_KINDS, key=lambda kind: -errors.cost[kind])
    ]  # fmt: skip
    header = ["error", "what it is", f"at confidence {confidence:.3f}", "of all boxes", "mAP 50 it costs", ""]
    note = (
        "The cost is what mAP 50 would gain if the errors of one kind were mended and the others stayed; costs do not add up. "
        "It is of all boxes, however little confidence they have; missed is there what no box came near. Kinds and costs are those "
        "of TIDE (Bolya et al. 2020)."
    )
    return table(header, rows, numbers=(2, 3, 4)) + f"<figcaption>{escape(note)}</figcaption>"


def calibration_section(calibration: Calibration) -> str:
    if not calibration.counts.sum():
        return ""
    ends = np.linspace(0, 1, CALIBRATION_BINS + 1)
    caption = (
        "Share of boxes that are right, by their confidence; pale is the distance to the confidence itself, orange where the "
        f"detector is surer than it should be. Boxes with a confidence of {CALIBRATION_FLOOR} or more; right means an overlap of 0.5 "
        "with an object of the class."
    )
    text = f"calibration error {calibration.error:.3f}"
    diagram = figure("Reliability", reliability_diagram(calibration), text, caption=caption)
    counts = stacked_bars(
        [f"{(low + high) / 2:.2f}" for low, high in pairwise(ends)],
        [Stack("boxes", 0, calibration.counts.tolist())],
        lambda count: f"{count:,.0f}",
        label="Boxes by confidence",
        x_name="conf.",
    )
    histogram = figure("Boxes by confidence", counts, f"{int(calibration.counts.sum()):,} boxes")
    return f'<div class="charts">{diagram}{histogram}</div>'


def reliability_diagram(calibration: Calibration) -> str:
    """Draw precision by confidence as bars, with the distance to the diagonal."""
    x_axis, y_axis = Axis(0, 1, LEFT, WIDTH - RIGHT), Axis(0, 1, HEIGHT - BOTTOM, TOP)
    marks = [axes(x_axis, y_axis, "conf.")]
    width = (x_axis.end - x_axis.start) / CALIBRATION_BINS - 4
    for i in range(CALIBRATION_BINS):
        if not calibration.counts[i]:
            continue
        confidence, precision = float(calibration.confidence[i]), float(calibration.precision[i])
        x = x_axis(i / CALIBRATION_BINS) + 2
        low, high = sorted((confidence, precision))
        caption = f"confidence {confidence:.3f}, right {precision:.3f}, {int(calibration.counts[i]):,} boxes"
        marks.append(
            f"<g><title>{caption}</title>{_bar(x, y_axis(low), width, y_axis(0) - y_axis(low), 'c0')}"
            f"{_bar(x, y_axis(high), width, y_axis(low) - y_axis(high), 'c0' if precision > confidence else 'c1', opacity=0.4)}</g>"
        )
    marks.append(
        f'<line class="axis" stroke-dasharray="4 4" x1="{x_axis(0)}" y1="{y_axis(0)}" x2="{x_axis(1)}" y2="{y_axis(1)}" '
        'style="stroke:var(--ink)"/>'
    )
    return (
        f'<svg class="bars" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Reliability">{"".join(marks)}</svg>'
    )


def _bar(x: float, y: float, width: float, height: float, colour: str, opacity: float = 1.0) -> str:
    return (
        f'<rect class="bar {colour}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{max(height, 0):.1f}" '
        f'fill-opacity="{opacity:g}"/>'
    )


# -- images ------------------------------------------------------------------------------------------------------------


def worst_section(records: Sequence[ImageRecord], names: Sequence[str], confidence: float) -> str:
    """Show the images with the most mistakes at ``confidence``."""
    if not math.isfinite(confidence):
        return ""
    figures = []
    for record, errors in worst_images(records, confidence, WORST):
        picture = marked_image(record, errors, names)
        if picture is not None:
            name = name_of(record)
            figures.append(figure(name, image_element(name, picture), caption=summarise(mistakes(errors))))
    if not figures:
        return "<p>No mistakes at the confidence of the best F1.</p>"
    note = f"The most mistakes at confidence {confidence:.3f}. Clean images are not shown."
    return f'{COLOUR_KEYS}<div class="plots three">{"".join(figures)}</div><figcaption>{escape(note)}</figcaption>'


def image_element(name: str, picture: Image) -> str:
    """Return an image element that holds the picture itself, as JPEG."""
    return f'<img alt="{escape(name)}" src="{image_source(encode_jpeg(picture, 82), ".jpg")}">'


def marked_image(record: ImageRecord, errors: ImageErrors, names: Sequence[str]) -> Image | None:
    """Draw found and missed boxes on an image, at the size of the page; None if unreadable."""
    try:
        image = decode_image(record.path)
    except (ImageError, OSError):
        return None
    cv2 = require("cv2", extra="vision")
    height, width = image.shape[:2]
    scale = min(SHOWN_SIDE / max(height, width), 2.0)
    size = (max(round(width * scale), 1), max(round(height * scale), 1))
    shown = cv2.resize(image, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC)
    boxes, texts, colours = [], [], []
    for row, kind in zip(errors.predicted, errors.kinds.tolist()):
        correct = kind == CORRECT
        boxes.append(row[:4] * scale)
        texts.append("" if correct else f"{names[int(row[5])]} {row[4]:.2f} {ERROR_KINDS[kind]}")
        colours.append(FOUND if correct else FALSE_ALARM)
    for row in record.true[errors.undetected]:
        boxes.append(row[1:] * scale)
        texts.append(f"missed {names[int(row[0])]}")
        colours.append(MISSED)
    return draw_boxes(shown, np.array(boxes).reshape(-1, 4), texts, colours)


# -- labels and speed --------------------------------------------------------------------------------------------------


def label_section(labels: LabelStatistics, names: Sequence[str]) -> str:
    if not len(labels.classes):
        return ""
    figures = []
    if len(names) > 1:
        by_class = np.bincount(labels.classes, minlength=len(names))
        order = np.argsort(-by_class, kind="stable")
        figures.append(_histogram("Boxes by class", [names[c] for c in order], by_class[order]))
    most = int(labels.per_image.max())
    step = max(1, math.ceil((most + 1) / 40))
    counts = np.bincount(labels.per_image // step)
    places = [str(i * step) if step == 1 else f"{i * step}-{(i + 1) * step - 1}" for i in range(len(counts))]
    mean = f"{labels.per_image.mean():.1f} on average"
    figures.append(_histogram("Boxes per image", places, counts, mean, noun="images"))
    sides = np.histogram(labels.side, bins=20, range=(0, 1))[0]
    text = ", ".join(f"{count:,} {name}" for name, count in labels.sizes.items())
    figures.append(_histogram("Box side over image side", [f"{i / 20:.2f}" for i in range(20)], sides, text))
    if len(labels.aspect):
        aspects = np.histogram(np.clip(np.log2(labels.aspect), -3, 3), bins=24, range=(-3, 3))[0]
        low, high = np.quantile(labels.aspect, (0.25, 0.75))
        places = [f"{2 ** (i / 4 - 2.875):.2f}" for i in range(24)]
        figures.append(_histogram("Width over height", places, aspects, f"half of them {low:.2f} to {high:.2f}"))
    caption = "Centres of boxes over the image; darker is more."
    figures.append(figure("Where boxes lie", centre_map(labels.centres), caption=caption))
    return f'<div class="charts">{"".join(figures)}</div>'


def _histogram(title: str, places: Sequence[str], counts: Any, value: str = "", noun: str = "boxes") -> str:
    stack = Stack(noun, 0, [float(count) for count in counts])
    drawing = stacked_bars(places, [stack], lambda count: f"{count:,.0f}", label=title, x_name="")
    return figure(title, drawing, value) if drawing else ""


def centre_map(centres: Floats, cells: int = 24) -> str:
    """Draw how many centres lie in each cell of the image."""
    counts = np.histogram2d(centres[:, 1], centres[:, 0], bins=cells, range=((0, 1), (0, 1)))[0]
    side = HEIGHT / cells
    left = (WIDTH - HEIGHT) / 2
    marks = [f'<rect x="{left:.1f}" y="0" width="{HEIGHT}" height="{HEIGHT}" fill="none" class="axis"/>']
    most = max(counts.max(), 1)
    for row, column in np.argwhere(counts):
        share = counts[row, column] / most
        marks.append(
            f"<g><title>{int(counts[row, column]):,} boxes</title>"
            f"{_bar(left + column * side, row * side, side, side, 'c0', opacity=round(0.12 + 0.88 * share, 3))}</g>"
        )
    return f'<svg class="bars" viewBox="-1 -1 {WIDTH + 2} {HEIGHT + 2}" role="img" aria-label="Centres of boxes">{"".join(marks)}</svg>'


def speed_section(stage_ms: Mapping[str, Sequence[float]]) -> str:
    if not any(len(times) for times in stage_ms.values()):
        return ""
    totals = np.sum([np.asarray(times) for times in stage_ms.values()], axis=0)
    rows = [
        [name, f"{np.median(times):.1f}", f"{np.quantile(times, 0.9):.1f}", f"{np.sum(times) / totals.sum():.0%}"]
        for name, times in stage_ms.items()
    ]
    rows.append(["<b>all</b>", f"{np.median(totals):.1f}", f"{np.quantile(totals, 0.9):.1f}", "100%"])
    note = f"Milliseconds for one image at a time, {len(totals)} images, on the machine that wrote this page."
    listed = table(["stage", "median ms", "90 % within", "share"], rows, numbers=(1, 2, 3))
    return f"{listed}<figcaption>{escape(note)}</figcaption>"


def _mean(values: Floats) -> float:
    """Compute the mean of the finite values; NaN for none."""
    there = np.asarray(values)[np.isfinite(values)]
    return float(there.mean()) if there.size else float("nan")


def _score(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "-"
