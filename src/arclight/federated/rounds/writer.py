"""Write a round's checkpoint tensor by tensor, with few tensors in memory at a time.

It is an ordinary checkpoint folder. Entries of tensors: ``model`` (by parameter name), ``moments`` (averaged local moments,
``exp_avg/<parameter name>``) and ``server`` (the strategy's states, ``<state>/<parameter name>``); all others are JSON. If the
module keeps the arguments that it was built with, they are there as in a trainer's checkpoint, so that it can be built again. Its
files of weights and moments become the blobs that nodes fetch, unless `published_weights` writes others: their SHA-256 is computed as they
are written.

``server.server_step`` writes each round through `Rounds.write`, and `tools` rewrites edited and forked ones. Names of entries are in folders of
runs that are resumed, and the order of tensors decides digests: add, never rename or sort otherwise.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, Self

import torch

from arclight.checkpoint import files, tree
from arclight.checkpoint.files import HashedFile
from arclight.checkpoint.manifest import NAME, STATE, FileRecord, describe
from arclight.checkpoint.remote import to_path
from arclight.checkpoint.tensorfile import NAMES, write_header, write_values
from arclight.federated.errors import FederatedError
from arclight.federated.protocol import Entry, Manifest

TensorLayout = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Names of tensors with their types and shapes, in the order in which they are written."""

MODEL = "model"
TENSOR_ENTRIES = (MODEL, "moments", "server")
TREE_ENTRIES = ("round", "federation", "clients", "sampler", "history")
MODULE_ENTRIES = ("buffers", "hyper_parameters", "hparams_name", "hparams_type")
"""Entries about the module, which a round may lack: names of weights that are no parameters, and the arguments that it is built with."""
CARRIED_ENTRIES = (*MODULE_ENTRIES, "privacy")
"""Entries that are copied from round to round, and into a run that begins with one: ``privacy`` is the noise of all rounds so far."""
STATE_KEYS = (*TENSOR_ENTRIES, *TREE_ENTRIES)
"""What a round must have to count as complete."""


@dataclass(frozen=True, kw_only=True)
class WrittenCheckpoint:
    """A round that is on disk."""

    path: Path
    files: dict[str, FileRecord]


class RoundWriter:
    """Writer of checkpoint ``path``: a context in which tensors are added and published.

    `publish` must be called.
    layout: for each entry of tensors, what comes in which order; see `in_order`. Left without `publish`, nothing remains.
    """

    def __init__(self, path: str | Path, layout: Mapping[str, TensorLayout]) -> None:
        if unknown := [entry for entry in layout if entry not in TENSOR_ENTRIES]:
            raise FederatedError(f"a round has no entry of tensors {unknown[0]!r}; it has {', '.join(TENSOR_ENTRIES)}")
        self.path = to_path(path)
        self._layout = {entry: dict(layout.get(entry, {})) for entry in TENSOR_ENTRIES}
        self._left = {entry: list(tensors) for entry, tensors in self._layout.items()}
        self._open: dict[str, files.HashedFile] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        files.sweep(self.path.parent)
        self._staging = files.make_staging(self.path)
        self._stack.callback(files.discard, self._staging)
        try:
            self._inner = self._stack.enter_context(ExitStack())
            self._behind = BackgroundWriter()
            for entry, tensors in self._layout.items():
                if tensors:
                    file = self._inner.enter_context(files.create(self._staging / f"{entry}.safetensors"))
                    write_header(file, tensors)
                    self._open[entry] = file
            self._inner.callback(self._behind.close)  # before the files are
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, at)

    def add(
        self, entry: str, name: str, tensor: torch.Tensor, done: Callable[[torch.Tensor], None] | None = None
    ) -> None:
        """Add the next tensor of an entry.

        It is written while the next ones are made: it must not change before ``done(tensor)`` is called, or `finished`
        returns. Raises OSError if there was no room for this one or an earlier one. Raises FederatedError for one that
        is not next, or of another type or shape.
        """
        due = self._left[entry][0] if self._left[entry] else None
        given = (tensor.dtype, tuple(tensor.shape))
        if name != due or given != self._layout[entry][name]:
            expected = f"{due} of {self._layout[entry][due]}" if due else "nothing more"
            raise FederatedError(
                f"{entry} of round {self.path.name}: {expected} is to be written, got {name} of {given}"
            )
        self._behind.write(self._open[entry], tensor, done)
        del self._left[entry][0]

    def finished(self) -> dict[str, FileRecord]:
        """Finish writing; return the record of each file.

        Raises FederatedError if tensors are missing.
        """
        if lost := [f"{entry}.{names[0]}" for entry, names in self._left.items() if names]:
            raise FederatedError(f"round {self.path.name} cannot be written: {lost[0]} was not given")
        self._behind.finish()
        self._inner.close()
        return {
            f"{entry}.safetensors": FileRecord(sha256=file.sha256, bytes=file.bytes)
            for entry, file in self._open.items()
        }

    def publish(self, trees: Mapping[str, Any]) -> WrittenCheckpoint:
        """Publish the complete round.

        Raises OSError if the disk is full.
        """
        records = self.finished()
        encoded = tree.encode(trees)
        if encoded.files:
            raise FederatedError(f"{', '.join(encoded.files)}: tensors of a round go through add")
        for entry, tensors in self._layout.items():
            encoded.entries[entry] = _tensors(entry, tensors) if tensors else {}
            if tensors:
                encoded.files[f"{entry}.safetensors"] = {
                    name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in tensors.items()
                }
        encoded.step = trees["round"]["clock"]
        records[STATE] = self._write(STATE, json.dumps(encoded.entries, allow_nan=False))
        self._write(NAME, describe(encoded, records, files.data_folder(self._staging)).to_json())
        files.publish(self._staging, self.path)
        return WrittenCheckpoint(path=self.path, files=records)

    def _write(self, name: str, text: str) -> FileRecord:
        with files.create(self._staging / name) as file:
            file.write(text.encode())
        return FileRecord(sha256=file.sha256, bytes=file.bytes)


