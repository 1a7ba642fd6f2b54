"""Represent tensors that are still in their files, so that each rank reads only its shards.

Any torch operation on a StoredTensor reads the whole tensor first; in-place operations raise CheckpointError; ``read(offset, shape)``
reads that box alone. ``sharded.reader`` and ``federated.blobs.manifest_io`` make them, ``federated.aggregation`` reads them by parts.
`tree` finds the methods ``read`` and ``joined`` by name: they stay.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from arclight.checkpoint.errors import CheckpointError
from arclight.checkpoint.tensorfile import as_bytes, from_bytes, memory_of

_READ_BYTES = 4 << 20
"""Bytes of a read that covers several short runs of elements."""

_LONG_RUN_BYTES = 1 << 16
"""Bytes from which a run of elements gets a read of its own."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape."""


class Source(Protocol):
    """A file that can be read from any place."""

    name: str

    def read_at(self, position: int, target: memoryview) -> None:
        """Fill `target` from byte `position` on; raises EOFError if the file ends before."""


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, dense at one place of a file."""

    source: Source
    begin: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class StoredTensor(torch.Tensor):
    """A tensor whose values are in a file; shape, dtype and device (the CPU) are known.

    `read` returns it, or a box of it, as a plain tensor. Any other operation reads all of it first; in-place operations raise
    CheckpointError.
    """

    _pieces: tuple[Piece, ...]

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, pieces: Sequence[Piece]) -> StoredTensor:
        made: StoredTensor = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=dtype, device=torch.device("cpu")
        )
        made._pieces = tuple(pieces)
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        from torch.utils._pytree import tree_map

        for argument, given in zip(func._schema.arguments, args, strict=False):
            if argument.is_write and isinstance(given, StoredTensor):
                raise CheckpointError(
                    f"{func} would change a tensor that is in a checkpoint file: take a copy of it first, tensor.read()"
                )

        def whole(value: Any) -> Any:
            return value.read() if isinstance(value, StoredTensor) else value

        return func(*tree_map(whole, args), **tree_map(whole, kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StoredTensor(shape={tuple(self.shape)}, dtype={self.dtype}, in {sorted({p.source.name for p in self._pieces})})"

    def __deepcopy__(self, memo: Any) -> StoredTensor:
        return self

    def joined(self, parts: Sequence[tuple[StoredTensor, Sequence[int]]], shape: Sequence[int]) -> StoredTensor:
        """Return the tensor of which `parts` are boxes, each at its offset."""
        pieces = [
            Piece(
                piece.source, piece.begin, tuple(a + b for a, b in zip(piece.offset, offset, strict=True)), piece.shape
            )
            for part, offset in parts
            for piece in part._pieces
        ]
        return StoredTensor(shape, self.dtype, pieces)

    def flat(self) -> StoredTensor | None:
        """Return the same values as one row; None if they are not contiguous in one file."""
        if len(self._pieces) != 1 or self._pieces[0].shape != tuple(self.shape):
            return None
        piece = self._pieces[0]
        row = (self.numel(),)
        return StoredTensor(row, self.dtype, [Piece(piece.source, piece.begin, (0,), row)])

    def read_elements(self, start: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes of a `flat` tensor from element ``start`` on.

        Raises as `read`.
        """
        _read_at(self._pieces[0], start * self.dtype.itemsize, into)

    def row(self, number: int) -> torch.Tensor:
        """Return entry ``number`` of the first dimension, lazy if it is contiguous in one file."""
        rest = tuple(self.shape[1:])
        if not 0 <= number < self.shape[0]:
            raise IndexError(f"there is no entry {number} among {self.shape[0]}")
        if len(self._pieces) != 1 or self._pieces[0].shape != tuple(self.shape):
            return self.read((number, *(0 for _ in rest)), (1, *rest))[0]
        piece = self._pieces[0]
        begin = piece.begin + number * math.prod(rest) * self.dtype.itemsize
        return StoredTensor(rest, self.dtype, [Piece(piece.source, begin, (0,) * len(rest), rest)])

    def read(
        self,
        offset: Sequence[int] | None = None,
        shape: Sequence[int] | None = None,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Read the box of `shape` at `offset` (default: everything) as a plain tensor.

        Runs of at least 64 KiB are read by themselves, shorter ones with what lies between them. into: a tensor of that shape and dtype
        on the CPU, which is filled. Raises CheckpointError if the file cannot be read.
        """
        offset = tuple(offset) if offset is not None else (0,) * self.ndim
        shape = tuple(shape) if shape is not None else tuple(self.shape)
        target = torch.empty(shape, dtype=self.dtype) if into is None else into.detach()
        for piece in self._pieces:
            low = tuple(map(max, offset, piece.offset))
            high = tuple(min(a + n, b + m) for a, n, b, m in zip(offset, shape, piece.offset, piece.shape, strict=True))
            if all(a < b for a, b in zip(low, high, strict=True)):
                size = tuple(b - a for a, b in zip(low, high, strict=True))
                inside = tuple(a - b for a, b in zip(low, piece.offset, strict=True))
                place = tuple(slice(a - b, a - b + n) for a, b, n in zip(low, offset, size, strict=True))
                _read_box(piece, self.dtype, (inside, size), target[place])
        return target


def _read_box(piece: Piece, dtype: torch.dtype, box: Box, target: torch.Tensor) -> None:
    """Fill `target` with a box of a piece, by rows or through a buffer of whole rows."""
    offset, size = box
    whole = piece.shape
    inner = len(whole)  # dimensions from here on are taken whole: their elements lie together
    while inner and size[inner - 1] == whole[inner - 1]:
        inner -= 1
    if inner == 0:
        _fill(piece, dtype, 0, target)
        return
    row = math.prod(whole[inner:])  # elements that one index of dimension inner - 1 stands for
    outer = inner - 1
    if outer == 0 or size[outer] * row * dtype.itemsize >= _LONG_RUN_BYTES:
        for index in itertools.product(*map(range, size[:outer])):
            start = sum((offset[i] + index[i]) * math.prod(whole[i + 1 :]) for i in range(outer)) + offset[outer] * row
            _fill(piece, dtype, start, target[index])
        return
    across = math.prod(whole[1:])
    step = max(1, _READ_BYTES // max(1, across * dtype.itemsize))
    cut = tuple(slice(start, start + count) for start, count in zip(offset[1:], size[1:], strict=True))
    buffer = torch.empty((min(step, size[0]), *whole[1:]), dtype=dtype)
    for first in range(0, size[0], step):
        rows = buffer[: min(step, size[0] - first)]
        _fill(piece, dtype, (offset[0] + first) * across, rows)
        target[first : first + len(rows)].copy_(rows[(slice(None), *cut)])


def _fill(piece: Piece, dtype: torch.dtype, start: int, target: torch.Tensor) -> None:
    """Read elements of a piece from number `start` on into `target`."""
    if not target.is_contiguous():
        target.copy_(_read_dense(piece, dtype, start, target.shape))
    elif target.numel():
        _read_at(piece, start * dtype.itemsize, memory_of(as_bytes(target)))


def _read_dense(piece: Piece, dtype: torch.dtype, start: int, shape: Sequence[int]) -> torch.Tensor:
    raw = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
    if raw.numel():
        _read_at(piece, start * dtype.itemsize, memory_of(raw))
    return from_bytes(raw, dtype, list(shape))


def _read_at(piece: Piece, start: int, target: memoryview) -> None:
    try:
        piece.source.read_at(piece.begin + start, target)
    except (OSError, EOFError) as error:
        raise CheckpointError(f"{piece.source.name} cannot be read any more: {error}") from error
