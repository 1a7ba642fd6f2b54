"""Requests for tensors that pass no router of FastAPI: they get what others get, over real connections too."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient
from starlette.types import ASGIApp
from tests.serve.conftest import LOOPBACK, Server, running
from tests.serve.test_tensors import SERVE
from tests.waiting import wait_until

from arclight.deploy import Program, export
from arclight.serve import Limits, models
from arclight.serve.app import build_app
from arclight.serve.middleware import Access
from arclight.serve.protocol import WRITE

KEY = "correct-horse-battery"
PATH = "/v2/models/affine/infer"


def body(*rows: list[float], **more: Any) -> bytes:
    tensor = {
        "name": "x",
        "datatype": "FP32",
        "shape": [len(rows), 3],
        "data": [value for row in rows for value in row],
    }
    return json.dumps({"inputs": [tensor], **more}).encode()


def binary() -> tuple[bytes, dict[str, str]]:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 3], "parameters": {"binary_data_size": 12}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return head + struct.pack("<3f", 0, 1, 2), {"Inference-Header-Content-Length": str(len(head))}


def message(content: bytes, *lines: str, path: str = PATH, version: str = "1.1") -> bytes:
    head = [f"POST {path} HTTP/{version}", "Host: localhost", f"Content-Length: {len(content)}", *lines, "", ""]
    return "\r\n".join(head).encode() + content


def answers(connection: socket.socket, count: int, interim: int = 0) -> list[tuple[int, dict[str, str], bytes]]:
    """Status, headers and content of answers on one connection; ``interim`` of them may be preceded by 100 Continue."""
    found = []
    with connection.makefile("rb") as file:
        for _ in range(count):
            status = int(file.readline().split()[1])
            if status == 100 and interim:
                interim, _ = interim - 1, file.readline()
                status = int(file.readline().split()[1])
            headers = dict(line.decode().strip().lower().split(": ", 1) for line in iter(file.readline, b"\r\n"))
            found.append((status, headers, file.read(int(headers["content-length"]))))
    return found


def data(content: bytes) -> list[float]:
    return json.loads(content)["outputs"][0]["data"]


@pytest.fixture(scope="module")
def affine(tmp_path_factory, affine_path) -> Iterator[Server]:
    script = tmp_path_factory.mktemp("direct") / "serve.py"
    script.write_text(SERVE)
    with running(f"affine={affine_path}", f"other={affine_path}", program=str(script)) as server:
        yield server


@pytest.fixture
def serve_with_affine(tmp_path, affine_path) -> Iterator[Callable[..., Server]]:
    script = tmp_path / "serve.py"
    script.write_text(SERVE)
    with ExitStack() as stack:
        yield lambda *words: stack.enter_context(running(f"affine={affine_path}", *words, program=str(script)))


FAULTS = """
from arclight.serve.tasks.batching import Batcher
def failing(method, name):
    def call(self, given, *more):
        if any(name in job.body for job in (given if isinstance(given, list) else [given])):
            raise RuntimeError("a detail for the log")
        return method(self, given, *more)
    return call
