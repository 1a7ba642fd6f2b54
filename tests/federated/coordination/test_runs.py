"""Asynchronous and streamed rounds through a whole server, against closed forms."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tests.federated.fakes import Quadratic, ScriptedNode

from arclight.federated.coordination.settings import Buffered, Streaming, Waiting
from arclight.federated.protocol import Close, Fit, Wait
from arclight.federated.server.server import Server
from arclight.federated.settings import Federation
from arclight.federated.transports.link import InProcessLink

CALM = Waiting(heartbeat_interval_s=20.0)


def test_a_buffered_run_weighs_stale_updates_less(tmp_path: Path) -> None:
    """Two updates a step; the slow client's first comes a step late, and was made from the weights before.

    The sum is divided by the buffer's size, not by what is left of the weights: an all stale buffer steps less far.
    """
    federation = Federation(
        clients=3, rounds=2, local_steps=1, evaluate_every=0, buffered=Buffered(size=2, max_staleness=3), weigh_by="equal", waiting=CALM
    )  # fmt: skip
    start = torch.tensor([2.0, -4.0], dtype=torch.float64)
    targets = {"0": 1.0, "1": 3.0, "2": 10.0}
    server = Server(federation, {"w": start}, folder=tmp_path / "run")
    with server.opened() as run:
        nodes = {
            name: ScriptedNode(InProcessLink(run.service), {name: Quadratic(to)}, f"node {name}")
            for name, to in targets.items()
        }
        orders = {}
        for name, node in nodes.items():
            node.join()
            orders[name] = node.ask()
        slow = nodes["2"].trained(fit(orders["2"]))
        for name in "01":
            assert nodes[name].send(nodes[name].trained(fit(orders[name]))).accepted
        second = fit(nodes["0"].ask())
        assert (second.round, second.clock) == (2, 1)
        assert nodes["2"].send(slow).accepted
        assert nodes["0"].send(nodes["0"].trained(second)).accepted
        run.wait(60)
        assert isinstance(nodes["1"].ask(), Close)
    between = start - 0.1 * ((start - 1.0) + (start - 3.0)) / 2
    stale = 1 / math.sqrt(2)
    change = (0.1 * (between - 1.0) + stale * 0.1 * (start - 10.0)) / 2
    torch.testing.assert_close(server.weights()["w"], between - change, rtol=1e-12, atol=1e-12)


def fit(order: object) -> Fit:
    assert isinstance(order, Fit), order
    return order


def test_a_streamed_run_steps_a_fragment_each_round_from_the_weights_of_the_round_before_the_last(
    tmp_path: Path,
) -> None:
    federation = Federation(
        clients=1, rounds=4, local_steps=2, evaluate_every=0, streaming=Streaming(fragments=2, overlap=1), waiting=CALM
    )  # fmt: skip
    start = {f"blocks.{n}.w": torch.full((3,), float(n + 2), dtype=torch.float64) for n in range(2)}
    server = Server(federation, start, folder=tmp_path / "run")
    with server.opened() as run:
        node = ScriptedNode(InProcessLink(run.service), {"0": Quadratic(0.0)}, "node")
        node.join()
        bases = []
        first = fit(node.ask())
        ahead = fit(node.ask(having=[first]))  # while the first is fitted
        assert [(o.round, o.fragment, o.steps, o.clock) for o in (first, ahead)] == [(1, 1, 1, 0), (2, 0, 1, 1)]
        assert first.base == ahead.base
        assert isinstance(node.ask(wait=0.1, having=[first, ahead]), Wait)
        for order in (first, ahead):
            send(node, order)
        while not isinstance(order := node.ask(), Close):
            bases.append(fit(order).base)
            send(node, fit(order))
        run.wait(60)
    assert len(set(bases)) == 2
    for n in range(
        2
    ):  # each was stepped twice, by 0.1 of what its base then was; a base is a round old, the other fragment's turn
        torch.testing.assert_close(
            server.weights()[f"blocks.{n}.w"], start[f"blocks.{n}.w"] * 0.9**2, rtol=1e-12, atol=1e-12
        )


def send(node: ScriptedNode, order: Fit) -> None:
    before = node.weights(order.weights)
    turn = [key for key in before if key == f"model/blocks.{order.fragment}.w"]
    outcome = node.learners[order.client].fit(order, before, lambda step, loss: None)
    assert node.send(node.packed(order, {key: before[key] - outcome.tensors[key] for key in turn}, outcome)).accepted


def test_buffered_rounds_are_of_changes() -> None:
    with pytest.raises(ValueError, match="set send"):
        Federation(buffered=Buffered(size=2), send="weights")
