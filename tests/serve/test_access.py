"""Access to a server: on loopback no foreign Host, elsewhere an API key."""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import sys
from contextlib import suppress

import httpx
import pytest
from starlette.testclient import TestClient
from tests import warm
from tests.ports import free_port
from tests.serve.conftest import LOOPBACK, running
from tests.serve.test_tensors import SERVE
from tests.waiting import wait_until

from arclight import cli
from arclight.fabric.extras import MissingExtraError
from arclight.fabric.serving.certificates import make_certificate
from arclight.serve import Limits, create_app, middleware, serve

KEY = "correct-horse-battery"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, affine_path):
    path = tmp_path_factory.mktemp("access")
    (path / "serve.py").write_text(SERVE)
    (path / "key.txt").write_text(KEY + "\n")
    shutil.copy(affine_path, path)
    return path


@pytest.fixture(scope="module")
def local(folder):
    with running(f"affine={folder / 'affine.onnx'}", program=str(folder / "serve.py")) as server:
        yield server


@pytest.fixture(scope="module")
def keyed(folder):
    words = [
        "--host=0.0.0.0",
        "--behind-proxy",
        f"--api-key-file={folder / 'key.txt'}",
        f"affine={folder / 'affine.onnx'}",
    ]
    with running(*words, program=str(folder / "serve.py")) as server:
        yield server


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1", "127.0.0.1:8000", "[::1]:8000"])
def test_loopback_answers_under_its_own_names(local, host):
    answer = httpx.get(f"{local.url}/v2/models/affine", headers={"Host": host}, **LOOPBACK)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "host", ["", "evil.example", "evil.example:8000", "127.0.0.1.evil.example", "[::1].evil:1", "10.0.0.1"]
)
def test_loopback_answers_under_no_foreign_name(local, host):
    for path in ("/", "/health", "/v2/models/affine"):
        answer = httpx.get(local.url + path, headers={"Host": host}, **LOOPBACK)
        assert answer.status_code == 421
        assert answer.json()["error"].endswith(".")
        assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:3000", 200),
        ("http://127.0.0.1", 200),
        ("https://evil.example", 403),
        ("null", 403),
        ("", 403),
    ],
)
def test_pages_of_other_sites_do_not_make_loopback_work(local, origin, status):
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}
    headers = {"Origin": origin, "Content-Type": "text/plain"}
    url = f"{local.url}/v2/models/affine/infer"
    answer = httpx.post(url, content=json.dumps(body), headers=headers, **LOOPBACK)
    assert answer.status_code == status, answer.text


@pytest.mark.parametrize(
    ("words", "host", "key", "status"),
    [
        ([], "evil.example", None, 421),
        ([], "localhost", None, 404),
        ([f"--api-key={KEY}"], "models.example", None, 401),
        ([f"--api-key={KEY}"], "models.example", KEY, 404),
    ],
)
def test_an_application_made_directly_checks_host_or_key(serve_with, words, host, key, status):
    server = serve_with(*words)
    headers = {"Host": host} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    assert httpx.get(f"{server.url}/v2/models/none", headers=headers, **LOOPBACK).status_code == status


def test_keys_that_are_easily_guessed_make_no_application():
    with pytest.raises(ValueError, match="at least 16 printable ASCII characters without blanks, not 6"):
        create_app(lambda _: pytest.fail("nothing is served"), api_key="secret")


def test_the_page_asks_for_the_key_and_sends_it(chrome, serve_with):
    chrome.open(serve_with(f"--api-key={KEY}").url)
    chrome.click("[data-sample='samples/receipt.jpg']")
    for given in ("wrong", KEY):
        chrome.wait("document.getElementById('key-dialog').open")
        chrome.run("document.getElementById('key').value = arguments[0]", given)
        assert chrome.run("return !document.getElementById('key-trouble').hidden") == (given == KEY)
        chrome.click("#key-send")
    chrome.wait("document.body.dataset.state === 'done'")
    assert chrome.text("#summary") == "1 code found"


def test_two_hosts_are_refused(local):
    with local.connect() as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        assert connection.recv(12) in (b"HTTP/1.1 421", b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", f"Basic {KEY}", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", "Bearer \xe9" * 9]
)
def test_without_the_key_only_health_and_the_page_are_answered(keyed, header):
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    for path in ("/v2", "/metrics", "/openapi.json", "/v2/models/affine"):
        answer = httpx.get(keyed.url + path, headers=headers, **LOOPBACK)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert KEY not in answer.text
    for path in ("/health", "/v2/health/live", "/v2/health/ready", "/", "/app.js", "/samples/board.jpg"):
        assert httpx.get(keyed.url + path, headers=headers, **LOOPBACK).status_code == 200


def test_with_the_key_all_is_answered(keyed):
    headers = {"Authorization": f"bearer {KEY}", "Host": "models.example"}
    for path in ("/", "/metrics", "/v2/models/affine"):
        assert httpx.get(keyed.url + path, headers=headers, **LOOPBACK).status_code == 200


