"""The server under load: beside a bare FastAPI application, while programs are replaced, in overload, and over many requests.

Every server is a process of its own on loopback. Another holds the connections of its clients, 16 that stay open, and sends the next
request on each when the answer is there. All servers run the same program (64 numbers through a layer of 32 to 8) on one thread, as
JSON. The peers are `async def` endpoints of FastAPI under uvicorn and uvloop, without limits, metrics, access rules or a queue, once
with models of the request and of the answer, as FastAPI's guide declares them, and once with a bare `Request`; and LitServe as it
comes (a process for HTTP and one that computes). Rounds of the servers alternate, and the ratio is within a round. Clients and servers
share the machine's cores. CPU time is that of all processes of a server, in user space and in the kernel, and of the clients' process:
what else the machine does changes it less than requests per second. In overload, 64 clients send 16 rows each to a program of three
layers of 1024 and ask again as soon as they are refused, without regard to Retry-After; what recovers is the time of one request right
after they have stopped, and what is kept is answers per second beside those of two clients. A drain is a SIGTERM while 16 clients go on:
readiness falls, each answer closes its connection, clients make another for the next request, and end when one is refused; whatever else
than an answer of status 200 they get has failed. Texts: 8 of 48 tokens each, together and one after another.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from arclight.deploy import export
from arclight.parallel import initialize
from arclight.text import build_model
from arclight.text.data.tokenizer import ByteTokenizer
from arclight.text.language_program import export_language_model
from benchmarks.results import PEERS, SPREAD, Ratio, paired, parser, publish, versions

TYPED = """
import sys, numpy as np, uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from arclight.deploy import Program
class Numbers(BaseModel):
    data: list[float]
app, program = FastAPI(), Program.load(sys.argv[1], threads=1)
@app.post("/infer")
async def infer(given: Numbers) -> Numbers:
    x = np.array(given.data, np.float32).reshape(-1, 64)
    return Numbers(data=program(x).ravel().tolist())
uvicorn.run(app, port=int(sys.argv[2]), log_level="warning", access_log=False)
"""
BARE = """
import sys, numpy as np, uvicorn
from fastapi import FastAPI, Request
from arclight.deploy import Program
app, program = FastAPI(), Program.load(sys.argv[1], threads=1)
@app.post("/infer")
async def infer(request: Request):
    x = np.array((await request.json())["data"], np.float32).reshape(-1, 64)
    return {"data": program(x).ravel().tolist()}
uvicorn.run(app, port=int(sys.argv[2]), log_level="warning", access_log=False)
"""
LITSERVE = """
import sys, litserve, numpy as np, onnxruntime
class Small(litserve.LitAPI):
    def setup(self, device):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(sys.argv[1], options)
    def decode_request(self, request):
        return np.array(request["data"], np.float32).reshape(-1, 64)
    def predict(self, x):
        return self.session.run(None, {"x": x})[0]
    def encode_response(self, y):
        return {"data": y.ravel().tolist()}
if __name__ == "__main__":
    server = litserve.LitServer(Small(api_path="/infer"), accelerator="cpu")
    server.run(host="127.0.0.1", port=int(sys.argv[2]), log_level="warning", generate_client_file=False)
"""
OURS = "from arclight.cli import main; raise SystemExit(main())"


@contextmanager
def process(*words: str) -> Iterator[tuple[int, int]]:
    """Start a server by the arguments of an interpreter; give its port and process id once it listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = subprocess.Popen(
        [word.replace("PORT", str(port)) for word in words],
        env=environment, stdout=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                if started.poll() is not None:
                    raise SystemExit(f"a server ended with status {started.returncode} before it listened") from None
                time.sleep(0.05)
        yield port, started.pid
    finally:
        os.killpg(started.pid, signal.SIGKILL)  # with processes of its own
        started.wait()


def request(path: str, body: Any) -> bytes:
    content = json.dumps(body).encode()
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode()
        + content
    )


def infer(name: str, rows: int = 1) -> bytes:
    tensor = {"name": "x", "datatype": "FP32", "shape": [rows, 64], "data": [0.5] * 64 * rows}
    return request(f"/v2/models/{name}/infer", {"inputs": [tensor]})


