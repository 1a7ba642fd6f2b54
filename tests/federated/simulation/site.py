"""A node in a process of its own, whose client trains by sleeping: ``python -m tests.federated.simulation.site address name pause folder``."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from tests.federated.server.quadratic import Quadratic

from arclight.federated.clients import Outcome
from arclight.federated.clients.client import Client
from arclight.federated.clients.local_policy import LocalPolicy
from arclight.federated.clients.node import Node
from arclight.federated.protocol import Fit
from arclight.federated.transports.http_client import HttpLink


class Sleeper(Quadratic):
    """Steps of a known length, then weights that have changed."""

    def __init__(self, pause: float) -> None:
        super().__init__(target=1.0)
        self.pause = pause

    def fit(
        self, order: Fit, weights: Mapping[str, torch.Tensor], progress: Callable[[int, float | None], None]
    ) -> Outcome:
        for step in range(order.steps - 1):
            time.sleep(self.pause)
            progress(step + 1, None)
        time.sleep(self.pause)
        draw = torch.Generator().manual_seed(order.seed)  # equal updates would be sent once
        sent = LocalPolicy.of(order).travel.up(weights, order.round)
        now = {key: weights[key] + 0.01 * torch.randn(weights[key].shape, generator=draw) for key in sent}
        return Outcome(tensors=now, samples=order.steps, tokens=0, steps=order.steps, metrics={"train/loss": 1.0})


def main(address: str, name: str, pause: str, folder: str) -> None:
    torch.set_num_threads(1)
    link = HttpLink(address, Path(folder) / "cache")
    Node(link, [Client(name, learner=lambda _: Sleeper(float(pause)))], Path(folder) / "node", f"node-{name}").run()
    link.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
