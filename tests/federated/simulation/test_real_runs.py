"""Simulated runs compared with a server and four nodes, each a process, over HTTP at known rates."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import pytest
import torch
from tests import warm
from tests.federated.transports.serving import REPOSITORY, Line

from arclight.federated.coordination.records import RoundCommitted
from arclight.federated.coordination.settings import Streaming, Waiting
from arclight.federated.rounds.history import Round
from arclight.federated.server.server import Server
from arclight.federated.settings import Federation
from arclight.federated.simulation.fleet import Costs, Fleet, Links, Speeds
from arclight.federated.simulation.simulate import simulate
from arclight.federated.transports.http_server import HttpServer

RATE = 1_000_000
"""Bytes a second of each node's line."""
STEPS = 40
PLAIN = Federation(
    clients=4, rounds=3, local_steps=STEPS, evaluate_every=0, waiting=Waiting(nodes=4, heartbeat_interval_s=1.0, join_timeout_s=60.0)
)  # fmt: skip
STREAMED = replace(PLAIN, rounds=6, streaming=Streaming(fragments=4, overlap=1))


@dataclass(frozen=True)
class Real:
    """Hold the outcome of a run of four processes."""

    rounds: list[Round]
    committed: list[float]
    """When rounds were, that of the first weights included; of any clock."""
    moved: int
    """Bytes over all lines."""
    rate: float
    """Bytes a second of one."""


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


def real_run(folder: Path, federation: Federation, shapes: Mapping[str, tuple[int, ...]], pause: float) -> Real:
    """A run whose clients sleep ``pause`` seconds for each step."""
    torch.manual_seed(0)
    committed: list[float] = []

    def observe(what: object) -> None:
        if isinstance(what, RoundCommitted):
            committed.append(time.monotonic())

    start = {name: torch.randn(shape) for name, shape in shapes.items()}
    server = Server(federation, start, folder=folder / "run", observer=observe)
    lines: list[Line] = []
    sites: list[warm.Program] = []

    def ready(http: HttpServer) -> None:
        for name in "0123":
            line = Line(int(http.address.rpartition(":")[2]))
            line.rate = RATE
            lines.append(line)
            words = ("-m", "tests.federated.simulation.site", line.address, name, str(pause), folder / name)
            sites.append(warm.Program(*words, cwd=REPOSITORY, env={**os.environ, "OMP_NUM_THREADS": "1"}))

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
    return Real(history[1:], committed, sum(line.up + line.down for line in lines), rate)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("federation", "shapes", "pause"),
    [
        pytest.param(PLAIN, {"a.weight": (700, 600), "b.weight": (300, 500), "c.bias": (513,)}, 0.06, id="plain"),
        pytest.param(STREAMED, {f"blocks.{n}.weight": (300, 500) for n in range(4)}, 0.1, id="streamed"),
    ],
)
def test_a_simulated_run_lasts_as_long_as_a_real_one_of_four_processes(
    federation: Federation, shapes: dict[str, tuple[int, ...]], pause: float, tmp_path: Path
) -> None:
    """The simulation knows measured steps, folds and transfers, and no other computation of nodes and server.

    Another process on this machine takes time that the simulation does not know of: one of three runs must be undisturbed.
    """
    for attempt in range(3):
        real = real_run(tmp_path / str(attempt), federation, shapes, pause)
        begun = 1 + federation.overlap  # rounds in which processes start, and the line fills
        folded = median(r.seconds["fold"] for r in real.rounds[begun:])
        trained = median(seconds for r in real.rounds[begun:] for seconds in r.seconds_by_client.values())
        steps = STEPS // (federation.streaming.fragments if federation.streaming is not None else 1)
        fleet = Fleet(
            links=Links(up=8 * real.rate, down=8 * real.rate, latency_s=0.004), speeds=Speeds(step_s=trained / steps),
            costs=Costs(round_s=folded, fold=0.0, step=0.0),
        )  # fmt: skip
        simulated = simulate(federation, shapes, fleet)
        assert simulated.bytes_up + simulated.bytes_down == pytest.approx(real.moved, rel=0.05)
        lasted = real.committed[-1] - real.committed[begun]
        expected = simulated.rounds[-1].committed - simulated.rounds[begun - 1].committed
        # one part after the other would take longer
        once = trained + 2 * max(simulated.bytes_up, simulated.bytes_down) / (4 * federation.rounds * real.rate)
        overlapped = not federation.overlap or lasted < 0.85 * once * (federation.rounds - begun)
        if overlapped and expected == pytest.approx(lasted, rel=0.15):
            return
    pytest.fail(
        f"simulated {expected:.2f} s, lasted {lasted:.2f} s: {simulated.rounds}, {[r.seconds for r in real.rounds]}"
    )
