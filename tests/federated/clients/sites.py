"""A small model and data that clients in tests train: dropout, AdamW, a schedule, shuffled rows over several epochs."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from arclight import DataModule, Module, Trainer, seed_everything
from arclight.federated.protocol import Evaluate, Fit, Manifest
from arclight.optim.schedules import cosine, lambda_schedule

MANIFEST = Manifest(kind="weights", tensors={}, blobs={})


class Net(Module):
    def __init__(self, norm: bool = False, width: int = 16) -> None:
        super().__init__()
        middle = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.net = nn.Sequential(nn.Linear(8, width), middle, nn.ReLU(), nn.Dropout(0.25), nn.Linear(width, 2))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        scores = self.net(batch[0])
        self.log("val/loss", nn.functional.cross_entropy(scores, batch[1]))
        self.log("val/accuracy", (scores.argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = lambda_schedule(optimizer, cosine, total_steps=60, warmup=5, final=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Rows(DataModule):
    def __init__(self, count: int = 36, seed: int = 3) -> None:
        super().__init__()
        x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
        self.rows = TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, 4, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.rows, 5)


def weights_of(module: Module) -> dict[str, torch.Tensor]:
    return {f"model/{name}": tensor.clone() for name, tensor in module.state_dict().items()}


def fit_order(round: int, steps: int, clock: int, **more: Any) -> Fit:
    given = {"run": "r", "client": "c", "base": f"{round:064d}", "weights": MANIFEST, **more}
    return Fit(round=round, steps=steps, clock=clock, **given)


def evaluate_order(round: int) -> Evaluate:
    return Evaluate(run="r", client="c", round=round, base=f"{round:064d}", weights=MANIFEST)


QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "num_sanity_val_steps": 0}


def centralised(path: Path, module: Module, data: DataModule, steps: int, seed: int, **options: Any) -> Trainer:
    """One uninterrupted fit."""
    seed_everything(seed, verbose=False)
    trainer = Trainer(**QUIET, accelerator="cpu", max_epochs=-1, max_steps=steps, default_root_dir=path, **options)
    trainer.fit(module, datamodule=data)
    return trainer


def optimizer_state(trainer: Trainer) -> list[dict[str, torch.Tensor]]:
    (optimizer,) = trainer.optimizers
    return [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]


class Watched(Net):
    """Writes a line for each step, and takes its time."""

    def __init__(self, file: str, pause: float) -> None:
        super().__init__()
        self.file, self.pause = file, pause

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {self.trainer.global_step}\n")
        time.sleep(self.pause)
        return super().training_step(batch, batch_idx)


def build(file: str, pause: float = 0.0, seed: int = 3) -> tuple[Module, DataModule]:
    """Build the module and the data of a client in a worker process."""
    torch.manual_seed(11)
    return Watched(file, pause), Rows(seed=seed)


def steps_in(file: Path) -> list[tuple[int, int]]:
    """Process and step of each line that `Watched` wrote."""
    if not file.exists():
        return []
    return [(int(a), int(b)) for a, b in (line.split() for line in file.read_text().splitlines())]
