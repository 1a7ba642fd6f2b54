"""A node as a process of its own, over HTTP, killed in the middle: nothing that was finished is done again, nothing hangs on."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from tests import warm
from tests.federated.clients.sites import Net, steps_in, weights_of
from tests.federated.fakes import AveragingServer
from tests.federated.transports.serving import Line

from arclight.federated.codecs.settings import Int8
from arclight.federated.coordination.settings import Streaming, Waiting
from arclight.federated.protocol import Failed, Join, Update
from arclight.federated.server.server import Server
from arclight.federated.settings import Federation
from arclight.federated.transports.http_server import HttpServer

SCRIPT = Path(__file__).parent / "node_script.py"


def beginning() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return weights_of(Net())


def node(address: str, folder: Path, workers: int, *names: str, spawns: bool = False) -> warm.Program:
    """spawns: its workers are its own children, and import all anew."""
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[3]), *sys.path])}
    return warm.Program(SCRIPT, address, folder, str(workers), *names, env=environment, merged=True, spawns=spawns)


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 300) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"{what}: not within {seconds} s"
        time.sleep(0.02)


def reached(file: Path, step: int) -> bool:
    steps = steps_in(file)
    return bool(steps) and steps[-1][1] >= step


@pytest.mark.slow
def test_a_node_that_is_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    order = {"rounds": 2, "steps": 10, "form": "delta", "checkpoint_every_steps": 3}
    ends = []
    for killed in (False, True):
        server, folder = (
            AveragingServer(tmp_path / f"server-{killed}", beginning(), ("a",), **order),
            tmp_path / f"node-{killed}",
        )
        with HttpServer(server) as http:
            if killed:
                with node(http.address, folder, 0, "a") as process:
                    wait_until(partial(reached, folder / "a.steps", 15), "the client is in its second round")
                    process.send_signal(signal.SIGKILL)
                    process.wait(60)
                assert server.round == 2
            with node(http.address, folder, 0, "a") as process:
                assert process.wait(300) == 0, process.said()[0]
        assert server.round == 3
        assert not server.of(Failed)
        ends.append(server.weights)
    for key, value in ends[0].items():
        assert torch.equal(value, ends[1][key]), key
    steps = [step for _, step in steps_in(tmp_path / "node-True" / "a.steps")]
    assert steps[:10] == list(range(10))
    again = len(steps) - 20
    assert 0 < again <= 3 + 1, "what the journal has is not done again (nor the step under way)"
    second = server.of(Join)[1]
    assert [(held.round, held.finished) for held in second.held if not held.finished] == [(2, False)]


def lose_update(round: int, gone: threading.Event, up: bool, before: int, chunk: bytes) -> bytes | None:
    """Keep the update of a round on its way until its node has gone, and then lose it."""
    if not up or b'"kind": "update"' not in chunk or b'"round": %d,' % round not in chunk:
        return chunk
    assert gone.wait(300)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_node_that_is_killed_while_it_trains_and_sends_comes_to_the_same_weights(
    tmp_path: Path, workers: int
) -> None:
    """A streamed run through a slow line, killed twice in a round while the update of the round before is on its way."""
    federation = Federation(
        clients=1, rounds=5, local_steps=16, evaluate_every=0, checkpoint_every_steps=3, up=Int8(),
        streaming=Streaming(fragments=2, overlap=1), waiting=Waiting(heartbeat_interval_s=0.3, lease_s=60.0),
    )  # fmt: skip
    ends, kills, overlapped = [], (9, 20), 0
    for killed in (False, True):
        torch.manual_seed(1)
        server = Server(federation, Net(), folder=tmp_path / f"run-{killed}", clients=["a"], run="run")
        folder = tmp_path / f"node-{killed}"
        with server.opened() as run, HttpServer(run.service, None, run.blobs) as http:
            line = Line(http.port)
            for at in kills if killed else ():
                gone = threading.Event()
                line.rate, line.change = 15_000, partial(lose_update, at // 8, gone)
                with node(line.address, folder, workers, "a") as process:
                    wait_until(partial(reached, folder / "a.steps", at), f"the client is at step {at}")
                    before = run.runtime.coordinator.state.open.get(at // 8)
                    overlapped += before is not None and not before.accepted
                    process.send_signal(signal.SIGKILL)
                    process.wait(20)
                gone.set()
            line.rate, line.change = None, lambda up, before, chunk: chunk
            with node(line.address, folder, workers, "a") as process:
                assert process.wait(300) == 0, process.said()[0]
            line.close()
            run.wait(10)
        ends.append([one.base for one in server.history])
    assert ends[0] == ends[1]
    assert overlapped == len(kills), "an update was on its way when its node was killed in the round after"
    steps = [step for _, step in steps_in(tmp_path / "node-True" / "a.steps")]
    assert sorted(set(steps)) == list(range(40))
    assert len(steps) - 40 <= len(kills) * (3 + 1), "what the journal has is not done again (nor the step under way)"


@pytest.mark.slow
def test_workers_end_with_a_node_that_is_killed(tmp_path: Path) -> None:
    server = AveragingServer(
        tmp_path / "server", beginning(), ("a", "bb"), rounds=2, steps=30, form="delta", checkpoint_every_steps=5
    )
    with HttpServer(server) as http:
        with node(http.address, tmp_path / "node", 2, "a", "bb", spawns=True) as process:
            wait_until(
                lambda: all(reached(tmp_path / "node" / f"{name}.steps", 12) for name in ("a", "bb")), "both train"
            )
            children = psutil.Process(process.pid).children(recursive=True)
            assert len(children) >= 2
            process.send_signal(signal.SIGKILL)
            process.wait(60)
            _, alive = psutil.wait_procs(children, timeout=60)
            assert not alive, "workers end with their node"
        with node(http.address, tmp_path / "node", 2, "a", "bb") as process:
            assert process.wait(100) == 0, process.said()[0]
    assert server.round == 3
    assert len(server.of(Update)) == 4
    for name in ("a", "bb"):
        steps = [step for _, step in steps_in(tmp_path / "node" / f"{name}.steps")]
        assert sorted(set(steps)) == list(range(60))
        assert len(steps) - 60 <= 6
