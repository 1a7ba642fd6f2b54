"""Training on a corpus at an address beside the same on disk: the share of the time in which a step waits for its batch.

A process of its own serves the corpus over HTTP on the loopback: 100 Mb/s over all connections together, every answer 20 ms late. The corpus,
bytes of Python's own sources, is shuffled as a whole and larger than the local folder, which is empty when a run begins: each sample of 256
tokens is in another block of 64 KiB. Runs at the address and on disk take turns. Used by `benchmarks.moe`, and alone:
``python -m benchmarks.remote_stall``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from arclight.data.loader import ResumableLoader
from arclight.optim.settings import AdamW
from arclight.parallel import initialize
from arclight.text import ByteTokenizer, Text, TextDataModule, build_model
from arclight.text.data.corpus import held_out, write_corpus
from arclight.text.data.sources import STDLIB, documents
from arclight.text.loss import cross_entropy

MEGABITS, LATENCY_S = 100.0, 0.02
CORPUS_BYTES, FOLDER_BYTES = 2**24, 2**22
LENGTH, ROWS = 256, 4
SIZES: dict[str, Any] = {"vocab_size": 320, "dim": 128, "layers": 4, "heads": 4, "kv_heads": 2, "hidden": 384}


class _Link:
    """One link for all connections: bytes take their turn at its rate."""

    def __init__(self, megabits: float) -> None:
        self._seconds_per_byte, self._lock, self._free = 8e-6 / megabits, threading.Lock(), 0.0

    def send(self, size: int) -> None:
        with self._lock:
            self._free = max(self._free, time.monotonic()) + size * self._seconds_per_byte
            until = self._free
        time.sleep(max(0.0, until - time.monotonic()))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    folder: Path
    link: _Link

    def log_message(self, *_: Any) -> None: ...

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        time.sleep(LATENCY_S)
        path = self.folder / self.path.lstrip("/")
        if not path.is_file():
            self.send_error(404)
            return
        size, wanted = path.stat().st_size, self.headers.get("Range")
        first, last = 0, size - 1
        if wanted:
            begin, _, end = wanted.removeprefix("bytes=").partition("-")
            first, last = int(begin), min(int(end), size - 1)
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(last - first + 1))
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.end_headers()
        if body:
            with path.open("rb") as file:
                file.seek(first)
                content = file.read(last - first + 1)
            self.link.send(len(content))
            self.wfile.write(content)


def _serve(folder: Path, ready: Connection) -> None:
    handler = type("Handler", (_Handler,), {"folder": folder, "link": _Link(MEGABITS)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    ready.send(server.server_address[1])
    server.serve_forever()


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder over the limited link; yield its address."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(folder, there), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{here.recv()}"
    finally:
        process.terminate()
        process.join()


def make_corpus(folder: Path) -> None:
    def some() -> Iterator[Any]:
        left = CORPUS_BYTES // 2  # two bytes a token
        for document in documents(STDLIB):
            if left <= 0:
                return
            left -= document.bytes
            yield document

    write_corpus(folder, some(), ByteTokenizer(), split=held_out(0.01), shard_bytes=2**20)


def run(place: str, cache: Path, steps: int) -> tuple[float, float, float]:
    """Train ``steps`` steps; return the seconds until the first batch, those of waiting for all others, and those of all steps."""
    settings = Text(data=place, sequence_length=LENGTH, batch_size=ROWS, cache=cache, remote_bytes=FOLDER_BYTES)
    data = TextDataModule(settings)
    data.prepare_data()
    data.setup("fit")
    model = build_model("llama3-debug", **SIZES)
    initialize(model, 0)
    optimizer = AdamW(lr=1e-3).build(model.named_parameters(), dict(model.named_parameters()))
    begin = time.perf_counter()
    batches = islice(ResumableLoader(data.train_dataloader(), seed=1).batches(0), steps)
    batch = next(batches)
    first, waited = time.perf_counter() - begin, 0.0
    begin = time.perf_counter()
    while batch is not None:
        hidden = model(batch["tokens"], positions=batch["positions"], documents=batch["documents"], logits=False)
        cross_entropy(hidden, model.output.weight, batch["labels"]).div(batch["labels"].numel()).backward()
        optimizer.step()
        optimizer.zero_grad()
        asked = time.perf_counter()
        batch = next(batches, None)
        waited += time.perf_counter() - asked
    total = time.perf_counter() - begin
    data.teardown("fit")
    return first, waited, total


def measure(quick: bool) -> tuple[dict[str, float], str]:
    """Return ``remote_stall``, the median share of the time of a remote run in which it waits longer than one on disk, and what was run."""
    rounds, steps = (1, 20) if quick else (3, 100)
    stalls, firsts, speeds = [], [], []
    with tempfile.TemporaryDirectory() as temporary:
        corpus = Path(temporary) / "corpus"
        make_corpus(corpus)
        with served(corpus) as address:
            for number in range(rounds):
                _, here, _ = run(str(corpus), Path(temporary) / f"{number}-disk", steps)
                first, there, total = run(address, Path(temporary) / f"{number}-remote", steps)
                stalls.append(max(0.0, there - here) / total)
                firsts.append(first)
                speeds.append(steps * ROWS * LENGTH / total)
    wanted = statistics.median(speeds) / LENGTH * 65536 * 8e-6
    note = (
        f"Remote: {rounds} runs of {steps} steps of {ROWS} x {LENGTH} tokens at an address and on disk in turn, {MEGABITS:g} Mb/s, {LATENCY_S * 1e3:g} ms; "
        f"stalled {', '.join(f'{one:.2%}' for one in stalls)} of the time behind the first batch, which came after "
        f"{statistics.median(firsts):.2f} s (median); {statistics.median(speeds):,.0f} tokens/s, which want about {wanted:.0f} Mb/s in blocks of 64 KiB."
    )
    return {"remote_stall": statistics.median(stalls)}, note


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="one short run of each")
    torch.set_num_threads(1)
    print(*measure(parser.parse_args().quick), sep="\n")
