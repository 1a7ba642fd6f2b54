"""Small modules and data that several tests train."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from arclight import DataModule, Module


class NoisyRows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows augmented with all three random generators, as image pipelines do it."""

    def __init__(self, count: int = 40) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(count, 8, generator=generator)
        self.y = (self.x[:, 0] > 0).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = random.random() + np.random.rand() + torch.rand(8)
        return self.x[index] + 0.1 * noise, self.y[index]


class NoisyData(DataModule):
    def __init__(self, count: int = 40, batch_size: int = 4, workers: int = 0) -> None:
        self.count, self.batch_size, self.workers = count, batch_size, workers

    def train_dataloader(self) -> Any:
        return DataLoader(NoisyRows(self.count), self.batch_size, shuffle=True, num_workers=self.workers)

    def val_dataloader(self) -> Any:
        return DataLoader(NoisyRows(12), self.batch_size)


class CombinedData(NoisyData):
    """The same rows from two loaders of different lengths, of which the shorter starts again."""

    def train_dataloader(self) -> Any:
        parts = [NoisyRows(self.count), NoisyRows(self.count // 2 - 4)]
        return [DataLoader(rows, self.batch_size, shuffle=True, num_workers=self.workers) for rows in parts]

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """One batch of both."""
        if not isinstance(batch[0], list):
            return batch
        return [torch.cat(parts) for parts in zip(*batch, strict=True)]


class Classifier(Module):
    """Dropout, batch norm, Adam and a schedule: everything that has state."""

    def __init__(self, width: int = 16, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 2)
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train/loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
