"""Careless and hostile clients get a 4xx with one sentence, take no memory, and do not stop the server."""

from __future__ import annotations

import gzip
import json
import select
import socket
import struct
import subprocess
import sys
import threading
import time
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import BytesIO

import pytest
from tests.waiting import wait_until

MB = 1_000_000


def png(width: int, height: int, *, rows: int | None = None) -> bytes:
    """A grey PNG of that size whose pixels, ``rows`` of them, compress to almost nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    packer, row = zlib.compressobj(1), bytes(width + 1)
    pixels = b"".join(packer.compress(row) for _ in range(height if rows is None else rows)) + packer.flush()
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def zip_bomb() -> bytes:
    file = BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("photo.jpg", bytes(100 * MB))
    return file.getvalue()


def form(body: bytes, boundary: str = "x") -> dict[str, object]:
    return {"content": body, "content-type": f"multipart/form-data; boundary={boundary}"}


def part(name: str, content: bytes, file: str = "") -> bytes:
    filename = f'; filename="{file}"' if file else ""
    return b'--x\r\nContent-Disposition: form-data; name="' + f'{name}"{filename}\r\n\r\n'.encode() + content + b"\r\n"


HOSTILE = {
    "empty body": (400, lambda photo: {"content": b""}),
    "text file": (422, lambda photo: {"content": b"I am a text.\n" * 1000}),
    "truncated JPEG": (422, lambda photo: {"content": photo[: len(photo) // 2]}),
    "only the first bytes of a JPEG": (422, lambda photo: {"content": photo[:20]}),
    "100 megapixels": (422, lambda photo: {"content": png(10_000, 10_000)}),
    "100 megapixels, pixels missing": (422, lambda photo: {"content": png(10_000, 10_000, rows=1)}),
    "4000 gigapixels claimed": (422, lambda photo: {"content": png(2**31 - 1, 2_000, rows=0)}),
    "zip bomb": (422, lambda photo: {"content": zip_bomb()}),
    "gzip bomb": (415, lambda photo: {"content": gzip.compress(bytes(100 * MB), 1), "content-encoding": "gzip"}),
    "form without boundary": (400, lambda photo: {"content": photo, "content-type": "multipart/form-data"}),
    "form that is none": (400, form),
    "form cut short": (400, lambda photo: form(part("file", photo, "a.jpg")[:200])),
    "form with another field": (400, lambda photo: form(part("picture", photo, "a.jpg") + b"--x--\r\n")),
    "form with an empty file": (400, lambda photo: form(part("file", b"", "a.jpg") + b"--x--\r\n")),
    "form of 100 000 fields": (400, lambda photo: form(part("a", b"1") * 100_000 + b"--x--\r\n")),
    "over the limit": (413, lambda photo: {"content": bytes(25 * MB + 1)}),
}


class PeakMemory:
    """The most memory a server used, above what it used at the start."""

    def __init__(self, server) -> None:
        self.server, self.before, self.peak, self.watching = server, server.resident(), 0, True

    def __enter__(self) -> PeakMemory:
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self) -> None:
        while self.watching:
            self.peak = max(self.peak, self.server.resident() - self.before)
            time.sleep(0.005)

    def __exit__(self, *_: object) -> None:
        self.watching = False
        self.thread.join()
        print(f"peak growth {self.peak / MB:.0f} MB")


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_input_is_refused_in_one_sentence_and_the_next_request_works(server, sample, name):
    photo = sample("counter")
    assert server.detect(photo).status_code == 200
    status, make = HOSTILE[name]
    request = make(photo)
    with PeakMemory(server) as memory:
        answer = server.detect(**request)
        assert server.detect(photo).status_code == 200
    assert answer.status_code == status
    assert_one_sentence(answer.json())
    assert memory.peak < 150 * MB


def test_malformed_forms_are_answered_and_not_printed():
    script = """
from arclight.serve.admission import Refusal, image_bytes
part = b'--x\\r\\nContent-Transfer-Encoding: zz\\r\\nContent-Disposition: form-data; name="file"; filename=a\\r\\n\\r\\nA\\r\\n--x--'
for body, kind in ((b"no form", "; boundary=x"), (b"--x\\r\\na b\\r\\n", "; boundary=x"), (b"--x", ""), (part, "; boundary=x")):
    try:
        print(image_bytes(body, "multipart/form-data" + kind))
    except Refusal as refusal:
        print(refusal.status)
