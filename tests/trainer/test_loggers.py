"""Loggers, read back from what they wrote."""

from __future__ import annotations

import csv
import errno
import math
import pickle
import random
import re
import resource
import threading
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import fsspec
import numpy as np
import pytest
import torch
import yaml
from tensorboard.summary.writer import event_file_writer

import arclight as al
from arclight.compat.lightning import fabric_loggers
from arclight.fabric.errors import MisconfigurationError
from arclight.trainer.loggers import CSVLogger, DummyLogger, Logger, TensorBoardLogger
from arclight.trainer.loggers.csv_logger import ExperimentWriter, read_metrics, read_rows


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
    assert read_header(tmp_path / "metrics.csv") == ["a", "epoch", "step"], "in the order of the alphabet"
    inode = (tmp_path / "metrics.csv").stat().st_ino
    logger.log_metrics({"epoch": 0, "a": 2.5}, 20)
    assert (tmp_path / "metrics.csv").stat().st_ino == inode, "known columns are appended to"
    logger.log_metrics({"epoch": 1, "b": 3, "weird,\nname": 1}, 20)
    assert (tmp_path / "metrics.csv").stat().st_ino != inode, "a new one replaces the file in one step"
    with open(tmp_path / "metrics.csv", newline="") as file:
        assert list(csv.reader(file)) == [
            ["a", "b", "epoch", "step", "weird,\nname"],
            ["1.5", "", "0", "10", ""],
            ["2.5", "", "0", "20", ""],
            ["", "3", "1", "20", "1"],
        ]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"], "no temporary file is left"


def read_header(path: Path) -> list[str]:
    with open(path, newline="") as file:
        return next(csv.reader(file))


def script(logger: CSVLogger, start: int, end: int) -> None:
    """Log steps ``start`` to ``end``; the checkpoint of a step comes between its two rows."""
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
    assert read_metrics(Path(first.log_dir) / "metrics.csv") == {"p-a": [(0, 1.0), (1, 2.0)]}
    assert CSVLogger(tmp_path, "mine").version == 1
    assert CSVLogger(tmp_path, "", version="v").log_dir == str(tmp_path / "v")
    given = {
        "lr": 1e-5,
        "big": 1e20,
        "name": "a: b # c",
        "flag": True,
        "none": None,
        "nested": {"x": math.inf, "shape": (1, 2), "deeper": {"on": "on", "": []}},
        "odd": "\U0001f600 \x85 \u2028 \x7f tab\t",
        "when": "2020-01-01",
        "no": "1e3",
        3: [{"a": 1.0}, None],
        "kind": torch.nn.ReLU,
        "numpy": np.float32(0.5),
    }
    first.log_hyperparams(given)
    assert yaml.safe_load((Path(first.log_dir) / "hparams.yaml").read_text()) == {
        **given,
        "nested": {**given["nested"], "shape": [1, 2]},
        "kind": "<class 'torch.nn.modules.activation.ReLU'>",
        "numpy": 0.5,
    }


def test_the_trainer_logs_into_the_run_folder_by_default(fit: Any, tmp_path: Path) -> None:
    trainer = fit({"val/score": [1.0, 2.0]}, log_every_n_steps=2)
    curves = read_metrics(trainer.run_folder.metrics)
    assert curves["val/score"] == [(4, 1.0), (8, 2.0)]
    assert [step for step, _ in curves["train/loss"]] == [2, 4, 6, 8]
    assert [y for _, y in curves["epoch"]] == [0, 0, 0, 1, 1, 1]
    elsewhere = fit(
        {"val/score": [1.0]}, logger=CSVLogger(tmp_path / "logs", "x"), enable_checkpointing=False, run_name="unused"
    )
    assert read_metrics(tmp_path / "logs" / "x" / "version_0" / "metrics.csv")["val/score"] == [(4, 1.0)]
    assert elsewhere.paths.opened is None, "no run folder is made when nobody needs one"


