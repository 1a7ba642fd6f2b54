"""Nodes whose line is busy while they train: nothing waits for what it does not need, and the weights know nothing of it."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.federated.fakes import LIMIT_S, NoisySteps, SlowLine
from tests.waiting import patiently

from arclight.federated.clients.client import Client
from arclight.federated.clients.node import Node
from arclight.federated.codecs.settings import Codec, Int8, Raw
from arclight.federated.coordination.records import RoundClosed, RoundCommitted
from arclight.federated.coordination.settings import Streaming, Waiting
from arclight.federated.protocol import Fit
from arclight.federated.server.server import Server
from arclight.federated.settings import Federation
from arclight.federated.transports.link import InProcessLink

VALUES = 40_000
PER_BYTE = 0.15 / (4 * VALUES)
"""A tensor takes 0.15 s either way."""
CALM = Waiting(heartbeat_interval_s=0.2, lease_s=60.0)


def begin(tensors: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {f"blocks.{n}.w": torch.randn(VALUES, generator=draw) for n in range(tensors)}


def lived(
    folder: Path,
    federation: Federation,
    learners: Mapping[str, NoisySteps],
    link: Callable[[InProcessLink], SlowLine] = SlowLine,
    nodes: Sequence[Sequence[str]] = (),
    on_event: Callable[[object], None] = lambda event: None,
) -> tuple[dict[str, torch.Tensor], list[float], list[SlowLine]]:
    """A run with one node for each of ``nodes`` (by default one for all clients): weights, when rounds were committed, and lines."""
    fragments = federation.streaming.fragments if federation.streaming is not None else 1
    committed: list[float] = []

    def observe(what: object) -> None:
        on_event(what)
        if isinstance(what, RoundCommitted):
            committed.append(time.monotonic())

    server = Server(federation, begin(fragments), folder=folder / "run", clients=list(learners), observer=observe)
    lines: list[SlowLine] = []
    failed: list[BaseException] = []

    def work(number: int, names: Sequence[str]) -> None:
        clients = [Client(name, learner=lambda _, name=name: learners[name]) for name in names]  # type: ignore[misc]
        try:
            Node(lines[number], clients, folder / f"node-{number}", f"node {number}").run()
        except BaseException as error:
            failed.append(error)
            raise

    with server.opened() as run:
        threads = []
        for number, names in enumerate(nodes or [list(learners)]):
            lines.append(link(InProcessLink(run.service)))
            threads.append(threading.Thread(target=work, args=(number, names), daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(4 * LIMIT_S)
            assert not thread.is_alive(), run.runtime.coordinator.status(run.runtime.now())
        assert not failed, failed
    return server.weights(), committed, lines


def streamed(rounds: int, overlap: int, fragments: int = 2, up: Codec | None = None) -> Federation:
    return Federation(
        clients=1, rounds=rounds, local_steps=4 * fragments, evaluate_every=0, waiting=CALM, up=up or Raw(),
        streaming=Streaming(fragments=fragments, overlap=overlap),
    )  # fmt: skip


def seconds(committed: Sequence[float], since: int = 2) -> float:
    """A round's, from one commit to the next, once the run has settled: of the one that others on this machine disturbed least."""
    return min(b - a for a, b in pairwise(committed[since:]))


def same(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(value, right[key]) for key, value in left.items())


@pytest.mark.slow
def test_a_streamed_round_takes_as_long_as_training_or_the_line_and_not_as_both(tmp_path: Path) -> None:
    """0.35 s of training, and of a fragment's exchange 0.15 s up and 0.15 s down; all of it longer beside a busy process."""

    def check(longer: float) -> None:
        took, shares = {}, {}
        for overlap in (0, 1):
            learner, folder = NoisySteps(pause=longer * 0.35 / 4), tmp_path / f"{longer} {overlap}"
            slow = functools.partial(SlowLine, per_byte=longer * PER_BYTE)
            _, committed, (line,) = lived(folder, streamed(6, overlap), {"0": learner}, slow)
            took[overlap] = seconds(committed)
            shares[overlap] = learner.busy / 6, sum(line.blobs.busy.values()) / 6
            assert learner.rounds == list(range(1, 7))
        trained, moved = shares[1]
        assert moved > 0.6 * trained, "there is something to hide"
        assert took[0] > 0.95 * sum(shares[0])
        assert took[1] < trained + 0.4 * moved
        assert took[1] < 0.75 * took[0]

    patiently(check, 1, 2, 4)


