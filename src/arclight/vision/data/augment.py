"""Augment training images and their boxes: mosaic, mixup, copy-paste, affine, colour, flips.

Random numbers come from the generator that a function is given, so the same state of it and the same images
give the same bits wherever they run. Boxes are float32 (n, 5) rows ``class, x1, y1, x2, y2`` in pixels; coordinates
name places, not pixels: an image of width w covers [0, w], and its first pixel has its centre at 0.5.

Further columns are points x, y: the outline of the object, or with ``keypoints`` those, NaN if a point is not labelled;
``keypoints="corners"``: four of them, whose hull the box is where all are labelled.

`dataset` calls these for each training image, `image_folder` only `hsv_jitter`. Another order of random draws changes every seeded run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from arclight.fabric.extras import require
from arclight.vision.data.augment_settings import Augment, CropAugment
from arclight.vision.data.images import Image
from arclight.vision.data.labels import KeypointShape
from arclight.vision.data.letterbox import GREY, Frame

cv2 = require("cv2", extra="vision")

Boxes = NDArray[np.float32]
Points = NDArray[np.floating]
Matrix = NDArray[np.float64]
LabelledImage = tuple[Image, Boxes]
Size = int | Frame
"""Side of a square, or height and width, pixels."""
Keypoints = bool | Literal["corners"]

MIN_SIDE = 2.0
"""Boxes with a side shorter than this, in pixels, after a transform are dropped: next to nothing of the object can be seen."""
MIN_VISIBLE = 0.1
"""Boxes of which less than this share is inside the image are dropped."""
MAX_HIDDEN = 0.3
"""A pasted object may hide at most this share of another one."""
MAX_PASTED = 8
"""Most objects pasted into one image."""


def mosaic(
    tiles: Sequence[LabelledImage],
    rng: np.random.Generator,
    augment: Augment,
    size: int,
    *,
    keypoints: Keypoints = False,
) -> LabelledImage:
    """Compose a mosaic of four images around a random centre, under one random transform.

    The result is a square of ``size`` pixels. YOLOv4 (arXiv 2004.10934) draws a mosaic of twice the size and cuts a random part out of
    it. Here each tile is warped once, straight to its final place.
    """
    transform = random_transform(rng, augment, size, reach=1.5 * size) @ _shift(-size, -size)
    centre_x, centre_y = rng.uniform(0.5 * size, 1.5 * size, 2)
    canvas = np.full((size, size, 3), GREY, np.uint8)
    boxes = []
    for place, (image, labels) in enumerate(tiles):
        height, width = image.shape[:2]
        left = centre_x - width if place % 2 == 0 else centre_x
        top = centre_y - height if place < 2 else centre_y
        matrix = transform @ _shift(left, top)
        _warp_into(canvas, image, matrix)
        boxes.append(warp_boxes(labels, matrix, size, keypoints=keypoints))
    return canvas, np.concatenate(boxes)


def mosaic9(
    tiles: Sequence[LabelledImage],
    rng: np.random.Generator,
    augment: Augment,
    size: int,
    *,
    keypoints: Keypoints = False,
) -> LabelledImage:
    """Compose a mosaic of nine images around a random centre, in a square of ``size`` pixels.

    Each has two thirds of the size that it has in `mosaic`, so that they fill the same plane of twice the size; each is warped once.
    """
    transform = random_transform(rng, augment, size, reach=1.5 * size)
    cell = 2 * size / 3
    centre = rng.uniform(-cell / 4, cell / 4, 2)
    canvas = np.full((size, size, 3), GREY, np.uint8)
    boxes = []
    for (row, column), (image, labels) in zip(_AROUND, tiles, strict=True):
        height, width = image.shape[0] * cell / size, image.shape[1] * cell / size
        # Against the middle cell, so that the grey of images that are not square lies outside.
        left = centre[0] + (column - 0.5) * cell + (cell - width) * (0.5 - 0.5 * column)
        top = centre[1] + (row - 0.5) * cell + (cell - height) * (0.5 - 0.5 * row)
        matrix = transform @ _shift(left, top) @ np.diag([cell / size, cell / size, 1.0])
        _warp_into(canvas, image, matrix)
        boxes.append(warp_boxes(labels, matrix, size, keypoints=keypoints))
    return canvas, np.concatenate(boxes)


_AROUND = ((0, 0), (-1, -1), (-1, 0), (-1, 1), (0, -1), (0, 1), (1, -1), (1, 0), (1, 1))
"""Row and column of each of nine images, from the middle one."""


def copy_paste(
    labelled: LabelledImage, source: LabelledImage, rng: np.random.Generator, *, keypoints: Keypoints = False
) -> LabelledImage:
    """Paste up to `MAX_PASTED` objects of ``source`` at random places of an image, in place.

    An object that would hide more than the share `MAX_HIDDEN` of a box that is there, pasted ones among them, is left out. The pixels
    within the outline of an object, or its box if it has none, are copied as they are: neither mirrored nor turned (the idea: arXiv
    2012.07177). Keypoints outside of the box become NaN.
    """
    image, boxes = labelled
    pixels, candidates = source
    height, width = image.shape[:2]
    pasted = [boxes]
    for row in candidates[rng.permutation(len(candidates))[:MAX_PASTED]]:
        x1, y1, x2, y2 = row[1:5].round().astype(int).clip(0, [*pixels.shape[1::-1]] * 2).tolist()
        left = int(rng.integers(0, max(width - (x2 - x1), 0) + 1))
        top = int(rng.integers(0, max(height - (y2 - y1), 0) + 1))
        if min(x2 - x1, y2 - y1) < MIN_SIDE or x2 - x1 > width or y2 - y1 > height:
            continue
        place = np.array([[row[0], left, top, left + x2 - x1, top + y2 - y1]], np.float32)
        outline = row[None, 5:] + np.tile(np.array([left - x1, top - y1], np.float32), len(row[5:]) // 2)
        if keypoints:
            _forget_outside(outline.reshape(-1, 2), place[0, 1:3], place[0, 3:5])
        place = np.concatenate((place, outline), 1)
        if _hidden(np.concatenate(pasted), place[0]).max(initial=0.0) <= MAX_HIDDEN:
            outlined = len(row) > 5 and not keypoints
            seen = np.zeros((y2 - y1, x2 - x1), np.uint8) if outlined else np.ones((y2 - y1, x2 - x1), np.uint8)
            if outlined:
                cv2.fillPoly(
                    seen, [((row[5:].reshape(-1, 2) - (x1 + 0.5, y1 + 0.5)) * 16).round().astype(np.int32)], 1, shift=4
                )
            image[top : top + y2 - y1, left : left + x2 - x1][seen > 0] = pixels[y1:y2, x1:x2][seen > 0]
            pasted.append(place)
    return image, np.concatenate(pasted)


def _hidden(boxes: Boxes, cover: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the share of each box's area that the row ``cover`` hides."""
    sides = np.minimum(boxes[:, 3:5], cover[3:5]) - np.maximum(boxes[:, 1:3], cover[1:3])
    areas = (boxes[:, 3:5] - boxes[:, 1:3]).prod(1)
    shares: NDArray[np.float32] = sides.clip(0).prod(1) / np.maximum(areas, 1e-9)
    return shares


