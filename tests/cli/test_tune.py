"""arclight tune: ranges, trials, what is kept of them, and how a search goes on after it was stopped."""

from __future__ import annotations

import json
import os
import re
import shlex
import sqlite3
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.test_readme import ROOT, block

from arclight._installed import pip_install
from arclight.cli.arguments import UsageError, read_recipe
from arclight.cli.schema import Recipe
from arclight.cli.tune import study as studies
from arclight.cli.tune.search import run_trials, tune_parser
from arclight.cli.tune.space import Choice, Parameter, Range, Subject, flags_of, parameters, start
from arclight.cli.tune.trial import Search
from arclight.recipe import read
from arclight.trainer.loggers.csv_logger import read_metrics

Typed = Callable[[str], tuple[int, str, str]]
LM = (ROOT / "recipes/lm-debug.toml").read_text()


def space(table: dict[str, object]) -> dict[str, Parameter]:
    return {one.field: one for one in parameters(Subject(LM), table)}


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
    run = Subject(LM).read(flags_of(list(found.values()), {**values, "checkpoint.save_last": "false"}))
    assert (run.task.optimizer.lr, run.trainer.max_steps, run.trainer.gradient_clip_val) == (0.002, 150, 1.0)
    assert run.checkpoint.save_last is False


def test_the_recipe_s_own_values_come_first_where_they_are_in_the_space() -> None:
    run = Subject(LM).read()
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
    ],
)  # fmt: skip
def test_a_range_that_cannot_be_is_refused_before_anything_is_trained(field: str, value: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        space({field: value})


def test_a_kind_that_lacks_a_searched_field_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--search\.task\.optimizer\.momentum is not a field of AdamW"):
        space({"task.optimizer": {"kind": "sgd,adamw", "momentum": "0.8:0.95"}})


def test_a_recipe_holds_its_ranges_and_training_leaves_them_alone() -> None:
    text = LM + '[search.task.optimizer]\nlr = "1e-4:1e-2:log"\nkind = ["adamw", "sgd"]\n'
    recipe = read(Recipe, tomllib.loads(text), ["--search.trainer.max_steps", "10:20"])
    assert recipe.search == {
        "task": {"optimizer": {"lr": "1e-4:1e-2:log", "kind": ["adamw", "sgd"]}}, "trainer": {"max_steps": "10:20"},
    }  # fmt: skip
    assert Subject(text).read().search is None


# ---------------------------------------------------------------------------------------------------------- the trials


def a_search(folder: Path, *found: Parameter, **settings: object) -> Search:
    given = {"sampler": "tpe", "pruner": "none", "seed": 0, "monitor": "val/loss", "mode": "min"}
    storage = studies.local_database(folder)
    return Search(
        subject=Subject(LM), parameters=found, folder=folder, storage=storage, study="one", **{**given, **settings}
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


def test_passwords_are_not_kept() -> None:
    assert studies.without_password("mysql://me:secret@host:3306/db") == "mysql://me:***@host:3306/db"
    assert studies.without_password("sqlite:////tmp/a.db") == "sqlite:////tmp/a.db"
    assert studies.without_password("postgresql://me@host/db") == "postgresql://me@host/db"


# --------------------------------------------------------------------------------------------------------- the command

SLOW_TASK = """
import dataclasses
import os
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
    assert typed("tune --resume runs/tiny")[2].startswith("arclight: --resume runs/tiny is no search")


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
        subject=Subject(Path("tiny.toml").read_text()), parameters=(Range("task.lr", 1e-6, 0.2),), storage="sqlite:///a.db",
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
        ("own", "no search of arclight"),
    ):
        status, _, err = typed(
            f"tune tiny.toml --search.task.lr 0.1:0.2 --monitor val/loss --storage sqlite:///a.db --study {name}"
        )
        assert (status, told in err) == (2, True), err


@pytest.mark.parametrize("settings", ["{}", "[]", "5", "not json"])
def test_a_folder_whose_settings_are_not_of_a_search_is_refused(typed: Typed, tmp_path: Path, settings: str) -> None:
    (tmp_path / "search.json").write_text(settings)
    status, _, err = typed(f"tune --resume {tmp_path}")
    assert (status, "is no search" in err) == (2, True)


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


def test_what_names_no_objective_or_several_processes_is_refused(typed: Typed, tiny: Path) -> None:
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
        found = parameters(Subject((ROOT / f"recipes/{recipe.name}.toml").read_text()), recipe.search)
        assert found
        assert recipe.checkpoint.monitor
