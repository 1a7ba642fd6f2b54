"""Tensors are hashed and written by a thread of their own while the next ones are made, into memory that is used again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

import torch

from arclight.checkpoint.files import HashedFile
from arclight.checkpoint.tensorfile import write_values

_SETTLED = 1 << 26
"""Bytes after which a file is on the disk so far, while the next tensors are made."""
_AHEAD = 2
"""Tensors that wait to be written, or are being written."""


class Behind:
    """Writes tensors in the order in which they are given. What went wrong with one is raised by a later call, `finish` at the latest."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="arclight-round")
        self._waiting = deque[Future[None]]()

    def write(self, file: HashedFile, tensor: torch.Tensor, done: Callable[[torch.Tensor], None] | None) -> None:
        """``done(tensor)`` is called once it is written; it must not change before. Waits while enough others do."""
        while len(self._waiting) >= _AHEAD:
            self._waiting.popleft().result()
        self._waiting.append(self._pool.submit(_write, file, tensor, done))

    def finish(self) -> None:
        """All that was given is written."""
        while self._waiting:
            self._waiting.popleft().result()

    def close(self) -> None:
        """End the thread; what waits is dropped."""
        self._pool.shutdown(cancel_futures=True)


def _write(file: HashedFile, tensor: torch.Tensor, done: Callable[[torch.Tensor], None] | None) -> None:
    write_values(file, tensor)
    if done is not None:
        done(tensor)
    file.settle(_SETTLED)


class Reused:
    """Memory for tensors, used again for others once they are given back: fresh memory costs a page fault for every 4 kB.

    It holds no more than was lent at the same time.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._free: list[torch.Tensor] = []
        self._lent: dict[int, torch.Tensor] = {}

    def empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """A row of elements of any value."""
        size = elements * dtype.itemsize
        if not size:
            return torch.empty(elements, dtype=dtype)
        with self._lock:
            self._free.sort(key=torch.Tensor.numel)
            fitting = [raw for raw in self._free if raw.numel() >= size]
            if self._free:
                raw = self._free.pop(len(self._free) - len(fitting) if fitting else 0)
            if not fitting:
                raw = torch.empty(size, dtype=torch.uint8)
            self._lent[raw.data_ptr()] = raw
        return raw[:size].view(dtype)

    def give_back(self, tensor: torch.Tensor) -> None:
        """Nobody uses it any more. Tensors that are not from here, in whatever shape, are let go."""
        with self._lock:
            raw = self._lent.pop(tensor.data_ptr(), None)
            if raw is not None:
                self._free.append(raw)
