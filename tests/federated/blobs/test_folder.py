"""A folder of blobs: links, unfinished ones, full disks, several at work in it."""

import errno
import hashlib
import multiprocessing
import os
import resource
import signal
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests import warm

from arclight.federated.blobs import folder
from arclight.federated.blobs.folder import FolderStore
from arclight.federated.blobs.partial_blob import BusyError
from arclight.federated.errors import BlobError

BYTES = os.urandom(3_000_001)
DIGEST = hashlib.sha256(BYTES).hexdigest()


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "blobs")


def leftovers(store: FolderStore) -> list[str]:
    return sorted(
        str(path.relative_to(store.folder))
        for path in store.folder.rglob("*")
        if path.is_file() and path.name != DIGEST
    )


def test_a_file_of_the_same_file_system_is_linked(store: FolderStore, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(BYTES)
    store.put(DIGEST, source)
    assert store.file(DIGEST).samefile(source)
    assert leftovers(store) == []


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no second file system to put a file from")
def test_a_file_of_another_file_system_is_copied_and_verified(store: FolderStore) -> None:
    source = Path(f"/dev/shm/arclight-test-{os.getpid()}")
    try:
        source.write_bytes(BYTES)
        if os.stat(source).st_dev == os.stat(store.folder).st_dev:
            pytest.skip("the test's folder is on /dev/shm too")
        store.put(DIGEST, source)
        assert not store.file(DIGEST).samefile(source)
        source.write_bytes(BYTES[1:])
        with pytest.raises(BlobError, match="damaged or changed"):
            store.put("0" * 64, source)
    finally:
        source.unlink()
    assert store.file(DIGEST).read_bytes() == BYTES
    assert leftovers(store) == []


def test_a_written_file_is_adopted_without_being_read(store: FolderStore, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(BYTES)
    store.adopt(DIGEST, source)
    assert store.file(DIGEST).samefile(source)


def test_a_new_blob_is_named_when_it_is_whole(store: FolderStore) -> None:
    with store.create() as file:
        file.write(BYTES[:1000])
        assert list(store) == []
        file.write(BYTES[1000:])
    assert list(store) == [DIGEST]
    with pytest.raises(ZeroDivisionError), store.create() as file:
        file.write(b"half")
        _ = 1 / 0
    assert list(store) == [DIGEST]
    assert leftovers(store) == []


def test_partial_blobs_are_completed_by_another_process(store: FolderStore) -> None:
    with store.receive(DIGEST) as incoming:
        incoming.write([BYTES[:1_500_000]])
    assert store.size(DIGEST) is None
    again = FolderStore(store.folder)
    assert again.received(DIGEST) == 1_500_000
    with again.receive(DIGEST) as incoming:
        assert incoming.offset == 1_500_000
        incoming.write([BYTES[1_500_000:]])
        assert store.size(DIGEST) is None, "seen before it was verified"
        incoming.finish()
    assert store.file(DIGEST).read_bytes() == BYTES
    assert leftovers(store) == []


def test_damaged_blobs_are_discarded(store: FolderStore) -> None:
    with store.receive(DIGEST) as incoming:
        incoming.write([b"!", BYTES[1:]])
        with pytest.raises(BlobError, match="damaged or changed"):
            incoming.finish()
        assert incoming.offset == 0
    assert store.size(DIGEST) is None
    assert store.received(DIGEST) == 0


def test_one_blob_is_received_once_at_a_time(store: FolderStore) -> None:
    with store.receive(DIGEST) as first:
        first.write([BYTES])
        with pytest.raises(BusyError, match="someone else"):
            store.receive(DIGEST)
        first.finish()
    with store.receive("0" * 64), store.receive("1" * 64):
        pass


def test_many_put_the_same_blob_at_once(store: FolderStore) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: store.put(DIGEST, BYTES), range(8)))
    assert store.file(DIGEST).read_bytes() == BYTES
    assert leftovers(store) == []


