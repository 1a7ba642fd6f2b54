"""Read blocks through a local folder, and fetch those that will be needed on threads, in the order of need."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

from arclight.data.remote.block_folder import BlockFolder
from arclight.data.remote.ranges import ReadCancelledError

_IN_MEMORY = 64
"""Blocks that a process keeps in memory: samples that lie beside each other are in one."""
_AHEAD_SHARE = 4
"""The folder is at most filled to a fourth with what processes have fetched and not read yet."""
_COUNT_S = 1.0
"""Seconds after which the processes that share this are counted again."""
_CLOSING_S = 30.0
"""Seconds that threads have to end in; a request in flight is left after a moment."""


class BlockSource(Protocol):
    """Origin of blocks, such as the shards at an address."""

    def key(self, block: tuple[int, int]) -> str:
        """Return a name that this content alone has, on every machine."""
        ...

    def size(self, block: tuple[int, int]) -> int: ...

    def digest(self, block: tuple[int, int], cancel: threading.Event) -> bytes:
        """Return the SHA-256 of a block; may read to know it."""
        ...

    def is_intact(self, content: bytes, digest: bytes) -> bool: ...

    def fetch(self, block: tuple[int, int], digest: bytes, cancel: threading.Event) -> bytes:
        """Return the verified content."""
        ...


class Wanted(NamedTuple):
    """A block that will be read."""

    source: BlockSource
    block: tuple[int, int]
    key: str


class Expected:
    """Blocks that ``consumer`` will read, in the order of need; the first ``taken`` are fetched ahead, the others wait for room."""

    def __init__(self, blocks: Iterable[Wanted], consumer: Hashable = None) -> None:
        self.blocks, self.consumer, self.taken = tuple(blocks), consumer, 0


class BlockReader:
    """Blocks by way of ``folder``, which holds at most ``bound_bytes`` and may be shared with other processes.

    connections: threads that fetch ahead, which start when something is expected. patience_s, request_timeout_s: see
    `arclight.data.remote.ranges.RemoteFiles`. `close` ends the threads; reading again starts others. In another process (forked, or
    where it was unpickled) it begins with nothing expected.
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
        """Return a block. An error of fetching it ahead is raised here, with its cause."""
        return self._state().read(Wanted(source, block, source.key(block)))

    def expect(
        self, blocks: Iterable[tuple[BlockSource, tuple[int, int]]], consumer: Hashable = None
    ) -> Expected:  # fmt: skip
        """Fetch blocks ahead, in this order behind what ``consumer`` expects already, and keep them until `release`.

        A fourth of the folder is room for that, which processes share: what is beyond it waits, and is fetched as `release` makes
        room. consumer: stands for who reads them, such as one pass over a loader; several share room and connections alike, also
        where one is at rest.
        """
        wanted = (Wanted(source, block, source.key(block)) for source, block in blocks)
        return self._state().expect(Expected(wanted, consumer))

    def release(self, expected: Expected) -> None:
        """Let go of what `expect` returned; again, or after `close`, this does nothing."""
        if (running := self._running) is not None and running.pid == os.getpid():
            running.release(expected)

    def recount(self) -> int:
        """Return the bytes of the folder, counted anew after something was made beside the blocks."""
        return self._state().recount()

    def close(self) -> None:
        """End the threads and let go of all that is held."""
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
    """The fetching of a block, waiting or begun."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted, self.begun = wanted, False
        self.result: Future[bytes | None] = Future()


class _Consumer:
    """Expected blocks of one consumer, in the order of need: ``taken`` has room, ``waiting`` has none or is the first that has some."""

    def __init__(self) -> None:
        self.taken: deque[Expected] = deque()
        self.waiting: deque[Expected] = deque()
        self.blocks: dict[str, int] = {}
        """How often each block with room is expected."""
        self.size_bytes = 0
        self.queue: OrderedDict[str, _Job] = OrderedDict()


class _Running:
    """Run a reader in one process: threads, the blocks that are expected, the latest ones in memory."""

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
        self._released: deque[Expected] = deque()
        self._arranging = False
        self._open: set[Expected] = set()
        self._expected: dict[str, int] = {}
        self._failed: dict[str, BaseException] = {}
        self._memory: OrderedDict[str, bytes] = OrderedDict()

    def read(self, wanted: Wanted) -> bytes:
        with self._changed:
            if wanted.key in self._memory:
                self._memory.move_to_end(wanted.key)
                return self._memory[wanted.key]
            error, job = self._failed.pop(wanted.key, None), self._jobs.get(wanted.key)
            if job is not None and not job.begun:  # behind others in a queue: whoever needs it now fetches it
                with self._undisturbed():
                    for consumer in self._consumers.values():
                        consumer.queue.pop(wanted.key, None)
                self._jobs.pop(wanted.key, None)
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
                    self._failed.pop(wanted.key, None)
                _raise_again(failed)
        content = self._obtain(wanted, ahead=False) if found is None else found
        assert content is not None
        with self._changed:
            self._memory[wanted.key] = content
            while len(self._memory) > _IN_MEMORY:
                self._memory.popitem(last=False)
        return content

    def expect(self, expected: Expected) -> Expected:
        with self._changed:
            with self._undisturbed():
                self._open.add(expected)
                self._consumers.setdefault(expected.consumer, _Consumer()).waiting.append(expected)
            self._arrange()
        return expected

    def release(self, expected: Expected) -> None:
        with self._changed:
            self._released.append(expected)
            self._arrange()

    def _arrange(self) -> None:
        """Let go of what was released, and let threads fetch what waits, in the order of need, as far as there is room."""
        if self._arranging:
            return
        with self._undisturbed():
            while self._released:
                self._let_go(self._released.popleft())
            if self._consumers and not self._cancel.is_set() and time.monotonic() >= self._count_at:
                self._share_with_processes()
            while not self._cancel.is_set() and (waiting := [one for one in self._consumers.values() if one.waiting]):
                if not self._take(min(waiting, key=_size)):  # whoever has least comes first
                    break
            queued = any(consumer.queue for consumer in self._consumers.values())
        while len(self._threads) < min(self._connections, len(self._jobs)):
            name = f"arclight-read-ahead-{len(self._threads)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
        if queued:
            self._changed.notify()  # one thread, which wakes the next: all at once would keep the caller from going on

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Leave alone what is changed here if the garbage collector ends a pass meanwhile: that is let go of the next time."""
        self._arranging = True
        try:
            yield
        finally:
            self._arranging = False

    def _share_with_processes(self) -> None:
        """Find out how much room there is for this process, and give up what it has too much, as when others begin."""
        self._ahead = max(1, self._folder.bound_bytes // _AHEAD_SHARE // self._folder.share_ahead())
        self._count_at = time.monotonic() + _COUNT_S
        while self._expected_bytes > self._ahead:
            most = max(self._consumers.values(), key=_size)
            if len(most.blocks) == 1:
                break
            self._give_up_last(most)

    def _take(self, consumer: _Consumer) -> bool:
        """Let the next block of a consumer be fetched; return False if it has to wait for room."""
        expected = consumer.waiting[0]
        if expected.taken == len(expected.blocks):
            consumer.taken.append(consumer.waiting.popleft())
            return True
        wanted = expected.blocks[expected.taken]
        if wanted.key not in consumer.blocks:
            size = wanted.source.size(wanted.block)
            if not self._make_room(consumer, size):
                return False
            consumer.size_bytes += size
            if wanted.key not in self._expected and wanted.key not in self._jobs:
                self._jobs[wanted.key] = consumer.queue[wanted.key] = _Job(wanted)
            self._expected[wanted.key] = self._expected.get(wanted.key, 0) + 1
        consumer.blocks[wanted.key] = consumer.blocks.get(wanted.key, 0) + 1
        expected.taken += 1
        return True

    def _make_room(self, consumer: _Consumer, size: int) -> bool:
        """Return True if a consumer may take so many bytes: there is room, others have more than their share, or it has no block.

        Others then give up what they need last; it stays in the folder, unless the room is needed, and they take it again later.
        """
        share = self._ahead // len(self._consumers)
        while not (fits := self._expected_bytes + size <= self._ahead) and consumer.size_bytes + size <= share:
            self._give_up_last(max(self._consumers.values(), key=_size))
        return fits or not consumer.size_bytes

    def _give_up_last(self, consumer: _Consumer) -> None:
        while not (consumer.waiting and consumer.waiting[0].taken):
            consumer.waiting.appendleft(consumer.taken.pop())
        self._give_up(consumer, consumer.waiting[0])

    def _let_go(self, expected: Expected) -> None:
        if expected not in self._open:  # it is of before `close`, or was let go of
            return
        self._open.remove(expected)
        consumer = self._consumers[expected.consumer]
        (consumer.taken if expected in consumer.taken else consumer.waiting).remove(expected)
        while expected.taken:
            self._give_up(consumer, expected)
        if not consumer.taken and not consumer.waiting:
            del self._consumers[expected.consumer]

    def _give_up(self, consumer: _Consumer, expected: Expected) -> None:
        """Give up the last block that was taken of what is expected."""
        expected.taken -= 1
        wanted = expected.blocks[expected.taken]
        key = wanted.key
        consumer.blocks[key] -= 1
        if consumer.blocks[key]:
            return
        del consumer.blocks[key]
        consumer.size_bytes -= wanted.source.size(wanted.block)
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
            with self._undisturbed():
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
                found = self._obtain(job.wanted, ahead=True)
            except BaseException as error:  # of whatever kind: it is the reader's of that block, not this thread's
                self._end(job, error)
                job.result.set_exception(error)
            else:
                self._end(job, None)
                job.result.set_result(found)

    def _next_job(self) -> _Job | None:
        """Begin the first job of a queue; consumers take turns. None if there is none."""
        with self._undisturbed():
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
        key = job.wanted.key
        with self._changed:
            self._jobs.pop(key, None)
            if key not in self._expected:
                self._folder.release(key)  # let go of meanwhile
            elif error is not None:
                self._failed[key] = error

    def _obtain(self, wanted: Wanted, *, ahead: bool) -> bytes | None:
        """Return a block, from the folder or fetched; None for one ahead that is there, or has no room yet."""
        source, block, key = wanted
        digest = source.digest(block, self._cancel)  # before the claim: it may need a block itself
        if ahead and self._folder.hold(key):
            return None
        if not ahead and (found := self._from_folder(wanted, digest)) is not None:
            return found
        with self._folder.claim(key, self._patience_s, self._cancel):
            if self._cancel.is_set():
                raise ReadCancelledError(f"{key}: the reader was closed")
            if (found := self._from_folder(wanted, digest)) is not None:  # another process was quicker
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
                    self._folder.give_back(reserved)
                raise
            if reserved is not None:
                self._folder.put(key, reserved, content, hold=ahead)
        return content

    def _from_folder(self, wanted: Wanted, digest: bytes) -> bytes | None:
        found = self._folder.get(wanted.key)
        if found is None or wanted.source.is_intact(found, digest):
            return found
        self._folder.drop(wanted.key)  # torn by a crash, or changed by somebody
        return None


def _size(consumer: _Consumer) -> int:
    return consumer.size_bytes


def _raise_again(error: BaseException) -> NoReturn:
    """Raise an error of another thread here: a new one of its kind, with it as the cause, where that can be made."""
    try:
        told = type(error)(*error.args)
    except Exception:
        raise error from error.__cause__
    raise told from error
