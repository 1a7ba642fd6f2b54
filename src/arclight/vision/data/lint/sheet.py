"""Write the findings of a data set lint as one self-contained HTML page.

``arclight data lint --sheet FILE`` calls `write_sheet`. Nothing reads the page back: its layout is free.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from arclight.fabric.extras import require
from arclight.trainer.run.report import image_source
from arclight.vision.data.images import Image, ImageError, decode_reduced, encode_jpeg
from arclight.vision.data.labels import LabelledImages
from arclight.vision.data.lint.checks import CHECKS, Finding, LintReport

cv2 = require("cv2", extra="vision")

PICTURES = 12
"""Findings of each check that are shown with pictures; the others, up to `LISTED`, are lines of text."""
LISTED = 200
"""Findings of each check that are listed by name."""
SIDE_PX = 320
MIN_ZOOM_PX = 24
"""Boxes smaller than this in the picture are circled."""
_GREY, _RED = (150, 150, 150), (220, 30, 30)
"""Colours (RGB) of an image's boxes, and of those that a finding is about."""

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #222; background: #fff }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
.error { color: #b00020 } .warning { color: #8a5a00 } .note { color: #555 }
figure { display: inline-block; margin: 0 1rem 1rem 0; vertical-align: top; max-width: 42rem }
figure img { max-width: 20rem; margin-right: .25rem; border: 1px solid #ddd }
figcaption, li { font-size: .85rem; overflow-wrap: anywhere }
table { border-collapse: collapse } td, th { padding: .1rem .6rem; text-align: left; font-variant-numeric: tabular-nums }
.bar { display: inline-block; height: .7rem; background: #4a78b5; vertical-align: middle }
@media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd } .error { color: #ff7b8a } .warning { color: #e0b050 }
.note { color: #aaa } figure img { border-color: #444 } }
"""


def write_sheet(report: LintReport, file: Path) -> None:
    """Write a self-contained HTML page of findings by check, with pictures of the worst.

    It also lists the boxes per class.
    """
    labels = {str(image): rows for found in report.splits.values() for image, rows in zip(found.images, found.labels)}
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>{_text(report.file)}</title><style>{_STYLE}</style><h1>{_text(report.file)}</h1>",
        f"<p>Errors: {report.errors:,}, warnings: {report.warnings:,}. Sizes are at {report.image_size} pixels.",
        _table(report.splits),
    ]
    for name, found in report.by_check().items():
        check = CHECKS[name]
        parts.append(
            f"<h2><span class={check.severity}>{check.severity}</span> {len(found):,} x {name}: {_text(check.title)}</h2>"
        )
        figures = [_figure(finding, labels) for finding in found[:PICTURES]]
        listed = [finding for i, finding in enumerate(found[:LISTED]) if i >= len(figures) or not figures[i]]
        parts += figures
        parts.append("<ul>" + "".join(f"<li>{_text(finding)}" for finding in listed) + "</ul>")
        if len(found) > LISTED:
            parts.append(f"<p>and {len(found) - LISTED:,} more")
    parts.append(_classes(report))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(parts) + "\n</html>\n", "utf-8", errors="replace")


def _text(value: object) -> str:
    return html.escape(str(value))


def _table(splits: dict[str, LabelledImages]) -> str:
    rows = [
        f"<tr><td>{split}<td>{found.report.images:,}<td>{found.report.boxes:,}"
        f"<td>{found.report.missing_labels + found.report.empty_labels:,}"
        for split, found in splits.items()
    ]
    return f"<table><tr><th>split<th>images<th>boxes<th>background{''.join(rows)}</table>"


def _classes(report: LintReport) -> str:
    counts = report.class_counts()
    most = max((max(per_class) for per_class in counts.values()), default=0) or 1
    heads = "".join(f"<th>{split}" for split in counts)
    rows = []
    for number, name in enumerate(report.names):
        cells = "".join(
            f"<td>{per_class[number]:,} <span class=bar style='width:{8 * per_class[number] / most:.2f}rem'></span>"
            for per_class in counts.values()
        )
        rows.append(f"<tr><td>{number}<td>{_text(name)}{cells}")
    return f"<h2>Boxes per class</h2><table><tr><th><th>class{heads}{''.join(rows)}</table>"


def _figure(finding: Finding, labels: dict[str, np.ndarray[tuple[int, int], np.dtype[np.float32]]]) -> str:
    """Return a finding's images as HTML; an empty string if none can be shown."""
    pictures = []
    for path in (finding.image or finding.path, finding.other):
        rows = labels.get(path)
        if rows is None:
            continue  # a label file, or an image that cannot be read
        try:
            image = _picture(Path(path), rows[:, 1:5], finding.boxes)
        except (ImageError, OSError):
            continue  # its pixels are damaged, which is a finding of its own
        pictures.append(f"<img alt='' src='{image_source(encode_jpeg(image, 85), '.jpg')}'>")
    return f"<figure>{''.join(pictures)}<figcaption>{_text(finding)}</figcaption></figure>" if pictures else ""


def _picture(
    path: Path, all_boxes: np.ndarray[tuple[int, int], np.dtype[np.float32]], marked: Sequence[Sequence[float]]
) -> Image:
    """Shrink an image and draw its boxes (cx, cy, w, h) in grey, the ``marked`` ones in red."""
    image, (height, width) = decode_reduced(path, SIDE_PX)
    scale = SIDE_PX / max(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    image = np.ascontiguousarray(cv2.resize(image, size, interpolation=cv2.INTER_AREA))
    for boxes, colour, thickness in ((all_boxes, _GREY, 1), (marked, _RED, 2)):
        for cx, cy, box_width, box_height in boxes:
            left, top = round((cx - box_width / 2) * size[0]), round((cy - box_height / 2) * size[1])
            right, bottom = round((cx + box_width / 2) * size[0]), round((cy + box_height / 2) * size[1])
            cv2.rectangle(image, (left, top), (right, bottom), colour, thickness)
            if boxes is marked and max(right - left, bottom - top) < MIN_ZOOM_PX:
                cv2.circle(image, ((left + right) // 2, (top + bottom) // 2), MIN_ZOOM_PX, colour, thickness)
    return image
