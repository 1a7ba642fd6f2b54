"""Servers and sites of the federated benchmark, as other processes build them: a model of a given size, and clients that do not train."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from arclight import checkpoint
from arclight.federated.clients.client import Client
from arclight.federated.clients.learner import Outcome
from arclight.federated.clients.node import Node
from arclight.federated.codecs.settings import Codec, Int8, Raw, TopK
from arclight.federated.coordination.settings import Waiting
from arclight.federated.protocol import Evaluate, Fit
from arclight.federated.server.server import Server
from arclight.federated.settings import Federation
from arclight.federated.strategies import FedAvg
from arclight.federated.transports.http_client import HttpLink
from arclight.federated.transports.keys import NodeKey

TENSORS = 20
CODECS: dict[str, tuple[Codec, Codec]] = {
    "fp32": (Raw(), Raw()), "int8": (Int8(), Int8()), "topk": (TopK(share=0.03, bits=2), Int8()),
}  # fmt: skip
"""Up and down."""


def weights(megabytes: float) -> dict[str, torch.Tensor]:
    """float32 tensors, ``megabytes`` in all."""
    generator = torch.Generator().manual_seed(0)
    each = int(megabytes * 1e6 / 4 / TENSORS)
    return {f"layer.{number}": torch.randn(each, generator=generator) for number in range(TENSORS)}


class Echo:
    """Sends back what it got and a little more, so that each client's update is its own; ``noise`` makes it random."""

    def __init__(self, number: int, config: Mapping[str, Any]) -> None:
        self.number, self.config = number, config

    def fit(
        self, order: Fit, weights: Mapping[str, torch.Tensor], progress: Callable[[int, float | None], None]
    ) -> Outcome:
        if first := self.config.get("first", ""):
            note = Path(str(first)) / f"{self.number}"
            if not note.exists():
                note.write_text(str(time.time()))
        time.sleep(float(self.config.get("delay", 0.0)))
        tensors = {}
        generator = torch.Generator().manual_seed(1000 * order.round + self.number)
        for key, tensor in weights.items():
            change = torch.randn(tensor.shape, generator=generator) if self.config.get("noise") else 1.0 + self.number
            tensors[key] = torch.as_tensor(change).mul(0.01).add(tensor)
        progress(order.steps, None)
        return Outcome(tensors=tensors, samples=10 + 3 * self.number, tokens=0, steps=order.steps)

    def evaluate(self, order: Evaluate, weights: Mapping[str, torch.Tensor]) -> Outcome:
        raise NotImplementedError("nothing is measured here")

    def close(self) -> None:
        pass


def federation(config: Mapping[str, Any]) -> Federation:
    clients, (up, down) = int(config["clients"]), CODECS[str(config.get("codec", "fp32"))]
    return Federation(
        clients=clients, rounds=int(config["rounds"]), local_steps=1, strategy=FedAvg(lr=1.0), evaluate_every=0, up=up, down=down,
        waiting=Waiting(nodes=int(config.get("nodes", clients)), lease_s=120.0),
    )  # fmt: skip


def server(folder: Path, config: Mapping[str, Any]) -> Server:
    start = folder.parent / "start"
    if not start.exists():  # on the disk, as a run usually begins: a dict of tensors would stay with whoever made it
        checkpoint.save(start, {"model": weights(float(config["megabytes"]))})
    return Server(federation(config), start, folder=folder)


def client(name: str, config: Mapping[str, Any]) -> Client:
    return Client(name, learner=lambda folder: Echo(int(name), config))


def work(address: str, keys: Mapping[str, str], config: Mapping[str, Any], folder: Path, relay: str = "") -> None:
    """Run a node for each client over HTTP, all in this process, until the run is over. keys: files of the clients' nodes."""

    def node(name: str, key: str) -> None:
        link = HttpLink(relay or address, folder / name / "blobs", key=NodeKey.read(key), retry_timeout_s=60.0)
        Node(link, [client(name, config)], folder / name, f"node-{name}", retry_timeout_s=60.0).run()
        link.close()

    threads = [threading.Thread(target=node, args=pair, daemon=True) for pair in keys.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(1800)
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError("a node has not ended after 1800 s")


if __name__ == "__main__":
    torch.set_num_threads(1)
    said = json.loads(sys.stdin.readline())
    work(said["address"], said["keys"], said["config"], Path(said["folder"]), said.get("relay", ""))
