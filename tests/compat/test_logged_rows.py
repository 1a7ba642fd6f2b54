"""Rows that ``L.Trainer`` gives to loggers, and when, as recorded from runs of Lightning 2.6.6."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, IterableDataset

import arclight.compat.lightning as L
from arclight.compat.lightning import seed_everything
from arclight.compat.lightning.pytorch.callbacks import LearningRateMonitor
from arclight.compat.lightning.pytorch.demos.boring_classes import BoringModel
from arclight.compat.lightning.pytorch.loggers import CSVLogger
from arclight.compat.lightning.pytorch.loggers.logger import Logger


class Rows(Logger):
    """Keeps what it is given: the step of each name's rows, and how it was finalized."""

    name, version = "rows", 0

    def __init__(self) -> None:
        super().__init__()
        self.steps: dict[str, list[int | None]] = {}
        self.ends: list[str] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert not self.ends, "logged after it was finalized"
        for name in metrics:
            self.steps.setdefault(name, []).append(step)

    def log_hyperparams(self, *arguments: Any, **options: Any) -> None:
        pass

    def finalize(self, status: str) -> None:
        self.ends.append(status)


def fit(model: L.LightningModule, *callbacks: L.Callback, **options: Any) -> Rows:
    rows = Rows()
    quiet = {"accelerator": "cpu", "devices": 1, "enable_checkpointing": False, "num_sanity_val_steps": 0}
    quiet |= {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
    L.Trainer(**quiet | {"logger": rows, "callbacks": list(callbacks), "max_epochs": 2} | options).fit(model)
    return rows


class Model(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train", loss["loss"])
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", 1.0)

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.9), "interval": "step"}]


class Manual(Model):
    """Steps one optimizer at every batch, the other at every second one or, with ``rest``, both at every third one only."""

    def __init__(self, rest: bool = False) -> None:
        super().__init__()
        self.automatic_optimization, self.rest = False, rest

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        loss = self.layer(batch).square().mean()
        self.log("train", loss)
        self.manual_backward(loss)
        for optimizer, every in ((first, 3 if self.rest else 1), (second, 3 if self.rest else 2)):
            if batch_idx % every == 0:
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [SGD([self.layer.weight], lr=0.1), SGD([self.layer.bias], lr=0.1)]


@pytest.mark.parametrize("rest", [False, True])
def test_rows_of_manual_optimization_count_batches_whatever_steps_in_them(rest: bool) -> None:
    rows = fit(Manual(rest), LearningRateMonitor("step"), limit_train_batches=6, limit_val_batches=1)
    assert rows.steps["train"] == rows.steps["lr-SGD"] == rows.steps["lr-SGD-1"] == list(range(12))
    assert rows.steps["val"] == [5, 11]
    rows = fit(Manual(rest), limit_train_batches=6, limit_val_batches=0, log_every_n_steps=4)
    assert rows.steps["train"] == [3, 7, 11]


def test_rates_of_a_window_that_the_epochs_end_closes_are_logged() -> None:
    rows = fit(Model(), LearningRateMonitor(), limit_train_batches=5, limit_val_batches=0, accumulate_grad_batches=2)
    assert rows.steps["train"] == sorted(set(rows.steps["lr-SGD"])) == [0, 1, 2, 3, 4, 5]


class Five(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.randn(5, 32))


def test_a_window_is_closed_by_the_last_batch_of_a_stream() -> None:
    class Streamed(Model):
        def train_dataloader(self) -> Any:
            return DataLoader(Five())

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert self.trainer.is_last_batch == (batch_idx == 4)
            assert self.trainer.global_step == 3 * self.current_epoch + (batch_idx + 1) // 2 + (batch_idx == 4)

    rows = fit(Streamed(), LearningRateMonitor(), limit_val_batches=0, accumulate_grad_batches=2)
    assert rows.steps["train"] == sorted(set(rows.steps["lr-SGD"])) == [0, 1, 2, 3, 4, 5]


def test_a_validation_within_a_window_has_the_number_of_the_windows_step() -> None:
    options = {"limit_train_batches": 6, "limit_val_batches": 1, "accumulate_grad_batches": 2, "max_epochs": 1}
    rows = fit(Model(), val_check_interval=3, **options)
    assert rows.steps["train"] == [0, 1, 2]
    assert rows.steps["val"] == [1, 2]
    assert fit(Model(), val_check_interval=2, **options).steps["val"] == [0, 1, 2]


def test_loggers_are_finalized_after_the_hooks_that_may_still_log() -> None:
    class Last(Model):
        def on_fit_end(self) -> None:
            self.logger.log_metrics({"fit_end": 1.0}, step=7)

        def teardown(self, stage: str) -> None:
            self.logger.log_metrics({"teardown": 1.0}, step=8)

    rows = fit(Last(), limit_train_batches=1, limit_val_batches=0)
    assert (rows.steps["fit_end"], rows.steps["teardown"], rows.ends) == ([7], [8], ["success"])


def test_the_end_of_the_sanity_check_belongs_to_it() -> None:
    class Look(L.Callback):
        def on_sanity_check_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            self.seen = trainer.sanity_checking, float(trainer.callback_metrics["val"])

        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            assert trainer.training
            assert not trainer.callback_metrics

    look = Look()
    fit(Model(), look, limit_train_batches=1, limit_val_batches=1, num_sanity_val_steps=1)
    assert look.seen == (True, 1.0)


@pytest.mark.parametrize(("check", "stage"), [(1, "sanity_check"), (0, "validate")])
def test_an_error_in_validation_is_reported_from_there(check: int, stage: str) -> None:
    class Broken(Model):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise ArithmeticError

    class Look(L.Callback):
        def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
            self.stage = trainer.state.stage.value

    look = Look()
    with pytest.raises(ArithmeticError):
        fit(Broken(), look, limit_train_batches=1, limit_val_batches=1, num_sanity_val_steps=check)
    assert look.stage == stage


class Killed(Exception):
    pass


@pytest.mark.parametrize(("accumulated", "killed_at", "saved_at"), [(1, 5, 2), (2, 6, 2), (2, 6, 1), (3, 7, 2)])
def test_a_resumed_run_has_the_rows_of_a_whole_one(
    tmp_path: Path, accumulated: int, killed_at: int, saved_at: int
) -> None:
    """Rows are numbered by the step that made them, from 0: those of the step after the checkpoint are written again."""

    class Half(Model):
        killed_at = 0

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.killed_at and batch_idx == self.killed_at:
                raise Killed

    class Saver(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == saved_at:
                trainer.save_checkpoint(tmp_path / "saved.ckpt")

    def rows(name: str, *killed: int) -> list[str]:
        for count, at in enumerate((*killed, 0)):
            seed_everything(1, verbose=False)
            model, logger = Half(), CSVLogger(tmp_path, name, version=0)
            model.killed_at = at
            run = L.Trainer(
                accelerator="cpu", devices=1, logger=logger, callbacks=[] if count else [Saver()], max_epochs=1, log_every_n_steps=1,
                val_check_interval=3, limit_train_batches=9, limit_val_batches=1, accumulate_grad_batches=accumulated,
                num_sanity_val_steps=0, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            )  # fmt: skip
            with pytest.raises(Killed) if at else nullcontext():
                run.fit(model, ckpt_path=tmp_path / "saved.ckpt" if count else None)
        return (tmp_path / name / "version_0" / "metrics.csv").read_text().splitlines()

    assert rows("killed", killed_at) == rows("whole")
