"""LightningCLI: values from the command line and from files make trainer, module and data, and run what was asked for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import arclight.compat.lightning.pytorch as pl
from arclight.compat.lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

pytest.importorskip("jsonargparse", reason="the command line needs jsonargparse: make setup installs it")

from arclight.compat.lightning.pytorch.cli import LightningCLI, ReduceLROnPlateau

QUIET = {
    "limit_train_batches": 1,
    "limit_val_batches": 1,
    "max_epochs": 1,
    "logger": False,
    "enable_progress_bar": False,
}


class Model(BoringModel):
    def __init__(self, width: int = 3, layer: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.width, self.inner = width, layer

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", self.step(batch))


class Bare(Model):
    configure_optimizers = pl.LightningModule.configure_optimizers


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])


def cli(*args: str, model: Any = Model, **options: Any) -> LightningCLI:
    defaults = {"trainer_defaults": QUIET | {"default_root_dir": str(Path.cwd())}, "save_config_callback": None}
    return LightningCLI(model, BoringDataModule, args=list(args), **defaults | options)


def test_values_reach_what_they_are_for_and_the_run_happens() -> None:
    done = cli("fit", "--model.width=7", "--trainer.max_epochs=2", "--seed_everything=5")
    assert (done.model.width, done.trainer.max_epochs, done.trainer.global_step) == (7, 2, 2)
    assert done.config["fit"]["seed_everything"] == 5
    assert isinstance(done.datamodule, BoringDataModule)
    assert isinstance(done.trainer, pl.Trainer)


def test_a_file_is_overridden_by_the_line() -> None:
    Path("run.yaml").write_text(yaml.safe_dump({"model": {"width": 4}, "trainer": {"max_epochs": 3}}))
    made = cli("--config=run.yaml", "--model.width=9", run=False)
    assert (made.model.width, made.trainer.max_epochs) == (9, 3)
    assert made.trainer.global_step == 0


def test_classes_are_found_by_their_names() -> None:
    made = cli("--trainer.callbacks=EarlyStopping", "--trainer.callbacks.monitor=loss", run=False)
    (stopping,) = made.trainer.early_stopping_callbacks
    assert stopping.monitor == "loss"
    logged = cli("--trainer.logger=CSVLogger", "--trainer.logger.save_dir=logs", run=False)
    assert type(logged.trainer.logger).__name__ == "CSVLogger"
    assert type(cli(f"--model={__name__}.Model", model=None, run=False).model) is Model


def test_callbacks_of_the_program_are_kept_for_any_command_line() -> None:
    described = {"class_path": "arclight.trainer.callbacks.EarlyStopping", "init_args": {"monitor": "loss"}}
    always = {
        "trainer_defaults": QUIET | {"callbacks": [described, pl.callbacks.Timer()]},
        "save_config_callback": None,
    }
    made = LightningCLI(Model, args=["--trainer.callbacks=ModelSummary"], run=False, **always)  # type: ignore[arg-type]
    names = [type(callback).__name__ for callback in made.trainer.callbacks]
    assert {"EarlyStopping", "Timer", "ModelSummary"} <= set(names)


def test_an_optimizer_and_a_schedule_of_the_line_are_the_modules() -> None:
    done = cli(
        "fit",
        "--optimizer=Adam",
        "--optimizer.lr=0.25",
        "--lr_scheduler=StepLR",
        "--lr_scheduler.step_size=9",
        model=Bare,
    )
    (optimizer,) = done.trainer.optimizers
    assert isinstance(optimizer, torch.optim.Adam)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert done.trainer.lr_scheduler_configs[0].scheduler.step_size == 9
    plateau = cli("fit", "--optimizer=SGD", "--optimizer.lr=0.1", f"--lr_scheduler={ReduceLROnPlateau.__module__}.ReduceLROnPlateau",
                  "--lr_scheduler.monitor=loss", model=Bare)  # fmt: skip
    assert plateau.trainer.lr_scheduler_configs[0].monitor == "loss"
    with pytest.warns(UserWarning, match="`Model.configure_optimizers` will be overridden by `LightningCLI"):
        cli("--optimizer=SGD", "--optimizer.lr=0.1", run=False)


def test_hooks_run_around_the_run() -> None:
    order: list[str] = []

    class Own(LightningCLI):
        def add_arguments_to_parser(self, parser: Any) -> None:
            parser.link_arguments("trainer.max_epochs", "model.width")

        def before_instantiate_classes(self) -> None:
            order.append("parsed")

        def before_fit(self) -> None:
            order.append("before")

        def after_fit(self) -> None:
            order.append(f"after {self.trainer.global_step}")

    options = {"trainer_defaults": QUIET | {"max_epochs": 2}, "save_config_callback": None}
    assert Own(Model, BoringDataModule, args=["fit"], **options).model.width == 2  # type: ignore[arg-type]
    assert order == ["parsed", "before", "after 2"]


def test_a_module_with_objects_among_its_arguments_comes_back_from_its_checkpoint() -> None:
    done = cli("fit", "--model.layer=torch.nn.Linear", "--model.layer.in_features=2", "--model.layer.out_features=5")
    done.trainer.save_checkpoint("run.ckpt")
    kept = torch.load("run.ckpt", weights_only=True)["hyper_parameters"]
    assert kept["layer"]["init_args"]["out_features"] == 5
    again = Model.load_from_checkpoint("run.ckpt", width=8)
    assert again.width == 8
    torch.testing.assert_close(again.inner.weight, done.model.inner.weight)  # type: ignore[union-attr]


def test_the_configuration_is_saved_and_can_be_run_again() -> None:
    from arclight.compat.lightning.pytorch.cli import SaveConfigCallback

    defaults = {**QUIET, "default_root_dir": str(Path.cwd())}
    done = cli("fit", "--model.width=6", save_config_callback=SaveConfigCallback, trainer_defaults=defaults)
    path = Path(str(done.trainer.log_dir)) / "config.yaml"
    assert yaml.safe_load(path.read_text())["model"]["width"] == 6
    assert cli("fit", f"--config={path}").model.width == 6


def test_a_wrong_value_ends_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli("fit", "--model.width=wide")
    assert "model.width" in capsys.readouterr().err
