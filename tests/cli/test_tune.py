"""arclight tune: ranges, trials, what is kept of them, and how a search goes on after it was stopped."""

from __future__ import annotations

import dataclasses
import errno
import json
import multiprocessing
import os
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests import warm
from tests.test_readme import ROOT, block

from arclight._installed import pip_install
from arclight.cli.arguments import UsageError, read_recipe
from arclight.cli.schema import Recipe
from arclight.cli.tune import search as searches
from arclight.cli.tune import study as studies
from arclight.cli.tune.search import agree_with_study, run_trials, tune_parser
from arclight.cli.tune.space import Choice, Parameter, Range, TunedRun, flags_of, parameters, start
from arclight.cli.tune.trial import Search, TrialProcess
from arclight.recipe import read, write
from arclight.trainer.loggers.csv_logger import read_metrics

Typed = Callable[[str], tuple[int, str, str]]
LM = (ROOT / "recipes/lm-debug.toml").read_text()


def space(table: dict[str, object]) -> dict[str, Parameter]:
    return {one.field: one for one in parameters(TunedRun(LM), table)}


# ----------------------------------------------------------------------------------------------------------- the space


def test_ranges_take_the_type_of_their_field() -> None:
    found = space(
        {
            "task.optimizer.lr": "1e-4:1e-2:log",
            "trainer": {"max_steps": "100:300:50", "gradient_clip_val": "0:2"},
            "checkpoint": {"save_last": [True, False]},
        }
    )
    assert found == {
        "task.optimizer.lr": Range("task.optimizer.lr", 1e-4, 1e-2, log=True),
        "trainer.max_steps": Range("trainer.max_steps", 100, 300, step=50, integer=True),
        "trainer.gradient_clip_val": Range("trainer.gradient_clip_val", 0, 2),
        "checkpoint.save_last": Choice("checkpoint.save_last", ("true", "false")),
    }
    values = {"task.optimizer.lr": 0.002, "trainer.max_steps": 150, "trainer.gradient_clip_val": 1.0}
    run = TunedRun(LM).read(flags_of(list(found.values()), {**values, "checkpoint.save_last": "false"}))
    assert (run.task.optimizer.lr, run.trainer.max_steps, run.trainer.gradient_clip_val) == (0.002, 150, 1.0)
    assert run.checkpoint.save_last is False


