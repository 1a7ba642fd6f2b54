"""The contract of every link, whatever its transport."""

import hashlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.federated.fakes import EchoServer, TemporaryStore

from arclight.fabric.serving.certificates import make_certificate
from arclight.federated.blobs.folder import FolderStore
from arclight.federated.blobs.object_store import ObjectStore
from arclight.federated.blobs.transfer import transfer
from arclight.federated.errors import BlobError, ProtocolError, SessionError
from arclight.federated.protocol import (
    ActiveWork,
    Close,
    Entry,
    Heartbeat,
    Join,
    Manifest,
    Receipt,
    Update,
    Wait,
    Welcome,
    WorkRequest,
)
from arclight.federated.transports.http_client import HttpLink
from arclight.federated.transports.http_server import HttpServer, listen
from arclight.federated.transports.keys import NodeKey
from arclight.federated.transports.link import InProcessLink, Link
from arclight.federated.transports.settings import Listening

BYTES = os.urandom(5_000_000)
DIGEST = hashlib.sha256(BYTES).hexdigest()


@dataclass
class Pair:
    link: Link
    server: EchoServer


@contextmanager
def in_process(folder: Path) -> Iterator[Pair]:
    server = EchoServer(FolderStore(folder / "server"))
    yield Pair(InProcessLink(server), server)


@contextmanager
def http(folder: Path) -> Iterator[Pair]:
    server = EchoServer(FolderStore(folder / "server"))
    with HttpServer(server) as served:
        link = HttpLink(served.address, folder / "cache", retry_timeout_s=5)
        yield Pair(link, server)
        link.close()


@contextmanager
def http_into_memory(folder: Path) -> Iterator[Pair]:
    """The server's store is no folder: blobs come in elsewhere first."""
    server = EchoServer(TemporaryStore())
    with HttpServer(server) as served:
        link = HttpLink(served.address, folder / "cache", retry_timeout_s=5)
        yield Pair(link, server)
        link.close()


@contextmanager
def https(folder: Path) -> Iterator[Pair]:
    """As off loopback: a pinned certificate, and a node with a key."""
    server = EchoServer(FolderStore(folder / "server"))
    made = make_certificate(folder / "keys", ["localhost", "127.0.0.1"], extra="federated")
    key = NodeKey.make(folder / "node.key")
    (folder / "nodes").write_text(key.line("a", ["left", "right"]) + "  # the first node\n")
    listening = Listening(certificate=made.certificate, private_key=made.private_key, nodes=folder / "nodes")
    with HttpServer(server, listening) as served:
        link = HttpLink(served.address, folder / "cache", key=key, fingerprint=made.fingerprint, retry_timeout_s=5)
        yield Pair(link, server)
        link.close()


@contextmanager
def http_and_object_store(folder: Path) -> Iterator[Pair]:
    """Messages go to the server, blobs to a third place."""
    address = f"memory://{uuid.uuid4().hex}/blobs"
    server = EchoServer(ObjectStore(address, folder / "server"))
    with HttpServer(server) as served:
        link = HttpLink(
            served.address, folder / "other", blobs=ObjectStore(address, folder / "cache"), retry_timeout_s=5
        )
        yield Pair(link, server)
        link.close()


LINKS = {
    "in process": in_process,
    "http": http,
    "http into memory": http_into_memory,
    "https": https,
    "object store": http_and_object_store,
}


