"""Digest federations in one process: every strategy and codec, and most options of rounds.

`digests` runs `values`: losses, metrics and last weights, a run from the shell, and what a simulation predicts. Buffered rounds are left out, since
what they fold depends on who is quicker, and so are secure aggregation and added noise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.house.digested.common import typed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import arclight as al
from arclight import checkpoint
from arclight.federated import (
    Client,
    DiLoCo,
    FedAdam,
    FedAvg,
    Federation,
    FedMomentum,
    FedNesterov,
    FedYogi,
    Server,
    SparseLoCo,
    simulate,
)
from arclight.federated.codecs.settings import BF16, Int4, Int8, TopK
from arclight.federated.coordination.settings import Sampling, Streaming, Waiting
from arclight.federated.masks.settings import Masks
from arclight.federated.privacy.settings import Krum, Median, NormBound, Trimmed


class Net(al.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.25), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Rows(al.DataModule):
    def __init__(self, seed: int) -> None:
        super().__init__()
        x = torch.randn(32 + 4 * seed, 8, generator=torch.Generator().manual_seed(seed))
        self.rows = TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, 4, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.rows, 5)


CALM = Waiting(heartbeat_interval_s=10.0)


def run(folder: Path, clients: int = 3, rounds: int = 2, **given: Any) -> dict[str, Any]:
    """Run rounds of five steps; return their losses and metrics, and the last weights."""
    torch.manual_seed(1)
    settings: dict[str, Any] = {"local_steps": 5, "waiting": CALM, "evaluate_on": "clients", "keep_rounds": 0} | given
    server = Server(Federation(clients=clients, rounds=rounds, **settings), Net(), folder=folder, seed=3, run="run")
    server.run([Client(str(n), Net(), Rows(n), trainer={"accelerator": "cpu"}) for n in range(clients)])
    return {"weights": server.weights(), "rounds": [[r.round, r.loss, dict(r.metrics)] for r in server.history]}


FED_LM = """
name = "fed"
seed = 3
[task]
kind = "language"
overrides = {layers = 1, dim = 32, heads = 2, kv_heads = 1, hidden = 48}
[task.data]
data = "texts"
sequence_length = 32
batch_size = 4
tokenizer = "bytes"
[federation]
clients = 2
rounds = 2
local_steps = 3
weigh_by = "tokens"
[federation.strategy]
kind = "diloco"
[trainer]
accelerator = "cpu"
limit_val_batches = 2
enable_progress_bar = false
"""


def recipe() -> dict[str, Any]:
    """Return the weights of a federated run from the shell, with the texts of two sites."""
    for source in range(4):
        for number in range(12):
            path = Path(f"texts/{source}/{number}.txt")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"source {source} tells story {number}. " * 40)
    Path("fed.toml").write_text(FED_LM)
    typed("federate", "fed.toml")
    path = checkpoint.find_last(Path("runs/fed/1/checkpoints"))
    assert path is not None
    return dict(checkpoint.load(path)["model"])


def values(folder: Path) -> dict[str, Any]:
    strategies = {
        "fedavg": FedAvg(), "fedmomentum": FedMomentum(lr=0.7), "fednesterov": FedNesterov(lr=0.7), "fedadam": FedAdam(), "fedyogi": FedYogi(),
        "diloco": DiLoCo(), "sparseloco": SparseLoCo(),
    }  # fmt: skip
    found: dict[str, Any] = {name: run(folder / name, rounds=3, strategy=each) for name, each in strategies.items()}
    ways: dict[str, dict[str, Any]] = {
        "bf16": {"up": BF16(), "down": BF16()}, "int8": {"up": Int8(), "down": Int8()}, "int4": {"up": Int4()}, "topk": {"up": TopK(share=0.1)},
        "weights": {"send": "weights"}, "moments": {"moments": ("exp_avg", "exp_avg_sq")}, "equal": {"weigh_by": "equal"},
        "median": {"robust": Median()}, "trimmed": {"robust": Trimmed(share=0.2)}, "bounded": {"robust": NormBound(largest=0.1)},
        "sampled": {"sampling": Sampling(per_round=2), "rounds": 4}, "reset": {"reset_optimizer": True},
        "periods": {"masks": Masks(periods={"exp_avg": 2}), "moments": ("exp_avg",), "rounds": 3},
        "streaming": {"streaming": Streaming(fragments=3, overlap=1), "local_steps": 6, "rounds": 6},
        "krum": {"robust": Krum(byzantine=1), "clients": 5, "waiting": Waiting(heartbeat_interval_s=10.0, quorum=1.0)},
        "one-client": {"clients": 1, "send": "weights", "rounds": 3},
    }  # fmt: skip
    found |= {name: run(folder / name, **options) for name, options in ways.items()}
    found["recipe"] = recipe()
    predicted = simulate(Federation(clients=500, rounds=3, sampling=Sampling(per_round=50)), 10_000_000, seed=2)
    return found | {"simulated": [predicted.seconds, predicted.bytes_down, predicted.bytes_up]}
