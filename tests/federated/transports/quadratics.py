"""A federation of quadratics, as apps under Flower and tests in this process build it alike."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tests.federated.fakes import Quadratic

from arclight.federated.clients.client import Client
from arclight.federated.coordination.settings import Waiting
from arclight.federated.server import server_run
from arclight.federated.server.server import Server
from arclight.federated.settings import Federation
from arclight.federated.strategies import FedAvg

TARGETS = {"site-0": -1.0, "site-1": 3.0}


def server(folder: Path, config: Mapping[str, Any]) -> Server:
    weights = {
        "a.weight": torch.linspace(-2, 2, 300).reshape(20, 15),
        "b.bias": torch.arange(7, dtype=torch.float32),
        "c.half": torch.linspace(0, 1, 40).to(torch.bfloat16),
    }
    rounds = int(config.get("rounds", 3))
    federation = Federation(
        clients=2, rounds=rounds, local_steps=5, strategy=FedAvg(lr=1.0), evaluate_every=0,
        waiting=Waiting(nodes=int(config.get("nodes", 1)), lease_s=120.0),
    )  # fmt: skip
    return Server(federation, weights, folder=folder, clients=tuple(TARGETS))


def client(name: str, config: Mapping[str, Any]) -> Client:
    return Client(name, learner=lambda folder: Quadratic(TARGETS[name], pause_s=float(config.get("pause", 0.0))))


def killed_while_it_writes(folder: Path, config: Mapping[str, Any]) -> Server:
    """Send SIGTERM to this process from within its last writes."""
    write = server_run.export_metrics

    def export_metrics(run: Path) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        print("SIGTERM was sent in the last writes", flush=True)
        write(run)

    server_run.export_metrics = export_metrics
    return server(folder, config)
