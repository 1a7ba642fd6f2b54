"""Loggers, read back from what they wrote."""

from __future__ import annotations

import csv
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from arclight.trainer.loggers import CSVLogger, Logger, TensorBoardLogger
from arclight.trainer.loggers.csv_logger import read_metrics, read_rows


def in_folder(folder: Path, **arguments: Any) -> CSVLogger:
    logger = CSVLogger(**arguments)
    logger.use_folder(folder)
    return logger


def test_numbers_read_back_to_the_same_bits(tmp_path: Path) -> None:
    logger, generator = in_folder(tmp_path), random.Random(0)
    values = [generator.uniform(-1, 1) * 10 ** generator.randint(-300, 300) for _ in range(200)]
    values += [math.inf, -math.inf, 0.1, -0.0, 5e-324]
    for step, value in enumerate(values):
        logger.log_metrics({"x": value, "half": torch.tensor(value, dtype=torch.float32)}, step)
    curves = read_metrics(tmp_path / "metrics.csv")
    assert [y for _, y in curves["x"]] == values
    assert math.copysign(1, curves["x"][-2][1]) == -1
    assert [y for _, y in curves["half"]] == [torch.tensor(value).item() for value in values]
    logger.log_metrics({"x": math.nan}, 999)
    assert math.isnan(read_metrics(tmp_path / "metrics.csv")["x"][-1][1])


def test_a_new_name_adds_a_column(tmp_path: Path) -> None:
    logger = in_folder(tmp_path)
    logger.log_metrics({"epoch": 0, "a": 1.5}, 10)
    inode = (tmp_path / "metrics.csv").stat().st_ino
    logger.log_metrics({"epoch": 0, "a": 2.5}, 20)
    assert (tmp_path / "metrics.csv").stat().st_ino == inode, "known columns are appended to"
    logger.log_metrics({"epoch": 1, "b": 3, "weird,\nname": 1}, 20)
    assert (tmp_path / "metrics.csv").stat().st_ino != inode, "a new one replaces the file in one step"
    with open(tmp_path / "metrics.csv", newline="") as file:
        assert list(csv.reader(file)) == [
            ["step", "epoch", "a", "b", "weird,\nname"],
            ["10", "0", "1.5", "", ""],
            ["20", "0", "2.5", "", ""],
            ["20", "1", "", "3", "1"],
        ]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"], "no temporary file is left"


