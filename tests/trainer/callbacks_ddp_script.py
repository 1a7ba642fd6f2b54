"""Fits on two processes whose callbacks must agree; each writes what it saw to OUT/<rank>.json. Run by test_callbacks_ddp.

usage: callbacks_ddp_script.py OUT
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import arclight as al
from arclight import checkpoint
from arclight.checkpoint import async_saver as saver_module
from arclight.trainer.callbacks import (
    EarlyStopping,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
)

SCORES = [3.0, 1.0, 2.0, 4.0]


class Model(al.Module):
    def __init__(self, pause: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
        self.pause = pause

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(self.pause)
        return self.body(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/score", SCORES[self.current_epoch % 4])
        if self.global_rank == 0:
            self.log("val/only_first", 1.0, rank_zero_only=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    out, seen = Path(sys.argv[1]), dict[str, Any]()
    torch.set_num_threads(1)
    x = torch.randn(16, 2, generator=torch.Generator().manual_seed(1))

    def fit(*callbacks: al.Callback, pause: float = 0.0, **settings: Any) -> al.Trainer:
        trainer = al.Trainer(
            **{"max_epochs": 4, "devices": 2, "strategy": "ddp", "accelerator": "cpu", "logger": False, **settings},
            callbacks=list(callbacks),
            enable_progress_bar=False,
            default_root_dir=out,
            enable_checkpointing=None if any(isinstance(c, ModelCheckpoint) for c in callbacks) else False,
        )
        loader = DataLoader(TensorDataset(x), batch_size=2)
        trainer.fit(Model(pause), loader, DataLoader(TensorDataset(x[:4]), batch_size=2))
        return trainer

    stopper = EarlyStopping("val/only_first", patience=1)
    seen["stop"] = [fit(stopper).global_step, stopper.stopping_reason.name, stopper.stopped_epoch]

    saver = ModelCheckpoint(out / "kept", monitor="val/score", save_top_k=2, save_last=True, asynchronous=True)
    fit(saver)
    seen["kept"] = [Path(path).name for path in saver.best_k_models]
    seen["best"] = Path(saver.best_model_path).name

    write = saver_module.write

    def full_disk(path: Path, encoded: Any) -> None:
        if "epoch=1" in path.name:
            raise checkpoint.CheckpointError(f"no space for {path.name}")
        write(path, encoded)

    saver_module.write = full_disk
    failing = ModelCheckpoint(out / "failing", save_top_k=-1, asynchronous=True)
    try:
        fit(failing)
    except checkpoint.CheckpointError as error:
        seen["error"] = str(error)
    saver_module.write = write

    seen["time"] = fit(Timer("0.3s"), pause=0.02, max_epochs=99).global_step

    finder = LearningRateFinder(0.01, 100.0, num_training_steps=30, update_attr=False)
    seen["steps after a search"] = fit(finder).global_step
    seen["search"] = finder.optimal_lr.results if finder.optimal_lr is not None else {}

    swa = StochasticWeightAveraging(0.05, swa_epoch_start=2)
    module = fit(swa).lightning_module
    seen["statistics"] = [*module.body[1].running_mean.tolist(), *module.body[1].running_var.tolist()]

    rank = torch.distributed.get_rank()
    (out / f"{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
