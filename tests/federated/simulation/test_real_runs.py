"""What is simulated against what happens: a server and four nodes, each a process, over HTTP through lines of a known rate."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median

import pytest
import torch
from tests.federated.transports.serving import REPOSITORY, Line

from arclight.federated.coordination.settings import Waiting
from arclight.federated.server.history import Round
from arclight.federated.server.server import Server
from arclight.federated.settings import Federation
from arclight.federated.simulation.settings import Costs, Fleet, Links, Speeds
from arclight.federated.simulation.simulate import simulate
from arclight.federated.transports.http_server import HttpServer

RATE = 1_000_000
"""Bytes a second of each node's line."""
STEPS, PAUSE = 40, 0.06
SHAPES = {"a.weight": (700, 600), "b.weight": (300, 500), "c.bias": (513,)}
FEDERATION = Federation(
    clients=4, rounds=4, local_steps=STEPS, evaluate_every=0, waiting=Waiting(nodes=4, beat_every=1.0, join=60.0)
)  # fmt: skip


def measured_rate() -> float:
    """Bytes a second that a line really carries on this machine as it is now: sleeping and waking take time, too."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        line = Line(listener.getsockname()[1])
        line.rate = RATE
        with socket.create_connection(("127.0.0.1", line.port), 10) as near:
            far, _ = listener.accept()
            with far:
                size, got, began = RATE, 0, time.monotonic()
                sending = threading.Thread(target=near.sendall, args=(bytes(size),))
                sending.start()
                while got < size:
                    got += len(far.recv(1 << 16))
                sending.join(60)
        line.close()
    return size / (time.monotonic() - began)


def real_run(folder: Path) -> tuple[list[Round], int, float]:
    """Rounds of a run of four processes but for the first, in which they start; bytes moved; and their lines' rate."""
    torch.manual_seed(0)
    server = Server(FEDERATION, {name: torch.randn(shape) for name, shape in SHAPES.items()}, folder=folder / "run")
    lines: list[Line] = []
    sites: list[subprocess.Popen[bytes]] = []

    def ready(http: HttpServer) -> None:
        path = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)])
        for name in "0123":
            line = Line(int(http.address.rpartition(":")[2]))
            line.rate = RATE
            lines.append(line)
            command = [
                sys.executable,
                "-m",
                "tests.federated.simulation.site",
                line.address,
                name,
                str(PAUSE),
                str(folder / name),
            ]
            sites.append(
                subprocess.Popen(
                    command, cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
                )
            )

    rate = measured_rate()
    watchdog = threading.Timer(150.0, lambda: [site.kill() for site in sites])
    watchdog.start()
    try:
        history = server.serve(ready=ready)
    finally:
        watchdog.cancel()
        for site in sites:
            site.kill()
            site.wait(30)
        for line in lines:
            line.close()
    return history[2:], sum(line.up + line.down for line in lines), rate


@pytest.mark.slow
def test_a_simulated_run_lasts_as_long_as_a_real_one_of_four_processes(tmp_path: Path) -> None:
    """From measured step times, folds and lines; what is left out is what nodes and server compute besides."""
    rounds, moved, rate = real_run(tmp_path)
    folded = median(r.seconds["fold"] for r in rounds)
    trained = median(seconds for r in rounds for seconds in r.seconds_by_client.values())
    fleet = Fleet(
        links=Links(up=8 * rate, down=8 * rate, latency=0.004), speeds=Speeds(step=trained / STEPS),
        costs=Costs(round=folded, fold=0.0, step=0.0),
    )  # fmt: skip
    simulated = simulate(FEDERATION, SHAPES, fleet)
    real = median(r.seconds["round"] for r in rounds)
    assert simulated.round_seconds == pytest.approx(real, rel=0.15), (simulated.rounds, [r.seconds for r in rounds])
    assert simulated.bytes_up + simulated.bytes_down == pytest.approx(moved, rel=0.05)
