"""A module that logs what a test tells it to, and a trainer that writes into the test's folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import arclight as al


class Scripted(al.Module):
    """Learns a line; in its n-th validation run logs the n-th of each of ``scores``."""

    def __init__(self, scores: dict[str, Sequence[float]] | None = None) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.line = torch.nn.Linear(2, 1)
        self.scores, self.seen_lrs = scores or {}, []
        self.validations = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        self.seen_lrs.append([group["lr"] for optimizer in self.trainer.optimizers for group in optimizer.param_groups])
        loss = (self.line(x) - y).square().mean()
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val/error", (self.line(x) - y).abs().mean())

    def test_step(self, batch: Any, batch_idx: int) -> None: ...

    def on_validation_epoch_end(self) -> None:
        if self.trainer.sanity_checking:
            return
        for name, values in self.scores.items():
            self.log(name, values[self.validations])
        self.validations += 1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def rows(count: int) -> DataLoader[Any]:
    x = torch.randn(count, 2, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=1)


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., al.Trainer]:
    def make(*callbacks: al.Callback, **settings: Any) -> al.Trainer:
        settings = {
            "enable_progress_bar": any(isinstance(callback, al.RichProgressBar) for callback in callbacks),
            "enable_model_summary": False,
            "default_root_dir": tmp_path,
            "run_name": "test",
            "accelerator": "cpu",
            **settings,
        }
        return al.Trainer(callbacks=list(callbacks), **settings)

    return make


@pytest.fixture
def fit(make_trainer: Callable[..., al.Trainer]) -> Callable[..., al.Trainer]:
    """``fit({"val/score": [...]}, callback, ...)``: one epoch of four batches for each score; gives the trainer."""

    def run(
        scores: dict[str, Sequence[float]] | al.Module,
        *callbacks: al.Callback,
        batches: int = 4,
        ckpt_path: Any = None,
        **settings: Any,
    ) -> al.Trainer:
        module = scores if isinstance(scores, al.Module) else Scripted(scores)
        if isinstance(scores, dict) and "max_epochs" not in settings and "max_steps" not in settings:
            settings["max_epochs"] = len(next(iter(scores.values())))
        trainer = make_trainer(*callbacks, **settings)
        trainer.fit(module, rows(batches), rows(2), ckpt_path=ckpt_path)
        return trainer

    return run


@pytest.fixture
def scripted() -> type[Scripted]:
    return Scripted


@pytest.fixture
def make_rows() -> Callable[[int], DataLoader[Any]]:
    return rows
