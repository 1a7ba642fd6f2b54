"""Run folders on the command line: what they are accepted for, which of their checkpoints is taken, what resuming finds."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from arclight.checkpoint import load as load_checkpoint
from arclight.cli.arguments import UsageError
from arclight.cli.command import sentence
from arclight.cli.interruption import Interruption
from arclight.cli.runs import best_checkpoint, checkpoint_note, newest_checkpoint, step_of
from arclight.trainer.loop.run_state import RunState
from arclight.trainer.run.folder import RunFolder

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
    assert checkpoint_note(best_checkpoint(ranked)).endswith("epoch=0-step=4.ckpt, the best by val/loss")


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


def test_a_run_without_checkpoints_is_reported(typed: Typed, folder: Path) -> None:
    run = folder / "runs" / "tiny" / "1"
    run.mkdir(parents=True)
    (run / "recipe.toml").write_text('name = "tiny"\n')
    for verb in ("export", "quantize"):
        status, _, err = typed(f"{verb} {run} --out a.onnx")
        assert (status, err) == (
            2, f"arclight: {run} has no checkpoint: it failed, or was stopped, before it saved one\n",
        )  # fmt: skip


def test_a_run_without_validation_names_its_newest_checkpoint(typed: Typed, tiny: Path) -> None:
    with pytest.warns(UserWarning, match=r"Train for longer or validate more often: check_val_every_n_epoch=5 and"):
        _, out, _ = typed(f"{RANKED} 1 --trainer.check_val_every_n_epoch 5")
    assert "The newest checkpoint is runs/tiny/1/checkpoints/last.ckpt\n" in out


def test_a_run_that_ranks_nothing_has_a_newest_checkpoint(typed: Typed, tiny: Path) -> None:
    _, out, _ = typed("train tiny.toml")
    assert "The newest checkpoint is runs/tiny/1/checkpoints/epoch=2-step=12.ckpt" in out
    run = Path("runs/tiny/1")
    assert load_checkpoint(best_checkpoint(run))["progress"] == load_checkpoint(newest_checkpoint(run))["progress"]
    assert checkpoint_note(newest_checkpoint(run)).endswith("the newest")


def test_a_run_that_ranks_nothing_is_opened_at_its_newest_step(typed: Typed, tiny: Path) -> None:
    line = "--trainer.val_check_interval 5 --trainer.check_val_every_n_epoch none --trainer.max_steps 12"
    line += " --trainer.max_epochs none --checkpoint.every_n_steps 4"
    _, out, _ = typed(
        f"train tiny.toml {line}"
    )  # saved after the validation of step 10, every fourth step, and at the end
    newest = "runs/tiny/1/checkpoints/last.ckpt"
    assert f"The newest checkpoint is {newest}\n" in out
    assert {"epoch=2-step=10.ckpt", "step=12.ckpt"} <= set(checkpoints())
    assert step_of(best_checkpoint(Path("runs/tiny/1"))) == 12
    _, out, _ = typed(f"train tiny.toml {line} --checkpoint.save_last false")
    assert "The newest checkpoint is runs/tiny/2/checkpoints/step=12.ckpt\n" in out


def test_steps_are_saved_where_no_best_checkpoint_is_kept(typed: Typed, tiny: Path) -> None:
    typed("train tiny.toml --trainer.max_steps 10 --checkpoint.save_top_k 0 --checkpoint.every_n_steps 4")
    assert checkpoints() == ["last.ckpt", "step=8.ckpt"]


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


def test_a_development_run_leaves_no_files_with_a_note(typed: Typed, tiny: Path) -> None:
    status, out, _ = typed("train tiny.toml --trainer.fast_dev_run 1")
    assert status == 0
    assert out.endswith("It wrote nothing\n")
    assert not Path("runs").exists()


def test_resuming_a_finished_run_reports_nothing_left_to_train(typed: Typed, tiny: Path) -> None:
    typed("train tiny.toml --trainer.max_steps 4")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that no validation ran is no news
        _, _, err = typed("train runs/tiny/1 --resume last")
    assert "arclight: nothing is left to train: " in err
    assert "max_steps=4; raise them" in err


def test_a_damaged_recipe_of_the_resumed_run_is_written_again(typed: Typed, tiny: Path) -> None:
    typed("train tiny.toml --trainer.max_steps 2")
    for damaged in (b"[task", b"\xff\xfe"):
        Path("runs/tiny/1/recipe.toml").write_bytes(damaged)
        assert typed("train tiny.toml --trainer.max_steps 4 --resume runs/tiny/1")[0] == 0
        assert "tiny_task:Fit" in Path("runs/tiny/1/recipe.toml").read_text()


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
def test_a_run_folder_stands_for_its_recipe_and_its_best_checkpoint(
    ranked: Path, typed: Typed, verb: str, place: str
) -> None:
    status, out, err = typed(f"{verb} {place}")
    assert (status, err) == (0, "")
    assert "checkpoint runs/tiny/1/checkpoints/epoch=0-step=4.ckpt, the best by val/loss\n" in out


def test_checkpoint_verbs_take_the_best_checkpoint_of_a_run_folder(ranked: Path, typed: Typed) -> None:
    best = best_checkpoint(ranked).name
    status, out, _ = typed("checkpoint verify runs/tiny/1")
    assert (status, f"{best} is sound" in out) == (0, True)
    assert json.loads(typed("checkpoint inspect runs/tiny/1 --json")[1])["step"] == 4
    assert typed("checkpoint convert runs/tiny/1 best.safetensors")[0] == 0
    assert Path("best.safetensors").is_file()


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
    assert ("name: need text, got 3" if name.endswith(".toml") else "is a .toml or .yaml file") in err


def test_lines_of_the_demo_are_whole_without_a_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from arclight.cli.commands.demo import Demo
    from arclight.cli.style import console_of

    place = "a-long-name/" * 30
    Demo(folder, scenes=1, epochs=1, seed=0, console=console_of()).print_line(f"program in [{place}]")
    assert re.fullmatch(r"\d:\d\d  " + re.escape(f"program in [{place}]\n"), capsys.readouterr().out)


def test_a_run_of_another_model_is_refused_in_one_sentence(ranked: Path, typed: Typed, folder: Path) -> None:
    text = (folder / "tiny_task.py").read_text()
    (folder / "wide_task.py").write_text(
        text.replace("torch.nn.Linear(1, 1)", "torch.nn.Sequential(torch.nn.Linear(1, 1))")
    )
    status, _, err = typed("train tiny.toml --task wide_task:Fit --resume runs/tiny/1")
    assert status == 2
    assert err.count("\n") == 1
    assert err == (
        "arclight: the weights do not fit Line: the checkpoint lacks 2 tensors, such as layer.0.weight; the model has no "
        "place for 2 tensors, such as layer.weight. Give the settings that they were trained with\n"
    )
    (folder / "tall_task.py").write_text(text.replace("torch.nn.Linear(1, 1)", "torch.nn.Linear(1, 2)"))
    _, _, err = typed("train tiny.toml --task tall_task:Fit --resume runs/tiny/1")
    assert (
        "Line: 2 tensors have another shape, such as layer.weight: (1, 1), where the model has (2, 1). Give" in err
    ), err


def test_weights_that_cannot_be_copied_are_reported_in_one_line() -> None:
    error = (
        "Error(s) in loading state_dict for Line:\n\tWhile copying the parameter named layer, an exception occurred."
    )
    assert sentence(RuntimeError(f"no fit: {error}")) == (
        "no fit: While copying the parameter named layer, an exception occurred."
    )


def test_a_run_of_another_task_is_refused_before_anything_is_built(ranked: Path, typed: Typed) -> None:
    (ranked / "recipe.toml").write_text('name = "tiny"\n[task]\nkind = "language"\n')
    status, _, err = typed("train detect-qris --resume runs/tiny/1")
    assert status == 2
    assert err.startswith(
        "arclight: --resume: runs/tiny/1 is a run of task.kind = language, and this recipe's is detection"
    )


def test_unwritable_outputs_are_refused_before_the_work(
    ranked: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: usual(path, mode) and not str(path).endswith("closed"))
    monkeypatch.setattr("arclight.cli.commands.train.build_task", lambda _: pytest.fail("the task was built"))
    Path("closed").mkdir()
    Path("file").touch()
    for line, said in (
        ("train tiny.toml --root closed/runs", "root closed/runs/tiny: "),
        ("train tiny.toml --root file/runs", "root file/runs/tiny: "),
        ("export runs/tiny/1 --out closed/p.onnx", "--out closed/p.onnx: "),
        ("quantize runs/tiny/1 --out closed/p.onnx", "--out closed/p.onnx: "),
    ):
        status, _, err = typed(line)
        assert (status, err.count("\n")) == (2, 1), err
        assert err.startswith(f"arclight: {said}"), err


def test_places_that_are_not_written_need_not_be_writable(
    ranked: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: usual(path, mode) and not str(path).endswith("closed"))
    Path("closed").mkdir()
    for line in ("--trainer.fast_dev_run 1", "--resume runs/tiny/1 --trainer.max_epochs 4"):
        assert typed(f"train tiny.toml --root closed/runs {line}")[::2] == (0, "")


def test_a_read_only_disk_is_no_fault_of_ours(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(_: list[str]) -> None:
        raise OSError(errno.EROFS, "Read-only file system", "/mnt/runs")

    monkeypatch.setattr("arclight.cli.commands.doctor.doctor", read_only)
    assert typed("doctor") == (
        2, "", "arclight: /mnt/runs: Read-only file system; name a place that can be written to\n"
    )  # fmt: skip


@pytest.mark.parametrize("verb", ["export", "quantize"])
def test_a_program_is_called_what_it_is(ranked: Path, typed: Typed, verb: str) -> None:
    status, _, err = typed(f"{verb} runs/tiny/1 --out mine.pt")
    assert (status, err) == (
        2,
        "arclight: --out mine.pt: a program is an ONNX file or a folder; call it mine.onnx or mine\n",
    )
    (ranked / "tokenizer").mkdir()  # now it looks like a language model's
    status, _, err = typed(f"{verb} runs/tiny/1 --out mine.pt")
    assert status == 2
    assert err.startswith("arclight: --out mine.pt: "), err
    assert not Path("mine.pt").exists()


def test_results_have_headings(ranked: Path, typed: Typed) -> None:
    _, out, _ = typed("validate runs/tiny/1")
    header = next(line for line in out.splitlines() if "metric" in line)
    assert header.replace("┃", " ").split() == ["metric", "value"]


def test_a_check_of_data_looks_at_all_splits(typed: Typed) -> None:
    pytest.importorskip("cv2")
    typed("data qris --out photos --count 6 --seed 5 --size 160")
    description = Path("photos/data.yaml")
    description.write_text(description.read_text() + "\ntest: images/none\n")
    label = next(Path("photos/labels/val").glob("*.txt"))
    label.write_text("0 0.5 0.5 nonsense 0.1\n" + label.read_text())
    status, out, err = typed("data check photos/data.yaml --json report.json")
    assert (status, err) == (1, "")
    assert "1 class (" in out
    assert f"{label.name}:1" in out
    assert "test: " in out
    assert "images/none does not exist" in out
    assert set(json.loads(Path("report.json").read_text())) == {"train", "val", "test"}


@pytest.fixture
def interrupted(tiny: Path, folder: Path) -> None:
    """The fifth step of a run is interrupted, as by ctrl-C in the middle of it; a resumed run goes on."""
    task = folder / "tiny_task.py"
    lines = "        if self.global_step == 4:\n            for _ in range(self.times):\n                signal.raise_signal(signal.SIGINT)\n"
    text = task.read_text().replace("        loss = (self", f"{lines}        loss = (self", 1)
    task.write_text(
        "import signal\n" + text.replace("class Line(al.Module):\n", "class Line(al.Module):\n    times = 1\n\n")
    )


@pytest.mark.usefixtures("interrupted")
def test_an_interrupted_run_saves_a_whole_step_and_prints_how_to_resume(typed: Typed) -> None:
    before = signal.getsignal(signal.SIGINT)
    status, _, err = typed("train tiny.toml")
    assert status == 130
    assert not any(isinstance(handler, logging.FileHandler) for handler in logging.getLogger("arclight").handlers)
    assert signal.getsignal(signal.SIGINT) is before
    assert "arclight: saving after this step; ctrl-C again ends at once\n" in err
    assert err.splitlines()[-1].startswith("arclight: interrupted: runs/tiny/1/checkpoints/")
    assert err.endswith(" holds step 5; arclight train --resume runs/tiny/1 resumes from there\n")
    status, _, err = typed("train --resume runs/tiny/1")
    assert (status, err) == (0, "")
    sys.modules["tiny_task"].Line.times = 0
    typed("train tiny.toml --name whole")
    ends = [load_checkpoint(newest_checkpoint(Path(run)))["model"] for run in ("runs/tiny/1", "runs/whole/1")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[1])


def test_an_interruption_is_reported_once_and_not_by_data_workers(capfd: pytest.CaptureFixture[str]) -> None:
    interruption = Interruption()
    state = RunState()
    trainer: Any = SimpleNamespace(is_global_zero=True, run_state=state)
    interruption.on_train_start(trainer, cast(Any, None))
    try:
        if (child := os.fork()) == 0:  # as a loader's worker is made, which ctrl-C reaches as well
            try:
                signal.raise_signal(signal.SIGINT)
                sys.stderr.flush()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert capfd.readouterr().err == ""
        signal.raise_signal(signal.SIGINT)
    finally:
        interruption.teardown(trainer, cast(Any, None), "fit")
    assert capfd.readouterr().err.count("saving after this step") == 1
    assert state.should_stop


@pytest.mark.usefixtures("interrupted")
def test_a_second_interruption_ends_a_run_at_once(typed: Typed, folder: Path) -> None:
    task = folder / "tiny_task.py"
    task.write_text(task.read_text().replace("times = 1", "times = 2").replace("global_step == 4", "global_step == 2"))
    status, _, err = typed("train tiny.toml")
    assert (status, err.splitlines()[-1]) == (130, "arclight: interrupted: there is no checkpoint yet to resume from")


def test_a_data_set_is_no_recipe(typed: Typed, folder: Path) -> None:
    (folder / "data.yaml").write_text("train: images/train\nval: images/val\nnames: [cat]\n")
    status, _, err = typed("train data.yaml --trainer.max_epochs 1")
    assert status == 2
    assert err == (
        "arclight: data.yaml describes a data set, not a run: give it to a recipe, as in arclight train detect-qris --task.data "
        "data.yaml\n"
    )


def test_strategies_have_near_names(typed: Typed, tiny: Path) -> None:
    _, _, err = typed("train tiny.toml --trainer.strategy dpp")
    assert "`strategy='dpp'`; did you mean ddp? Names are " in err


def test_images_that_were_all_skipped_are_no_success(typed: Typed) -> None:
    pytest.importorskip("zxingcpp")
    Path("broken.png").write_text("not an image")
    status, out, _ = typed("scan broken.png")
    assert status == 1
    assert "1 files skipped" in out


def test_a_run_predicts_with_thresholds_and_writes_labels(detector: Path, typed: Typed) -> None:
    import cv2
    import numpy as np

    for place in ("a", "b"):
        Path(place).mkdir()
        cv2.imwrite(f"{place}/photo.png", np.random.default_rng(0).integers(0, 255, (48, 96, 3), dtype=np.uint8))
    status, out, err = typed(f"predict {detector} a b --conf 0 --iou 1 --save-txt labels --json found.json")
    assert (status, err) == (0, "")
    assert out.startswith(f"checkpoint {detector}/checkpoints/last.ckpt, the newest\n")
    found = json.loads(Path("found.json").read_text())
    assert sorted(path.name for path in Path("labels").iterdir()) == ["photo-2.txt", "photo.txt"]
    rows = [line.split() for line in Path("labels/photo.txt").read_text().splitlines()]
    assert len(rows) == len(found["a/photo.png"]) > 100
    for row, box in zip(rows, found["a/photo.png"]):
        left, top, right, bottom = box["box_xyxy_px"]
        assert ["cat", "dog"][int(row[0])] == box["label"]
        expected = [(left + right) / 2 / 96, (top + bottom) / 2 / 48, (right - left) / 96, (bottom - top) / 48]
        assert [float(share) for share in row[1:]] == pytest.approx(expected, abs=0.003)
    _, out, _ = typed(f"predict {detector} a --conf 1")
    assert "a/photo.png: nothing\n1 images, 0 objects" in out
    status, out, _ = typed(
        f"predict {detector} a b --conf 0 --iou 1 --classes dog --max-det 7 --save-crop crops --save-csv found.csv --json few.json"
    )
    few = json.loads(Path("few.json").read_text())
    assert status == 0
    assert {box["label"] for boxes in few.values() for box in boxes} == {"dog"}
    assert all(len(boxes) <= 7 for boxes in few.values())
    header, *lines = Path("found.csv").read_text().splitlines()
    assert header == "image,label,confidence,left,top,right,bottom"
    assert len(lines) == sum(map(len, few.values()))
    crops = sorted(Path("crops").rglob("*.jpg"))
    assert {path.parent.name for path in crops} == {"dog"}
    assert {path.name.rpartition("-")[0] for path in crops} == {"photo", "photo-2"}
    typed(f"predict {detector} a --conf 0 --agnostic-nms --iou 0.1 --json agnostic.json")
    typed(f"predict {detector} a --conf 0 --iou 0.1 --json by_class.json")
    fewer, more = (json.loads(Path(f"{name}.json").read_text())["a/photo.png"] for name in ("agnostic", "by_class"))
    assert len(fewer) < len(more)
    for line, said in (
        (
            f"predict {detector} a --classes bird",
            "--classes: 'bird' is not a class of this detector: it finds cat, dog",
        ),
        (f"predict {detector} a --max-det 0", "argument --max-det: 0 is not 1 or more"),
        (f"predict {detector} a --conf 2", "argument --conf: 2 is not in [0, 1]"),
        (f"predict {detector}", "name images after the run"),
        ("predict a", "a is not a run: name the run of a detector first"),
    ):
        assert typed(line)[2].startswith(f"arclight: {said}")
