"""Correct a symbol's codewords by the certainty of each module (soft decoding).

Each block of a Reed-Solomon code is a linear code of bits, too. Ordered statistics decoding (Fossorier and Lin 1995) trusts the most
certain bits, computes the others from the parity checks, and tries flips of up to three trusted bits; the cheapest of these words is
nearly always the likeliest of all. It is accepted if describing its errors takes fewer bits than the block has for correction: no more
than 2^c words lie within c bits of any, so one by chance is next to impossible. What fails is tried again with the data bits that
`known_bits` guesses from the layout of the data: a shortened code, of which the same correction mends more. Tables and places of bits are
those of ISO/IEC 18004.

`decode` and `video` call `SoftSymbol` with one soft decision for each module; corrected modules go out, or nothing. Tables must stay; figures
of certainty may be tuned on ``benchmarks/qr_photos.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from arclight.vision.qris.reading.finder_patterns import Floats
from arclight.vision.qris.reading.grid import fixed_modules, side_in_modules
from arclight.vision.qris.reading.known_bits import guess_known_bits

Bools = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.intp]
Words = npt.NDArray[np.uint8]

LEVELS = "MLHQ"
"""Levels of error correction, by their two bits in the format information."""
CORRECTION = {
    "L": ((7, 1), (10, 1), (15, 1), (20, 1), (26, 1), (18, 2), (20, 2), (24, 2), (30, 2), (18, 4), (20, 4), (24, 4), (26, 4), (30, 4), (22, 6), (24, 6)),
    "M": ((10, 1), (16, 1), (26, 1), (18, 2), (24, 2), (16, 4), (18, 4), (22, 4), (22, 5), (26, 5), (30, 5), (22, 8), (22, 9), (24, 9), (24, 10), (28, 10)),
    "Q": ((13, 1), (22, 1), (18, 2), (26, 2), (18, 4), (24, 4), (18, 6), (22, 6), (20, 8), (24, 8), (28, 8), (26, 10), (24, 12), (20, 16), (30, 12), (24, 17)),
    "H": ((17, 1), (28, 1), (22, 2), (16, 4), (22, 4), (28, 4), (26, 5), (26, 6), (24, 8), (28, 8), (24, 11), (28, 11), (22, 16), (24, 16), (24, 18), (30, 16)),
}  # fmt: skip
"""Per level, for versions 1 to 16: codewords of correction in a block, and number of blocks (table 9)."""
MAX_FLIPPED, THIRDS = 128, 16
"""How many of the trusted bits, the least certain ones, are flipped in pairs, and how many as a third."""
MAX_EXCESS = 24.0
"""Bits by which flips in pairs may miss for a third to be tried: in photos a third gained nine at most, and hopeless blocks miss by
fifty."""
CHANCE_BITS = 24
"""Bits of correction left over once the errors found are described: of random blocks, one in 2^24 would be corrected."""
CERTAINTY, LEAST_WRONG = 10.0, 0.002
"""Log odds that a module is right, per unit of its soft decision; and the least chance that it is wrong, as of dirt. Of the soft
decisions on some twenty codes that were read in photos, those of 0.05 were wrong in 38 of a hundred cases, of 0.15 in 18, of 0.25 in 7,
of 0.35 in 3; codes that were not read are not among them."""
KNOWN_WRONG = 1e-9
"""Chance that a bit known beforehand is wrong: a correction that flips it takes 30 bits more."""
SURPRISING = 2.0
"""Multiple of the expected number of wrong known bits beyond which certain modules are doubted, too."""


@dataclass(frozen=True)
class Layout:
    """Layout of a version: positions of codeword ``bits`` (8 C, 2), and ``formats`` (2, 15, 2).

    Positions are rows and columns; the format is there twice.
    """

    bits: Indices
    formats: Indices

    @property
    def codewords(self) -> int:
        return len(self.bits) // 8


def format_word(number: int) -> int:
    """Return the 15 bits of format ``number``, two bits of level and three of mask (annex C)."""
    rest = number << 10
    for shift in range(4, -1, -1):
        if rest >> (10 + shift) & 1:
            rest ^= 0x537 << shift
    return (number << 10 | rest) ^ 0x5412


def version_modules(version: int) -> Bools:
    """Return the version information of version 7 or higher as modules (6, 3).

    They stand beside the top-right finder pattern.
    """
    rest = version << 12
    for shift in range(5, -1, -1):
        if rest >> (12 + shift) & 1:
            rest ^= 0x1F25 << shift
    word = version << 12 | rest  # annex D
    return np.array([word >> bit & 1 for bit in range(18)], bool).reshape(6, 3)


FORMATS = np.array(
    [[1 if format_word(number) >> bit & 1 else -1 for bit in range(14, -1, -1)] for number in range(32)], np.float32
)
"""All formats (32, 15), +1 dark, the first bit first."""


@cache
def layout(version: int) -> Layout:
    size = side_in_modules(version)
    used = fixed_modules(version)[1:-1, 1:-1] != 0
    upper = [(8, c) for c in (*range(6), 7, 8)] + [(r, 8) for r in (7, *range(5, -1, -1))]
    lower = [(r, 8) for r in range(size - 1, size - 8, -1)] + [(8, c) for c in range(size - 8, size)]
    used[:9, 8] = used[8, :9] = True
    used[size - 8 :, 8] = used[8, size - 8 :] = True
    if version >= 7:
        used[size - 11 : size - 8, :6] = used[:6, size - 11 : size - 8] = True
    rows = np.arange(size)
    places = []
    for turn, right in enumerate([*range(size - 1, 6, -2), *range(5, 0, -2)]):
        for row in rows if turn % 2 else rows[::-1]:
            places += [(row, column) for column in (right, right - 1) if not used[row, column]]
    bits = np.array(places[: len(places) // 8 * 8], np.intp)
    return Layout(bits, np.array([upper, lower], np.intp))


@cache
def masks(version: int) -> Bools:
    """Return which bits of the codewords each of the eight masks turns over, (8, 8 C)."""
    i, j = layout(version).bits.T
    product = i * j
    patterns = (
        (i + j) % 2, i % 2, j % 3, (i + j) % 3, (i // 2 + j // 3) % 2,
        product % 2 + product % 3, (product % 2 + product % 3) % 2, ((i + j) % 2 + product % 3) % 2,
    )  # fmt: skip
    return np.stack([pattern == 0 for pattern in patterns])


@cache
def blocks(version: int, level: str) -> tuple[int, tuple[Indices, ...]]:
    """Return correction codewords per block, and the positions of each block's codewords."""
    correction, count = CORRECTION[level][version - 1]
    total = layout(version).codewords
    short, longer = divmod(total, count)
    data = [short - correction + (block >= count - longer) for block in range(count)]
    placed: list[list[int]] = [[] for _ in range(count)]
    order = [block for one in range(max(data)) for block in range(count) if one < data[block]]
    for place, block in enumerate(order + list(range(count)) * correction):
        placed[block].append(place)
    return correction, tuple(np.array(one, np.intp) for one in placed)