"""
    found = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=120)
    assert (found.stdout.split(), found.stderr) == (["400", "400", "400", "b'A'"], "")


@pytest.mark.parametrize("framing", ["content-length", "chunked"])
def test_a_client_that_sends_200_megabytes_before_it_reads_still_gets_the_answer(server, sample, framing):
    server.detect(sample("counter"))
    length = "Transfer-Encoding: chunked" if framing == "chunked" else f"Content-Length: {200 * MB}"
    piece = bytes(MB)
    if framing == "chunked":
        piece = f"{len(piece):x}\r\n".encode() + piece + b"\r\n"
    with PeakMemory(server) as memory, server.connect() as connection:
        connection.sendall(f"POST /detect HTTP/1.1\r\nHost: localhost\r\n{length}\r\n\r\n".encode())
        for _ in range(200):
            connection.sendall(piece)
        if framing == "chunked":
            connection.sendall(b"0\r\n\r\n")
        status, body = read_answer(connection)
    assert status == 413
    assert_one_sentence(body)
    assert memory.peak < 150 * MB
    assert server.detect(sample("counter")).status_code == 200


def test_a_client_that_announces_too_much_is_refused_before_it_sends_anything(server):
    with server.connect() as connection:
        connection.sendall(
            b"POST /detect HTTP/1.1\r\nHost: localhost\r\nContent-Length: 30000000\r\nExpect: 100-continue\r\n\r\n"
        )
        status, _ = read_answer(connection)
        assert status == 413
        assert connection.recv(1) == b""  # closed at once, no wait for a body that does not come


def test_an_upload_that_stalls_is_ended_and_others_are_served_meanwhile(serve_with, sample):
    server = serve_with(body_idle_s=0.5, workers=1, queue=0)
    stalled = [server.connect() for _ in range(20)]
    for connection in stalled:
        connection.sendall(b"POST /detect HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nhalf")
    assert server.detect(sample("counter")).status_code == 200
    for connection in stalled:
        with connection:
            status, body = read_answer(connection)
            assert status == 408
            assert_one_sentence(body)


def test_an_upload_of_single_bytes_ends_at_the_deadline_and_so_does_its_connection(serve_with):
    server = serve_with(body_idle_s=5, body_total_s=0.5, linger_s=0.5)
    with server.connect() as connection:
        connection.sendall(b"POST /detect HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n")
        threading.Thread(target=drip, args=(connection,), daemon=True).start()
        assert read_answer(connection)[0] == 408
        connection.settimeout(60)
        with suppress(ConnectionResetError):
            assert connection.recv(1) == b""


HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize("before", [0, 1], ids=["new", "kept"])
def test_a_head_of_single_bytes_ends_with_its_connection(serve_with, before):
    server = serve_with(head_s=0.5, keep_alive_s=60)
    with server.connect() as connection:
        for _ in range(before):
            connection.sendall(HEAD + b"\r\n")
            assert read_answer(connection)[0] == 200
        begun = time.monotonic()
        connection.sendall(HEAD + b"X-Slow: ")
        threading.Thread(target=drip, args=(connection,), daemon=True).start()
        with suppress(ConnectionResetError):
            assert connection.recv(1) == b""
        assert time.monotonic() - begun >= 0.4
    assert server.get("/health").status_code == 200


def test_a_head_that_begins_with_the_request_before_it_ends_with_its_connection(serve_with):
    server = serve_with(head_s=0.5, keep_alive_s=60)
    with server.connect() as connection:
        connection.sendall(HEAD + b"\r\n" + HEAD + b"X-Slow: ")
        assert read_answer(connection)[0] == 200
        assert connection.recv(1) == b""


def test_a_connection_without_a_request_is_closed(serve_with):
    server = serve_with(head_s=0.5, keep_alive_s=60)
    with server.connect() as connection:
        assert connection.recv(1) == b""


def test_an_idle_connection_is_kept_for_keep_alive_s(serve_with):
    server = serve_with(head_s=0.2, keep_alive_s=1.0)
    with server.connect() as connection:
        connection.sendall(HEAD + b"\r\n")
        assert read_answer(connection)[0] == 200
        begun = time.monotonic()
        assert connection.recv(1) == b""
        assert time.monotonic() - begun >= 0.9


def test_a_slow_body_has_limits_of_its_own(serve_with, sample):
    server, photo = serve_with(head_s=0.2, keep_alive_s=0.2, body_idle_s=30), sample("counter")
    with server.connect() as connection:
        connection.sendall(f"POST /detect HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(photo)}\r\n\r\n".encode())
        for piece in (photo[:500], photo[500:]):
            time.sleep(0.4)
            connection.sendall(piece)
        status, found = read_answer(connection)
    assert (status, len(found["boxes"])) == (200, 1)


def test_clients_that_leave_in_the_middle_leave_nothing_behind(serve_with, sample):
    server = serve_with(body_bytes=MB, buffered_bytes=MB, body_idle_s=300)
    for _ in range(5):  # together more than the server may hold
        with server.connect() as connection:
            connection.sendall(
                b"POST /detect HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900000\r\n\r\n" + bytes(400_000)
            )
    wait_until(lambda: server.in_flight() == 0, "nothing is left")
    assert server.detect(sample("counter")).status_code == 200


def test_uploads_together_may_not_fill_the_memory(serve_with, sample):
    server = serve_with(body_bytes=MB, buffered_bytes=MB, body_idle_s=300, body_total_s=300)
    head = b"POST /detect HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999000\r\n\r\n"
    refused = False
    while not refused:
        with server.connect() as connection:
            connection.sendall(head + bytes(990_000))
            while (
                not refused and not select.select([connection], [], [], 0)[0]
            ):  # or a photo was there before the rest of it
                refused = server.detect(sample("counter")).status_code == 429
            if refused:
                connection.sendall(bytes(9_000))
                assert read_answer(connection)[0] == 422
    assert server.detect(sample("counter")).status_code == 200


def test_a_full_queue_answers_429_at_once_and_recovers(serve_with, sample, tmp_path):
    server = serve_with(f"--gate={tmp_path / 'gate'}", workers=1, queue=1, deadline_s=120)
    with ThreadPoolExecutor(6) as clients:
        asked = [clients.submit(server.detect, sample("counter")) for _ in range(6)]
        wait_until(lambda: sum(one.done() for one in asked) == 4, "four of six are turned away")
        (tmp_path / "gate").touch()
        answers = [one.result() for one in asked]
    statuses = sorted(answer.status_code for answer in answers)
    assert statuses == [200, 200, 429, 429, 429, 429]
    for answer in answers:
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) >= 1
            assert_one_sentence(answer.json())
    assert server.detect(sample("counter")).status_code == 200
    assert server.metrics()["arclight_rejected_total", "zxing"] == 4


def test_photos_of_clients_that_left_the_queue_are_not_worked_on(serve_with, sample, tmp_path):
    calls, gate = tmp_path / "calls", tmp_path / "gate"
    server = serve_with(f"--gate={gate}", f"--calls={calls}", workers=1, queue=4, deadline_s=120)
    photo = sample("counter")
    head = f"POST /detect HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(photo)}\r\n\r\n".encode()
    with server.connect() as first:
        first.sendall(head + photo)
        wait_until(calls.exists, "the first photo is worked on")
        impatient = [server.connect() for _ in range(4)]
        for connection in impatient:
            connection.sendall(head + photo)
        wait_until(lambda: server.in_flight() == 5, "all five are there")
        assert server.detect(photo).status_code == 429
        for connection in impatient:
            connection.close()
        wait_until(lambda: server.in_flight() == 1, "they give up their places in the queue")
        gate.touch()
        assert read_answer(first)[0] == 200
    wait_until(lambda: server.in_flight() == 0, "nothing is left")
    assert calls.read_bytes() == b"."


def test_a_request_that_gets_no_worker_before_its_deadline_is_answered_503(serve_with, sample, tmp_path):
    calls, gate = tmp_path / "calls", tmp_path / "gate"
    server = serve_with(f"--gate={gate}", f"--calls={calls}", workers=1, deadline_s=0.3)
    with ThreadPoolExecutor(1) as clients:
        first = clients.submit(server.detect, sample("counter"))
        wait_until(calls.exists, "the first photo is worked on")
        answer = server.detect(sample("counter"))
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert_one_sentence(answer.json())
        gate.touch()
        assert first.result().status_code == 200, "what a worker has begun is finished"
    assert calls.read_bytes() == b"."


def test_retry_after_is_the_queue_times_the_measured_service_time(serve_with, sample, tmp_path):
    calls, gate = tmp_path / "calls", tmp_path / "gate"
    server = serve_with(f"--gate={gate}", f"--calls={calls}", workers=1, queue=1, deadline_s=120)
    with ThreadPoolExecutor(3) as clients:
        begun = time.monotonic()
        first = clients.submit(server.detect, sample("counter"))
        wait_until(calls.exists, "the first photo is worked on")
        time.sleep(1.1)
        gate.touch()
        first.result()
        longest = time.monotonic() - begun
        gate.unlink()
        asked = [clients.submit(server.detect, sample("counter")) for _ in range(2)]
        wait_until(lambda: server.in_flight() == 2, "one is worked on, one waits")
        answer = server.detect(sample("counter"))
        gate.touch()
        assert [one.result().status_code for one in asked] == [200, 200]
    assert answer.status_code == 429
    assert 2 * 1.1 <= int(answer.headers["retry-after"]) <= 2 * longest + 1


def test_a_request_whose_turn_would_come_too_late_is_refused_at_once(serve_with, sample, tmp_path):
    calls, gate = tmp_path / "calls", tmp_path / "gate"
    server = serve_with(f"--gate={gate}", f"--calls={calls}", workers=1, deadline_s=0.4)
    with ThreadPoolExecutor(1) as clients:
        for is_measured in (True, False):
            slow = clients.submit(server.detect, sample("counter"))
            wait_until(calls.exists, "the photo is worked on")
            if is_measured:
                time.sleep(0.5)
                gate.touch()
                slow.result()
                gate.unlink()
                calls.unlink()
        answer = server.detect(sample("counter"))
        gate.touch()
    assert answer.status_code == 429
    assert "longer than the deadline" in answer.json()["error"]


def test_an_upload_to_the_wrong_address_is_answered_too(server):
    with server.connect() as connection:
        connection.sendall(
            b"POST /upload HTTP/1.1\r\nHost: localhost\r\nContent-Length: 20000000\r\n\r\n" + bytes(20 * MB)
        )
        status, body = read_answer(connection)
    assert status == 404
    assert_one_sentence(body)


ENDLESS = {
    "headers": (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", b"X-Filler: " + bytes(b"x" * 1000) + b"\r\n"),
    "one header": (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Filler: ", b"x" * 1000),
    "an address": (b"GET /", b"x" * 1000),
    "trailers": (
        b"POST /detect HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",
        b"X-Filler: " + b"x" * 1000 + b"\r\n",
    ),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_head_without_end_is_refused_before_it_fills_the_memory(server, sample, name):
    beginning, piece = ENDLESS[name]
    server.detect(sample("counter"))
    with PeakMemory(server) as memory, server.connect() as connection:
        connection.sendall(beginning)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            for _ in range(150):
                connection.sendall(piece * 1000)
    assert memory.peak < 50 * MB
    assert server.detect(sample("counter")).status_code == 200


def read_answer(connection: socket.socket) -> tuple[int, dict[str, str]]:
    """Status and JSON of one HTTP answer."""
    file = connection.makefile("rb")
    status = int(file.readline().split()[1])
    headers = dict(line.decode().strip().lower().split(": ", 1) for line in iter(file.readline, b"\r\n"))
    return status, json.loads(file.read(int(headers["content-length"])))


def assert_one_sentence(body: dict[str, str]) -> None:
    assert list(body) == ["error"]
    sentence = body["error"]
    assert sentence[0].isupper()
    assert sentence.endswith(".")
    assert "\n" not in sentence
    assert 15 < len(sentence) < 200


def drip(connection: socket.socket) -> None:
    try:
        while True:
            connection.sendall(b".")
            time.sleep(0.1)
    except OSError:
        return
