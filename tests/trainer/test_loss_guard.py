"""Poisoned batches, on one process and two: what is left out, what is told, where training goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import arclight as al
from arclight import checkpoint
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.strategies import DDPStrategy, FSDPStrategy
from arclight.optim import AdamW
from arclight.trainer.callbacks import LossGuard
from arclight.trainer.callbacks.loss_guard import TrainingSpikeException, _as_lists
from arclight.trainer.loggers import CSVLogger
from arclight.trainer.loggers.csv_logger import read_rows
from arclight.trainer.logging.reporting import NonFiniteLossError


class Samples(Dataset[Any]):
    """A line to learn; the samples of ``poison`` have another factor."""

    def __init__(self, poison: dict[int, float] | None = None, without: tuple[int, ...] = (), count: int = 24) -> None:
        x = torch.randn(count, 3, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        self.rows = [
            {"ids": n, "x": x[n] * (poison or {}).get(n, 1.0), "y": x[n].sum(0, keepdim=True)}
            for n in range(count)
            if n not in without
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class Line(al.Module):
    def __init__(self, ours: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.line, self.ours = nn.Linear(3, 1).double(), ours

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = (self.line(batch["x"]) - batch["y"]).square().mean()
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        if self.ours:
            return AdamW(lr=0.05).build(self.named_parameters())
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.01)


def fit(
    folder: Path,
    data: Samples,
    *callbacks: Any,
    devices: int = 1,
    strategy: Any = "auto",
    ours: bool = True,
    start: Path | None = None,
    **options: Any,
) -> tuple[al.Trainer, torch.Tensor]:
    """One epoch of global batches of two; the trainer and the weights."""
    trainer = al.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, enable_progress_bar=False, default_root_dir=folder,
        logger=False, callbacks=list(callbacks), enable_checkpointing=any(isinstance(c, al.ModelCheckpoint) for c in callbacks),
        log_every_n_steps=1, **{"max_epochs": 1, **options},
    )  # fmt: skip
    model = Line(ours)
    trainer.fit(model, DataLoader(data, 2 // devices, shuffle=False), ckpt_path=start)
    return trainer, model.line.weight.detach().clone()


def guard(folder: Path, **options: Any) -> LossGuard:
    return LossGuard(**{"warmup": 3, "sigma": None, "file": folder / "guard.jsonl", **options})


def told(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "guard.jsonl").read_text().splitlines()]


NAN, HUGE = float("nan"), 300.0


@pytest.mark.parametrize(
    ("value", "options", "ours"),
    [
        pytest.param(value, options, ours, marks=() if ours == quick else pytest.mark.slow)
        for value, options, quick in (
            (NAN, {}, True), (HUGE, {"sigma": 4.0}, False), (float("inf"), {"sigma": 4.0}, True),
        )
        for ours in (True, False)
    ],
)  # fmt: skip
def test_a_bad_batch_trains_nothing(tmp_path: Path, value: float, options: Any, ours: bool) -> None:
    """The run equals one that never met it, moments and their count included."""
    _, wanted = fit(tmp_path, Samples(without=(10, 11)), ours=ours)
    trainer, found = fit(tmp_path, Samples({11: value}), guard(tmp_path, **options), ours=ours)
    assert torch.equal(found, wanted)
    assert trainer.global_step == 12
    (event,) = told(tmp_path)
    assert (event["step"], event["batches"], event["samples"], event["action"]) == (5, [[0, 5]], [[[10, 11]]], "skip")


def test_without_a_guard_the_batch_spoils_the_weights(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteLossError):
        fit(tmp_path, Samples({11: NAN}))
    _, spoiled = fit(tmp_path, Samples({11: HUGE}))
    assert not torch.equal(spoiled, fit(tmp_path, Samples(without=(10, 11)))[1])


def test_clean_data_trains_as_without_a_guard(tmp_path: Path) -> None:
    _, wanted = fit(tmp_path, Samples(), gradient_clip_val=0.5)
    watch = guard(tmp_path, sigma=6.0)
    _, found = fit(tmp_path, Samples(), watch, gradient_clip_val=0.5)
    assert torch.equal(found, wanted)
    assert watch.events == []


def test_a_window_of_batches_is_left_out_as_a_whole(tmp_path: Path) -> None:
    _, wanted = fit(tmp_path, Samples(without=(8, 9, 10, 11)), accumulate_grad_batches=2)
    _, found = fit(tmp_path, Samples({11: NAN}), guard(tmp_path), accumulate_grad_batches=2)
    assert torch.equal(found, wanted)
    assert told(tmp_path)[0]["batches"] == [[0, 4], [0, 5]]


@pytest.mark.parametrize("strategy", [pytest.param(DDPStrategy, marks=pytest.mark.slow), FSDPStrategy])
def test_two_processes_agree(tmp_path: Path, strategy: Any) -> None:
    """Only the second process meets the poison (sample 11: of each two samples it has the odd one)."""
    _, wanted = fit(tmp_path, Samples(without=(10, 11)))
    _, found = fit(tmp_path, Samples({11: NAN}), guard(tmp_path), devices=2, strategy=strategy(start_method="fork"))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    (event,) = told(tmp_path)
    assert event["batches"] == [[0, 5]]
    assert event["samples"] == [[[10]], [[11]]]


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_going_back_to_the_last_good_checkpoint(tmp_path: Path, devices: int) -> None:
    """The poison is in the sixth batch; back to the checkpoint after four, and on with the seventh: the fifth is lost too."""
    strategy: Any = DDPStrategy(start_method="fork") if devices == 2 else "auto"
    _, wanted = fit(tmp_path / "a", Samples(without=(8, 9, 10, 11)))
    saving = al.ModelCheckpoint(dirpath=tmp_path / "kept", every_n_train_steps=2, save_top_k=-1)
    _, found = fit(
        tmp_path / "b",
        Samples({11: NAN}),
        saving,
        guard(tmp_path, policy="rollback"),
        devices=devices,
        strategy=strategy,
    )
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12 if devices == 2 else 0.0)
    assert told(tmp_path)[0]["action"] == "rollback"
    last = max((checkpoint.inspect(path) for path in (tmp_path / "kept").iterdir()), key=lambda found: found.step or 0)
    assert last.step == 10  # four steps, back from the sixth batch, and six more


@pytest.mark.parametrize("resumed", [False, True])
def test_going_back_finds_every_checkpoint_that_is_kept(tmp_path: Path, resumed: bool) -> None:
    """The newest is too young for a margin of three; older ones are kept without a value to rank them by."""

    def parts() -> tuple[al.ModelCheckpoint, LossGuard]:
        saving = al.ModelCheckpoint(tmp_path / "kept", "{step}", every_n_train_steps=1, save_top_k=-1)
        return saving, guard(tmp_path, policy="rollback", margin=3)

    start = None
    if resumed:
        fit(tmp_path, Samples({11: NAN}), *parts(), max_steps=4)
        start = tmp_path / "kept" / "step=4.ckpt"
    saving, watch = parts()
    fit(tmp_path, Samples({11: NAN}), saving, watch, start=start)
    assert [event.step for event in watch.events] == [5]
    assert checkpoint.inspect(saving.best_model_path).step == 8  # back to the second, and on with six more


def test_going_back_needs_somewhere_to_go(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationError, match="needs a ModelCheckpoint"):
        fit(tmp_path, Samples(), guard(tmp_path, policy="rollback"))
    saving = al.ModelCheckpoint(dirpath=tmp_path / "kept", every_n_train_steps=8)
    with pytest.raises(NonFiniteLossError, match="there is no checkpoint from 1 steps before it"):
        fit(tmp_path, Samples({11: NAN}), saving, guard(tmp_path, policy="rollback"))


def test_stopping_leaves_the_weights_as_they_were(tmp_path: Path) -> None:
    kept: list[torch.Tensor] = []

    class Last(al.Callback):
        def on_exception(self, trainer: al.Trainer, module: Any, exception: BaseException) -> None:
            kept.append(module.line.weight.detach().clone())

    _, wanted = fit(tmp_path, Samples(without=tuple(range(10, 24))))
    with pytest.raises(NonFiniteLossError, match=r"step 5 \(epoch 0 batch 5, samples .*10, 11"):
        fit(tmp_path, Samples({11: NAN}), guard(tmp_path, policy="stop"), Last())
    with pytest.raises(TrainingSpikeException, match="batch 5"):
        fit(tmp_path, Samples({11: HUGE}), guard(tmp_path, policy="stop", sigma=4.0), Last())
    assert all(torch.equal(weights, wanted) for weights in kept)


def test_patience_ends(tmp_path: Path) -> None:
    poison = dict.fromkeys(range(10, 24), NAN)
    with pytest.raises(NonFiniteLossError, match="the last of 3 bad updates in a row"):
        fit(tmp_path, Samples(poison), guard(tmp_path, patience=3))
    assert len(told(tmp_path)) == 3


def test_loss_history_survives_a_resume(tmp_path: Path) -> None:
    """The spike comes right after the resume: without the losses from before nobody would know it for one."""
    data = Samples({13: HUGE})
    _, wanted = fit(tmp_path, Samples(without=(12, 13)))
    saving = al.ModelCheckpoint(dirpath=tmp_path / "kept", every_n_train_steps=6, save_top_k=-1)
    fit(tmp_path, data, saving, guard(tmp_path, sigma=4.0), max_steps=6)
    trainer = al.Trainer(
        accelerator="cpu", devices=1, enable_progress_bar=False, default_root_dir=tmp_path, logger=False, max_epochs=1,
        callbacks=[guard(tmp_path, sigma=4.0), al.ModelCheckpoint(dirpath=tmp_path / "kept")],
    )  # fmt: skip
    model = Line()
    trainer.fit(model, DataLoader(data, 2), ckpt_path=next((tmp_path / "kept").iterdir()))
    assert [event["step"] for event in told(tmp_path)] == [6]
    assert torch.equal(model.line.weight.detach(), wanted)


def test_a_window_that_a_resume_completes_is_judged_as_a_whole(tmp_path: Path) -> None:
    """Its first batch, which has the spike, was before the checkpoint."""

    class Save(al.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 8:
                trainer.save_checkpoint(tmp_path / "within")

    def guarded() -> LossGuard:
        return guard(tmp_path, sigma=3.0)

    data, whole, resumed = Samples({16: 20.0}), guarded(), guarded()
    _, weights = fit(tmp_path, data, whole, Save(), accumulate_grad_batches=2)
    _, again = fit(tmp_path, data, resumed, start=tmp_path / "within", accumulate_grad_batches=2)
    assert [event.batches for event in whole.events] == [[(0, 8), (0, 9)]]
    assert whole.events == resumed.events
    assert torch.equal(weights, again)


def test_names_of_samples_are_lists_whatever_holds_them() -> None:
    """A checkpoint within a window has them, and can hold no array of strings."""
    names = _as_lists([np.array(["a", "b"]), torch.tensor([1, 2]), ["c"]])
    assert names == [["a", "b"], [1, 2], ["c"]]


def test_settings_that_mean_nothing_are_refused() -> None:
    for options, message in (
        ({"policy": "pray"}, "policy='pray' is not known; choose skip, rollback or stop"),
        ({"sigma": 0.0}, "sigma: need number > 0"),
        ({"warmup": 200}, "LossGuard needs 1 < warmup <= window, .* got warmup=200, window=100"),
        ({"patience": 0}, "LossGuard needs .* patience >= 1 .*, patience=0,"),
    ):
        with pytest.raises(ValueError, match=message):
            LossGuard(**options)  # type: ignore[arg-type]


class Scheduled(Line):
    """A rate that halves with every step, a value logged with every step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("batch", float(batch_idx))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step"}]