def _no_more_than(folder: Path, limit: int, answer: "multiprocessing.Queue[tuple[int | None, str]]") -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    store = FolderStore(folder)
    for attempt in (lambda: store.put(DIGEST, BYTES), lambda: _receive(store)):
        try:
            attempt()
        except OSError as error:
            answer.put((error.errno, str(error)))


def _receive(store: FolderStore) -> None:
    with store.receive(DIGEST) as incoming:
        for start in range(0, len(BYTES), 1 << 20):
            incoming.write([BYTES[start : start + (1 << 20)]])


def test_a_full_disk_is_reported_and_leaves_no_files(store: FolderStore) -> None:
    """A limit on the size of files stands for the disk: a write fails half-way."""
    context = multiprocessing.get_context("fork")
    answer: multiprocessing.Queue[tuple[int | None, str]] = context.Queue()
    process = context.Process(target=_no_more_than, args=(store.folder, 2_500_000, answer))
    process.start()
    told = [answer.get(timeout=60), answer.get(timeout=60)]
    process.join(60)
    for code, message in told:
        assert code == errno.EFBIG
        assert "no room for blob" in message
        assert str(store.folder) in message
    assert store.size(DIGEST) is None
    assert store.received(DIGEST) == 0
    store.put(DIGEST, BYTES)
    assert store.file(DIGEST).read_bytes() == BYTES


def test_a_killed_writer_leaves_nothing_that_stays(store: FolderStore) -> None:
    code = """
        import sys, time
        from arclight.federated.blobs.folder import FolderStore
        store = FolderStore(sys.argv[1])
        with store.create() as file, store.receive("0" * 64) as incoming:
            file.write(b"half"); file._file.flush()
            incoming.write([b"half"])
            print("ready", flush=True)
            time.sleep(100)
    """
    with warm.Program("-c", textwrap.dedent(code), store.folder) as process:
        process.until("ready", 60)
        store.sweep()
        assert len(leftovers(store)) == 2, "what living processes are at work on was removed"
    FolderStore(store.folder)
    assert leftovers(store) == [".partial/" + "0" * 64], "a part of a blob waits for the rest"
    store.sweep(keep_partial_s=3600)
    assert store.received("0" * 64) == 4
    store.sweep()
    assert leftovers(store) == []


def test_a_blob_that_the_disk_has_changed_is_found_out(store: FolderStore) -> None:
    store.put(DIGEST, BYTES)
    store.check(DIGEST)
    with store.file(DIGEST).open("r+b") as file:
        file.seek(17)
        file.write(b"\0\0\0\0")
    with pytest.raises(BlobError, match="look after that disk"):
        store.check(DIGEST)
    assert store.size(DIGEST) is None


def test_cached_blobs_skip_fsync_and_are_verified_after_a_reboot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    monkeypatch.setattr(folder, "running_since", lambda: since)
    other, since = hashlib.sha256(b"other").hexdigest(), "Monday"
    cache = FolderStore(tmp_path, durable="none")
    cache.put(other, b"other")
    with cache.receive(DIGEST) as coming:
        coming.write([BYTES])
        coming.finish()
    FolderStore(tmp_path / "links", durable="none").adopt(DIGEST, cache.file(DIGEST))
    FolderStore(tmp_path / "came", durable="made").put(DIGEST, BYTES)
    assert synced == []
    with cache.file(other).open("r+b") as file:
        file.write(b"\0")
    assert FolderStore(tmp_path, durable="none").size(other) == 5, "this machine has run all the time"
    since = "Tuesday"
    again = FolderStore(tmp_path, durable="none")
    assert (again.size(other), again.size(DIGEST)) == (None, len(BYTES))
    since = ""  # a system that does not say
    with again.file(DIGEST).open("r+b") as file:
        file.write(b"\0")
    assert FolderStore(tmp_path, durable="none").size(DIGEST) is None
    FolderStore(tmp_path / "last").put(DIGEST, BYTES)
    with FolderStore(tmp_path / "made", durable="made").create() as writing:
        assert synced
        synced.clear()
        writing.write(BYTES)
    assert synced