@pytest.fixture(params=LINKS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield stack.enter_context(LINKS[request.param](tmp_path))


def join(link: Link) -> str:
    welcome = link.send(Join(node="a", clients=("left", "right")))
    assert isinstance(welcome, Welcome)
    return welcome.session


def test_a_node_joins_and_is_heard(pair: Pair) -> None:
    session = join(pair.link)
    beat = Heartbeat(node="a", session=session, active_work=(ActiveWork(client="left", round=1, steps=7, loss=0.25),))
    assert pair.link.send(beat) == Receipt(accepted=True)
    assert pair.server.received[-1] == beat
    assert pair.link.send(WorkRequest(node="a", session=session, hold_s=0.01)) == Wait(
        retry_after_s=0.0, waiting_for="nothing"
    )


def test_held_work_requests_do_not_block_other_messages(pair: Pair) -> None:
    session = join(pair.link)
    with ThreadPoolExecutor(3) as pool:
        held = [pool.submit(pair.link.send, WorkRequest(node="a", session=session, hold_s=60)) for _ in range(3)]
        pair.server.wait_until_held(3)
        assert pair.link.send(Heartbeat(node="a", session=session)) == Receipt(accepted=True)
        assert pair.link.blobs.size(DIGEST) is None
        assert not any(ask.done() for ask in held)
        pair.server.wake()
        assert [ask.result(timeout=30) for ask in held] == [Close(reason="woken")] * 3


def test_blobs_go_both_ways(pair: Pair, tmp_path: Path) -> None:
    session = join(pair.link)
    source = tmp_path / "source"
    source.write_bytes(BYTES)
    pair.link.blobs.put(DIGEST, source)
    pair.link.blobs.put(DIGEST, BYTES)  # twice is once
    assert pair.link.blobs.size(DIGEST) == len(BYTES)
    assert b"".join(pair.server.blobs.read(DIGEST)) == BYTES
    assert pair.link.blobs.file(DIGEST).read_bytes() == BYTES
    empty = hashlib.sha256(b"").hexdigest()
    pair.link.blobs.put(empty, b"")
    assert pair.link.blobs.file(empty).read_bytes() == b""
    assert b"".join(pair.link.blobs.read(empty)) == b""
    manifest = Manifest(
        kind="update", tensors={"w": Entry(blob=DIGEST, dtype="F32", shape=(2,))}, blobs={DIGEST: len(BYTES)}
    )
    update = Update(
        node="a", session=session, client="left", round=3, manifest=manifest, samples=4, tokens=0, steps=5, seconds=0.5
    )
    assert pair.link.send(update) == Receipt(accepted=True, committed=3)
    assert pair.server.received[-1] == update


def test_fetched_blobs_can_be_forgotten_locally(pair: Pair, tmp_path: Path) -> None:
    join(pair.link)
    pair.server.blobs.put(DIGEST, BYTES)
    target = FolderStore(tmp_path / "target")
    transfer([DIGEST], pair.link.blobs, target)
    assert target.file(DIGEST).read_bytes() == BYTES
    assert not (tmp_path / "cache" / DIGEST).exists()
    assert b"".join(pair.server.blobs.read(DIGEST)) == BYTES


@pytest.mark.parametrize(("offset", "length"), [(0, 5), (7, None), (1 << 20, 1 << 20), (len(BYTES) - 3, 3), (5, 0)])
def test_a_part_of_a_blob_is_read(pair: Pair, offset: int, length: int | None) -> None:
    join(pair.link)
    pair.server.blobs.put(DIGEST, BYTES)
    expected = BYTES[offset:] if length is None else BYTES[offset : offset + length]
    assert b"".join(pair.link.blobs.read(DIGEST, offset, length)) == expected


def test_bytes_of_another_name_are_refused(pair: Pair) -> None:
    join(pair.link)
    with pytest.raises(BlobError, match=DIGEST[:12]):
        pair.link.blobs.put(DIGEST, BYTES[:-1])
    assert pair.server.blobs.size(DIGEST) is None
    pair.link.blobs.put(DIGEST, BYTES)
    assert pair.server.blobs.size(DIGEST) == len(BYTES)


def test_a_missing_blob_is_reported(pair: Pair) -> None:
    join(pair.link)
    with pytest.raises(BlobError, match=DIGEST[:12]):
        pair.link.blobs.file(DIGEST)
    with pytest.raises(BlobError, match=DIGEST[:12]):
        b"".join(pair.link.blobs.read(DIGEST))
    for bad in ("../../etc/passwd", "..%2f..%2fetc%2fpasswd", DIGEST.upper()):
        with pytest.raises(BlobError, match="named by its SHA-256"):
            pair.link.blobs.file(bad)


def test_several_put_and_get_one_blob_at_once(pair: Pair) -> None:
    join(pair.link)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: pair.link.blobs.put(DIGEST, BYTES), range(4)))
        files = list(pool.map(lambda _: pair.link.blobs.file(DIGEST), range(4)))
    assert {file.read_bytes() for file in files} == {BYTES}


def test_a_node_joins_again_if_the_server_lost_its_session(pair: Pair) -> None:
    session = join(pair.link)
    pair.server.sessions.clear()
    with pytest.raises(SessionError, match="join again"):
        pair.link.send(Heartbeat(node="a", session=session))
    again = join(pair.link)
    assert again != session
    assert pair.link.send(Heartbeat(node="a", session=again)) == Receipt(accepted=True)


def test_a_message_of_another_protocol_version_is_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    session = join(pair.link)
    monkeypatch.setattr(
        Heartbeat, "to_json", lambda self: f'{{"kind": "beat", "version": 0, "node": "a", "session": "{session}"}}'
    )
    with pytest.raises(ProtocolError, match="version 0, this one 3"):
        pair.link.send(Heartbeat(node="a", session=session))


@pytest.mark.parametrize("over", [http, https])
def test_a_server_stops_without_a_complaint_while_nodes_hold_their_connections(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, over: Callable[[Path], AbstractContextManager[Pair]]
) -> None:
    with ExitStack() as stack:
        pair = stack.enter_context(over(tmp_path))
        join(pair.link)
        close, pair.link.close = pair.link.close, lambda: None  # type: ignore[method-assign]
    close()
    assert [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


def test_closing_leaves_no_threads_running(tmp_path: Path) -> None:
    before = {thread.name for thread in threading.enumerate()}
    with http(tmp_path) as pair:
        join(pair.link)
    deadline = time.monotonic() + 120
    while left := {thread.name for thread in threading.enumerate()} - before:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def test_answers_on_kept_connections_do_not_wait_for_acknowledgements():
    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
