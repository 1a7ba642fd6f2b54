"""Save in the background: copy tensors to host memory, and write them from a thread.

`AsyncSaver` is public (``arclight.checkpoint``); the Trainer's `AsyncCheckpointIO` uses it. `save` and `save_shards` write the formats of
`store` and ``sharded``; `submit` runs a writer of another. When `save` returns, the caller may change its tensors: by then they must be
copied (or, from CUDA, the copy enqueued on the current stream).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from arclight.checkpoint import tree
from arclight.checkpoint.errors import CheckpointError
from arclight.checkpoint.remote import to_absolute_path
from arclight.checkpoint.sharded.writer import ShardedSaver, capture_error
from arclight.checkpoint.store import write
from arclight.checkpoint.tensorfile import as_bytes

if TYPE_CHECKING:
    from arclight.fabric.distributed.store_gather import StoreGather
    from arclight.fabric.strategies import Strategy


_Files = Mapping[str, dict[str, torch.Tensor]]
"""Tensors by file and name."""

_PARTS_TIMEOUT_S = 3600.0
"""Seconds that rank 0 waits for other processes to write their parts, while all of them live."""


class AsyncSaver:
    """Write checkpoints in one background thread, one at a time.

    `save` returns as soon as the state is copied to buffers in CPU memory (pinned, for tensors of a CUDA device), which
    are kept and used again. An error in the background is raised by the next save, `wait` or `close`, with the path.
    Use it as a context manager, or `close` it: the process waits for the save in flight before it ends either way.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._in_flight: Future[Any] | None = None
        self._closed = False
        self._buffers: dict[tuple[str, str], torch.Tensor] = {}
        self._sharded: ShardedSaver | None = None
        self._exchange: StoreGather | None = None

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Allocate buffers for such a state in the background, before the first save needs them."""
        self._ready()
        encoded = tree.encode(state)
        self._in_flight = self._thread.submit(self._allocate, encoded.files)

    def save(self, path: str | Path, state: Mapping[str, Any]) -> Future[Path]:
        """Copy `state` and write it to `path` in the background, as `arclight.checkpoint.save` does.

        Waits for the save before, if it is still in flight. The result of the future is the path, once it is complete.
        Raises CheckpointError at once for a state that cannot be kept, and for an error of the save before.
        """
        self._ready()
        target = to_absolute_path(path)
        encoded = tree.encode(state)
        event = self._stage(encoded.files)
        self._in_flight = self._thread.submit(_write, target, lambda: write(target, encoded), event)
        return self._in_flight

    def save_shards(self, path: str | Path, state: Mapping[str, Any], processes: Strategy) -> Future[Path]:
        """Save shards in the background, as `arclight.checkpoint.save_shards`; for every rank.

        The ranks agree on who writes what before this returns; nothing in the background is a collective. The result of rank 0's future
        comes when the checkpoint is complete, that of another rank's when its own part is written. Raises the error of a save before on
        every rank.
        """
        _, problem = capture_error(self._ready)
        if self._sharded is None or self._sharded.processes is not processes:
            self._sharded, self._exchange = ShardedSaver(processes), processes.exchange("checkpoint", _PARTS_TIMEOUT_S)
        job = self._sharded.begin(path, state, problem)
        event = self._stage(job.own)

        def write_part() -> None:
            if (problem := job.write(self._exchange or (lambda value: [value]))) is not None:
                raise CheckpointError(problem)

        self._in_flight = self._thread.submit(_write, job.path, write_part, event)
        return self._in_flight

    def submit(self, writer: Callable[[], Any]) -> Future[Any]:
        """Run ``writer`` in the background, for another format; what it writes must be a copy."""
        self._ready()
        self._in_flight = self._thread.submit(writer)
        return self._in_flight

    def _ready(self) -> None:
        """Wait for the save before. Raises its CheckpointError, or one for a closed saver."""
        self.wait()
        if self._closed:
            raise CheckpointError("this saver is closed and writes nothing more: make another AsyncSaver")

    def limit_wait(self, seconds: float = 10.0) -> None:
        """Limit how long a save in flight waits for other ranks' parts, after a failure."""
        if self._exchange is not None:
            self._exchange.limit_wait(seconds)

    def wait(self) -> None:
        """Wait until nothing is in flight.

        Raises CheckpointError for an error of the last save, once.
        """
        future, self._in_flight = self._in_flight, None
        if future is not None:
            future.result()

    def close(self) -> None:
        """Wait, and free thread and buffers. Raises as `wait` does."""
        try:
            self.wait()
        finally:
            self._closed = True
            self._thread.shutdown()
            self._buffers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stage(self, files: _Files) -> torch.cuda.Event | None:
        """Copy all tensors to the buffers; return the event that completes copies from CUDA."""
        self._allocate(files, fill=False)
        on_cuda = False
        for file, tensors in files.items():
            for name, tensor in tensors.items():
                buffer = self._buffers[file, name]
                buffer.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
                on_cuda |= tensor.is_cuda
                tensors[name] = buffer
        if not on_cuda:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _allocate(self, files: _Files, fill: bool = True) -> Path:
        """Allocate the buffers that this state needs, and free all others."""
        needed: dict[tuple[str, str], torch.Tensor] = {}
        for file, tensors in files.items():
            for name, tensor in tensors.items():
                buffer = self._buffers.get((file, name))
                if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                    buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                    if fill:
                        as_bytes(buffer).zero_()
                needed[file, name] = buffer
        self._buffers = needed
        return Path()


def _write(path: Path, writer: Callable[[], None], event: torch.cuda.Event | None) -> Path:
    if event is not None:
        event.synchronize()
    try:
        writer()
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"checkpoint {path} could not be written in the background: {error!r}") from error
    return path
