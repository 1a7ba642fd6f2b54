"""Lines that break, bytes that change, processes that are killed, disks that are full: real sockets, real processes."""

import errno
import hashlib
import os
import random
import socket
import subprocess
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests import warm
from tests.federated.fakes import EchoServer, Quadratic
from tests.federated.transports.serving import Line, Serving, wait_until
from tests.waiting import patiently

from arclight.fabric.serving.certificates import make_certificate
from arclight.federated.blobs.folder import FolderStore
from arclight.federated.clients.client import Client
from arclight.federated.clients.node import Node
from arclight.federated.errors import BlobError, LinkError, SessionError
from arclight.federated.protocol import Heartbeat, Join, Receipt, Welcome
from arclight.federated.transports import http_client
from arclight.federated.transports.http_client import HttpLink
from arclight.federated.transports.http_server import HttpServer
from arclight.federated.transports.keys import NodeKey

BYTES = os.urandom(6_000_000)
DIGEST = hashlib.sha256(BYTES).hexdigest()
SLACK = 1_500_000
"""Bytes that may be sent twice for one break: what was in buffers, and headers."""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "server")


@pytest.fixture
def line(store: FolderStore, stack: ExitStack) -> Line:
    """To a server in this process."""
    served = stack.enter_context(HttpServer(EchoServer(store)))
    line = Line(served.port)
    stack.callback(line.close)
    return line


@pytest.fixture
def link(line: Line, tmp_path: Path, stack: ExitStack) -> HttpLink:
    link = HttpLink(line.address, tmp_path / "cache", retry_timeout_s=20)
    stack.callback(link.close)
    link.send(Join(node="a", clients=()))
    line.up = line.down = 0
    return link


def cut_at(line: Line, up: bool, *places: int) -> None:
    """Break the connection when so many bytes have gone one way, once for each place."""
    left = list(places)

    def change(goes_up: bool, before: int, chunk: bytes) -> bytes | None:
        if goes_up == up and left and before + len(chunk) > left[0]:
            left.pop(0)
            return None
        return chunk

    line.change = change


@pytest.mark.parametrize("part", [32 << 20, 700_000])
def test_a_broken_upload_goes_on(
    line: Line, link: HttpLink, store: FolderStore, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_client, "PART", part)
    cut_at(line, True, 2_000_000, 4_500_000, 5_500_000)
    link.blobs.put(DIGEST, BYTES)
    assert store.file(DIGEST).read_bytes() == BYTES
    assert len(BYTES) < line.up < len(BYTES) + 3 * SLACK, "it began anew"
    assert line.connections >= 4


