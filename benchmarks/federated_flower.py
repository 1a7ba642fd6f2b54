"""Plain Flower FedAvg and our session under the same SuperLink: the same model, the same clients, nothing trained."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.federated.transports.superlink import Deployment, until

from arclight.cli.federate.flower import write_app
from benchmarks.federated_plane import digest, peak_of, round_seconds

_SERVER = '''
"""FedAvg as Flower has it; writes when each round began."""

import json
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


class Timed(FedAvg):
    times = []

    def configure_train(self, *arguments):
        self.times.append(time.time())
        return super().configure_train(*arguments)


@app.main()
def main(grid, context):
    config = context.run_config
    random = np.random.default_rng(0)
    each = int(config["megabytes"] * 1e6 / 4 / 20)
    arrays = {f"layer.{n}": Array(random.standard_normal(each, dtype=np.float32)) for n in range(20)}
    strategy = Timed(fraction_evaluate=0.0)
    strategy.start(grid=grid, initial_arrays=ArrayRecord(arrays), num_rounds=config["rounds"], timeout=600)
    Path(config["times"]).write_text(json.dumps([*strategy.times, time.time()]))
'''
_CLIENT = '''
"""Sends back what it got and a little more."""

import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    number = context.node_config["partition-id"]
    note = Path(context.run_config["first"]) / str(number)
    if not note.exists():
        note.write_text(str(time.time()))
    arrays = {name: Array(one.numpy() + np.float32(0.01 * (1 + number))) for name, one in message.content["arrays"].items()}
    content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": 10 + 3 * number})})
    return Message(content, reply_to=message)
'''
_BUILDING = "from benchmarks.federated_sites import client, server\n"
KINDS = ("ours", "flower")
_ENVIRONMENT = {"OMP_NUM_THREADS": str(os.cpu_count()), "OMP_WAIT_POLICY": "passive"}


@dataclass
class Peers:
    """Seconds of rounds, seconds from the start of all processes, and from `flwr run`, to the first fit, and peak bytes of the server's process."""

    rounds: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    starts: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    runs: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    peaks: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    digests: set[str] = field(default_factory=set)
    medians: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    """Seconds of the median round in each deployment, of which both have a run."""


def compare(folder: Path, megabytes: float, *, repeats: int, theirs: int, ours: int) -> Peers:
    """Run both in turns, each first in every second deployment. theirs, ours: rounds of a run.

    Flower is as it is by default: executors look for work every second. Torch's threads wait without spinning, as three processes
    share the processors.
    """
    found = Peers()
    for number in range(repeats):
        order = KINDS if number % 2 == 0 else KINDS[::-1]
        here = folder / str(number)
        began = time.time()
        with Deployment(here, 2, names=("0", "1"), environment=_ENVIRONMENT) as flower:
            for place, kind in enumerate(order):
                first = here / f"first-{kind}"
                first.mkdir()
                asked = time.time()
                rounds = theirs if kind == "flower" else ours
                seconds = _run(
                    flower,
                    here,
                    kind,
                    found,
                    {"megabytes": megabytes, "rounds": rounds, "clients": 2, "first": str(first)},
                )
                found.rounds[kind] += seconds
                found.medians[kind].append(statistics.median(seconds))
                at = min(float(one.read_text()) for one in first.iterdir())
                found.runs[kind].append(at - asked)
                if place == 0:
                    found.starts[kind].append(at - began)
    return found


def _run(flower: Deployment, here: Path, kind: str, found: Peers, config: Mapping[str, Any]) -> list[float]:
    times, run = here / "times.json", here / kind / "run"
    run.parent.mkdir()
    if kind == "ours":
        app = write_app(here / "app-ours", "ours", _BUILDING, config={**config, "folder": str(run)})
        process = "arclight.federated.transports.server_process"
    else:
        files = {"server_app.py": _SERVER, "client_app.py": _CLIENT}
        app = write_app(here / "app-flower", "plain", "", files=files, config={**config, "times": str(times)})
        process = "flwr-serverapp"
    flwr, servers = flower.run(app), []
    end = time.monotonic() + 900

    def over() -> bool:
        nonlocal servers
        if not servers:
            servers = [one.pid for one in flower.processes(process)]
        for one in servers:
            found.peaks[kind] = max(found.peaks[kind], peak_of(one))
        return flwr.poll() is not None

    until(over, end - time.monotonic(), f"the run of {kind}: {flower.log('run')[-2000:]}")
    if kind == "ours":
        if "is over after round" not in flower.log("run"):
            raise RuntimeError(f"our run has failed: {flower.log('run')[-3000:]}")
        found.digests.add(digest(run))
        return round_seconds(run)
    if not times.exists():
        raise RuntimeError(f"Flower's run has failed: {flower.log('run')[-3000:]}")
    stamps = json.loads(times.read_text())
    return [after - before for before, after in itertools.pairwise(stamps)]
