"""Digest the training loop on two forked gloo ranks: DDP, FSDP, replicas and Fabric.

`digests` runs `values`. The replicas exchange by DiLoCo every four steps; with Fabric a loop of one's own runs under DDP.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.house.digested.trainer import Classifier, NoisyRows, fit
from torch import nn
from torch.utils.data import DataLoader

import arclight as al
from arclight import checkpoint
from arclight.fabric.strategies import DDPStrategy, FSDPStrategy, ReplicaStrategy
from arclight.trainer import callbacks as c


class Plain(Classifier):
    """Classifier with layer norms in place of batch norms, whose buffers are each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1] = nn.LayerNorm(16)


class Recorder(al.Callback):
    """Record every rank's losses, and save a checkpoint at the end."""

    def __init__(self, path: Path) -> None:
        self.path, self.losses = path, []

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.losses = trainer.strategy.all_gather_object(pl_module.losses)
        trainer.save_checkpoint(self.path)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = state["losses"]


def train(folder: Path, strategy: Any, kind: type[Classifier], *callbacks: Any, **options: Any) -> dict[str, Any]:
    al.seed_everything(11, verbose=False)
    module, recorder = kind(), Recorder(folder / "end")
    trainer = fit(folder, module, recorder, *callbacks, devices=2, strategy=strategy, **options)
    state = checkpoint.load(folder / "end")
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"losses": recorder.losses, "metrics": metrics} | {
        name: state[name] for name in ("model", "optimizers", "schedulers")
    }


def own_loop(fabric: al.Fabric) -> dict[str, Any]:
    torch.set_num_threads(1)
    fabric.seed_everything(4, verbose=False)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), 1e-2))
    loader: Any = fabric.setup_dataloaders(DataLoader(NoisyRows(), 4, shuffle=True))
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        losses.append(float(fabric.all_reduce(loss.detach())))
    return {"losses": losses, "weights": {name: value.tolist() for name, value in model.state_dict().items()}}


def values(folder: Path) -> dict[str, Any]:
    fork: dict[str, Any] = {"start_method": "fork"}
    found = {
        "ddp": train(folder / "ddp", DDPStrategy(**fork), Classifier),
        "ddp-accumulation": train(
            folder / "acc", DDPStrategy(**fork), Plain, accumulate_grad_batches=2, gradient_clip_val=0.5
        ),
        "ddp-ema": train(folder / "ema", DDPStrategy(**fork), Plain, c.EMAWeightAveraging(decay=0.9)),
        "fsdp": train(folder / "fsdp", FSDPStrategy(**fork), Plain),
        "diloco": train(folder / "diloco", ReplicaStrategy(**fork), Plain, c.DiLoCo(sync_every=4)),
    }
    fabric = al.Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy(**fork))
    return found | {"fabric": fabric.launch(own_loop)}
