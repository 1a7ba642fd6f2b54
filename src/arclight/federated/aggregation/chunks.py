"""Tensors worked through in chunks that fit a core's cache, by several threads, with the same bits for any number of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from arclight.checkpoint.stored import StoredTensor

CHUNK = 1 << 15
"""Elements; torch works on no more than these with one thread, so that ours are the only ones."""

Array = np.ndarray[Any, Any]
T = TypeVar("T")


@dataclass(eq=False)
class Scratch:
    """One thread's own memory: float64 and int64 of a chunk each, and what is read from files."""

    wide: Array = field(default_factory=lambda: np.empty(CHUNK))
    other: Array = field(default_factory=lambda: np.empty(CHUNK))
    spare: Array = field(default_factory=lambda: np.empty(CHUNK))
    whole: Array = field(default_factory=lambda: np.empty(CHUNK, dtype=np.int64))
    raw: torch.Tensor = field(default_factory=lambda: torch.empty(8 * CHUNK, dtype=torch.uint8))

    def __post_init__(self) -> None:
        self.bytes = memoryview(self.raw.numpy())  # type: ignore[arg-type]
        """Of ``raw``."""


class Lanes:
    """Threads that share a tensor's chunks; made by `lanes`."""

    def __init__(self, count: int, pool: ThreadPoolExecutor | None) -> None:
        self._pool = pool
        self._scratch = [Scratch() for _ in range(count)]

    def over(self, elements: int, work: Callable[[int, int, Scratch], T]) -> list[T]:
        """``work(start, stop, scratch)`` for every chunk of ``elements``, each exactly once; results in the chunks' order."""
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
def lanes(threads: int | None = None) -> Iterator[Lanes]:
    """``threads`` lanes, as many as torch uses by default."""
    count = torch.get_num_threads() if threads is None else threads
    if count < 1:
        raise ValueError(f"at least one thread is needed, got {count}")
    if count == 1:
        yield Lanes(1, None)
        return
    with ThreadPoolExecutor(count, thread_name_prefix="arclight-fold") as pool:
        yield Lanes(count, pool)


class Chunked:
    """A dense tensor as a row of elements. One that still lies in its file (`StoredTensor`) is read chunk by chunk."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self.shape, self.elements = tensor.dtype, tuple(tensor.shape), tensor.numel()
        self._stored = tensor.flat() if isinstance(tensor, StoredTensor) else None
        if self._stored is None:
            whole = tensor.read() if isinstance(tensor, StoredTensor) else tensor
            self._flat = whole.detach().to("cpu").contiguous().reshape(-1)

    def part(self, start: int, stop: int, scratch: Scratch | None = None) -> torch.Tensor:
        """Elements as they are; not to be changed, and valid until the scratch, if one is given, is used for another part."""
        if self._stored is None:
            return self._flat[start:stop]
        if scratch is None:
            return self._stored.read([start], [stop - start])
        size = (stop - start) * self.dtype.itemsize
        self._stored.read_elements(start, scratch.bytes[:size])
        return scratch.raw[:size].view(self.dtype)

    def wide(self, start: int, stop: int, into: Array, scratch: Scratch) -> Array:
        """Elements as float64, in ``into``."""
        part = into[: stop - start]
        torch.from_numpy(part).copy_(self.part(start, stop, scratch))
        return part


def squares(values: Array, scratch: Scratch) -> float:
    """Sum of squares; its bits depend on the values alone."""
    spare = scratch.spare[: len(values)]
    return float(np.add.reduce(np.multiply(values, values, out=spare)))


def product(first: Array, second: Array, scratch: Scratch) -> float:
    """Inner product; its bits depend on the values alone."""
    spare = scratch.spare[: len(first)]
    return float(np.add.reduce(np.multiply(first, second, out=spare)))


def total(parts: Sequence[float]) -> float:
    """The sum, rounded once: the same for any order."""
    return math.fsum(parts)
