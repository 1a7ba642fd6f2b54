"""ModelCheckpoint: what is on the disk, and what it says about it, at every moment."""

from __future__ import annotations

import math
import os
import pickle
import shutil
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

import arclight as al
from arclight import checkpoint
from arclight.trainer.callbacks import EMAWeightAveraging, MissingMetricError, ModelCheckpoint, OnExceptionCheckpoint
from arclight.trainer.callbacks.checkpoint.model_checkpoint import SaveSchedule, SaveTrigger
from arclight.trainer.fabric.checkpoint_io import AsyncCheckpointIO, CheckpointIO, FolderCheckpointIO, TorchCheckpointIO


def names(folder: str | Path | None) -> set[str]:
    return {entry.name for entry in Path(str(folder)).iterdir()}


def step_of(path: str | Path) -> int:
    return checkpoint.load(path, only=["progress"])["progress"]["global_step"]


@pytest.mark.parametrize(("mode", "kept", "best", "worst"), [("min", {3, 4}, 3, 4), ("max", {0, 2}, 0, 2)])
def test_keeps_the_best_k(fit: Any, mode: str, kept: set[int], best: int, worst: int) -> None:
    saver = ModelCheckpoint(monitor="val/score", mode=mode, save_top_k=2, filename="{epoch}")
    fit({"val/score": [5.0, 3.0, 4.0, 1.0, 2.0]}, saver)
    assert names(saver.dirpath) == {f"epoch={epoch}.ckpt" for epoch in kept}
    assert Path(saver.best_model_path).name == f"epoch={best}.ckpt"
    assert Path(saver.kth_best_model_path).name == f"epoch={worst}.ckpt"
    assert saver.best_model_score == [5.0, 3.0, 4.0, 1.0, 2.0][best]
    assert saver.kth_value == [5.0, 3.0, 4.0, 1.0, 2.0][worst]
    assert saver.current_score == 2.0
    assert {Path(path).name for path in saver.best_k_models} == names(saver.dirpath)
    assert all(checkpoint.verify(path) == [] for path in saver.best_k_models)


def test_without_monitor_the_newest_or_all_or_none_are_kept(fit: Any, tmp_path: Path) -> None:
    for keep, expected in ((1, {2}), (-1, {0, 1, 2}), (0, set())):
        saver = ModelCheckpoint(tmp_path / f"keep{keep}", save_top_k=keep, filename="{epoch}")
        (tmp_path / f"keep{keep}").mkdir()
        fit({"val/score": [1.0, 2.0, 3.0]}, saver)
        assert names(saver.dirpath) == {f"epoch={epoch}.ckpt" for epoch in expected}
        assert bool(saver.best_model_path) == (keep != 0)


@pytest.mark.parametrize("again", [False, True])
def test_a_name_that_is_used_again_is_kept_once(fit: Any, tmp_path: Path, again: bool) -> None:
    saver = ModelCheckpoint(tmp_path / "c", save_top_k=-1, filename="x", enable_version_counter=not again)
    fit({"val/score": [1.0, 2.0, 3.0]}, saver)
    assert len(saver.state_dict()["kept"]) == len(names(saver.dirpath)) == (1 if again else 3)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_nan_is_never_best(fit: Any, mode: str) -> None:
    saver = ModelCheckpoint(monitor="val/score", mode=mode, filename="{epoch}")
    fit({"val/score": [math.nan, 3.0, math.nan]}, saver)
    assert Path(saver.best_model_path).name == "epoch=1.ckpt"
    assert saver.best_model_score == 3.0
    only_nan = ModelCheckpoint(monitor="val/score", mode=mode, filename="{epoch}")
    fit({"val/score": [math.nan, math.nan]}, only_nan)
    assert only_nan.best_model_path == ""
    assert only_nan.current_score == (math.inf if mode == "min" else -math.inf)
    assert names(only_nan.dirpath) == {"epoch=0.ckpt"}, "a run without any score still has something to go on from"