@dataclass(frozen=True)
class SoftSymbol:
    """Symbol of soft modules (n, n): about 1 where dark, -1 where light; transposed if mirrored."""

    soft: Floats
    version: int
    number: int
    """The likeliest format."""
    mirrored: bool

    @classmethod
    def of(cls, soft: Floats, version: int) -> SoftSymbol:
        """Build a soft symbol, with the format and mirroring that fit its two format copies best."""
        rows, columns = layout(version).formats.transpose(2, 0, 1)
        agree = FORMATS @ np.stack([one[rows, columns].clip(-1, 1).sum(0) for one in (soft, soft.T)], 1)
        number, mirrored = divmod(int(agree.argmax()), 2)
        return cls(np.ascontiguousarray(soft.T) if mirrored else soft, version, number, bool(mirrored))

    @property
    def dark(self) -> Bools:
        """Return the modules (n, n) as they seem, uncorrected."""
        return np.asarray((self.soft.T if self.mirrored else self.soft) > 0)

    @property
    def wrong(self) -> Floats:
        """Return the probability that each bit of each codeword is wrong, (C, 8)."""
        sure = CERTAINTY * np.abs(self.soft[*layout(self.version).bits.T])
        return np.asarray(np.maximum(1 / (1 + np.exp(sure)), LEAST_WRONG).reshape(-1, 8))

    def doubt(self) -> float:
        """Return the doubt about the worst block: expected errors over correction capacity.

        Errors are counted by their information.
        """
        wrong = self.wrong
        correction, members = blocks(self.version, LEVELS[self.number >> 3])
        bits = -(wrong * np.log2(wrong) + (1 - wrong) * np.log2(1 - wrong)).sum(1)
        return max(float(bits[block].sum()) for block in members) / (8 * correction)

    def corrected(self) -> tuple[Bools | None, float]:
        """Return the modules (n, n) of the likeliest symbol; None if it may be one by chance.

        Also returns by how many bits its worst block misses without bits known beforehand, 0 or less if it is corrected without them.
        """
        places, wrong = layout(self.version), self.wrong
        rows, columns = places.bits.T
        mask = masks(self.version)[self.number & 7]
        dark = self.soft[rows, columns] > 0
        words = np.packbits(dark ^ mask)
        fixed, excess = self._correct(words, wrong)
        if fixed is None:
            attempts = self._with_known_bits(words, wrong, dark)
            fixed = next((found for found in (self._correct(*one)[0] for one in attempts) if found is not None), None)
        if fixed is None:
            return None, excess
        symbol = self.soft > 0
        symbol[rows, columns] = np.unpackbits(fixed).astype(bool) ^ mask
        for row, column in places.formats.transpose(0, 2, 1):
            symbol[row, column] = FORMATS[self.number] > 0
        return (symbol.T if self.mirrored else symbol), excess

    def _correct(self, words: Words, wrong: Floats) -> tuple[Words | None, float]:
        """Correct all codewords (C,); None if any block fails.

        Also returns by how many bits the worst block misses.
        """
        correction, members = blocks(self.version, LEVELS[self.number >> 3])
        words, worst = words.copy(), -np.inf
        for block in sorted(members, key=lambda block: -float(wrong[block].sum())):  # if any fails, the first does
            fixed, excess = correct_block(words[block], wrong[block], correction)
            worst = max(worst, excess)
            if fixed is None:
                return None, worst
            words[block] = fixed
        return words, worst

    def _with_known_bits(self, words: Words, wrong: Floats, dark: Bools) -> Iterator[tuple[Words, Floats]]:
        """Yield codewords with their known data bits set, and how likely each bit is wrong.

        Nothing is yielded if no layout of the data is likely. First as the modules are seen. Then, if `SURPRISING` many of the known bits are
        wrong, all as often as these, where modules seem ``dark`` (8 C,) and where they seem light: modules that were retouched, or worn off,
        look certain.
        """
        correction, members = blocks(self.version, LEVELS[self.number >> 3])
        data = (8 * np.concatenate([block[:-correction] for block in members])[:, None] + np.arange(8)).reshape(-1)
        bits, chance = np.unpackbits(words), wrong.reshape(-1).copy()
        guess = guess_known_bits(np.where(bits[data] > 0, 1 - chance[data], chance[data]), self.version)
        if guess is None:
            return
        places, values = data[guess.values >= 0], guess.values[guess.values >= 0]
        false, seen_dark = bits[places] != values, dark[places]
        expected = float(chance[places].sum())
        bits[places], chance[places] = values, KNOWN_WRONG
        yield np.packbits(bits), chance.reshape(-1, 8)
        if false.sum() > SURPRISING * expected:
            rates = np.array([_rate(false[seen_dark == colour]) for colour in (False, True)], np.float32)
            chance = np.maximum(chance, rates[dark.astype(np.intp)])
            chance[places] = KNOWN_WRONG
            yield np.packbits(bits), chance.reshape(-1, 8)


