"""Draw one QR symbol: square, dot or rounded modules, any two colours, perhaps a logo.

`posters`, `prints` and `fraud` call `stamp` to put a code on a canvas; it returns a `PrintedCode`, whose corners become labels. Corners
are those of the modules, without the quiet zone. Another order of random draws changes every generated data set.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from arclight.fabric.extras import require
from arclight.vision.data.images import Image
from arclight.vision.qris.scenes.contents import Content, choose

cv2 = require("cv2", extra="vision")
segno = require("segno", extra="vision")

Points = npt.NDArray[np.float32]
Colour = tuple[int, int, int]
Modules = Literal["squares", "dots", "rounded"]

_MODULES: tuple[Modules, ...] = ("squares", "squares", "dots", "rounded")
CELL = 8
"""Pixels per module of the master drawing that is resized to every size."""


@dataclass(frozen=True)
class Look:
    """Look of a printed symbol: colours (RGB), quiet zone in modules, shape of modules, logo."""

    ink: Colour = (0, 0, 0)
    paper: Colour = (255, 255, 255)
    quiet: float = 4.0
    modules: Modules = "squares"
    logo: bool = False


@dataclass(frozen=True)
class PrintedCode:
    """Printed code: ``corners`` (4, 2) in pixels, clockwise from its top left, no quiet zone."""

    corners: Points
    content: Content
    modules: int
    """Modules along one side."""

    def moved(self, x: float, y: float) -> PrintedCode:
        """Return the same code after the thing it is on was drawn at (x, y) of something larger."""
        return replace(self, corners=self.corners + np.array([x, y], np.float32))


def random_look(rng: np.random.Generator, *, plain: float = 0.6) -> Look:
    """Draw a random look: black on white with probability ``plain``, else coloured or inverted.

    It may be rounded, or have a logo.
    """
    quiet = float(rng.uniform(2, 4.5)) if rng.random() < 0.8 else float(rng.uniform(0.3, 2))
    white = int(rng.integers(225, 256))
    if rng.random() < plain:
        black = int(rng.integers(0, 45))
        return Look((black, black, black), (white, white, white), quiet, logo=bool(rng.random() < 0.08))
    dark = tuple(int(v) for v in rng.integers(0, 110, 3))
    light = tuple(int(v) for v in rng.integers(175, 256, 3))
    if rng.random() < 0.12:
        dark, light = light, dark
    modules: Modules = choose(rng, _MODULES)
    return Look((dark[0], dark[1], dark[2]), (light[0], light[1], light[2]), quiet, modules, bool(rng.random() < 0.3))


def encode_modules(rng: np.random.Generator, content: Content, *, logo: bool) -> npt.NDArray[np.uint8]:
    """Encode the content as modules (n, n) of 0 and 1.

    The error correction level is random, but high if a logo hides modules.
    """
    level = "h" if logo else choose(rng, "lmqh")
    # The mask is drawn, not searched for: readers take any, and the search is most of segno's time.
    symbol = segno.make(content.text, error=level, boost_error=False, micro=False, mask=int(rng.integers(8)))
    return np.array(symbol.matrix, np.uint8)


def _shaped(modules: npt.NDArray[np.uint8], shape: str) -> Image:
    """Return ink coverage of the master drawing, 0 to 255, CELL pixels per module."""
    cover: Image = np.kron(modules * np.uint8(255), np.ones((CELL, CELL), np.uint8))
    if shape == "squares":
        return cover
    if shape == "rounded":
        soft = cv2.GaussianBlur(cover, (0, 0), 2.0, borderType=cv2.BORDER_CONSTANT)
        return np.asarray(cv2.threshold(soft, 127, 255, cv2.THRESH_BINARY)[1], np.uint8)
    dot = cv2.circle(np.zeros((CELL, CELL), np.uint8), (CELL // 2, CELL // 2), CELL // 2 - 1, 255, -1)
    dots: Image = np.kron(modules, dot)
    finder = 7 * CELL
    for rows, columns in ((0, 0), (0, -finder), (-finder, 0)):  # readers need solid finder patterns
        corner = np.s_[rows : (rows + finder) or None, columns : (columns + finder) or None]
        dots[corner] = cover[corner]
    return dots


def draw_symbol(rng: np.random.Generator, content: Content, look: Look, side: float) -> tuple[Image, float, int]:
    """Draw a symbol of about ``side`` pixels with its quiet zone, as an RGB square.

    Also returns the width of the zone, and the number of modules.
    """
    modules = encode_modules(rng, content, logo=look.logo)
    cover = _shaped(modules, look.modules)
    size = cover.shape[0]
    border = round(look.quiet * CELL)
    cover = cv2.copyMakeBorder(cover, border, border, border, border, cv2.BORDER_CONSTANT, value=0)
    table = np.linspace(look.paper, look.ink, 256).round().astype(np.uint8)[None]
    picture = cv2.applyColorMap(cover, table.transpose(1, 0, 2)[..., ::-1].copy())[..., ::-1].copy()
    if look.logo:
        _draw_logo(rng, picture, look)
    scale = side / size
    target = max(8, round(cover.shape[0] * scale))
    method = cv2.INTER_AREA if scale < 1 else cv2.INTER_NEAREST
    picture = cv2.resize(picture, (target, target), interpolation=method)
    return np.asarray(picture, np.uint8), border * target / cover.shape[0], len(modules)


def _draw_logo(rng: np.random.Generator, picture: Image, look: Look) -> None:
    """Hide 2 to 7 % of the picture in its middle, which error correction level H restores."""
    centre = picture.shape[0] // 2
    radius = round(picture.shape[0] * rng.uniform(0.07, 0.13))
    colour = tuple(int(v) for v in rng.integers(0, 256, 3))
    low, high = (centre - radius, centre - radius), (centre + radius, centre + radius)
    cv2.rectangle(picture, low, high, look.paper, -1)
    if rng.random() < 0.5:
        cv2.circle(picture, (centre, centre), round(radius * 0.85), colour, -1, cv2.LINE_AA)
    else:
        cv2.putText(
            picture, choose(rng, "ABCDEKMSTX"), (centre - radius // 2, centre + radius // 2), 2, radius / 16, colour, 2
        )


def stamp(
    rng: np.random.Generator, canvas: Image, centre: tuple[float, float], side: float, content: Content, *, look: Look
) -> PrintedCode:
    """Draw a symbol of ``side`` pixels around ``centre`` (x, y) of ``canvas``, clipped to it."""
    picture, zone, modules = draw_symbol(rng, content, look, side)
    size = picture.shape[0]
    left, top = round(centre[0] - size / 2), round(centre[1] - size / 2)
    height, width = canvas.shape[:2]
    x0, y0, x1, y1 = max(left, 0), max(top, 0), min(left + size, width), min(top + size, height)
    if x0 < x1 and y0 < y1:
        canvas[y0:y1, x0:x1] = picture[y0 - top : y1 - top, x0 - left : x1 - left]
    low, high = zone, size - zone
    corners = np.array([[low, low], [high, low], [high, high], [low, high]], np.float32)
    return PrintedCode(corners, content, modules).moved(left, top)
