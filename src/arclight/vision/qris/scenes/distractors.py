"""Draw distractors: unlabelled things that resemble QR codes, and occluding hands or cables.

`scene` puts these into its pictures, and `prints` a `barcode` on cartons. A new kind goes into `DISTRACTORS`. Another order of random draws
changes every generated data set.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from arclight.vision.data.images import Image
from arclight.vision.qris.scenes.contents import choose, digits, words
from arclight.vision.qris.scenes.drawing import (
    FONTS,
    Sprite,
    any_colour,
    blank,
    contrasting,
    cv2,
    muted,
    pale,
    paragraph,
    rounded,
    solid,
    vivid,
    write,
    write_centred,
)
from arclight.vision.qris.scenes.symbols import Colour


def _cells(cells: npt.NDArray[np.generic], side: float) -> Image:
    """Draw a grid of 0 and 1 (1 is dark) as an RGB picture ``side`` pixels wide.

    Cells are square, with a small light border.
    """
    grid = np.pad(np.where(cells, 25, 240).astype(np.uint8), 1, constant_values=240)
    width, height = max(4, round(side)), max(4, round(side * grid.shape[0] / grid.shape[1]))
    large = np.kron(grid, np.ones((4, 4), np.uint8))
    method = cv2.INTER_AREA if width < large.shape[1] else cv2.INTER_NEAREST
    return np.repeat(cv2.resize(large, (width, height), interpolation=method)[..., None], 3, axis=2)


def barcode(rng: np.random.Generator, side: float) -> Sprite:
    """Draw a barcode: bars of one to four units with digits below."""
    widths = rng.integers(1, 5, int(rng.integers(24, 60)))
    bars = np.repeat(np.arange(len(widths)) % 2 == 0, widths)
    picture = _cells(np.tile(bars, (max(2, len(bars) // int(rng.integers(2, 5))), 1)), side)
    height, width = picture.shape[:2]
    cv2.rectangle(picture, (0, round(height * 0.86)), (width, height), (240, 240, 240), -1)
    write(picture, digits(rng, 13), (width * 0.05, height * 0.98), height * 0.1, (20, 20, 20))
    return Sprite(picture, solid(picture))


def checkerboard(rng: np.random.Generator, side: float) -> Sprite:
    rows, columns = (int(v) for v in rng.integers(3, 14, 2))
    board = np.add.outer(np.arange(rows), np.arange(columns)) % 2
    picture = _cells(board, side)
    if rng.random() < 0.4:
        picture = cv2.addWeighted(picture, 0.7, blank(picture.shape[1], picture.shape[0], vivid(rng)), 0.3, 0)
    return Sprite(picture, solid(picture))


def data_matrix(rng: np.random.Generator, side: float) -> Sprite:
    """Draw a Data Matrix look-alike: random cells in a solid and a dashed L, no finder patterns."""
    count = int(rng.integers(5, 13)) * 2
    cells = rng.random((count, count)) < 0.5
    cells[:, 0] = cells[-1] = True
    cells[0] = np.arange(count) % 2 == 0
    cells[:, -1] = np.arange(count) % 2 == 1
    picture = _cells(cells, side)
    return Sprite(picture, solid(picture))


def aztec(rng: np.random.Generator, side: float) -> Sprite:
    """Draw an Aztec look-alike: random cells around concentric squares."""
    count = int(rng.integers(8, 15)) * 2 + 1
    cells = rng.random((count, count)) < 0.5
    ring = np.abs(np.arange(count) - count // 2)
    distance = np.maximum.outer(ring, ring)
    cells = np.where(distance <= 5, distance % 2 == 0, cells)
    picture = _cells(cells, side)
    return Sprite(picture, solid(picture))


def marker(rng: np.random.Generator, side: float) -> Sprite:
    """Draw a square fiducial: a few large random cells inside a thick black frame."""
    count = int(rng.integers(4, 8))
    cells = np.pad(rng.random((count, count)) < 0.5, 1, constant_values=True)
    picture = _cells(cells, side)
    return Sprite(picture, solid(picture))


def random_cells(rng: np.random.Generator, side: float) -> Sprite:
    """Draw black and white cells without any structure."""
    rows, columns = (int(v) for v in rng.integers(6, 40, 2))
    picture = _cells(rng.random((rows, columns)) < rng.uniform(0.3, 0.6), side)
    return Sprite(picture, solid(picture))


def crossword(rng: np.random.Generator, side: float) -> Sprite:
    count = int(rng.integers(7, 16))
    picture = _cells(rng.random((count, count)) < 0.25, side)
    step = picture.shape[0] / (count + 2)
    for line in range(1, count + 2):
        at = round(line * step)
        cv2.line(picture, (round(step), at), (picture.shape[1] - round(step), at), (30, 30, 30), 1)
        cv2.line(picture, (at, round(step)), (at, picture.shape[0] - round(step)), (30, 30, 30), 1)
    for _ in range(count * 2):
        x, y = rng.integers(1, count + 1, 2)
        write(
            picture, choose(rng, "ABCDEFGHIKLMNOPRSTU"), ((x + 0.25) * step, (y + 0.8) * step), step * 0.5, (30, 30, 30)
        )
    return Sprite(picture, solid(picture))


def lattice(rng: np.random.Generator, side: float) -> Sprite:
    """Draw a lattice: equal rectangles in rows, as windows, grilles and tiles have."""
    ground, pane = any_colour(rng), any_colour(rng)
    canvas = blank(side, side * rng.uniform(0.5, 1.5), ground)
    height, width = canvas.shape[:2]
    columns, rows = int(rng.integers(2, 14)), int(rng.integers(2, 14))
    gap = rng.uniform(0.05, 0.45)
    for row in range(rows):
        for column in range(columns):
            x0, y0 = (column + gap / 2) * width / columns, (row + gap / 2) * height / rows
            x1, y1 = (column + 1 - gap / 2) * width / columns, (row + 1 - gap / 2) * height / rows
            shade = rng.uniform(0.7, 1.1)
            colour = tuple(min(255, round(v * shade)) for v in pane)
            cv2.rectangle(canvas, (round(x0), round(y0)), (round(x1), round(y1)), colour, -1)
    return Sprite(canvas, solid(canvas))


def keyboard(rng: np.random.Generator, side: float) -> Sprite:
    dark = rng.random() < 0.5
    base, key = ((25, 25, 28), (55, 55, 60)) if dark else ((190, 190, 188), (228, 228, 224))
    canvas = blank(side, side * 0.36, base)
    height, width = canvas.shape[:2]
    for row in range(5):
        for column in range(15):
            x, y = (column + 0.12 + 0.15 * row % 1) * width / 15.6, (row + 0.12) * height / 5
            cv2.rectangle(canvas, (round(x), round(y)), (round(x + width / 19), round(y + height / 6.4)), key, -1)
            write(
                canvas,
                choose(rng, "QWERTYUIOPASDFGH"),
                (x + width / 90, y + height / 11),
                height / 25,
                contrasting(key),
            )
    return Sprite(canvas, rounded(canvas, width * 0.01))


def text_block(rng: np.random.Generator, side: float) -> Sprite:
    paper = any_colour(rng)
    canvas = blank(side, side * rng.uniform(0.3, 1.6), paper)
    height, width = canvas.shape[:2]
    size = width * rng.uniform(0.015, 0.06)
    paragraph(rng, canvas, (width * 0.04, height * 0.03, width * 0.96, height), max(3.0, size), contrasting(paper))
    return Sprite(canvas, solid(canvas))


def sign(rng: np.random.Generator, side: float) -> Sprite:
    """Draw a few large words on a coloured board, or a symbol made of nested squares or rings."""
    ground = vivid(rng) if rng.random() < 0.6 else pale(rng)
    canvas = blank(side, side * rng.uniform(0.3, 1.1), ground)
    height, width = canvas.shape[:2]
    ink = contrasting(ground)
    if rng.random() < 0.35:
        colours = (ink, ground, ink, vivid(rng))
        for ring, colour in enumerate(colours):
            half = round(min(width, height) * (0.42 - 0.1 * ring))
            centre = (width // 2, height // 2)
            if rng.random() < 0.5:
                cv2.circle(canvas, centre, max(1, half), colour, -1, cv2.LINE_AA)
            else:
                cv2.rectangle(
                    canvas, (centre[0] - half, centre[1] - half), (centre[0] + half, centre[1] + half), colour, -1
                )
    else:
        for row in range(int(rng.integers(1, 4))):
            text = words(rng, int(rng.integers(1, 3))).upper()
            write_centred(
                canvas, text, height * (0.3 + 0.3 * row), height * 0.18, ink, font=choose(rng, FONTS), bold=True
            )
    return Sprite(canvas, rounded(canvas, width * rng.uniform(0, 0.1)))


def plain_box(rng: np.random.Generator, side: float) -> Sprite:
    """Draw a plain box, as of furniture or cartons: one colour with an edge, perhaps a band."""
    colour = muted(rng)
    canvas = blank(side, side * rng.uniform(0.2, 1.8), colour)
    height, width = canvas.shape[:2]
    for _ in range(int(rng.integers(0, 4))):
        x0, x1 = sorted(int(v) for v in rng.integers(0, width + 1, 2))
        y0, y1 = sorted(int(v) for v in rng.integers(0, height + 1, 2))
        cv2.rectangle(canvas, (x0, y0), (x1, y1), any_colour(rng), -1 if rng.random() < 0.6 else max(1, width // 60))
    return Sprite(canvas, rounded(canvas, width * rng.uniform(0, 0.2)))


DISTRACTORS: tuple[tuple[Callable[[np.random.Generator, float], Sprite], float, float], ...] = (
    (barcode, 2, 0.05), (checkerboard, 1, 0.1), (data_matrix, 0.5, 0.14), (aztec, 0.4, 0.18), (marker, 0.6, 0.06),
    (random_cells, 0.5, 0.14), (crossword, 0.8, 0.14), (lattice, 2, 0.05), (keyboard, 1, 0.2),
    (text_block, 3, 0.05), (sign, 3, 0.05), (plain_box, 4, 0.05),
)  # fmt: skip
"""Each with its weight and its least size, a share of the picture: smaller ones could be taken for a QR code."""


def distractor(rng: np.random.Generator, size: int) -> Sprite:
    """Draw something without a QR code, for a picture of ``size`` pixels."""
    weights = np.array([weight for _, weight, _ in DISTRACTORS])
    draw, _, least = DISTRACTORS[int(rng.choice(len(weights), p=weights / weights.sum()))]
    share = float(np.exp(rng.uniform(np.log(least), np.log(0.7))))
    return draw(rng, max(24.0, share * size))


_SKIN: tuple[Colour, ...] = (
    (244, 208, 177),
    (231, 180, 143),
    (210, 157, 124),
    (186, 120, 81),
    (140, 85, 50),
    (96, 58, 38),
)


def _shaded(rng: np.random.Generator, mask: Image, colour: Colour) -> Sprite:
    """Draw a rounded thing of one colour: bright in the middle, dark towards its edge."""
    depth = cv2.GaussianBlur(mask, (0, 0), max(1.0, mask.shape[0] / 22))
    shade = (0.45 + 0.55 * depth.astype(np.float32) / 255) * np.float32(rng.uniform(0.75, 1.05))
    image = shade[..., None] * np.array(colour, np.float32)
    return Sprite(np.clip(image, 0, 255).astype(np.uint8), mask)


def fingers(rng: np.random.Generator, side: float) -> Sprite:
    """Draw one to four fingers that point up, ``side`` pixels high, with nails now and then."""
    count = int(rng.integers(1, 5))
    height = max(12, round(side))
    thick = max(3, round(height * rng.uniform(0.2, 0.3)))
    width = round(thick * (count * 1.08 + 0.4))
    mask = np.zeros((height, width), np.uint8)
    tips = []
    for finger in range(count):
        x = round(thick * (0.7 + finger * 1.08))
        top = round(thick * 0.6 + rng.uniform(0, 0.25) * height)
        lean = round(rng.normal(0, 0.12) * thick)
        cv2.line(mask, (x, top), (x + lean, height), 255, thick, cv2.LINE_AA)
        tips.append((x, top))
    colour = _SKIN[int(rng.integers(len(_SKIN)))]
    item = _shaded(rng, mask, colour)
    if rng.random() < 0.6:
        nail = tuple(min(255, int(v * 1.08) + 8) for v in colour)
        for x, y in tips:
            cv2.ellipse(item.image, (x, y), (max(1, thick // 4), max(1, thick // 3)), 0, 0, 360, nail, -1, cv2.LINE_AA)
    return item


def hand(rng: np.random.Generator, side: float) -> Sprite:
    """Draw a fist or open hand from the side, with an arm, ``side`` pixels high."""
    height = max(24, round(side))
    width = round(height * 0.8)
    mask = np.zeros((height, width), np.uint8)
    palm = (width // 2, round(height * 0.5))
    cv2.ellipse(mask, palm, (round(width * 0.27), round(height * 0.2)), float(rng.uniform(-30, 30)), 0, 360, 255, -1)
    cv2.line(mask, palm, (round(width * rng.uniform(0.3, 0.7)), height), 255, round(width * 0.32))
    thick = max(2, round(width * 0.13))
    for finger in range(4):
        start = (round(width * (0.3 + 0.13 * finger)), round(height * 0.42))
        end = (start[0] + round(rng.normal(0, width * 0.08)), round(height * rng.uniform(0.08, 0.3)))
        cv2.line(mask, start, end, 255, thick, cv2.LINE_AA)
    cv2.line(mask, palm, (round(width * 0.12), round(height * rng.uniform(0.25, 0.45))), 255, thick, cv2.LINE_AA)
    return _shaded(rng, mask, _SKIN[int(rng.integers(len(_SKIN)))])


def strap(rng: np.random.Generator, side: float) -> Sprite:
    """Draw a cable, rubber band or strip of tape."""
    length, thick = max(8, round(side)), max(2, round(side * rng.uniform(0.02, 0.09)))
    mask = np.zeros((max(8, round(length * 0.5)), length), np.uint8)
    x = np.linspace(0, length, 24)
    y = mask.shape[0] / 2 + rng.normal(0, 0.13) * length * np.sin(x / length * rng.uniform(1, 7))
    cv2.polylines(mask, [np.stack([x, y], 1).astype(np.int32)], False, 255, thick, cv2.LINE_AA)
    return _shaded(rng, mask, any_colour(rng))
