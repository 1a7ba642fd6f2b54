"""Answers to a well-behaved client."""

from __future__ import annotations

import json
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import httpx
import numpy as np
import pytest
from tests.serve.conftest import LOOPBACK
from tests.waiting import wait_until

from arclight.serve import Limits
from arclight.serve.draining import ignore_new_connections
from arclight.serve.settings import is_loopback
from arclight.serve.tasks.detection import top_k
from arclight.vision.results.detections import Boxes, Detections, OrientedBoxes
from arclight.vision.results.masks import Masks, Patch


def test_a_photo_is_answered_with_its_boxes_and_what_its_codes_say(server, sample):
    answer = server.detect(sample("receipt"), **{"content-type": "image/jpeg"})
    assert answer.status_code == 200
    body = answer.json()
    assert body["image"] == {"width": 720, "height": 960}
    [box] = body["boxes"]
    assert box["label"] == "qr_code"
    left, top, right, bottom = box["xyxy_px"]
    assert 200 < left < right < 500 and 370 < top < bottom < 670  # noqa: PT018 (where the scene has its code)
    [code] = body["codes"]
    assert code["kind"] == "qris"
    assert code["problems"] == []
    assert code["payload"]["merchant_name"] == "Toko Buku Pelita"
    assert code["payload"]["nmid"] == "ID1122334455667"
    assert code["payload"]["amount"] == "87500"
    spent = body["milliseconds"]
    assert spent["total"] == pytest.approx(spent["decode"] + spent["detect"] + spent["scan"], abs=0.1)
    assert spent["total"] > 0


@pytest.mark.parametrize("content_type", ["image/png", "application/octet-stream", "application/x-www-form-urlencoded"])
def test_the_bytes_decide_what_a_photo_is_not_the_content_type(server, sample, content_type):
    assert codes(server.detect(sample("counter"), **{"content-type": content_type})) == ["Kopi Lereng Senja"]


def test_a_form_gives_the_same_answer_as_the_bytes_themselves(server, sample):
    form = {"file": ("photo.jpg", sample("counter"), "image/jpeg"), "note": (None, "hello")}
    answer = httpx.post(f"{server.url}/detect", files=form, **LOOPBACK)
    assert codes(answer) == ["Kopi Lereng Senja"]


def test_a_code_that_is_no_payment_is_reported_as_its_text(server, sample):
    texts = {code["kind"]: code["text"] for code in server.detect(sample("board")).json()["codes"]}
    assert texts["other"] == "WIFI:T:WPA;S:Tamu Pasar Lama;P:selamat-datang;;"
    assert "qris" in texts


def test_codes_are_looked_for_in_the_surest_boxes_only(serve_with, sample):
    server = serve_with("--imagine", codes=1)
    answer = server.detect(sample("counter")).json()
    assert [box["confidence"] for box in answer["boxes"]] == [0.9, 0.3]
    assert [code["text"] is None for code in answer["codes"]] == [False]


def test_the_surest_boxes_keep_their_keypoints_masks_and_angles():
    order = [2, 0, 3]  # by confidence
    xyxy = np.array([[0, 0, 9, 9], [1, 1, 8, 8], [2, 0, 7, 9], [3, 2, 9, 9]], np.float32)
    points = np.arange(4 * 4 * 3, dtype=np.float32).reshape(4, 4, 3)
    planes = np.arange(4 * 6 * 6).reshape(4, 6, 6) % np.array([2, 3, 4, 5])[:, None, None] == 1
    turned = np.array([[4, 4, 6, 3, 0.1], [5, 5, 7, 2, 0.2], [3, 5, 4, 2, 0.3], [6, 6, 3, 1, 0.4]], np.float32)
    found = Detections(
        Boxes(xyxy, np.array([0.8, 0.2, 0.9, 0.5]), np.array([0, 1, 1, 0])),
        ("code", "print"),
        ids=np.array([7, 8, 9, 10]),
        masks=Masks(tuple(Patch(0, 0, plane) for plane in planes), (6, 6)),
        keypoints=points,
        obb=OrientedBoxes(turned),
    )
    best = top_k(found, 3)
    assert best.boxes.xyxy.tolist() == xyxy[order].tolist()
    assert best.labels == ["print", "code", "code"]
    assert best.keypoints.tolist() == points[order].tolist()
    assert best.obb.xywhr.tolist() == turned[order].tolist()
    assert best.ids.tolist() == [9, 7, 10]
    assert np.array_equal(np.stack(list(best.masks)), planes[order])
    assert len(top_k(found, 0)) == 0
    assert len(top_k(found, 9)) == 4


def test_codes_that_the_deadline_leaves_untried_are_named(serve_with, sample):
    server = serve_with("--imagine", deadline_s=0.001)
    answer = server.detect(sample("counter"))
    assert answer.status_code == 200
    read, unread = answer.json()["codes"]
    assert read["payload"]["merchant_name"] == "Kopi Lereng Senja"
    assert unread["text"] is None
    assert "not every reader was tried" in unread["problems"][0]


def test_health_names_the_program(server):
    health = server.get("/health").json()
    assert health.pop("version")
    assert health == {"live": True, "ready": True, "program": "zxing", "precision": "none"}