@pytest.mark.slow
def test_while_one_client_trains_the_update_of_another_goes_up(tmp_path: Path) -> None:
    """Plain rounds of four clients at one node: the line sends while the worker works, and only the last update is waited for."""

    def check(longer: float) -> None:
        learners = {str(n): NoisySteps(pause=longer * 0.1) for n in range(4)}
        federation = Federation(clients=4, rounds=4, local_steps=4, evaluate_every=0, waiting=CALM)
        slow = functools.partial(SlowLine, per_byte=2 * longer * PER_BYTE)
        _, committed, (line,) = lived(tmp_path / f"{longer}", federation, learners, slow)
        trained, up = sum(learner.busy for learner in learners.values()) / 4, line.blobs.busy["up"] / 4
        assert up > 0.5 * trained
        assert seconds(committed) < trained + 0.75 * up + line.blobs.busy["down"] / 4

    patiently(check, 1, 2, 4)


@pytest.mark.parametrize(
    ("fragments", "overlap", "up"),
    [
        (2, 1, Int8()),
        pytest.param(2, 1, Raw(), marks=pytest.mark.slow),
        *(pytest.param(*cut, up, marks=pytest.mark.slow) for cut in ((1, 1), (3, 2)) for up in (Raw(), Int8())),
    ],
)
def test_the_weights_know_nothing_of_lines_and_nodes(tmp_path: Path, fragments: int, overlap: int, up: Codec) -> None:
    """Two clients, one with a slow line and one with a slow worker, or the other way round, or at one node."""
    federation = replace(streamed(5, overlap, fragments, up), clients=2)
    ends = []
    for name, pauses, per_byte, nodes in (
        ("quick", (0.0, 0.0), 0.0, ("0", "1")),
        ("mixed", (0.0, 0.02), PER_BYTE / 4, ("0", "1")),
        ("other", (0.02, 0.0), PER_BYTE / 8, ("0", "1")),
        ("together", (0.0, 0.01), PER_BYTE / 8, ("01",)),
    ):
        learners = {str(n): NoisySteps(pause) for n, pause in enumerate(pauses)}
        made = itertools.count()

        def link(to: InProcessLink, per_byte: float = per_byte, made: Iterator[int] = made) -> SlowLine:
            return SlowLine(to, per_byte if next(made) == 0 else 0.0)

        weights, _, _ = lived(tmp_path / name, federation, learners, link, nodes)
        assert all(learner.rounds == list(range(1, 6)) for learner in learners.values())
        ends.append(weights)
    assert all(same(ends[0], other) for other in ends[1:])


def test_a_stalled_upload_does_not_block_training(tmp_path: Path) -> None:
    """An update goes up when the round after it has been trained, and not before; in plain rounds, when another client has been."""
    for name, federation, needed in (
        ("streamed", streamed(4, 1), [("0", 2)]),
        ("plain", Federation(clients=3, rounds=2, local_steps=2, evaluate_every=0, waiting=CALM), [("1", 1), ("2", 1)]),
    ):
        trained: dict[tuple[str, int], threading.Event] = {one: threading.Event() for one in needed}

        def on_step(order: Fit, step: int, trained: dict[Any, threading.Event] = trained) -> None:
            if step == order.steps - 1 and (order.client, order.round) in trained:
                trained[order.client, order.round].set()

        def hold(digest: str, trained: dict[Any, threading.Event] = trained) -> None:
            assert all(event.wait(LIMIT_S) for event in trained.values()), (
                "training waits for a line that it does not need"
            )

        def link(to: InProcessLink, hold: Callable[[str], None] = hold) -> SlowLine:
            line = SlowLine(to)
            line.blobs.on_up = hold
            return line

        learners = {str(n): NoisySteps(on_step=on_step) for n in range(federation.clients)}
        lived(tmp_path / name, federation, learners, link)
        assert all(learner.rounds == list(range(1, federation.rounds + 1)) for learner in learners.values())