def test_parts_are_hashed_as_they_come(link: HttpLink, store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server does not read again what it has, for each part; and lets go of what nobody goes on with."""
    monkeypatch.setattr(http_client, "PART", 500_000)
    begun: list[str] = []
    receive = FolderStore.receive
    monkeypatch.setattr(FolderStore, "receive", lambda self, digest: begun.append(digest) or receive(self, digest))  # type: ignore[func-returns-value]
    link.blobs.put(DIGEST, BYTES)
    assert store.file(DIGEST).read_bytes() == BYTES
    assert begun == [DIGEST]
    other = hashlib.sha256(BYTES[:-1]).hexdigest()
    link.request(
        "PUT",
        f"/v1/blobs/{other}",
        body=BYTES[:1000],
        headers={"content-range": f"bytes 0-999/{len(BYTES) - 1}"},
        then=lambda response: None,
    )
    link.blobs.put(other, BYTES[:-1])
    assert begun == [DIGEST, other]


def test_a_broken_download_goes_on(line: Line, link: HttpLink, store: FolderStore) -> None:
    store.put(DIGEST, BYTES)
    cut_at(line, False, 2_000_000, 4_500_000, 5_500_000)
    assert link.blobs.file(DIGEST).read_bytes() == BYTES
    assert len(BYTES) < line.down < len(BYTES) + 3 * 200_000, "it began anew"


def test_a_broken_read_goes_on(line: Line, link: HttpLink, store: FolderStore) -> None:
    store.put(DIGEST, BYTES)
    cut_at(line, False, 2_500_000, 4_500_000)
    assert b"".join(link.blobs.read(DIGEST, 11, 5_500_000)) == BYTES[11:5_500_011]


def test_an_answer_that_is_lost_is_asked_for_again(line: Line, link: HttpLink) -> None:
    session = _session(link)
    lost: list[bytes] = []

    def change(up: bool, before: int, chunk: bytes) -> bytes | None:
        if up or lost:
            return chunk
        lost.append(chunk)
        return None

    line.change = change
    assert link.send(Heartbeat(node="a", session=session)) == Receipt(accepted=True)
    assert lost


def _session(link: HttpLink) -> str:
    welcome = link.send(Join(node="a", clients=()))
    assert isinstance(welcome, Welcome)
    return welcome.session


def test_a_message_of_an_old_session_is_refused(link: HttpLink) -> None:
    """One thread of a node joins again while another still speaks."""
    former, newest = _session(link), _session(link)
    with pytest.raises(SessionError, match="join again"):
        link.send(Heartbeat(node="a", session=former))
    assert link.send(Heartbeat(node="a", session=newest)) == Receipt(accepted=True)


def test_a_closed_link_stays_closed(link: HttpLink) -> None:
    session = _session(link)
    link.close()
    link.close()
    with pytest.raises(LinkError, match="was closed"):
        link.send(Heartbeat(node="a", session=session))


@pytest.mark.parametrize("up", [True, False], ids=["up", "down"])
def test_bytes_that_change_once_are_sent_again(line: Line, link: HttpLink, store: FolderStore, up: bool) -> None:
    changed = falsify(line, up, times=1)
    _transfer(link, store, up)
    assert store.file(DIGEST).read_bytes() == BYTES
    assert link.blobs.file(DIGEST).read_bytes() == BYTES
    assert changed == [1]


@pytest.mark.parametrize("up", [True, False], ids=["up", "down"])
def test_bytes_that_always_change_are_given_up(line: Line, link: HttpLink, store: FolderStore, up: bool) -> None:
    falsify(line, up, times=1000)
    with pytest.raises(BlobError, match=DIGEST[:12]):
        _transfer(link, store, up)
    assert store.size(DIGEST) is None if up else not list((store.folder.parent / "cache").glob("[0-9a-f]*"))


def _transfer(link: HttpLink, store: FolderStore, up: bool) -> None:
    if up:
        link.blobs.put(DIGEST, BYTES)
    else:
        store.put(DIGEST, BYTES)
        link.blobs.file(DIGEST)


def falsify(line: Line, up: bool, times: int) -> list[int]:
    """Turn a bit in large chunks, which are of bodies."""
    done = [0]

    def change(goes_up: bool, before: int, chunk: bytes) -> bytes:
        if goes_up == up and len(chunk) == 16384 and done[0] < times:
            done[0] += 1
            return chunk[:9000] + bytes([chunk[9000] ^ 1]) + chunk[9001:]
        return chunk

    line.change = change
    return done


def test_a_server_that_is_not_there_is_named_with_how_long_it_was_tried(tmp_path: Path, line: Line) -> None:
    line.change = lambda up, before, chunk: None
    drawn = random.getstate()

    def check(seconds: float) -> None:
        link, before = HttpLink(line.address, tmp_path / f"{seconds}", retry_timeout_s=seconds), line.connections
        with pytest.raises(
            LinkError, match=rf"{line.address} did not answer 'join' within \d+\.\d s .*see that the server runs"
        ):
            link.send(Join(node="a", clients=()))
        link.close()
        assert 3 <= line.connections - before <= 40 * seconds, "tried too seldom, or without a pause"

    patiently(check, 1, 10)
    assert random.getstate() == drawn, "pauses are drawn from the generator that training draws data from"


def test_a_stopping_node_does_not_wait_for_a_server_that_is_away(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    link = HttpLink(f"http://127.0.0.1:{port}", tmp_path / "cache", retry_timeout_s=300.0)
    node = Node(link, [Client("a", learner=lambda _: Quadratic(1.0))], tmp_path / "node", "n")
    thread = threading.Thread(target=node.run, daemon=True)
    thread.start()
    time.sleep(3)  # attempts are seconds apart by now
    node.stop()
    thread.join(30)
    assert not thread.is_alive(), "it tries for its 300 s"
    assert node.closed == "the node was told to stop"
    link.close()


def test_a_server_that_comes_late_is_waited_for(tmp_path: Path, stack: ExitStack) -> None:
    line = Line(1)  # nobody listens there
    stack.callback(line.close)
    link = HttpLink(line.address, tmp_path / "cache", retry_timeout_s=60)
    with ThreadPoolExecutor(1) as pool:
        welcome = pool.submit(link.send, Join(node="a", clients=()))
        wait_until(lambda: line.connections >= 2, "attempts")
        assert not welcome.done()
        line.target = stack.enter_context(HttpServer(EchoServer(FolderStore(tmp_path / "server")))).port
        assert isinstance(welcome.result(60), Welcome)
    link.close()


def test_a_server_killed_while_it_receives_goes_on_from_there(tmp_path: Path, stack: ExitStack) -> None:
    folder = FolderStore(tmp_path / "server")
    first = Serving(folder.folder)
    line = Line(first.port)
    stack.callback(line.close)
    link = HttpLink(line.address, tmp_path / "cache", retry_timeout_s=60)
    _session(link)
    line.rate = 8e6
    outcome: list[BaseException | None] = []

    def put() -> None:
        while True:
            try:
                link.blobs.put(DIGEST, BYTES)
                outcome.append(None)
                return
            except SessionError:  # as a node does: the new process knows nobody yet
                _session(link)
            except BaseException as error:
                outcome.append(error)
                raise

    thread = threading.Thread(target=put)
    thread.start()
    wait_until(lambda: folder.received(DIGEST) >= 3_000_000, "half of the blob")
    first.kill()
    kept, sent = folder.received(DIGEST), line.up
    assert 3_000_000 <= kept < len(BYTES)
    second = Serving(folder.folder, port=0)
    stack.callback(second.close)
    line.rate, line.target = None, second.port
    thread.join(60)
    assert outcome == [None]
    assert folder.file(DIGEST).read_bytes() == BYTES
    assert line.up - sent < len(BYTES) - kept + 100_000, "the new process did not go on from what the killed one had"
    link.close()


def test_a_node_killed_while_it_sends_goes_on_from_there(
    line: Line, link: HttpLink, store: FolderStore, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.write_bytes(BYTES)
    code = """
        import sys
        from pathlib import Path
        from arclight.federated.protocol import Join
        from arclight.federated.transports.http_client import HttpLink
        link = HttpLink(sys.argv[1], Path(sys.argv[2]))
        link.send(Join(node="b", clients=()))
        link.blobs.put(sys.argv[3], Path(sys.argv[4]))
    """
    line.rate = 8e6
    with warm.Program("-c", textwrap.dedent(code), line.address, tmp_path / "other", DIGEST, source):
        wait_until(lambda: store.received(DIGEST) >= 3_000_000, "half of the blob", 60)
    line.rate, sent = None, line.up
    link.blobs.put(DIGEST, source)
    assert store.file(DIGEST).read_bytes() == BYTES
    assert line.up - sent < 3_100_000, "it began anew"


def test_a_full_disk_of_the_server_is_reported_and_uploads_resume_with_space(tmp_path: Path, stack: ExitStack) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True, check=False
    ).returncode:
        pytest.skip("a small file system cannot be mounted here")
    stack.callback(subprocess.run, ["umount", folder], check=True)
    store = FolderStore(folder / "blobs")
    served = stack.enter_context(HttpServer(EchoServer(store)))
    link = HttpLink(served.address, tmp_path / "cache", retry_timeout_s=5)
    session = _session(link)
    with pytest.raises(OSError, match="no room for blob") as told:
        link.blobs.put(DIGEST, BYTES)
    assert told.value.errno == errno.ENOSPC
    assert served.address in str(told.value)
    assert store.received(DIGEST) == 0
    assert link.send(Heartbeat(node="a", session=session)) == Receipt(accepted=True)
    small = hashlib.sha256(BYTES[:1_000_000]).hexdigest()
    link.blobs.put(small, BYTES[:1_000_000])
    subprocess.run(["mount", "-o", "remount,size=16m", folder], check=True)
    link.blobs.put(DIGEST, BYTES)
    assert store.file(DIGEST).read_bytes() == BYTES
    link.close()


def test_a_full_disk_of_the_node_is_reported_and_downloads_resume_with_space(
    line: Line, link: HttpLink, store: FolderStore, tmp_path: Path, stack: ExitStack
) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True, check=False
    ).returncode:
        pytest.skip("a small file system cannot be mounted here")
    stack.callback(subprocess.run, ["umount", folder], check=True)
    node = HttpLink(line.address, folder / "cache", retry_timeout_s=5)
    _session(node)
    store.put(DIGEST, BYTES)
    with pytest.raises(OSError, match="no room for blob") as told:
        node.blobs.file(DIGEST)
    assert told.value.errno == errno.ENOSPC
    assert FolderStore(folder / "cache").received(DIGEST) == 0
    subprocess.run(["mount", "-o", "remount,size=16m", folder], check=True)
    assert node.blobs.file(DIGEST).read_bytes() == BYTES
    node.close()


@pytest.mark.slow
def test_a_node_survives_a_network_partition(tmp_path: Path, stack: ExitStack) -> None:
    """Packets are dropped, without resets or refusals. Another machine, so with TLS and a registered node."""
    name = f"arc{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        pytest.skip("network namespaces cannot be made here")
    stack.callback(subprocess.run, ["ip", "netns", "delete", name], check=True)

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    ip("link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b", "netns", name)
    ip("address", "add", "10.213.7.1/30", "dev", f"{name}a")
    ip("link", "set", f"{name}a", "up")
    ip("-n", name, "address", "add", "10.213.7.2/30", "dev", f"{name}b")
    ip("-n", name, "link", "set", f"{name}b", "up")
    subprocess.run(
        ["tc", "qdisc", "add", "dev", f"{name}a", "root", "tbf", "rate", "80mbit", "burst", "64kb", "latency", "50ms"],
        check=False,
    )  # slow enough to be caught half-way, where the kernel can
    made = make_certificate(tmp_path / "keys", ["10.213.7.2"], extra="federated")
    key = NodeKey.make(tmp_path / "node.key")
    (tmp_path / "nodes").write_text(key.line("a") + "\n")
    store = FolderStore(tmp_path / "server")
    keys = (made.certificate, made.private_key, tmp_path / "nodes")
    server = Serving(store.folder, "10.213.7.2", 0, keys, before=["ip", "netns", "exec", name])
    stack.callback(server.close)
    link = HttpLink(server.address, tmp_path / "cache", key=key, cafile=made.certificate, retry_timeout_s=120)
    stack.callback(link.close)
    _session(link)
    content = os.urandom(40_000_000)
    digest = hashlib.sha256(content).hexdigest()
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(link.blobs.put, digest, content)
        wait_until(lambda: store.received(digest) > 1_000_000, "the first bytes")
        ip("link", "set", f"{name}a", "down")
        before = store.received(digest)
        assert not sent.done()
        time.sleep(2)
        assert not sent.done(), "nothing was cut"
        ip("link", "set", f"{name}a", "up")
        sent.result(100)
    assert before < len(content)
    assert store.file(digest).read_bytes() == content
