"""Read token shards at an address like those on disk: the same order, the same bits.

``text.data.corpus`` opens a `RemoteTokenShards` if a place is an address; everything else uses it as a `TokenShards`. File layout
and digests are those of `token_shards` and stay, since corpora are on servers already; `ShardBlocks.key` is in shared caches.
"""

from __future__ import annotations

import hashlib
import io
import os
import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from arclight.data.remote.block_folder import MADE
from arclight.data.remote.block_reader import BlockReader, Prefetch
from arclight.data.remote.ranges import Found, RemoteFiles
from arclight.data.token_shards import (
    BLOCK_BYTES,
    HEADER_BYTES,
    INDEX,
    SUMS,
    Listed,
    TokenShardError,
    TokenShards,
    read_listing,
)
from arclight.fabric.rank_zero import rank_zero_warn

_SUMS = -1
"""Block index under which a shard's digest file is cached."""
_DIGEST_BYTES = 32
_MAX_EXTRA_FILE_BYTES = 2**30
"""Most bytes of a file beside the shards; counts of 50,000 tokens in 1,000 sources have 400 MB."""
_MAX_INDEX_BYTES = 2**28
"""Most bytes of an index; one of 500,000 shards has 200 MB."""
_ENDS_AHEAD_BYTES = 2**26
"""Most bytes of a shard's document ends that are prefetched: 8 million documents."""
_SHARDS_IN_MEMORY = 64
"""Shards whose digests and document ends are kept in memory."""
_ATTEMPTS = 3
"""Attempts to fetch a block whose digest does not match: it may have been damaged in transfer."""


class ShardBlocks:
    """Blocks of the shards at an address, by (shard, number); implements `BlockSource`."""

    def __init__(self, files: RemoteFiles, listed: Sequence[Listed], reader: BlockReader) -> None:
        self._files, self._listed, self._reader = files, list(listed), reader
        self._begin()

    def _begin(self) -> None:
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._found: dict[int, Found] = {}
        self._sums: OrderedDict[int, bytes] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value for name, value in self.__dict__.items() if name not in ("_pid", "_lock", "_found", "_sums")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def name_of(self, shard: int) -> str:
        """Return the address of a shard."""
        return f"{self._files.address}/{self._listed[shard].file}"

    def key(self, block: tuple[int, int]) -> str:
        shard, number = block
        return f"{self._listed[shard].facts.sha256[:32]}/{'sums' if number == _SUMS else f'{number:08d}'}"

    def size(self, block: tuple[int, int]) -> int:
        shard, number = block
        facts = self._listed[shard].facts
        if number == _SUMS:
            return _DIGEST_BYTES * facts.blocks
        return min(BLOCK_BYTES, facts.body_bytes - number * BLOCK_BYTES)

    def digest(self, block: tuple[int, int], cancel: threading.Event) -> bytes:
        shard, number = block
        self.check_size(shard, cancel)
        if number == _SUMS:
            return bytes.fromhex(self._listed[shard].sums or "")
        if self._pid != os.getpid():  # forked, perhaps while a thread of the parent held the lock
            self._pid, self._lock = os.getpid(), threading.Lock()
        with self._lock:
            sums = self._sums.get(shard)
        if sums is None:
            sums = self._reader.read(self, (shard, _SUMS))
            with self._lock:
                _keep(self._sums, shard, sums)
        return sums[_DIGEST_BYTES * number : _DIGEST_BYTES * (number + 1)]

    def is_intact(self, content: bytes, digest: bytes) -> bool:
        return hashlib.sha256(content).digest() == digest

    def fetch(self, block: tuple[int, int], digest: bytes, cancel: threading.Event) -> bytes:
        shard, number = block
        found, listed = self.check_size(shard, cancel), self._listed[shard]
        name = listed.file + (SUMS if number == _SUMS else "")
        start = 0 if number == _SUMS else HEADER_BYTES + number * BLOCK_BYTES
        size = self.size(block) if number == _SUMS else listed.facts.file_bytes
        for _ in range(_ATTEMPTS):
            try:
                content = self._files.read(name, start, start + self.size(block), size=size, cancel=cancel)
            except FileNotFoundError as error:  # deleted since its size was requested
                raise TokenShardError(
                    f"{self._files.address}/{name} is missing, though {INDEX} lists its shard: upload it"
                ) from error
            if self.is_intact(content, digest):
                return content
        now = self._files.find(listed.file, cancel)
        tags = f", its ETag was {found.etag} and is {now.etag}" if found.etag != now.etag else ""
        raise self._changed(name, f"its content is not what {INDEX} lists{tags}")

    def check_size(self, shard: int, cancel: threading.Event) -> Found:
        """Check that a shard's size is the one in the index, once per shard.

        Raises TokenShardError.
        """
        if (found := self._found.get(shard)) is None:
            name, size = self._listed[shard].file, self._listed[shard].facts.file_bytes
            try:
                found = self._files.find(name, cancel)
            except FileNotFoundError as error:
                raise TokenShardError(
                    f"{self.name_of(shard)} is missing, though {INDEX} lists it: upload it"
                ) from error
            if found.size_bytes not in (None, size):
                raise self._changed(name, f"it has {found.size_bytes:,} bytes, {INDEX} lists {size:,}")
            self._found[shard] = found
        return found

    def _changed(self, name: str, difference: str) -> TokenShardError:
        return TokenShardError(
            f"{self._files.address}/{name} changed at its address: {difference}; put back what was tokenized, or begin a new run with the "
            "corpus that is there now"
        )