def test_an_upload_without_the_key_is_refused_before_it_is_kept(keyed):
    answer = httpx.post(f"{keyed.url}/v2/models/affine/infer", content=bytes(5_000_000), **LOOPBACK)
    assert answer.status_code == 401


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--host", "0.0.0.0"], "other machines can reach 0.0.0.0: give an API key"),
        (
            ["--host", "0.0.0.0", "--api-key-file", "good.txt"],
            "keys and photos would travel readable: give a certificate",
        ),
        (
            ["--host", "0.0.0.0", "--api-key-file", "good.txt", "--tls-cert", "a", "--tls-key", "b"],
            "there is no certificate a",
        ),
        (["--tls-cert", "a"], "give both --tls-cert and --tls-key"),
        (["--api-key-file", "empty.txt"], "there is no API key: write one on each line"),
        (["--api-key-file", "missing.txt"], "the API key cannot be read"),
        (["--api-key-file", "short.txt"], "at least 16 printable ASCII characters"),
        (["--api-key-file", "binary.txt"], "printable ASCII"),
    ],
)
def test_wrong_settings_of_access_are_refused_in_one_line(tmp_path, monkeypatch, capsys, words, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("secret\n")
    (tmp_path / "good.txt").write_text(f"\ufeff{KEY}\n", encoding="utf-8")
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "binary.txt").write_bytes(b"\xff" * 20)
    assert cli.main(["serve", "x.onnx", *words]) != 0
    said = capsys.readouterr().err
    assert sentence in said
    assert "secret" not in said


def test_off_loopback_a_certificate_is_shown_and_each_key_has_a_rate_of_its_own(folder, tmp_path):
    made = make_certificate(tmp_path / "keys", ["localhost", "127.0.0.1"], extra="deploy")
    other = "another-horse-battery"
    (tmp_path / "keys.txt").write_text(f"{KEY}\n{other}\n")
    port = free_port()
    words = [
        "serve",
        f"affine={folder / 'affine.onnx'}",
        "--host=0.0.0.0",
        f"--port={port}",
        "--limits.requests_per_s=0.5",
        "--limits.head_s=5",
    ]
    words += [
        f"--api-key-file={tmp_path / 'keys.txt'}",
        f"--tls-cert={made.certificate}",
        f"--tls-key={made.private_key}",
    ]
    url = f"https://localhost:{port}"
    with warm.Program("-m", "arclight.cli", *words, env={**os.environ, "PYTHONUNBUFFERED": "1"}) as process:
        assert process.until("", 120).startswith("open https://localhost:")
        context = ssl.create_default_context(cafile=made.certificate)
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        with httpx.Client(verify=context, trust_env=False, timeout=60) as client:
            wait_until(lambda: client.get(f"{url}/health").status_code == 200, "the server is ready")
            keyed = [
                client.get(f"{url}/v2/models/affine", headers={"Authorization": f"Bearer {key}"})
                for key in (KEY, KEY, other)
            ]
            assert [answer.status_code for answer in keyed] == [200, 429, 200]
            assert 1 <= int(keyed[1].headers["retry-after"]) <= 2
            assert keyed[1].json()["error"].startswith("This API key has sent too many requests; ")
            assert [client.get(f"{url}/health").status_code for _ in range(5)] == [200] * 5, "health has no rate"
        with pytest.raises(httpx.HTTPError):
            httpx.get(url.replace("https", "http") + "/health", **LOOPBACK)
        with socket.create_connection(("127.0.0.1", port), timeout=30) as silent, suppress(ConnectionResetError):
            assert silent.recv(1) == b"", "who begins no handshake is left after head_s"


def test_requests_above_the_rate_of_a_key_are_not_counted_as_a_full_server():
    other = "another-horse-battery"
    app = create_app(lambda image: None, program="none", limits=Limits(requests_per_s=0.001), api_key=[KEY, other])
    client = TestClient(app, base_url="http://localhost")
    answers = [client.post("/detect", content=b"", headers={"Authorization": f"Bearer {KEY}"}) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [400, 429, 429]
    metrics = client.get("/metrics", headers={"Authorization": f"Bearer {other}"}).text
    assert 'arclight_requests_total{model="none",path="/detect",status="429"} 2.0' in metrics
    assert 'arclight_rejected_total{model="none"} 0.0' in metrics


def test_a_key_that_honours_retry_after_passes(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(middleware.time, "monotonic", lambda: now[0])
    rates = middleware.Rates(2, 4.0)
    assert [rates.take(0) for _ in range(9)] == [0.0] * 8 + [0.25]
    assert rates.take(1) == 0, "another key has a rate of its own"
    now[0] += 0.25
    assert [rates.take(0), rates.take(0)] == [0.0, 0.25]
    now[0] += 1000
    assert [rates.take(0) for _ in range(9)] == [0.0] * 8 + [0.25], "what was not used is not saved for ever"


@pytest.mark.parametrize("package", ["httptools", "orjson"])
def test_an_extra_that_is_installed_in_part_is_named(monkeypatch, package):
    """As by those who had the extra before it brought these."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match="serve"):
        serve("no.onnx")