class Client:
    """One connection that is kept open."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = b""
        self.is_over = False
        """Whether the server closes the connection after its answer."""

    def ask(self, message: bytes) -> int:
        """Return the status of the answer, which is read whole."""
        self.socket.sendall(message)
        while (status := self.status()) is None:
            pass
        return status

    def status(self) -> int | None:
        """Read what has come of an answer; return its status once it is whole."""
        piece = self.socket.recv(65536)
        if not piece:
            raise ConnectionResetError("a server closed a connection before its answer was whole")
        self._received += piece
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end:
            return None
        size = next((int(line[15:]) for line in head.split(b"\r\n") if line[:15].lower() == b"content-length:"), 0)
        if len(body) < size:
            return None
        self._received = b""
        self.is_over = b"\r\nconnection: close" in head.lower()
        return int(head[9:12])


def load(port: int, message: bytes, clients: int, until: Callable[[int], bool]) -> Counter[int]:
    """Let ``clients`` ask until ``until``, which gets the number of requests so far, is true; count the statuses."""
    statuses: Counter[int] = Counter()
    sent = itertools.count()
    with selectors.DefaultSelector() as connections:
        for _ in range(clients):
            if until(next(sent)):
                break
            client = Client(port)
            connections.register(client.socket, selectors.EVENT_READ, client)
            client.socket.sendall(message)
        while connections.get_map():
            for key, _ in connections.select():
                if (status := key.data.status()) is None:
                    continue
                statuses[status] += 1
                if until(next(sent)):
                    connections.unregister(key.fileobj)
                    key.data.socket.close()
                else:
                    key.data.socket.sendall(message)
    return statuses


def rate(port: int, message: bytes, clients: int, seconds: float) -> tuple[float, Counter[int]]:
    """Return answers of status 200 per second, and all statuses."""
    begun = time.monotonic()
    statuses = load(port, message, clients, lambda _: time.monotonic() - begun > seconds)
    return statuses[200] / (time.monotonic() - begun), statuses


def program(path: Path, width: int, layers: int, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    widths = [64, *[width] * layers]
    parts = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    export(
        nn.Sequential(*parts, nn.Linear(width, 8)),
        path,
        example_inputs=torch.rand(2, 64),
        input_names=["x"],
        output_names=["y"],
    )
    return path


def serving(*models: str, **limits: float) -> Any:
    chosen = (f"--limits.{name}={value}" for name, value in limits.items())
    return process(sys.executable, "-c", OURS, "serve", *models, "--port=PORT", *chosen)


@dataclass
class Rounds:
    """What was measured of one server, a number for each round."""

    per_s: list[float] = field(default_factory=list)
    server_us: list[float] = field(default_factory=list)
    """CPU time of the server's processes for each request, microseconds."""
    client_us: list[float] = field(default_factory=list)


def beside_others(folder: Path, quick: bool) -> dict[str, Rounds]:
    """Return requests per second and CPU times of our server, of FastAPI's two and, where it is installed, of LitServe, in rounds."""
    seconds, rounds = (0.3, 2) if quick else (1.5, 9)
    small = program(folder / "small.onnx", 32, 1)
    plain = request("/infer", {"data": [0.5] * 64})
    with ExitStack() as servers:
        started = {
            "ours": servers.enter_context(serving(f"m={small}", queue=32, threads=1)),
            "fastapi": servers.enter_context(process(sys.executable, "-c", TYPED, str(small), "PORT")),
            "bare_fastapi": servers.enter_context(process(sys.executable, "-c", BARE, str(small), "PORT")),
        }
        if litserve_version() is not None:
            script = folder / "small_server.py"
            script.write_text(LITSERVE)
            started["litserve"] = servers.enter_context(process(str(PEERS), str(script), str(small), "PORT"))
            while Client(started["litserve"][0]).ask(plain) != 200:  # it listens before its workers are ready
                time.sleep(0.1)
        found = {name: Rounds() for name in started}
        for number in range(rounds + 1):  # the first does not count
            for name, (port, pid) in started.items():
                server_s, client_s = cpu_s(pid), time.process_time()
                done, statuses = rate(port, infer("m") if name == "ours" else plain, 16, seconds)
                if set(statuses) != {200}:
                    raise SystemExit(f"answers of {name} other than 200: {statuses}")
                if number:
                    found[name].per_s.append(done)
                    found[name].server_us.append((cpu_s(pid) - server_s) / statuses[200] * 1e6)
                    found[name].client_us.append((time.process_time() - client_s) / statuses[200] * 1e6)
    return found


def cpu_s(pid: int) -> float:
    """Return the CPU time that a process and those below it have taken, seconds."""
    server = psutil.Process(pid)
    return sum(sum(one.cpu_times()[:2]) for one in (server, *server.children(recursive=True)))


def litserve_version() -> str | None:
    """Return the version of LitServe that `make bench-peers` has installed."""
    if not PEERS.exists():
        return None
    code = "import importlib.metadata; print(importlib.metadata.version('litserve'))"
    asked = subprocess.run([PEERS, "-c", code], capture_output=True, text=True, check=False)
    return asked.stdout.strip() if asked.returncode == 0 else None


