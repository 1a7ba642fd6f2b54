"""A node as a program: ``node_script.py <address> <folder> <workers> <client>...``; used by tests that kill it."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from tests.federated.clients.sites import build

from arclight.federated.clients.client import Client
from arclight.federated.clients.node import Node
from arclight.federated.clients.worker_processes import ProcessExecutor
from arclight.federated.transports.http_client import HttpLink


def main(address: str, folder: Path, workers: int, names: list[str]) -> None:
    clients = [
        Client(
            name,
            build=partial(build, str(folder / f"{name}.steps"), 0.05, seed=len(name)),
            trainer={"accelerator": "cpu"},
            seed=5,
        )
        for name in names
    ]
    node = Node(
        HttpLink(address, folder / "blobs"),
        ProcessExecutor(clients, workers) if workers else clients,
        folder / "node",
        "n",
    )
    node.run()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
