"""Read blocks through a local folder, and prefetch on threads in the order of use.

``text.data.data_module`` makes one `BlockReader` for all its corpora, ``arclight data inspect`` one for its own; `remote_shards` reads
through it, and `block_folder` is its cache on disk. Blocks are verified by their digest before a consumer gets them. Sizes and numbers of
threads may be tuned.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Iterator, Set
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

from arclight.data.remote.block_folder import MADE, BlockFolder
from arclight.data.remote.ranges import ReadCancelledError
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.rank_zero import rank_zero_warn

_IN_MEMORY = 64
"""Blocks that a process keeps in memory, since consecutive samples share a block."""
_AHEAD_SHARE = 4
"""Divisor of the folder's size: prefetched blocks take at most a fourth of it until they are released."""
_COUNT_S = 1.0
"""Seconds after which the processes that share the folder are counted again."""
_CLOSING_S = 30.0
"""Seconds to wait for threads to end; requests in flight are cancelled."""


class BlockSource(Protocol):
    """Origin of blocks, such as the shards at an address."""

    def key(self, block: tuple[int, int]) -> str:
        """Return a name that identifies the block's content on every machine."""
        ...

    def size(self, block: tuple[int, int]) -> int: ...

    def digest(self, block: tuple[int, int], cancel: threading.Event) -> bytes:
        """Return the SHA-256 of a block; this may fetch a block of digests."""
        ...

    def is_intact(self, content: bytes, digest: bytes) -> bool: ...

    def fetch(self, block: tuple[int, int], digest: bytes, cancel: threading.Event) -> bytes:
        """Return the verified content."""
        ...


class BlockRequest(NamedTuple):
    """A block that will be read."""

    source: BlockSource
    block: tuple[int, int]
    key: str


class Prefetch:
    """Request of blocks in the order in which ``consumer`` will read them.

    The first ``taken`` are being prefetched, the others wait for space.
    """

    def __init__(self, blocks: Iterable[BlockRequest], consumer: Hashable = None) -> None:
        self.blocks, self.consumer, self.taken = tuple(blocks), consumer, 0


class BlockReader:
    """Reader of blocks through ``folder``, which holds at most ``bound_bytes``.

    Other processes may share the folder. `close` ends the threads; reading again starts others. A forked or unpickled copy starts without
    prefetched blocks.

    connections: threads that prefetch, started by the first `prefetch`. patience_s, request_timeout_s: see
    `arclight.data.remote.ranges.RemoteFiles`.
    """

    def __init__(
        self, folder: Path, bound_bytes: int = 2**32, *, connections: int = 8, patience_s: float = 300.0,
        request_timeout_s: float = 60.0,
    ) -> None:  # fmt: skip
        self.folder, self.bound_bytes, self.connections = folder, bound_bytes, connections
        self.patience_s, self.request_timeout_s = patience_s, request_timeout_s
        self._made = threading.Lock()
        self._running: _Running | None = None

    def read(self, source: BlockSource, block: tuple[int, int]) -> bytes:
        """Return a block. Raises the error of its prefetch, if that failed."""
        return self._state().read(BlockRequest(source, block, source.key(block)))

    def prefetch(
        self, blocks: Iterable[tuple[BlockSource, tuple[int, int]]], consumer: Hashable = None
    ) -> Prefetch:  # fmt: skip
        """Prefetch blocks on threads, in the consumer's order, and keep them until `release`.

        Processes share a fourth of the folder for prefetched blocks; further ones wait, and are fetched as `release` makes space.
        consumer: identifies the reader, such as one pass over a loader; consumers get equal shares of space and connections, also
        while one of them pauses.
        """
        requests = (BlockRequest(source, block, source.key(block)) for source, block in blocks)
        return self._state().prefetch(Prefetch(requests, consumer))

    def release(self, prefetch: Prefetch) -> None:
        """Release the blocks of a `prefetch`; does nothing if called again, or after `close`."""
        if (running := self._running) is not None and running.pid == os.getpid():
            running.release(prefetch)

    def recount(self) -> int:
        """Return the bytes of the folder, counted again after files were added beside the blocks."""
        return self._state().recount()

    def check_room(self, packed: Set[Path]) -> None:
        """Raise MisconfigurationError if packed samples leave no room for blocks.

        packed: the folders of packed samples that this run reads; warns if others take more than a fourth of the room. Nothing is deleted:
        other runs may need it, and packing a large corpus takes long.
        """
        bound, used = self.bound_bytes, self.recount()
        others = {
            folder: sum(file.stat().st_size for file in folder.iterdir())
            for folder in sorted((self.folder / MADE).glob("*/packed-*"))
            if folder not in packed
        }
        listed = ", ".join(f"{folder} ({size:,} bytes)" for folder, size in others.items())
        hint = (
            f"what was packed for other runs takes room of blocks, delete what none needs: {listed}" if listed else ""
        )
        if used > bound:
            raise MisconfigurationError(
                f"remote_bytes = {bound:,} leaves no room for blocks: what is packed has {used:,} bytes; raise it, or set "
                f'packing = "concat", which needs none{hint and "; " + hint}'
            )
        if sum(others.values()) > bound // 4:
            rank_zero_warn(f"remote_bytes = {bound:,}: {hint}")

    def close(self) -> None:
        """End the threads and release all blocks."""
        with self._made:
            running, self._running = self._running, None
        if running is not None:
            running.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_running": None, "_made": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _made=threading.Lock())

    def _state(self) -> _Running:
        running = self._running
        if running is not None and running.pid == os.getpid():
            return running
        if running is not None:  # forked: its locks and threads are the other process's
            self._made = threading.Lock()
        with self._made:
            if self._running is running:
                folder = BlockFolder(self.folder, self.bound_bytes)
                self._running = _Running(folder, self.connections, self.patience_s)
                weakref.finalize(self, self._running.close)
            assert self._running is not None
            return self._running