def test_metrics_count_every_answer(serve_with, sample):
    server = serve_with()
    server.detect(sample("counter"))
    server.detect(b"no image")
    server.get("/made-up/address")
    answer = server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    values = server.metrics()
    for status in ("200", "422"):
        assert values["arclight_requests_total", "zxing", "/detect", status] == 1
    assert values["arclight_requests_total", "", "other", "404"] == 1
    assert values["arclight_request_seconds_count", "zxing", "/detect"] == 1, "a refusal is not a fast detection"
    assert values["arclight_in_flight", "zxing"] == values["arclight_rejected_total", "zxing"] == 0
    assert "made-up" not in answer.text


def test_the_schema_describes_the_photo_and_no_page_loads_foreign_scripts(server):
    detect = server.get("/openapi.json").json()["paths"]["/detect"]["post"]
    assert {"image/*", "multipart/form-data"} <= set(detect["requestBody"]["content"])
    assert {"200", "413", "422", "429"} <= set(detect["responses"])
    assert server.get("/docs").status_code == server.get("/redoc").status_code == 404


@pytest.mark.parametrize("path", ["/", "/health", "/made-up", "/app.js"])
def test_every_answer_carries_the_security_headers_and_no_door_for_other_sites(server, path):
    answer = httpx.get(server.url + path, headers={"Origin": "https://elsewhere.example"}, **LOOPBACK)
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "http:" not in policy and "https:" not in policy and "unsafe" not in policy  # noqa: PT018
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert not [name for name in answer.headers if name.startswith("access-control-")]


def test_a_fault_of_the_detector_is_a_500_with_one_sentence_and_the_next_photo_works(serve_with, sample):
    server = serve_with("--fault")
    answer = server.detect(sample("counter"))
    assert answer.status_code == 500
    identifier = answer.headers["x-request-id"]
    assert answer.json() == {"error": f"The server failed on this request; its log has the details under {identifier}."}
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert codes(server.detect(sample("counter"))) == ["Kopi Lereng Senja"]
    said = server.stop()
    assert "a detail for the log" in said
    assert f"request {identifier}" in said


def test_a_stop_signal_lets_the_request_in_progress_finish(serve_with, sample, tmp_path):
    server = serve_with(f"--gate={tmp_path / 'gate'}")
    answers = []
    client = threading.Thread(target=lambda: answers.append(server.detect(sample("counter"))))
    client.start()
    wait_until(lambda: server.in_flight() == 1, "the photo is there")
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: refused(server), "new connections are refused")
    assert server.process.poll() is None
    assert not answers
    (tmp_path / "gate").touch()
    client.join(60)
    assert codes(answers[0]) == ["Kopi Lereng Senja"]
    server.process.wait(60)


def test_no_request_fails_while_the_server_drains(serve_with, sample):
    """Clients ask whether the server is ready before each photo, as a load balancer does for them."""
    server = serve_with(drain_s=1.5)
    photo = sample("counter")
    statuses: list[list[int]] = [[], [], []]

    def send_while_ready(seen: list[int]) -> None:
        with httpx.Client(base_url=server.url, timeout=60, **LOOPBACK) as client:
            while client.get("/v2/health/ready").status_code == 200:
                seen.append(client.post("/detect", content=photo).status_code)

    def unready() -> bool:
        return server.get("/health").status_code == server.get("/v2/health/ready").status_code == 503

    clients = [threading.Thread(target=send_while_ready, args=(seen,)) for seen in statuses]
    with server.connect() as uploading:
        uploading.sendall(
            f"POST /detect HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(photo)}\r\n\r\n".encode() + photo[:1000]
        )
        for client in clients:
            client.start()
        wait_until(lambda: all(statuses), "all clients are served")
        server.process.send_signal(signal.SIGTERM)
        wait_until(unready, "readiness falls")
        assert server.detect(photo).status_code == 200, "who has not heard of it yet is still served"
        for client in clients:
            client.join(60)
        wait_until(lambda: refused(server), "the listener closes")
        uploading.sendall(photo[1000:])
        assert uploading.recv(12) == b"HTTP/1.1 200"
    assert {status for seen in statuses for status in seen} == {200}
    server.process.wait(60)


def test_clients_that_go_on_until_they_are_refused_are_all_answered(serve_with):
    """Each makes a new connection for each request, as drained clients do, up to the last moment."""
    server = serve_with(drain_s=0.5)
    request = b"GET /models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    outcomes: list[list[bytes]] = [[] for _ in range(8)]

    def send_until_refused(seen: list[bytes]) -> None:
        with suppress(ConnectionRefusedError):
            while True:
                with server.connect() as connection:
                    try:
                        connection.sendall(request)
                        seen.append(connection.recv(12))
                    except ConnectionResetError:
                        seen.append(b"reset")

    clients = [threading.Thread(target=send_until_refused, args=(seen,)) for seen in outcomes]
    for client in clients:
        client.start()
    wait_until(lambda: all(outcomes), "all clients are served")
    server.process.send_signal(signal.SIGTERM)
    for client in clients:
        client.join(60)
    assert {outcome for seen in outcomes for outcome in seen} == {b"HTTP/1.1 200"}
    server.process.wait(60)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no packet filter of a socket")
