"""The federation and its first weights."""

from pathlib import Path
from typing import Any

import torch

from arclight.federated import FedAvg, Federation, Server


def server(folder: Path, config: dict[str, Any]) -> Server:
    weights = {
        "a.weight": torch.linspace(-2, 2, 300).reshape(20, 15),
        "b.bias": torch.arange(7, dtype=torch.float32),
        "c.half": torch.linspace(0, 1, 40).to(torch.bfloat16),
    }
    federation = Federation(
        clients=2, rounds=int(config["rounds"]), local_steps=5, strategy=FedAvg(lr=1.0), evaluate_every=0
    )
    return Server(federation, weights, folder=folder, clients=("site-0", "site-1"))