class _Job:
    """A block to fetch, queued or started."""

    def __init__(self, block_request: BlockRequest) -> None:
        self.block_request, self.begun = block_request, False
        self.result: Future[bytes | None] = Future()


class _Consumer:
    """Requests of one consumer, in order.

    All blocks of those in ``taken`` have space; of ``waiting`` only the first may have some.
    """

    def __init__(self) -> None:
        self.taken: deque[Prefetch] = deque()
        self.waiting: deque[Prefetch] = deque()
        self.blocks: dict[str, int] = {}
        """How many requests each block with space is in."""
        self.size_bytes = 0
        self.queue: OrderedDict[str, _Job] = OrderedDict()


class _Running:
    """State of a reader in one process: threads, prefetched blocks, and the latest ones."""

    def __init__(self, folder: BlockFolder, connections: int, patience_s: float) -> None:
        self.pid = os.getpid()
        self._folder, self._patience_s = folder, patience_s
        self._ahead, self._count_at = 0, 0.0
        self._connections = connections
        self._changed = threading.Condition()
        self._cancel = threading.Event()
        self._threads: list[threading.Thread] = []
        self._jobs: dict[str, _Job] = {}
        self._consumers: OrderedDict[Hashable, _Consumer] = OrderedDict()
        self._released: deque[Prefetch] = deque()
        self._arranging = False
        self._open: set[Prefetch] = set()
        self._expected: dict[str, int] = {}
        self._failed: dict[str, BaseException] = {}
        self._memory: OrderedDict[str, bytes] = OrderedDict()

    def read(self, block_request: BlockRequest) -> bytes:
        with self._changed:
            if block_request.key in self._memory:
                self._memory.move_to_end(block_request.key)
                return self._memory[block_request.key]
            error, job = self._failed.pop(block_request.key, None), self._jobs.get(block_request.key)
            if job is not None and not job.begun:  # still queued: fetch it here, now
                with self._deferring_releases():
                    for consumer in self._consumers.values():
                        consumer.queue.pop(block_request.key, None)
                self._jobs.pop(block_request.key, None)
                job.result.cancel()
                job = None
        if error is not None:
            _raise_again(error)
        found = None
        if job is not None:
            try:
                found = job.result.result()  # which has its own deadlines
            except BaseException as failed:
                with self._changed:
                    self._failed.pop(block_request.key, None)
                _raise_again(failed)
        content = self._obtain(block_request, ahead=False) if found is None else found
        assert content is not None
        with self._changed:
            self._memory[block_request.key] = content
            while len(self._memory) > _IN_MEMORY:
                self._memory.popitem(last=False)
        return content

    def prefetch(self, request: Prefetch) -> Prefetch:
        with self._changed:
            with self._deferring_releases():
                self._open.add(request)
                self._consumers.setdefault(request.consumer, _Consumer()).waiting.append(request)
            self._arrange()
        return request

    def release(self, prefetch: Prefetch) -> None:
        with self._changed:
            self._released.append(prefetch)
            self._arrange()

    def _arrange(self) -> None:
        """Free released blocks, and queue waiting ones while there is space."""
        if self._arranging:
            return
        with self._deferring_releases():
            while self._released:
                self._free(self._released.popleft())
            if self._consumers and not self._cancel.is_set() and time.monotonic() >= self._count_at:
                self._share_with_processes()
            while not self._cancel.is_set() and (waiting := [one for one in self._consumers.values() if one.waiting]):
                if not self._take(min(waiting, key=_size)):  # the consumer with the least bytes first
                    break
            queued = any(consumer.queue for consumer in self._consumers.values())
        while len(self._threads) < min(self._connections, len(self._jobs)):
            name = f"arclight-read-ahead-{len(self._threads)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
        if queued:
            self._changed.notify()  # one thread, which wakes the next; waking all at once would delay the caller

    @contextmanager
    def _deferring_releases(self) -> Iterator[None]:
        """Defer releases while state changes.

        The garbage collector may end a pass at any moment, and call `release`.
        """
        self._arranging = True
        try:
            yield
        finally:
            self._arranging = False

    def _share_with_processes(self) -> None:
        """Compute this process's share of the space, and give up blocks beyond it."""
        self._ahead = max(1, self._folder.bound_bytes // _AHEAD_SHARE // self._folder.count_prefetching())
        self._count_at = time.monotonic() + _COUNT_S
        while self._expected_bytes > self._ahead:
            most = max(self._consumers.values(), key=_size)
            if len(most.blocks) == 1:
                break
            self._give_up_last(most)

    def _take(self, consumer: _Consumer) -> bool:
        """Assign space to a consumer's next block and queue it; return False if there is none."""
        prefetch = consumer.waiting[0]
        if prefetch.taken == len(prefetch.blocks):
            consumer.taken.append(consumer.waiting.popleft())
            return True
        block_request = prefetch.blocks[prefetch.taken]
        if block_request.key not in consumer.blocks:
            size = block_request.source.size(block_request.block)
            if not self._make_room(consumer, size):
                return False
            consumer.size_bytes += size
            if block_request.key not in self._expected and block_request.key not in self._jobs:
                self._jobs[block_request.key] = consumer.queue[block_request.key] = _Job(block_request)
            self._expected[block_request.key] = self._expected.get(block_request.key, 0) + 1
        consumer.blocks[block_request.key] = consumer.blocks.get(block_request.key, 0) + 1
        prefetch.taken += 1
        return True

    def _make_room(self, consumer: _Consumer, size: int) -> bool:
        """Return True if a consumer may take ``size`` bytes: there is space, or it has no block yet.

        While it is below its share, consumers with the most bytes give up the blocks that they need last. These stay in the folder while
        there is space, and are requested again later.
        """
        share = self._ahead // len(self._consumers)
        while not (fits := self._expected_bytes + size <= self._ahead) and consumer.size_bytes + size <= share:
            self._give_up_last(max(self._consumers.values(), key=_size))
        return fits or not consumer.size_bytes

    def _give_up_last(self, consumer: _Consumer) -> None:
        while not (consumer.waiting and consumer.waiting[0].taken):
            consumer.waiting.appendleft(consumer.taken.pop())
        self._give_up(consumer, consumer.waiting[0])

    def _free(self, prefetch: Prefetch) -> None:
        if prefetch not in self._open:  # requested before `close`, or released already
            return
        self._open.remove(prefetch)
        consumer = self._consumers[prefetch.consumer]
        (consumer.taken if prefetch in consumer.taken else consumer.waiting).remove(prefetch)
        while prefetch.taken:
            self._give_up(consumer, prefetch)
        if not consumer.taken and not consumer.waiting:
            del self._consumers[prefetch.consumer]

    def _give_up(self, consumer: _Consumer, prefetch: Prefetch) -> None:
        """Return the space of a request's last block."""
        prefetch.taken -= 1
        block_request = prefetch.blocks[prefetch.taken]
        key = block_request.key
        consumer.blocks[key] -= 1
        if consumer.blocks[key]:
            return
        del consumer.blocks[key]
        consumer.size_bytes -= block_request.source.size(block_request.block)
        job = consumer.queue.pop(key, None)
        self._expected[key] -= 1
        if self._expected[key]:
            if job is not None:
                next(other for other in self._consumers.values() if key in other.blocks).queue[key] = job
            return
        del self._expected[key]
        self._failed.pop(key, None)
        if job is not None:
            self._jobs.pop(key)
            job.result.cancel()
        self._folder.release(key)

    @property
    def _expected_bytes(self) -> int:
        return sum(consumer.size_bytes for consumer in self._consumers.values())

    def recount(self) -> int:
        return self._folder.recount()

    def close(self) -> None:
        if self.pid != os.getpid():
            return
        self._cancel.set()
        with self._changed:
            with self._deferring_releases():
                for consumer in self._consumers.values():
                    for key, job in consumer.queue.items():
                        job.result.cancel()
                        self._jobs.pop(key)
                    consumer.queue.clear()
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_CLOSING_S)
        self._folder.close()

    def _work(self) -> None:
        while True:
            with self._changed:
                while (job := self._next_job()) is None and not self._cancel.is_set():
                    self._changed.wait()
                if job is None:
                    return
            try:
                found = self._obtain(job.block_request, ahead=True)
            except BaseException as error:  # raised again by `read` of that block
                self._end(job, error)
                job.result.set_exception(error)
            else:
                self._end(job, None)
                job.result.set_result(found)

    def _next_job(self) -> _Job | None:
        """Start the first job of the next consumer's queue, or return None."""
        with self._deferring_releases():
            found = [(name, consumer) for name, consumer in self._consumers.items() if consumer.queue]
            if not found or self._cancel.is_set():
                return None
            name, consumer = found[0]
            self._consumers.move_to_end(name)
            _, job = consumer.queue.popitem(last=False)
            job.begun = True
            if consumer.queue or len(found) > 1:
                self._changed.notify()
            return job

    def _end(self, job: _Job, error: BaseException | None) -> None:
        key = job.block_request.key
        with self._changed:
            self._jobs.pop(key, None)
            if key not in self._expected:
                self._folder.release(key)  # released meanwhile
            elif error is not None:
                self._failed[key] = error

    def _obtain(self, block_request: BlockRequest, *, ahead: bool) -> bytes | None:
        """Return a block from the folder or its source.

        With ``ahead`` None if it is there already, or has no space yet.
        """
        source, block, key = block_request
        digest = source.digest(block, self._cancel)  # before the claim: it may need a block itself
        if ahead and self._folder.hold(key):
            return None
        if not ahead and (found := self._from_folder(block_request, digest)) is not None:
            return found
        with self._folder.claim(key, self._patience_s, self._cancel):
            if self._cancel.is_set():
                raise ReadCancelledError(f"{key}: the reader was closed")
            if (found := self._from_folder(block_request, digest)) is not None:  # another process was quicker
                if ahead:
                    self._folder.hold(key)
                return found
            reserved = self._folder.reserve(source.size(block))
            if ahead and reserved is None:
                return None
            try:
                content = source.fetch(block, digest, self._cancel)
            except BaseException:
                if reserved is not None:
                    self._folder.unreserve(reserved)
                raise
            if reserved is not None:
                self._folder.put(key, reserved, content, hold=ahead)
        return content

    def _from_folder(self, block_request: BlockRequest, digest: bytes) -> bytes | None:
        found = self._folder.get(block_request.key)
        if found is None or block_request.source.is_intact(found, digest):
            return found
        self._folder.drop(block_request.key)  # cut by a crash, or changed
        return None


def _size(consumer: _Consumer) -> int:
    return consumer.size_bytes


def _raise_again(error: BaseException) -> NoReturn:
    """Raise a copy of another thread's error, caused by it.

    The error itself if it cannot be copied.
    """
    try:
        copy = type(error)(*error.args)
    except Exception:
        raise error from error.__cause__
    raise copy from error
