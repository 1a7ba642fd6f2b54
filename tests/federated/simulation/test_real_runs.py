"""What is simulated against what happens: a server and four nodes, each a process, over HTTP through lines of a known rate."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from statistics import median

import pytest
import torch
from tests.federated.transports.serving import REPOSITORY, Line

from arclight.federated.coordination.settings import Waiting
from arclight.federated.server.server import Server
from arclight.federated.settings import Federation
from arclight.federated.simulation.settings import Fleet, Links, Speeds
from arclight.federated.simulation.simulate import simulate
from arclight.federated.transports.http_server import HttpServer

RATE = 1_500_000
"""Bytes a second of each node's line."""
STEPS, PAUSE, ROUNDS = 20, 0.06, 4
SHAPES = {"a.weight": (700, 600), "b.weight": (300, 500), "c.bias": (513,)}


@pytest.mark.slow
def test_a_simulated_run_lasts_as_long_as_a_real_one_of_four_processes(tmp_path: Path) -> None:
    federation = Federation(
        clients=4, rounds=ROUNDS, local_steps=STEPS, evaluate_every=0, waiting=Waiting(nodes=4, beat_every=0.5, join=60.0)
    )  # fmt: skip
    torch.manual_seed(0)
    server = Server(federation, {name: torch.randn(shape) for name, shape in SHAPES.items()}, folder=tmp_path / "run")
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
                str(tmp_path / name),
            ]
            sites.append(
                subprocess.Popen(
                    command, cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
                )
            )

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
    rounds = history[2:]  # the first has processes that start
    trained = median(seconds for r in rounds for seconds in r.seconds_by_client.values())
    fleet = Fleet(links=Links(up=8 * RATE, down=8 * RATE, latency=0.004), speeds=Speeds(step=trained / STEPS))
    simulated = simulate(federation, SHAPES, fleet)
    real = median(r.seconds["round"] for r in rounds)
    assert simulated.round_seconds == pytest.approx(real, rel=0.15), (simulated.rounds, [r.seconds for r in rounds])
    moved = sum(line.up + line.down for line in lines)
    assert simulated.bytes_up + simulated.bytes_down == pytest.approx(moved, rel=0.05)
