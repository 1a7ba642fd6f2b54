"""Find near-duplicate images by perceptual hashes, in near-linear time, cached between runs.

A hash says which of an image's lowest frequencies are above their median (Zauner 2010, "pHash"): scaling, recompression and a change of
brightness leave it nearly as it was. Two images are called similar if few bits of their hashes differ and their thumbnails
correlate; a hash alone finds all sheets of paper alike.

``lint.checks`` and ``data.splitting`` (near-duplicates stay in one split) call `fingerprint_all`, then `similar_pairs`. A change of what
`fingerprint` computes, or of the cached arrays, needs a new `_CACHE_FORMAT`.
"""

from __future__ import annotations

import hashlib
import os
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from arclight.fabric.extras import require
from arclight.vision.data.images import ImageError, decode_reduced
from arclight.vision.data.labels import save_arrays

cv2 = require("cv2", extra="vision")

MAX_DISTANCE = 7
"""Bits of 64 in which the hashes of similar images may differ; at most 7, since the search finds no pairs further apart."""
MIN_CORRELATION = 0.95
"""Smallest correlation of the thumbnails of similar images."""
MIN_CONTRAST = 2.0
"""Standard deviation of grey values below which an image counts as blank, and as similar to nothing."""
MAX_STRETCH = 1.15
"""Largest quotient of the aspect ratios of similar images."""
_SIDE, _THUMB, _LOW = 32, 16, 8
"""Sides in pixels of the image that is hashed, of its thumbnail, and of the block of low frequencies that gives 64 bits."""
_BANDS, _BAND_BITS = 4, 16
"""A hash is looked up by each of 4 bands of 16 bits: see `similar_pairs`."""
_BITS_SET = np.array([value.bit_count() for value in range(256)], np.uint8)
_CACHE_FORMAT = 1
_CHUNK = 1 << 20
"""Candidate pairs that are compared in one NumPy call."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Fingerprints:
    """Fingerprints of N images; those of an image that cannot be decoded are zero."""

    hashes: NDArray[np.uint64]
    """(N,)"""
    thumbs: NDArray[np.uint8]
    """(N, 16, 16) grey."""
    ratios: NDArray[np.float32]
    """(N,): width over height."""
    errors: dict[int, str]
    """Index of an image to why it cannot be decoded."""

    @classmethod
    def empty(cls, count: int) -> Fingerprints:
        return cls(
            np.zeros(count, np.uint64), np.zeros((count, _THUMB, _THUMB), np.uint8), np.zeros(count, np.float32), {}
        )

    def join(self, other: Fingerprints) -> Fingerprints:
        """Return the fingerprints of both, in order."""
        return Fingerprints(
            np.concatenate((self.hashes, other.hashes)),
            np.concatenate((self.thumbs, other.thumbs)),
            np.concatenate((self.ratios, other.ratios)),
            self.errors | {index + len(self.hashes): why for index, why in other.errors.items()},
        )


def fingerprint(path: Path) -> tuple[int, NDArray[np.uint8], float]:
    """Return hash, thumbnail (16, 16) and width over height of an image.

    Raises ImageError and OSError.
    """
    image, (height, width) = decode_reduced(path, 2 * _SIDE)
    grey = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)
    small = cv2.resize(grey, (_SIDE, _SIDE), interpolation=cv2.INTER_AREA)
    thumb = cv2.resize(small, (_THUMB, _THUMB), interpolation=cv2.INTER_AREA)
    low = cv2.dct(small.astype(np.float32))[:_LOW, :_LOW].ravel()
    bits = low > np.median(low[1:])
    bits[0] = False  # mean brightness, which tells no images apart
    return int.from_bytes(np.packbits(bits).tobytes(), "big"), thumb, width / height


def fingerprint_all(
    images: Sequence[Path], cache: Path | None = None, *, only_cached: bool = False, progress: Progress | None = None
) -> Fingerprints:
    """Compute the fingerprints of ``images``; this decodes every image that is not in the cache.

    cache: a file that keeps fingerprints as long as an image's path, size and modification time are the same.
    only_cached: compute none, and return zeros for images that are not in the cache.
    """
    found, keys = Fingerprints.empty(len(images)), [_key(path) for path in images]
    known = _read_cache(cache) if cache is not None else {}
    missing = []
    for index, key in enumerate(keys):
        if key in known:
            found.hashes[index], found.thumbs[index], found.ratios[index], error = known[key]
            if error:
                found.errors[index] = error
        else:
            missing.append(index)
    if only_cached or not missing:
        return found
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:  # decoding releases the interpreter's lock
        results = pool.map(_fingerprint_or_error, (images[index] for index in missing))
        for done, (index, result) in enumerate(zip(missing, results), 1):
            if isinstance(result, str):
                found.errors[index] = result
            else:
                found.hashes[index], found.thumbs[index], found.ratios[index] = result
            if progress is not None and (done % 16 == 0 or done == len(missing)):
                progress(done, len(missing))
    if cache is not None:
        _write_cache(cache, keys, found)
    return found


def _fingerprint_or_error(path: Path) -> tuple[int, NDArray[np.uint8], float] | str:
    try:
        return fingerprint(path)
    except ImageError as error:
        return str(error)
    except OSError as error:
        return error.strerror or str(error)


# ---------------------------------------------------------------- pairs


def similar_pairs(found: Fingerprints) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find the pairs (P, 2) that link all similar images, and their distances (P,) in bits.

    The smaller index of a pair comes first. Images of equal hashes are paired with the first of them only, and that one
    with those of near hashes. Hashes within 7 bits of each other agree in one of four bands of 16 bits but for at most
    one bit. So each band is looked up as it is and with each of its bits flipped, in a sorted list: 68 searches an
    image, instead of one per other image.
    """
    usable = np.flatnonzero(_contrast(found.thumbs) >= MIN_CONTRAST)
    hashes, first = np.unique(found.hashes[usable], return_inverse=True)
    kept, bits = [], []
    for left, right in _equal_pairs(first.ravel()):
        kept.append(_verified(found, usable[left], usable[right]))
        bits.append(np.zeros(len(kept[-1]), np.int64))
    members = np.argsort(first, kind="stable")
    starts = np.searchsorted(first[members], np.arange(len(hashes) + 1))
    representatives = usable[members[starts[:-1]]]
    left, right, distance = _near_hashes(hashes)
    verified = _verified(found, representatives[left], representatives[right], distance)
    pairs = np.concatenate([np.zeros((0, 2), np.int64), *kept, verified[:, :2]])
    distances = np.concatenate([np.zeros(0, np.int64), *bits, verified[:, 2]])
    order = np.lexsort((pairs[:, 1], pairs[:, 0]))
    return pairs[order], distances[order]


