"""Servers in processes of their own, as a user would start them, and a browser."""

from __future__ import annotations

import json
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests import warm
from tests.ports import free_port
from tests.shared import made_once

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # the helpers beside the tests

from browser import Browser, chromium  # noqa: E402

LOOPBACK: dict[str, Any] = {"trust_env": False, "verify": False}
"""Of a client of httpx that needs no proxy and no certificates: to load them takes longer than most requests."""

SAMPLES = HERE.parents[1] / "src/arclight/serve/page/samples"


@dataclass(frozen=True)
class Server:
    port: int
    process: warm.Program

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def detect(self, content: bytes, **headers: str) -> httpx.Response:
        return httpx.post(f"{self.url}/detect", content=content, headers=headers, timeout=60, **LOOPBACK)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, **LOOPBACK)

    def metrics(self) -> dict[tuple[str, ...], float]:
        """Every sample of /metrics under its name and the values of its labels (model, path, status)."""
        text = self.get("/metrics").text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {(sample.name, *sample.labels.values()): sample.value for sample in samples}

    def in_flight(self) -> float:
        """Requests to models that have not been answered."""
        return sum(value for (name, *_), value in self.metrics().items() if name == "arclight_in_flight")

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def stop(self) -> str:
        """Stop the server by a signal and return its standard error."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        return self.process.said()[1]

    def resident(self) -> int:
        """Bytes of memory in use."""
        return psutil.Process(self.process.pid).memory_info().rss


@contextmanager
def running(*arguments: str, program: str = str(HERE / "host.py"), **limits: Any) -> Iterator[Server]:
    port = free_port()
    with started([program, f"--port={port}", f"--limits={json.dumps(limits)}", *arguments], port) as server:
        yield server


@contextmanager
def started(words: list[str], port: int, cwd: Path | None = None) -> Iterator[Server]:
    """Start a Python program that serves on ``port``; give it once it is ready, and end it afterwards."""
    with warm.Program(*words, cwd=cwd) as process:
        server = Server(port, process)
        while True:
            try:
                assert server.get("/health").json()["ready"]
                break
            except httpx.ConnectError:
                assert process.poll() is None, process.said()[1]
                time.sleep(0.05)
        yield server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """One server with the default limits, shared by the tests that leave it as it was."""
    with running() as server:
        yield server


@pytest.fixture
def serve_with() -> Iterator[Callable[..., Server]]:
    """Starts a server with given command-line arguments and limits; it ends with the test."""
    with ExitStack() as stack:
        yield lambda *arguments, **limits: stack.enter_context(running(*arguments, **limits))


@pytest.fixture(scope="session")
def chrome() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="session")
def one_box_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A detector that sees one code in every photo."""
    from tests.serve.programs import write_detector

    return made_once(tmp_path_factory, "one-box.onnx", lambda path: write_detector(path, task="detect"))


@pytest.fixture(scope="session")
def affine_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program of tensors: y = 2 x + 1, of any number of rows of three."""
    from tests.serve.programs import write_affine

    return made_once(tmp_path_factory, "affine.onnx", write_affine)


@pytest.fixture(scope="session")
def language_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of `programs.language_model`."""
    from tests.serve.programs import write_language_program

    return made_once(tmp_path_factory, "lm.onnx", write_language_program)


@pytest.fixture(scope="session")
def embedding_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of the embeddings of `programs.language_model`."""
    from tests.serve.programs import write_embedding_program

    return made_once(tmp_path_factory, "embed.onnx", write_embedding_program)


@pytest.fixture(scope="session")
def all_tasks(
    tmp_path_factory: pytest.TempPathFactory,
    one_box_path: Path,
    affine_path: Path,
    language_path: Path,
    embedding_path: Path,
) -> Iterator[Server]:
    """A server of a model of each task: codes, affine, lm and embed."""
    from tests.serve.test_tensors import SERVE

    script = tmp_path_factory.mktemp("all-tasks") / "serve.py"
    script.write_text(SERVE)
    limits = ["--limits.linger_s=0.2", "--limits.body_idle_s=1", "--limits.deadline_s=5", "--limits.refusal_s=0.05"]
    models = [f"codes={one_box_path}", f"affine={affine_path}", f"lm={language_path}", f"embed={embedding_path}"]
    with running(*models, *limits, program=str(script)) as server:
        yield server


@pytest.fixture
def sample() -> Callable[[str], bytes]:
    """The bytes of one of the page's sample photos."""
    return lambda name: (SAMPLES / f"{name}.jpg").read_bytes()
