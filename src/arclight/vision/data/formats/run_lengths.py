"""Decode run-length masks of COCO, plain and compressed, within bounds that are known before memory is taken."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from arclight.fabric.extras import require
from arclight.vision.data.images import MAX_PIXELS

cv2 = require("cv2", extra="vision")

_MAX_SHIFT = 30
_FINE = 4
"""Outlines of masks follow the edges of pixels to a fraction of this."""
_MAX_FINE_PIXELS = 4_000_000


def decode_mask(value: Any, width: int, height: int) -> NDArray[np.uint8]:
    """Decode ``{"size": [height, width], "counts": ...}`` to (height, width) of 0 and 1.

    counts: run lengths, column by column, zeros first, as a list or in COCO's compressed text. Raises ValueError where the size is
    not that of the image, is too large, or the runs do not add up to it; nothing is allocated before.
    """
    size, counts = value.get("size"), value.get("counts")
    if not isinstance(size, list) or len(size) != 2 or size != [height, width]:
        raise ValueError(f"the mask has size {str(size)[:40]}, its image is {height} high and {width} wide")
    if width * height > MAX_PIXELS:
        raise ValueError(
            f"the mask of {width} x {height} pixels is too large: at most {MAX_PIXELS / 1e6:g} million are read"
        )
    if isinstance(counts, str):
        runs = _decompress(counts, width * height)
    elif isinstance(counts, list):
        if len(counts) > width * height + 1 or not all(
            type(run) is int and 0 <= run <= width * height for run in counts
        ):
            raise ValueError("the mask's counts are not run lengths of its image")
        runs = counts
    else:
        raise ValueError(f"the mask's counts are {type(counts).__name__}, not a list or a text")
    if sum(runs) != width * height:
        raise ValueError(f"the mask's runs add up to {sum(runs):,} pixels, its image has {width * height:,}")
    values = np.arange(len(runs), dtype=np.uint8) & 1
    return np.repeat(values, runs).reshape(width, height).T


def _decompress(text: str, pixels: int) -> list[int]:
    """Decode runs of 6-bit letters, low bits first; from the fourth on each is a difference to the one before the last."""
    runs: list[int] = []
    value = shift = 0
    for letter in text:
        bits = ord(letter) - 48
        if not 0 <= bits < 64:
            raise ValueError(f"the mask's counts have the letter {letter!r}, which no run length has")
        if shift > _MAX_SHIFT:
            raise ValueError("the mask's counts have a run length of more than 32 bits")
        value |= (bits & 0x1F) << shift
        shift += 5
        if bits & 0x20:
            continue
        if bits & 0x10:
            value -= 1 << shift
        if len(runs) > 2:
            value += runs[-2]
        if not 0 <= value <= pixels or len(runs) > pixels:
            raise ValueError(f"the mask's run {len(runs)} has {value:,} pixels, its image {pixels:,}")
        runs.append(value)
        value = shift = 0
    if shift:
        raise ValueError("the mask's counts end inside a run length")
    return runs


def mask_polygons(mask: NDArray[np.uint8]) -> tuple[NDArray[np.float64], ...]:
    """Trace the outer outlines of a mask (H, W) as polygons (n, 2), pixels; holes are filled."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    if not len(rows):
        return ()
    top, left = int(rows[0]), int(columns[0])
    crop = mask[top : rows[-1] + 1, left : columns[-1] + 1]
    # A contour goes through the middles of pixels: of small ones, it is next to the edge of the mask.
    fine = _FINE if crop.size <= _MAX_FINE_PIXELS else 1
    enlarged = np.ascontiguousarray(crop.repeat(fine, 0).repeat(fine, 1))
    contours, _ = cv2.findContours(enlarged, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
    found = []
    for contour in contours:
        points = (contour.reshape(-1, 2).astype(np.float64) + 0.5) / fine + (left, top)
        if len(points) >= 3:
            found.append(points)
    return tuple(found)