def test_loggers_get_the_hyperparameters_to_log(make_trainer: Any, make_rows: Any, scripted: Any) -> None:
    class Told(DummyLogger):
        def __init__(self) -> None:
            super().__init__()
            self.told: list[Any] = []

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
            self.told.append(args[0])

        def log_graph(self, *args: Any, **kwargs: Any) -> None:
            self.told.append(type(args[0]).__name__)

    class WithHyperparameters(scripted):  # type: ignore[misc]
        def __init__(self, width: int = 3, logged: bool = True) -> None:
            super().__init__()
            self.save_hyperparameters("width", logger=logged)

    class Data(al.DataModule):
        def __init__(self, logged: bool = True, **hparams: Any) -> None:
            super().__init__()
            self.save_hyperparameters(hparams, logger=logged)

        def train_dataloader(self) -> Any:
            return make_rows(1)

    def told(module: Any, data: Any = None) -> list[Any]:
        logger = Told()
        make_trainer(logger=logger, max_epochs=1, enable_checkpointing=False).fit(module, datamodule=data or Data())
        return logger.told

    assert told(scripted(), Data()) == [{}, "Scripted"]
    assert told(WithHyperparameters())[0] == {"width": 3}
    assert told(WithHyperparameters(logged=False), Data(rows=1))[0] == {"rows": 1}
    assert told(WithHyperparameters(), Data(rows=1, width=3))[0] == {"width": 3, "rows": 1}
    for clash in ({"width": 4}, {"width": 3.0}, {"width": torch.tensor(3)}):
        with pytest.raises(RuntimeError, match=r"Error while merging hparams.*'width'"):
            told(WithHyperparameters(), Data(**clash))
    assert told(scripted(), Data(logged=False, rows=1)) == ["Scripted"], "nothing to log: log_hyperparams is not called"


def test_a_file_in_the_way_is_moved_aside_and_taken_back_by_a_resumed_run(tmp_path: Path) -> None:
    first = CSVLogger(tmp_path, version=0)
    for step in (1, 2, 3):
        first.log_metrics({"a": step}, step)
    second = CSVLogger(tmp_path, version=0)
    with pytest.warns(UserWarning, match="Experiment logs directory .* exists and is not empty"):
        second.log_metrics({"a": 10}, 1)
    folder = Path(second.log_dir)
    assert read_metrics(folder / "metrics.csv")["a"] == [(1, 10.0)]
    assert read_metrics(folder / "metrics-0.csv")["a"] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    (folder / "metrics.csv").unlink()
    (folder / "metrics-0.csv").rename(folder / "metrics.csv")
    third = CSVLogger(tmp_path, version=0)
    with pytest.warns(UserWarning, match="not empty"):
        third.log_hyperparams({"x": 1})
    third.resume(2)
    third.log_metrics({"a": 30}, 3)
    assert read_metrics(folder / "metrics.csv")["a"] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert not (folder / "metrics-0.csv").exists()