@pytest.mark.parametrize("how", [True, "link"])
def test_last_is_the_newest_at_every_save(fit: Any, how: Any) -> None:
    seen = []

    class Look(al.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch:
                seen.append((trainer.global_step, step_of(saver.last_model_path), len(names(saver.dirpath))))

    saver = ModelCheckpoint(monitor="val/score", save_last=how, filename="{epoch}")
    fit({"val/score": [2.0, 3.0, 1.0, 4.0]}, saver, Look())
    assert seen == [(4, 4, 2), (8, 8, 2), (12, 12, 2)]
    assert step_of(saver.last_model_path) == 16
    assert names(saver.dirpath) == {"epoch=2.ckpt", "last.ckpt"}
    assert checkpoint.verify(saver.last_model_path) == []


def test_last_costs_no_space_or_is_a_link_that_moves_with_its_folder(fit: Any, tmp_path: Path) -> None:
    linked = ModelCheckpoint(tmp_path / "a", save_last="link")
    copied = ModelCheckpoint(tmp_path / "b", save_last=True)
    for saver in (linked, copied):
        fit({"val/score": [1.0]}, saver)
    assert Path(linked.last_model_path).is_symlink()
    assert os.readlink(linked.last_model_path) == Path(linked.best_model_path).name
    for file in Path(copied.best_model_path).iterdir():
        assert os.path.samefile(file, Path(copied.last_model_path) / file.name)
        assert not Path(copied.last_model_path).is_symlink()


def test_every_n_train_steps_saves_at_steps_not_at_epoch_ends(fit: Any) -> None:
    saver = ModelCheckpoint(every_n_train_steps=3, save_top_k=-1, save_last=True)
    fit({"val/score": [0.0, 0.0]}, saver)
    assert names(saver.dirpath) == {"epoch=0-step=3.ckpt", "epoch=1-step=6.ckpt", "last.ckpt"}, "nothing at epoch ends"
    assert step_of(saver.last_model_path) == 8, "the end of training is not lost"


def test_accumulated_batches_are_saved_once(fit: Any) -> None:
    class Count(al.Callback):
        saves = 0

        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            self.saves += 1

    count = Count()
    fit(
        {"val/score": [0.0, 0.0]},
        ModelCheckpoint(every_n_train_steps=1, save_top_k=-1),
        count,
        accumulate_grad_batches=2,
    )
    assert count.saves == 4


@pytest.mark.parametrize("averages_first", [False, True])
def test_replaced_weights_are_saved_beside_an_average_in_any_order(
    fit: Any, scripted: Any, tmp_path: Path, averages_first: bool
) -> None:
    class Replaces(al.Callback):
        def weights_to_save(self, pl_module: Any, weights: dict[str, Any]) -> dict[str, Any]:
            return {name: torch.full_like(tensor, 7) for name, tensor in weights.items()}

    class Saves(al.Callback):
        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(tmp_path / "within")  # the average stands in the model

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(tmp_path / "end")

    callbacks = [Replaces(), EMAWeightAveraging(decay=0.5)]
    ordered = (*(reversed(callbacks) if averages_first else callbacks), Saves())
    fit(scripted({"val/score": [0.0]}), *ordered, max_epochs=1)
    for name in ("within", "end"):
        saved = checkpoint.load(tmp_path / name)["model"]
        assert saved
        assert all(bool((tensor == 7).all()) for tensor in saved.values()), name


@pytest.mark.parametrize("weights_only", [False, True])
def test_checkpoints_of_weights_alone_skip_hooks_of_callbacks_only(
    fit: Any, scripted: Any, weights_only: bool
) -> None:  # as Lightning does
    class Marked(scripted):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["module"] = 1

    class Marks(al.Callback):
        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["callback"] = 1

    saver = ModelCheckpoint(save_weights_only=weights_only)
    fit(Marked({"val/score": [0.0]}), saver, Marks(), max_epochs=1)
    saved = checkpoint.load(saver.best_model_path)
    assert (saved["module"], saved.get("callback")) == (1, None if weights_only else 1)


def test_train_time_interval_saves_by_elapsed_time(fit: Any) -> None:
    saver = ModelCheckpoint(train_time_interval=timedelta(seconds=0), save_top_k=-1, filename="{step}")
    fit({"val/score": [0.0]}, saver)
    assert names(saver.dirpath) == {f"step={step}.ckpt" for step in (1, 2, 3, 4)}
    never = ModelCheckpoint(train_time_interval=timedelta(days=1), save_last=True)
    fit({"val/score": [0.0]}, never)
    assert names(never.dirpath) == {"last.ckpt"}


def test_every_n_epochs(fit: Any) -> None:
    saver = ModelCheckpoint(every_n_epochs=2, save_top_k=-1, filename="{epoch}")
    fit({"val/score": [0.0] * 5}, saver)
    assert names(saver.dirpath) == {"epoch=1.ckpt", "epoch=3.ckpt"}


def test_a_step_save_waits_for_the_validation_that_judges_it(fit: Any) -> None:
    saver = ModelCheckpoint(
        monitor="val/score", every_n_train_steps=2, save_top_k=-1, filename="{step}-{val/score:.0f}"
    )
    fit({"val/score": [10.0, 20.0, 30.0, 40.0]}, saver, max_epochs=2, val_check_interval=2)
    assert names(saver.dirpath) == {
        f"step={step}-val_score={score}.ckpt" for step, score in ((2, 10), (4, 20), (6, 30), (8, 40))
    }


def test_names(fit: Any, tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path / "x", filename="{epoch:02d}-{val/score:.3f}-{absent}")
    values = {"epoch": 3, "val/score": torch.tensor(0.12345)}
    assert saver.format_checkpoint_name(values) == str(tmp_path / "x" / "epoch=03-val_score=0.123-absent=0.ckpt")
    plain = ModelCheckpoint(filename="e{epoch}_{val/score:.1f}", auto_insert_metric_name=False)
    assert plain.format_checkpoint_name(values, ver=2) == "e3_0.1-v2.ckpt"
    assert ModelCheckpoint().format_checkpoint_name({"epoch": 1, "step": 7}, prefix="try") == "try-epoch=1-step=7.ckpt"
    with pytest.raises(ValueError, match=r"\{epoch:zz\} cannot show epoch = 3"):
        ModelCheckpoint(filename="{epoch:zz}").format_checkpoint_name(values)
    for _ in range(2):
        saver = ModelCheckpoint(tmp_path / "fixed", filename="model", save_last=True)
        fit({"val/score": [1.0, 2.0]}, saver)
    assert names(tmp_path / "fixed") == {"model.ckpt", "model-v1.ckpt", "last.ckpt", "last-v1.ckpt"}, (
        "another run's are left alone"
    )


def test_a_monitor_that_is_never_logged_is_an_error_with_the_names_that_are(fit: Any) -> None:
    with pytest.raises(
        MissingMetricError, match=r"monitor='val/scroe'.*did you mean 'val/score'\?.*train/loss, val/error, val/score"
    ):
        fit({"val/score": [1.0]}, ModelCheckpoint(monitor="val/scroe"))
    saver = ModelCheckpoint(monitor="val/score", every_n_train_steps=1, filename="{step}", save_last=True)
    fit({"val/score": [1.0]}, saver)  # steps 1 to 3 come before the first validation: no score, no error
    assert names(saver.dirpath) == {"step=4.ckpt", "last.ckpt"}


def test_checkpoints_are_published_complete_before_older_ones_are_deleted(fit: Any) -> None:
    moments = []

    class Look(al.Callback):
        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            state = checkpoint["callbacks"][saver.state_key]
            moments.append(
                (Path(saver.best_model_path).name, Path(state["best_model_path"]).name, names(saver.dirpath))
            )

    saver = ModelCheckpoint(monitor="val/score", filename="{epoch}")
    fit({"val/score": [2.0, 1.0]}, saver, Look())
    first, second = moments
    assert first == ("", "epoch=0.ckpt", set())
    assert second == ("epoch=0.ckpt", "epoch=1.ckpt", {"epoch=0.ckpt"}), (
        "the saved state counts itself, the public one does not yet"
    )


def test_a_save_that_fails_changes_nothing(fit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = ModelCheckpoint(monitor="val/score", filename="{epoch}", save_last=True)
    whole = checkpoint.save

    def full_disk(path: Any, state: Any) -> Any:
        if "epoch=1" in str(path):
            raise OSError(28, "No space left on device")
        return whole(path, state)

    monkeypatch.setattr(checkpoint, "save", full_disk)
    with pytest.raises(OSError, match="No space"):
        fit({"val/score": [2.0, 1.0]}, saver)
    assert Path(saver.best_model_path).name == "epoch=0.ckpt"
    assert Path(saver.state_dict()["best_model_path"]).name == "epoch=0.ckpt"
    assert names(saver.dirpath) == {"epoch=0.ckpt", "last.ckpt"}
    assert checkpoint.verify(saver.best_model_path) == []
    assert step_of(saver.last_model_path) == 4


def test_the_record_follows_a_folder_that_was_moved(fit: Any, tmp_path: Path, scripted: Any) -> None:
    first = ModelCheckpoint(monitor="val/score", save_top_k=2, filename="{epoch}", save_last=True)
    trainer = fit({"val/score": [2.0, 1.0, 3.0]}, first)
    moved = tmp_path / "elsewhere" / "7"
    moved.parent.mkdir()
    shutil.move(trainer.run_folder.path, moved)
    second = ModelCheckpoint(monitor="val/score", save_top_k=2, filename="{epoch}", save_last=True)
    module = scripted({"val/score": [math.nan, math.nan, math.nan, 1.5]})
    module.validations = 3
    fit(
        module,
        second,
        ckpt_path=moved / "checkpoints" / "last.ckpt",
        run_folder=al.trainer.RunFolder.open(moved),
        max_epochs=4,
    )
    folder = moved / "checkpoints"
    assert second.best_model_path == str(folder / "epoch=1.ckpt")
    assert {Path(path): float(score) for path, score in second.best_k_models.items()} == {
        folder / "epoch=1.ckpt": 1.0,
        folder / "epoch=3.ckpt": 1.5,
    }
    assert names(folder) == {"epoch=1.ckpt", "epoch=3.ckpt", "last.ckpt"}
    assert step_of(second.last_model_path) == 16


def test_another_runs_checkpoints_are_known_but_never_removed(fit: Any, tmp_path: Path, scripted: Any) -> None:
    first = ModelCheckpoint(tmp_path / "one", monitor="val/score", filename="{epoch}")
    fit({"val/score": [2.0]}, first)
    module = scripted({"val/score": [math.nan, 1.0]})
    module.validations = 1
    second = ModelCheckpoint(tmp_path / "two", monitor="val/score", filename="{epoch}")
    fit(module, second, ckpt_path=first.best_model_path, max_epochs=2)
    assert names(tmp_path / "one") == {"epoch=0.ckpt"}
    assert names(tmp_path / "two") == {"epoch=1.ckpt"}
    assert Path(second.best_model_path) == tmp_path / "two" / "epoch=1.ckpt"


def test_a_resumed_run_takes_the_names_of_what_the_killed_one_left(fit: Any, scripted: Any) -> None:
    def saver() -> ModelCheckpoint:
        return ModelCheckpoint(save_top_k=-1, filename="{epoch}")

    trainer = fit({"val/score": [0.0] * 3}, saver())
    folder = trainer.run_folder.checkpoints
    before = {path.name: os.stat(path).st_ino for path in folder.iterdir()}
    module = scripted()
    fit(module, saver(), ckpt_path=folder / "epoch=0.ckpt", run_folder=trainer.run_folder, max_epochs=3)
    after = {path.name: os.stat(path).st_ino for path in folder.iterdir()}
    assert before.keys() == after.keys(), "no -v1 beside checkpoints of a timeline that no longer is"
    assert before["epoch=0.ckpt"] == after["epoch=0.ckpt"]
    assert before["epoch=2.ckpt"] != after["epoch=2.ckpt"]


NAMES_AND_SOURCES = {None: "own", "{epoch}": "sibling", "best": "explicit"}


@pytest.mark.parametrize(
    ("filename", "source"),
    [
        pytest.param(filename, source, marks=() if source == own else pytest.mark.slow)
        for filename, own in NAMES_AND_SOURCES.items()
        for source in NAMES_AND_SOURCES.values()
    ],
)
def test_two_callbacks_in_one_folder_keep_apart_through_resumes(
    fit: Any, scripted: Any, tmp_path: Path, filename: str | None, source: str
) -> None:
    """Three fits, two of them resumed: what each callback calls its best is there, and of the epoch that it was."""
    errors, accuracies = [9.0, 8.0, 7.0, 1.0, 6.0, 5.0, 4.0, 0.5, 3.0], [float(epoch) for epoch in range(9)]

    def pair() -> list[ModelCheckpoint]:
        settings: dict[str, Any] = {"dirpath": tmp_path / "c", "filename": filename, "save_last": True}
        return [
            ModelCheckpoint(monitor="error", **settings),
            ModelCheckpoint(monitor="accuracy", mode="max", **settings),
        ]

    path: Any = None
    for done, until in ((0, 3), (3, 5), (5, 9)):
        savers, module = pair(), scripted({"error": errors, "accuracy": accuracies})
        module.validations = done
        trainer = fit(module, *savers, ckpt_path=path, max_epochs=until)
        best = [min(range(until), key=errors.__getitem__), until - 1]
        assert [step_of(saver.best_model_path) for saver in savers] == [4 * (epoch + 1) for epoch in best]
        assert [float(saver.best_model_score) for saver in savers] == [errors[best[0]], accuracies[best[1]]]
        assert len({saver.last_model_path for saver in savers}) == 2
        assert [step_of(saver.last_model_path) for saver in savers] == [4 * until] * 2
        known = {Path(path).name for saver in savers for path in (saver.best_model_path, saver.last_model_path)}
        if source != "own":  # the first one's checkpoint cannot know of what the second saves after it at the same step
            assert names(tmp_path / "c") - known <= {Path(str(path)).name}, "only what it was resumed from stays beside"
        trainer.save_checkpoint(tmp_path / f"{until}.ckpt")
        path = {"own": savers[0].last_model_path, "sibling": savers[1].last_model_path}.get(
            source, tmp_path / f"{until}.ckpt"
        )


def test_files_that_others_write_beside_a_resumed_run_are_left_alone(fit: Any, scripted: Any, tmp_path: Path) -> None:
    def saver() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path / "c", save_top_k=-1, filename="{epoch}")

    class Other(al.Callback):
        """Another process that was resumed from the same checkpoint, one epoch ahead."""

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                shutil.copytree(tmp_path / "c/epoch=0.ckpt", tmp_path / "c/epoch=2.ckpt")
                os.utime(tmp_path / "c/epoch=2.ckpt")  # it was written now

    fit({"val/score": [0.0] * 2}, saver())
    resumed = saver()
    fit(scripted(), resumed, Other(), ckpt_path=tmp_path / "c/epoch=0.ckpt", max_epochs=3)
    assert step_of(tmp_path / "c/epoch=2.ckpt") == 4, "the other's"
    assert Path(resumed.best_model_path).name == "epoch=2-v1.ckpt"
    assert names(tmp_path / "c") == {"epoch=0.ckpt", "epoch=1.ckpt", "epoch=2.ckpt", "epoch=2-v1.ckpt"}


def test_saved_when_training_fails(fit: Any, tmp_path: Path) -> None:
    class Fail(al.Callback):
        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            if trainer.global_step == 3:
                raise KeyboardInterrupt

    saver = ModelCheckpoint(save_on_exception=True, save_top_k=1)
    other = OnExceptionCheckpoint(tmp_path / "other")
    with pytest.raises(KeyboardInterrupt):
        fit({"val/score": [0.0]}, Fail(), saver, other)
    assert names(saver.dirpath) == {"epoch=0-step=3.ckpt"}
    assert step_of(other.ckpt_path) == 3
    fit({"val/score": [0.0]}, other, ckpt_path=other.ckpt_path)
    assert names(tmp_path / "other") == set(), "the run it was kept for has ended well"
    with pytest.raises(ValueError, match="filename cannot be empty"):
        OnExceptionCheckpoint(tmp_path, filename="")


def test_evaluation_saves_nothing(fit: Any, make_rows: Any) -> None:
    saver = ModelCheckpoint(every_n_train_steps=3, save_top_k=-1)
    trainer = fit({"val/score": [0.0, 0.0]}, saver, max_epochs=1)
    before = names(saver.dirpath)
    trainer.validate(dataloaders=make_rows(2), verbose=False)
    assert names(saver.dirpath) == before


def test_the_record_as_yaml(fit: Any, tmp_path: Path) -> None:
    saver = ModelCheckpoint(monitor="val/score", save_top_k=2, filename="{epoch}")
    fit({"val/score": [1e-7, math.inf]}, saver)
    saver.to_yaml()
    text = (Path(str(saver.dirpath)) / "best_k_models.yaml").read_text()
    assert yaml.safe_load(text) == {path: float(score) for path, score in saver.best_k_models.items()}
    assert any(score == pytest.approx(1e-7) for score in yaml.safe_load(text).values())


def test_every_takes_epochs_batches_and_durations(fit: Any) -> None:
    def saved(every: Any, **settings: Any) -> set[str]:
        saver = ModelCheckpoint(every=every, save_top_k=-1, filename="{step}")
        fit({"val/score": [0.0, 0.0]}, saver, **settings)
        return names(saver.dirpath)

    assert saved("2ep") == {"step=8.ckpt"}
    assert saved("3ba") == {"step=3.ckpt", "step=6.ckpt"}
    assert saved("6ba", accumulate_grad_batches=2) == {"step=3.ckpt"}, "batches, not steps"
    assert saved("0.25dur") == {f"step={step}.ckpt" for step in (2, 4, 6, 8)}
    assert saved("0.000001s") == {f"step={step}.ckpt" for step in range(1, 9)}
    counted = ModelCheckpoint(every="500ba")
    assert "'every': '500ba'" in counted.state_key
    assert counted.state_key != ModelCheckpoint(every="600ba").state_key
    assert ModelCheckpoint(every="1ep").state_key == ModelCheckpoint().state_key


def test_save_intervals_continue_after_a_resume(fit: Any, scripted: Any, tmp_path: Path) -> None:
    def saver() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path / "c", every="3ba", save_top_k=-1, save_last=True, filename="{step}")

    first = saver()
    fit({"val/score": [0.0, 0.0]}, first, max_steps=4)
    assert names(tmp_path / "c") == {"step=3.ckpt", "last.ckpt"}
    with pytest.warns(UserWarning, match="not empty"):
        fit(scripted({"val/score": [0.0] * 3}), saver(), ckpt_path=first.last_model_path, max_epochs=2)
    assert names(tmp_path / "c") == {"step=3.ckpt", "step=6.ckpt", "last.ckpt"}


