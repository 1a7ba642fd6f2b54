"""Draw text, paragraphs, shapes and colours on canvases: tools for all printed things.

Modules of ``scenes`` that make printed things build `Sprite` objects with these; `scene` and `camera` place them. Colours are RGB,
lengths pixels. Another order of random draws changes every generated data set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from arclight.fabric.extras import require
from arclight.vision.data.images import Image
from arclight.vision.qris.scenes.contents import WORDS, choose
from arclight.vision.qris.scenes.symbols import Colour, PrintedCode

cv2 = require("cv2", extra="vision")

FONTS = (0, 2, 3, 4, 6, 7)
"""Numbers of OpenCV's faces that are used: plain, with serifs, and handwriting."""


@dataclass
class Sprite:
    """A flat thing in a scene: RGB ``image``, ``mask`` (255 where it is solid), the codes on it."""

    image: Image
    mask: Image
    codes: list[PrintedCode] = field(default_factory=list)


def around(side: float, share: float) -> float:
    """Return the length of a thing of which ``side`` pixels are ``share``, limited.

    Beyond the limit most of it would lie outside any picture.
    """
    return min(side / share, max(1.7 * side, 1500.0))


def blank(width: float, height: float, colour: Colour) -> Image:
    """Return an RGB canvas of one colour."""
    row = np.tile(np.array(colour, np.uint8), max(2, round(width)))
    return np.tile(row, (max(2, round(height)), 1)).reshape(max(2, round(height)), -1, 3)


def solid(canvas: Image) -> Image:
    return np.full(canvas.shape[:2], 255, np.uint8)


def rounded(canvas: Image, radius: float) -> Image:
    """Return the mask of a rectangle with round corners, as large as ``canvas``."""
    height, width = canvas.shape[:2]
    r = max(0, min(round(radius), min(height, width) // 2 - 1))
    mask = np.zeros((height, width), np.uint8)
    cv2.rectangle(mask, (r, 0), (width - 1 - r, height - 1), 255, -1)
    cv2.rectangle(mask, (0, r), (width - 1, height - 1 - r), 255, -1)
    for x in (r, width - 1 - r):
        for y in (r, height - 1 - r):
            cv2.circle(mask, (x, y), r, 255, -1, cv2.LINE_AA)
    return mask


def vivid(rng: np.random.Generator) -> Colour:
    """Return a strong colour, as packaging and signs have."""
    hue, saturation, value = int(rng.integers(180)), int(rng.integers(110, 256)), int(rng.integers(70, 250))
    return _from_hsv(hue, saturation, value)


def muted(rng: np.random.Generator) -> Colour:
    """Return a quiet colour, as walls, tables and cloth have."""
    warm = rng.random() < 0.5
    hue = int(rng.integers(5, 30)) if warm else int(rng.integers(180))
    return _from_hsv(hue, min(90, int(rng.exponential(35.0))), int(rng.integers(40, 245)))


def pale(rng: np.random.Generator) -> Colour:
    return _from_hsv(int(rng.integers(180)), int(rng.integers(0, 40)), int(rng.integers(205, 256)))


def any_colour(rng: np.random.Generator) -> Colour:
    return choose(rng, (vivid, muted, muted, pale))(rng)


def _from_hsv(hue: int, saturation: int, value: int) -> Colour:
    red, green, blue = cv2.cvtColor(np.array([[[hue, saturation, value]]], np.uint8), cv2.COLOR_HSV2RGB)[0, 0]
    return int(red), int(green), int(blue)


def contrasting(colour: Colour) -> Colour:
    """Return near black for light colours, near white for dark ones."""
    return (20, 20, 20) if sum(colour) > 380 else (240, 240, 240)


def write(
    canvas: Image,
    text: str,
    at: tuple[float, float],
    height: float,
    colour: Colour,
    *,
    font: int = 0,
    bold: bool = False,
) -> None:
    """Write text whose capitals are ``height`` pixels high, its baseline from ``at`` (x, y)."""
    if height < 1.5:
        return
    thickness = max(1, round(height / (5 if bold else 9)))
    place = (round(at[0]), round(at[1]))
    cv2.putText(canvas, text, place, font, height / 21, colour, thickness, cv2.LINE_AA)


def write_centred(
    canvas: Image, text: str, y: float, height: float, colour: Colour, *, font: int = 0, bold: bool = False
) -> None:
    """Write one centred line, made smaller if it is wider than nine tenths of the canvas."""
    width = canvas.shape[1]
    size = cv2.getTextSize(text, font, height / 21, max(1, round(height / 9)))[0][0]
    if size > 0.9 * width:
        height *= 0.9 * width / size
        size = round(0.9 * width)
    write(canvas, text, ((width - size) / 2, y), height, colour, font=font, bold=bold)


def paragraph(
    rng: np.random.Generator,
    canvas: Image,
    box: tuple[float, float, float, float],
    height: float,
    colour: Colour,
    *,
    around: Sequence[tuple[float, float, float, float]] = (),
) -> None:
    """Write lines of running text into ``box`` (x0, y0, x1, y1), around other boxes.

    Lines are broken where one of the boxes ``around`` is in the way.
    """
    x0, y0, x1, y1 = box
    font = choose(rng, FONTS)
    spacing = height * rng.uniform(1.6, 2.4)
    y = y0 + height
    while y < y1:
        spans = [(x0, x1)]
        for left, top, right, bottom in around:
            if top < y + height and y - height < bottom:
                spans = [
                    piece
                    for a, b in spans
                    for piece in ((a, min(b, left)), (max(a, right), b))
                    if piece[1] - piece[0] > 0
                ]
        for a, b in spans:
            count = int((b - a) / (height * 0.95))
            if count > 2:
                write(canvas, _line(rng, count), (a, y), height, colour, font=font)
        y += spacing * (2.2 if rng.random() < 0.06 else 1)


def _line(rng: np.random.Generator, characters: int) -> str:
    picks = rng.integers(0, len(WORDS), characters // 4 + 1)
    return " ".join(WORDS[i] for i in picks)[:characters]
