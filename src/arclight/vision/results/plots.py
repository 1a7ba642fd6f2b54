"""Plot the results of a vision task for the run's report: charts and sample predictions.

`VisionModule` (``tasks.module``) adds the callback `DetectionPlots`, whatever its task; ``write_charts`` of each task draws by these, and
`validation_page` reuses the curves. They go into the run's ``plots`` with their captions (captions.json), which the report reads. The pictures'
layout is free.
"""

from __future__ import annotations

import contextlib
import json
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from arclight.fabric.atomic_replace import replace_bytes, replace_text
from arclight.fabric.distributed.dtensor import is_dtensor
from arclight.fabric.extras import require
from arclight.trainer import Callback
from arclight.trainer.run.folder import RunFolder, read_json
from arclight.trainer.run.svg import Axis, Point, axes, path, standalone, text
from arclight.vision.data.images import Image, ImageError, decode_image, encode_jpeg
from arclight.vision.results.draw import draw_boxes, draw_keypoints, draw_lines, draw_masks, grid, resized
from arclight.vision.results.masks import Masks, Patch
from arclight.vision.results.metrics import (
    CONFUSION_CONFIDENCE,
    CONFUSION_IOU,
    RECALL_GRID,
    DetectionResults,
    Floats,
    Ints,
)
from arclight.vision.rotated import corners_of, hulls_of

if TYPE_CHECKING:
    from arclight.trainer import Trainer
    from arclight.vision.results.metrics import ClassificationResults


cv2 = require("cv2", extra="vision")

SAMPLES = 12
"""Most validation photos shown with their predictions."""
BATCH_IMAGES = 16
"""Most images of a training batch that are shown."""
BATCH_SIDE = 320
"""Longer side of each, pixels."""


class DetectionPlots(Callback):
    """Callback that writes pictures of training batches, labels, charts and predictions.

    The first ``batches`` and the labels are drawn when training starts, the rest when it ends. They go into the run's
    ``plots`` folder, only where the run writes anything at all: a trainer without loggers gets no files.
    """

    def __init__(self, batches: int = 0) -> None:
        self.batches = batches
        self._warned = False

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._warned = False
        labels = getattr(getattr(trainer.datamodule, "train", None), "labels", None)
        if self.batches and trainer.is_global_zero and trainer.loggers and labels is not None and any(map(len, labels)):
            self._draw(
                trainer.run_folder, "labels.svg", "Boxes of the training images, before anything is changed.",
                lambda: label_chart(labels, pl_module.names).encode(),
            )  # fmt: skip

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx >= self.batches or trainer.current_epoch or not trainer.is_global_zero or not trainer.loggers:
            return
        if trainer.strategy.in_stages or not len(batch["images"]):
            return  # a stage need not have targets
        self._draw(
            trainer.run_folder, f"train_batch{batch_idx}.jpg", "What the network is shown: training images after augmentation.",
            lambda: encode_jpeg(draw_batch(batch, pl_module.names, pl_module.head), 90),
        )  # fmt: skip

    def _draw(self, folder: RunFolder, name: str, caption: str, drawn: Callable[[], bytes]) -> None:
        """Write a picture with its caption, or neither."""
        path: Path | None = None
        with self._spared(lambda: path or name):
            try:
                path = folder.plots / name
                path.write_bytes(drawn())
                folder.caption_plot(name, caption)
            except (OSError, cv2.error):
                with contextlib.suppress(OSError):
                    if path is not None:
                        path.unlink(missing_ok=True)  # a part of it would be shown in the report
                raise

    @contextlib.contextmanager
    def _spared(self, what: Callable[[], Path | str]) -> Iterator[None]:
        """Warn, once, if a full disk or an OpenCV error prevents a picture, and go on."""
        try:
            yield
        except (OSError, cv2.error) as error:
            if not self._warned:
                warnings.warn(
                    f"{what()} was not drawn ({error}); the run goes on without pictures that cannot be", stacklevel=3
                )
            self._warned = True

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        if not trainer.is_global_zero or not trainer.loggers or pl_module.results is None:
            return
        self._warned = False
        captions: dict[str, str] = {}
        with self._spared(lambda: "a chart of the results"):
            captions |= pl_module.write_charts(trainer.run_folder.plots)
        # no process of a pipeline, or of a sharded model, has a whole model to look at photos with
        whole = not trainer.strategy.in_stages and not any(map(is_dtensor, pl_module.parameters()))
        dataset = getattr(trainer.datamodule, "val", None) if whole else None
        if dataset is not None and len(dataset):
            with self._spared(lambda: "predictions.jpg"):
                captions |= write_predictions(pl_module.predict, dataset, trainer.run_folder.plots)
        with self._spared(lambda: "captions.json"):
            place = trainer.run_folder.plots / "captions.json"
            before = read_json(place).items()  # of the training data: shown behind the results
            captions |= {name: caption for name, caption in before if name not in captions}
            replace_text(place, json.dumps(captions, indent=1), durable=False)