@pytest.mark.parametrize("every", [1, 2])
def test_going_back_takes_schedules_rows_and_saves_along(tmp_path: Path, every: int) -> None:
    """Back from the sixth batch to step 2: step 3 is the seventh batch, and steps 3 to 5 are scheduled, logged and saved once more."""
    saving = al.ModelCheckpoint(dirpath=tmp_path / "kept", every_n_train_steps=2, save_top_k=-1, monitor="batch")
    logger = CSVLogger(tmp_path / "log")
    trainer = al.Trainer(
        accelerator="cpu", enable_progress_bar=False, default_root_dir=tmp_path, logger=logger, log_every_n_steps=every, max_epochs=1,
        callbacks=[saving, guard(tmp_path, policy="rollback", margin=3)],
    )  # fmt: skip
    trainer.fit(Scheduled(True), DataLoader(Samples({11: NAN}), 2, shuffle=False))
    assert trainer.global_step == 8
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**8)
    rows = {int(row["step"]): int(float(row["batch"])) for row in read_rows(Path(logger.log_dir) / "metrics.csv")}
    expected = {1: 0, 2: 1, 3: 6, 4: 7, 5: 8, 6: 9, 7: 10, 8: 11}
    assert rows == {step: batch for step, batch in expected.items() if step % every == 0}
    saved = [checkpoint.load(path)["progress"] for path in (tmp_path / "kept").iterdir()]
    steps = sorted((progress["global_step"], progress["batches"]) for progress in saved)
    assert steps == [(2, 2), (4, 4), (4, 8), (6, 10), (8, 12)]