def test_a_length_that_is_not_known_has_no_fraction(fit: Any, scripted: Any) -> None:
    with pytest.raises(ValueError, match="how long training will be is not known"):
        fit(scripted(), ModelCheckpoint(every="0.5dur"), max_epochs=-1)


def test_the_attributes_are_lightnings_and_a_persons_to_change(fit: Any) -> None:
    saver = ModelCheckpoint(monitor="val/score", save_top_k=2, filename="{epoch}")
    assert (saver.best_model_path, saver.kth_best_model_path, saver.best_model_score) == ("", "", None)
    assert saver.kth_value == math.inf
    fit({"val/score": [2.0]}, saver)
    assert saver.kth_best_model_path == "", "there is room for another"
    state = saver.state_dict()
    assert state["best_model_path"] == saver.best_model_path
    assert state["monitor"] == "val/score"
    assert state["dirpath"] == saver.dirpath
    assert state["best_k_models"] == {saver.best_model_path: torch.tensor(2.0)}
    saver.best_k_models, saver.best_model_path = {}, ""
    assert saver.state_dict()["best_k_models"] == {}
    assert saver.check_monitor_top_k(None, torch.tensor(math.nan))  # type: ignore[arg-type]
    assert vars(pickle.loads(pickle.dumps(saver))) == vars(saver)


