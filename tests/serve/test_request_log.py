"""Identifiers of requests, and the line of JSON about each."""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient
from tests import warm
from tests.waiting import wait_until

from arclight.cli import main
from arclight.serve import Limits
from arclight.serve.admission import Refusal
from arclight.serve.app import build_app
from arclight.serve.middleware import Access
from arclight.serve.models import ServedModel
from arclight.serve.request_log import Record, RequestLog

MADE = re.compile(r"[0-9a-f]{32}")


class Answering:
    """A detector that refuses or fails when told to."""

    error: Exception | None = None

    def __call__(self, image: Any) -> Any:
        from arclight.vision.results.detections import Detections

        if self.error is not None and image.shape[0] != 64:
            raise self.error
        return Detections.from_arrays([], [], [], names=["code"], image=image)


@pytest.fixture
def detector() -> Answering:
    return Answering()


@pytest.fixture
def client(tmp_path: Path, detector: Answering):
    app = build_app(
        [ServedModel(name="codes", detector=detector)], Limits(), Access(), request_log=tmp_path / "requests"
    )
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


def lines(tmp_path: Path, count: int) -> list[dict[str, Any]]:
    file = tmp_path / "requests"
    wait_until(lambda: file.read_text().count("\n") >= count, "the lines are written")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_each_request_has_a_line(client, tmp_path, sample):
    photo = sample("counter")
    answer = client.post("/detect", content=photo, headers={"X-Request-Id": "job-7/a"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, "job-7/a")
    refused = client.post("/detect", content=b"no photo")
    client.get("/no/such/address")
    first, second, third = lines(tmp_path, 3)
    assert first.pop("latency_ms") > 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[0-9:.]{12}\+00:00", first.pop("time"))
    assert first == {
        "id": "job-7/a", "method": "POST", "route": "/detect", "model": "codes", "version": "1", "status": 200,
        "received_bytes": len(photo), "sent_bytes": len(answer.content), "refused": None,
    }  # fmt: skip
    assert (second["status"], second["refused"]) == (422, refused.json()["error"])
    assert second["id"] == refused.headers["x-request-id"]
    assert MADE.fullmatch(second["id"])
    assert (third["status"], third["route"], third["model"]) == (404, "other", None)


@pytest.mark.parametrize(
    "given", [b'a"}\\n{"id": "forged', b"x" * 65, b"", b"\xc3\xa9", b"a b", b"a\tb", [b"one", b"two"]]
)
def test_identifiers_that_are_not_well_formed_are_replaced(client, tmp_path, given):
    several = given if isinstance(given, list) else [given]
    answer = client.get("/health", headers=[(b"x-request-id", value) for value in several])
    assert MADE.fullmatch(answer.headers["x-request-id"])
    [line] = lines(tmp_path, 1)
    assert line["id"] == answer.headers["x-request-id"]


def test_no_value_ends_its_line(client, tmp_path, detector):
    detector.error = Refusal(400, 'One.\n{"id": "forged"}\r\u2028\x85' + "x" * 5000)
    client.post("/detect", content=b"")
    answer = client.post(
        "/detect", content=(Path(__file__).parents[2] / "src/arclight/serve/page/samples/board.jpg").read_bytes()
    )
    assert answer.status_code == 400
    text = "".join(json.dumps(line) for line in lines(tmp_path, 2))
    assert len((tmp_path / "requests").read_bytes().splitlines()) == 2
    assert len((tmp_path / "requests").read_text().splitlines()) == 2
    assert "forged" in text
    assert len(text) < 1200


def test_a_fault_is_logged_under_the_identifier_that_the_client_gets(client, tmp_path, detector, sample, caplog):
    detector.error = RuntimeError("a detail")
    answer = client.post("/detect", content=sample("counter"), headers={"X-Request-Id": "mine"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "mine")
    assert "under mine." in answer.json()["error"]
    [record] = [one for one in caplog.records if one.name == "arclight.serve"]
    assert record.getMessage().endswith("request mine")
    [line] = lines(tmp_path, 1)
    assert (line["id"], line["status"], line["refused"]) == ("mine", 500, answer.json()["error"])


def test_a_server_that_is_not_asked_to_writes_no_lines_but_identifies_requests(server, capfd):
    answer = httpx.get(server.url + "/made-up", headers={"X-Request-Id": "a"}, trust_env=False)
    assert answer.headers["x-request-id"] == "a"
    assert capfd.readouterr().out == ""


def test_a_reader_that_stalls_holds_up_no_request_and_dropped_lines_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(RequestLog, "MAX_WAITING", 3)
    monkeypatch.setattr(RequestLog, "PAUSE_S", 0)
    os.mkfifo(tmp_path / "pipe")
    gate, opened = threading.Event(), []
    reader = threading.Thread(target=lambda: opened.append((tmp_path / "pipe").open()))
    reader.start()
    log = RequestLog(tmp_path / "pipe")
    reader.join()
    append = log._append

    def stalled(found):
        gate.wait()
        append(found)

    monkeypatch.setattr(log, "_append", stalled)
    about = {"method": "GET", "route": "/", "status": 200, "seconds": 0.0, "received": 0, "sent": 0}
    log.write(Record("0"), **about)
    wait_until(log._lines.empty, "the thread has taken the first")
    for number in range(1, 6):  # three may wait
        log.write(Record(str(number)), **about)
    gate.set()
    wait_until(log._lines.empty, "there is room again")
    log.write(Record("6"), **about)
    log.close()
    found = [json.loads(line) for line in opened[0]]
    opened[0].close()
    assert [line["id"] for line in found] == ["0", "1", "2", "3", "6"]
    assert [line.get("dropped") for line in found] == [None, None, None, None, 2]


def test_a_log_that_cannot_be_written_is_reported_once_and_requests_go_on(caplog, monkeypatch):
    monkeypatch.setattr(RequestLog, "PAUSE_S", 0)
    log = RequestLog("/dev/full")
    about = {"method": "GET", "route": "/", "status": 200, "seconds": 0.0, "received": 0, "sent": 0}
    for number in range(2):
        log.write(Record(str(number)), **about)
        wait_until(log._lines.empty, "the line has been taken")
    log.close()
    assert len([one for one in caplog.records if "cannot be written to /dev/full" in one.getMessage()]) == 1


ABOUT = {"method": "GET", "route": "/", "status": 200, "seconds": 0.0, "received": 0, "sent": 0}


class Disk:
    """A file that takes so many bytes and is full then, or that is not ready where ``room`` is None."""

    def __init__(self) -> None:
        self.room: int | None = 10**6
        self.content = b""

    def write(self, left: memoryview) -> int | None:
        if self.room is None:
            self.room = 10**6
            return None
        if not self.room:
            raise OSError(28, "No space left on device")
        taken = bytes(left[: self.room])
        self.content, self.room = self.content + taken, self.room - len(taken)
        return len(taken)

    def close(self) -> None:
        pass


def test_lines_that_a_full_disk_loses_are_counted_and_no_line_is_empty(tmp_path, monkeypatch, caplog):
    log, disk = RequestLog(tmp_path / "log"), Disk()
    log.close()
    monkeypatch.setattr(log, "_file", disk)
    log._append([{"id": "0"}])
    for room, names in ((0, "12"), (0, "3"), (12, "4")):
        disk.room = room
        log._append([{"id": name} for name in names])
    disk.room = 10**6
    log._append([{"id": "5"}, {"id": "6"}])
    disk.room = 0
    log._append([{"id": "7"}])
    disk.room = None
    log._append([{"id": "8", "dropped": 2}])
    first, cut, *rest = disk.content.decode().splitlines()
    assert (json.loads(first), cut) == ({"id": "0"}, '{"id": "4", ')
    assert [json.loads(line) for line in rest] == [
        {"id": "5", "dropped": 4}, {"id": "6"}, {"id": "8", "dropped": 3},
    ]  # fmt: skip
    assert len([one for one in caplog.records if "cannot be written" in one.getMessage()]) == 2


def test_a_log_that_cannot_be_opened_is_reported_before_the_server_starts(tmp_path, capsys):
    from tests.serve.test_reload import bare

    bare(tmp_path / "m.onnx")
    status = main(["serve", f"m={tmp_path / 'm.onnx'}", "--port", "0", "--request-log", str(tmp_path / "none" / "log")])
    assert status != 0
    told = capsys.readouterr()
    assert told.err.endswith("none/log: No such file or directory\n")
    assert told.out == ""


@pytest.mark.parametrize("name", ["-", "log"])
def test_a_log_on_standard_output_shares_it_with_nothing(tmp_path, name):
    from tests.serve.test_reload import bare

    bare(tmp_path / "m.onnx")
    words = ("-m", "arclight.cli", "serve", "m=m.onnx", "--port", "0", "--request-log", name)
    with warm.Program(*words, cwd=tmp_path) as server:
        wait_until(lambda: "open http://127.0.0.1:" in "".join(server.said()), "the address is said")
        out, err = server.said()
    assert (out if name == "-" else err) == "", "no request was made"