def test_going_back_leaves_rows_of_an_earlier_run_where_they_were_moved(tmp_path: Path) -> None:
    """The second run has the first one's version: its file is moved aside, and no rollback takes it for this run's own."""
    for number, data in enumerate((Samples(), Samples({11: NAN}))):
        saving = al.ModelCheckpoint(tmp_path / str(number), monitor="batch", every_n_train_steps=2, save_top_k=-1)
        logger = CSVLogger(tmp_path / "log", version=0)
        trainer = al.Trainer(
            accelerator="cpu", enable_progress_bar=False, default_root_dir=tmp_path, logger=logger, log_every_n_steps=1, max_epochs=1,
            callbacks=[saving, guard(tmp_path, policy="rollback", margin=3)],
        )  # fmt: skip
        trainer.fit(Scheduled(True), DataLoader(data, 2, shuffle=False))
    folder = Path(logger.log_dir)
    batches = {path.name: [int(float(row["batch"])) for row in read_rows(path)] for path in folder.glob("*.csv")}
    assert batches == {"metrics-0.csv": list(range(12)), "metrics.csv": [0, 1, 6, 7, 8, 9, 10, 11]}


def test_going_back_keeps_rows_that_wait(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=100)
    for step in range(1, 5):
        logger.log_metrics({"a": float(step)}, step=step)
    logger.rewind(2)
    logger.save()
    assert [row["step"] for row in read_rows(Path(logger.log_dir) / "metrics.csv")] == ["1", "2"]