def random_affine(
    tile: LabelledImage,
    rng: np.random.Generator,
    augment: Augment,
    size: Size,
    *,
    keypoints: Keypoints = False,
    fit: bool = False,
) -> LabelledImage:
    """Apply a random affine or perspective transform to one image, about its centre.

    The result is a square of ``size`` pixels, or a rectangle.
    ``fit``: scale it first to the largest size that lies within; otherwise it is taken as large as it is.
    """
    image, labels = tile
    width, height = _sides(size)
    matrix = random_transform(rng, augment, size, reach=0.5 * max(width, height))
    if fit:
        zoom = min(width / image.shape[1], height / image.shape[0])
        matrix = matrix @ np.diag([zoom, zoom, 1.0])
    matrix = matrix @ _shift(-image.shape[1] / 2, -image.shape[0] / 2)
    canvas = np.full((height, width, 3), GREY, np.uint8)
    _warp_into(canvas, image, matrix)
    return canvas, warp_boxes(labels, matrix, size, keypoints=keypoints)


def _sides(size: Size) -> tuple[int, int]:
    """Return width and height."""
    return (size, size) if isinstance(size, int) else (size[1], size[0])


def random_transform(rng: np.random.Generator, augment: Augment, size: Size, *, reach: float) -> Matrix:
    """Draw a random transform (3, 3) that maps the origin to about the middle of the output.

    ``size``: side of the square output in pixels, or (height, width) of a rectangle. Perspective, then rotation and
    scale, then shear, then a shift of the origin to about the middle of the square. What is drawn lies within ``reach``
    of the origin on both axes; perspective is bounded so that it stays in front.
    """
    perspective = np.eye(3)
    # The denominator x * p0 + y * p1 + 1 stays within [0.4, 1.6]: nothing turns inside out.
    perspective[2, :2] = rng.uniform(-1, 1, 2) * min(augment.perspective, 0.3 / reach)
    angle = math.radians(rng.uniform(-augment.degrees, augment.degrees))
    scale = rng.uniform(1 - augment.scale, 1 + augment.scale)
    cos, sin = scale * math.cos(angle), scale * math.sin(angle)
    rotation = np.array([[cos, sin, 0], [-sin, cos, 0], [0, 0, 1]])
    shear = np.eye(3)
    shear[0, 1], shear[1, 0] = np.tan(np.radians(rng.uniform(-augment.shear, augment.shear, 2)))
    middle = rng.uniform(0.5 - augment.translate, 0.5 + augment.translate, 2) * _sides(size)
    result: Matrix = _shift(*middle) @ shear @ rotation @ perspective
    return result


