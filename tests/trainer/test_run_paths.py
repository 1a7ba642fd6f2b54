"""Paths of a run: resolved once, before any hook, so that one rank alone may read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests import warm
from torch.utils.data import DataLoader

import arclight as al

SCRIPT = """
import sys
import torch
import arclight as al
import arclight.compat.lightning as L

class Model(al.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(2, 1)
    def configure_callbacks(self):
        self.ask("configure_callbacks")
        return []
    def setup(self, stage):
        self.ask("setup")
    def configure_optimizers(self):
        self.ask("configure_optimizers")
        return torch.optim.SGD(self.parameters(), lr=0.1)
    def ask(self, hook):
        if self.trainer.is_global_zero == (hook != "configure_callbacks"):  # one rank alone: not always the same
            assert self.trainer.loggers and self.trainer.log_dir and self.trainer.checkpoint_callback
            if hook == "setup":
                self.trainer.logger.log_hyperparams({"asked": 1})
            if not lightning:
                self.trainer.run_folder
    def training_step(self, batch, batch_idx):
        return self.line(batch).square().mean()

lightning = sys.argv[1] == "lightning"
kind = L.Trainer if lightning else al.Trainer
settings = {} if lightning else {"run_name": "run"}
trainer = kind(max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", enable_progress_bar=False, default_root_dir=".", **settings)
trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(8, 2), 2))
print(trainer.global_rank, trainer.log_dir)
if not lightning:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    idle = al.Trainer(max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", default_root_dir=".", run_name="idle", **quiet)
    Model.ask = lambda self, hook: None
    for idle.max_epochs in (1, 2):
        idle.fit(Model(), torch.utils.data.DataLoader(torch.randn(8, 2), 2))
"""


@pytest.mark.parametrize("kind", ["native", "lightning"])
def test_one_rank_alone_reads_logger_and_folders_in_hooks(tmp_path: Path, kind: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = warm.run(tmp_path / "script.py", kind, cwd=tmp_path, timeout=400)
    assert done.returncode == 0, done.stderr
    if kind == "native":
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["1"]
        assert (tmp_path / "run" / "1" / "hparams.yaml").exists()
        assert not (tmp_path / "idle").exists(), "what nobody wrote into is gone"
    else:
        assert [path.name for path in (tmp_path / "lightning_logs").iterdir()] == ["version_0"]


class Line(al.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.line(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class AsksInSetup(al.Callback):
    def setup(self, trainer: al.Trainer, pl_module: al.Module, stage: str) -> None:
        self.folder = trainer.log_dir


def test_a_callback_that_asks_for_the_folder_in_setup_does_not_hinder_a_resume(tmp_path: Path) -> None:
    def train(epochs: int, ckpt_path: str | None) -> al.Trainer:
        asks = AsksInSetup()
        trainer = al.Trainer(
            max_epochs=epochs, accelerator="cpu", default_root_dir=tmp_path, run_name="run", callbacks=asks,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Line(), DataLoader(torch.randn(8, 2), 2), ckpt_path=ckpt_path)
        assert asks.folder == str(tmp_path / "run" / "1")
        return trainer

    assert train(1, None).global_step == 4
    assert train(2, "last").global_step == 8
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["1"]


def test_one_process_makes_no_folder_before_there_is_something_to_write(tmp_path: Path) -> None:
    trainer = al.Trainer(
        max_epochs=1, accelerator="cpu", default_root_dir=tmp_path, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Line(), DataLoader(torch.randn(8, 2), 2))
    assert not list(tmp_path.iterdir())