def test_a_logger_goes_on_in_another_process_where_it_was(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=10)
    logger.log_metrics({"a": 1.0}, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = pickle.loads(pickle.dumps(logger))
        other.log_metrics({"a": 2.0}, 2)
        other.save()
    assert read_metrics(Path(logger.log_dir) / "metrics.csv")["a"] == [(1, 1.0), (2, 2.0)]
    board = TensorBoardLogger(tmp_path, "tb")
    board.log_metrics({"a": 1.0}, 1)
    assert pickle.loads(pickle.dumps(board)).log_dir == board.log_dir


def test_two_loggers_of_one_process_never_mix_rows(fit: Any, tmp_path: Path) -> None:
    one, other = CSVLogger(tmp_path, "y", version=0), CSVLogger(tmp_path, "y", version=0, prefix="b")
    one.log_metrics({"loss": 1.0}, 0)
    with pytest.warns(UserWarning, match="not empty"):
        other.log_metrics({"loss": 2.0}, 0)
    with pytest.raises(MisconfigurationError, match=r"another CSVLogger of this process writes .*metrics.csv"):
        one.log_metrics({"loss": 3.0}, 1)
    assert read_metrics(Path(one.log_dir) / "metrics-0.csv") == {"loss": [(0, 1.0)]}
    assert read_metrics(Path(one.log_dir) / "metrics.csv") == {"b-loss": [(0, 2.0)]}
    for pair in (
        [CSVLogger(), CSVLogger(prefix="b")],
        [CSVLogger(tmp_path, "x"), CSVLogger(tmp_path, "x", prefix="b")],
    ):
        with pytest.raises(MisconfigurationError, match="two CSVLoggers of one trainer"):
            fit({"val/score": [1.0]}, logger=pair)
    fit({"val/score": [1.0]}, logger=[CSVLogger(tmp_path, "x"), CSVLogger()], log_every_n_steps=1)
    assert read_metrics(tmp_path / "x/version_0/metrics.csv") == read_metrics(tmp_path / "test/2/metrics.csv")


def test_rows_of_another_process_stay_under_their_columns(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, version=0)
    logger.log_metrics({"loss": 1.0}, 0)
    file = Path(logger.log_dir) / "metrics.csv"
    file.write_text("acc,loss,step\n,1.0,0\n2.0,,0\n")  # by another process that was given the same version
    with pytest.warns(UserWarning, match="another process has written to"):
        logger.log_metrics({"loss": 3.0}, 1)
    logger.log_metrics({"loss": 5.0}, 2)
    assert read_metrics(file) == {"acc": [(0, 2.0)], "loss": [(0, 1.0), (1, 3.0), (2, 5.0)]}


def test_files_may_lie_in_any_store() -> None:
    place = "memory://logs-of-a-test"
    logger = CSVLogger(place, "x")
    for step in range(3):
        logger.log_metrics({"a": step / 2}, step)
    logger.log_hyperparams({"lr": 0.1})
    files = fsspec.filesystem("memory")
    assert files.cat(f"{place}/x/version_0/metrics.csv").decode() == "a,step\n0.0,0\n0.5,1\n1.0,2\n"
    assert files.cat(f"{place}/x/version_0/hparams.yaml") == b"lr: 0.1\n"
    assert CSVLogger(place, "x").version == 1


def test_fabrics_loggers_take_the_parent_of_all_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = fabric_loggers.FabricCSVLogger(root_dir=tmp_path, name="x", flush_logs_every_n_steps=2)
    assert (rows.root_dir, rows.log_dir) == (str(tmp_path), str(tmp_path / "x" / "version_0"))
    rows.log_metrics({"a": 1})
    assert not (tmp_path / "x").exists()
    rows.log_metrics({"a": 2})
    assert read_metrics(Path(rows.log_dir) / "metrics.csv")["a"] == [(0, 1.0), (1, 2.0)]
    board = fabric_loggers.FabricTensorBoardLogger(tmp_path, "x", sub_dir="s")
    assert (board.root_dir, board.log_dir) == (str(tmp_path), str(tmp_path / "x" / "version_1" / "s"))
    board.log_graph(torch.nn.Linear(2, 1), torch.zeros(1, 2))
    board.finalize("success")
    assert len(list(Path(board.log_dir).glob("events.out.tfevents.*"))) == 1
    monkeypatch.chdir(tmp_path)
    fabric = al.Fabric(accelerator="cpu", devices=1, loggers=CSVLogger())
    fabric.log("loss", torch.tensor(0.5), step=3)
    assert read_metrics(tmp_path / "runs" / "run" / "1" / "metrics.csv")["loss"] == [(3, 0.5)]


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
    assert scalars["p-val/score"] == [(4, 1.0), (8, 2.0)]
    assert len(scalars["p-train/loss"]) == 2
    assert TensorBoardLogger(tmp_path / "tb", "x").version == 1


def test_tensorboard_hyperparameters_and_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(9))  # "10" sorts before "9"
    logger = TensorBoardLogger(tmp_path, "", version=3, default_hp_metric=False)
    logger.log_hyperparams({"lr": 0.1, "deep": {"width": 4}}, {"best": 0.5})
    assert logger.hparams == {"lr": 0.1, "deep": {"width": 4}}
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


