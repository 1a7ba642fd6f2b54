"""Counters, validation, stops and schedules of a fit of ``L.Trainer``, as recorded from runs of Lightning 2.6.6."""

from __future__ import annotations

import copy
import pickle
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR

import arclight as al
import arclight.compat.lightning as L
from arclight.compat.lightning.pytorch.callbacks import ModelCheckpoint
from arclight.compat.lightning.pytorch.core.optimizer import LightningOptimizer
from arclight.compat.lightning.pytorch.demos.boring_classes import BoringModel
from arclight.compat.lightning.pytorch.strategies import SingleDeviceStrategy


def trainer(kind: type[al.Trainer] = L.Trainer, **options: Any) -> Any:
    quiet = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    quiet |= {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    few = {"max_epochs": 1, "limit_train_batches": 4, "limit_val_batches": 1}
    return kind(**quiet | few | options)


class Recorder(BoringModel):
    """Notes (what, epoch, batch_idx, total_batch_idx), as ``fit_loop`` has them, and stops or skips at update ``at``."""

    def __init__(self, way: str = "", at: int = 99) -> None:
        super().__init__()
        self.way, self.at, self.seen = way, at, []

    def note(self, what: str) -> None:
        loop = self.trainer.fit_loop
        self.seen.append((what, self.trainer.current_epoch, loop.batch_idx, loop.total_batch_idx))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        self.note("start")
        return -1 if self.way == "skip" and batch_idx == self.at else None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.note("step")
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.note("end")
        self.trainer.should_stop |= self.way == "stop" and self.trainer.global_step >= self.at

    def on_validation_start(self) -> None:
        self.note("validation")

    def on_train_epoch_end(self) -> None:
        self.note("epoch")

    def on_train_end(self) -> None:
        self.note("over")


def batch(epoch: int, index: int, total: int) -> list[tuple[str, int, int, int]]:
    return [(what, epoch, index, total) for what in ("start", "step", "end")]


def test_the_index_of_a_batch_is_right_in_its_step_and_after_the_fit() -> None:
    model, run = Recorder(), trainer(max_epochs=2, limit_train_batches=2, limit_val_batches=0)
    assert (run.fit_loop.batch_idx, run.fit_loop.total_batch_idx) == (-1, -1)
    run.fit(model)
    assert model.seen == [
        *batch(0, 0, 0), *batch(0, 1, 1), ("epoch", 0, 1, 1), *batch(1, 0, 2), *batch(1, 1, 3), ("epoch", 1, 1, 3), ("over", 2, 1, 3),
    ]  # fmt: skip
    counts = run.fit_loop.epoch_loop.batch_progress
    assert (counts.total.ready, counts.total.completed) == (4, 4)


def test_a_stop_within_an_epoch_validates_first() -> None:
    model, run = Recorder("stop", at=2), trainer(max_epochs=2)
    run.fit(model)
    ends = [("validation", 0, 1, 1), ("epoch", 0, 1, 1), ("over", 1, 1, 1)]
    assert model.seen == [*batch(0, 0, 0), *batch(0, 1, 1), *ends]
    assert (run.current_epoch, run.global_step, run.is_last_batch) == (1, 2, False)


@pytest.mark.parametrize(
    ("options", "at", "validated"),
    [
        ({"val_check_interval": 2}, 2, [(0, 1)]),  # it is due there anyhow: once, not twice
        ({"val_check_interval": 3}, 2, [(0, 1)]),
        ({"val_check_interval": 3}, 4, [(0, 2), (0, 3)]),
        ({"min_steps": 4}, 2, [(0, 3)]),  # not before it may stop
        ({"check_val_every_n_epoch": 2}, 2, []),
        ({"max_steps": 2}, 99, []),  # a limit is no stop
        ({"max_epochs": 3, "min_epochs": 1}, 5, [(0, 3), (1, 0)]),
    ],
)
def test_stopping_runs_a_due_validation(options: dict[str, Any], at: int, validated: list[tuple[int, int]]) -> None:
    model = Recorder("stop", at)
    trainer(**options).fit(model)
    assert [(epoch, index) for what, epoch, index, _ in model.seen if what == "validation"] == validated


def test_our_own_trainer_stops_without_a_validation() -> None:
    seen = []

    class Model(BoringModel):
        def on_train_batch_end(self, *_: Any) -> None:
            self.trainer.request_stop()

        def on_validation_start(self) -> None:
            seen.append(self.trainer.global_step)

    trainer(al.Trainer).fit(Model())
    assert seen == []


def test_a_skipped_rest_of_an_epoch_is_not_validated() -> None:
    model, run = Recorder("skip", at=1), trainer(max_epochs=2)
    run.fit(model)
    assert [entry[:3] for entry in model.seen] == [
        *[(what, 0, 0) for what in ("start", "step", "end")], ("start", 0, 1), ("epoch", 0, 1),
        *[(what, 1, 0) for what in ("start", "step", "end")], ("start", 1, 1), ("epoch", 1, 1), ("over", 2, 1),
    ]  # fmt: skip
    assert run.fit_loop.batch_idx == 1
    assert run.is_last_batch


def test_limits_that_are_set_on_loops_are_those_of_the_fit() -> None:
    run = trainer(max_epochs=5, limit_val_batches=0)
    run.fit_loop.max_epochs, run.fit_loop.min_epochs = 3, 1
    run.fit_loop.epoch_loop.max_steps, run.fit_loop.epoch_loop.min_steps = 6, 2
    assert (run.max_epochs, run.min_epochs, run.max_steps, run.min_steps) == (3, 1, 6, 2)
    run.fit(BoringModel())
    assert run.global_step == 6


def validations(monkeypatch: pytest.MonkeyPatch, lasting: float, **options: Any) -> list[tuple[int, int]]:
    """(epoch, update) of each validation, where a batch takes a second and a validation so many."""
    clock, seen = [100.0], []

    class Model(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            clock[0] += 1
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            clock[0] += lasting
            seen.append((self.trainer.current_epoch, self.trainer.global_step))

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    trainer(**options).fit(Model())
    return seen


@pytest.mark.parametrize(
    ("lasting", "options", "expected"),
    [
        (0, {"max_epochs": 3}, [(0, 3), (1, 6), (2, 9), (2, 12)]),
        (5, {"max_epochs": 3}, [(0, 3), (1, 6), (2, 9), (2, 12)]),  # counted from the end of the one before
        (0, {"max_epochs": 4, "check_val_every_n_epoch": 2}, [(1, 5), (1, 8), (3, 13), (3, 16)]),
        (1, {"max_epochs": 4, "check_val_every_n_epoch": None}, [(0, 3), (1, 6), (2, 9), (2, 12), (3, 15)]),
    ],
)
def test_validation_by_the_clock(
    monkeypatch: pytest.MonkeyPatch, lasting: float, options: dict[str, Any], expected: list[tuple[int, int]]
) -> None:
    assert validations(monkeypatch, lasting, val_check_interval="00:00:00:03", **options) == expected


class Watched(BoringModel):
    """A ReduceLROnPlateau at step interval, which notes (update, value) of each of its steps."""

    def __init__(self, monitor: str, **config: Any) -> None:
        super().__init__()
        self.monitor, self.config, self.seen = monitor, config, []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("train", float(self.trainer.global_step))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", float(self.trainer.global_step))

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.seen.append((self.trainer.global_step, float(metric)))
        super().lr_scheduler_step(scheduler, metric)

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1)
        scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "monitor": self.monitor, **self.config}]


