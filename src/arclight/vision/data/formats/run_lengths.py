"""Encode and decode masks as COCO's run lengths, column by column, zeros first.

``results.masks`` encodes the masks of objects, `coco` decodes those of data sets. Other programs read and write the same text, that of
pycocotools, which a test compares to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MAX_SHIFT = 30


def encode_mask(bits: NDArray[np.bool_], left: int, top: int, shape: tuple[int, int]) -> dict[str, Any]:
    """Encode a mask as ``{"size": [height, width], "counts": text}`` of an image of ``shape``.

    bits: (h, w), with its first pixel at (left, top) of the image; outside of it the mask is False.
    """
    height, width = shape
    columns = np.zeros((bits.shape[1], height), np.bool_)
    columns[:, top : top + bits.shape[0]] = bits.T
    edges = np.flatnonzero(np.diff(columns.ravel(), prepend=False, append=False)) + left * height
    runs = np.diff(edges, prepend=0, append=height * width).tolist()
    return {"size": [height, width], "counts": _compressed(runs[:-1] if runs[-1] == 0 else runs)}


def _compressed(runs: Sequence[int]) -> str:
    """Encode run lengths as COCO does, 5 bits a letter and a flag for more.

    From the fourth on the difference from the last but one is encoded.
    """
    letters = []
    for place, run in enumerate(runs):
        value, more = run - runs[place - 2] if place > 2 else run, True
        while more:
            bits, value = value & 0x1F, value >> 5
            more = value != (-1 if bits & 0x10 else 0)
            letters.append(chr((bits | 0x20 if more else bits) + 48))
    return "".join(letters)


def decode_mask(value: Mapping[str, Any], width: int, height: int, max_pixels: int) -> NDArray[np.uint8]:
    """Decode ``{"size": [height, width], "counts": ...}`` to (height, width) of 0 and 1.

    counts: run lengths, column by column, zeros first, as a list or in COCO's compressed text. Raises ValueError if the size is
    not that of the image, is too large, or the runs do not add up to it; nothing is allocated before.
    """
    size, counts = value.get("size"), value.get("counts")
    if not isinstance(size, list) or len(size) != 2 or size != [height, width]:
        raise ValueError(f"the mask has size {str(size)[:40]}, its image is {height} high and {width} wide")
    if width * height > max_pixels:
        raise ValueError(
            f"the mask of {width} x {height} pixels is too large: at most {max_pixels / 1e6:g} million are read"
        )
    if isinstance(counts, str):
        runs = _decompressed(counts, width * height)
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


def _decompressed(text: str, pixels: int) -> list[int]:
    """Decode the compressed run lengths of a COCO mask (6 bits a letter, delta-coded)."""
    runs: list[int] = []
    value = shift = 0
    for letter in text:
        bits = ord(letter) - 48
        if not 0 <= bits < 64:
            raise ValueError(f"the mask's counts have the letter {letter!r}, which is not valid in a run length")
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
