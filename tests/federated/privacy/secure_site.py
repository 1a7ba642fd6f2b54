"""A site as a program: ``secure_site.py <address> <folder> <client> <goal>``; used by tests that kill it."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.federated.fakes import Quadratic

from arclight.federated.clients.client import Client
from arclight.federated.clients.node import Node
from arclight.federated.transports.http_client import HttpLink


def main(address: str, folder: Path, name: str, goal: float) -> None:
    client = Client(name, learner=lambda _: Quadratic(goal, samples=int(name) + 3))
    Node(
        HttpLink(address, folder / "blobs", retry_timeout_s=30),
        [client],
        folder / "node",
        f"node of {name}",
        hold_s=2.0,
    ).run()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
