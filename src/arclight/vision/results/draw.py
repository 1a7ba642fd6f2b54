"""Draw boxes, masks and keypoints on RGB uint8 images (height, width, 3), and tile images.

`detections`, `image_class`, `plots`, `validation_page` and `writers` draw with these. Images are copied, not changed, but for `draw_shape`.
Colours and sizes are free; the page of a validation names colours by their number in `PALETTE`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from arclight.fabric.extras import require
from arclight.vision.data.images import Image
from arclight.vision.keypoints import COCO_SIGMAS, COCO_SKELETON, SEEN
from arclight.vision.results.masks import Masks

cv2 = require("cv2", extra="vision")

Colour = tuple[int, int, int]

PALETTE: tuple[Colour, ...] = (
    (47, 111, 222),
    (224, 112, 27),
    (31, 157, 97),
    (163, 75, 209),
    (214, 63, 108),
    (15, 154, 168),
    (176, 150, 22),
    (92, 101, 117),
)
"""Colours of classes, RGB; each stands out on photographs and carries white or black text."""

GROUND: Colour = (26, 28, 31)
"""Colour behind the images of a grid, and of lines and zones."""


def draw_boxes(
    image: Image, xyxy: ArrayLike, texts: Sequence[str], classes: Sequence[int], corners: ArrayLike | None = None
) -> Image:
    """Draw boxes (k, 4) in pixels on a copy of ``image``, each with its text, coloured by class.

    ``corners`` (k, 4, 2): of rotated boxes. Lines and letters grow with the image. The first box is drawn last, so that
    the most confident one stays readable. Letters that the font lacks appear as question marks.
    """
    canvas = np.ascontiguousarray(image).copy()
    side = math.sqrt(canvas.shape[0] * canvas.shape[1])
    line = max(round(side / 320), 1)
    boxes = np.asarray(xyxy, dtype=np.float64).reshape(-1, 4)
    turned = None if corners is None else np.asarray(corners, np.float64).clip(-1e6, 1e6).round().astype(np.int32)
    for number, (box, text, label) in reversed(list(enumerate(zip(boxes, texts, classes, strict=True)))):
        colour = PALETTE[int(label) % len(PALETTE)]
        left, top, right, bottom = (round(float(v)) for v in np.clip(box, -1e6, 1e6))
        # a pale edge under the line keeps it visible on any ground
        for shade, width in (((255, 255, 255), line + 2), (colour, line)):
            if turned is None:
                cv2.rectangle(canvas, (left, top), (right, bottom), shade, width, cv2.LINE_AA)
            else:
                cv2.polylines(canvas, [turned[number]], True, shade, width, cv2.LINE_AA)
        if text:
            _draw_label(canvas, text, (left, top), colour, height=max(side / 38, 11))
    return canvas


def draw_shape(image: Image, points: ArrayLike, text: str, *, closed: bool) -> None:
    """Draw a line or polygon (n, 2) in pixels onto ``image`` itself, with its text.

    The text is at the first point.
    """
    side = math.sqrt(image.shape[0] * image.shape[1])
    line = max(round(side / 320), 1)
    corners = np.asarray(points, np.float64).clip(-1e6, 1e6).round().astype(np.int32)
    for colour, width in (((255, 255, 255), line + 2), (GROUND, line)):
        cv2.polylines(image, [corners], closed, colour, width, cv2.LINE_AA)
    _draw_label(image, text, (int(corners[0, 0]), int(corners[0, 1])), GROUND, height=max(side / 38, 11))


def draw_masks(image: Image, masks: Masks, classes: Sequence[int]) -> Image:
    """Shade masks on a copy of ``image``, each in the colour of its class, half transparent."""
    canvas = np.ascontiguousarray(image).copy()
    for (left, top, bits), label in reversed(list(zip(masks.patches, classes, strict=True))):
        part = canvas[top : top + bits.shape[0], left : left + bits.shape[1]]
        colour = np.array(PALETTE[int(label) % len(PALETTE)], np.uint16)
        part[bits] = ((part[bits].astype(np.uint16) + colour) // 2).astype(np.uint8)
    return canvas


def draw_keypoints(image: Image, keypoints: ArrayLike, classes: Sequence[int]) -> Image:
    """Draw visible keypoints (k, K, 2 or 3) in pixels on a copy of ``image``.

    17 keypoints are joined as a person's skeleton.
    """
    canvas = np.ascontiguousarray(image).copy()
    side = math.sqrt(canvas.shape[0] * canvas.shape[1])
    line = max(round(side / 400), 1)
    every = np.asarray(keypoints, np.float64)
    for points, label in reversed(list(zip(every, classes, strict=True))):
        there = np.ones(len(points), np.bool_) if points.shape[1] == 2 else points[:, 2] >= SEEN
        places = points[:, :2].clip(-1e6, 1e6).round().astype(int).tolist()
        colour = PALETTE[int(label) % len(PALETTE)]
        for first, last in COCO_SKELETON if len(points) == len(COCO_SIGMAS) else ():
            if there[first] and there[last]:
                cv2.line(canvas, places[first], places[last], colour, line, cv2.LINE_AA)
        for place in (place for place, shown in zip(places, there, strict=True) if shown):
            cv2.circle(canvas, place, 2 * line + 1, (255, 255, 255), cv2.FILLED, cv2.LINE_AA)
            cv2.circle(canvas, place, 2 * line, colour, cv2.FILLED, cv2.LINE_AA)
    return canvas


def draw_lines(image: Image, lines: Sequence[tuple[str, int]]) -> Image:
    """Write lines of text, in the colours of their classes, on a copy of ``image``.

    They go from its top left corner down.
    """
    canvas = np.ascontiguousarray(image).copy()
    height = max(math.sqrt(canvas.shape[0] * canvas.shape[1]) / 38, 11)
    for number, (text, label) in enumerate(lines):
        top = round(number * 1.35 * height)
        if top + height > canvas.shape[0]:
            break
        _draw_label(canvas, text, (0, top + round(1.35 * height)), PALETTE[label % len(PALETTE)], height)
    return canvas


def _draw_label(canvas: Image, text: str, corner: tuple[int, int], colour: Colour, height: float) -> None:
    """Draw ``text`` on a plate above ``corner`` (left, top), or below if there is no room."""
    left, top = corner
    font, weight = cv2.FONT_HERSHEY_SIMPLEX, max(round(height / 12), 1)
    text = text.encode("ascii", "replace").decode()
    scale = cv2.getFontScaleFromHeight(font, round(height * 0.72), weight)
    (width, _), _ = cv2.getTextSize(text, font, scale, weight)
    padding = round(height * 0.3)
    plate_w, plate_h = width + 2 * padding, round(height + padding)
    x = min(max(left, 0), max(canvas.shape[1] - plate_w, 0))
    y = top - plate_h if top >= plate_h else min(max(top, 0), max(canvas.shape[0] - plate_h, 0))
    cv2.rectangle(canvas, (x, y), (x + plate_w, y + plate_h), colour, cv2.FILLED)
    bright = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] > 150
    ink = (20, 20, 20) if bright else (255, 255, 255)
    cv2.putText(canvas, text, (x + padding, y + round(plate_h * 0.76)), font, scale, ink, weight, cv2.LINE_AA)


def grid(
    images: Sequence[Image], *, columns: int = 4, side: int = 320, gap: int = 8, texts: Sequence[str] = ()
) -> Image:
    """Tile ``images`` of any sizes, each in a square of ``side`` pixels, with its text below.

    If all are wider than high, or higher than wide, cells are no larger than the largest of them. Raises ValueError
    for none.
    """
    if not images:
        raise ValueError("a grid needs at least one image")
    columns = min(columns, len(images))
    rows = math.ceil(len(images) / columns)
    small = [resized(image, side) for image in images]
    high, wide = (max(image.shape[axis] for image in small) for axis in (0, 1))
    below = 20 if texts else 0
    canvas = np.full((rows * (high + below + gap) + gap, columns * (wide + gap) + gap, 3), GROUND, np.uint8)
    for i, image in enumerate(small):
        height, width = image.shape[:2]
        top, left = gap + i // columns * (high + below + gap), gap + i % columns * (wide + gap)
        y, x = top + (high - height) // 2, left + (wide - width) // 2
        canvas[y : y + height, x : x + width] = image
        if texts:
            _write_below(canvas, texts[i], left, top + high, wide)
    return canvas


def _write_below(canvas: Image, text: str, left: int, top: int, width: int) -> None:
    """Write ``text`` in a line of 20 pixels; of a longer one its end."""
    font, scale = cv2.FONT_HERSHEY_SIMPLEX, 0.42
    text = text.encode("ascii", "replace").decode()
    while len(text) > 4 and cv2.getTextSize(text, font, scale, 1)[0][0] > width:
        text = ".." + text[3:]
    cv2.putText(canvas, text, (left, top + 15), font, scale, (190, 194, 200), 1, cv2.LINE_AA)


def resized(image: Image, side: int, most: float = 2.0) -> Image:
    """Resize ``image`` to fit into a square of ``side`` pixels, enlarged at most ``most`` times."""
    scale = min(side / image.shape[0], side / image.shape[1], most)
    size = (max(round(image.shape[1] * scale), 1), max(round(image.shape[0] * scale), 1))
    if size == image.shape[1::-1]:
        return image
    fitted: Image = cv2.resize(image, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC)
    return fitted
