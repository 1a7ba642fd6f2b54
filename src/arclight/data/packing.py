"""Lay out tokens as samples: windows of the stream, or packed whole documents.

A sample has ``length`` predictions. It is made of pieces: ``(start, predictions)`` stands for the tokens ``start`` up to
``start + predictions + 1`` of the stream, each of which but the first is predicted from those before it.

The text data module lays out its splits by `Windows` or `Packed`, and `TokenSamples` reads the pieces; ``arclight data`` packs ahead.
`Packed` keeps its result in the shards' folder, as ``packed-<length>``. If the shards have changed since, opening it raises
TokenShardError; `Packed.build` (``arclight data pack``) replaces it. The folder has no version: if you change the algorithm, change the
folder name, so that old results are not read.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from arclight.data.permutation import Ints
from arclight.data.ray_tasks import Engine, on_ray
from arclight.data.token_shards import TokenShardError, TokenShards

_GROUP = 2**20  # documents that are packed together: bounds memory, costs a handful of bins


class Layout(Protocol):
    """Layout of samples: the pieces of the stream that each has."""

    shards: TokenShards
    length: int
    inside_documents: bool
    """Whether no piece ever crosses from one document into the next."""

    def __len__(self) -> int: ...

    def pieces(self, sample: int) -> list[tuple[int, int]]: ...


class Windows:
    """Windows of ``length`` tokens of the stream; every token but the first is predicted once."""

    inside_documents = False

    def __init__(self, shards: TokenShards, length: int) -> None:
        self.shards, self.length = shards, length

    def __len__(self) -> int:
        return math.ceil(max(0, self.shards.tokens - 1) / self.length)

    def pieces(self, sample: int) -> list[tuple[int, int]]:
        start = sample * self.length
        return [(start, min(self.length, self.shards.tokens - 1 - start))]


class Packed:
    """Samples of whole documents packed side by side; the rest is padding.

    Documents longer than a sample are cut. `build` packs and writes the result beside the shards; `open` opens that result, or builds it
    first. Raises FileNotFoundError if the shards are not packed for this ``length``, TokenShardError if other shards were.
    """

    inside_documents = True

    def __init__(self, shards: TokenShards, length: int) -> None:
        self.shards, self.length = shards, length
        self.folder = folder = _folder(shards, length)
        if not (folder / "about.json").is_file():
            raise FileNotFoundError(
                f"{shards.place} is not packed for samples of {length} tokens: arclight data pack {shards.place} --length {length}"
            )
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        if about["corpus"] != shards.digest:
            raise TokenShardError(f"{folder} was made of other shards: delete it and pack again (arclight data pack)")
        self._starts, self._sizes, self._firsts = (
            np.load(folder / f"{name}.npy", mmap_mode="r").view(np.ndarray) for name in ("starts", "sizes", "firsts")
        )

    @classmethod
    def open(cls, shards: TokenShards, length: int) -> Packed:
        """Open the result for this ``length``; pack first if there is none."""
        try:
            return cls(shards, length)
        except FileNotFoundError:
            return cls.build(shards, length)

    @classmethod
    def build(cls, shards: TokenShards, length: int, engine: Engine = "local") -> Packed:
        """Pack the documents (best fit, longest first), write the result, and open it.

        It is written beside the shards. Raises TokenShardError if no document has two tokens.

        engine: "ray" packs groups of a million documents on a Ray cluster (`arclight.data.ray_tasks.on_ray`).
        """
        groups = ((_meets(shards, first), length) for first in range(0, shards.documents, _GROUP))
        found = list(on_ray(_pack, groups)) if engine == "ray" else [_pack(*group) for group in groups]
        empty = np.empty(0, np.int64)
        arrays = {
            "starts": np.concatenate([empty, *(starts for starts, _, _ in found)]),
            "sizes": np.concatenate([empty, *(sizes for _, sizes, _ in found)]).astype(np.int32),
            "firsts": np.cumsum(np.concatenate([[0], *(counts for _, _, counts in found)]), dtype=np.int64),
        }
        if not arrays["starts"].size:
            raise TokenShardError(f"{shards.place} has nothing to pack: no document has two tokens or more")
        folder = _folder(shards, length)
        temporary = folder.with_name(f".{folder.name}.{os.getpid()}.saving")
        try:
            temporary.mkdir(parents=True)
            for name, array in arrays.items():
                np.save(temporary / f"{name}.npy", array)
            (temporary / "about.json").write_text(json.dumps({"corpus": shards.digest, "length": length}) + "\n")
            _put(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return cls(shards, length)

    def __reduce__(self) -> Any:
        return Packed, (self.shards, self.length)  # another process maps the files itself

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def pieces(self, sample: int) -> list[tuple[int, int]]:
        first, last = self._firsts[sample : sample + 2].tolist()
        return list(zip(self._starts[first:last].tolist(), self._sizes[first:last].tolist(), strict=True))

    @property
    def padding(self) -> float:
        """The share of all positions that no document fills."""
        return 1.0 - int(self._sizes.sum(dtype=np.int64)) / max(1, len(self) * self.length)


def _put(made: Path, folder: Path) -> None:
    """Rename ``made`` to ``folder``, unless another process has made the same meanwhile."""
    while True:
        try:
            os.rename(made, folder)
        except OSError:
            if not folder.is_dir():
                raise
            with contextlib.suppress(FileNotFoundError):
                if (folder / "about.json").read_text(encoding="utf-8") == (made / "about.json").read_text(
                    encoding="utf-8"
                ):
                    return
            shutil.rmtree(folder)
        else:
            return


def _folder(shards: TokenShards, length: int) -> Path:
    return shards.folder / f"packed-{length}"


def _meets(shards: TokenShards, first: int) -> Ints:
    """Return the start of each document of a group, and the end of the last."""
    ends = shards.ends(max(0, first - 1), min(first + _GROUP, shards.documents))
    return ends if first else np.concatenate([np.zeros(1, np.int64), ends])


def _pack(meets: Ints, length: int) -> tuple[Ints, Ints, Ints]:
    """Return start and size of each piece, and the number of pieces of each sample."""
    begins, predictions = meets[:-1], np.maximum(np.diff(meets) - 1, 0)
    whole, rest = np.divmod(predictions, length)
    # Full samples of long documents first: piece number k of a document starts k * length tokens into it.
    number = np.arange(int(whole.sum())) - np.repeat(np.cumsum(whole) - whole, whole)
    full = np.repeat(begins, whole) + number * length
    ragged = np.flatnonzero(rest)
    bins = _best_fit(rest[ragged], length)
    order = np.array([item for items in bins for item in items], np.int64)
    chosen = ragged[order] if order.size else ragged
    starts = np.concatenate([full, begins[chosen] + whole[chosen] * length])
    sizes = np.concatenate([np.full(full.size, length), rest[chosen]])
    counts = np.concatenate([np.ones(full.size, np.int64), np.array([len(items) for items in bins], np.int64)])
    return starts, sizes, counts


def _best_fit(sizes: npt.NDArray[Any], capacity: int) -> list[list[int]]:
    """Assign items to bins, longest first, each to the fullest bin that has room."""
    bins: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    free = 0  # bit r is set where a bin has room for exactly r more
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        fitting = free >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            chosen = with_room[room].pop()
            if not with_room[room]:
                free ^= 1 << room
        else:
            room, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(item)
        if left := room - size:
            with_room[left].append(chosen)
            free |= 1 << left
    return bins
