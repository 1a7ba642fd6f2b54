"""Profilers: what they record, what they report, and that a run without one knows nothing of them."""

from __future__ import annotations

import copy
import json
import pickle
import pstats
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerAction, schedule

import arclight as al
from arclight.fabric.errors import MisconfigurationError
from arclight.trainer.profilers import (
    AdvancedProfiler,
    PassThroughProfiler,
    Profiler,
    PyTorchProfiler,
    SimpleProfiler,
    resolve_profiler,
)
from arclight.trainer.profilers.profiler import profiled, profiled_items
from arclight.trainer.profilers.pytorch import RegisterRecordFunction, StageSchedule, warning_cache

EVERY = [SimpleProfiler, AdvancedProfiler, PyTorchProfiler]


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def run(self, profiler: Profiler, action: str, seconds: float) -> None:
        with profiler.profile(action):
            self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_simple_times_and_their_table(clock: Clock) -> None:
    profiler = SimpleProfiler()
    for action, seconds in (("short", 1.0), ("long action", 4.0), ("short", 2.0), ("rare", 2.0)):
        clock.run(profiler, action, seconds)
    clock.now += 1.0
    assert profiler.recorded_durations == {"short": [1.0, 2.0], "long action": [4.0], "rare": [2.0]}
    profiler.setup("fit")
    title, blank, _, head, _, total, _, *rows = profiler.summary().splitlines()
    assert (title, blank) == ("FIT Profiler Report", "")
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in (head, total, *rows[:3])]
    assert cells == [
        ["Action", "Mean duration (s)", "Num calls", "Total time (s)", "Percentage %"],
        ["Total", "-", "4", "10.0", "100 %"],
        ["long action", "4.0", "1", "4.0", "40.0"],
        ["short", "1.5", "2", "3.0", "30.0"],
        ["rare", "2.0", "1", "2.0", "20.0"],
    ]
    short = copy.deepcopy(profiler)
    short.extended = False
    rows = [row for row in short.summary().splitlines() if row.startswith("|")]
    assert [row.split("|")[1].strip() for row in rows] == ["Action", "long action", "rare", "short"], "by the mean"
    assert SimpleProfiler().summary() == SimpleProfiler(extended=False).summary() == "Profiler Report\n\n"


def test_actions_that_do_not_match_are_errors() -> None:
    for profiler in (SimpleProfiler(), AdvancedProfiler()):
        with pytest.raises(ValueError, match=r"Attempting to stop recording an action \(x\) which was never started"):
            profiler.stop("x")
    simple = SimpleProfiler()
    simple.start("x")
    with pytest.raises(ValueError, match="Attempted to start x which has already started"):
        simple.start("x")
    with pytest.raises(NotImplementedError, match="has no start"):
        Profiler().start("x")


def busy() -> int:
    return sum(range(1000))


def lazy() -> None:
    busy()


def test_advanced_sees_the_functions_of_each_action(tmp_path: Path) -> None:
    profiler = AdvancedProfiler(tmp_path, "report", dump_stats=True)
    with profiler.profile("outer/one"):
        with profiler.profile("inner"):
            lazy()
        busy()
    functions = {
        action: {name for _, _, name in pstats.Stats(profile).stats}  # type: ignore[attr-defined]
        for action, profile in profiler.profiled_actions.items()
    }
    assert {"lazy", "busy"} <= functions["inner"]
    assert "busy" in functions["outer/one"], "an action goes on when one within it has ended"
    assert "lazy" not in functions["outer/one"]
    profiler.describe()
    text = (tmp_path / "report.txt").read_text()
    assert "Profile stats for: inner" in text
    assert "(lazy)" in text
    assert sorted(path.name for path in tmp_path.glob("*.prof")) == ["report-inner.prof", "report-outer_one.prof"]
    assert any(name == "lazy" for _, _, name in pstats.Stats(str(tmp_path / "report-inner.prof")).stats)  # type: ignore[attr-defined]
    assert not profiler.profiled_actions, "described: ready for another run"
    few = AdvancedProfiler(line_count_restriction=1)
    with few.profile("a"):
        lazy()
    assert "due to restriction <1>" in few.summary()
    nowhere = AdvancedProfiler(dump_stats=True)
    with nowhere.profile("a"):
        pass
    with pytest.raises(ValueError, match="needs dirpath"):
        nowhere.describe()


