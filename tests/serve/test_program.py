"""``serve`` over a program from the exporter, in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest
from tests import warm
from tests.serve.programs import write_detector

from arclight import deploy
from arclight._installed import pip_install
from arclight.deploy import ProgramError
from arclight.fabric.serving.listening import AddressError, reserve_address
from arclight.serve import create_app, serve, server
from arclight.serve.settings import Limits

SERVE = """
import argparse
from arclight.serve import serve
parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
parser.add_argument("--limits")
parser.add_argument("--program")
options = parser.parse_args()
serve(options.program, port=options.port)
"""


def test_a_program_from_the_exporter_is_served_with_its_boxes_in_the_photos_pixels(
    tmp_path, one_box_path, serve_with, sample
):
    (tmp_path / "serve.py").write_text(SERVE)
    server = serve_with(f"--program={one_box_path}", program=str(tmp_path / "serve.py"))
    health = server.get("/health").json()
    assert (health["program"], health["precision"]) == ("one-box", "fp32")
    [box] = server.detect(sample("counter")).json()["boxes"]
    # 720 x 960 in a square of 64: 15 photo pixels to each of the square's, 8 of which pad the left side.
    assert box["xyxy_px"] == pytest.approx([(18 - 8) * 15, 22 * 15, (30 - 8) * 15, 42 * 15], abs=0.2)
    assert box["confidence"] == pytest.approx(0.9, abs=1e-4)
    assert box["label"] == "qr_code"


def test_a_program_of_another_task_is_refused_before_anything_listens(tmp_path):
    path = write_detector(tmp_path / "text.onnx", task="generate")
    with pytest.raises(ProgramError, match=r"is not a detector \(its task is 'generate'\)"):
        serve(path, port=0)
    with pytest.raises(ProgramError, match="there is no program at"):
        serve(tmp_path / "missing.onnx", port=0)


def test_the_room_can_be_imported_without_its_extra():
    blocked = "import sys; sys.modules.update(fastapi=None, uvicorn=None, starlette=None); "
    script = blocked + "import arclight.serve; arclight.serve.Limits(); arclight.serve.serve('x.onnx')"
    result = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=60)
    assert pip_install("serve") in result.stderr


def test_a_port_in_use_is_reported_before_a_program_is_loaded(monkeypatch):
    monkeypatch.setattr(deploy.Program, "load", lambda *_: pytest.fail("a program was loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = rf"^127\.0\.0\.1:{port} cannot be listened on: another program listens there; name another port$"
        with pytest.raises(OSError, match=message):
            serve("any.onnx", port=port)
    with pytest.raises(OSError, match="port 70000 is none"):
        serve("any.onnx", port=70_000)
    with pytest.raises(OSError, match="is not an address"):
        serve("any.onnx", host="no.such.host.invalid", port=0, insecure=True)


def test_the_second_server_to_reserve_a_port_is_refused_as_well():
    """Linux lets both reserve an address of which neither has begun to listen."""
    first, second = reserve_address("127.0.0.1", 0), None
    app = create_app(lambda _: pytest.fail("nothing is served"))
    with first:
        port = first.getsockname()[1]
        second = reserve_address("127.0.0.1", port)
        first.listen()
        with (
            second,
            pytest.raises(AddressError, match=f":{port} cannot be listened on: another program listens"),
        ):
            server.run(app, host="127.0.0.1", port=port, limits=Limits(), listening=second)


def test_the_server_prints_its_address(one_box_path):
    code = f"from arclight.serve import serve; serve({str(one_box_path)!r}, port=0)"
    with warm.Program("-c", code, env={**os.environ, "PYTHONUNBUFFERED": "1"}) as process:
        said = process.until("", 120)
        address = re.fullmatch(r"open (http://127\.0\.0\.1:\d+) \(ctrl-C ends the server\)", said)
        assert address, said
        with urllib.request.urlopen(address[1] + "/", timeout=60) as page:
            assert page.status == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert process.said()[1] == ""