def test_connections_made_before_new_ones_are_ignored_are_accepted():
    """Else those that are made between the last accept and the close would be reset."""
    with socket.create_server(("127.0.0.1", 0)) as listening, ExitStack() as opened:
        address = listening.getsockname()
        made = [opened.enter_context(socket.create_connection(address, timeout=10)) for _ in range(3)]
        ignore_new_connections(listening)
        with pytest.raises(TimeoutError):
            socket.create_connection(address, timeout=0.3)
        accepted = [opened.enter_context(listening.accept()[0]) for _ in made]
        for one, other in zip(made, accepted, strict=True):
            one.sendall(b"question")
            assert other.recv(8) == b"question"
            other.sendall(b"answer")
            assert one.recv(8) == b"answer"
        listening.setblocking(False)
        with pytest.raises(BlockingIOError):
            listening.accept()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=10)


@pytest.mark.parametrize("is_accepted", [True, False])
def test_a_connection_that_was_made_before_the_listener_closed_is_answered(serve_with, is_accepted):
    """The server stands still from before its clients' requests until after the time at which its listener closes."""
    server = serve_with(drain_s=1.0)
    with ExitStack() as opened:
        connections = [opened.enter_context(server.connect()) for _ in range(5 * is_accepted)]
        assert server.get("/health").status_code == 200, "it has accepted those before"
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.get("/health").status_code == 503, "it drains")
        server.process.send_signal(signal.SIGSTOP)
        connections += [opened.enter_context(server.connect()) for _ in range(5 * (not is_accepted))]
        for connection in connections:
            connection.sendall(b"GET /models HTTP/1.1\r\nHost: localhost\r\n\r\n")
        time.sleep(1.2)
        server.process.send_signal(signal.SIGCONT)
        assert [connection.recv(12) for connection in connections] == [b"HTTP/1.1 200"] * 5
    server.process.wait(60)
    assert refused(server)


def test_requests_that_do_not_end_are_given_up_at_the_limit(serve_with, sample):
    server = serve_with(drain_s=0.1, shutdown_s=1)
    with server.connect() as stalled:
        stalled.sendall(b"POST /detect HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nhalf")
        wait_until(lambda: server.in_flight() == 1, "the upload has begun")
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(60)
        with stalled.makefile("rb") as answer:
            head, body = answer.read().split(b"\r\n\r\n", 1)
    assert head.startswith(b"HTTP/1.1 503")
    assert b"\r\nretry-after: 1\r\n" in head.lower()
    assert json.loads(body) == {"error": "The server stops; send the request again in a second."}
    assert "Traceback" not in server.process.said()[1]
    assert refused(server)


def test_requests_that_are_worked_on_are_refused_at_the_limit(serve_with, sample, tmp_path):
    calls, gate = tmp_path / "calls", tmp_path / "gate"
    server = serve_with(f"--gate={gate}", f"--calls={calls}", drain_s=0.1, shutdown_s=1, workers=1)
    with ThreadPoolExecutor(2) as clients:
        asked = [clients.submit(server.detect, sample("counter")) for _ in range(2)]
        wait_until(lambda: calls.exists() and server.in_flight() == 2, "one is worked on, one waits")
        server.process.send_signal(signal.SIGTERM)
        answers = [one.result() for one in asked]
        gate.touch()
        server.process.wait(60)
    assert [(answer.status_code, answer.headers["retry-after"]) for answer in answers] == [(503, "1")] * 2
    assert "Traceback" not in server.process.said()[1]


def refused(server) -> bool:
    try:
        server.connect().close()
    except ConnectionRefusedError:
        return True
    return False


def test_an_address_that_others_can_reach_is_warned_about_in_one_line(serve_with):
    server = serve_with("--host=0.0.0.0")
    warnings = [line for line in server.stop().splitlines() if line.startswith("warning:")]
    assert warnings == ["warning: other machines can reach 0.0.0.0, and the server asks nobody who they are"]


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.8.0.1", True), ("::1", True), ("localhost", True)]
    + [("0.0.0.0", False), ("::", False), ("192.168.1.4", False), ("localhost.example.com", False)],
)
def test_loopback_addresses_are_known(host, loopback):
    assert is_loopback(host) is loopback


def test_limits_that_make_no_sense_are_refused_by_name():
    with pytest.raises(ValueError, match=r"limits\.workers must be above 0, not 0"):
        Limits(workers=0)
    with pytest.raises(ValueError, match=r"limits\.buffered_bytes \(10\) must hold at least one body"):
        Limits(buffered_bytes=10)
    assert Limits(queue=0).queue == 0
    for changes in ({"deadline_s": float("nan")}, {"shutdown_s": float("inf")}, {"workers": 1.5}):
        with pytest.raises(ValueError, match=rf"limits\.{next(iter(changes))} must be a (whole|finite) number, not"):
            Limits(**changes)


def codes(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [code["payload"]["merchant_name"] for code in answer.json()["codes"]]