def _rate(false: Bools) -> float:
    """Estimate the share of wrong ones (Krichevsky and Trofimov 1981), less than a half."""
    return min((float(false.sum()) + 0.5) / (len(false) + 1), 0.49)


def correct_block(
    words: npt.NDArray[np.uint8], wrong: Floats, correction: int
) -> tuple[npt.NDArray[np.uint8] | None, float]:
    """Correct a block of codewords (n,); None if the result may be right by chance.

    ``wrong`` (n, 8) is how likely each bit is wrong. Also returns by how many bits the result misses, 0 or less if it is corrected.
    """
    sure = np.log2(1 / wrong - 1).reshape(-1)
    spare = 8 * correction - CHANCE_BITS + float(np.log2(1 - wrong).sum())
    bits = np.unpackbits(words)
    order = np.argsort(sure)
    checks, sums, doubted, trusted = _eliminated(checks_of(len(words), correction)[:, order], bits[order])
    costs = sure[order]
    flipped, excess = _cheapest(checks, sums, costs[doubted], costs[trusted], spare)
    if flipped is None:
        return None, excess
    places = np.concatenate([order[doubted], order[trusted]])[flipped]
    bits[places] ^= 1
    return np.packbits(bits), excess


def _cheapest(checks: Bools, sums: Bools, doubted: Floats, trusted: Floats, spare: float) -> tuple[Bools | None, float]:
    """Return the cheapest bit flips that fulfil all ``checks``, within a cost of ``spare``.

    Also returns their cost beyond it. Doubted bits come before trusted ones. ``checks`` (R, T) say on which of the trusted bits each doubted
    one depends, ``sums`` (R,) which doubted ones violate their check before any flip.
    """
    near = np.argsort(trusted)[:MAX_FLIPPED]
    signs = np.ones((len(sums), len(near) + 1), np.float32)  # the last one flips nothing
    signs[:, :-1][checks[:, near]] = -1
    extra = np.append(trusted[near], 0).astype(np.float32)
    pairs = extra[:, None] + extra
    half = doubted.astype(np.float32) / 2
    state = np.where(sums, -half, half)
    least = np.inf
    for third in (len(near), *range(min(THIRDS, len(near)))):
        cost = pairs - signs.T @ ((state * signs[:, third])[:, None] * signs)
        place = int(cost.argmin())
        least = min(least, float(cost.flat[place] + extra[third] + half.sum() - spare))
        if least > MAX_EXCESS:
            break
        if least <= 0:
            flips = np.zeros(len(trusted), bool)
            for one in (third, *divmod(place, len(extra))):
                if one < len(near):
                    flips[near[one]] ^= True
            return np.concatenate([sums ^ (checks[:, flips].sum(1) % 2 > 0), flips]), least
    return None, least


