"""Searches for a learning rate and a batch size: what they find, and that they leave no trace."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.same import assert_same
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import arclight as al
from arclight.fabric.errors import MisconfigurationError
from arclight.trainer.callbacks import BatchSizeFinder, LearningRateFinder
from arclight.trainer.tuner import LRFinder, Tuner


def trainer(folder: Path, **options: Any) -> al.Trainer:
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": False,
    }
    return al.Trainer(**{"default_root_dir": folder, "accelerator": "cpu", "max_epochs": 2, **quiet, **options})


class NoisyRows(Dataset[torch.Tensor]):
    """Rows whose augmentation draws random numbers."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), float(index)) + torch.randn(8)


class Stateful(al.Module):
    """Shuffled noisy data, dropout, batch norm, Adam and a schedule: everything that a search might disturb."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch).square().mean()
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.net(batch).square().mean())

    def train_dataloader(self) -> Any:
        return DataLoader(NoisyRows(), self.hparams.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(NoisyRows(), self.hparams.batch_size)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fitted(folder: Path, *callbacks: al.Callback) -> tuple[al.Trainer, Stateful]:
    al.seed_everything(7)
    model = Stateful()
    runner = trainer(folder, callbacks=list(callbacks))
    runner.fit(model)
    return runner, model


class Bowl(al.Module):
    """Loss w**2 / 2 over one weight, for which a rate above 2 diverges."""

    def __init__(self, rate: float = 1e-3) -> None:
        super().__init__()
        self.lr = rate
        self.weight = nn.Parameter(torch.tensor(4.0))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.weight.square().sum() / 2

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.zeros(4, 1)), batch_size=2)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Hungry(al.Module):
    """Says that memory is out for more than ``room`` samples at once."""

    def __init__(self, room: int, batch_size: int = 2, samples: int = 64) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.room, self.batch_size, self.samples = room, batch_size, samples
        self.sizes: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.sizes.append(len(batch[0]))
        if len(batch[0]) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return self.layer(batch[0]).square().mean()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        if len(batch[0]) > self.room:
            raise RuntimeError("CUDA error: out of memory")
        self.sizes.append(len(batch[0]))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.test_step(batch, batch_idx)
        return self.layer(batch[0])

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(self.samples, 3)), batch_size=self.batch_size)

    test_dataloader = predict_dataloader = train_dataloader

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


@pytest.mark.parametrize(
    "finder",
    [LearningRateFinder(num_training_steps=7, update_attr=False), BatchSizeFinder(init_val=4, max_trials=1)],
    ids=["rate", "batch"],
)
def test_a_search_leaves_no_trace(tmp_path: Path, finder: al.Callback) -> None:
    runner, searched = fitted(tmp_path / "searched", finder)
    plain, model = fitted(tmp_path / "plain")
    assert all(
        torch.equal(a, b) for a, b in zip(searched.state_dict().values(), model.state_dict().values(), strict=True)
    )
    assert runner.progress == plain.progress
    assert (runner.max_steps, runner.max_epochs, runner.limit_val_batches) == (-1, 2, plain.limit_val_batches)
    assert runner.callback_metrics == plain.callback_metrics


def test_rates_grow_evenly_and_the_search_ends_when_the_loss_diverges(tmp_path: Path) -> None:
    model, runner = Bowl(), trainer(tmp_path)
    found = Tuner(runner).lr_find(model, min_lr=1e-4, max_lr=1e4, num_training=40, early_stop_threshold=None)
    assert found is not None
    rates = found.results["lr"]
    assert rates == pytest.approx([10 ** (-4 + 8 * step / 39) for step in range(40)])
    assert runner.global_step == 0
    assert runner.callbacks == []
    assert model.weight.item() == 4.0
    short = Tuner(runner).lr_find(model, min_lr=1e-4, max_lr=1e4, num_training=40)
    assert short is not None
    assert 20 < len(short.results["lr"]) < 40
    assert short.results["loss"] == found.results["loss"][: len(short.results["loss"])]
    assert model.lr == short.suggestion()
    assert 1e-4 < model.lr < 10


def test_the_first_losses_are_means_without_the_bias_of_a_beginning(tmp_path: Path) -> None:
    found = Tuner(trainer(tmp_path)).lr_find(Bowl(), min_lr=0.5, max_lr=0.5 + 1e-9, num_training=2, update_attr=False)
    assert found is not None
    assert found.results["loss"] == pytest.approx([8.0, (0.98 * 8.0 + 2.0) / 1.98])


def test_schedules_go_on_from_the_rate_found(tmp_path: Path) -> None:
    model = Bowl()
    finder = LearningRateFinder(min_lr=1e-3, max_lr=1.0, num_training_steps=20, early_stop_threshold=None)
    runner = trainer(tmp_path, callbacks=finder, max_epochs=1)
    runner.fit(model)
    assert finder.optimal_lr is not None
    assert model.lr == finder.optimal_lr.suggestion() != 1e-3
    assert runner.optimizers[0].param_groups[0]["lr"] == pytest.approx(model.lr / 3)


def test_suggests_the_steepest_fall_between_the_ends() -> None:
    finder = LRFinder("linear", 0.0, 2 * math.pi, 200)
    finder.results["lr"] = [finder.rate(step) for step in range(200)]
    finder.results["loss"] = [math.sin(rate) for rate in finder.results["lr"]]
    finder.results["loss"][150] = math.nan
    assert finder.suggestion() == pytest.approx(math.pi, abs=0.05)
    assert finder.suggestion(skip_begin=120) == finder.results["lr"][120]
    assert finder.suggestion(skip_begin=198) is None


@pytest.mark.parametrize(("mode", "expected"), [("power", 16), ("binsearch", 19)])
def test_finds_what_fits_in_memory(tmp_path: Path, mode: str, expected: int) -> None:
    model, runner = Hungry(room=20), trainer(tmp_path)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert Tuner(runner).scale_batch_size(model, mode=mode, steps_per_trial=1) == expected  # 20 less 5 %
    assert model.batch_size == expected
    assert runner.train_dataloader.batch_size == expected
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert 21 in model.sizes or mode == "power"


def test_a_first_size_too_large_is_halved_until_it_fits(tmp_path: Path) -> None:
    assert Tuner(trainer(tmp_path)).scale_batch_size(Hungry(room=5), init_val=64, steps_per_trial=1) == 4
    with pytest.raises(MisconfigurationError, match="one sample runs out of memory"):
        Tuner(trainer(tmp_path)).scale_batch_size(Hungry(room=0), init_val=4)


def test_a_size_that_was_found_has_been_tried(tmp_path: Path) -> None:
    model = Hungry(room=5)
    assert Tuner(trainer(tmp_path)).scale_batch_size(model, init_val=64, steps_per_trial=1, max_trials=2) == 4
    assert model.sizes == [64, 32, 16, 8, 4, 8]


def test_a_host_without_memory_is_a_size_too_large(tmp_path: Path) -> None:
    """Python, and NumPy in a data set, say it by an error of their own."""

    class Collected(Hungry):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if len(batch[0]) > self.room:
                raise MemoryError("Unable to allocate 2.00 GiB for an array")
            return super().training_step(batch, batch_idx)

    assert Tuner(trainer(tmp_path)).scale_batch_size(Collected(room=9), steps_per_trial=1) == 8


def test_no_size_beyond_data_or_limit(tmp_path: Path) -> None:
    assert Tuner(trainer(tmp_path)).scale_batch_size(Hungry(999, samples=24), steps_per_trial=1) == 24
    model = Hungry(999)
    assert Tuner(trainer(tmp_path)).scale_batch_size(model, max_val=10, steps_per_trial=1) == 10
    assert max(model.sizes) == 10  # tried, not only named


def test_evaluation_goes_on_with_the_size_found(tmp_path: Path) -> None:
    model = Hungry(room=8)
    outputs = trainer(tmp_path, callbacks=BatchSizeFinder(steps_per_trial=1)).predict(model)
    assert [len(output) for output in outputs] == [8] * 8
    model.sizes.clear()
    runner = trainer(tmp_path, callbacks=BatchSizeFinder(steps_per_trial=1, init_val=8))
    runner.test(model)
    assert model.sizes == [8] + [8] * 8
    assert runner.limit_test_batches == 1.0


def test_a_resumed_fit_keeps_the_size_that_its_run_had_found(tmp_path: Path) -> None:
    finder = BatchSizeFinder(steps_per_trial=1)
    runner = trainer(tmp_path, callbacks=finder, max_epochs=1)
    runner.fit(Hungry(room=20))
    runner.save_checkpoint(tmp_path / "kept")
    model, finder = Hungry(room=40), BatchSizeFinder(steps_per_trial=1)
    runner = trainer(tmp_path, callbacks=finder)
    runner.fit(model, ckpt_path=tmp_path / "kept")
    assert model.sizes == [16] * 4
    assert finder.optimal_batch_size == model.batch_size == 16
    runner.save_checkpoint(tmp_path / "kept-again")
    runner = trainer(tmp_path, callbacks=finder, max_epochs=1)
    runner.fit(model := Hungry(room=40))  # a fit of its own
    assert finder.optimal_batch_size == model.batch_size == 32
    runner.test(Hungry(room=8), ckpt_path=tmp_path / "kept-again")  # an evaluation has a size of its own, too
    assert finder.optimal_batch_size == 8


def test_finders_of_two_settings_keep_what_each_had_found(tmp_path: Path) -> None:
    class Two(Hungry):
        other = 1

    def finders() -> list[al.Callback]:
        return [
            BatchSizeFinder(steps_per_trial=1),
            BatchSizeFinder(steps_per_trial=1, batch_arg_name="other", max_trials=3),
        ]

    runner = trainer(tmp_path, callbacks=finders(), max_epochs=1)
    runner.fit(Two(room=20))
    runner.save_checkpoint(tmp_path / "kept")
    resumed = finders()
    trainer(tmp_path, callbacks=resumed).fit(model := Two(room=40), ckpt_path=tmp_path / "kept")
    assert (model.batch_size, model.other) == tuple(finder.optimal_batch_size for finder in resumed) == (16, 8)


@pytest.mark.parametrize("kind", [BatchSizeFinder, LearningRateFinder])
def test_a_finder_that_found_nothing_takes_its_state_back(kind: Any) -> None:
    """As from spawned processes, after a development run."""
    finder = kind()
    expected = finder.state_dict(), vars(finder) | {"_resumed": True}
    finder.load_state_dict(finder.state_dict())
    assert (finder.state_dict(), vars(finder)) == expected


@pytest.mark.parametrize(
    "finder",
    [
        lambda: BatchSizeFinder(init_val=3, max_trials=1, steps_per_trial=1),
        lambda: LearningRateFinder(num_training_steps=20, attr_name="rate"),
    ],
    ids=["batch", "rate"],
)
def test_a_resumed_fit_has_the_bits_of_one_that_was_never_stopped(tmp_path: Path, finder: Any) -> None:
    class Rated(Stateful):
        rate = 1e-2

    def run(steps: int, **options: Any) -> tuple[al.Trainer, Rated, Any]:
        al.seed_everything(7)
        model, callback = Rated(), finder()
        runner = trainer(tmp_path, callbacks=callback, max_steps=steps)
        runner.fit(model, **options)
        return runner, model, callback

    run(5)[0].save_checkpoint(tmp_path / "stopped")
    resumed, model, found = run(11, ckpt_path=tmp_path / "stopped")
    whole, expected, first = run(11)
    assert_same(model.state_dict(), expected.state_dict())
    assert_same(resumed.optimizers[0].state_dict(), whole.optimizers[0].state_dict())
    assert_same(resumed.callback_metrics, whole.callback_metrics)
    assert (model.rate, model.hparams.batch_size) == (expected.rate, expected.hparams.batch_size)
    if isinstance(found, LearningRateFinder):
        assert found.optimal_lr is not None
        assert first.optimal_lr is not None
        assert found.optimal_lr.results == first.optimal_lr.results
        assert found.optimal_lr.suggestion() == model.rate != 1e-2


class SeveralSets(Hungry):
    """Validates, and could test, on two sets."""

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self.seen: set[tuple[int, int]] = set()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.add((dataloader_idx, len(batch)))

    test_step = validation_step  # type: ignore[assignment]

    def val_dataloader(self) -> Any:
        return [DataLoader(torch.zeros(count, 2), self.batch_size) for count in (32, 64)]

    test_dataloader = val_dataloader


def test_a_fit_may_validate_on_several_sets_and_an_evaluation_may_not(tmp_path: Path) -> None:
    model = SeveralSets(room=16)
    finder = BatchSizeFinder(steps_per_trial=1)
    trainer(tmp_path, callbacks=finder, max_epochs=1, num_sanity_val_steps=0).fit(model)
    assert finder.optimal_batch_size == model.batch_size == 16
    assert model.seen == {(0, 16), (1, 16)}, "after the search, with the size found"
    for evaluate, prefix in (("validate", "val"), ("test", "test")):
        with pytest.raises(MisconfigurationError, match=f"with multiple {prefix} dataloaders"):
            getattr(trainer(tmp_path, callbacks=BatchSizeFinder()), evaluate)(model)


def test_other_errors_pass_and_the_setting_stays(tmp_path: Path) -> None:
    class Broken(Hungry):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            raise RuntimeError("not about that")

    model = Broken(room=8, batch_size=3)
    runner = trainer(tmp_path)
    with pytest.raises(RuntimeError, match="not about that"):
        Tuner(runner).scale_batch_size(model)
    assert model.batch_size == 3
    assert runner.callbacks == []


def test_refuses_what_cannot_be_searched(tmp_path: Path) -> None:
    model, runner = Hungry(room=8), trainer(tmp_path)
    with pytest.raises(MisconfigurationError, match="passed directly"):
        Tuner(runner).scale_batch_size(model, model.train_dataloader())
    with pytest.raises(MisconfigurationError, match="rows not found"):
        Tuner(runner).scale_batch_size(model, batch_arg_name="rows")
    with pytest.raises(AttributeError, match="should have one of these fields"):
        Tuner(runner).lr_find(model)
    with pytest.raises(ValueError, match="already configured with a `BatchSizeFinder`"):
        Tuner(trainer(tmp_path, callbacks=BatchSizeFinder())).scale_batch_size(model)