def test_tensorboard_graphs_and_what_cannot_be_one(tmp_path: Path, scripted: Any) -> None:
    class Drawn(scripted):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.line(x).relu()

    module, logger = Drawn(), TensorBoardLogger(tmp_path, log_graph=True)
    with pytest.warns(UserWarning, match="Could not log computational graph to TensorBoard: .* was not given"):
        logger.log_graph(module)
    module.example_input_array = {"x": 1}
    with pytest.warns(UserWarning, match="can't be traced by TensorBoard"):
        logger.log_graph(module)
    module.example_input_array = torch.zeros(1, 2)
    logger.log_graph(module)
    logger.save()
    assert graph_operations(logger.log_dir) >= {"aten::relu", "aten::linear"}
    assert (Path(logger.log_dir) / "hparams.yaml").read_text() == "{}\n"
    with pytest.raises(ValueError, match="currently not supported"):
        logger.log_metrics({"a": "text"})
    with pytest.raises(ValueError, match="currently not supported"):
        logger.log_metrics({"a": torch.zeros(2)})


def graph_operations(folder: str) -> set[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(folder)
    reader.Reload()
    return {node.op for node in reader.Graph().node}


def test_places_are_expanded_and_versions_are_text_or_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("STUDY", "s1")
    logger = TensorBoardLogger("~/$STUDY", None, version="today", sub_dir="s")
    assert (logger.save_dir, logger.log_dir) == ("~/$STUDY", str(tmp_path / "s1" / "today" / "s"))
    for name in ("version_0", "version_10", "version_x", "other"):
        (tmp_path / "study" / name).mkdir(parents=True)
    (tmp_path / "study" / "version_99").write_text("a file is not a version")
    assert TensorBoardLogger(tmp_path, "study").version == CSVLogger(tmp_path, "study").version == 11


# -- rows that a crash cut off -------------------------------------------------------------------------------------


def file_with(folder: Path, content: str) -> Path:
    path = folder / "x" / "version_0" / "metrics.csv"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    return path


def row(step: int, **cells: str) -> dict[str, str]:
    return {"step": str(step), **cells}


WHOLE = 'loss,note,step\n1.0,"a, ""b""\nc",0\n2.0,plain,1\n'


@pytest.mark.parametrize("cut", range(len(WHOLE) + 1))
def test_a_row_that_was_cut_off_is_not_glued_to_the_next(tmp_path: Path, cut: int) -> None:
    """Wherever a killed run stopped writing: its whole rows stay, a part of one does not, and later rows are whole."""
    path = file_with(tmp_path, WHOLE[:cut])
    ends = [WHOLE.index("step\n") + 5, WHOLE.index(",0\n") + 3, len(WHOLE)]
    before = [row(0, loss="1.0", note='a, "b"\nc'), row(1, loss="2.0", note="plain")][
        : max(0, sum(e <= cut for e in ends) - 1)
    ]
    assert read_rows(path) == before
    writer = ExperimentWriter(str(path.parent), keep=True)
    for step in (7, 8):
        writer.log_metrics({"loss": 3.0}, step)
        writer.save()
    assert read_rows(path) == [*before, row(7, loss="3.0"), row(8, loss="3.0")]


@pytest.mark.parametrize("note", ["short", "long" * 40_000])
def test_rows_stay_whatever_number_their_step_is(tmp_path: Path, note: str) -> None:
    """A new column has the file written again: rows from before step 0, or between two, are no damage."""
    writer = ExperimentWriter(str(tmp_path))
    for step in (-1, 0.5, 2.0):
        writer.log_metrics({"loss": 1.0}, step)  # type: ignore[arg-type]
        writer.save()
    writer.log_metrics({"note": note}, 3)
    writer.save()
    writer.log_metrics({"other": 1.0}, 4)
    writer.save()
    steps = [row["step"] for row in read_rows(tmp_path / "metrics.csv")]
    assert steps == (["-1", "0.5", "2.0", "3", "4"] if note == "short" else ["-1", "0.5", "2.0", "4"])
    assert read_metrics(tmp_path / "metrics.csv")["loss"] == [(-1, 1.0), (0, 1.0), (2, 1.0)]
    writer.resume(2)
    assert [row["step"] for row in read_rows(tmp_path / "metrics.csv")] == ["-1", "0.5", "2.0"]


def test_a_resume_after_a_crash_within_a_text_keeps_whole_rows(tmp_path: Path) -> None:
    path = file_with(tmp_path, WHOLE[: WHOLE.index("c")])
    writer = ExperimentWriter(str(path.parent), keep=True)
    writer.resume(5)
    writer.log_metrics({"note": "x\r\ny\rz", "loss": 1.0}, 6)
    writer.save()
    assert read_rows(path) == [row(6, loss="1.0", note="x\ny\nz")]


def test_hyperparameters_that_come_later_reach_tensorboards_file(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, "x", version=0)
    file = Path(logger.log_dir) / "hparams.yaml"
    for params in ({"lr": 0.1}, {"width": 3}):
        logger.log_hyperparams(params)
        logger.save()
    assert yaml.safe_load(file.read_text()) == {"lr": 0.1, "width": 3}
    TensorBoardLogger(tmp_path, "x", version=0).save()  # has none to say
    assert yaml.safe_load(file.read_text()) == {"lr": 0.1, "width": 3}


# ------------------------------------------------------------------------------------------------------------ a full disk


class Sparing(al.Module):
    """Logs each step; the disk is full (a file may have so many bytes) from step 3 up to ``room_at``."""

    def __init__(self, room_at: int, size: int) -> None:
        super().__init__()
        self.layer, self.room_at, self.size = torch.nn.Linear(1, 1), room_at, size

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, resource.RLIM_INFINITY))
        if batch_idx == self.room_at:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        self.log("value", float(batch_idx))
        return self.layer(torch.ones(1)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def trained_on_a_full_disk(logger: Any, room_at: int, size: int, folder: Path) -> al.Trainer:
    trainer = al.Trainer(
        accelerator="cpu", max_steps=10, logger=logger, log_every_n_steps=1, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, default_root_dir=folder,
    )  # fmt: skip
    try:
        trainer.fit(Sparing(room_at, size), torch.utils.data.DataLoader(torch.zeros(10, 1)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return trainer


def test_rows_that_a_full_disk_does_not_take_wait_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of which a part was written is not glued to the next, and none is doubled."""
    monkeypatch.setattr("arclight.trainer.loggers.csv_logger.RETRY_S", 0.0)
    with pytest.warns(UserWarning, match="CSVLogger cannot write to .*File too large.*its rows wait") as told:
        trained_on_a_full_disk(CSVLogger(tmp_path, "full", 0), 7, 50, tmp_path)
    assert sum("cannot write" in str(one.message) for one in told) == 1
    assert [value for _, value in read_metrics(tmp_path / "full/version_0/metrics.csv")["value"]] == list(range(10))


def test_rows_that_wait_for_room_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arclight.trainer.loggers.csv_logger.MAX_WAITING_ROWS", 5)
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    logger = in_folder(tmp_path)
    logger.log_metrics({"value": 0.0}, 0)
    with monkeypatch.context() as patch:
        for name in ("replace_text", "append_whole"):
            patch.setattr(f"arclight.trainer.loggers.csv_logger.{name}", full)
        with pytest.warns(UserWarning, match="its rows wait in memory until there is room, the newest 5 of them"):
            logger.log_metrics({"value": 1.0}, 1)
        for step in range(2, 101):
            logger.log_metrics({"value": float(step)}, step)
            assert len(logger.experiment.metrics) == min(step, 5)
        assert full.call_count == 1  # the disk is not asked for each row
        with pytest.warns(UserWarning, match="rows are missing|rows of steps") as told:
            logger.finalize("interrupted")
        assert [str(one.message).partition(" from ")[0] for one in told] == [
            "the disk is full: 5 rows are missing",
            "95 rows of steps 1 to 95 are missing",
        ]
        for step in (101, 102):
            logger.log_metrics({"value": float(step)}, step)
    logger._again_at = 0.0
    with pytest.warns(UserWarning, match="^2 rows of steps 96 to 97 are missing from .*the disk was full"):
        logger.log_metrics({"value": 103.0}, 103)
    logger.finalize("success")
    kept = [step for step, _ in read_metrics(tmp_path / "metrics.csv")["value"]]
    assert kept == [0, 98, 99, 100, 101, 102, 103]


def test_rows_that_are_to_be_written_together_may_be_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arclight.trainer.loggers.csv_logger.MAX_WAITING_ROWS", 5)
    logger = CSVLogger(tmp_path, "x", 0, flush_logs_every_n_steps=20)
    for step in range(20):
        logger.log_metrics({"value": float(step)}, step)
    assert len(read_metrics(tmp_path / "x/version_0/metrics.csv")["value"]) == 20


def test_training_ends_well_on_a_disk_that_stays_full(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="rows are missing") as told:
        trainer = trained_on_a_full_disk(CSVLogger(tmp_path, "full", 0), 99, 50, tmp_path)
    assert trainer.global_step == 10
    said = [str(one.message) for one in told if "Logger" in str(one.message) or "rows" in str(one.message)]
    assert len(said) == 2
    assert re.search(r"the disk is full: \d rows are missing from .*metrics\.csv", said[1])
    whole = read_metrics(tmp_path / "full/version_0/metrics.csv")["value"]
    assert [value for _, value in whole] == list(range(len(whole)))


def test_rows_after_going_back_on_a_full_disk_have_the_columns_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file could not be replaced by one of fewer columns, which was taken for done."""
    logger, full = in_folder(tmp_path), OSError(errno.ENOSPC, "No space left on device")
    logger.log_metrics({"b": 1.0}, 1)
    logger.log_metrics({"a": 5.0, "b": 2.0}, 2)
    with monkeypatch.context() as patch:
        for name in ("replace_text", "append_whole"):
            patch.setattr(f"arclight.trainer.loggers.csv_logger.{name}", Mock(side_effect=full))
        with pytest.warns(UserWarning, match="CSVLogger cannot write to .*No space left"):
            logger.log_metrics({"a": 6.0, "b": 3.0}, 3)
        logger.rewind(1)
    logger._again_at = 0.0
    logger.log_metrics({"b": 2.5}, 2)
    logger.log_metrics({"b": 3.5}, 3)
    assert (tmp_path / "metrics.csv").read_text() == "a,b,step\n,1.0,1\n5.0,2.0,2\n,2.5,2\n,3.5,3\n"


def test_going_back_where_the_file_was_removed_begins_a_new_one(tmp_path: Path) -> None:
    logger = in_folder(tmp_path)
    logger.log_metrics({"x": 1.0}, 1)
    (tmp_path / "metrics.csv").unlink()
    logger.rewind(1)
    logger.log_metrics({"x": 2.0}, 2)
    assert (tmp_path / "metrics.csv").read_text() == "step,x\n2,2.0\n"


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_a_pickled_logger_does_not_wait_for_a_time_of_another_machine_s_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type
) -> None:
    if kind is TensorBoardLogger:
        pytest.importorskip("tensorboard")
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    logger = kind(tmp_path, "x", 0)
    monkeypatch.setattr("arclight.trainer.loggers.csv_logger.replace_text", full)
    monkeypatch.setattr(TensorBoardLogger, "_log_metrics", full)
    with pytest.warns(UserWarning, match="cannot write to"):
        logger.log_metrics({"x": 1.0}, 1)
    assert logger._again_at > 0
    assert pickle.loads(pickle.dumps(logger))._again_at == 0


def test_only_a_full_disk_is_spared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("arclight.trainer.loggers.csv_logger.replace_text", refused)
    with pytest.raises(PermissionError):
        in_folder(tmp_path).log_metrics({"x": 1}, 1)


@pytest.mark.parametrize("room_at", [7, 99])
def test_tensorboard_on_a_full_disk_does_not_end_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room_at: int
) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.setattr(threading, "excepthook", lambda error: None)  # TensorBoard's thread ends with it
    monkeypatch.setattr("arclight.trainer.loggers.tensorboard_logger.RETRY_S", 0.0)
    with pytest.warns(UserWarning, match="TensorBoardLogger cannot write to .*File too large.*is lost") as told:
        trainer = trained_on_a_full_disk(TensorBoardLogger(tmp_path, "full", 0), room_at, 1, tmp_path)
    assert trainer.global_step == 10
    assert sum("cannot write" in str(one.message) for one in told) == 1
    kept = [step for step, _ in events(tmp_path / "full/version_0")["value"]]
    assert kept == [1, 2, 3, 8, 9, 10][: 6 if room_at == 7 else 3]
