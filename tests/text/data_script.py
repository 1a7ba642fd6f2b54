"""Fits on text in two processes and writes what each of them read; run by test_data_module. usage: data_script.py ROOT"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

import arclight as al
from arclight.text import Text, TextDataModule
from arclight.text.data.data_settings import BPE


class Reader(al.Module):
    def __init__(self, root: Path) -> None:
        super().__init__()
        self.weight, self.root = torch.nn.Parameter(torch.zeros(())), root
        self.found: dict[str, list[Any]] = {"train": [], "val": []}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.found["train"].append([int(batch["bytes"].sum()), batch["tokens"].tolist()])
        return self.weight * 1.0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.found["val"].append([int(batch["bytes"].sum()), batch["tokens"].tolist()])

    def on_fit_end(self) -> None:
        (self.root / f"{self.global_rank}.json").write_text(json.dumps(self.found))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(root: Path) -> None:
    torch.set_num_threads(1)
    settings = Text(
        data=str(root / "prose"), tokenizer=BPE(vocab_size=280), sequence_length=16, global_batch_size=8,
        held_out=0.2, packing="pack",
    )  # fmt: skip
    trainer = al.Trainer(
        max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False,
        num_sanity_val_steps=0, enable_progress_bar=False, enable_model_summary=False, default_root_dir=root / "runs",
    )  # fmt: skip
    trainer.fit(Reader(root), datamodule=TextDataModule(settings))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