Batcher.run, Batcher.add = failing(Batcher.run, b"in run"), failing(Batcher.add, b"in add")
"""


@pytest.fixture
def folder_of_swaps(tmp_path, affine_path) -> Iterator[tuple[Server, Path, Path]]:
    """A server, the program that it serves, and another one of the same numbers."""
    path, other, script = tmp_path / "affine.onnx", tmp_path / "other.onnx", tmp_path / "serve.py"
    shutil.copy(affine_path, path)
    export(Doubled(), other, example_inputs=torch.rand(2, 3), input_names=["x"], output_names=["y"])
    script.write_text(SERVE)
    with running(f"affine={path}", "--limits.reload_s=0.1", program=str(script)) as server:
        yield server, path, other


class Doubled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x + 1


# -- beside the router


class Passing:
    """Middleware of somebody else, which counts what it sees."""

    seen = 0

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, *given: Any) -> None:
        Passing.seen += given[0]["type"] == "http"
        await self.app(*given)


KEYED = {"Authorization": f"Bearer {KEY}", "X-Request-Id": "a"}
REQUESTS: dict[str, tuple[bytes, dict[str, str]]] = {
    "json": (body([0, 1, 2], id="7"), KEYED),
    "bytes": (binary()[0], {**KEYED, **binary()[1]}),
    "no row": (body(), KEYED),
    "many rows": (body(*[[0.5, 1, 2]] * 3000), KEYED),
    "NaN": (body([float("nan"), 1, 2]), KEYED),
    "beyond float32": (body([1e300, -1e300, 2]), KEYED),
    "empty": (b"", KEYED),
    "no key": (body([0, 1, 2]), {"X-Request-Id": "a"}),
    "another key": (body([0, 1, 2]), {**KEYED, "Authorization": f"Bearer {KEY}x"}),
    "compressed": (body([0, 1, 2]), {**KEYED, "Content-Encoding": "gzip"}),
    "too large": (bytes(2_000_000), KEYED),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_answers_are_those_of_the_router(affine_path, name):
    content, headers = REQUESTS[name]
    found = []
    for is_direct in (True, False):
        limits = Limits(body_bytes=1_000_000)
        app = build_app([models.load("affine", affine_path, limits)], limits, Access(keys=(KEY,)))
        if not is_direct:
            app.add_middleware(Passing)
        Passing.seen = 0
        with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
            answer = client.post(PATH, content=content, headers=headers)
            text = client.get("/metrics", headers=KEYED).text
        assert Passing.seen == (0 if is_direct else 2)
        counts = [line for line in text.splitlines() if line.startswith("arclight_re") and "_total{" in line]
        found.append((answer.status_code, dict(answer.headers), answer.content, counts))
    assert found[0] == found[1]
    assert found[0][1]["x-request-id"] == "a"
    assert found[0][1]["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("is_passed", [True, False])
def test_middleware_of_others_gets_to_send_the_answer(affine_path, is_passed):
    app = build_app([models.load("affine", affine_path, Limits())], Limits(), Access())
    if is_passed:
        app.add_middleware(Passing)
    content, written, sent = body([0, 1, 2]), [], []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": content, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message["type"])

    async def scenario() -> None:
        async with app.router.lifespan_context(app):
            headers = [(b"host", b"localhost"), (b"content-length", b"%d" % len(content))]
            scope = {
                "type": "http",
                "method": "POST",
                "path": PATH,
                "headers": headers,
                "query_string": b"",
                "http_version": "1.1",
            }
            await app({**scope, WRITE: lambda *given: written.append(given) or True}, receive, send)

    asyncio.run(scenario())
    assert (len(written), sent) == ((0, ["http.response.start", "http.response.body"]) if is_passed else (1, []))


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_other_methods_are_answered_by_the_router(affine, method):
    import httpx

    answer = httpx.request(method, affine.url + PATH, **LOOPBACK)
    assert answer.status_code == 405
    assert answer.json()["error"].endswith(".")


# -- over connections


def test_requests_sent_at_once_on_one_connection_are_answered_in_their_order(affine):
    contents = [body([number, 0, 0], id=str(number)) for number in range(20)]
    with affine.connect() as connection:
        connection.sendall(b"".join(map(message, contents)))
        found = answers(connection, 20)
    assert [(status, json.loads(content)["id"], data(content)[0]) for status, _, content in found] == [
        (200, str(number), 2.0 * number + 1) for number in range(20)
    ]


def test_wrong_requests_between_right_ones_change_nothing_but_their_answers(affine):
    sent = [
        message(body([1, 2, 3])), message(b"{"), message(body([1, 2])), message(body([1, 2, 3]), path="/v2/models/other/infer"),
        message(binary()[0], *(": ".join(pair) for pair in binary()[1].items())), message(body([1, 2, 3], [4, 5, 6])),
    ]  # fmt: skip
    with affine.connect() as connection:
        connection.sendall(b"".join(sent))
        found = answers(connection, len(sent))
    assert [status for status, _, _ in found] == [200, 400, 400, 200, 200, 200]
    assert data(found[0][2]) == data(found[3][2]) == [3.0, 5.0, 7.0]
    assert found[4][2][-12:] == struct.pack("<3f", 1, 3, 5)
    assert data(found[5][2]) == [3.0, 5.0, 7.0, 9.0, 11.0, 13.0]


MODELS = b"GET /models HTTP/1.1\r\nHost: localhost\r\n\r\n"
BROKEN = b"POST /v2/models/affine/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"


@pytest.mark.parametrize("end", [b"no request\r\n\r\n", BROKEN])
@pytest.mark.parametrize("is_direct", [True, False])
def test_malformed_bytes_do_not_replace_earlier_answers(affine, end, is_direct):
    one = message(body([1, 2, 3])) if is_direct else MODELS
    with affine.connect() as connection:
        connection.sendall(one * 3 + end)
        found = answers(connection, 3)
        assert [status for status, _, _ in found] == [200, 200, 200]
        assert found[2][1]["connection"] == "close"
        with suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    wait_until(lambda: affine.in_flight() == 0, "nothing is left")


@pytest.mark.parametrize("before", [0, 2])
def test_malformed_requests_are_refused_on_an_idle_connection(affine, before):
    with affine.connect() as connection:
        for _ in range(before):
            connection.sendall(message(body([1, 2, 3])))
            assert answers(connection, 1)[0][0] == 200
        connection.sendall(BROKEN)
        [(status, headers, _)] = answers(connection, 1)
        assert (status, headers["connection"], connection.recv(1)) == (400, "close", b"")
    wait_until(lambda: affine.in_flight() == 0, "nothing is left")


def test_an_answer_has_the_headers_of_others(affine):
    with affine.connect() as connection:
        connection.sendall(message(body([1, 2, 3]), "X-Request-Id: b") + message(b"{", "X-Request-Id: b"))
        (_, right, content), (_, wrong, _) = answers(connection, 2)
    assert set(right) == set(wrong)
    assert {name: right[name] for name in right if name not in ("content-length", "date")} == {
        name: wrong[name] for name in wrong if name not in ("content-length", "date")
    }
    assert right["content-length"] == str(len(content))


@pytest.mark.parametrize(("version", "lines"), [("1.0", ()), ("1.1", ("Connection: close",))])
def test_a_connection_that_is_not_kept_ends_after_the_answer(affine, version, lines):
    with affine.connect() as connection:
        connection.sendall(message(body([1, 2, 3]), *lines, version=version))
        [(status, headers, content)] = answers(connection, 1)
        assert connection.recv(1) == b""
    assert (status, headers["connection"], data(content)) == (200, "close", [3.0, 5.0, 7.0])


def test_a_body_that_comes_in_pieces_or_after_a_permission_is_answered(affine):
    content = body([1, 2, 3])
    with affine.connect() as connection:
        connection.sendall(message(content, "Expect: 100-continue")[: -len(content)])
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        for at in range(0, len(content), 20):
            connection.sendall(content[at : at + 20])
        [(status, _, answered)] = answers(connection, 1)
    assert (status, data(answered)) == (200, [3.0, 5.0, 7.0])


CHUNKED = b"POST %b HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 50, 100_000])
@pytest.mark.parametrize("wish", ["h2c", "websocket"])
def test_a_request_that_asks_for_another_protocol_keeps_its_body(affine, wish, size):
    lines = ("Connection: Upgrade, HTTP2-Settings", f"Upgrade: {wish}", "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA")
    content = body([1, 2, 3])
    sent = [
        message(content, *lines), message(content), CHUNKED % (PATH.encode(), len(content), content),
        message(content, *lines, "Expect: 100-continue"), MODELS.replace(b"\r\n\r\n", "\r\n".join(["", *lines, "", ""]).encode()),
    ]  # fmt: skip
    asked = b"".join(sent)
    with affine.connect() as connection:
        for at in range(0, len(asked), size):
            connection.sendall(asked[at : at + size])
        found = answers(connection, len(sent), interim=1)
    assert [status for status, _, _ in found] == [200] * len(sent)
    assert [data(content) for _, _, content in found[:-1]] == [[3.0, 5.0, 7.0]] * (len(sent) - 1)


def test_a_request_to_a_proxy_is_refused(affine):
    with affine.connect() as connection:
        connection.sendall(b"CONNECT localhost:22 HTTP/1.1\r\nHost: localhost:22\r\n\r\nSSH-2.0-x\r\n")
        [(status, headers, _)] = answers(connection, 1)
        with suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    assert (status, headers["connection"]) == (400, "close")


def test_a_foreign_host_is_refused_before_the_body(affine):
    with affine.connect() as connection:
        connection.sendall(message(body([1, 2, 3])).replace(b"localhost", b"evil.test"))
        [(status, _, _)] = answers(connection, 1)
    assert status == 421


def test_clients_that_leave_at_once_take_nothing_from_others(affine):
    before = affine.metrics()
    for number in range(20):
        with affine.connect() as gone, affine.connect() as stays:
            gone.sendall(message(body([number, 0, 0])))
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
            stays.sendall(message(body([number, 0, 0])))
            gone.close()
            [(status, _, content)] = answers(stays, 1)
            assert (status, data(content)[0]) == (200, 2.0 * number + 1)
    wait_until(lambda: affine.in_flight() == 0, "nothing is left")
    of = ("arclight_requests_total", PATH.replace("affine", "{model}"), "affine", "200")
    grown = [
        value - before.get(name, 0)
        for name, value in affine.metrics().items()
        if name[0] == of[0] and set(of) == set(name)
    ]
    assert 20 <= sum(grown) <= 40


def test_a_client_that_reads_nothing_fills_no_memory(affine):
    resident, one = affine.resident(), message(body([1, 2, 3]))
    asked = one * 4000
    with affine.connect() as connection:
        connection.settimeout(2.0)
        sent = 0
        with suppress(TimeoutError):
            while sent < 60_000_000:
                sent += connection.send(memoryview(asked)[sent % len(one) :])
        assert sent < 60_000_000, "the server reads on though nobody takes its answers"
        assert affine.get("/health").status_code == 200
        assert affine.resident() - resident < 60_000_000


def test_short_requests_that_wait_take_not_much_more_memory_than_their_bytes(serve_with, sample, tmp_path):
    gate = tmp_path / "gate"
    server = serve_with(f"--gate={gate}", workers=1, queue=16, deadline_s=120)
    photo = sample("counter")
    first = f"POST /detect HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(photo)}\r\n\r\n".encode() + photo
    short, count = b"GET /models HTTP/1.1\r\nHost: localhost\r\n\r\n", 5000
    with ExitStack() as opened:
        resident = server.resident()
        connections = [opened.enter_context(server.connect()) for _ in range(10)]
        for connection in connections:
            connection.sendall(first)
            connection.sendall(short * count)
        assert [server.get("/health").status_code for _ in range(10)] == [200] * 10
        assert server.resident() - resident < 40_000_000
        for connection in connections[1:]:
            connection.close()
        gate.touch()
        found = answers(connections[0], 1 + count)
    assert [status for status, _, _ in found] == [200] * (1 + count)


def test_a_request_behind_another_notices_that_its_client_has_left(serve_with, sample, tmp_path):
    """A request that waits for a worker is dropped, though another follows it on the connection."""
    calls, gate = tmp_path / "calls", tmp_path / "gate"
    server = serve_with(f"--gate={gate}", f"--calls={calls}", workers=1, queue=4, deadline_s=120)
    photo = sample("counter")
    head = f"POST /detect HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(photo)}\r\n\r\n".encode()
    with server.connect() as first:
        first.sendall(head + photo)
        wait_until(calls.exists, "the first photo is worked on")
        with server.connect() as impatient:
            impatient.sendall((head + photo) * 2)
            wait_until(lambda: server.in_flight() == 2, "a second photo waits")
        wait_until(lambda: server.in_flight() == 1, "it has given its place up")
        gate.touch()
    wait_until(lambda: server.in_flight() == 0, "nothing is left")
    assert calls.read_bytes() == b"."


def test_bodies_of_others_that_fill_the_memory_leave_no_room_for_a_small_one(serve_with_affine):
    server = serve_with_affine("--limits.buffered_bytes=20000", "--limits.body_bytes=20000", "--limits.refusal_s=0.01")
    one = message(body([1, 2, 3], id="a" * 3000))
    with server.connect() as connection:
        connection.sendall(one * 20)
        assert [status for status, _, _ in answers(connection, 20)] == [200] * 20
        with server.connect() as filling:
            filling.sendall(message(bytes(19_990))[:-1])
            wait_until(lambda: server.in_flight() == 1, "the large upload is there")
            connection.sendall(one)
            [(status, headers, _)] = answers(connection, 1)
            assert (status, headers["retry-after"]) == (429, "1")
        wait_until(lambda: server.in_flight() == 0, "it has left")
        connection.sendall(one)
        assert answers(connection, 1)[0][0] == 200


def test_a_body_that_stalls_behind_another_request_is_ended(serve_with_affine):
    """Its head was there before its turn came, and nothing comes any more."""
    server, content = serve_with_affine("--limits.body_idle_s=0.5"), body([1, 2, 3])
    with server.connect() as connection:
        connection.sendall(message(content) + message(content)[:-5])
        found = answers(connection, 2)
    assert [status for status, _, _ in found] == [200, 408]


def test_a_program_that_is_replaced_while_requests_come_answers_each_of_them(folder_of_swaps):
    server, path, other = folder_of_swaps
    with server.connect() as connection:
        connection.settimeout(60)
        found = set()
        until = time.monotonic() + 60
        while len(found) < 2:
            assert time.monotonic() < until, "the program was not replaced"
            connection.sendall(message(body([1, 2, 3])) * 8)
            for status, _, content in answers(connection, 8):
                assert (status, data(content)) == (200, [3.0, 5.0, 7.0])
                found.add(json.loads(content)["model_version"])
            if len(found) == 1 and other.exists():
                other.replace(path)


@pytest.mark.parametrize("where", ["in run", "in add"])
def test_a_fault_of_ours_is_a_500_and_leaves_nothing_behind(tmp_path, affine_path, where):
    script = tmp_path / "serve.py"
    script.write_text(FAULTS + SERVE)
    with running(f"affine={affine_path}", program=str(script)) as server:
        with server.connect() as connection:
            connection.sendall(message(body([1, 2, 3], id=where), "X-Request-Id: a") + message(body([1, 2, 3])))
            (status, _, content), (after, _, _) = answers(connection, 2)
        assert (status, after, server.in_flight()) == (500, 200, 0)
        assert json.loads(content)["error"].endswith("its log has the details under a.")
        assert "a detail for the log" in server.stop()


# -- the deadline of an upload


def test_ready_results_start_no_timer_and_late_ones_are_refused(affine_path, monkeypatch):
    from arclight.serve import admission

    timers: list[float] = []
    timeout = asyncio.timeout
    monkeypatch.setattr(admission.asyncio, "timeout", lambda seconds: timers.append(seconds) or timeout(seconds))

    async def scenario() -> None:
        loop = asyncio.get_running_loop()

        async def at_once() -> int:
            return 1

        async def later(value: int) -> int:
            for _ in range(3):
                await asyncio.sleep(0.001)
            if value < 0:
                raise ValueError(value)
            return value

        far = loop.time() + 60
        assert await admission.within(at_once(), 5, far) == 1
        assert timers == []
        assert await admission.within(later(2), 5, far) == 2
        assert 4 < timers.pop() <= 5
        with pytest.raises(ValueError, match="-3"):
            await admission.within(later(-3), 5, far)
        with pytest.raises(TimeoutError):
            await admission.within(asyncio.sleep(60), 0.01, far)
        with pytest.raises(TimeoutError):
            await admission.within(asyncio.sleep(60), 5, admission.time.monotonic() + 0.01)
        ends = asyncio.create_task(admission.within(asyncio.sleep(60), 50, far))
        await asyncio.sleep(0.01)
        ends.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ends

    asyncio.run(scenario())


def test_a_full_batch_of_the_loop_holds_two_models_apart(affine_path):
    """Requests of one moment to two models: each is computed by its own program."""
    limits = Limits()
    served = [models.load(name, affine_path, limits) for name in ("a", "b")]
    calls: list[str] = []

    class Named(Program):
        name = ""

        def __call__(self, *inputs: Any) -> Any:
            calls.append(self.name)
            return super().__call__(*inputs)

    async def scenario() -> list[Any]:
        import httpx

        app = build_app(served, limits, Access())
        async with app.router.lifespan_context(app):
            for model in served:
                named = Named.__new__(Named)
                named.__dict__ = dict(model.program.__dict__)
                named.name = model.name
                object.__setattr__(model, "program", named)
            calls.clear()
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
                return await asyncio.gather(
                    *(client.post(f"/v2/models/{'ab'[n % 2]}/infer", content=body([n, 0, 0])) for n in range(8))
                )

    found = asyncio.run(scenario())
    assert [data(answer.content)[0] for answer in found] == [2.0 * n + 1 for n in range(8)]
    assert [answer.json()["model_name"] for answer in found] == ["a", "b"] * 4
    assert set(calls) == {"a", "b"}
