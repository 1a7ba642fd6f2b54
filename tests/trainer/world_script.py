"""Fits in some processes and writes which samples each of them trained on; run by test_another_world.

usage: world_script.py ROOT --devices N --batch N [--stop STEP] [--accumulate N] [--resume CHECKPOINT] [--save CHECKPOINT]
                       [--pretend N] [--stream]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import arclight as al
from arclight.data.computed_order import PADDING, EpochOrder

SIZE, EPOCHS = 100, 2


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


class Model(al.Module):
    def __init__(self, root: Path) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.root, self.saved = root, False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        kept = batch != PADDING
        if self.saved:  # several processes agree on a stop a batch or two later, which the checkpoint knows nothing of
            return (self.weight * kept).mean()
        with (self.root / f"seen-{self.trainer.world_size}-{self.trainer.global_rank}.txt").open("a") as file:
            file.writelines(f"{self.trainer.current_epoch} {int(sample)}\n" for sample in batch[kept])
        return (self.weight * kept).mean()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Have the checkpoint look as if ``--pretend`` processes had made it."""
        loops, processes = checkpoint["loops"], self.trainer.options.pretend
        for entry in ("rng", "window"):
            loops[entry] = loops[entry] * processes

    def train_dataloader(self) -> Any:
        if self.trainer.options.stream:
            return list(torch.arange(SIZE).float().split(self.trainer.options.batch))
        return DataLoader(Rows(), self.trainer.options.batch, sampler=EpochOrder(SIZE))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class SaveAt(al.Callback):
    def __init__(self, batches: int, path: Path) -> None:
        self.batches, self.path = batches, path

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *arguments: Any) -> None:
        if trainer.progress.batches == self.batches:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = pl_module.saved = True


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--stop", type=int, help="batches of this run and those before it")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--pretend", type=int, default=1)
    parser.add_argument("--stream", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    al.seed_everything(3)
    trainer = al.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", devices=options.devices, accumulate_grad_batches=options.accumulate,
        strategy="ddp" if options.devices > 1 else "auto", enable_progress_bar=False, enable_model_summary=False,
        logger=False, default_root_dir=options.root, callbacks=[SaveAt(options.stop, options.save)] if options.stop else [],
    )  # fmt: skip
    trainer.options = options
    trainer.fit(Model(options.root), ckpt_path=options.resume)


if __name__ == "__main__":
    main()
