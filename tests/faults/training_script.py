"""Trains a small model that is shared out over processes, with checkpoints in the background; one rank may fail on the way.

usage: training_script.py ROOT FAULT DEVICES SECONDS (FAULT: none, kill, sleep, stop). Every rank notes the samples that it has trained on.
Within so many seconds ranks have to meet, and one that does not come is waited for so long.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import arclight as al
from arclight.fabric.strategies import FSDPStrategy
from arclight.trainer.callbacks import ModelCheckpoint

ROOT, FAULT, DEVICES, SECONDS = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
STEPS, FAULT_STEP = 12, 7


class Block(nn.Module):
    def __init__(self, fault: Any) -> None:
        super().__init__()
        self.linear, self.dropout, self.fault = nn.Linear(6, 6), nn.Dropout(0.1), fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.fault()
        return x + self.dropout(self.linear(x).tanh())


class Model(al.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.Sequential(Block(lambda: None), Block(self.oversleep))

    def oversleep(self) -> None:
        if FAULT in ("sleep", "stop") and self.trainer.global_step == FAULT_STEP and self.trainer.global_rank == 1:
            time.sleep(600) if FAULT == "sleep" else os.kill(os.getpid(), signal.SIGSTOP)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.blocks(batch[0]) - 1).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer, restart = self.trainer, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        row = {"attempt": restart, "step": trainer.global_step, "samples": batch[1].tolist()}
        with (ROOT / f"samples-{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        if FAULT == "kill" and trainer.global_step == FAULT_STEP and trainer.global_rank == 1 and restart == 0:
            while not list((ROOT / "c").glob("step=[4-6].ckpt")):  # so that there is something to go on from
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def main() -> None:
    print(f"process {os.getpid()}", flush=True)
    torch.set_num_threads(1)
    al.seed_everything(5)
    strategy = FSDPStrategy(auto_wrap_policy={nn.Linear}, timeout=datetime.timedelta(seconds=SECONDS))
    trainer = al.Trainer(
        accelerator="cpu", devices=DEVICES, strategy=strategy, max_steps=STEPS, logger=False, enable_progress_bar=False,
        default_root_dir=ROOT,
        callbacks=ModelCheckpoint(ROOT / "c", filename="{step}", every_n_train_steps=1, save_top_k=-1, save_last=True),
    )  # fmt: skip
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, torch.arange(40)), 4 // DEVICES * 2, shuffle=True)
    model = Model()
    trainer.fit(model, loader, ckpt_path="last")
    weights = trainer.strategy.portable(model.state_dict())
    if trainer.is_global_zero:
        digest = hashlib.sha256(b"".join(weights[name].numpy().tobytes() for name in sorted(weights)))
        (ROOT / "digest").write_text(digest.hexdigest())


if __name__ == "__main__":
    main()
