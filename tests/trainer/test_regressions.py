"""Mistakes that were made once: resuming at awkward moments, settings without effect, state left from one fit to the next."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import arclight as al


class Small(al.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Saver(al.Callback):
    """Saves once, when ``moment`` comes for the ``n``-th time; as a checkpoint callback does, after all others."""

    runs_last = True

    def __init__(self, path: Path | None, moment: str, n: int = 1) -> None:
        self.path, self.left = path, n
        setattr(self, moment, self._act)

    def _act(self, trainer: Any, *_: Any) -> None:
        self.left -= 1
        if self.left == 0 and self.path is not None:
            trainer.save_checkpoint(self.path)


def batches(count: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator)) for _ in range(count)
    ]


def trainer(**settings: Any) -> al.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    return al.Trainer(**{**quiet, "max_epochs": 1, **settings})


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


# -- resume --------------------------------------------------------------------------------------------------------


def test_validation_due_at_the_saved_batch_runs_after_the_resume(tmp_path: Path) -> None:
    seen: list[int] = []

    class Watched(Small):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            seen.append(self.trainer.progress.batches)

    saver = Saver(tmp_path / "c", "on_train_batch_end", 4)
    trainer(val_check_interval=4, callbacks=[saver]).fit(Watched(), batches(), batches(1))
    assert seen == [4, 8]
    seen.clear()
    trainer(val_check_interval=4).fit(Watched(), batches(), batches(1), ckpt_path=tmp_path / "c")
    assert seen == [4, 8]


def test_draws_at_an_epochs_start_are_repeated_by_a_resume(tmp_path: Path) -> None:
    def draws(saver: Saver, checkpoint: Path | None) -> list[float]:
        drawn: list[float] = []

        class Drawing(Small):
            def on_train_epoch_start(self) -> None:
                drawn.append(float(torch.rand(())))

            def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
                drawn.append(float(torch.rand(())))

        trainer(max_epochs=2, callbacks=[saver]).fit(Drawing(), batches(2), ckpt_path=checkpoint)
        return drawn

    whole = draws(Saver(tmp_path / "c", "on_train_epoch_end"), None)
    assert draws(Saver(None, "on_train_epoch_end"), tmp_path / "c") == whole[3:]


def test_values_of_an_epochs_first_hooks_count_once_after_a_resume(tmp_path: Path) -> None:
    class Counting(Small):
        def on_train_start(self) -> None:
            self.log("starts", 1.0, reduce_fx="sum")

        def on_train_epoch_start(self) -> None:
            self.log("epochs", 1.0, reduce_fx="sum")

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("batches", 1.0, reduce_fx="sum", on_step=False, on_epoch=True)
            return self.loss(batch)

    first, second = trainer(callbacks=[Saver(tmp_path / "c", "on_train_batch_end", 3)]), trainer()
    first.fit(Counting(), batches())
    second.fit(Counting(), batches(), ckpt_path=tmp_path / "c")
    assert first.callback_metrics == second.callback_metrics == {"starts": 1.0, "epochs": 1.0, "batches": 8.0}


def test_a_plateau_schedule_by_steps_sees_the_step_that_was_saved(tmp_path: Path) -> None:
    """Not the mean of the epoch so far, which the same name has at the epoch's end."""

    class Plateau(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("train/loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/loss", self.loss(batch))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "monitor": "train/loss", "interval": "step"},
            }

    seen: list[float] = []

    class Reader(al.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.progress.batch:
                seen.append(float(trainer.callback_metrics["train/loss"]))

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                seen.append(float(outputs["loss"]))

    whole, resumed = Plateau(), Plateau()
    saver = Saver(tmp_path / "c", "on_validation_end")
    first = trainer(val_check_interval=4, callbacks=[saver, Reader()])
    first.fit(whole, batches(), batches(1))
    second = trainer(val_check_interval=4, callbacks=[Reader()])
    second.fit(resumed, batches(), batches(1), ckpt_path=tmp_path / "c")
    assert seen[0] == seen[1]
    states = [run.lr_scheduler_configs[0].scheduler.state_dict() for run in (first, second)]
    assert states[0] == states[1]
    assert same_weights(whole, resumed)


def test_a_plateau_schedule_goes_on_from_a_checkpoint_made_after_validation(tmp_path: Path) -> None:
    class Plateau(Small):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/loss", self.loss(batch))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val/loss"}}

    whole, resumed = Plateau(), Plateau()
    saver = Saver(tmp_path / "c", "on_validation_end")
    trainer(max_epochs=2, callbacks=[saver]).fit(whole, batches(), batches(1))
    trainer(max_epochs=2).fit(resumed, batches(), batches(1), ckpt_path=tmp_path / "c")
    assert same_weights(whole, resumed)