def test_reports_go_to_a_file_or_to_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    profiler = SimpleProfiler(filename="times")
    profiler.setup("fit", 1, str(tmp_path / "new"))
    with profiler.profile("a"):
        pass
    profiler.describe()
    profiler.describe()
    assert (tmp_path / "new" / "fit-times-1.txt").read_text().count("FIT Profiler Report") == 2, "appended"
    shown = SimpleProfiler()
    with caplog.at_level("WARNING", logger="arclight"):
        shown.describe()
        shown.setup("fit", 1)
        shown.describe()
    assert caplog.text.count("Profiler Report") == 1, "other ranks keep silent"


@pytest.mark.parametrize("kind", EVERY)
def test_profilers_can_be_copied_and_sent(kind: Any, tmp_path: Path) -> None:
    profiler = kind(dirpath=tmp_path, filename="x")
    with profiler.profile("a"):
        torch.ones(1)
        for other in (copy.deepcopy(profiler), pickle.loads(pickle.dumps(profiler))):
            assert (other.dirpath, other.filename) == (tmp_path, "x")
    profiler.describe()
    assert copy.deepcopy(profiler)._output_file is None


def test_names_stand_for_profilers() -> None:
    for name, kind in (("simple", SimpleProfiler), ("Advanced", AdvancedProfiler), ("pytorch", PyTorchProfiler)):
        assert type(resolve_profiler(name)) is kind
    assert type(resolve_profiler(None)) is PassThroughProfiler
    own = SimpleProfiler()
    assert resolve_profiler(own) is own
    with pytest.raises(MisconfigurationError, match="it can only be one of simple, advanced, pytorch; got 'fast'"):
        resolve_profiler("fast")


def test_functions_are_wrapped_only_where_something_is_recorded() -> None:
    assert profiled(PassThroughProfiler(), "a", busy) is busy
    items = iter([1])
    assert profiled_items(PassThroughProfiler(), "a", items) is items
    simple = SimpleProfiler()

    def fails(x: int, *, y: int) -> int:
        return x // y

    seen = profiled(simple, "divide", fails)
    assert seen(6, y=3) == 2
    with pytest.raises(ZeroDivisionError):
        seen(6, y=0)
    assert len(simple.recorded_durations["divide"]) == 2
    assert not simple.current_actions
    assert list(profiled_items(simple, "next", iter([None, 2]))) == [None, 2]
    assert len(simple.recorded_durations["next"]) == 3, "the wait that finds the end counts too"


# -- torch's profiler ----------------------------------------------------------------------------------------------


def names(profiler: PyTorchProfiler) -> set[str]:
    return {event.name for event in profiler.function_events or []}


def test_operators_actions_and_modules_are_in_the_trace(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(tmp_path, "ops", schedule=None, table_kwargs={"max_name_column_width": 30})
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Sequential(torch.nn.ReLU()))
    with profiler.profile("outer"), RegisterRecordFunction(model):
        model(torch.zeros(1, 2))
        with profiler.profile("inner"):
            torch.ones(1).exp()
    assert not model[0]._forward_hooks, "labels are gone when the context is left"
    profiler.describe()
    linear, relu = (f"[pl][module]torch.nn.modules.{kind}" for kind in ("linear.Linear: 0", "activation.ReLU: 1.0"))
    assert names(profiler) >= {"[pl][profile]outer", "[pl][profile]inner", "aten::addmm", "aten::exp", linear, relu}
    report = (tmp_path / "ops.txt").read_text()
    assert "Profile stats for: records" in report
    assert "aten::exp" in report
    (trace,) = tmp_path.glob("ops.*.pt.trace.json")
    assert any(event.get("name") == "[pl][profile]inner" for event in json.loads(trace.read_text())["traceEvents"])
    assert max(len(line) for line in report.splitlines() if "aten::" in line) < 200


