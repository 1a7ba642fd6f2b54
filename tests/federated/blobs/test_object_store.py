"""Blobs in a store that speaks S3, on this machine."""

import hashlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest

from arclight.federated.blobs.object_store import MirroredStore, ObjectStore
from arclight.federated.errors import BlobError, FederatedError, LinkError

BYTES = os.urandom(20_000_001)  # more than one request reads
DIGEST = hashlib.sha256(BYTES).hexdigest()


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    pytest.importorskip("moto", reason="moto[server] speaks S3 in this test: pip install 'arclight-torch[dev]'")
    pytest.importorskip("s3fs", reason="s3fs reaches S3: pip install 'arclight-torch[s3]'")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    dummies = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {**dummies, "AWS_ENDPOINT_URL": endpoint}.items():
            patched.setenv(name, value)
        try:
            deadline = time.monotonic() + 120
            while not _answers(endpoint):
                assert server.poll() is None, "the server ended"
                assert time.monotonic() < deadline, "the server does not answer"
                time.sleep(0.2)
            fsspec.get_filesystem_class("s3").clear_instance_cache()
            fsspec.filesystem("s3").mkdir("bucket")
            yield "s3://bucket/run/blobs"
        finally:
            fsspec.get_filesystem_class("s3").clear_instance_cache()
            server.terminate()
            server.wait(60)


def _answers(endpoint: str) -> bool:
    try:
        urllib.request.urlopen(f"{endpoint}/moto-api/", timeout=60).close()
    except OSError:
        return False
    return True


def test_blobs_in_a_bucket(bucket: str, tmp_path: Path) -> None:
    here, there = ObjectStore(bucket, tmp_path / "here"), ObjectStore(bucket, tmp_path / "there")
    assert list(here) == []
    assert here.size(DIGEST) is None
    here.put(DIGEST, BYTES)
    assert list(there) == [DIGEST]
    assert there.size(DIGEST) == len(BYTES)
    assert b"".join(there.read(DIGEST, 16_777_000, 1000)) == BYTES[16_777_000:16_778_000]
    with ThreadPoolExecutor(3) as pool:
        assert {path.read_bytes() for path in pool.map(lambda _: there.file(DIGEST), range(3))} == {BYTES}
    here.remove(DIGEST)
    assert there.size(DIGEST) is None
    with pytest.raises(BlobError, match="run/blobs"):
        here.file(DIGEST)


def test_a_broken_fetch_goes_on(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ObjectStore(bucket, tmp_path / "here")
    store.put(DIGEST, BYTES)
    other = ObjectStore(bucket, tmp_path / "there")
    with other._cache.receive(DIGEST) as incoming:
        incoming.write([BYTES[:19_000_000]])
    read: list[int] = []
    from arclight.checkpoint.remote import RemotePath

    read_range = RemotePath.read_range
    monkeypatch.setattr(RemotePath, "read_range", lambda self, a, b: read.append(b - a) or read_range(self, a, b))  # type: ignore[func-returns-value]
    assert other.file(DIGEST).read_bytes() == BYTES
    assert read == [len(BYTES) - 19_000_000]


def test_blobs_changed_in_the_bucket_are_detected(bucket: str, tmp_path: Path) -> None:
    system = fsspec.filesystem("s3")
    name = hashlib.sha256(b"the content").hexdigest()
    system.pipe_file(f"bucket/run/blobs/{name}", b"the c0ntent")
    store = ObjectStore(bucket, tmp_path / "here")
    with pytest.raises(BlobError, match="damaged or changed"):
        store.file(name)
    with pytest.raises(BlobError, match="damaged or changed"):
        store.put(DIGEST, BYTES[1:])
    system.rm_file(f"bucket/run/blobs/{name}")


def test_an_unreachable_store_is_reported(bucket: str, tmp_path: Path) -> None:
    with pytest.raises(LinkError, match=r"s3://nosuchbucket.*make it, or correct the address"):
        ObjectStore("s3://nosuchbucket/blobs", tmp_path).put(DIGEST, BYTES)
    with pytest.raises(FederatedError, match="FolderStore"):
        ObjectStore(str(tmp_path), tmp_path)


@pytest.mark.slow
def test_large_blobs_go_up_in_parts(bucket: str, tmp_path: Path) -> None:
    content = BYTES * 6
    digest = hashlib.sha256(content).hexdigest()
    ObjectStore(bucket, tmp_path / "here").put(digest, content)
    assert "-" in fsspec.filesystem("s3").info(f"bucket/run/blobs/{digest}")["ETag"], "it went up in one piece"
    assert ObjectStore(bucket, tmp_path / "there").file(digest).read_bytes() == content


def test_a_mirrored_folder_and_the_bucket_are_one(bucket: str, tmp_path: Path) -> None:
    """The server reads what its nodes put, and they read what it puts."""
    address = "s3://bucket/mirrored"
    server, node = MirroredStore(tmp_path / "server", address), ObjectStore(address, tmp_path / "node")
    content = [os.urandom(1000 + number) for number in range(4)]
    names = [hashlib.sha256(one).hexdigest() for one in content]
    source = tmp_path / "source"
    source.write_bytes(content[0])
    server.adopt(names[0], source)
    assert server.file(names[0]).samefile(source)
    with server.create() as file:
        file.write(content[1])
    server.put(names[2], content[2])
    assert [node.file(name).read_bytes() for name in names[:3]] == content[:3]
    node.put(names[3], content[3])
    assert sorted(server) == sorted(names[:3]), "those that are here"
    assert server.size(names[3]) == len(content[3])
    assert b"".join(server.read(names[3], 5, 10)) == content[3][5:15]
    assert sorted(server) == sorted(names)
    for name in names:
        server.remove(name)
    assert list(node) == []
    assert source.read_bytes() == content[0]
