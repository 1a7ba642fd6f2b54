"""A node in a process of its own, whose client trains by sleeping: ``python -m tests.federated.simulation.site address name pause folder``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tests.federated.fakes import RandomUpdates

from arclight.federated.clients.client import Client
from arclight.federated.clients.node import Node
from arclight.federated.transports.http_client import HttpLink


def main(address: str, name: str, pause: str, folder: str) -> None:
    torch.set_num_threads(1)
    link = HttpLink(address, Path(folder) / "cache")
    Node(
        link,
        [Client(name, learner=lambda _: RandomUpdates(1.0, pause_s=float(pause)))],
        Path(folder) / "node",
        f"node-{name}",
    ).run()
    link.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