class Watched(Line):
    """A rate that goes by the value of each step; the steps at which it was told."""

    def __init__(self) -> None:
        super().__init__(False)
        self.told: list[tuple[int, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("batch", float(batch_idx))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=99)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step", "monitor": "batch"},
        }

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.told.append((self.trainer.progress.batches, self.trainer.global_step))
        super().lr_scheduler_step(scheduler, metric)


class Poisoned:
    """Four batches, good but for the seventh that is drawn."""

    drawn = 0

    def __iter__(self) -> Any:
        good = {"x": torch.ones(2, 3).double(), "y": torch.ones(2, 1).double()}
        for _ in range(4):
            self.drawn += 1
            yield good | {"x": good["x"] * NAN} if self.drawn == 7 else good

    def __len__(self) -> int:
        return 4


def test_going_back_steps_no_plateau_schedule_twice(tmp_path: Path) -> None:
    """The checkpoint of the first epoch's end has the schedule's fourth step behind it."""
    saving = al.ModelCheckpoint(dirpath=tmp_path / "kept", save_top_k=-1, save_on_train_epoch_end=True)
    trainer = al.Trainer(
        accelerator="cpu", enable_progress_bar=False, default_root_dir=tmp_path, logger=False, max_epochs=2,
        callbacks=[saving, guard(tmp_path, policy="rollback")],
    )  # fmt: skip
    model = Watched()
    trainer.fit(model, Poisoned())
    assert model.told == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 6), (8, 5)]
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == trainer.global_step == 5