def swapped(folder: Path, quick: bool) -> tuple[int, int]:
    """Return the requests that failed while a program was replaced twice under load, and all of them."""
    new = [program(folder / f"new-{seed}.onnx", 32, 1, seed) for seed in (1, 2)]
    path = folder / "swapped.onnx"
    shutil.copy(program(folder / "first.onnx", 32, 1, 3), path)
    with serving(f"m={path}", reload_s=0.1, queue=32) as (port, _):
        done = threading.Event()

        def swap() -> None:
            for one in new:
                time.sleep(0.5 if quick else 3)
                shutil.copy(one, folder / "staged")
                os.replace(folder / "staged", path)
            time.sleep(1 if quick else 3)
            done.set()

        thread = threading.Thread(target=swap)
        thread.start()
        statuses = load(port, infer("m"), 8, lambda _: done.is_set())
        thread.join()
        client = socket.create_connection(("127.0.0.1", port))
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        text = b"".join(iter(lambda: client.recv(65536), b"")).decode()
        client.close()
    if 'arclight_reloads_total{model="m",outcome="replaced"} 2.0' not in text:
        raise SystemExit("the programs were not replaced twice while requests went on")
    return sum(statuses.values()) - statuses[200], sum(statuses.values())


def drained(folder: Path, drains: int) -> tuple[int, int]:
    """Return the requests that failed while as many servers ended under load, and all of them."""
    path, message = program(folder / "drained.onnx", 32, 1), infer("m")
    ready = b"GET /v2/health/ready HTTP/1.1\r\nHost: localhost\r\n\r\n"
    statuses: Counter[int] = Counter()
    for _ in range(drains):
        with serving(f"m={path}", queue=32, drain_s=1.0) as (port, pid):
            while Client(port).ask(ready) != 200:
                time.sleep(0.05)
            met = [Counter[int]() for _ in range(16)]
            clients = [threading.Thread(target=ask_until_refused, args=(port, message, found)) for found in met]
            for client in clients:
                client.start()
            time.sleep(0.5)
            os.kill(pid, signal.SIGTERM)
            while Client(port).ask(ready) != 503:
                pass
            asked = sum(found.total() for found in met)
            for client in clients:
                client.join()
        one = sum(met, Counter[int]())
        if one.total() == asked:
            raise SystemExit("nothing was answered between the fall of readiness and the end of the listener")
        statuses += one
    return statuses.total() - statuses[200], statuses.total()


def ask_until_refused(port: int, message: bytes, statuses: Counter[int]) -> None:
    """Send requests on a connection for as long as the server keeps it, then on another; count their statuses, 0 for a broken connection."""
    while True:
        try:
            client = Client(port)
        except ConnectionRefusedError:
            return
        except OSError:
            statuses[0] += 1
            continue
        try:
            while not client.is_over:
                statuses[client.ask(message)] += 1
        except OSError:
            statuses[0] += 1
        client.socket.close()


def overloaded(folder: Path, quick: bool) -> tuple[float, Ratio, Counter[int]]:
    """Return the seconds of a request right after overload, the capacity kept in it, and the statuses meanwhile."""
    seconds, rounds = (0.5, 2) if quick else (3.0, 5)
    message, slowest, calm, full, statuses = infer("m", 16), 0.0, [], [], Counter[int]()
    with serving(f"m={program(folder / 'large.onnx', 1024, 3)}") as (port, _):
        for _ in range(rounds):
            calm.append(rate(port, message, 2, seconds)[0])
            accepted, met = rate(port, message, 64, seconds)
            begun, client = time.monotonic(), Client(port)
            status = client.ask(message)
            slowest = max(slowest, time.monotonic() - begun)
            client.socket.close()
            if status != 200 or set(met) - {200, 429, 503}:
                raise SystemExit(f"an answer of {status} after the overload, {met} in it")
            full.append(accepted)
            statuses.update(met)
    return slowest, paired(full, calm), statuses


def growth_mb(folder: Path, quick: bool) -> tuple[float, int]:
    """Return how much a server grew from its 5,000th request on, in MB, and the number of requests since then."""
    before, more = (500, 500) if quick else (5_000, 50_000)
    with serving(f"m={program(folder / 'grown.onnx', 32, 1)}", queue=32) as (port, pid):
        load(port, infer("m"), 16, lambda sent: sent >= before)
        held = psutil.Process(pid).memory_info().rss
        load(port, infer("m"), 16, lambda sent: sent >= more)
        return (psutil.Process(pid).memory_info().rss - held) / 1e6, more