def test_epoch_and_step_are_values_too(fit: Any) -> None:
    saver = ModelCheckpoint(monitor="step", mode="max", save_top_k=2, every_n_train_steps=1)
    fit({"val/score": [0.0]}, saver)
    assert names(saver.dirpath) == {"epoch=0-step=3.ckpt", "epoch=0-step=4.ckpt"}
    assert saver.best_model_score == 4


def test_a_value_of_the_epochs_end_is_waited_for(fit: Any, scripted: Any) -> None:
    class EpochEnd(scripted):  # type: ignore[misc, valid-type]
        def on_train_epoch_end(self) -> None:
            self.log("train/whole", float(self.current_epoch))

    saver = ModelCheckpoint(monitor="train/whole", every_n_train_steps=2, save_top_k=-1, filename="{epoch}-{step}")
    fit(EpochEnd(), saver, max_epochs=2, limit_val_batches=0)
    assert {Path(path).name: float(score) for path, score in saver.best_k_models.items()} == {
        "epoch=0-step=4.ckpt": 0.0,
        "epoch=1-step=6.ckpt": 0.0,
        "epoch=1-step=8.ckpt": 0.0,
    }


def test_a_validation_that_never_runs_warns(fit: Any, scripted: Any) -> None:
    with pytest.warns(
        UserWarning, match=r"validation never ran.*monitor='val/score'\)` could not find.*every_n_epoch=5"
    ):
        fit({"val/score": [0.0] * 2}, ModelCheckpoint(monitor="val/score"), check_val_every_n_epoch=5)
    with pytest.warns(UserWarning, match="saved nothing: check_val_every_n_epoch=5"):
        fit({"val/score": [0.0] * 2}, ModelCheckpoint(), check_val_every_n_epoch=5)