def test_the_next_weights_come_down_while_the_round_before_is_trained(tmp_path: Path) -> None:
    """Round 2 does not end before a change of weights, which only round 3 needs, is on its way."""
    fetched, asked = threading.Event(), list[str]()

    def on_down(digest: str) -> None:
        asked.append(digest)
        if len(asked) > 1:  # the first are those that the run begins with
            fetched.set()

    def on_step(order: Fit, step: int) -> None:
        if order.round == 2 and step == order.steps - 1:
            assert fetched.wait(LIMIT_S), "what comes next is not fetched meanwhile"

    def link(to: InProcessLink) -> SlowLine:
        line = SlowLine(to)
        line.blobs.on_down = on_down
        return line

    learner = NoisySteps(on_step=on_step)
    lived(tmp_path, streamed(4, 1), {"0": learner}, link)
    assert learner.rounds == [1, 2, 3, 4]


def test_late_updates_are_dropped_and_cost_no_later_round(tmp_path: Path) -> None:
    """A round closes without a client whose line stands still: its update is given up, the next one counts."""
    federation = Federation(
        clients=2,
        rounds=4,
        local_steps=2,
        evaluate_every=0,
        waiting=Waiting(quorum=0.5, grace_s=0.0, heartbeat_interval_s=0.05, lease_s=60.0),
    )
    late, last, counted = threading.Event(), threading.Event(), threading.Event()
    blobs, contributors = list[str](), dict[int, tuple[str, ...]]()

    def on_step(order: Fit, step: int) -> None:
        if order.round == 3:
            late.set()
        if order.round == 4:
            last.set()

    def hold(digest: str) -> None:
        """Of the slow line: the first update until round 3, and what follows until the other client has begun the last round."""
        blobs.append(digest)
        assert (late if len(blobs) == 1 else last).wait(LIMIT_S)

    def give_way(digest: str) -> None:
        """Of the other line: the last round is the slow one's to close."""
        assert not last.is_set() or counted.wait(LIMIT_S)

    def on_event(event: object) -> None:
        if isinstance(event, RoundClosed):
            contributors[event.round] = event.clients
            if event.round == 4:
                counted.set()

    made = itertools.count()

    def link(to: InProcessLink) -> SlowLine:
        line = SlowLine(to)
        line.blobs.on_up = hold if next(made) == 0 else give_way
        return line

    # nodes of one process train one at a time: a client that waited in a step would keep the other from training
    learners = {"0": NoisySteps(), "1": NoisySteps(pause=0.1, on_step=on_step)}
    lived(tmp_path, federation, learners, link, ("0", "1"), on_event)
    assert contributors == {1: ("1",), 2: ("1",), 3: ("1",), 4: ("0",)}
    assert learners["1"].rounds == [1, 2, 3, 4]
    assert learners["0"].rounds[0] == 1
    assert not list((tmp_path / "node-0").rglob("finished/000001"))


def test_assertions_of_learners_reach_their_test(tmp_path: Path, assertions: list[AssertionError]) -> None:
    """A node reports what a learner raises as a failed client, and goes on."""

    def on_step(order: Fit, step: int) -> None:
        raise AssertionError("seen in a step")

    lived(tmp_path, streamed(1, 0), {"0": NoisySteps(on_step=on_step)})
    assert {str(one) for one in assertions} == {"seen in a step"}
    assertions.clear()