@pytest.mark.parametrize("kind", [L.Trainer, al.Trainer])
def test_a_plateau_at_step_interval_sees_the_validation_of_its_step(kind: type[al.Trainer]) -> None:
    model = Watched("val", strict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # before the first validation there is no value
        trainer(kind, val_check_interval=2, max_epochs=2).fit(model)
    assert model.seen == [(2, 2.0), (3, 2.0), (4, 4.0), (5, 4.0), (6, 6.0), (7, 6.0), (8, 8.0)]
    model = Watched("train")
    trainer(kind, max_epochs=2, accumulate_grad_batches=2).fit(model)
    assert [step for step, _ in model.seen] == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", [L.Trainer, al.Trainer])
def test_a_plateau_between_a_save_and_its_step_goes_on_as_if_never_stopped(
    kind: type[al.Trainer], tmp_path: Path
) -> None:
    torch.manual_seed(3)
    whole = Watched("val")
    saving = ModelCheckpoint(
        dirpath=tmp_path, save_top_k=-1, monitor=None, filename="{step}", save_on_train_epoch_end=False
    )
    run = trainer(kind, val_check_interval=1, max_epochs=2, callbacks=[saving], enable_checkpointing=True)
    run.fit(whole)
    assert whole.seen == [(step, float(step)) for step in range(1, 9)]
    rates = [config["lr"] for config in run.optimizers[0].param_groups]
    for done in (3, 4):  # within an epoch, and after its last batch
        part = Watched("val")
        again = trainer(kind, val_check_interval=1, max_epochs=2)
        (saved,) = tmp_path.glob(f"step={done}*")
        again.fit(part, ckpt_path=saved)
        assert part.seen == whole.seen[done - 1 :]  # the step after the saved update was still to come
        assert [config["lr"] for config in again.optimizers[0].param_groups] == rates


@pytest.mark.parametrize("kind", [L.Trainer, al.Trainer])
def test_frequency_at_step_interval_goes_on_after_a_resume(kind: type[al.Trainer], tmp_path: Path) -> None:
    saving = ModelCheckpoint(dirpath=tmp_path, save_top_k=-1, filename="{step}", every_n_train_steps=1)
    whole = Watched("train", frequency=2)
    run = trainer(kind, limit_val_batches=0, callbacks=[saving], enable_checkpointing=True)
    run.fit(whole)
    for done in (1, 2, 3):  # of which the second is saved before its step of the schedule
        part = Watched("train", frequency=2)
        (saved,) = tmp_path.glob(f"step={done}*")
        trainer(kind, limit_val_batches=0).fit(part, ckpt_path=saved)
        assert [step for step, _ in part.seen] == [step for step, _ in whole.seen if step >= done]


@pytest.mark.parametrize(("kind", "expected"), [(L.Trainer, [2, 5]), (al.Trainer, [2, 4, 6])])
def test_frequency_at_step_interval(kind: type[al.Trainer], expected: list[int]) -> None:
    """Lightning's counts the batches of each epoch anew, ours the updates."""
    model = Watched("train", frequency=2)
    trainer(kind, max_epochs=2, limit_train_batches=3, limit_val_batches=0).fit(model)
    assert [step for step, _ in model.seen] == expected


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        (lambda o: {"optimizer": o, "lr_scheduler": {"scheduler": OneCycleLR(o, 0.1, total_steps=9)}}, "`OneCycleLR` scheduler is using 'interval': 'epoch'"),
        (lambda o: {"optimizer": o, "foo": 1}, r"unsupported keys in the optimizer configuration: \{'foo'\}"),
        (lambda o: [{"optimizer": o, "bar": 1}], r"unsupported keys in the optimizer configuration: \{'bar'\}"),
        (lambda o: {"optimizer": o, "lr_scheduler": {"scheduler": StepLR(o, 1), "foo": 1}}, r"unsupported keys in the lr scheduler dict: \{'foo'\}"),
    ],
)  # fmt: skip
def test_settings_of_optimizers_that_are_probably_mistakes(choose: Any, message: str) -> None:
    class Model(BoringModel):
        def configure_optimizers(self) -> Any:
            return choose(SGD(self.parameters(), lr=0.1))

    with pytest.warns(RuntimeWarning, match=message):
        trainer(limit_train_batches=1, limit_val_batches=0).fit(Model())


