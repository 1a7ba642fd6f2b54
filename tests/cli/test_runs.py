"""Run folders on the command line: what they are accepted for, which of their checkpoints is taken, what resuming finds."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from arclight.checkpoint import load as load_checkpoint
from arclight.cli.arguments import UsageError
from arclight.cli.runs import best_checkpoint, described, newest_checkpoint
from arclight.trainer.run import RunFolder

Typed = Callable[[str], tuple[int, str, str]]
RANKED = "train tiny.toml --checkpoint.monitor val/loss --checkpoint.mode max --checkpoint.save_top_k"


def checkpoints(run: str = "runs/tiny/1") -> list[str]:
    return sorted(path.name for path in Path(run, "checkpoints").iterdir())


@pytest.fixture
def ranked(typed: Typed, tiny: Path) -> Path:
    """A run of three epochs whose loss only falls, so that the first of three kept checkpoints is its best by mode max."""
    status, out, err = typed(f"{RANKED} 3")
    assert (status, err) == (0, "")
    assert "The best checkpoint is runs/tiny/1/checkpoints/epoch=0-step=4.ckpt" in out
    return Path("runs/tiny/1")


def test_the_best_checkpoint_is_the_one_that_the_run_recorded(ranked: Path) -> None:
    assert checkpoints() == ["epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt", "epoch=2-step=12.ckpt", "last.ckpt"]
    os.utime(ranked / "checkpoints" / "epoch=1-step=8.ckpt")  # the newest file
    assert best_checkpoint(ranked).name == "epoch=0-step=4.ckpt"
    assert described(best_checkpoint(ranked)).endswith("epoch=0-step=4.ckpt, the best by val/loss")


def test_a_copied_run_has_its_own_best_checkpoint(ranked: Path) -> None:
    for place, remove in (("beside", False), ("elsewhere", True)):
        shutil.copytree(ranked, place)
        if remove:
            shutil.rmtree(ranked)
        assert best_checkpoint(Path(place)) == Path(place) / "checkpoints" / "epoch=0-step=4.ckpt"


def test_a_best_checkpoint_that_was_removed_is_missed(ranked: Path) -> None:
    shutil.rmtree(ranked / "checkpoints" / "epoch=0-step=4.ckpt")
    with pytest.raises(UsageError, match=r"recorded epoch=0-step=4\.ckpt as its best checkpoint, which is not there"):
        best_checkpoint(ranked)


def test_a_run_that_ranks_nothing_has_a_newest_checkpoint(typed: Typed, tiny: Path) -> None:
    _, out, _ = typed("train tiny.toml")
    assert "The newest checkpoint is runs/tiny/1/checkpoints/epoch=2-step=12.ckpt" in out
    run = Path("runs/tiny/1")
    assert load_checkpoint(best_checkpoint(run))["progress"] == load_checkpoint(newest_checkpoint(run))["progress"]
    assert described(newest_checkpoint(run)).endswith("the newest")


def test_saves_between_validations_come_beside_those_after_them(typed: Typed, tiny: Path) -> None:
    line = "--trainer.val_check_interval 5 --trainer.check_val_every_n_epoch none --trainer.max_steps 14"
    line += " --trainer.max_epochs none --checkpoint.monitor val/loss"
    _, out, _ = typed(f"train tiny.toml {line} --checkpoint.save_top_k -1 --checkpoint.every_n_steps 4")
    saved = {int(step) for step in re.findall(r"step=(\d+)", " ".join(checkpoints()))}
    assert saved == {4, 5, 8, 10, 12}
    assert "The best checkpoint is" in out
    assert "step=10.ckpt" in out  # the loss only falls, and the validation after step 10 is the last one
    _, out, _ = typed(f"train tiny.toml {line} --name few --checkpoint.every_n_steps 4")
    assert [name for name in checkpoints("runs/few/1") if name.startswith("step")] == ["step=12.ckpt"]
    assert best_checkpoint(Path("runs/few/1")).name.endswith("step=10.ckpt")


def test_resuming_what_is_not_there_is_an_error(typed: Typed, tiny: Path) -> None:
    status, out, err = typed("train tiny.toml --resume last")
    assert (status, out) == (2, "")
    assert err == "arclight: --resume last: there is no run in runs/tiny: leave --resume out to start one\n"
    assert not Path("runs").exists()
    RunFolder("runs", "tiny")
    status, _, err = typed("train tiny.toml --resume last")
    assert status == 2
    assert err.startswith(
        "arclight: --resume last: runs/tiny/1, the newest run, was stopped before its first checkpoint"
    )
    assert not Path("runs/tiny/2").exists()


def test_a_development_run_leaves_nothing_and_says_so(typed: Typed, tiny: Path) -> None:
    status, out, _ = typed("train tiny.toml --trainer.fast_dev_run 1")
    assert status == 0
    assert out.endswith("It wrote nothing\n")
    assert not Path("runs").exists()


def test_only_a_resumed_run_is_called_resumed(typed: Typed, tiny: Path) -> None:
    typed("train tiny.toml")
    environment = json.loads(Path("runs/tiny/1/environment.json").read_text())
    assert "resumed" not in environment
    assert environment["command"]
    assert ">resumed<" not in Path("runs/tiny/1/report.html").read_text()
    typed("train tiny.toml --trainer.max_epochs 4 --resume last")
    again = json.loads(Path("runs/tiny/1/environment.json").read_text())
    assert again["started"] == environment["started"]
    assert again["resumed"]


@pytest.mark.parametrize("verb", ["validate", "test"])
@pytest.mark.parametrize("place", ["runs/tiny/1", "runs/tiny/1/recipe.toml"])
def test_a_run_folder_stands_for_its_recipe_and_its_newest_checkpoint(
    ranked: Path, typed: Typed, verb: str, place: str
) -> None:
    status, out, err = typed(f"{verb} {place}")
    assert (status, err) == (0, "")
    assert "checkpoint runs/tiny/1/checkpoints/" in out
    assert ", the newest\n" in out


def test_a_run_folder_stands_for_its_best_checkpoint(ranked: Path, typed: Typed) -> None:
    _, out, _ = typed("validate tiny.toml --checkpoint runs/tiny/1")
    assert "checkpoint runs/tiny/1/checkpoints/epoch=0-step=4.ckpt, the best by val/loss\n" in out


@pytest.mark.parametrize("line", ["runs/tiny/1 --resume last", "--resume runs/tiny/1", "--resume=runs/tiny/1"])
def test_a_run_is_resumed_by_its_folder_alone(ranked: Path, typed: Typed, line: str) -> None:
    typed("train tiny.toml")  # a newer run of this name
    status, out, err = typed(f"train {line} --trainer.max_epochs 4")
    assert (status, err) == (0, "")
    assert "The run is in runs/tiny/1\n" in out
    assert load_checkpoint("runs/tiny/1/checkpoints/last.ckpt")["progress"]["global_step"] == 16


def test_another_kind_of_file_is_no_recipe_to_be_meant(typed: Typed, folder: Path, tiny: Path) -> None:
    (folder / "pyproject.toml").write_text('[project]\nname = "somebodys"\n')
    _, _, err = typed("train project.toml")
    assert err == "arclight: project.toml cannot be read: No such file or directory\n"
    assert typed("train tinny.toml")[2] == "arclight: there is no file tinny.toml; did you mean tiny.toml?\n"
    _, _, err = typed("train detect-qrs")
    assert err == "arclight: there is no file detect-qrs; did you mean detect-qris, which comes with Arclight?\n"
    _, _, err = typed("federate fed-lmm")
    assert "did you mean fed-lm" in err


@pytest.mark.parametrize("name", ["lm-debug", "lm-debug.toml", "recipes/lm-debug.toml"])
def test_recipes_that_come_with_arclight_are_found_anywhere(typed: Typed, name: str) -> None:
    _, _, err = typed(f"train {name} --trainer.max_steps many")
    assert err.startswith("arclight: --trainer.max_steps: need "), err
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text("name = 3\n")  # a file of one's own goes before
    _, _, err = typed(f"train {name}")
    assert "name: need text, got 3" in err or "is a .toml or .yaml file" in err


def test_lines_of_the_demo_are_whole_without_a_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from arclight.cli.demo import Demo
    from arclight.cli.style import console_of

    place = "a-long-name/" * 30
    Demo(folder, scenes=1, epochs=1, seed=0, console=console_of()).say(f"program in [{place}]")
    assert capsys.readouterr().out == f"0:00  program in [{place}]\n"