def test_an_error_in_a_module_leaves_no_label_open() -> None:
    class Fails(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError

    profiler, model = PyTorchProfiler(schedule=None, export_to_chrome=False), torch.nn.Sequential(Fails())
    with profiler.profile("a"), RegisterRecordFunction(model), pytest.raises(ZeroDivisionError):
        model(torch.zeros(1))
    with profiler.profile("b"):
        torch.ones(1).exp()
    with pytest.warns(UserWarning, match="dirpath"):
        profiler.describe()
    exp = next(event for event in profiler.function_events or [] if event.name == "aten::exp")
    assert exp.cpu_parent.name == "[pl][profile]b"


def test_each_kind_of_step_has_the_schedule_to_itself() -> None:
    stages, seen = StageSchedule(schedule(wait=1, warmup=1, active=2)), []
    assert stages(0) is ProfilerAction.NONE, "nothing before the first step"

    def after(action: str, count: int = 1) -> list[str]:
        nonlocal seen
        seen = []
        for _ in range(count):
            stages.count_step(f"[Strategy]X.{action}", fitting=True)
            seen.append(stages(0).name)
        return seen

    assert after("validation_step", 3) == ["NONE"] * 3, "the sanity check counts as nothing"
    assert after("training_step", 2) == ["WARMUP", "RECORD"]
    assert after("validation_step", 1) == ["RECORD"], "the training's trace goes on: torch cannot go back to a warm-up"
    assert after("training_step", 2) == ["RECORD_AND_SAVE", "NONE"]
    assert after("validation_step", 3) == ["RECORD", "RECORD_AND_SAVE", "NONE"]
    assert after("training_step", 5) == ["NONE"] * 5, "one trace of each kind"
    stages.reset()
    assert after("training_step", 2) == ["WARMUP", "RECORD"]
    stages.finished.add("validation_step")
    assert after("validation_step", 1) == ["RECORD_AND_SAVE"], "a trace that another kind would break off is saved"


def test_invalid_profiler_options_are_refused() -> None:
    for arguments, kind, message in (
        ({"sort_by_key": "size"}, MisconfigurationError, "Found sort_by_key: size. Should be within"),
        ({"schedule": 3}, MisconfigurationError, "Schedule should be a callable. Found: 3"),
        ({"schedule": lambda step: step}, MisconfigurationError, "Schedule should return a .*ProfilerAction"),
        ({"with_stak": True}, TypeError, "has no argument 'with_stak'; did you mean 'with_stack'"),
        ({"table_kwargs": {"row_limit": 3}}, KeyError, "row_limit. This is already a positional argument"),
        ({"table_kwargs": {"width": 3}}, KeyError, "Found invalid table_kwargs key: width. Should be within"),
    ):
        with pytest.raises(kind, match=message):
            PyTorchProfiler(**arguments)  # type: ignore[arg-type]
    off = PyTorchProfiler(enabled=False)
    with off.profile("a"):
        torch.ones(1)
    assert (off.profiler, off.summary()) == (None, "")


@pytest.mark.parametrize("key", sorted(PyTorchProfiler.AVAILABLE_SORT_KEYS))
def test_every_sort_key_sorts(key: str) -> None:
    profiler = PyTorchProfiler(schedule=None, sort_by_key=key, profile_memory=True, on_trace_ready=lambda _: None)
    with profiler.profile("a"):
        torch.ones(100).exp()
    assert "aten::exp" in profiler.summary()


# -- in a run --------------------------------------------------------------------------------------------------------


class Watched(al.Callback):
    @property
    def state_key(self) -> str:
        return "Watched{x}"

    def on_train_batch_end(self, *args: Any) -> None: ...

    def on_fit_end(self, trainer: al.Trainer, pl_module: al.Module) -> None:
        assert trainer.profiler._output_file is None, "reported by now"


def counts(profiler: SimpleProfiler) -> dict[str, int]:
    return {action: len(times) for action, times in profiler.recorded_durations.items()}


def test_a_run_is_seen_by_the_names_that_people_know(fit: Any) -> None:
    profiler = SimpleProfiler(filename="times")
    trainer = fit({"val/score": [1.0, 2.0, 3.0]}, Watched(), profiler=profiler, max_epochs=2)
    strategy = "[Strategy]SingleDeviceStrategy."
    seen = counts(profiler)
    expected = {
        "run_training_epoch": 2,
        "run_training_batch": 8,
        "setup_train_dataloader": 1,
        "save_checkpoint": 2,
        "train_dataloader_next": 8,
        "val_dataloader_next": 4,
        f"{strategy}training_step": 8,
        f"{strategy}backward": 8,
        f"{strategy}validation_step": 4,
        "[LightningModule]Scripted.optimizer_step": 8,
        "[LightningModule]Scripted.optimizer_zero_grad": 8,
        "[LightningModule]Scripted.on_validation_epoch_end": 2,
        "[Callback]Watched{x}.on_train_batch_end": 8,
    }
    assert {action: seen.get(action) for action in expected} == expected
    assert profiler.recorded_durations["run_training_epoch"][0] > profiler.recorded_durations[f"{strategy}backward"][0]
    assert "FIT Profiler Report" in (trainer.run_folder.path / "fit-times.txt").read_text()
    trainer.validate(trainer.lightning_module, rows(2))
    assert counts(profiler)[f"{strategy}validation_step"] == 6
    assert "VALIDATE Profiler Report" in (trainer.run_folder.path / "validate-times.txt").read_text()


def rows(count: int) -> Any:
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(count, 2), torch.zeros(count, 1)))