def warp_boxes(boxes: Boxes, matrix: Matrix, size: Size, *, keypoints: Keypoints = False) -> Boxes:
    """Warp ``boxes``, clip them to the output and drop those of which little remains.

    ``size``: side of the square output in pixels, or of a rectangle.
    The new box is the hull of the warped outline, of the four "corners" if all are labelled, or else of the old box's corners, which is
    too large after a rotation. Keypoints outside of the output are NaN.
    """
    if len(boxes) == 0:
        return boxes
    outlined = boxes.shape[1] > 5 and not keypoints
    corners = boxes[:, 5:] if outlined else boxes[:, [1, 2, 3, 2, 3, 4, 1, 4]]
    exact: NDArray[np.bool_] = np.full(len(boxes), outlined)
    if keypoints == "corners":
        exact = np.asarray(np.isfinite(boxes[:, 5:]).all(1))
        corners[exact] = boxes[exact, 5:]
    points = _project(matrix, corners.reshape(-1, 2)).reshape(len(boxes), -1, 2)
    whole = np.concatenate((points.min(1), points.max(1)), 1)
    seen = whole.clip(0, _sides(size) * 2)
    for row in np.flatnonzero(exact & (whole != seen).any(1)):
        inside = clip_outline(points[row], size)
        seen[row] = (*inside.min(0), *inside.max(0)) if len(inside) else 0
    sides, whole_sides = seen[:, 2:] - seen[:, :2], whole[:, 2:] - whole[:, :2]
    keep = (sides.min(1) >= MIN_SIDE) & (sides.prod(1) >= MIN_VISIBLE * whole_sides.prod(1))
    outlines = [points[keep].reshape(-1, boxes.shape[1] - 5)] if outlined else []
    if keypoints:
        marked = _project(matrix, boxes[keep, 5:].reshape(-1, 2))
        _forget_outside(marked, 0, np.array(_sides(size)))
        outlines = [marked.reshape(-1, boxes.shape[1] - 5)]
    return np.concatenate((boxes[keep, :1], seen[keep], *outlines), 1, dtype=np.float32)


def _forget_outside(points: Points, low: Points | float, high: Points | NDArray[np.int64]) -> None:
    """Set points (n, 2) to NaN, in place, that are not between ``low`` and ``high``."""
    points[~((points >= low) & (points <= high)).all(-1)] = np.nan


def clip_outline(points: Points, size: Size) -> Points:
    """Clip an outline (k, 2) to the image (Sutherland and Hodgman 1974).

    ``size``: side of the square in pixels, or of a rectangle. Empty if all of the outline is outside.
    """
    width, height = _sides(size)
    for axis, limit, sign in ((0, 0, 1), (0, width, -1), (1, 0, 1), (1, height, -1)):
        if not len(points):
            break
        distance = sign * (points[:, axis] - limit)
        following, then = np.roll(points, -1, axis=0), np.roll(distance, -1)
        crosses = (distance >= 0) != (then >= 0)
        share = np.divide(distance, distance - then, out=np.zeros_like(distance), where=crosses)
        both = np.stack((points, points + share[:, None] * (following - points)), 1)
        points = both[np.stack((distance >= 0, crosses), 1)]
    return points


def never_mirrored(names: Sequence[str], augment: Augment) -> frozenset[int]:
    """Return the numbers of the classes that ``augment.never_mirrored`` matches, ignoring case."""
    patterns = [pattern.lower() for pattern in augment.never_mirrored]
    return frozenset(
        number for number, name in enumerate(names) if any(fnmatchcase(name.lower(), pattern) for pattern in patterns)
    )