def _tensors(entry: str, tensors: TensorLayout) -> dict[str, Any]:
    return {"$": "tensors", "file": f"{entry}.safetensors", "names": list(tensors), "aliases": {}}


def in_order(tensors: Mapping[str, torch.Tensor]) -> TensorLayout:
    """Return the order of tensors in a round's files: widest types first, then by name.

    So all are aligned.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    return {name: (tensors[name].dtype, tuple(tensors[name].shape)) for name in order}


def weights_manifest(layout: Mapping[str, TensorLayout], records: Mapping[str, FileRecord]) -> Manifest:
    """Return the manifest of a round's weights: its files of model and moments, as they are."""
    tensors, blobs = dict[str, Entry](), dict[str, int]()
    for entry, prefix in ((MODEL, "model/"), ("moments", "")):
        if not layout.get(entry):
            continue
        record = records[f"{entry}.safetensors"]
        blobs[record.sha256] = record.bytes
        for name, (dtype, shape) in layout[entry].items():
            tensors[prefix + name] = Entry(
                blob=record.sha256, dtype=NAMES[dtype], shape=shape, name=name if prefix else None
            )
    return Manifest(kind="weights", tensors=tensors, blobs=blobs)


_SETTLED = 1 << 26
"""Bytes after which a file is synced to disk, while the next tensors are made."""
_AHEAD = 2
"""Tensors that wait to be written, or are being written."""


class BackgroundWriter:
    """Writer of tensors in order, on a thread.

    An error is raised by a later call, by `finish` at the latest.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="arclight-round")
        self._waiting = deque[Future[None]]()

    def write(self, file: HashedFile, tensor: torch.Tensor, done: Callable[[torch.Tensor], None] | None) -> None:
        """Queue a tensor, which must not change until ``done(tensor)`` is called.

        Waits while enough others are queued.
        """
        while len(self._waiting) >= _AHEAD:
            self._waiting.popleft().result()
        self._waiting.append(self._pool.submit(_write, file, tensor, done))

    def finish(self) -> None:
        """Wait until all tensors are written."""
        while self._waiting:
            self._waiting.popleft().result()

    def close(self) -> None:
        """End the thread; queued tensors are dropped."""
        self._pool.shutdown(cancel_futures=True)


def _write(file: HashedFile, tensor: torch.Tensor, done: Callable[[torch.Tensor], None] | None) -> None:
    write_values(file, tensor)
    if done is not None:
        done(tensor)
    file.sync_every(_SETTLED)


class BufferPool:
    """Reuse buffers for tensors: fresh memory costs a page fault for every 4 kB.

    It holds no more than was lent at the same time.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._free: list[torch.Tensor] = []
        self._lent: dict[int, torch.Tensor] = {}

    def empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a buffer of elements of any value."""
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

    def release(self, tensor: torch.Tensor) -> None:
        """Return a tensor's buffer to the pool; tensors from elsewhere are ignored."""
        with self._lock:
            raw = self._lent.pop(tensor.data_ptr(), None)
            if raw is not None:
                self._free.append(raw)