def draw_batch(batch: dict[str, Any], names: Sequence[str], head: str) -> Image:
    """Draw the first images of a training batch with their labels, tiled, RGB.

    Each is above the name of its (first) file.
    batch: as the task of ``head`` collates it. Turned boxes, masks and keypoints are drawn where its labels are these.
    """
    images = batch["images"][:BATCH_IMAGES].permute(0, 2, 3, 1).cpu().numpy()
    targets = batch["targets"].cpu().numpy()
    masks = batch["masks"].cpu().numpy() if "masks" in batch else [None] * len(images)
    drawn = []
    for place, (image, mask) in enumerate(zip(images, masks)):
        shown = resized(image, BATCH_SIDE, math.inf)
        if head == "classify":
            drawn.append(draw_lines(shown, [(names[int(targets[place])], int(targets[place]))]))
        else:
            drawn.append(_labelled(shown, targets[targets[:, 0] == place, 1:], names, head, mask))
    below = [Path(path).name for path in batch["paths"]]
    return grid(drawn, columns=4, side=BATCH_SIDE, texts=below[: len(drawn)])


def _labelled(image: Image, rows: Floats, names: Sequence[str], head: str, mask: Ints | None) -> Image:
    """Draw the targets (n, 5 and more) of one image, as the task ``head`` has them.

    They are boxes, keypoints, and the ``mask`` of object numbers.
    """
    height, width = image.shape[:2]
    classes, corners = rows[:, 0].astype(int).tolist(), None
    if head == "obb":
        boxes = rows[:, 1:6] * (width, height, width, height, 1)
        corners, xyxy = corners_of(boxes), hulls_of(boxes)
    else:
        low, high = rows[:, 1:3] - rows[:, 3:5] / 2, rows[:, 1:3] + rows[:, 3:5] / 2
        xyxy = np.concatenate((low, high), 1) * (width, height, width, height)
    if mask is not None:
        numbers = cv2.resize(mask, (width, height), interpolation=cv2.INTER_NEAREST)
        patches = tuple(Patch(0, 0, numbers == number) for number in range(1, len(classes) + 1))
        image = draw_masks(image, Masks(patches, (height, width)), classes)
    texts = [names[c] for c in classes] if len(names) > 1 else [""] * len(classes)
    image = draw_boxes(image, xyxy, texts, classes, corners)
    if head in ("pose", "corners"):
        points = rows[:, 5:].reshape(len(rows), (rows.shape[1] - 5) // 2, 2)
        there = np.isfinite(points).all(-1, keepdims=True)
        marks = np.concatenate((np.where(there, points, 0) * (width, height), there), -1)
        image = draw_keypoints(image, marks, classes)
    return image


def write_charts(results: DetectionResults, names: Sequence[str], folder: Path, of: str = "boxes") -> dict[str, str]:
    """Write the charts of ``results`` into ``folder``; return the caption of each file."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / "pr_curve.svg", pr_curve(results, names), durable=False)
    replace_text(folder / "confusion_matrix.svg", confusion_matrix(results, names), durable=False)
    return {
        "pr_curve.svg": f"Precision against recall on the validation images, at an overlap of {of} of 0.5.",
        "confusion_matrix.svg": f"What was there (columns) and what was found (rows), at confidence 0.25 and overlap of {of} of 0.45.",
    }


def write_predictions(
    predict: Callable[[Sequence[Image]], Sequence[Any]], dataset: Any, folder: Path
) -> dict[str, str]:
    """Write the predictions for some images of ``dataset`` as one picture; return its caption.

    The picture goes into ``folder``, the caption is by its file name. Damaged images are left out, and nothing is
    written where all are.
    """
    picks = np.linspace(0, len(dataset) - 1, min(SAMPLES, len(dataset))).astype(int)
    photos = []
    for pick in picks:
        with contextlib.suppress(ImageError, OSError):  # validation has named the damaged ones
            photos.append(decode_image(dataset.images[int(pick)]))
    if not photos:
        return {}
    sheet = grid([found.plot() for found in predict(photos)], columns=4, side=320)
    replace_bytes(folder / "predictions.jpg", encode_jpeg(sheet, 85), durable=False)
    return {"predictions.jpg": "Predictions on validation images."}


NAMED_CURVES = 8
"""Up to this many classes have a curve of their own colour; more are drawn faint behind the mean."""
NUMBERED_CELLS = 12
"""Confusion matrices of up to this many rows show numbers in their cells."""


def pr_curve(results: DetectionResults, names: Sequence[str]) -> str:
    """Draw the precision-recall curves at an IoU of 0.5 of every class, and their mean, as SVG."""
    left, top, side = 64, 74, 380
    x_axis, y_axis = Axis(0, 1, left, left + side), Axis(0, 1, top + side, top)

    present = [int(c) for c in np.flatnonzero(results.labels)]
    few = len(present) <= NAMED_CURVES
    marks = [axes(x_axis, y_axis, "recall", "precision")]
    legend: list[tuple[str, str, float]] = []
    for rank, c in enumerate(present):
        reached = _reached(results.precision_at_recall[c])
        line, ap = path(reached, x_axis, y_axis), results.average_precision[c, 0]
        style = f'class="curve" style="stroke:var(--c{rank})"' if few else 'class="curve faint"'
        if len(present) == 1:
            end = x_axis(reached[-1][0])
            marks.append(f'<path class="area" d="{line}L{end:.1f} {top + side}L{left} {top + side}Z"/>')
        marks.append(f'<path {style} d="{line}"><title>{escape(names[c])}: AP {ap:.3f}</title></path>')
        if few:
            legend.append((f"var(--c{rank})", names[c], ap))
    if len(present) > 1:
        mean = results.precision_at_recall[present].mean(axis=0)
        marks.append(f'<path class="curve mean" d="{path(_reached(mean), x_axis, y_axis)}"/>')
        legend.append(("var(--ink)", f"mean of {len(present)} classes", results.map50))
    if present:
        x, y = x_axis(results.recall), y_axis(results.precision)
        marks.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>')
    marks.append(_pr_legend(legend, results, left + side + 34, top + 12))
    subtitle = f"overlap 0.5 · {_count(results.images, 'image')} · {_count(int(results.labels.sum()), 'labelled box')}"
    return standalone(left + side + 270, top + side + 62, "Precision and recall", subtitle, marks)


def _reached(precision: Floats) -> list[Point]:
    """Return the points of a curve up to the last recall reached."""
    reached = np.flatnonzero(precision > 0)
    last = int(reached[-1]) + 1 if len(reached) else 1
    return list(zip(RECALL_GRID[:last].tolist(), precision[:last].tolist()))


def _pr_legend(rows: Sequence[tuple[str, str, float]], results: DetectionResults, x: float, y: float) -> str:
    """Draw the legend: rows of colour, name and average precision, and what the dot means."""
    parts = []
    for i, (colour, name, ap) in enumerate(rows):
        at = y + 24 * i
        line = f'x1="{x}" x2="{x + 18}" y1="{at - 4}" y2="{at - 4}"'
        parts.append(f'<line {line} style="stroke:{colour};stroke-width:3"/>')
        parts.append(text(x + 26, at, _short(name)))
        parts.append(text(x + 210, at, f"{ap:.3f}", "strong", anchor="end"))
    if not rows:
        return text(x, y, "no labelled boxes", "strong")
    y += 24 * len(rows) + 18
    parts.append(f'<circle class="dot" cx="{x + 9}" cy="{y - 4}" r="4.5"/>')
    parts.append(text(x + 26, y, f"best F1 {results.f1:.3f}", "strong"))
    parts.append(text(x + 26, y + 20, f"at confidence {results.confidence:.3f}", "muted"))
    parts.append(text(x + 26, y + 40, f"precision {results.precision:.3f}", "muted"))
    parts.append(text(x + 26, y + 60, f"recall {results.recall:.3f}", "muted"))
    return "".join(parts)


def confusion_matrix(results: DetectionResults, names: Sequence[str]) -> str:
    """Draw the confusion matrix of a detector as SVG: true classes are columns.

    Shares are of the labelled boxes of a column; in the last column, of false alarms, they are of the boxes found as
    that class.
    """
    counts = results.confusion
    share = counts / np.maximum(counts.sum(axis=0), 1)
    share[:, -1] = counts[:, -1] / np.maximum(counts.sum(axis=1), 1)
    boxes = _count(int(results.labels.sum()), "labelled box")
    subtitle = f"confidence {CONFUSION_CONFIDENCE} · overlap {CONFUSION_IOU} · {boxes}"
    # background rightly left empty cannot be counted
    return _matrix(counts, share, [*map(_short, names), "background"], subtitle, left_out=len(names))


def class_confusion(results: ClassificationResults, names: Sequence[str]) -> str:
    """Draw the confusion matrix of a classifier as SVG: true classes are columns.

    Shares are of the images of a column.
    """
    counts = results.confusion
    subtitle = f"top-1 {results.top1:.3f} · {_count(results.images, 'image')}"
    return _matrix(counts, counts / np.maximum(counts.sum(axis=0), 1), list(map(_short, names)), subtitle)


def _matrix(counts: Ints, share: Floats, labels: Sequence[str], subtitle: str, left_out: int | None = None) -> str:
    """Draw counts, shaded by their share; the cell ``left_out`` on the diagonal is not."""
    n = len(labels)
    numbered = n <= NUMBERED_CELLS
    cell = 104 if n <= 3 else 64 if numbered else max(9, 640 // n)
    font = 12 if cell >= 13 else 8
    left, top = 44 + max(round(max(map(len, labels)) * font * 0.6), 64), 74
    side = cell * n
    marks = []
    for row, column in np.ndindex(n, n):
        if row == column == left_out:
            continue
        count, part = int(counts[row, column]), float(share[row, column])
        x, y = left + column * cell, top + row * cell
        css, opacity = ("right" if row == column else "wrong", 0.06 + 0.94 * part) if count else ("none", 0.45)
        square = f'x="{x}" y="{y}" width="{cell - 1}" height="{cell - 1}" fill-opacity="{opacity:.3f}"'
        title = escape(f"labelled {labels[column]}, found as {labels[row]}: {count} ({part:.0%})")
        number = _numbers(x, y, cell, count, part) if numbered and count else ""
        marks.append(f'<g><title>{title}</title><rect class="{css}" {square}/>{number}</g>')
    marks += _names_of_cells(labels, left, top, cell, font)
    below = 46 if n <= 3 else round((0.64 if numbered else 1) * (left - 44)) + 34
    marks.append(text(left + side / 2, top + side + below, "labelled as", "muted", anchor="middle"))
    marks.append(text(22, top + side / 2, "found as", "muted", anchor="middle", turn=-90))
    return standalone(max(left + side + 24, 430), top + side + below + 18, "Confusion matrix", subtitle, marks)


def _numbers(x: float, y: float, cell: int, count: int, part: float) -> str:
    """Return a cell's count with its share below, in an ink readable on the cell's shade."""
    middle, line = x + (cell - 1) / 2, y + cell * 0.5
    ink = "on" if part > 0.8 else "mid" if part > 0.55 else ""
    number = text(middle, line, str(count), f"strong {ink}", anchor="middle", size=20 if cell > 80 else 14)
    shade = ink or ("muted" if part < 0.3 else "")
    return number + text(middle, line + 18, f"{part:.0%}", shade, anchor="middle", size=12)


def _names_of_cells(labels: Sequence[str], left: float, top: float, cell: int, font: int) -> list[str]:
    """Draw the names of rows at the left and of columns below, rotated if they would overlap."""
    marks = []
    anchor, turn = ("middle", 0) if len(labels) <= 3 else ("end", -40 if len(labels) <= NUMBERED_CELLS else -90)
    for i, label in enumerate(labels):
        middle = (i + 0.5) * cell
        marks.append(text(left - 8, top + middle + font * 0.35, label, "tick", anchor="end", size=font))
        x, y = (
            left + middle + (font * 0.35 if turn == -90 else 0),
            top + cell * len(labels) + (8 if turn == -90 else 16),
        )
        marks.append(text(x, y, label, "tick", anchor=anchor, size=font, turn=turn))
    return marks


LISTED_CLASSES = 12
"""Classes of a chart of labels that have a bar of their own, the most frequent ones."""
MAP_CELLS = 28


def label_chart(labels: Sequence[Floats], names: Sequence[str]) -> str:
    """Draw the distribution of training labels as SVG: classes, centres and sizes of boxes.

    labels: per image (n, 5) rows ``class, cx, cy, w, h`` as shares of it, as data sets have them.
    """
    rows = np.concatenate([np.asarray(of_image)[:, :5] for of_image in labels])
    top, side, gap, first = 96, 264, 66, 384
    marks = _class_bars(rows[:, 0].astype(int), names, left=22, top=top, width=310, height=side)
    maps = (
        ("centres", "x / width", "y / height", rows[:, 1], rows[:, 2], False),
        ("sizes", "width", "height", rows[:, 3], rows[:, 4], True),
    )
    for number, (title, x_name, y_name, x, y, upward) in enumerate(maps):
        at = first + number * (side + gap)
        marks += _share_map(x, y, at, top, side, upward)
        marks.append(text(at, top - 14, title, "strong"))
        marks.append(text(at + side / 2, top + side + 38, x_name, "muted", anchor="middle"))
        marks.append(text(at - 36, top + side / 2, y_name, "muted", anchor="middle", turn=-90))
    empty = sum(not len(of_image) for of_image in labels)
    caption = f"{_count(len(rows), 'box')} in {_count(len(labels), 'image')}, {empty:,} of them without any"
    return standalone(first + 2 * side + gap + 24, top + side + 58, "Training labels", caption, marks)


def _class_bars(
    classes: Ints, names: Sequence[str], *, left: float, top: float, width: float, height: float
) -> list[str]:
    """Draw a bar for each of the most frequent classes, and one for all others."""
    counts = np.bincount(classes, minlength=len(names))
    order = np.argsort(-counts, kind="stable")
    shown = order if len(order) <= LISTED_CLASSES else order[: LISTED_CLASSES - 1]
    rows = [(_short(names[c]), int(counts[c])) for c in shown]
    if len(shown) < len(order):
        rows.append((f"{len(order) - len(shown)} others", int(counts[order[len(shown) :]].sum())))
    most, step = max(count for _, count in rows), min(height / len(rows), 34)
    marks = [text(left, top - 14, "boxes by class", "strong")]
    for number, (name, count) in enumerate(rows):
        y, long = top + number * step, (width - 172) * count / most
        marks.append(text(left + 110, y + step / 2 + 4, name, "tick", anchor="end"))
        marks.append(
            f'<rect class="right" x="{left + 118}" y="{y + 3:.1f}" width="{long:.1f}" height="{step - 6:.1f}"/>'
        )
        marks.append(text(left + 124 + long, y + step / 2 + 4, f"{count:,}", "tick"))
    return marks


def _share_map(x: Floats, y: Floats, left: float, top: float, side: float, upward: bool) -> list[str]:
    """Draw a 2D histogram of points in the unit square.

    ``upward``: y grows to the top.
    """
    counts = np.histogram2d(y, x, bins=MAP_CELLS, range=((0, 1), (0, 1)))[0]
    cell, most = side / MAP_CELLS, max(counts.max(), 1)
    marks = [f'<rect class="axis" x="{left}" y="{top}" width="{side}" height="{side}"/>']
    for value in (0, 0.5, 1):
        y_px = top + (1 - value if upward else value) * side
        marks.append(text(left - 8, y_px + 4, f"{value:g}", "tick", anchor="end"))
        marks.append(text(left + value * side, top + side + 18, f"{value:g}", "tick", anchor="middle"))
        if value == 0.5:
            marks.append(f'<path class="grid" d="M{left} {y_px}h{side}M{left + side / 2} {top}v{side}"/>')
    for row, column in np.argwhere(counts):
        y_px = top + (MAP_CELLS - 1 - row if upward else row) * cell
        shade = 0.1 + 0.9 * np.sqrt(counts[row, column] / most)
        marks.append(
            f'<rect class="right" x="{left + column * cell:.1f}" y="{y_px:.1f}" width="{cell:.1f}" height="{cell:.1f}" '
            f'fill-opacity="{shade:.2f}"><title>{int(counts[row, column]):,}</title></rect>'
        )
    return marks


def _short(name: str) -> str:
    """Return ``name`` within the room that labels have."""
    return name if len(name) <= 18 else name[:17] + "…"


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("x") else "s")
    return f"{number:,} {noun if number == 1 else plural}"