class RemoteTokenShards(TokenShards):
    """Token shards at an address, such as ``https://host/corpus/train``.

    Opening reads only the index. Blocks of 65,536 bytes are fetched when they are read, or earlier by `prefetch`, and verified by the
    digests beside the shards. Reading raises TokenShardError for a shard that does not match the index (it was changed at its
    address) and RemoteReadError for one that cannot be read. Raises FileNotFoundError if there is no corpus.
    """

    def __init__(self, address: str, reader: BlockReader, tokenizer: str | None = None) -> None:
        self.address = self.place = address.rstrip("/")
        self.reader = reader
        files = RemoteFiles(self.address, patience_s=reader.patience_s, request_timeout_s=reader.request_timeout_s)
        try:
            text = files.read_whole(INDEX, _MAX_INDEX_BYTES)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{self.address} is not a folder of token shards: it has no {INDEX}") from error
        about, listed = read_listing(text, f"{self.address}/{INDEX}")
        if older := [entry.file for entry in listed if entry.sums is None]:
            raise TokenShardError(
                f"{self.address} lists no digests of the blocks of {older[0]}, by which parts are verified: write them where the "
                "corpus lies (arclight data inspect CORPUS --sums) and upload it again"
            )
        self._files = files
        self._origin = ShardBlocks(files, listed, reader)
        self._open(about, listed, tokenizer)
        self.folder = reader.folder / MADE / self.digest[:32]
        self._ends_of: OrderedDict[int, npt.NDArray[Any]] = OrderedDict()

    def open_beside(self, name: str) -> BinaryIO:
        return io.BytesIO(self._files.read_whole(name, _MAX_EXTRA_FILE_BYTES))

    read_ahead = 64

    def prefetch(self, spans: Sequence[tuple[int, int]], *, boundaries: bool, consumer: Hashable = None) -> Prefetch:
        blocks, ends = dict[tuple[int, int], None](), dict[tuple[int, int], None]()
        for start, stop in spans:
            for shard, a, b in self._spans(self._first_token, start, stop):
                facts = self.facts[shard]
                itemsize = np.dtype(facts.dtype).itemsize
                blocks |= dict.fromkeys(self._blocks(shard, a * itemsize, b * itemsize))
                if boundaries:  # after all tokens, since readers keep them in memory
                    stop_at = min(facts.body_bytes, facts.ends_at + _ENDS_AHEAD_BYTES)
                    ends |= dict.fromkeys(self._blocks(shard, facts.ends_at, stop_at))
        return self.reader.prefetch(((self._origin, block) for block in blocks | ends), consumer)

    def release(self, prefetched: Prefetch) -> None:
        self.reader.release(prefetched)

    def warn_of_shuffling(self, samples: int, *, packed: bool, in_windows: bool) -> None:
        """Warn if shuffling an epoch of ``samples`` fetches more than twice the corpus.

        packed: samples are of documents from all over the corpus, so that windows do not keep them together.
        """
        size, bound = sum(facts.body_bytes for facts in self.facts), self.reader.bound_bytes
        fetched = int(samples * BLOCK_BYTES * max(0.0, 1 - bound / max(1, size)))
        if (in_windows and not packed) or fetched <= 2 * size:
            return
        also = 'packing = "concat" and ' if packed else ""
        window = max(1, bound // 8 // max(1, size // max(1, samples)))
        rank_zero_warn(
            f"{self.place} has {size:,} bytes, remote_bytes = {bound:,}: shuffled as a whole, an epoch fetches up to {fetched:,} bytes, as each "
            f"sample lies in another block of {BLOCK_BYTES // 1024} KiB; set {also}shuffle_window = {window}, or raise remote_bytes"
        )

    def verify(self, *, again: bool = False) -> None:
        """Fetch and verify every block that is not in the local folder.

        Raises the errors of reading.
        """
        ahead = 4 * self.reader.connections
        for shard, facts in enumerate(self.facts):
            self._origin.check_size(shard, threading.Event())
            every = range(facts.blocks)
            for first in range(0, len(every), ahead):
                prefetched = self.reader.prefetch(
                    (self._origin, (shard, block)) for block in every[first : first + ahead]
                )
                try:
                    for block in every[first : first + ahead]:
                        self.reader.read(self._origin, (shard, block))
                finally:
                    self.reader.release(prefetched)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ends_of": OrderedDict(), "_maps": {}}

    # -- tokens and documents ------------------------------------------------------------------------------------------

    def _tokens(self, shard: int, start: int, stop: int) -> npt.NDArray[Any]:
        dtype = np.dtype(self.facts[shard].dtype).newbyteorder("<")
        return np.frombuffer(self._body(shard, start * dtype.itemsize, stop * dtype.itemsize), dtype)

    def _ends(self, shard: int) -> npt.NDArray[Any]:
        if (found := self._ends_of.get(shard)) is not None:
            return found
        facts = self.facts[shard]
        found = np.frombuffer(self._body(shard, facts.ends_at, facts.body_bytes), "<u8")
        if found.size and not (int(found[-1]) == facts.tokens and bool((found[:-1] <= found[1:]).all())):
            raise TokenShardError(
                f"{self._origin.name_of(shard)} has ends of documents that are not those of its tokens"
            )
        _keep(self._ends_of, shard, found)
        return found

    def _body(self, shard: int, start: int, stop: int) -> bytes:
        """Return bytes of a shard, counted from the end of its header."""
        if start >= stop:
            return b""
        self._origin.check_size(shard, threading.Event())
        blocks = self._blocks(shard, start, stop)
        parts = [self.reader.read(self._origin, block) for block in blocks]
        first = blocks[0][1] * BLOCK_BYTES
        return (parts[0] if len(parts) == 1 else b"".join(parts))[start - first : stop - first]

    def _blocks(self, shard: int, start: int, stop: int) -> list[tuple[int, int]]:
        return (
            [(shard, number) for number in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES))] if start < stop else []
        )


def _keep(cache: OrderedDict[int, Any], shard: int, value: Any) -> None:
    cache[shard] = value
    cache.move_to_end(shard)
    while len(cache) > _SHARDS_IN_MEMORY:
        cache.popitem(last=False)
