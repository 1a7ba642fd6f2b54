"""Every callback and logger that comes with the trainer: two of a kind in one trainer, and a run through two resumes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.same import assert_same
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import arclight as al
from arclight.fabric.errors import MisconfigurationError
from arclight.trainer import callbacks, loggers

HOSTED = {"ClearMLLogger", "CometLogger", "MLFlowLogger", "WandbLogger"}
"""They write to a service; see test_hosted_loggers."""

NO_CALLBACKS = {"EarlyStoppingReason", "MissingMetricError", "RichProgressBarTheme"}
BASES = {"BaseFinetuning", "BasePredictionWriter", "Callback", "Checkpoint", "ProgressBar", "SpikeDetection"}
"""A user's subclass says what they do."""

MADE: dict[str, Callable[[type, Path], Any]] = {
    "BackboneFinetuning": lambda kind, folder: kind(1, backbone_initial_lr=0.02),
    "BatchSizeFinder": lambda kind, folder: kind(max_trials=1, steps_per_trial=1),
    "DiLoCo": lambda kind, folder: kind(sync_every=3),
    "EarlyStopping": lambda kind, folder: kind("val/loss", patience=2),
    "GradientAccumulationScheduler": lambda kind, folder: kind({0: 1, 2: 2}),
    "LearningRateFinder": lambda kind, folder: kind(num_training_steps=5, update_attr=False),
    "ModelCheckpoint": lambda kind, folder: kind(folder / "c", monitor="val/loss", save_last=True),
    "ModelPruning": lambda kind, folder: kind("l1_unstructured", parameter_names=["weight"], amount=0.2),
    "OnExceptionCheckpoint": lambda kind, folder: kind(folder / "e"),
    "PipelineTimeline": lambda kind, folder: kind(),
    "StochasticWeightAveraging": lambda kind, folder: kind(0.05, swa_epoch_start=2, annealing_epochs=2),
    "ThroughputMonitor": lambda kind, folder: kind(lambda batch: len(batch[0])),
    "Timer": lambda kind, folder: kind("1h"),
}
"""How to make those that need arguments, or others than the default to do something in six short epochs."""

PASSING = {"time_elapsed", "dirpath", "best_model_path", "kth_best_model_path", "last_model_path", "newest_path"}
"""What of a callback's state is another in every run: times, and places in its folder."""


def of_kind(room: Any, base: type) -> list[str]:
    kinds = {name: getattr(room, name) for name in room.__all__}
    return sorted(name for name, kind in kinds.items() if inspect.isclass(kind) and issubclass(kind, base))


CALLBACKS = [name for name in of_kind(callbacks, al.Callback) if name not in BASES]
LOGGERS = [name for name in of_kind(loggers, loggers.Logger) if name not in HOSTED | {"Logger"}]


class Net(al.Module):
    """Dropout, a norm, momentum and a schedule: what a resume can get wrong."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.backbone = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(6, 1)
        self.lr = 0.05

    def _loss(self, batch: Any) -> torch.Tensor:
        return (self.head(self.backbone(batch[0])) - batch[1]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self._loss(batch)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self._loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], self.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Data(al.DataModule):
    def __init__(self) -> None:
        self.batch_size = 8

    def _loader(self, shuffle: bool) -> DataLoader[Any]:
        x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), self.batch_size, shuffle=shuffle)

    def train_dataloader(self) -> Any:
        return self._loader(True)

    def val_dataloader(self) -> Any:
        return self._loader(False)


class Stop(callbacks.Checkpoint):
    """Save after so many epochs, when all others have, and end there."""

    def __init__(self, until: int, path: Path | None) -> None:
        self.until, self.path = until, path

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch + 1 == self.until and self.path is not None:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def train(
    folder: Path, parts: list[Any], until: int = 6, start: Path | None = None, save: Path | None = None, **settings: Any
) -> al.Trainer:
    trainer = al.Trainer(
        **{
            "max_epochs": 6, "accelerator": "cpu", "enable_progress_bar": any(isinstance(p, callbacks.ProgressBar) for p in parts),
            "enable_model_summary": False, "default_root_dir": folder, "logger": loggers.CSVLogger(), "log_every_n_steps": 1,
            **settings,
        },
        callbacks=[*parts, Stop(until, save)],
    )  # fmt: skip
    torch.manual_seed(7)
    trainer.fit(Net(), datamodule=Data(), ckpt_path=start)
    return trainer


def make(name: str, folder: Path) -> Any:
    kind = getattr(callbacks, name)
    return MADE.get(name, lambda kind, folder: kind())(kind, folder)


def state_of(callback: Any) -> Any:
    def kept(state: Any) -> Any:
        if isinstance(state, dict):
            return {k: kept(v) for k, v in state.items() if k not in PASSING and not str(k).startswith("/")}
        return state

    return kept(callback.state_dict())


@pytest.mark.parametrize("name", CALLBACKS)
def test_two_callbacks_of_a_kind_work_or_are_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    pair = [make(name, tmp_path), make(name, tmp_path)]
    refusal = ""
    try:
        trainer = train(tmp_path, pair, max_epochs=2)
    except (RuntimeError, ValueError) as error:
        refusal = str(error)
    assert not refusal or name in refusal or "progress bar" in refusal
    if not refusal:
        assert trainer.global_step > 0
        assert all(torch.isfinite(p).all() for p in trainer.lightning_module.parameters())


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_run_through_two_resumes_ends_as_one_that_was_never_stopped(name: str, tmp_path: Path) -> None:
    whole = make(name, tmp_path / "whole")
    if name in {"DiLoCo", "PipelineTimeline"}:
        with pytest.raises(MisconfigurationError, match=f"{name} .*strategy"):  # one of several processes
            train(tmp_path, [whole])
        return
    expected = train(tmp_path / "whole", [whole])
    start = None
    for until in (2, 4, 6):
        part, save = make(name, tmp_path / "parts"), tmp_path / f"{until}.ckpt" if until < 6 else None
        trainer = train(tmp_path / "parts", [part], until, start, save)
        start = save
    assert trainer.global_step == expected.global_step
    assert_same(dict(trainer.lightning_module.state_dict()), dict(expected.lightning_module.state_dict()), name)
    assert_same(state_of(part), state_of(whole), name)


@pytest.mark.parametrize("name", LOGGERS)
def test_two_loggers_of_a_kind_log_or_are_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    kind = getattr(loggers, name)
    pair = [kind(), kind()] if name == "DummyLogger" else [kind(tmp_path, "one"), kind(tmp_path, "two")]
    assert train(tmp_path, [], max_epochs=1, logger=pair).global_step == 3
    if name != "DummyLogger":
        same = [kind(tmp_path, "same", version=0), kind(tmp_path, "same", version=0)]
        if name == "CSVLogger":
            with pytest.raises(MisconfigurationError, match="two CSVLoggers of one trainer"):
                train(tmp_path, [], max_epochs=1, logger=same)
        else:
            assert train(tmp_path, [], max_epochs=1, logger=same).global_step == 3