def flip(
    labelled: LabelledImage,
    rng: np.random.Generator,
    augment: Augment,
    fixed: frozenset[int] = frozenset(),
    keypoints: KeypointShape | None = None,
) -> LabelledImage:
    """Flip an image left-right and top-bottom, each with its probability.

    An image with an object of a class in ``fixed`` is never flipped. In a mirror left and right change places,
    whichever way it stands: ``keypoints`` are renumbered as they say, and images of keypoints that do not say so are
    never mirrored.
    """
    image, boxes = labelled
    height, width = image.shape[:2]
    may = not fixed or fixed.isdisjoint(boxes[:, 0].astype(int).tolist())
    may = may and (keypoints is None or keypoints.flip is not None)
    if rng.random() < augment.fliplr and may:
        image = cv2.flip(image, 1)
        points = _renumbered(boxes[:, 5:], keypoints)
        points[:, ::2] = width - points[:, ::2]
        boxes = np.stack((boxes[:, 0], width - boxes[:, 3], boxes[:, 2], width - boxes[:, 1], boxes[:, 4]), 1)
        boxes = np.concatenate((boxes, points), 1)
    if rng.random() < augment.flipud and may:
        image = cv2.flip(image, 0)
        points = _renumbered(boxes[:, 5:], keypoints)
        points[:, 1::2] = height - points[:, 1::2]
        boxes = np.stack((boxes[:, 0], boxes[:, 1], height - boxes[:, 4], boxes[:, 3], height - boxes[:, 2]), 1)
        boxes = np.concatenate((boxes, points), 1)
    return image, boxes


def _renumbered(points: Boxes, keypoints: KeypointShape | None) -> Boxes:
    """Copy points (n, 2 P), keypoints among them under the numbers that they have in a mirror."""
    if keypoints is None or keypoints.flip is None:
        return points.copy()
    return points.reshape(len(points), keypoints.count, 2)[:, list(keypoints.flip)].reshape(points.shape)


def mixup(first: LabelledImage, second: LabelledImage, rng: np.random.Generator) -> LabelledImage:
    """Blend two images of one size, with the boxes of both (arXiv 1710.09412)."""
    share = rng.beta(32.0, 32.0)
    image: Image = cv2.addWeighted(first[0], share, second[0], 1 - share, 0)
    return image, np.concatenate((first[1], second[1]))


def hsv_jitter(image: Image, rng: np.random.Generator, augment: Augment | CropAugment) -> Image:
    """Multiply hue, saturation and value of the whole image by random gains."""
    ranges = np.array([augment.hsv_h, augment.hsv_s, augment.hsv_v])
    gains = 1 + rng.uniform(-1, 1, 3) * ranges
    if not ranges.any():
        return image
    levels = np.arange(256)
    tables = np.empty((1, 256, 3), np.uint8)
    tables[0, :, 0] = levels * gains[0] % 180  # OpenCV counts hue in steps of two degrees
    tables[0, :, 1:] = (levels[:, None] * gains[1:]).clip(0, 255)
    hsv = cv2.cvtColor(image, cv2.COLOR_RGB2HSV)
    result: Image = cv2.cvtColor(cv2.LUT(hsv, tables, dst=hsv), cv2.COLOR_HSV2RGB, dst=hsv)
    return result


def _warp_into(canvas: Image, image: Image, matrix: Matrix) -> None:
    """Draw ``image`` where ``matrix`` puts it, on that part of ``canvas`` only."""
    height, width = image.shape[:2]
    corners = _project(matrix, np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float64))
    low, high = corners.min(0), corners.max(0)
    # Upright tiles are cut at whole pixels and fill them; others leave the pixels alone that they do not cover.
    upright = matrix[0, 1] == matrix[1, 0] == matrix[2, 0] == matrix[2, 1] == 0
    low, high = (low.round(), high.round()) if upright else (np.floor(low), np.ceil(high))
    border = cv2.BORDER_REPLICATE if upright else cv2.BORDER_TRANSPARENT
    edge = canvas.shape[1::-1]
    (x0, y0), (x1, y1) = low.clip(0, edge).astype(int).tolist(), high.clip(0, edge).astype(int).tolist()
    if x1 <= x0 or y1 <= y0:
        return
    # OpenCV's coordinates count from the centre of the first pixel.
    pixels = _shift(-x0 - 0.5, -y0 - 0.5) @ matrix @ _shift(0.5, 0.5)
    part = canvas[y0:y1, x0:x1]
    if matrix[2, 0] == matrix[2, 1] == 0:
        cv2.warpAffine(image, pixels[:2], (x1 - x0, y1 - y0), dst=part, flags=cv2.INTER_LINEAR, borderMode=border)
    else:
        cv2.warpPerspective(image, pixels, (x1 - x0, y1 - y0), dst=part, flags=cv2.INTER_LINEAR, borderMode=border)


def _project(matrix: Matrix, points: NDArray[np.floating]) -> NDArray[np.float64]:
    """Map ``points`` (k, 2) by a (3, 3) homography."""
    places = points @ matrix[:, :2].T + matrix[:, 2]
    result: NDArray[np.float64] = places[:, :2] / places[:, 2:]
    return result


def _shift(x: float, y: float) -> Matrix:
    return np.array([[1.0, 0.0, x], [0.0, 1.0, y], [0.0, 0.0, 1.0]])
