"""Process tensors in chunks that fit a core's cache, bit-identically for any thread count.

`fold`, `fixed_point`, `strategy_step` and ``federated.privacy`` compute by it. Tensors come in whole or as `StoredTensor` on disk. Norms and
inner products are sums over chunks in float64: `CHUNK` decides their bits, and with them those of norm bounds and Krum. Means do not depend
on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from arclight.checkpoint.stored_tensor import StoredTensor

CHUNK = 1 << 15
"""Elements of a chunk: torch uses one thread for so few, so that only our threads run."""

_NUMPY = {torch.float64: np.float64, torch.float32: np.float32, torch.float16: np.float16}
"""Types that NumPy widens: its calls start faster than torch's."""

Array = np.ndarray[Any, Any]
T = TypeVar("T")


@dataclass(eq=False)
class Scratch:
    """Buffers of one thread, a chunk each, valid until the next function that writes to them.

    ``wide``, ``other``, ``spare``: float64, for a chunk widened and what is computed from it. ``whole``, ``sums``: int64, terms and their sums.
    ``raw`` (``array`` and ``bytes`` are the same memory): bytes as they are read from a file. ``mean``: bytes of a mean in its own type.
    """

    wide: Array = field(default_factory=lambda: np.empty(CHUNK))
    other: Array = field(default_factory=lambda: np.empty(CHUNK))
    spare: Array = field(default_factory=lambda: np.empty(CHUNK))
    whole: Array = field(default_factory=lambda: np.empty(CHUNK, dtype=np.int64))
    sums: Array = field(default_factory=lambda: np.empty(CHUNK, dtype=np.int64))
    raw: torch.Tensor = field(default_factory=lambda: torch.empty(8 * CHUNK, dtype=torch.uint8))
    mean: Array = field(default_factory=lambda: np.empty(8 * CHUNK, dtype=np.uint8))
    _float64_buffers: list[Array] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.array = self.raw.numpy()
        """The same memory as ``raw``."""
        self.bytes = memoryview(self.array)  # type: ignore[arg-type]

    def float64_buffer(self, number: int) -> Array:
        """Return float64 buffer ``number``, allocated when it is first asked for."""
        while len(self._float64_buffers) <= number:
            self._float64_buffers.append(np.empty(CHUNK))
        return self._float64_buffers[number]


class ChunkWorkers:
    """Threads that share the chunks of a tensor; made by `chunk_workers`."""

    def __init__(self, count: int, pool: ThreadPoolExecutor | None) -> None:
        self._pool = pool
        self._scratch = [Scratch() for _ in range(count)]

    def map_chunks(self, elements: int, work: Callable[[int, int, Scratch], T]) -> list[T]:
        """Call ``work(start, stop, scratch)`` for every chunk; return results in chunk order.

        ``elements``: of the tensor, in all.
        """
        chunks = math.ceil(elements / CHUNK)
        results: list[Any] = [None] * chunks
        count = min(len(self._scratch), chunks)

        def lane(number: int) -> None:
            with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is found and refused by the work
                for chunk in range(number, chunks, count):
                    start = chunk * CHUNK
                    results[chunk] = work(start, min(start + CHUNK, elements), self._scratch[number])

        if count <= 1 or self._pool is None:
            for number in range(count):
                lane(number)
        else:
            for future in [self._pool.submit(lane, number) for number in range(count)]:
                future.result()
        return results


@contextmanager
def chunk_workers(threads: int | None = None) -> Iterator[ChunkWorkers]:
    """Open ``threads`` workers for chunks, one by default.

    Two mostly wait for each other, as numpy's calls on a chunk are short.
    """
    count = 1 if threads is None else threads
    if count < 1:
        raise ValueError(f"at least one thread is needed, got {count}")
    if count == 1:
        yield ChunkWorkers(1, None)
        return
    with ThreadPoolExecutor(count, thread_name_prefix="arclight-fold") as pool:
        yield ChunkWorkers(count, pool)


class ChunkedTensor:
    """Flat view of a dense tensor, read chunk by chunk if it is a `StoredTensor`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self.shape, self.elements = tensor.dtype, tuple(tensor.shape), tensor.numel()
        self._stored = tensor.flat() if isinstance(tensor, StoredTensor) else None
        if self._stored is None:
            whole = tensor.read() if isinstance(tensor, StoredTensor) else tensor
            self._flat = whole.detach().to("cpu").contiguous().reshape(-1)
        self._numpy = _NUMPY.get(tensor.dtype)

    @property
    def held(self) -> bool:
        """Return True if the tensor is in memory as a whole."""
        return self._stored is None

    def part(self, start: int, stop: int, scratch: Scratch | None = None) -> torch.Tensor:
        """Return elements ``start`` to ``stop``, read-only.

        They are valid until the scratch, if given, is used again.
        """
        if self._stored is None:
            return self._flat[start:stop]
        if scratch is None:
            return self._stored.read([start], [stop - start])
        return scratch.raw[: self._read(start, stop, scratch)].view(self.dtype)

    def wide(self, start: int, stop: int, into: Array, scratch: Scratch) -> Array:
        """Return elements as float64, in ``into``."""
        part = into[: stop - start]
        if self._numpy is None:
            torch.from_numpy(part).copy_(self.part(start, stop, scratch))
        elif self._stored is None:
            np.copyto(part, self._flat[start:stop].numpy())
        else:
            np.copyto(part, scratch.array[: self._read(start, stop, scratch)].view(self._numpy))
        return part

    def _read(self, start: int, stop: int, scratch: Scratch) -> int:
        """Read elements from the file into the scratch; return their bytes."""
        assert self._stored is not None
        size = (stop - start) * self.dtype.itemsize
        self._stored.read_elements(start, scratch.bytes[:size])
        return size


def squares(values: Array, scratch: Scratch) -> float:
    """Return the sum of squares; its bits depend on the values alone."""
    spare = scratch.spare[: len(values)]
    return float(np.add.reduce(np.multiply(values, values, out=spare)))


def product(first: Array, second: Array, scratch: Scratch) -> float:
    """Return the inner product; its bits depend on the values alone."""
    spare = scratch.spare[: len(first)]
    return float(np.add.reduce(np.multiply(first, second, out=spare)))


def total(parts: Sequence[float]) -> float:
    """Return the sum, rounded once: the same for any order."""
    return math.fsum(parts)
