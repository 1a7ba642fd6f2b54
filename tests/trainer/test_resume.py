"""A run killed at any step and resumed ends with the same bits as one that was never killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests import warm
from tests.trainer.same import assert_same

from arclight import checkpoint

ENTRIES = (
    *("model", "ema", "progress", "optimizers", "schedulers", "precision"),
    *("rng", "logged", "window", "data", "metrics", "callbacks"),
)
SCRIPT = Path(__file__).parent / "resume_script.py"


def run(root: Path, *arguments: str, killed: bool = False, ranks: int = 1) -> None:
    words = (SCRIPT, root, *arguments)
    for process in [warm.run(*words, timeout=300)] if ranks == 1 else warm.run_ranks(ranks, *words, timeout=300):
        assert process.returncode == (-9 if killed else 0), process.stderr


def end_of(root: Path) -> tuple[dict, bytes]:
    state = checkpoint.load(root / "end.ckpt")
    return state, (root / "run" / "1" / "metrics.csv").read_bytes()


def compare(whole: Path, resumed: Path) -> None:
    (left, left_rows), (right, right_rows) = end_of(whole), end_of(resumed)
    assert left.keys() == right.keys()
    for entry in ENTRIES:
        assert_same(without(left[entry], whole), without(right[entry], resumed), entry)
    assert left_rows == right_rows


def without(value: Any, root: Path) -> Any:
    """The same with paths counted from ``root``, which differs from run to run."""
    if isinstance(value, dict):
        return {without(key, root): without(item, root) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(without(item, root) for item in value)
    return value.replace(str(root.resolve()), "ROOT") if isinstance(value, str) else value


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("whole")
    run(root)
    return root


# Steps 1 to 10 are the first epoch: before the first checkpoint, mid-epoch, just before and at an epoch's end, after it.
@pytest.mark.parametrize("step", [5, *(pytest.param(step, marks=pytest.mark.slow) for step in (1, 10, 26))])
def test_killed_at_a_step(whole: Path, tmp_path: Path, step: int) -> None:
    run(tmp_path, "--die-at-step", str(step), killed=True)
    run(tmp_path, "--resume")
    if step == 1:  # nothing had been saved: the second run is a new one from the start
        left, right = checkpoint.load(whole / "end.ckpt"), checkpoint.load(tmp_path / "end.ckpt")
        for entry in ENTRIES:
            if entry != "callbacks":  # which name the files of another run
                assert_same(left[entry], right[entry], entry)
    else:
        compare(whole, tmp_path)


def test_killed_twice_with_worker_processes(whole: Path, tmp_path: Path) -> None:
    """Workers load ahead of training; and what they load does not depend on how many they are."""
    run(tmp_path, "--workers", "2", "--die-at-step", "7", killed=True)
    run(tmp_path, "--workers", "2", "--resume", "--die-at-step", "18", killed=True)
    run(tmp_path, "--workers", "1", "--resume")
    compare(whole, tmp_path)


def test_killed_while_accumulating(tmp_path: Path) -> None:
    run(tmp_path / "whole", "--accumulate", "3")
    run(tmp_path / "killed", "--accumulate", "3", "--die-at-step", "7", killed=True)
    run(tmp_path / "killed", "--accumulate", "3", "--resume")
    compare(tmp_path / "whole", tmp_path / "killed")


def test_killed_in_validation(whole: Path, tmp_path: Path) -> None:
    """The second validation is under way: the newest checkpoint is older, or says that validation is still to come."""
    run(tmp_path, "--die-in-validation", "5", killed=True)
    run(tmp_path, "--resume")
    compare(whole, tmp_path)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_two_processes_that_read_several_loaders(tmp_path: Path, workers: int) -> None:
    arguments = ("--devices", "2", "--combined", "--workers", str(workers))
    run(tmp_path / "whole", *arguments, ranks=2)
    run(tmp_path / "killed", *arguments, "--die-at-step", "7", killed=True, ranks=2)
    run(tmp_path / "killed", *arguments, "--resume", ranks=2)
    compare(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    run(tmp_path / "whole", "--devices", "2", ranks=2)
    state = checkpoint.load(tmp_path / "whole" / "end.ckpt")
    assert len(state["rng"]) == 2
    saved = sorted((tmp_path / "whole" / "run" / "1" / "checkpoints").glob("*step=6*"))
    assert saved, "a checkpoint after step 6"
    for path in (tmp_path / "whole" / "run" / "1" / "checkpoints").iterdir():
        assert not checkpoint.verify(path)
