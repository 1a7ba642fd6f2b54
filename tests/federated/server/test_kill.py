"""A server that is killed at any write of its journal goes on, and nobody can tell from the weights."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.federated.fakes import Quadratic
from tests.federated.server.serving import LIMIT, Nodes, Servers, outcome

from arclight.federated.clients import Outcome
from arclight.federated.coordination.settings import Streaming, Waiting
from arclight.federated.protocol import Fit
from arclight.federated.settings import Federation
from arclight.federated.strategies import FedNesterov


def settings(rounds: int, streaming: Streaming | None = None) -> Federation:
    return Federation(
        clients=2,
        rounds=rounds,
        local_steps=3 * (streaming.fragments if streaming is not None else 1),
        streaming=streaming,
        strategy=FedNesterov(),
        waiting=Waiting(heartbeat_interval_s=0.2, lease_s=30.0),
        keep_rounds=2,
    )


def learners() -> dict[str, dict[str, Quadratic]]:
    return {"left": {"0": Quadratic(1.0, samples=3)}, "right": {"1": Quadratic(-2.0, samples=5)}}


def through(
    folder: Path, rounds: int, skip: int, streaming: Streaming | None = None
) -> tuple[int, dict[str, object], list[float], int]:
    """A run whose server is killed at every ``skip + 1``-th point of its commits of records, and at each where a state is saved.

    Kills, outcome, seconds to be back, and kills of the latter kind.
    """
    servers, trained = Servers(settings(rounds, streaming), folder / "run"), learners()
    used: list[tuple[int, str]] | None = [] if skip >= 0 else None
    kills = anew = 0
    with Nodes(folder / "nodes", servers.port, trained) as nodes:
        while (at := servers.through(used)) is not None:
            kills, anew = kills + 1, anew + at[1].endswith(" save")
            assert used is not None
            used.append(at)
            used.extend(_next(at, skip))
    assert nodes.errors == []
    steps = {client: learner.steps for mine in trained.values() for client, learner in mine.items()}
    assert steps == {"0": 3 * rounds, "1": 3 * rounds}, "a step was done again, or left out"
    return kills, outcome(folder / "run"), servers.ready, anew


def _next(at: tuple[int, str], count: int) -> list[tuple[int, str]]:
    """The points after one, of commits of one record; those of the history come less often."""
    when, what = at[1].split()
    if what not in ("append", "history"):
        return []
    order = ("before", "in", "after")
    first = at[0] * 3 + order.index(when)
    steps = range(1, 1 + count * (7 if what == "history" else 1))
    return [((first + step) // 3, f"{order[(first + step) % 3]} {what}") for step in steps]


@pytest.mark.parametrize(
    ("streaming", "skip"),
    [
        pytest.param(None, 14, id="whole"),
        pytest.param(Streaming(fragments=2, overlap=1), 4, marks=pytest.mark.slow, id="streaming"),
    ],
)
def test_a_server_killed_at_some_writes_ends_with_the_same_weights(
    tmp_path: Path, streaming: Streaming | None, skip: int
) -> None:
    _, undisturbed, *_ = through(tmp_path / "a", 3, -1, streaming)
    kills, disturbed, _, anew = through(tmp_path / "b", 3, skip, streaming)
    assert kills >= 12
    assert anew >= 3, "no kill while a state was saved"
    assert disturbed == undisturbed


class Held(Quadratic):
    """Trains once it may."""

    may, begun = threading.Event(), threading.Event()

    def fit(
        self, order: Fit, weights: Mapping[str, torch.Tensor], progress: Callable[[int, float | None], None]
    ) -> Outcome:
        self.begun.set()
        assert self.may.wait(LIMIT)
        return super().fit(order, weights, progress)


def test_a_suspended_server_waits_for_heartbeats_before_it_declares_nodes_lost(tmp_path: Path) -> None:
    patient = Waiting(heartbeat_interval_s=0.7, lease_s=30.0)  # a busy machine may keep a node silent for a while, too
    servers = Servers(replace(settings(1), waiting=patient), tmp_path / "run")
    with Nodes(tmp_path / "nodes", servers.port, {"left": {"0": Held(1.0)}, "right": {"1": Held(-2.0)}}) as nodes:
        process, told = servers.start(None)
        try:
            assert Held.begun.wait(LIMIT)
            for _ in range(2):
                time.sleep(0.5)
                assert process.pid is not None
                os.kill(process.pid, signal.SIGSTOP)
                time.sleep(1.5 * patient.silence_s)
                os.kill(process.pid, signal.SIGCONT)
            Held.may.set()
            process.join(LIMIT)
            assert process.exitcode == 0
        finally:
            Held.may.set()
            process.kill()
            told.close()
    assert nodes.errors == []
    log = (tmp_path / "server.log").read_text()
    assert "is over" in log
    assert "is lost" not in log


@pytest.mark.slow
def test_a_server_killed_at_every_write_ends_with_the_same_weights(tmp_path: Path) -> None:
    _, undisturbed, *_ = through(tmp_path / "a", 6, -1)
    kills, disturbed, ready, anew = through(tmp_path / "b", 6, 0)
    assert disturbed == undisturbed
    assert kills >= 100
    assert anew >= 6
    print(f"{kills} kills; back after {max(ready):.2f} s at most, {sorted(ready)[len(ready) // 2]:.2f} s in the median")