def test_the_recipe_s_own_values_come_first_where_they_are_in_the_space() -> None:
    run = TunedRun(LM).read()
    there = space(
        {"task.optimizer.lr": "1e-4:1e-2:log", "task.optimizer.kind": "adamw,sgd", "trainer.max_steps": "100:300:50"}
    )
    assert start(list(there.values()), run) == {
        "task.optimizer.lr": 3e-3, "task.optimizer.kind": "adamw", "trainer.max_steps": 300,
    }  # fmt: skip
    assert start([Range("task.optimizer.lr", 1e-2, 1)], run) is None
    assert start([Range("trainer.max_steps", 90, 390, step=100, integer=True)], run) is None


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("task.optimizer.lrr", "1:2", r"--search\.task\.optimizer\.lrr is not a field of AdamW; did you mean --search\.task\.optimizer\.lr\?"),
        ("lr", "1:2", r"--search\.lr is not a field of Recipe; did you mean --search\.task\.optimizer\.lr"),
        ("task.optimizer.lr", "2:1", "low must be less than high, got 2 and 1"),
        ("task.optimizer.lr", "0:1:log", "a logarithmic range starts above 0, got 0"),
        ("task.optimizer.lr", "0.1", "need low:high, low:high:log"),
        ("task.optimizer.lr", "1:2:loog", "need low:high, low:high:log"),
        ("task.optimizer.lr", "0:1:5", "a step lies between 0 and 1, got 5"),
        ("task.optimizer.lr", "-1:1", r"--search\.task\.optimizer\.lr: need number"),
        ("trainer.max_steps", "1:5:0.5", "takes whole numbers"),
        ("trainer.precision", "32-true,bf17", r"--search\.trainer\.precision: need auto"),
        ("trainer.max_steps", "1:99999999999999999999", "too large a number"),
        ("trainer.max_steps", "1:" + "9" * 400, "too large a number"),
        ("trainer.devices", "1,2", "a search sets trainer.devices itself"),
        ("search.task.optimizer.lr", "1:2", "a search sets search itself"),
        ("task.optimizer.kind", "adamw,adamw", "two different choices or more"),
        ("name=x", ["a", "b"], r"--search\.name=x: a field's name has no = in it"),
    ],
)  # fmt: skip
def test_a_range_that_cannot_be_is_refused_before_anything_is_trained(field: str, value: object, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        space({field: value})


def test_a_kind_that_lacks_a_searched_field_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--search\.task\.optimizer\.momentum is not a field of AdamW"):
        space({"task.optimizer": {"kind": "sgd,adamw", "momentum": "0.8:0.95"}})


def test_two_ranges_of_one_field_are_refused() -> None:
    with pytest.raises(UsageError, match=r"--search\.task\.optimizer\.lr: has two ranges"):
        space({"task": {"optimizer": {"lr": "1:2"}}, "task.optimizer.lr": "3:4"})


def test_parameters_have_one_order_as_they_are_typed_and_as_their_file_has_them() -> None:
    """Values are drawn in it: a search that is resumed from its file would draw others."""
    flags = ["--search.task.optimizer.lr", "1e-4:1e-2", "--search.task.loss_chunk", "1:8", "--search.seed", "1:9"]
    run = read(Recipe, tomllib.loads(LM), flags)
    typed = parameters(TunedRun(LM), run.search)
    assert typed == parameters(TunedRun(LM), read(Recipe, tomllib.loads(write(run))).search)
    assert [one.field for one in typed] == ["seed", "task.loss_chunk", "task.optimizer.lr"]


def test_the_last_step_of_a_range_is_the_highest_value(recwarn: pytest.WarningsRecorder) -> None:
    whole = Range("n", 1, 10, step=4, integer=True)
    tenths = Range("x", 0.1, 0.8, step=0.1)
    assert (whole.last, whole.distribution().high) == (9, 9)
    assert (tenths.last, tenths.distribution().high) == (0.8, 0.8)
    assert not recwarn.list


def test_a_recipe_holds_its_ranges_and_training_leaves_them_alone() -> None:
    text = LM + '[search.task.optimizer]\nlr = "1e-4:1e-2:log"\nkind = ["adamw", "sgd"]\n'
    recipe = read(Recipe, tomllib.loads(text), ["--search.trainer.max_steps", "10:20"])
    assert recipe.search == {
        "task": {"optimizer": {"lr": "1e-4:1e-2:log", "kind": ["adamw", "sgd"]}}, "trainer": {"max_steps": "10:20"},
    }  # fmt: skip
    assert TunedRun(text).read().search is None


# ---------------------------------------------------------------------------------------------------------- the trials


def a_search(folder: Path, *found: Parameter, **settings: object) -> Search:
    given = {"sampler": "tpe", "pruner": "none", "seed": 0, "monitor": "val/loss", "mode": "min"}
    storage = studies.local_database(folder)
    return Search(
        subject=TunedRun(LM), parameters=found, folder=folder, storage=storage, study="one", **{**given, **settings}
    )


def minimise(search: Search, trials: int, value: Callable[[dict[str, object]], float]) -> list[dict[str, object]]:
    """Draw and tell trials as `run_trial` does, without training."""
    study = search.open()
    for _ in range(trials):
        study.sampler = studies.TrialSampler(study, search.sampler, search.seed, search.parameters, parallel=False)
        trial = study.ask()
        study.tell(trial, value({one.field: one.suggest(trial) for one in search.parameters}))
    return [one.params for one in study.trials]


@pytest.mark.parametrize(
    "sampler", ["cmaes", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tpe", "random"))]
)
def test_a_search_that_was_stopped_draws_the_values_of_one_that_was_not(tmp_path: Path, sampler: str) -> None:
    found = (Range("lr", 1e-4, 1.0, log=True), Range("width", 1, 64, integer=True), Choice("kind", ("a", "b")))

    def value(drawn: dict[str, object]) -> float:
        return abs(np.log10(drawn["lr"]) + 2) + abs(drawn["width"] - 20) / 20

    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = minimise(a_search(tmp_path / "whole", *found, sampler=sampler), 13, value)
    for part in (5, 8):
        parts = minimise(a_search(tmp_path / "parts", *found, sampler=sampler), part, value)
    assert parts == whole
    assert len({str(one) for one in whole}) == 13


@pytest.mark.parametrize("sampler", ["tpe", "cmaes", "random"])
def test_processes_that_draw_at_once_draw_other_values_and_killed_trials_are_drawn_again(
    tmp_path: Path, sampler: str
) -> None:
    search = a_search(tmp_path, Range("lr", 1e-4, 1.0, log=True), sampler=sampler)
    studies_of_two = [search.open(), search.open()]
    for study in studies_of_two:  # both have looked before either asks
        study.sampler = studies.TrialSampler(study, sampler, 0, search.parameters, parallel=True)
    first, second = (study.ask() for study in studies_of_two)
    lrs = [search.parameters[0].suggest(trial) for trial in (first, second)]
    assert lrs[0] != lrs[1]
    studies_of_two[1].tell(second.number, state=studies.FAILED)  # without an error: it was killed
    again = studies_of_two[0].ask()
    assert again.number == 2
    assert search.parameters[0].suggest(again) == pytest.approx(lrs[1])


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_a_killed_trial_leaves_its_place_and_not_that_of_a_living_one(tmp_path: Path, sampler: str) -> None:
    search = a_search(tmp_path, Range("lr", 1e-4, 1.0, log=True), sampler=sampler)
    study = search.open()
    study.sampler = studies.TrialSampler(study, sampler, 0, search.parameters, parallel=True)
    lrs = [search.parameters[0].suggest(study.ask()) for _ in range(2)]
    study.tell(0, state=studies.FAILED)  # without an error: it was killed
    third = search.parameters[0].suggest(study.ask())
    assert third != lrs[1]
    assert third == pytest.approx(lrs[0])


def test_the_own_values_of_a_recipe_are_drawn_again_after_a_kill(tmp_path: Path) -> None:
    search = a_search(tmp_path, Range("lr", 1e-4, 1.0, log=True), Choice("kind", ("a", "b")), sampler="cmaes")
    study = search.open()
    agree_with_study(search, {"lr": 0.25, "kind": "b"})
    for _ in range(2):
        study.sampler = studies.TrialSampler(study, "cmaes", 0, search.parameters, parallel=False)
        trial = study.ask()
        assert {one.field: one.suggest(trial) for one in search.parameters} == {"lr": 0.25, "kind": "b"}
        study.tell(trial, state=studies.FAILED)


@pytest.mark.slow
def test_evolution_approaches_the_best_and_stays_in_its_bounds(tmp_path: Path) -> None:
    found = (Range("lr", 1e-4, 1.0, log=True), Range("width", 0, 1), Range("steps", 10, 90, step=20, integer=True))
    drawn = minimise(
        a_search(tmp_path, *found, sampler="cmaes"),
        70,
        lambda here: (np.log10(here["lr"]) + 3.2) ** 2 + 4 * (here["width"] - 0.9) ** 2 + abs(here["steps"] - 70) / 80,
    )
    assert all(1e-4 <= one["lr"] <= 1 and 0 <= one["width"] <= 1 for one in drawn)
    assert {one["steps"] for one in drawn} <= {10, 30, 50, 70, 90}
    last = drawn[-14:]
    assert abs(np.mean([np.log10(one["lr"]) for one in last]) + 3.2) < 0.4
    assert abs(np.mean([one["width"] for one in last]) - 0.9) < 0.15


def test_evolution_reaches_the_last_step_of_a_range() -> None:
    """Rounding to float put it above the range, and the step before was taken."""
    tenths = Range("x", 0.0, 0.3, step=0.1)
    assert [studies._from_unit(tenths, share) for share in (0.0, 0.7, 0.9, 1.0)] == [0.0, 0.2, 0.3, 0.3]
    assert studies._from_unit(Range("n", 1, 10, step=4, integer=True), 1.0) == 9


def test_trials_of_a_process_that_was_killed_are_failed_and_do_not_count(tmp_path: Path) -> None:
    study = a_search(tmp_path).open()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    host, _, started = studies.this_process()
    gone.wait()
    marks = {
        "dead": [host, gone.pid, started], "reused": [host, os.getpid(), "0"],
        "own": studies.this_process(), "elsewhere": ["another-host", 1, ""],
    }  # fmt: skip
    numbers = {}
    for name, process in marks.items():
        trial = study.ask()
        trial.set_user_attr("process", process)
        numbers[name] = trial.number
    assert studies.fail_stale_trials(study) == 2
    states = {name: study.trials[number].state for name, number in numbers.items()}
    assert states == {
        "dead": studies.FAILED, "reused": studies.FAILED, "own": studies.RUNNING, "elsewhere": studies.RUNNING,
    }  # fmt: skip
    assert studies.finished(study) == []


def overdue(folder: Path, number: int) -> None:
    """Put a trial's heartbeat, and its start, a day back."""
    with sqlite3.connect(folder / "search.db") as database:
        for table, column in (("trial_heartbeats", "heartbeat"), ("trials", "datetime_start")):
            database.execute(
                f"update {table} set {column} = datetime({column}, '-1 day') || '.000000' where trial_id = ?",
                (number + 1,),
            )
    database.close()


def test_a_trial_of_a_living_process_of_this_machine_outlives_late_heartbeats(tmp_path: Path) -> None:
    study = a_search(tmp_path).open()
    for number, process in enumerate([studies.this_process(), ["another-host", 1, ""]]):
        trial = study.ask()
        trial.set_user_attr("process", process)
        study._storage.record_heartbeat(trial._trial_id)
        overdue(tmp_path, number)
    studies.fail_stale_trials(study)
    assert [one.state for one in study.trials] == [studies.RUNNING, studies.FAILED]


def test_a_trial_that_was_killed_before_it_named_its_process_is_failed(tmp_path: Path) -> None:
    study = a_search(tmp_path).open()
    for _ in range(2):
        study.ask()
    overdue(tmp_path, 0)
    assert studies.fail_stale_trials(study) == 1
    assert [one.state for one in study.trials] == [studies.FAILED, studies.RUNNING]


def test_a_trial_of_another_machine_that_was_killed_at_its_beginning_is_failed(tmp_path: Path) -> None:
    """Before the thread of its heartbeats was started; nobody's clock but the database's says when it began."""
    search = a_search(tmp_path, Range("lr", 0, 1))
    study = search.open()
    study.sampler = studies.TrialSampler(study, "tpe", 0, search.parameters, parallel=False)
    study.ask().set_user_attr("process", ["another-host", 1, ""])
    assert studies.fail_stale_trials(study) == 0
    overdue(tmp_path, 0)
    assert studies.fail_stale_trials(study) == 1
    assert study.trials[0].state == studies.FAILED


def test_a_trial_names_its_process_before_anything_is_drawn(tmp_path: Path) -> None:
    search = a_search(tmp_path, Range("lr", 0, 1))
    study = search.open()
    study.sampler = studies.TrialSampler(study, "tpe", 0, search.parameters, parallel=False)
    study.ask()
    assert study.trials[0].user_attrs["process"] == studies.this_process()


def test_values_that_kill_each_process_are_given_up(tmp_path: Path) -> None:
    """Such as for want of memory: each --resume would be killed again."""
    search = a_search(tmp_path, Range("lr", 0, 1), sampler="random")
    study = search.open()
    drawn = []
    for _ in range(studies.DEATHS + 1):
        study.sampler = studies.TrialSampler(study, "random", 0, search.parameters, parallel=False)
        trial = study.ask()
        drawn.append(search.parameters[0].suggest(trial))
        trial.set_user_attr("process", [studies.this_process()[0], os.getpid(), "0"])
        assert studies.fail_stale_trials(study) == 1
    assert drawn[0] == drawn[1] == drawn[2] != drawn[3]
    assert [one.number for one in studies.finished(study)] == [2]
    assert "as were those of 2 trials with the same values" in study.trials[2].user_attrs["error"]


def test_values_that_kill_each_machine_are_given_up(tmp_path: Path) -> None:
    """A container that was killed and begins again has another name."""
    search = a_search(tmp_path, Range("lr", 0, 1), sampler="random")
    study = search.open()
    for number in range(studies.DEATHS):
        study.sampler = studies.TrialSampler(study, "random", 0, search.parameters, parallel=False)
        trial = study.ask()
        trial.set_user_attr("process", [f"pod-{number}", 1, ""])
        study._storage.record_heartbeat(trial._trial_id)
        assert studies.fail_stale_trials(study) == 0
        overdue(tmp_path, number)
        assert studies.fail_stale_trials(study) == 1
    assert [one.number for one in studies.finished(study)] == [2]


def test_two_processes_may_fail_one_trial(tmp_path: Path) -> None:
    study = a_search(tmp_path).open()
    trial = study.ask()
    (running,) = study.trials
    study.tell(trial, state=studies.FAILED)
    studies.fail(study, running, error="ended by signal 9")
    assert study.trials[0].user_attrs == {}


def test_a_database_that_takes_no_heartbeat_does_not_end_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    study = a_search(tmp_path).open()
    trial = study.ask()
    with sqlite3.connect(tmp_path / "search.db") as database:
        database.execute("alter table trial_heartbeats rename to gone")
    for _ in range(2):
        study._storage.record_heartbeat(trial._trial_id)
    assert [one.message for one in caplog.records] == [
        "the search's database did not take the heartbeat of trial 1: (sqlite3.OperationalError) no such table: trial_heartbeats"
    ]
    with sqlite3.connect(tmp_path / "search.db") as database:
        database.execute("alter table gone rename to trial_heartbeats")
        study._storage.record_heartbeat(trial._trial_id)
        assert database.execute("select count(*) from trial_heartbeats").fetchone() == (1,)


def test_processes_that_make_a_database_at_once_all_open_it(tmp_path: Path) -> None:
    forked = multiprocessing.get_context("fork")
    for attempt in range(3):
        (tmp_path / str(attempt)).mkdir()
        url, at_once = studies.local_database(tmp_path / str(attempt)), forked.Barrier(3)
        opening = [forked.Process(target=open_with_others, args=(url, at_once)) for _ in range(3)]
        for one in opening:
            one.start()
        for one in opening:
            one.join()
        assert [one.exitcode for one in opening] == [0, 0, 0]


def open_with_others(url: str, at_once: object) -> None:
    at_once.wait()
    studies.open_study(url, "one", "min")


def test_passwords_are_not_kept() -> None:
    assert studies.without_password("mysql://me:secret@host:3306/db") == "mysql://me:***@host:3306/db"
    assert studies.without_password("sqlite:////tmp/a.db") == "sqlite:////tmp/a.db"
    assert studies.without_password("postgresql://me@host/db") == "postgresql://me@host/db"


# --------------------------------------------------------------------------------------------------------- the command

SLOW_TASK = """
import dataclasses
import os
import pathlib
import signal

import tiny_task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit(tiny_task.Fit):
    fate: str = "fine"

    def build(self):
        module, data = super().build()
        if self.fate == "error":
            raise RuntimeError("no luck today")
        if self.fate == "nan":
            module.validation_step = lambda batch, batch_idx: module.log("val/loss", float("nan"))
        if self.fate == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fate == "exit":
            raise SystemExit(3)
        if self.fate == "lost" and not pathlib.Path("lost").exists():
            pathlib.Path("lost").touch()
            from arclight.cli.tune import study as studies

            study = studies.open_study(f"sqlite:///{next(pathlib.Path().glob('runs/*/*/search.db')).absolute()}", "tune-1", "min")
            study.tell(len(study.trials) - 1, state=studies.FAILED)
        if self.fate == "killed once" and not pathlib.Path("killed").exists():
            pathlib.Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return module, data
"""


@pytest.fixture
def fated(tiny: Path) -> Path:
    """The tiny recipe, whose trials may fail in several ways."""
    (tiny.parent / "fated_task.py").write_text(SLOW_TASK)
    path = tiny.with_name("fated.toml")
    path.write_text(tiny.read_text().replace("tiny_task:Fit", "fated_task:Fit").replace('"tiny"', '"fated"'))
    yield path
    sys.modules.pop("fated_task", None)


def state_of(folder: Path) -> list[str]:
    study = studies.open_study(studies.local_database(folder), folder.name, "min")
    return [one.state.name for one in study.trials]


def test_a_search_keeps_its_trials_the_best_recipe_and_a_page(typed: Typed, tiny: Path) -> None:
    status, out, err = typed("tune tiny.toml --search.task.lr 1e-3:1:log --monitor val/loss --trials 3")
    assert (status, err) == (0, "")
    folder = Path("runs/tiny/tune-1")
    study = studies.open_study(studies.local_database(folder), "tune-1", "min")
    assert study.trials[0].params == {"task.lr": 0.1}  # the recipe's own
    for one in study.trials:
        run = folder / str(one.number)
        assert read(Recipe, run / "recipe.toml").task.lr == one.params["task.lr"]
        assert one.value == pytest.approx(min(value for _, value in read_metrics(run / "metrics.csv")["val/loss"]))
        assert (run / "checkpoints").is_dir()
    best = min(study.trials, key=lambda one: one.value)
    recipe = read(Recipe, folder / "best.toml")
    assert (recipe.task.lr, recipe.search, recipe.name) == (best.params["task.lr"], None, "tiny")
    assert f"The best val/loss is {best.value:.6g}, of trial {best.number}" in out
    page = (folder / "report.html").read_text()
    for heading in ("History", "Parameters", "Trials"):
        assert f"<h2>{heading}</h2>" in page
    assert page.count('<circle class="dot') == 6  # three trials in two charts
    assert not re.search(r'(src|href)="(https?:)?//', page)

    status, _, err = typed(f"train {folder}/best.toml")
    assert (status, err) == (0, "")
    assert Path("runs/tiny/1/checkpoints").is_dir()


def test_resuming_adds_trials_to_the_search(typed: Typed, tiny: Path) -> None:
    typed("tune tiny.toml --search.task.lr 1e-3:1:log --monitor val/loss --trials 2 --pruner none")
    status, out, err = typed("tune --resume runs/tiny/tune-1 --trials 3")
    assert (status, err) == (0, "")
    assert state_of(Path("runs/tiny/tune-1")) == ["COMPLETE"] * 3
    assert len(re.findall(r"^trial \d", out, re.MULTILINE)) == 1
    assert json.loads(Path("runs/tiny/tune-1/search.json").read_text())["trials"] == 2
    status, _, err = typed("tune --resume runs/tiny/tune-1 --search.task.lr 1:2")
    assert status == 2
    assert "leave out --search.task.lr" in err
    assert typed("tune --resume runs/tiny")[2].startswith("arclight: --resume runs/tiny is not a search")


def test_trials_that_fail_are_recorded_and_the_search_goes_on(typed: Typed, fated: Path) -> None:
    status, out, _ = typed(
        "tune fated.toml --search.task.fate fine,error,nan --monitor val/loss --trials 6 --sampler random --seed 1"
    )
    assert status == 0
    folder = Path("runs/fated/tune-1")
    study = studies.open_study(studies.local_database(folder), "tune-1", "min")
    fates = {one.params["task.fate"]: one for one in study.trials}
    assert {name: one.state.name for name, one in fates.items()} == {"fine": "COMPLETE", "error": "FAIL", "nan": "FAIL"}
    assert fates["error"].user_attrs["error"] == "RuntimeError: no luck today"
    assert "no luck today" in (folder / str(fates["error"].number) / "error.txt").read_text()
    assert "val/loss was nan at every validation" in fates["nan"].user_attrs["error"]
    assert "failed: RuntimeError: no luck today" in out
    assert "no luck today" in (folder / "report.html").read_text()


@pytest.mark.slow
def test_a_search_that_was_killed_draws_and_trains_as_one_that_was_not(fated: Path) -> None:
    """Killed in its first trial, which has the recipe's own values, and once more with trials done."""
    words = [
        "-m",
        "arclight.cli",
        "tune",
        "fated.toml",
        "--search.task.lr",
        "1e-3:1:log",
        "--monitor",
        "val/loss",
        "--trials",
        "3",
    ]
    folder = fated.parent
    assert warm.run(*words, cwd=folder, timeout=300).returncode == 0
    killed = warm.run(*words, "--task.fate", "killed once", cwd=folder, timeout=300)
    assert killed.returncode == -signal.SIGKILL
    assert state_of(folder / "runs/fated/tune-2") == ["RUNNING"]
    resumed = warm.run("-m", "arclight.cli", "tune", "--resume", "runs/fated/tune-2", cwd=folder, timeout=300)
    assert resumed.returncode == 0, resumed.stderr
    assert state_of(folder / "runs/fated/tune-2") == ["FAIL", *["COMPLETE"] * 3]
    whole, parts = (
        [
            (one.params, one.value)
            for one in studies.open_study(studies.local_database(folder / "runs/fated" / name), name, "min").trials
            if one.state == studies.COMPLETE
        ]
        for name in ("tune-1", "tune-2")
    )
    assert parts == whole
    assert whole[0][0] == {"task.lr": 0.1}


def test_resuming_writes_what_a_kill_left_unwritten(typed: Typed, tiny: Path) -> None:
    typed("tune tiny.toml --search.task.lr 1e-3:1:log --monitor val/loss --trials 1")
    folder = Path("runs/tiny/tune-1")
    for name in ("best.toml", "report.html"):
        (folder / name).unlink()
    status, _, err = typed(f"tune --resume {folder}")
    assert (status, err) == (0, "")
    assert read(Recipe, folder / "best.toml").task.lr == 0.1
    assert (folder / "report.html").is_file()


def test_resuming_with_other_ranges_or_another_database_is_refused_and_another_recipe_a_warning(
    typed: Typed, fated: Path
) -> None:
    typed("tune fated.toml --search.task.fate fine,error --monitor val/loss --trials 1")
    folder = Path("runs/fated/tune-1")
    path = folder / "recipe.toml"
    text = path.read_text()
    path.write_text(
        text.replace('fate = ["fine", "error"]', 'fate = ["fine", "nan"]').replace('"fine,error"', '"fine,nan"')
    )
    assert path.read_text() != text
    status, _, err = typed(f"tune --resume {folder} --trials 2")
    assert status == 2
    assert "the search has another space: task.fate = ('fine', 'error'); here it is task.fate = ('fine', 'nan')." in err
    path.write_text(text.replace("max_epochs = 3", "max_epochs = 2"))
    with pytest.warns(
        UserWarning, match=r"tune-1 so far had other settings: trainer\.max_epochs = 2 \(there 3\); their values may"
    ):
        assert typed(f"tune --resume {folder}")[0] == 0
    path.write_text(text)
    status, _, err = typed(f"tune --resume {folder} --storage sqlite:///elsewhere.db")
    assert (status, "the database sqlite:///elsewhere.db has no search tune-1" in err) == (2, True)
    path.unlink()
    status, _, err = typed(f"tune --resume {folder}")
    assert (status, "is not a search" in err) == (2, True)


def test_a_module_that_exits_fails_its_trial_alone(typed: Typed, fated: Path) -> None:
    status, out, _ = typed(
        "tune fated.toml --search.task.fate fine,exit --task.fate exit --monitor val/loss --trials 2 --sampler random --seed 1"
    )
    assert status == 0
    assert sorted(state_of(Path("runs/fated/tune-1"))) == ["COMPLETE", "FAIL"]
    assert "failed: SystemExit: 3" in out


def test_a_trial_that_another_process_ends_is_run_again(typed: Typed, fated: Path) -> None:
    with pytest.warns(UserWarning, match="trial 0 was ended by another process"):
        status, _, _ = typed(
            "tune fated.toml --search.task.fate fine,lost --monitor val/loss --trials 2 --sampler random --seed 1 --task.fate lost"
        )
    assert status == 0
    assert state_of(Path("runs/fated/tune-1")) == ["FAIL", "COMPLETE", "COMPLETE"]


def test_an_error_of_the_sampler_fails_the_trial_by_name(
    typed: Typed, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the trial would count as killed, and be drawn again for ever."""

    def fails(self: object, *arguments: object) -> float:
        raise ValueError("no value today")

    monkeypatch.setattr(studies.TrialSampler, "sample_independent", fails)
    monkeypatch.setattr(studies.TrialSampler, "infer_relative_search_space", lambda *_: {})
    status, _, err = typed("tune tiny.toml --search.task.lr 0.2:0.3 --monitor val/loss --sampler random")
    assert (status, "the first 3 trials have all failed. Trial 0: ValueError: no value today" in err) == (2, True)


def test_a_page_that_a_full_disk_does_not_take_is_a_warning(
    typed: Typed, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(
        searches, "replace_text", lambda path, *rest, **options: None if path.name != "best.toml" else full()
    )
    with pytest.warns(UserWarning, match="were not written") as told:
        status, out, _ = typed("tune tiny.toml --search.task.lr 0.1:0.3 --monitor val/loss --trials 2")
    assert status == 0
    assert len([one for one in told if "No space left on device" in str(one.message)]) == 1
    assert len(re.findall(r"^trial \d", out, re.MULTILINE)) == 2


def test_a_database_that_does_not_answer_ends_the_search_with_what_to_do(
    typed: Typed, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> int:
        cause = sqlite3.OperationalError("database or disk is full")
        raise studies.optuna.exceptions.StorageInternalError("An exception is raised during the commit.") from cause

    monkeypatch.setattr(studies.TrialStorage, "set_trial_user_attr", full)
    status, _, err = typed("tune tiny.toml --search.task.lr 0.2:0.3 --monitor val/loss")
    assert status == 2
    assert (
        "does not answer: database or disk is full; arclight tune --resume runs/tiny/tune-1 goes on with the search"
        in err
    )


def test_stopping_a_search_without_its_database_gives_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search = a_search(tmp_path, Range("lr", 0, 1))

    def stopped(*_: object) -> None:
        (tmp_path / "search.db").write_bytes(b"damaged" * 1000)
        raise KeyboardInterrupt

    monkeypatch.setattr(searches, "run_trials", stopped)
    with pytest.raises(UsageError, match=r"does not answer: .*file is not a database; arclight tune --resume"):
        searches.run_search(search, {"trials": 3, "timeout": None})


def read_only(search: Search) -> Search:
    """The same search, whose processes may read its database and no more."""
    path = studies.local_database(search.folder).removeprefix("sqlite:///")
    return dataclasses.replace(search, jobs=2, storage=f"sqlite:///file:{path}?mode=ro&uri=true")


def test_processes_that_end_before_their_trial_end_the_search(
    tmp_path: Path, fork_spawned: None, capfd: pytest.CaptureFixture[str]
) -> None:
    search = a_search(tmp_path, Range("task.optimizer.lr", 0.1, 1))
    # two run at a time, and both may end before one is looked at
    with pytest.raises(UsageError, match=r"[34] processes in succession ended before they had begun a trial"):
        run_trials(read_only(search), search.open(), 3, float("inf"), lambda: None)
    assert "readonly database" in capfd.readouterr().err


def test_trials_of_two_machines_with_one_number_are_distinguished(tmp_path: Path, fork_spawned: None) -> None:
    """Processes of containers have low numbers, and many the same."""
    search = a_search(tmp_path, Range("task.optimizer.lr", 0.1, 1))
    study = search.open()
    process = TrialProcess(read_only(search), 0)
    trial = study.ask()
    trial.set_user_attr("process", ["another-host", process.process.pid, ""])
    assert not process.close(study)
    assert study.trials[0].state == studies.RUNNING


def test_a_killed_trial_of_a_search_that_shares_the_database_is_run_by_the_other(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tiny.parent))
    search = dataclasses.replace(
        a_search(tiny.parent, Range("task.lr", 0.1, 1)),
        subject=TunedRun(tiny.read_text()),
        folder=tiny.parent / "tune-1",
    )
    study = search.open()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    study.ask().set_user_attr("process", [studies.this_process()[0], gone.pid, "1"])
    run_trials(search, study, 1, float("inf"), lambda: None)
    assert [one.state for one in study.trials] == [studies.FAILED, studies.COMPLETE], study.trials[1].user_attrs


def test_a_search_whose_first_trials_all_fail_ends_with_their_error(typed: Typed, tiny: Path) -> None:
    status, _, err = typed("tune tiny.toml --search.task.lr 0.1:0.2 --monitor val/losss --trials 9")
    assert status == 2
    assert "the first 3 trials have all failed" in err
    assert "did you mean 'val/loss'?" in err
    assert len(state_of(Path("runs/tiny/tune-1"))) == 3


def test_worse_trials_are_ended_early(typed: Typed, tiny: Path) -> None:
    """Learning rates that are much too small lose against the median of four trials at their first validation."""
    status, _, _ = typed(
        "tune tiny.toml --search.task.lr 0.1:0.2 --monitor val/loss --trials 4 --trainer.max_epochs 2 --storage sqlite:///a.db"
    )
    assert status == 0
    study = studies.open_study("sqlite:///a.db", "tiny", "min")
    study.enqueue_trial({"task.lr": 1e-6})
    search = Search(
        subject=TunedRun(Path("tiny.toml").read_text()), parameters=(Range("task.lr", 1e-6, 0.2),), storage="sqlite:///a.db",
        folder=Path("runs/tiny/tune-1"), study="tiny", monitor="val/loss", mode="min", sampler="tpe", pruner="median", seed=3,
    )  # fmt: skip
    run_trials(search, search.open(), 5, float("inf"), lambda: None)
    last = search.open().trials[-1]
    assert (last.state, last.params) == (studies.PRUNED, {"task.lr": 1e-6})
    assert len(last.intermediate_values) == 1
    assert len(search.open().trials[0].intermediate_values) == 2


def test_a_search_of_another_space_does_not_join_a_study(typed: Typed, tiny: Path) -> None:
    first = "tune tiny.toml --monitor val/loss --trials 1 --storage sqlite:///a.db --search.task.lr"
    assert typed(f"{first} 0.1:0.2")[0] == 0
    status, _, err = typed(f"{first} 0.1:0.3")
    assert status == 2
    assert "--study tiny: the search of this name in the database has another space" in err
    assert not Path("runs/tiny/tune-2").exists()


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "sqlite:///file:a?mode=memory&uri=true"])
def test_databases_in_memory_are_refused(url: str) -> None:
    with pytest.raises(UsageError, match="is forgotten when it is closed"):
        studies.open_study(url, "one", "min")


def test_databases_and_studies_of_others_are_refused(typed: Typed, tiny: Path) -> None:
    with sqlite3.connect("other.db") as database:
        database.execute("create table studies(a int)")
    with pytest.raises(UsageError, match=r"other\.db cannot be opened"):
        studies.open_study("sqlite:///other.db", "one", "min")
    made = studies.optuna.create_study
    made(storage="sqlite:///a.db", study_name="both", directions=["minimize", "maximize"])
    made(storage="sqlite:///a.db", study_name="up", direction="maximize")
    made(storage="sqlite:///a.db", study_name="own").optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=1)
    for name, told in (
        ("both", "has to minimize and maximize"),
        ("up", "has to maximize"),
        ("own", "arclight did not create"),
    ):
        status, _, err = typed(
            f"tune tiny.toml --search.task.lr 0.1:0.2 --monitor val/loss --storage sqlite:///a.db --study {name}"
        )
        assert (status, told in err) == (2, True), err


@pytest.mark.parametrize("settings", ["{}", "[]", "5", "not json"])
def test_a_folder_whose_settings_are_not_of_a_search_is_refused(typed: Typed, tmp_path: Path, settings: str) -> None:
    (tmp_path / "search.json").write_text(settings)
    status, _, err = typed(f"tune --resume {tmp_path}")
    assert (status, "is not a search" in err) == (2, True)


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_processes_train_side_by_side_and_one_that_is_killed_costs_its_trial_only(
    typed: Typed, fated: Path, start: str, request: pytest.FixtureRequest
) -> None:
    if start == "fork":
        request.getfixturevalue("fork_spawned")
    status, out, _ = typed(
        "tune fated.toml --search.task.fate fine,killed --monitor val/loss --trials 3 --jobs 2 --sampler random --seed 5"
    )
    assert status == 0
    folder = Path("runs/fated/tune-1")
    study = studies.open_study(studies.local_database(folder), "tune-1", "min")
    fates = {one.params["task.fate"]: one for one in study.trials}
    assert {name: one.state.name for name, one in fates.items()} == {"fine": "COMPLETE", "killed": "FAIL"}
    assert fates["killed"].user_attrs["error"] == "its process was ended by signal 9"
    assert len(study.trials) == 3
    assert len({one.user_attrs["process"][1] for one in study.trials}) == 3
    assert (folder / "0" / "output.txt").is_file()
    assert "ended by signal 9" in out


def test_without_optuna_the_extra_is_named(typed: Typed, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("study", "trial"):
        monkeypatch.delitem(sys.modules, f"arclight.cli.tune.{name}")
    monkeypatch.setitem(sys.modules, "optuna", None)
    status, _, err = typed("tune tiny.toml --search.task.lr 0.1:0.2 --monitor val/loss")
    assert status == 2
    assert f"optuna is not installed; this feature needs it: {pip_install('tune')}" in err


def test_missing_objectives_and_invalid_searches_are_refused(typed: Typed, tiny: Path) -> None:
    assert "name the value to improve" in typed("tune tiny.toml --search.task.lr 0.1:0.2")[2]
    assert "--mode min or --mode max" in typed("tune tiny.toml --search.task.lr 0.1:0.2 --monitor val/thing")[2]
    assert (
        "--trainer.devices 1" in typed("tune tiny.toml --search.task.lr 1:2 --monitor val/loss --trainer.devices 2")[2]
    )
    assert "there is nothing to search" in typed("tune tiny.toml --monitor val/loss")[2]
    assert "need a time above 0" in typed("tune tiny.toml --search.task.lr 1:2 --monitor val/loss --timeout soon")[2]
    assert not Path("runs").exists()


# ----------------------------------------------------------------------------------------------------------- the guide


@pytest.mark.slow
def test_the_guide_s_search_runs_as_it_stands(typed: Typed, folder: Path) -> None:
    (folder / "spirals.py").write_text(block("python", "docs/tune.md"))
    for line in block("sh", "docs/tune.md").splitlines():
        status, _, err = typed(
            line.removeprefix("arclight ") + " --trainer.enable_progress_bar false" * ("tune --" not in line)
        )
        assert status == 0, err
    assert state_of(Path("runs/spirals/tune-1")).__len__() == 6
    assert Path("runs/spirals/1/checkpoints").is_dir()
    sys.modules.pop("spirals", None)


def test_the_guide_s_other_searches_are_over_fields_that_there_are() -> None:
    commands = re.findall(r"^arclight tune (?:detect|lm).*$", (ROOT / "docs/tune.md").read_text(), re.MULTILINE)
    assert len(commands) == 3
    for line in commands:
        recipe, _ = read_recipe(tune_parser(False), shlex.split(line)[2:])
        found = parameters(TunedRun((ROOT / f"recipes/{recipe.name}.toml").read_text()), recipe.search)
        assert found
        assert recipe.checkpoint.monitor