def test_a_run_without_a_profiler_knows_nothing_of_one(fit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("a profiler was asked")

    monkeypatch.setattr(PassThroughProfiler, "start", never)
    monkeypatch.setattr(PassThroughProfiler, "setup", never)
    trainer = fit({"val/score": [1.0]}, Watched())
    assert type(trainer.profiler) is PassThroughProfiler


@pytest.mark.parametrize("name", ["simple", "advanced", "pytorch"])
def test_every_profiler_goes_through_a_whole_run(name: str, fit: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="arclight"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not enough steps")
        profiler = (
            PyTorchProfiler(row_limit=-1) if name == "pytorch" else name
        )  # which rows are longest depends on the machine
        trainer = fit(
            {"val/score": [1.0]}, profiler=profiler, accumulate_grad_batches=2, gradient_clip_val=1.0, batches=6
        )
    assert caplog.text.count("FIT Profiler Report") == 1
    assert ("aten::linear" if name == "pytorch" else "[Strategy]SingleDeviceStrategy.validation_step") in caplog.text
    if name == "pytorch":
        assert list(trainer.run_folder.path.glob("fit-*_step.*.pt.trace.json"))


def test_a_run_that_fails_leaves_nothing_open(fit: Any, scripted: Any) -> None:
    class Fails(scripted):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            raise ZeroDivisionError

    for profiler in (SimpleProfiler(), AdvancedProfiler(), PyTorchProfiler(schedule=None, export_to_chrome=False)):
        with pytest.raises(ZeroDivisionError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit(Fails(), max_epochs=1, profiler=profiler)
        assert not torch.autograd._profiler_enabled()
        with profiler.profile("[Strategy]SingleDeviceStrategy.training_step"):
            pass


def test_too_few_steps_for_the_schedule_are_all_recorded(fit: Any) -> None:
    warning_cache.clear()
    profiler = PyTorchProfiler(filename="ops")
    with pytest.warns(UserWarning, match="not enough steps to properly record traces"):
        trainer = fit({"val/score": [1.0]}, profiler=profiler, batches=3)
    assert profiler._schedule is None
    assert "[pl][module]torch.nn.modules.linear.Linear: line" in names(profiler)
    assert (trainer.run_folder.path / "fit-ops.txt").read_text()
