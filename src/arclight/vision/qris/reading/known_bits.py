"""Guess which data bits of a symbol are known beforehand, from how its data are laid out.

Most codes hold one segment of text: two to three bytes say its mode and length, links and payloads begin alike, characters are often ASCII, and
what is left over is filled with the same two codewords in turn (ISO/IEC 18004, 7.4). Often that is more than half of all data bits. Which
length and which beginning is told by the soft decisions themselves, as every layout is compared with them.

`error_correction` calls `guess_known_bits` for symbols that it cannot correct otherwise. Layouts may be added; every one is a further
chance to be wrong, for which `MIN_GAIN` leaves room.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from arclight.vision.qris.reading.finder_patterns import Floats

Bits = npt.NDArray[np.int8]

PADS = (0b11101100, 0b00010001)
"""Codewords that fill a symbol behind its text, in turn."""
BEGINNINGS = (b"", b"http://", b"http://www.", b"https://", b"https://www.", b"000201")
"""How texts of links and payloads (EMVCo) begin; the first one is any text."""
SPARE_ZEROS = (0, 8)
"""Zeros between the terminator, filled up to a codeword, and the first pad: the standard has none, segno writes a codeword of them where
nothing is to be filled up."""
MIN_GAIN = 38.0
"""Bits by which a layout must be likelier than chance: 24, as for corrected blocks, and 14 for the number of layouts that are compared."""


@dataclass(frozen=True)
class KnownBits:
    """Data bits of the likeliest layout: ``values`` (B,) are 0, 1, or -1 where unknown."""

    values: Bits
    gain: float
    """Bits by which the layout is likelier than chance; bits of which nothing is seen add 0."""


@dataclass(frozen=True, eq=False)
class _Mode:
    """Mode of a segment: its indicator, bits of its length in versions 1 to 9 and 10 to 26."""

    indicator: int
    length_bits: tuple[int, int]

    def text_bits(self, lengths: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Return how many bits texts of so many characters take."""
        if self is NUMERIC:
            return np.asarray(lengths // 3 * 10 + np.array([0, 4, 7])[lengths % 3])
        return lengths // 2 * 11 + lengths % 2 * 6 if self is ALPHANUMERIC else 8 * lengths


@dataclass(frozen=True)
class _Layout:
    """One segment of text, and where behind it pads begin, in bits."""

    mode: _Mode
    is_ascii: bool
    """Whether all are bytes below 128."""
    length: int
    beginning: bytes
    pads_at: int


NUMERIC, ALPHANUMERIC, BYTES = _Mode(1, (10, 12)), _Mode(2, (9, 11)), _Mode(4, (8, 16))


def guess_known_bits(ones: Floats, version: int) -> KnownBits | None:
    """Return the known bits of the likeliest layout; None if no layout is likely.

    ``ones`` (B,) is how likely each bit, in the order of the data, is a one.
    """
    gains = np.log2(2 * np.stack([1 - ones, ones]).astype(np.float64))
    gain, layout = max(_compared(gains, version), key=lambda one: one[0])
    return KnownBits(_bits_of(layout, len(ones), version), gain) if gain >= MIN_GAIN else None


def _compared(gains: npt.NDArray[np.float64], version: int) -> Iterator[tuple[float, _Layout]]:
    """Yield the best length of each mode and beginning, behind its gain.

    ``gains`` (2, B) are of zeros and ones.
    """
    total = gains.shape[1]
    zeros = np.concatenate([[0.0], np.cumsum(gains[0])])
    behind = zeros + np.repeat(_gains_of_pads(gains), 8)[: total + 1]  # pads begin at whole codewords only
    for mode, is_ascii in ((NUMERIC, False), (ALPHANUMERIC, False), (BYTES, True), (BYTES, False)):
        heads, ends, filled = _lengths(mode, version > 9, total)
        start = heads.shape[1]
        fits = behind[filled].max(0) - zeros[ends] + zeros[start] + heads @ (gains[1, :start] - gains[0, :start])
        if is_ascii:
            fits += np.cumsum(gains[0, start::8])[: len(ends)]  # the first bit of each character
        for beginning in BEGINNINGS if is_ascii else BEGINNINGS[:1]:
            if len(beginning) < len(ends):
                best = len(beginning) + int(fits[len(beginning) :].argmax())
                bits = np.unpackbits(np.frombuffer(beginning, np.uint8)).reshape(-1, 8)[:, 1:]
                known = start + np.arange(8 * len(beginning)).reshape(-1, 8)[:, 1:]
                gain = float(fits[best] + gains[bits, known].sum())
                pads_at = int(filled[behind[filled[:, best]].argmax(), best])
                yield gain, _Layout(mode, is_ascii, best + 1, beginning, pads_at)


@cache
def _lengths(
    mode: _Mode, large: bool, total: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return head bits (L, H), ends (L,) and places of pads (2, L) of texts of 1, 2, ... L."""
    width = mode.length_bits[large]
    lengths = np.arange(1, 1 << min(width, 11))
    ends = 4 + width + mode.text_bits(lengths)
    lengths, ends = lengths[ends <= total], ends[ends <= total]
    heads = (mode.indicator << width | lengths)[:, None] >> np.arange(3 + width, -1, -1) & 1
    return heads.astype(np.float64), ends, np.stack([_pads_at(ends, spare, total) for spare in SPARE_ZEROS])


def _pads_at(ends: npt.NDArray[np.intp], spare: int, total: int) -> npt.NDArray[np.intp]:
    """Return where pads begin: behind a terminator, zeros to a codeword, and ``spare`` ones."""
    return np.minimum(-(-(ends + 4) // 8) * 8 + spare, total)


def _gains_of_pads(gains: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the gain of pads from each codeword to the last, (C + 1,)."""
    count = gains.shape[1] // 8
    places = np.arange(8 * count).reshape(count, 8)
    first, second = (gains[np.unpackbits(np.array([pad], np.uint8)), places].sum(1) for pad in PADS)
    summed = np.zeros(count + 1)
    for parity in (0, 1):
        turns = np.where(np.arange(count) % 2 == parity, first, second)
        behind = np.append(np.cumsum(turns[::-1])[::-1], 0)
        summed[parity::2] = behind[parity::2]
    return summed


def _bits_of(layout: _Layout, total: int, version: int) -> Bits:
    """Return the bits (total,) of a layout, -1 where unknown."""
    mode, width = layout.mode, layout.mode.length_bits[version > 9]
    start = 4 + width
    end = start + int(mode.text_bits(np.array(layout.length)))
    bits = np.full(total, -1, np.int8)
    head = mode.indicator << width | layout.length
    bits[:start] = [head >> (start - 1 - bit) & 1 for bit in range(start)]
    if layout.is_ascii:
        bits[start:end:8] = 0
        bits[start : start + 8 * len(layout.beginning)] = np.unpackbits(np.frombuffer(layout.beginning, np.uint8))
    bits[end : layout.pads_at] = 0
    bits[layout.pads_at :] = np.unpackbits(np.resize(np.array(PADS, np.uint8), (total - layout.pads_at) // 8))
    return bits
