"""The contract of every blob store."""

import hashlib
import os
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from arclight.federated.blobs import BlobStore
from arclight.federated.blobs.folder import FolderStore
from arclight.federated.blobs.object_store import MirroredStore, ObjectStore
from arclight.federated.blobs.transfer import transfer
from arclight.federated.errors import BlobError

BYTES = bytes(range(256)) * 9000 + b"the end"  # more than two chunks, and no whole number of them


def named(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


STORES: dict[str, Callable[[Path], BlobStore]] = {
    "folder": lambda folder: FolderStore(folder / "blobs"),
    "object store": lambda folder: ObjectStore(f"memory://{uuid.uuid4().hex}/blobs", folder / "cache"),
    "mirrored": lambda folder: MirroredStore(folder / "blobs", f"memory://{uuid.uuid4().hex}/blobs"),
}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    return STORES[request.param](tmp_path)


@pytest.mark.parametrize("content", [BYTES, b""], ids=["long", "empty"])
@pytest.mark.parametrize("as_file", [True, False])
def test_put_blobs_are_stored(store: BlobStore, content: bytes, as_file: bool, tmp_path: Path) -> None:
    source: Path | bytes = content
    if as_file:
        source = tmp_path / "source"
        source.write_bytes(content)
    assert store.size(named(content)) is None
    store.put(named(content), source)
    store.put(named(content), source)  # twice is once
    assert store.size(named(content)) == len(content)
    assert b"".join(store.read(named(content))) == content
    assert store.file(named(content)).read_bytes() == content


@pytest.mark.parametrize(("offset", "length"), [(0, 5), (7, None), (1 << 20, 1 << 20), (len(BYTES) - 3, 3), (5, 0)])
def test_a_part_is_read(store: BlobStore, offset: int, length: int | None) -> None:
    store.put(named(BYTES), BYTES)
    expected = BYTES[offset:] if length is None else BYTES[offset : offset + length]
    assert b"".join(store.read(named(BYTES), offset, length)) == expected


def test_a_part_beyond_the_end_is_missed(store: BlobStore) -> None:
    store.put(named(BYTES), BYTES)
    with pytest.raises(BlobError):
        b"".join(store.read(named(BYTES), len(BYTES) - 3, 4))


@pytest.mark.parametrize("as_file", [True, False])
def test_other_content_is_refused_and_not_seen(store: BlobStore, as_file: bool, tmp_path: Path) -> None:
    source: Path | bytes = BYTES[:-1]
    if as_file:
        source = tmp_path / "source"
        source.write_bytes(BYTES[:-1])
    with pytest.raises(BlobError, match="damaged or changed"):
        store.put(named(BYTES), source)
    assert store.size(named(BYTES)) is None
    assert store.size(named(BYTES[:-1])) is None


def test_missing_blobs_are_named(store: BlobStore) -> None:
    with pytest.raises(BlobError, match=named(b"x")[:12]):
        b"".join(store.read(named(b"x")))
    with pytest.raises(BlobError, match=named(b"x")[:12]):
        store.file(named(b"x"))
    store.remove(named(b"x"))


def test_removed_blobs_are_missing(store: BlobStore) -> None:
    store.put(named(BYTES), BYTES)
    store.file(named(BYTES))
    store.remove(named(BYTES))
    assert store.size(named(BYTES)) is None
    with pytest.raises(BlobError):
        store.file(named(BYTES))


def test_forgotten_blobs_stay_stored(store: BlobStore) -> None:
    store.put(named(BYTES), BYTES)
    store.forget(named(BYTES))
    store.forget(named(b"x"))
    assert store.size(named(BYTES)) == len(BYTES)
    assert store.file(named(BYTES)).read_bytes() == BYTES


def test_transfer_copies_several_blobs_between_stores(store: BlobStore, tmp_path: Path) -> None:
    contents = [bytes([number]) * 100_000 for number in range(9)]
    for content in contents:
        store.put(named(content), content)
    target = FolderStore(tmp_path / "target")
    target.put(named(contents[3]), contents[3])
    transfer(map(named, contents), store, target)
    assert [target.file(named(content)).read_bytes() for content in contents] == contents
    with pytest.raises(BlobError, match=named(b"x")[:12]):
        transfer([named(b"x"), named(BYTES)], store, target)


@pytest.mark.parametrize("bad", ["../../etc/passwd", "", "A" * 64, "a" * 63, "a" * 65, "a" * 63 + "\n", "/" + "a" * 63])
def test_invalid_digests_are_refused(store: BlobStore, bad: str) -> None:
    for attempt in (
        store.size,
        store.file,
        store.remove,
        lambda name: list(store.read(name)),
        lambda n: store.put(n, b""),
    ):
        with pytest.raises(BlobError, match="named by its SHA-256"):
            attempt(bad)


def test_blobs_outlive_their_source_file(store: BlobStore, tmp_path: Path) -> None:
    """A file's blob outlives the file's name."""
    source = tmp_path / "source"
    source.write_bytes(BYTES)
    store.put(named(BYTES), source)
    os.replace(_other(tmp_path), source)
    assert b"".join(store.read(named(BYTES))) == BYTES
    source.unlink()
    assert store.file(named(BYTES)).read_bytes() == BYTES


def _other(folder: Path) -> Path:
    path = folder / "other"
    path.write_bytes(b"other")
    return path
