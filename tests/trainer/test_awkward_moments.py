"""Signals, errors and stops that come at awkward moments of a run."""

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import arclight as al
import arclight.compat.lightning as L
from arclight.fabric.errors import SIGTERMException

ROWS = DataLoader(torch.randn(14, 2, generator=torch.Generator().manual_seed(0)), batch_size=2)  # type: ignore[arg-type]


class Line(al.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(2, 1)
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.line(batch).square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": 3}]


def quiet(cls: Any, folder: Path, **settings: Any) -> Any:
    return cls(
        max_epochs=1, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, logger=False,
        **settings,
    )  # fmt: skip


@pytest.mark.parametrize("cls", [al.Trainer, L.Trainer])
def test_values_logged_before_a_resume_go_on_and_own_entries_keep_their_names(cls: Any, tmp_path: Path) -> None:
    seen: list[Any] = []

    class Own(Line):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["model"] = checkpoint["data"] = {"mine": 1}

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            seen.extend([checkpoint["model"], checkpoint["data"]])

    class Crash(al.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 5:
                raise RuntimeError("crash")

    saver = al.ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)
    with pytest.raises(RuntimeError, match="crash"):
        quiet(cls, tmp_path, callbacks=[saver, Crash()]).fit(Own(), ROWS)
    trainer, model = quiet(cls, tmp_path, enable_checkpointing=False), Own()
    trainer.fit(model, ROWS, ckpt_path=saver.best_model_path)
    assert trainer.global_step == 7
    assert model.rates == [0.5, 0.25, 0.25], "after steps 3 and 6, of which the first came before the resume"
    assert seen == [{"mine": 1}] * 2


@pytest.mark.parametrize(("cls", "steps"), [(al.Trainer, 5), (L.Trainer, 6)])
def test_windows_of_data_without_a_length_are_closed(cls: Any, steps: int, tmp_path: Path) -> None:
    class Five(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Any:
            return iter(torch.randn(5, 2))

    trainer = quiet(cls, tmp_path, accumulate_grad_batches=2, enable_checkpointing=False)
    trainer.max_epochs = 2
    trainer.fit(Line(), DataLoader(Five()))
    assert trainer.global_step == steps


def test_sigterm_during_validation_is_not_lost(tmp_path: Path) -> None:
    class Asked(Line):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = quiet(al.Trainer, tmp_path)
    with pytest.raises(SIGTERMException):
        trainer.fit(Asked(), ROWS, ROWS)
    with pytest.raises(SIGTERMException):
        trainer.validate(Asked(), ROWS)
    trainer.should_stop = False
    quiet(al.Trainer, tmp_path, enable_checkpointing=False).fit(Line(), ROWS)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_validation_that_a_hook_runs_leaves_the_workers_of_the_fit_alone(persistent: bool, tmp_path: Path) -> None:
    class Curious(Line):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

        def on_train_batch_end(self, *arguments: Any) -> None:
            super().on_train_batch_end(*arguments)
            self.trainer.validate(self, ROWS)

    module, trainer = Curious(), quiet(al.Trainer, tmp_path, enable_checkpointing=False)
    before = set(multiprocessing.active_children())
    loader = DataLoader(ROWS.dataset, 1, num_workers=2, persistent_workers=persistent)
    trainer.fit(module, loader)
    assert (trainer.global_step, len(module.rates)) == (14, 14)
    assert set(multiprocessing.active_children()) <= before