@pytest.mark.parametrize("automatic", [True, False])
def test_a_step_that_returns_nothing(automatic: bool) -> None:
    class Model(BoringModel):
        automatic_optimization = automatic

        def training_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(limit_val_batches=0).fit(Model())
    assert sum("`training_step` returned `None`" in str(warning.message) for warning in caught) == automatic


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_a_wrapped_optimizer_can_be_copied(copied: Any) -> None:
    kept: list[Any] = []

    class Model(BoringModel):
        def on_train_batch_end(self, *_: Any) -> None:
            kept[:] = [self.optimizers()]

    trainer(limit_val_batches=0).fit(Model())
    other = copied(kept[0])
    assert isinstance(other, LightningOptimizer)
    assert isinstance(other, SGD)
    assert other.state_dict() == kept[0].state_dict()
    assert repr(other).startswith("LightningSGD (")
    before = kept[0].param_groups[0]["params"][0].detach().clone()
    for parameter in other.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    other.step()
    assert torch.equal(before, kept[0].param_groups[0]["params"][0])
    assert not torch.equal(before, other.param_groups[0]["params"][0])


@pytest.mark.parametrize("kind", [L.Trainer, al.Trainer])
def test_numbers_of_numpy_in_optimizers_and_schedules_are_saved(kind: type[al.Trainer], tmp_path: Path) -> None:
    class Model(BoringModel):
        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=np.float64(0.1), momentum=np.float32(0.5))
            return [optimizer], [StepLR(optimizer, step_size=np.int64(1), gamma=np.float64(0.5))]

    run = trainer(kind, max_epochs=2)
    run.fit(Model())
    path = tmp_path / ("last.ckpt" if kind is L.Trainer else "last")
    run.save_checkpoint(path)
    again = trainer(kind, max_epochs=3)
    again.fit(Model(), ckpt_path=path)
    assert again.optimizers[0].param_groups[0]["lr"] == 0.1 * 0.5**3