def test_resumed_checkpoint_is_never_pruned(fit: Any, scripted: Any, tmp_path: Path) -> None:
    def saver() -> ModelCheckpoint:
        return ModelCheckpoint(
            tmp_path / "c", monitor="step", mode="max", save_top_k=2, every_n_train_steps=2, filename="{step}"
        )

    first = saver()
    assert fit({"val/score": [0.0, 0.0]}, first, max_steps=5).ckpt_path is None
    resumed = fit(scripted(), saver(), ckpt_path=first.best_model_path, max_steps=8)
    assert resumed.ckpt_path == first.best_model_path
    assert names(tmp_path / "c") == {"step=4.ckpt", "step=6.ckpt", "step=8.ckpt"}


def test_an_unwritable_folder_is_reported_with_the_remaining_checkpoints(fit: Any, tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path / "c", save_top_k=-1, filename="{epoch}")

    class Block(al.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:  # a file where the folder of the next checkpoint would go
                (tmp_path / "c" / "epoch=1.ckpt").write_text("not a checkpoint")

    saver.enable_version_counter = False
    with pytest.raises(checkpoint.CheckpointError, match=r"not a checkpoint.*newest complete .*epoch=0\.ckpt"):
        fit({"val/score": [0.0] * 2}, saver, Block())
    assert Path(saver.best_model_path).name == "epoch=0.ckpt"
    assert checkpoint.verify(saver.best_model_path) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"save_top_k": 3}, r"ModelCheckpoint\(save_top_k=3, monitor=None\) is not a valid"),
        ({"save_top_k": -2}, "-1 keeps all.*Must be >= -1"),
        ({"mode": "best"}, "can be min .* got best"),
        (
            {"every_n_train_steps": 2, "every_n_epochs": 1},
            "Combination of parameters every_n_train_steps=2.*choose one",
        ),
        ({"train_time_interval": timedelta(0), "every_n_epochs": 1}, "mutually exclusive"),
        ({"every_n_train_steps": 2, "every": "1h"}, "mutually exclusive"),
        ({"every": "0ba"}, "more than nothing"),
        ({"every": "soon"}, "'soon' is not understood"),
        ({"every_n_epochs": -1}, "Must be >= 0"),
        ({"every_n_train_steps": -1}, "Must be >= 0"),
        ({"save_last": "copy"}, "'link'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelCheckpoint(**arguments)


def test_links_are_for_this_machines_file_systems(fit: Any) -> None:
    with pytest.raises(ValueError, match=r"save_last='link'.* is only supported for local file paths"):
        fit({"val/score": [0.0]}, ModelCheckpoint("s3://bucket/runs", save_last="link"))


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("kind", [FolderCheckpointIO, TorchCheckpointIO])
def test_checkpoints_are_deleted_by_the_plugin_that_wrote_them(
    fit: Any, tmp_path: Path, kind: type[CheckpointIO], background: bool
) -> None:
    removed: list[str] = []

    class Recording(kind):  # type: ignore[valid-type, misc]
        def remove_checkpoint(self, path: str | Path) -> None:
            super().remove_checkpoint(path)
            removed.append(Path(path).name)

    saver = ModelCheckpoint(tmp_path / "kept", filename="{epoch}", save_last="link")
    io: CheckpointIO = AsyncCheckpointIO(Recording()) if background else Recording()
    fit({"val/score": [1.0, 2.0, 3.0]}, saver, plugins=io)
    assert removed == ["epoch=0.ckpt", "epoch=1.ckpt"], "the link is none of the plugin's"
    assert names(saver.dirpath) == {"epoch=2.ckpt", "last.ckpt"}
    Recording().remove_checkpoint(tmp_path / "kept" / "epoch=0.ckpt")  # which is gone


@pytest.mark.parametrize(("before", "first"), [((10_000, 1_000_000), 1000), ((0, 0), 0), ((0, 0), 100)])
def test_no_save_by_samples_is_missed_where_batches_grow(before: tuple[int, int], first: int) -> None:
    """Ranks ask rank 0 seldom: it must not go by the batches of long ago, nor by one that is small."""
    asked = 0

    def broadcast(value: Any) -> Any:
        nonlocal asked
        asked += 1
        return value

    progress = SimpleNamespace(batches=before[0], samples=before[1])
    ranks: Any = SimpleNamespace(world_size=2, progress=progress, strategy=SimpleNamespace(broadcast=broadcast))
    trigger = SaveTrigger(SaveSchedule.of(None, None, None, "100_000sp"), ranks, lambda: 0.0)
    due = []
    for batch in range(3000):
        progress.batches += 1
        progress.samples += 1000 if batch else first
        due.append(trigger.due(ranks))
    assert sum(due) == progress.samples // 100_000 - before[1] // 100_000
    assert asked < len(due) / 10