def test_a_validation_that_was_broken_off_runs_again(tmp_path: Path) -> None:
    seen: list[int] = []

    class Watched(Small):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            seen.append(batch_idx)

    saver = Saver(tmp_path / "c", "on_validation_batch_end", 2)
    trainer(callbacks=[saver]).fit(Watched(), batches(2), batches(3))
    seen.clear()
    trainer().fit(Watched(), batches(2), batches(3), ckpt_path=tmp_path / "c")
    assert seen == [0, 1, 2]


def test_a_sanity_check_does_not_change_what_training_draws() -> None:
    def draws(sanity: int) -> list[float]:
        drawn: list[float] = []

        class Drawing(Small):
            def validation_step(self, batch: Any, batch_idx: int) -> None:
                torch.rand(3)

            def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
                drawn.append(float(torch.rand(())))

        trainer(num_sanity_val_steps=sanity).fit(Drawing(), batches(2), batches(1))
        return drawn

    assert draws(1) == draws(0)


# -- hooks ---------------------------------------------------------------------------------------------------------


def test_the_hook_after_validation_is_called_once_for_each_of_the_two_modes() -> None:
    calls: list[str] = []

    class Watched(Small):
        def validation_step(self, batch: Any, batch_idx: int) -> None: ...

        def on_validation_model_eval(self) -> None:
            calls.append("eval")
            self.eval()

        def on_validation_model_train(self) -> None:
            calls.append(f"train {self.training}")

    trainer().fit(Watched(), batches(1), batches(1))
    assert calls == ["eval", "train True"]


# -- logging -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a device beside the host")
def test_numbers_and_device_values_are_logged_together() -> None:
    class Mixed(Small):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.loss(batch)
            self.log("loss", loss, on_step=True, on_epoch=True)
            self.log("x", 0.5 if batch_idx % 2 else loss, on_step=True, on_epoch=True)
            self.log("number", 2.0)
            return loss

    runner = trainer(accelerator="cuda", devices=1)
    runner.fit(Mixed(), batches())
    assert float(runner.callback_metrics["number"]) == 2


def test_a_batch_without_samples_has_no_weight() -> None:
    class Weighted(Small):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("x", float(batch_idx), batch_size=batch_idx)

    assert trainer().validate(Weighted(), batches(2), verbose=False)[0]["x"] == 1


# -- optimization --------------------------------------------------------------------------------------------------


def test_gradients_from_before_a_fit_are_not_used() -> None:
    clean, dirty = Small(), Small()
    dirty.loss(batches(1)[0]).backward()
    for model in (clean, dirty):
        trainer().fit(model, batches(1))
    assert same_weights(clean, dirty)


