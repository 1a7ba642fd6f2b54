"""Two processes train and write their shares to an address in the background, then go on from there: bucket_script.py ROOT ADDRESS."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import arclight as al
from arclight.checkpoint.remote import to_path
from arclight.fabric.strategies import FSDPStrategy
from arclight.trainer.callbacks import ModelCheckpoint
from arclight.trainer.fabric.checkpoint_io import AsyncCheckpointIO


class Model(al.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        assert self.trainer.world_size == 2
        assert isinstance(self.trainer.checkpoint_io, AsyncCheckpointIO) == bool(self.trainer.checkpoint_callbacks)
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def fit(root: str, address: str | None, steps: int, strategy: FSDPStrategy, ckpt: str | None = None) -> dict[str, Any]:
    keep = [] if address is None else [ModelCheckpoint(address, "{step}", every_n_train_steps=1, save_last=True)]
    model = Model()
    torch.manual_seed(11)
    trainer = al.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=steps, logger=False, callbacks=keep,
        enable_progress_bar=False, enable_checkpointing=bool(keep), default_root_dir=root,
    )  # fmt: skip
    x = torch.randn(24, 5, generator=torch.Generator().manual_seed(7))
    trainer.fit(model, DataLoader(TensorDataset(x), 2, shuffle=True), ckpt_path=ckpt)
    weights: dict[str, Any] = trainer.strategy.portable(model.state_dict())
    return weights


def main(root: str, address: str) -> None:
    torch.set_num_threads(1)

    def strategy() -> FSDPStrategy:
        return FSDPStrategy(auto_wrap_policy={nn.Linear})

    wanted = fit(root, None, 6, strategy())
    fit(root, address, 3, strategy())
    found = fit(root, address, 6, strategy(), ckpt="last")
    kept = sorted(entry.name for entry in to_path(address).iterdir())
    assert kept == ["last.ckpt", "step=6.ckpt"], kept
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)
    Path(root, "done").touch()


if __name__ == "__main__":
    main(*sys.argv[1:])