def _eliminated(checks: npt.NDArray[np.uint8], bits: npt.NDArray[np.uint8]) -> tuple[Bools, Bools, Indices, Indices]:
    """Eliminate ``checks`` (R, B) by Gauss, in the order of the bits.

    Returns the checks on the other bits, the sums, and the numbers of solved and other bits.
    """
    rows, columns = checks.shape
    sums = (checks @ bits) & 1
    packed = np.packbits(np.concatenate([checks, sums[:, None]], 1), axis=1)
    packed = np.ascontiguousarray(np.pad(packed, ((0, 0), (0, -packed.shape[1] % 8)))).view(np.uint64)
    octets = packed.view(np.uint8)
    solved: list[int] = []
    row = 0
    for column in range(columns):
        has = octets[:, column >> 3] >> (7 - (column & 7)) & 1
        first = int(has[row:].argmax()) + row
        if not has[first]:
            continue
        has[first] = 0
        pivot = packed[first].copy()
        packed ^= has[:, None] * pivot
        if first != row:
            packed[first] = packed[row]
            packed[row] = pivot
        solved.append(column)
        row += 1
        if row == rows:
            break
    left = np.unpackbits(octets, axis=1)[:, : columns + 1].astype(bool)
    trusted = np.setdiff1d(np.arange(columns), solved)
    return left[:, trusted], left[:, columns], np.array(solved, np.intp), trusted


@cache
def checks_of(length: int, correction: int) -> npt.NDArray[np.uint8]:
    """Return the parity checks (8 E, 8 n) of a block of ``length`` codewords.

    E codewords of it are for correction.
    """
    value, powers = 1, []
    for _ in range(255):
        powers.append(value)
        value = value << 1 ^ (0x11D if value & 128 else 0)
    # Multiplying by a power of the generator, a linear map of eight bits: columns are what becomes of each, first bit first.
    table = np.array(powers, np.uint8)[(np.arange(255)[:, None] + np.arange(7, -1, -1)) % 255]
    maps = np.unpackbits(table[:, None], axis=1).reshape(255, 8, 8)
    exponents = np.outer(np.arange(correction), np.arange(length - 1, -1, -1)) % 255
    return np.ascontiguousarray(maps[exponents].transpose(0, 2, 1, 3).reshape(8 * correction, 8 * length))