def script(logger: CSVLogger, start: int, end: int) -> None:
    """What a run logs in steps ``start`` to ``end``; the checkpoint of a step comes between its two rows."""
    for step in range(start, end):
        if step > start or start == 0:
            logger.log_metrics({"epoch": step // 4, "train": step / 3}, step)
        if step % 4 == 3:
            logger.log_metrics({"epoch": step // 4, **({"val": -step / 7} if step > 4 else {}), "late": step}, step)


@pytest.mark.parametrize(("checkpoint", "killed_at"), [(c, k) for c in (2, 3, 4, 7, 8) for k in (4, 8, 10) if c < k])
@pytest.mark.parametrize("torn", [False, True])
def test_a_killed_and_resumed_run_leaves_the_same_bytes(
    tmp_path: Path, checkpoint: int, killed_at: int, torn: bool
) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    script(in_folder(whole), 0, 12)
    script(in_folder(resumed), 0, killed_at)
    if torn:
        with open(resumed / "metrics.csv", "a") as file:
            file.write(f"{killed_at},2,0.33")
    logger = in_folder(resumed)
    logger.resume(checkpoint)
    script(logger, checkpoint, 12)
    assert (resumed / "metrics.csv").read_bytes() == (whole / "metrics.csv").read_bytes()


def test_rows_wait_when_asked_to(tmp_path: Path) -> None:
    logger = in_folder(tmp_path, flush_logs_every_n_steps=3)
    for step in range(5):
        logger.log_metrics({"a": step}, step)
    assert len(read_rows(tmp_path / "metrics.csv")) == 3
    logger.finalize("success")
    assert len(read_rows(tmp_path / "metrics.csv")) == 5
    with pytest.raises(ValueError, match="at least 1"):
        CSVLogger(flush_logs_every_n_steps=0)


def test_places_names_and_hyperparameters(tmp_path: Path) -> None:
    first = CSVLogger(tmp_path, "mine", prefix="p")
    assert (first.name, first.version, first.log_dir) == ("mine", 0, str(tmp_path / "mine" / "version_0"))
    first.log_metrics({"a": 1.0})
    first.log_metrics({"a": 2.0})
    assert read_metrics(Path(first.log_dir) / "metrics.csv") == {"p/a": [(0, 1.0), (1, 2.0)]}
    assert CSVLogger(tmp_path, "mine").version == 1
    assert CSVLogger(tmp_path, "", version="v").log_dir == str(tmp_path / "v")
    given = {
        "lr": 1e-5,
        "big": 1e20,
        "name": "a: b # c",
        "flag": True,
        "none": None,
        "nested": {"x": math.inf, "shape": (1, 2)},
    }
    first.log_hyperparams(given)
    assert yaml.safe_load((Path(first.log_dir) / "hparams.yaml").read_text()) == {
        "lr": 1e-5,
        "big": 1e20,
        "name": "a: b # c",
        "flag": True,
        "none": "None",
        "nested/x": math.inf,
        "nested/shape": "(1, 2)",
    }
    with pytest.raises(RuntimeError, match="give it save_dir"):
        CSVLogger().log_metrics({"a": 1.0}, 0)


def test_the_trainer_logs_into_the_run_folder_unless_told_otherwise(fit: Any, tmp_path: Path) -> None:
    trainer = fit({"val/score": [1.0, 2.0]}, log_every_n_steps=2)
    curves = read_metrics(trainer.run_folder.metrics)
    assert curves["val/score"] == [(4, 1.0), (8, 2.0)]
    assert [step for step, _ in curves["train/loss"]] == [2, 4, 6, 8]
    assert [y for _, y in curves["epoch"]] == [0, 0, 0, 1, 1, 1]
    elsewhere = fit(
        {"val/score": [1.0]}, logger=CSVLogger(tmp_path / "logs", "x"), enable_checkpointing=False, run_name="unused"
    )
    assert read_metrics(tmp_path / "logs" / "x" / "version_0" / "metrics.csv")["val/score"] == [(4, 1.0)]
    assert elsewhere._run_folder is None, "no run folder is made when nobody needs one"


def test_a_users_logger_sees_each_row_and_each_checkpoint(fit: Any) -> None:
    class Mine(Logger):
        def __init__(self) -> None:
            self.rows: list[Any] = []
            self.ends: list[str] = []
            self.saved = 0

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            self.rows.append((step, metrics["epoch"], sorted(metrics)))

        def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
            assert Path(checkpoint_callback.best_model_path).is_dir()
            self.saved += 1

        def finalize(self, status: str) -> None:
            self.ends.append(status)

    mine = Mine()
    fit({"val/score": [1.0]}, logger=mine, log_every_n_steps=4)
    assert mine.rows == [(4, 0, ["epoch", "train/loss"]), (4, 0, ["epoch", "val/error", "val/score"])]
    assert (mine.saved, mine.ends) == (1, ["success"])
    with pytest.raises(NotImplementedError, match="has no log_metrics"):
        Logger().log_metrics({})


def events(folder: str | Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder))
    reader.Reload()
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def test_tensorboard_files_hold_what_was_logged(fit: Any, tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path / "tb", "x", sub_dir="s", prefix="p")
    fit({"val/score": [1.0, 2.0]}, logger=logger, log_every_n_steps=4)
    assert logger.log_dir == str(tmp_path / "tb" / "x" / "version_0" / "s")
    scalars = events(logger.log_dir)
    assert scalars["p/val/score"] == [(4, 1.0), (8, 2.0)]
    assert len(scalars["p/train/loss"]) == 2
    assert scalars["p/hp_metric"] == [(0, -1.0)]
    assert TensorBoardLogger(tmp_path / "tb", "x").version == 1


def test_tensorboard_hyperparameters_and_resume(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, "", version=3, default_hp_metric=False)
    logger.log_hyperparams({"lr": 0.1, "deep": {"width": 4}}, {"best": 0.5})
    assert logger.hparams == {"lr": 0.1, "deep/width": 4}
    for step in (1, 2, 3):
        logger.log_metrics({"a": float(step), "two": {"x": 1.0}}, step)
    logger.save()
    assert events(logger.log_dir)["a"] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert events(logger.log_dir)["best"] == [(0, 0.5)]
    again = TensorBoardLogger(tmp_path, "", version=3)
    again.resume(1)
    again.log_metrics({"a": 20.0}, 2)
    again.finalize("success")
    assert events(logger.log_dir)["a"] == [(1, 1.0), (2, 20.0)]


def test_tensorboard_goes_to_the_run_folder_without_save_dir(fit: Any) -> None:
    logger = TensorBoardLogger()
    trainer = fit({"val/score": [1.0]}, logger=[logger, CSVLogger()])
    assert events(trainer.run_folder.path / "tensorboard")["val/score"] == [(4, 1.0)]
    assert read_metrics(trainer.run_folder.metrics)["val/score"] == [(4, 1.0)]
