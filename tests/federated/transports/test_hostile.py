"""Malformed requests are refused with a reason, lose nothing, and the server goes on."""

import errno
import hashlib
import http.client
import json
import os
import select
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import pytest
from tests.federated.fakes import EchoServer

from arclight.fabric.serving.certificates import make_certificate
from arclight.federated.blobs.folder import FolderStore
from arclight.federated.blobs.partial_blob import PartialBlob
from arclight.federated.protocol import Heartbeat, Join, Message, Wait, Welcome, WorkRequest, read
from arclight.federated.transports.http_server import HttpServer
from arclight.federated.transports.settings import Limits, Listening

BYTES = os.urandom(300_000)
DIGEST = hashlib.sha256(BYTES).hexdigest()
LIMITS = Limits(message_bytes=100_000, blob_bytes=1_000_000, uploads=2, held=2, slowest=1000)
IMPATIENT = replace(LIMITS, silence=0.8)
"""For the tests of silence alone: on a busy machine a good request may take as long to begin."""


@dataclass
class Running:
    port: int
    store: FolderStore
    server: EchoServer
    token: str = ""

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        token: str | None = None,
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        token = self.token if token is None else token
        auth = {"authorization": f"Bearer {token}"} if token else {}
        try:
            with suppress(BrokenPipeError, ConnectionResetError):  # it answers without having read all
                connection.request(method, path, body, auth | (headers or {}))
            response = connection.getresponse()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
        finally:
            connection.close()

    def say(self, message: Message) -> Message:
        """Send again, as nodes do, what was cut off before it began."""
        for _ in range(9):
            with suppress(http.client.RemoteDisconnected):
                return self._say(message)
        return self._say(message)

    def _say(self, message: Message) -> Message:
        status, _, body = self.ask("POST", "/v1/message", message.to_json().encode())
        assert status == 200, body
        return read(body)

    def head(self, method: str, path: str, length: int | None = None, *more: str) -> bytes:
        """A request up to its body, for bodies that no client would send."""
        said = ["host: x", f"authorization: Bearer {self.token}", *more]
        said += [] if length is None else [f"content-length: {length}"]
        return "\r\n".join([f"{method} {path} HTTP/1.1", *said, "", ""]).encode()

    def raw(self, *chunks: bytes, pause: float = 0.0, until: float = 10.0) -> bytes:
        """Send bytes and return the answer until the server closes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=until) as line:
            back = b""
            try:
                for chunk in chunks:
                    line.sendall(chunk)
                    if select.select([line], [], [], pause)[0]:
                        break  # it has answered already
                while came := line.recv(65536):
                    back += came
            except (ConnectionResetError, BrokenPipeError):
                pass
            return back


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    yield from served(tmp_path, LIMITS)


@pytest.fixture
def impatient(tmp_path: Path) -> Iterator[Running]:
    yield from served(tmp_path, IMPATIENT)


def served(tmp_path: Path, limits: Limits) -> Iterator[Running]:
    store = FolderStore(tmp_path / "inside" / "blobs")
    server = EchoServer(store)
    with HttpServer(server, Listening(limits=limits)) as served:
        made = Running(served.port, store, server)
        welcome = made.say(Join(node="a", clients=("a",)))
        assert isinstance(welcome, Welcome)
        made.token = welcome.session
        yield made
        assert made.say(Heartbeat(node="a", session=made.token)).to_json(), "the server does not answer any more"
        outside = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_relative_to(store.folder)]
        assert outside == [], "something was written outside of the store"


def told(body: bytes) -> str:
    return str(json.loads(body)["error"])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "is not a message"),
        (b"\x00\xff\xfe garbage", "is not a message"),
        (b"[" * 50_000, "is not a message"),
        (b"[1, 2]", "is not a message"),
        (b'{"kind": "heartbeat"}', "is not a message"),
        (b'{"kind": "heartbeat", "version": 7}', "version 7, this one 3"),
        (b'{"kind": "boo", "version": 3}', "no message 'boo'"),
        (b'{"kind": "heartbeat", "version": 3, "node": 3, "session": "x"}', "invalid message"),
        (
            b'{"kind": "heartbeat", "version": 3, "node": "a", "session": "x", "steps": {"a": 1e400}}',
            "is NaN or infinite",
        ),
        (b'{"kind": "workrequest", "version": 3, "node": "a", "session": "x", "hold_s": NaN}', "is NaN or infinite"),
        (
            b'{"kind": "heartbeat", "version": 3, "node": "a", "session": "x", "steps": {"a": 9223372036854775808}}',
            "whole numbers",
        ),
        (b'{"kind": "heartbeat", "version": 3, "steps": {"a": 1' + b"0" * 5000 + b"}}", "whole numbers"),
    ],
)
def test_invalid_messages_are_refused(running: Running, body: bytes, words: str) -> None:
    status, _, answer = running.ask("POST", "/v1/message", body)
    assert (status, words in told(answer)) == (400, True), answer
    assert len(running.server.received) == 1


def test_messages_that_are_too_large(running: Running) -> None:
    status, _, answer = running.ask("POST", "/v1/message", b" " * (LIMITS.message_bytes + 1))
    assert status == 413
    assert str(LIMITS.message_bytes) in told(answer)
    head = f"POST /v1/message HTTP/1.1\r\nhost: x\r\ncontent-length: {10**15}\r\n\r\n".encode()
    assert running.raw(head).startswith(b"HTTP/1.1 413"), "nothing of it was waited for"


def test_bodies_without_a_length(running: Running) -> None:
    headers = {"transfer-encoding": "chunked"}
    for method, path in (("POST", "/v1/message"), ("PUT", f"/v1/blobs/{DIGEST}")):
        status, _, _ = running.ask(method, path, b"3\r\nabc\r\n0\r\n\r\n", headers)
        assert status == 411


@pytest.mark.parametrize(
    "text",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        b"GET\r\n\r\n",
        b"A" * 200_000,
        b"PUT /v1/blobs/" + b"a" * 64 + b" HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\nhello",
        b"PUT /v1/blobs/" + b"a" * 64 + b" HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        b"POST /v1/message HTTP/1.1\r\nhost: x\r\ncontent-length: five\r\n\r\n",
    ],
)
def test_invalid_http_is_refused(running: Running, text: bytes) -> None:
    assert running.raw(text).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/blobs/../../../../etc/passwd",
        "/v1/blobs/%2e%2e%2f%2e%2e%2fescaped",
        "/v1/blobs//etc/passwd",
        f"/v1/blobs/{'a' * 63}",
        f"/v1/blobs/{'A' * 64}",
        f"/v1/blobs/{'a' * 64}%00",
        f"/v1/blobs/.partial/{'a' * 64}",
    ],
)
def test_malformed_blob_names_are_refused(running: Running, path: str) -> None:
    for method, body in (("GET", None), ("HEAD", None), ("PUT", b"content")):
        status, _, answer = running.ask(method, path, body)
        assert status in (400, 404), (method, path, answer)


def test_requests_without_a_session_are_answered_401(running: Running) -> None:
    running.store.put(DIGEST, BYTES)
    for token in ("", "guessed"):
        for method, path in (
            ("GET", f"/v1/blobs/{DIGEST}"),
            ("HEAD", f"/v1/blobs/{DIGEST}"),
            ("PUT", "/v1/blobs/" + "a" * 64),
        ):
            status, headers, answer = running.ask(method, path, b"x" if method == "PUT" else None, token=token)
            assert status == 401, (method, answer)
            assert "x-arclight-received" not in headers
        status, _, answer = running.ask(
            "POST", "/v1/message", Heartbeat(node="a", session=token).to_json().encode(), token=token
        )
        assert (status, "join again" in told(answer)) in ((401, True), (403, False)), answer
    assert len(running.server.received) == 1
    assert running.store.received("a" * 64) == 0


def test_a_session_is_valid_for_its_own_node_only(running: Running) -> None:
    other = running.say(Join(node="b", clients=("b",)))
    assert isinstance(other, Welcome)
    for node, session, status, words in (
        ("b", running.token, 403, "speaks for itself"),
        ("b", other.session, 403, "speaks for itself"),
        ("a", other.session, 401, "not its newest"),
    ):
        found, _, answer = running.ask("POST", "/v1/message", Heartbeat(node=node, session=session).to_json().encode())
        assert (found, words in told(answer)) == (status, True)
    assert len(running.server.received) == 2
    status, _, answer = running.ask("POST", "/v1/message", Wait(retry_after_s=1.0).to_json().encode())
    assert (status, "do not send 'wait'" in told(answer)) == (403, True)


def test_joining_again_ends_the_former_session(running: Running) -> None:
    again = running.say(Join(node="a", clients=("a",)))
    assert isinstance(again, Welcome)
    status, _, _ = running.ask("POST", "/v1/message", Heartbeat(node="a", session=running.token).to_json().encode())
    assert status == 401
    running.token = again.session


def test_a_body_that_ends_early_is_kept_for_the_rest(running: Running) -> None:
    head = running.head("PUT", f"/v1/blobs/{DIGEST}", len(BYTES))
    with socket.create_connection(("127.0.0.1", running.port), timeout=60) as line:
        line.sendall(head + BYTES[:200_000])
    deadline = time.monotonic() + 120
    while running.store.received(DIGEST) < 200_000:
        assert time.monotonic() < deadline, "what came was not kept"
        time.sleep(0.02)
    assert running.store.size(DIGEST) is None
    status, headers, _ = running.ask("HEAD", f"/v1/blobs/{DIGEST}")
    assert (status, headers["x-arclight-received"]) == (404, "200000")
    rest = {"content-range": f"bytes 200000-{len(BYTES) - 1}/{len(BYTES)}"}
    status, _, answer = running.ask("PUT", f"/v1/blobs/{DIGEST}", BYTES[200_000:], rest)
    assert status == 201, answer
    assert running.store.file(DIGEST).read_bytes() == BYTES


@pytest.mark.parametrize(
    ("said", "status"),
    [
        ("bytes 0-299999/1000001", 413),
        ("bytes 5-300004/400000", 409),
        ("bytes 0-299999/299999", 400),
        ("bytes 0-5/300000", 400),
        ("bytes -1-299998/300000", 400),
        ("bytes */300000", 400),
        ("blobs 0-299999/300000", 400),
        (f"bytes 0-299999/{'9' * 400}", 400),
    ],
)
def test_parts_that_cannot_be(running: Running, said: str, status: int) -> None:
    assert running.ask("PUT", f"/v1/blobs/{DIGEST}", BYTES, {"content-range": said})[0] == status
    assert running.store.size(DIGEST) is None


@pytest.mark.parametrize("said", ["bytes=300000-", "bytes=5-4", "bytes=-5", "bytes=a-b", "lines=1-2", "bytes=0-1,3-4"])
def test_ranges_that_are_not_there(running: Running, said: str) -> None:
    running.store.put(DIGEST, BYTES)
    status, headers, _ = running.ask("GET", f"/v1/blobs/{DIGEST}", headers={"range": said})
    assert (status, headers["content-range"]) == (416, "bytes */300000")


def test_blobs_that_are_too_large_or_not_what_they_are_called(running: Running) -> None:
    status, _, answer = running.ask("PUT", f"/v1/blobs/{DIGEST}", b"x" * (LIMITS.blob_bytes + 1))
    assert (status, str(LIMITS.blob_bytes) in told(answer)) == (413, True)
    status, _, answer = running.ask("PUT", f"/v1/blobs/{DIGEST}", BYTES[1:] + b"x")
    assert (status, "damaged or changed" in told(answer)) == (422, True)
    assert running.store.size(DIGEST) is None
    assert running.store.received(DIGEST) == 0


def test_bodies_that_stop_or_crawl(impatient: Running) -> None:
    head = impatient.head("PUT", f"/v1/blobs/{DIGEST}", len(BYTES))
    assert b"nothing came for" in impatient.raw(head + BYTES[:1000])
    assert impatient.store.received(DIGEST) == 1000
    assert b"is slower than" in impatient.raw(head, *[b"x" * 10] * 40, pause=0.05)
    message = impatient.head("POST", "/v1/message", 90000)
    assert impatient.raw(message).startswith(b"HTTP/1.1 408")
    assert b"is slower than" in impatient.raw(message, *[b" "] * 40, pause=0.05)


def answer_on(back: BinaryIO) -> tuple[int, bytes]:
    """The next one on a connection that may bring more."""
    status = int(back.readline().split()[1])
    return status, back.read(int(http.client.parse_headers(back)["content-length"]))


@pytest.mark.parametrize("cut", [0, 1, 70_000, len(BYTES) - 1, len(BYTES)])
def test_requests_after_an_upload_on_one_connection_are_answered(running: Running, cut: int) -> None:
    """The next request comes in one piece with the end of the body, whose start came with the headers."""
    head = running.head("PUT", f"/v1/blobs/{DIGEST}", len(BYTES))
    then = running.head("GET", f"/v1/blobs/{DIGEST}")
    with socket.create_connection(("127.0.0.1", running.port), timeout=60) as line, line.makefile("rb") as back:
        line.sendall(head + BYTES[:cut])
        time.sleep(0.05)
        line.sendall(BYTES[cut:] + then)
        assert answer_on(back) == (201, b"")
        assert answer_on(back) == (200, BYTES)
        line.sendall(then)
        assert answer_on(back) == (200, BYTES)


def test_the_rest_of_an_upload_that_is_refused_is_passed_over(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 900_000

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(PartialBlob, "write", full)
    head = running.head("PUT", f"/v1/blobs/{DIGEST}", size)
    with socket.create_connection(("127.0.0.1", running.port), timeout=60) as line, line.makefile("rb") as back:
        line.sendall(head + b"x" * 200_000)
        time.sleep(0.2)
        line.sendall(b"x" * (size - 200_000))
        assert answer_on(back)[0] == 507
        line.sendall(running.head("GET", "/v1/challenge"))
        assert answer_on(back)[0] == 200


def test_a_client_that_expects_100_continue(running: Running) -> None:
    head = running.head("PUT", f"/v1/blobs/{DIGEST}", len(BYTES), "expect: 100-continue")
    with socket.create_connection(("127.0.0.1", running.port), timeout=60) as line, line.makefile("rb") as back:
        line.sendall(head)
        assert back.readline() + back.readline() == b"HTTP/1.1 100 Continue\r\n\r\n"
        line.sendall(BYTES)
        assert answer_on(back)[0] == 201


def test_headers_that_never_end(impatient: Running) -> None:
    assert impatient.raw(b"") == b""
    assert impatient.raw(b"GET /v1/challenge HTTP/1.1\r\n", *[b"a: b\r\n"] * 30, pause=0.05) == b""
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=60) as line:
        line.sendall(b"GET /v1/challenge HTTP/1.1\r\nhost: x\r\n\r\n")
        with line.makefile("rb") as back:
            answer = http.client.HTTPResponse(line)
            answer.begin()
            assert (answer.status, answer.read() != b"") == (200, True)
            line.sendall(b"GET")
            assert back.read() == b""


def test_headers_larger_than_any_client_sends(running: Running) -> None:
    with socket.create_connection(("127.0.0.1", running.port), timeout=60) as line:
        line.sendall(b"GET /v1/challenge HTTP/1.1\r\nx-filler: ")
        with pytest.raises(ConnectionError):
            for _ in range(50):
                line.sendall(b"x" * 1_000_000)
    assert running.ask("GET", "/v1/challenge")[0] == 200


def test_no_more_uploads_than_allowed(running: Running) -> None:
    lines = []
    for number in range(2):
        line = socket.create_connection(("127.0.0.1", running.port), timeout=60)
        line.sendall(running.head("PUT", f"/v1/blobs/{str(number) * 64}", 9) + b"abc")
        lines.append(line)
    deadline = time.monotonic() + 120
    while (status := running.ask("PUT", f"/v1/blobs/{DIGEST}", BYTES)[0]) == 201:
        running.store.remove(DIGEST)
        assert time.monotonic() < deadline, "three were received at once"
    assert status == 503
    for line in lines:
        line.close()
    while running.ask("PUT", f"/v1/blobs/{DIGEST}", BYTES)[0] != 201:
        assert time.monotonic() < deadline, "uploads that ended are still counted"
        time.sleep(0.05)


def test_two_send_the_same_blob_at_once(running: Running) -> None:
    """One is taken, the other is told to wait rather than sent in between."""
    head = running.head("PUT", f"/v1/blobs/{DIGEST}", len(BYTES))
    with socket.create_connection(("127.0.0.1", running.port), timeout=60) as line:
        line.sendall(head + BYTES[:1000])
        deadline = time.monotonic() + 120
        while f".partial/{DIGEST}" not in {
            str(path.relative_to(running.store.folder)) for path in running.store.folder.rglob("*")
        }:
            assert time.monotonic() < deadline, "it did not begin"
        status, headers, _ = running.ask("PUT", f"/v1/blobs/{DIGEST}", BYTES)
        assert (status, headers["retry-after"]) == (423, "1")
        line.sendall(BYTES[1000:])
        assert line.recv(100).startswith(b"HTTP/1.1 201")
    assert running.ask("PUT", f"/v1/blobs/{DIGEST}", BYTES)[0] == 200


def test_work_requests_beyond_the_limit_are_answered_with_a_retry_delay(running: Running) -> None:
    with ThreadPoolExecutor(2) as pool:
        held = [pool.submit(running.say, WorkRequest(node="a", session=running.token, hold_s=60)) for _ in range(2)]
        running.server.wait_until_held(2)
        answer = running.say(WorkRequest(node="a", session=running.token, hold_s=60))
        assert isinstance(answer, Wait)
        assert answer.retry_after_s > 0
        running.server.wake()
        assert [ask.result(30).kind for ask in held] == ["close", "close"]


def test_an_internal_error_is_answered_500(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    running.server.sessions = None  # type: ignore[assignment]
    status, _, answer = running.ask(
        "POST", "/v1/message", Heartbeat(node="a", session=running.token).to_json().encode()
    )
    assert (status, "TypeError" in told(answer)) == (500, True)
    assert "Traceback" in caplog.text
    running.server.sessions = {running.token: "a"}


def test_a_blob_that_nobody_takes_does_not_hold_its_connection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Larger than what lies between the two: the server cannot be rid of it until it is taken."""
    content = bytes(32 << 20)
    digest = hashlib.sha256(content).hexdigest()
    store = FolderStore(tmp_path / "blobs")
    store.put(digest, content)
    limits = Limits(silence=0.3, slowest=1 << 40)
    with caplog.at_level("WARNING"), HttpServer(EchoServer(store), Listening(limits=limits)) as served:
        running = Running(served.port, store, EchoServer(store))
        welcome = running.say(Join(node="a", clients=("a",)))
        assert isinstance(welcome, Welcome)
        running.token = welcome.session
        with socket.create_connection(("127.0.0.1", served.port), timeout=30) as line:
            line.sendall(running.head("GET", f"/v1/blobs/{digest}"))
            came = len(line.recv(1000))
            time.sleep(1.5)
            with suppress(ConnectionResetError):
                while chunk := line.recv(1 << 20):
                    came += len(chunk)
        assert came < len(content)
        assert running.ask("GET", f"/v1/blobs/{digest}")[2] == content, "others get it"
    assert "does not take the blob that it asked for" in caplog.text
    assert "Traceback" not in caplog.text


def test_clients_without_a_handshake_are_closed(tmp_path: Path) -> None:
    made = make_certificate(tmp_path / "keys", ["127.0.0.1"], extra="federated")
    (tmp_path / "nodes").write_text("")
    listening = Listening(
        certificate=made.certificate, private_key=made.private_key, nodes=tmp_path / "nodes", limits=IMPATIENT
    )
    with HttpServer(EchoServer(FolderStore(tmp_path / "blobs")), listening) as server:
        silent = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        with silent, suppress(ConnectionResetError):
            assert silent.recv(1) == b""
