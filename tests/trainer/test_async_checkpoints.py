"""Checkpoints written while training goes on: what is told when, and what is left when something goes wrong."""

from __future__ import annotations

import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import warm
from tests.waiting import wait_until

import arclight as al
from arclight import checkpoint
from arclight.checkpoint import async_saver as saver_module
from arclight.compat.lightning import Trainer
from arclight.trainer.callbacks import ModelCheckpoint
from arclight.trainer.fabric.checkpoint_io import AsyncCheckpointIO, FolderCheckpointIO, TorchCheckpointIO


def names(folder: str | Path | None) -> set[str]:
    return {entry.name for entry in Path(str(folder)).iterdir() if not entry.name.startswith(".")}


class Held:
    """The background's writing waits until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate, self.begun, write = threading.Event(), threading.Event(), saver_module.write

        def held(path: Path, encoded: Any) -> None:
            self.begun.set()
            assert self.gate.wait(60)
            write(path, encoded)

        monkeypatch.setattr(saver_module, "write", held)


def test_the_result_is_that_of_saving_at_once(fit: Any) -> None:
    folders = []
    for asynchronous in (False, True):
        saver = ModelCheckpoint(
            monitor="val/score", save_top_k=2, save_last=True, filename="{epoch}", asynchronous=asynchronous
        )
        trainer = fit({"val/score": [3.0, 1.0, 2.0, 4.0]}, saver)
        assert names(saver.dirpath) == {"epoch=1.ckpt", "epoch=2.ckpt", "last.ckpt"}
        assert Path(saver.best_model_path).name == "epoch=1.ckpt"
        assert isinstance(trainer.checkpoint_io, FolderCheckpointIO), "the trainer has back what it wrote with"
        folders.append(Path(str(saver.dirpath)))
    for name in ("epoch=1.ckpt", "last.ckpt"):
        assert checkpoint.verify(folders[1] / name) == []
        once, aside = (checkpoint.load(folder / name) for folder in folders)
        assert all(torch.equal(tensor, aside["model"][key]) for key, tensor in once["model"].items())
        assert once["progress"] == aside["progress"]


def test_training_goes_on_and_the_path_is_published_when_complete(fit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    held, seen = Held(monkeypatch), []

    class Look(al.Callback):
        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            if trainer.current_epoch == 1:
                assert held.begun.wait(60)
                seen.append((trainer.global_step, saver.best_model_path, names(saver.dirpath)))
            if trainer.global_step == 7:
                held.gate.set()

    saver = ModelCheckpoint(filename="{epoch}", asynchronous=True)
    fit({"val/score": [0.0, 0.0]}, saver, Look())
    assert [step for step, _, _ in seen] == [5, 6, 7, 8], "four steps while the first epoch's was being written"
    assert all(path == "" for _, path, _ in seen[:3])
    assert all(there == set() for _, _, there in seen[:3])
    assert Path(saver.best_model_path).name == "epoch=1.ckpt"
    assert names(saver.dirpath) == {"epoch=1.ckpt"}
    assert checkpoint.load(saver.best_model_path)["progress"]["global_step"] == 8


def test_an_error_reaches_the_user_with_what_is_left(fit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write = saver_module.write

    def full_disk(path: Path, encoded: Any) -> None:
        if "epoch=1" in path.name:
            raise checkpoint.CheckpointError(f"checkpoint {path} could not be written: No space left on device")
        write(path, encoded)

    monkeypatch.setattr(saver_module, "write", full_disk)
    saver = ModelCheckpoint(filename="{epoch}", asynchronous=True)
    with pytest.raises(
        checkpoint.CheckpointError, match=r"epoch=1\.ckpt could not be .*No space.*newest complete .*epoch=0\.ckpt"
    ):
        fit({"val/score": [0.0] * 4}, saver)
    assert Path(saver.best_model_path).name == "epoch=0.ckpt"
    assert names(saver.dirpath) == {"epoch=0.ckpt"}
    assert checkpoint.verify(saver.best_model_path) == []


def test_a_run_that_fails_waits_for_what_was_begun(fit: Any) -> None:
    class Fail(al.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                raise KeyError("own mistake")

    saver = ModelCheckpoint(filename="{epoch}", asynchronous=True)
    with pytest.raises(KeyError, match="own mistake"):
        fit({"val/score": [0.0] * 2}, saver, Fail())
    assert Path(saver.best_model_path).name == "epoch=0.ckpt"
    assert checkpoint.verify(saver.best_model_path) == []


@pytest.mark.parametrize("error", [OSError, checkpoint.CheckpointError])
def test_a_run_that_fails_publishes_no_save_of_two_callbacks_that_failed(
    fit: Any, tmp_path: Path, error: type[Exception]
) -> None:
    stopping = threading.Event()

    class Failing(FolderCheckpointIO):
        def save_checkpoint(self, state: Any, path: str | Path, storage_options: Any = None) -> None:
            if Path(path).parent.name == "second":
                assert stopping.wait(60)
                raise error("no room")
            super().save_checkpoint(state, path, storage_options)

    class Stop(al.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                stopping.set()
                raise ZeroDivisionError("the cause")

    first, second = (
        ModelCheckpoint(tmp_path / name, every_n_train_steps=every, save_top_k=-1, asynchronous=True)
        for name, every in (("first", 1), ("second", 2))
    )
    with pytest.raises(ZeroDivisionError, match="the cause") as failed:
        fit({"val/score": [1.0]}, Stop(), first, second, plugins=Failing())
    assert any("no room" in note for note in failed.value.__notes__)
    assert Path(first.best_model_path).exists()
    assert second.best_model_path == ""


def test_one_file_can_be_written_in_the_background_too(tmp_path: Path) -> None:
    weights = torch.ones(3)
    io = AsyncCheckpointIO(TorchCheckpointIO())
    assert io.suffix == ".ckpt"
    io.save_checkpoint({"state_dict": {"w": weights}, "epoch": 1}, tmp_path / "a.ckpt")
    weights.zero_()
    state = io.load_checkpoint(tmp_path / "a.ckpt")
    assert torch.equal(state["state_dict"]["w"], torch.ones(3)), "as it was when it was saved"
    (tmp_path / "file").write_text("in the way")
    io.save_checkpoint({"state_dict": {}}, tmp_path / "file" / "b.ckpt")
    with pytest.raises((checkpoint.CheckpointError, OSError)):
        io.teardown()
    io.teardown()


def test_as_a_plugin_it_writes_what_the_trainer_would(fit: Any, make_rows: Any, scripted: Any, tmp_path: Path) -> None:
    saver = ModelCheckpoint(save_last=True)
    trainer = fit({"val/score": [0.0, 0.0]}, saver, plugins=AsyncCheckpointIO())
    assert isinstance(trainer.checkpoint_io, AsyncCheckpointIO)
    assert checkpoint.load(saver.last_model_path)["progress"]["global_step"] == 8
    kept = ModelCheckpoint(tmp_path / "files")
    other = Trainer(max_epochs=1, callbacks=kept, plugins=AsyncCheckpointIO(), logger=False, enable_progress_bar=False)
    other.fit(scripted(), make_rows(2))
    state = torch.load(kept.best_model_path, weights_only=True)
    assert state["global_step"] == 2


SCRIPT = """
    import sys, time, torch, arclight as al
    from pathlib import Path
    from arclight.checkpoint import async_saver as saver_module
    from arclight.trainer.callbacks import ModelCheckpoint
    write = saver_module.write
    def slow(path, encoded):
        if "epoch=1" in path.name:
            Path(sys.argv[1], "writing").touch()
            time.sleep(600)
        write(path, encoded)
    saver_module.write = slow
    class Line(al.Module):
        def __init__(self):
            super().__init__()
            self.line = torch.nn.Linear(2, 1)
        def training_step(self, batch, batch_idx):
            return self.line(batch).square().mean()
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)
    saver = ModelCheckpoint(sys.argv[1] + "/kept", filename="{epoch}", save_last=True, asynchronous=True)
    trainer = al.Trainer(max_epochs=9, callbacks=[saver], enable_progress_bar=False, logger=False, accelerator="cpu")
    trainer.fit(Line(), torch.utils.data.DataLoader(torch.randn(8, 2), batch_size=4))
"""


def test_a_kill_while_writing_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    with warm.Program(tmp_path / "script.py", tmp_path, cwd=tmp_path) as process:
        wait_until(lambda: process.poll() is not None or (tmp_path / "writing").exists(), "a checkpoint is written")
        assert process.poll() is None, process.said()
    assert names(tmp_path / "kept") == {"epoch=0.ckpt", "last.ckpt"}
    for name in ("epoch=0.ckpt", "last.ckpt"):
        assert checkpoint.verify(tmp_path / "kept" / name) == []
        assert checkpoint.load(tmp_path / "kept" / name)["progress"]["global_step"] == 2