def _equal_pairs(group: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield pairs of each group's first member with every other: n members make n - 1 pairs."""
    order = np.argsort(group, kind="stable")
    sorted_groups = group[order]
    starts = np.searchsorted(sorted_groups, sorted_groups)
    later = np.flatnonzero(starts != np.arange(len(order)))
    yield order[starts[later]], order[later]


def _near_hashes(hashes: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Find pairs of distinct ``hashes`` within MAX_DISTANCE bits.

    Returns the two indices of each pair, the smaller first, and the distances.
    """
    pairs: list[NDArray[np.int64]] = []
    for band in range(_BANDS):
        keys = (hashes >> np.uint64(band * _BAND_BITS)) & np.uint64(2**_BAND_BITS - 1)
        order = np.argsort(keys, kind="stable")
        ordered = keys[order]
        for flip in (0, *(1 << bit for bit in range(_BAND_BITS))):
            wanted = keys ^ np.uint64(flip)
            low, high = np.searchsorted(ordered, wanted, "left"), np.searchsorted(ordered, wanted, "right")
            pairs += _within(hashes, order, low, high)
    if not pairs:
        return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64)
    found = np.unique(np.concatenate(pairs), axis=0)
    return found[:, 0], found[:, 1], found[:, 2]


def _within(
    hashes: NDArray[np.uint64], order: NDArray[np.int64], low: NDArray[np.int64], high: NDArray[np.int64]
) -> list[NDArray[np.int64]]:
    """Compare hash i with those at ``order[low[i]:high[i]]``, about a million pairs at a time."""
    ends = np.cumsum(high - low)
    kept, start = [], 0
    while start < len(hashes):
        done = int(ends[start - 1]) if start else 0
        stop = max(int(np.searchsorted(ends, done + _CHUNK, "right")), start + 1)
        counts = (high - low)[start:stop]
        left = np.repeat(np.arange(start, stop), counts)
        places = (
            np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(low[start:stop], counts)
        )
        right = order[places]
        left, right = left[left < right], right[left < right]
        differing = (hashes[left] ^ hashes[right]).view(np.uint8).reshape(-1, 8)
        distance = _BITS_SET[differing].sum(1, dtype=np.int64)
        near = distance <= MAX_DISTANCE
        if near.any():
            kept.append(np.stack((left[near], right[near], distance[near]), 1))
        start = stop
    return kept


def _verified(
    found: Fingerprints, left: NDArray[np.int64], right: NDArray[np.int64], *more: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Keep the pairs whose thumbnails correlate and whose aspect ratios agree.

    Returns (P, 2 + more), the smaller index first.
    """
    rows = np.stack((np.minimum(left, right), np.maximum(left, right), *more), 1).astype(np.int64)
    keep = np.zeros(len(rows), bool)
    for start in range(0, len(rows), 4096):
        part = rows[start : start + 4096]
        a, b = _normalised(found.thumbs[part[:, 0]]), _normalised(found.thumbs[part[:, 1]])
        ratio = found.ratios[part[:, 0]] / found.ratios[part[:, 1]]
        same_shape = np.maximum(ratio, 1 / ratio) <= MAX_STRETCH
        keep[start : start + 4096] = ((a * b).sum(1) >= MIN_CORRELATION) & same_shape
    return rows[keep]


def _normalised(thumbs: NDArray[np.uint8]) -> NDArray[np.float32]:
    flat = thumbs.reshape(len(thumbs), _THUMB * _THUMB).astype(np.float32)
    flat -= flat.mean(1, keepdims=True)
    normalised: NDArray[np.float32] = flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-6)
    return normalised


def _contrast(thumbs: NDArray[np.uint8]) -> NDArray[np.float32]:
    contrast: NDArray[np.float32] = thumbs.reshape(len(thumbs), _THUMB * _THUMB).astype(np.float32).std(1)
    return contrast


def linked_groups(count: int, pairs: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Group indices below ``count`` that pairs link, directly or through others.

    Groups are lists of two or more, ascending.
    """
    parent = list(range(count))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    for first, second in pairs:
        low, high = sorted((root(first), root(second)))
        parent[high] = low
    groups: dict[int, list[int]] = {}
    for index in range(count):
        groups.setdefault(root(index), []).append(index)
    return [group for group in groups.values() if len(group) > 1]


def equal_files(paths: Sequence[Path]) -> list[list[int]]:
    """Group files of the same bytes: lists of two or more indices, the first one lowest.

    Only files of equal size are read, and of those only the ends unless these agree.
    """
    groups: list[list[int]] = [list(range(len(paths)))]
    for key in (_size, _ends_digest, _digest):
        split: list[list[int]] = []
        for group in groups:
            by_key: dict[object, list[int]] = {}
            for index in group:
                if (value := key(paths[index])) is not None:
                    by_key.setdefault(value, []).append(index)
            split += [members for members in by_key.values() if len(members) > 1]
        groups = split
    return sorted(groups)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size or None
    except OSError:
        return None  # reported as unreadable, not as a duplicate


def _ends_digest(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            start = file.read(4096)
            file.seek(-min(4096, path.stat().st_size), os.SEEK_END)
            return hashlib.blake2b(start + file.read()).digest()
    except OSError:
        return None


def _digest(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "blake2b").digest()
    except OSError:
        return None


# ---------------------------------------------------------------- cache


def _key(path: Path) -> str:
    try:
        found = os.stat(path)
    except OSError:
        return f"absent {path}"
    return f"{found.st_size} {found.st_mtime_ns} {path}"


_Entry = tuple[int, NDArray[np.uint8], float, str]


def _read_cache(file: Path) -> dict[str, _Entry]:
    """Load fingerprints by key; nothing if there is no cache or it cannot be read."""
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
            if int(stored["format"]) != _CACHE_FORMAT:
                return {}
            columns = (stored[name] for name in ("keys", "hashes", "thumbs", "ratios", "errors"))
            rows = zip(*columns, strict=True)
            return {str(key): (int(bits), thumb, float(ratio), str(error)) for key, bits, thumb, ratio, error in rows}
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return {}


def _write_cache(file: Path, keys: list[str], found: Fingerprints) -> None:
    try:
        save_arrays(
            file,
            format=np.array(_CACHE_FORMAT),
            keys=np.array(keys, dtype=np.str_),
            hashes=found.hashes,
            thumbs=found.thumbs,
            ratios=found.ratios,
            errors=np.array([found.errors.get(index, "") for index in range(len(keys))], dtype=np.str_),
        )
    except OSError as error:
        warnings.warn(
            f"hashes of images are not cached: {file}: {error.strerror or error}; they are computed each time",
            stacklevel=3,
        )
    except UnicodeEncodeError:  # a name that is no text
        warnings.warn(f"hashes of images are not cached: a name is not text; {file} is not written", stacklevel=3)