def test_skipped_batches_do_not_count_in_a_window() -> None:
    class Skipping(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx != 1 else self.loss(batch)

    skipping, plain = Skipping(), Skipping()
    runner = trainer(accumulate_grad_batches=3)
    runner.fit(skipping, batches(6))
    trainer().fit(plain, batches(6))
    assert runner.global_step == 1
    for a, b in zip(skipping.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("skipped", [0, 1])
def test_an_own_optimizer_step_steps_after_a_window_with_a_skipped_batch(precision: str, skipped: int) -> None:
    class Skipping(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx % 2 == skipped else self.loss(batch)

    class Own(Skipping):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer.step(closure=optimizer_closure)

    given, own = Skipping(), Own()
    for module in (given, own):
        trainer(accumulate_grad_batches=2, precision=precision).fit(module, batches())
    for a, b in zip(given.parameters(), own.parameters(), strict=True):
        assert torch.equal(a, b)


class Manual(Small):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, 0.5)
        optimizer.step()


def test_manual_optimization_takes_out_the_scale_of_16_bit_gradients() -> None:
    scaled, plain = Manual(), Manual()
    runner = trainer(precision="16-mixed")
    runner.fit(scaled, batches())
    trainer().fit(plain, batches())
    assert runner.global_step == 8
    for a, b in zip(scaled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=1e-3)


def test_fabric_takes_out_the_scale_of_16_bit_gradients() -> None:
    fabric = al.Fabric(accelerator="cpu", precision="16-mixed")
    layer = nn.Linear(2, 1, bias=False)
    before = layer.weight.detach().clone()
    model, optimizer = fabric.setup(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    fabric.backward(model(torch.ones(1, 2)).sum() / 8)
    optimizer.step()
    torch.testing.assert_close(layer.weight, before - 0.1 / 8)


@pytest.mark.parametrize("setting", [{"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 4}])
def test_settings_that_manual_optimization_cannot_follow_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=r"not supported for manual optimization.*(self.clip_gradients|step and clear)"
    ):
        trainer(**setting).fit(Manual(), batches(1))


def test_a_monitor_may_stand_beside_its_scheduler() -> None:
    class Plateau(Small):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/loss", 1.0)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": "val/loss"}

    runner = trainer(max_epochs=2)
    runner.fit(Plateau(), batches(1), batches(1))
    assert runner.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01)


def test_fabric_takes_inputs_and_gives_outputs_in_the_default_type() -> None:
    for precision in ("64-true", "bf16-mixed", "16-mixed"):
        model = al.Fabric(accelerator="cpu", precision=precision).setup(nn.Linear(2, 1))
        assert model(torch.ones(1, 2)).dtype is torch.float32


def test_a_fabric_loader_left_early_starts_over_unless_it_was_resumed() -> None:
    fabric = al.Fabric(accelerator="cpu")
    loader, other = fabric.setup_dataloaders(*(DataLoader([1, 2, 3, 4], batch_size=None) for _ in range(2)))
    assert next(iter(loader)) == 1
    other.load_state_dict(loader.state_dict())
    assert list(loader) == [1, 2, 3, 4]
    assert list(other) == [2, 3, 4]
    assert list(other) == [1, 2, 3, 4]


@pytest.mark.parametrize("suffix", ["", ".ckpt"])
def test_remains_of_a_killed_save_are_removed_by_the_next(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fabric, path = al.Fabric(accelerator="cpu"), tmp_path / f"state{suffix}"
    if (child := os.fork()) == 0:
        monkeypatch.setattr(os, "replace", lambda *_: os._exit(0))
        monkeypatch.setattr(Path, "rename", lambda *_: os._exit(0))
        fabric.save(path, {"steps": 1})
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert [entry.name.startswith(f".{path.name}.") for entry in tmp_path.iterdir()] == [True]
    fabric.save(path, {"steps": 2})
    assert list(tmp_path.iterdir()) == [path]
    assert fabric.load(path) == {"steps": 2}


# -- settings and what is given to a run ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting",
    [
        {"val_check_interval": 0},
        {"check_val_every_n_epoch": 0},
        {"max_steps": -5},
        {"log_every_n_steps": -1},
        {"limit_train_batches": -3},
        {"num_sanity_val_steps": -2},
    ],
)
def test_settings_out_of_range_are_named(setting: dict[str, Any]) -> None:
    ((name, value),) = setting.items()
    with pytest.raises(ValueError, match=f"`{name}` must be|invalid value {value} for {name}, it has to be in"):
        trainer(**setting).fit(Small(), batches(), batches(1))


def test_an_interval_of_no_steps_logs_epochs_only() -> None:
    runner = trainer(log_every_n_steps=0)
    runner.fit(Small(), batches())
    assert runner.global_step == len(batches())


def test_a_sanity_check_keeps_to_the_limits_of_validation() -> None:
    counts = []

    class Watched(Small):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            counts[-1] += self.trainer.sanity_checking

    for sanity, limit in ((-1, None), (-1, 2), (1, 2), (3, 2)):
        counts.append(0)
        runner = trainer(num_sanity_val_steps=sanity, limit_val_batches=limit)
        runner.fit(Watched(), batches(1), batches(4))
    assert counts == [4, 2, 1, 2]


def test_a_fast_run_tests_one_batch_and_ignores_intervals() -> None:
    seen: list[int] = []

    class Watched(Small):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            seen.append(batch_idx)

    runner = trainer(fast_dev_run=True, val_check_interval=100)
    runner.fit(Watched(), batches(), batches(1))
    runner.test(Watched(), batches(), verbose=False)
    assert seen == [0]


def test_deterministic_kernels_are_used_during_the_run_only() -> None:
    seen: list[bool] = []

    class Watched(Small):
        def on_train_start(self) -> None:
            seen.append(torch.are_deterministic_algorithms_enabled())

    for choice in (True, False):
        trainer(deterministic=choice).fit(Watched(), batches(1))
    assert seen == [True, False]
    assert not torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        trainer(deterministic=True).fit(Watched(), batches(1))
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled(), "as the program had it"
    finally:
        torch.use_deterministic_algorithms(False)


def test_frozen_layers_keep_their_mode() -> None:
    model = Small()
    model.net[1].eval()
    trainer().fit(model, batches(1))
    assert not model.net[1].training
    assert model.net[0].training


def test_chosen_devices_are_used() -> None:
    from arclight.fabric.accelerators import CUDAAccelerator
    from arclight.fabric.selection import select

    with mock.patch("arclight.fabric.accelerators.devices.num_cuda_devices", return_value=2):
        assert select(accelerator=CUDAAccelerator(), devices=[1]).device.index == 1
        assert select(accelerator=CUDAAccelerator(), devices=1).device.index == 0


class Data(al.DataModule):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def setup(self, stage: str) -> None:
        self.calls.append(stage)

    def train_dataloader(self) -> Any:
        return batches(2)


class Validating(Small):
    def __init__(self) -> None:
        super().__init__()
        self.validated = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("train/loss", loss := self.loss(batch))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert not self.trainer.training
        self.validated += 1

    def val_dataloader(self) -> Any:
        return batches(1)


def test_a_data_module_in_the_place_of_loaders_and_a_module_with_loaders_of_its_own() -> None:
    model = Validating()
    trainer().fit(model, Data())
    assert model.validated == 1


def test_a_second_fit_takes_nothing_from_the_first(caplog: pytest.LogCaptureFixture) -> None:
    runner, data = trainer(), Data()
    runner.fit(Validating(), data)
    data.calls.clear()
    runner.fit(Small(), batches(2))
    assert "nothing is left to train: 1 epochs and 2 steps are done" in caplog.text
    runner.max_epochs = 2
    runner.fit(Small(), batches(2))
    assert runner.global_step == 4
    assert data.calls == []
    assert not runner.callback_metrics


def test_evaluation_of_a_checkpoint_that_is_not_there_is_refused(tmp_path: Path) -> None:
    class Validated(Small):
        def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    with pytest.raises(FileNotFoundError, match="has no checkpoint yet"):
        trainer(default_root_dir=tmp_path).validate(Validated(), batches(1), ckpt_path="last")


def test_values_logged_on_train_start_belong_to_the_first_epoch() -> None:
    class Logging(Small):
        def on_train_start(self) -> None:
            self.log("at/start", 3.0)

    runner = trainer()
    runner.fit(Logging(), batches(1))
    assert float(runner.callback_metrics["at/start"]) == 3