def streams(folder: Path, quick: bool) -> Ratio:
    """Return the speed of 8 texts that are generated together over that of one at a time."""
    sizes = {"dim": 64, "layers": 2, "hidden": 128} if quick else {"dim": 512, "layers": 6, "hidden": 1408}
    model: Any = build_model("llama3-debug", **sizes, heads=8, kv_heads=4, vocab_size=259, max_positions=256)
    initialize(model, 0)
    model.eval().requires_grad_(False)
    model.output.weight[ByteTokenizer().eos] = 0  # a text has all of its tokens
    texts = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    path = export_language_model(model, folder / "lm.onnx", [texts], tokenizer=ByteTokenizer()).path
    message = request("/v1/completions", {"model": "lm", "prompt": "hello", "max_tokens": 48, "temperature": 0})
    together, single = [], []
    with serving(f"lm={path}", deadline_s=300.0) as (port, _):
        for number in range(3 if quick else 7):
            for clients, found in ((8, together), (1, single)):
                begun = time.monotonic()
                statuses = load(port, message, clients, lambda sent: sent >= 8)
                if statuses != {200: 8}:
                    raise SystemExit(f"texts were answered {statuses}")
                found += [time.monotonic() - begun] if number else []
    return paired(single, together)


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    quick = options.quick
    drains = 1 if quick else 20
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rates = beside_others(folder, quick)
        failed, asked = swapped(folder, quick)
        failed_at_end, asked_at_end = drained(folder, drains)
        recovery_s, kept, met = overloaded(folder, quick)
        grown, more = growth_mb(folder, quick)
        together = streams(folder, quick)
    over = {name: paired(rates["ours"].per_s, found.per_s) for name, found in rates.items() if name != "ours"}
    figures: dict[str, float | Ratio] = {
        **{f"throughput_over_{name}": ratio for name, ratio in over.items()},
        **{f"server_us_{name}": middle(found.server_us) for name, found in rates.items()},
        "recovery_seconds": recovery_s, "capacity_kept": kept,
        "failed_during_swap": failed, "failed_during_drain": failed_at_end, "rss_growth_mb": grown, "streams_over_single": together,
    }  # fmt: skip
    rows: Sequence[Sequence[str]] = [
        *(throughput_row(name, rates, over) for name in GOALS),
        *(cpu_row(name, found) for name, found in rates.items()),
        ["a request after overload, seconds (worst)", f"{met[200]} answered, {met[429] + met[503]} refused", f"{recovery_s:.3f}", "below 0.5"],
        ["capacity kept in overload", "64 clients beside 2", str(kept), "0.9"],
        ["requests failed during two swaps", f"of {asked}", str(failed), "0"],
        ["requests failed during drains", f"of {asked_at_end}, {drains} drains", str(failed_at_end), "0"],
        ["growth, MB", f"over {more} requests", f"{grown:.1f}", "at most 20"],
        ["8 texts together over one at a time", "48 tokens each", str(together), "2.5"],
    ]  # fmt: skip
    publish(
        "serve", "The server under load", ("measure", "what", f"figure; ratios: {SPREAD}", "goal"), rows, figures,
        options=options, packages=versions("fastapi", "starlette", "pydantic", "uvicorn", "uvloop", "onnxruntime")
        + f", litserve {litserve_version() or 'not installed'}",
        notes=__doc__.split("\n\n", 1)[1].strip(),
    )  # fmt: skip


NAMES = {
    "ours": "arclight serve", "fastapi": "FastAPI async", "bare_fastapi": "FastAPI async, bare Request", "litserve": "LitServe"
}  # fmt: skip
GOALS = {"fastapi": "3", "bare_fastapi": "", "litserve": "8"}
"""Least ratios of requests per second, of peers that have one."""


def throughput_row(peer: str, rates: dict[str, Rounds], over: dict[str, Ratio]) -> Sequence[str]:
    what, figure = "not measured: `make bench-peers` installs it", ""
    if peer in over:
        what = f"{middle(rates['ours'].per_s):.0f} against {middle(rates[peer].per_s):.0f}"
        figure = str(over[peer])
    return [f"requests/s, 16 clients, over {NAMES[peer]}", what, figure, GOALS[peer]]


def cpu_row(name: str, found: Rounds) -> Sequence[str]:
    clients = f"its clients: {middle(found.client_us):.0f}"
    return [
        f"CPU of a request to {NAMES[name]}, µs", clients, f"{middle(found.server_us):.0f}", "at most 90" if name == "ours" else ""
    ]  # fmt: skip


def middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


if __name__ == "__main__":
    main(parser(__doc__.split("\n")[0]).parse_args())