@pytest.mark.parametrize("restores", [True, False])
def test_a_strategy_restores_optimizers_in_its_own_way(restores: bool, tmp_path: Path) -> None:
    class Strategy(SingleDeviceStrategy):
        given: Mapping[str, Any] | None = None

        @property
        def lightning_restore_optimizer(self) -> bool:
            return restores

        def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
            self.given = checkpoint

    run = trainer()
    run.fit(BoringModel())
    run.save_checkpoint(tmp_path / "last.ckpt")
    strategy = Strategy(torch.device("cpu"))
    trainer(strategy=strategy, max_epochs=2).fit(BoringModel(), ckpt_path=tmp_path / "last.ckpt")
    assert (strategy.given is not None) == restores
    if strategy.given is not None:
        assert strategy.given["optimizer_states"][0]["param_groups"] == run.optimizers[0].state_dict()["param_groups"]


def test_unpicklable_hparams_are_removed_at_each_run() -> None:
    class Model(BoringModel):
        def __init__(self, kept: int = 1, lost: Any = lambda x: x) -> None:
            super().__init__()
            self.save_hyperparameters()

    for entry in ("fit", "validate"):
        model = Model()
        with pytest.warns(UserWarning, match="Attribute 'lost' removed from hparams because it cannot be pickled"):
            getattr(trainer(), entry)(model)
        assert dict(model.hparams) == {"kept": 1}
        assert set(model.hparams_initial) == {"kept", "lost"}


def test_arguments_that_a_subclass_gives_to_its_base_are_kept() -> None:
    class Base(L.LightningModule):
        def __init__(self, a: int = 1, b: int = 2) -> None:
            super().__init__()
            self.save_hyperparameters()

    class Renamed(Base):
        def __init__(self, n: int) -> None:
            super().__init__(a=n + 1, b=7)

    class Same(Base):
        def __init__(self, a: int, c: int = 3) -> None:
            super().__init__(a=a * 10)
            self.save_hyperparameters()

    class Passed(Base):
        def __init__(self, *args: Any, z: int = 3, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    assert dict(Renamed(4).hparams) == {"n": 4, "a": 5, "b": 7}
    assert dict(Same(1).hparams) == {"a": 1, "b": 2, "c": 3}
    assert dict(Passed(4, b=5).hparams) == {"a": 4, "b": 5, "z": 3}


def test_a_fabric_without_loggers_has_no_first_one() -> None:
    fabric = L.Fabric(accelerator="cpu", devices=1)
    module = fabric.setup(BoringModel())
    assert fabric.loggers == module.loggers == []
    for owner in (fabric, module):
        with pytest.raises(IndexError, match="no loggers"):
            _ = owner.logger


def test_each_call_of_optimizer_step_counts_whether_or_not_it_steps() -> None:
    class Model(BoringModel):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
            if batch_idx % 2 == 0:
                optimizer.step(closure=closure)
            else:
                closure()

        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=1.0)
            return [optimizer], [{"scheduler": StepLR(optimizer, 1, gamma=0.5), "interval": "step"}]

    model, run = Model(), trainer(limit_train_batches=100, max_epochs=-1, max_steps=5, limit_val_batches=0)
    run.fit(model)
    assert (run.global_step, run.fit_loop.total_batch_idx) == (5, 4)
    assert run.optimizers[0].param_groups[0]["lr"] == 0.5**5


def test_training_goes_on_with_tensors_of_the_validation() -> None:
    class Model(BoringModel):
        center: Any = 0.0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return (self.layer(batch) * self.center).sum()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert not torch.is_grad_enabled()
            self.center = self.layer(batch).mean()

        def test_step(self, batch: Any, batch_idx: int) -> None:
            assert torch.is_inference_mode_enabled()

    model, run = Model(), trainer(max_epochs=2, num_sanity_val_steps=1)
    run.fit(model)
    assert float(model.center) != 0
    run.test(model)
