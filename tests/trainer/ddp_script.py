"""Trains a small model on DEVICES processes and writes its weights and epoch metrics to OUT; run by test_ddp.

usage: ddp_script.py OUT DEVICES [--fail]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import arclight as al
from arclight import checkpoint


class Linear(al.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()
        self.fail = "--fail" in sys.argv

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.fail and self.global_rank == 1 and batch_idx == 2:
            raise RuntimeError("rank 1 meets a bad sample")
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.log("train/loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", (self.net(batch[0]) - batch[1]).square().mean())
        if self.global_rank == 0:
            self.log("val/only_rank_zero", 1.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    out, devices = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    al.seed_everything(5)
    x = torch.randn(48, 5, dtype=torch.float64)
    train = TensorDataset(x, x.sum(1, keepdim=True))
    held_out = TensorDataset(x[:9] * 2, x[:9].sum(1, keepdim=True))  # 9 samples: ranks see unequal numbers
    trainer = al.Trainer(
        max_epochs=2,
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    model = Linear()
    # The same global batch of 8 whatever the number of processes.
    trainer.fit(model, DataLoader(train, 8 // devices, shuffle=True), DataLoader(held_out, 2))
    if trainer.is_global_zero:
        checkpoint.save(
            out, {"model": model.state_dict(), "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()}}
        )


if __name__ == "__main__":
    main()
