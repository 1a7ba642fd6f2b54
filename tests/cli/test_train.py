"""train, validate and test, on a person's own task."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from arclight.checkpoint import find_last
from arclight.checkpoint import load as load_checkpoint
from arclight.cli.schema import Recipe
from arclight.fabric.precision import names
from arclight.recipe import read

Typed = Callable[[str], tuple[int, str, str]]


def weights(run: Path) -> np.ndarray:
    last = find_last(run / "checkpoints")
    assert last is not None
    return np.concatenate([value.numpy().ravel() for value in load_checkpoint(last)["model"].values()])


@pytest.fixture
def trained(typed: Typed, tiny: Path) -> Path:
    status, out, err = typed(f"train {tiny.name} --task.lr 0.2")
    assert (status, err) == (0, "")
    assert "The run is in runs/tiny/1" in out
    return Path("runs/tiny/1")


def test_a_run_keeps_what_repeats_it(trained: Path, typed: Typed) -> None:
    recipe = read(Recipe, trained / "recipe.toml")
    assert (recipe.seed, recipe.task.lr, recipe.trainer.max_epochs) == (3, 0.2, 3)
    assert json.loads((trained / "environment.json").read_text())["torch"]
    assert (trained / "metrics.csv").is_file()

    status, _, _ = typed(f"train {trained}/recipe.toml")
    assert status == 0
    again = Path("runs/tiny/2")
    assert np.array_equal(weights(again), weights(trained))
    assert (again / "recipe.toml").read_text().splitlines()[2:] == (trained / "recipe.toml").read_text().splitlines()[
        2:
    ]


def test_another_seed_is_another_run(trained: Path, typed: Typed) -> None:
    typed(f"train {trained}/recipe.toml --seed 4")
    assert not np.array_equal(weights(Path("runs/tiny/2")), weights(trained))


@pytest.mark.parametrize(
    "place",
    [
        "last",
        *(
            pytest.param(place, marks=pytest.mark.slow)
            for place in ("runs/tiny/1", "runs/tiny/1/checkpoints/last.ckpt")
        ),
    ],
)
def test_resuming_goes_on_in_the_same_run(trained: Path, typed: Typed, place: str) -> None:
    typed("train tiny.toml --task.lr 0.2 --trainer.max_epochs 5 --name whole")
    status, _, err = typed(f"train tiny.toml --task.lr 0.2 --trainer.max_epochs 5 --resume {place}")
    assert (status, err) == (0, "")
    assert not Path("runs/tiny/2").exists()
    assert np.array_equal(weights(trained), weights(Path("runs/whole/1")))


@pytest.mark.parametrize("verb", ["validate", "test"])
def test_a_checkpoint_is_measured(trained: Path, typed: Typed, verb: str) -> None:
    status, out, err = typed(f"{verb} {trained}/recipe.toml --json values.json")
    assert (status, err) == (0, "")
    name = {"validate": "val/loss", "test": "test/loss"}[verb]
    assert name in out
    (values,) = json.loads(Path("values.json").read_text())
    slope, offset = weights(trained)
    x = np.arange(8) / 8
    assert values[name] == pytest.approx(np.mean((slope * x + offset - 2 * x) ** 2), rel=1e-5)
    assert sorted(path.name for path in Path("runs/tiny").iterdir()) == ["1"]


def test_mistakes_in_a_run_are_reported_without_a_traceback(typed: Typed, tiny: Path) -> None:
    said = [
        ("train tiny.toml --resume nowhere", "--resume: nowhere is neither a run folder nor a checkpoint"),
        ("train tiny.toml --task tiny_task:Wrong", "task: lr = 0.1 is too small to learn"),
        ("train tiny.toml --task tiny_task:NotATask", "Recipe: NotATask has no method build()"),
        ("train tiny.toml --trainer.accumulate_grad_batches 0", "--trainer.accumulate_grad_batches: need int >= 1"),
        ("validate tiny.toml", "name a checkpoint with --checkpoint, or give a run folder instead"),
        ("validate tiny.toml --checkpoint nowhere", "ckpt_path: nowhere does not exist"),
    ]
    for line, message in said:
        status, _, err = typed(line)
        assert status == 2, line
        assert err.startswith(f"arclight: {message}"), err
    assert not Path("runs").exists()


def test_a_run_records_what_was_measured_and_resumes_with_it(
    tiny: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed("train tiny.toml --task.lr 0.2 --trainer.max_epochs 5 --name whole --trainer.precision bf16-mixed")
    monkeypatch.setattr(names, "faster_precision", lambda device: "bf16-mixed")
    status, out, err = typed("train tiny.toml --task.lr 0.2 --trainer.precision auto")
    assert (status, err) == (0, "")
    assert out.count("measured: precision = bf16-mixed\n") == 1
    run = Path("runs/tiny/1")
    assert json.loads((run / "environment.json").read_text())["measured"] == {"precision": "bf16-mixed"}
    assert "measured: precision = bf16-mixed\n" in (run / "log.txt").read_text()
    first = (run / "recipe.toml").read_text().splitlines()[0]
    assert first == f"# arclight train {run}/recipe.toml --trainer.precision bf16-mixed repeats this run."

    monkeypatch.setattr(names, "faster_precision", lambda device: "32-true")  # as under load
    status, out, err = typed(
        "train tiny.toml --task.lr 0.2 --trainer.max_epochs 5 --trainer.precision auto --resume last"
    )
    assert (status, err) == (0, "")
    assert "measured: precision = bf16-mixed\n" in out
    assert json.loads((run / "environment.json").read_text())["measured"] == {"precision": "bf16-mixed"}
    assert np.array_equal(weights(run), weights(Path("runs/whole/1")))


def test_a_run_without_measured_settings_records_none(trained: Path) -> None:
    assert "measured" not in json.loads((trained / "environment.json").read_text())
    assert (trained / "recipe.toml").read_text().splitlines()[0].endswith("/recipe.toml repeats this run.")
