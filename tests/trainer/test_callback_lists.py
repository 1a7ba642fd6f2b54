"""The callbacks of a trainer: a user's, a module's, those of installed packages, and invalid ones."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tests import warm

import arclight as al
from arclight.trainer.callbacks import ModelSummary, ProgressBar, RichModelSummary

SCRIPT = """
import arclight as al
import arclight.compat.lightning as L
options = {"enable_progress_bar": False, "enable_checkpointing": False, "logger": False, "accelerator": "cpu"}
print([type(c).__name__ for c in al.Trainer(**options).callbacks])
print([type(c).__name__ for c in L.Trainer(**options, enable_model_summary=False).callbacks])
"""


def test_a_package_names_its_factories(tmp_path: Path) -> None:
    info = tmp_path / "watcher-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: watcher\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[arclight.callbacks_factory]\none = watcher:one\nnone = watcher:none\n"
        "[lightning.pytorch.callbacks_factory]\nboth = watcher:both\n"
    )
    (tmp_path / "watcher.py").write_text(
        "import arclight as al\nclass Watch(al.Callback): ...\nclass Look(al.Callback): ...\n"
        "def one(): return Watch()\ndef none(): return []\ndef both(): return [Watch(), Look()]\n"
    )
    run = warm.run("-c", SCRIPT, timeout=120, env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=True)
    assert run.stdout.splitlines() == ["['Watch']", "['Watch', 'Look']"]


class Keeps(al.Callback):
    def __init__(self, name: str) -> None:
        self.name, self.loaded = name, False

    @property
    def state_key(self) -> str:
        return f"Keeps-{self.name}"

    def state_dict(self) -> dict[str, Any]:
        return {"name": self.name, "needed": 3}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = True


def test_two_states_cannot_share_a_name(make_trainer: Any, fit: Any, scripted: Any) -> None:
    make_trainer(Keeps("a"), Keeps("b"))
    with pytest.raises(
        RuntimeError, match="more than one stateful callback of type `Keeps` with the state_key 'Keeps-a'"
    ):
        make_trainer(Keeps("a"), Keeps("a"))

    class Brings(scripted):  # type: ignore[misc]
        def configure_callbacks(self) -> Any:
            return [Keeps("a"), Keeps("a")]

    with pytest.raises(RuntimeError, match="state_key 'Keeps-a'"):
        fit(Brings(), max_epochs=1)


def test_callbacks_that_may_end_a_run_come_after_those_that_save() -> None:
    class Ends(al.Callback):
        runs_last = runs_after_checkpoints = True

    given = [Ends(), al.ModelCheckpoint(), al.Callback()]
    trainer = al.Trainer(callbacks=given, accelerator="cpu", enable_progress_bar=False)
    assert [type(callback).__name__ for callback in trainer.callbacks] == ["Callback", "ModelCheckpoint", "Ends"]


@pytest.mark.parametrize("plain", [False, True])
def test_the_default_summary_is_plain_beside_a_plain_progress_bar(plain: bool) -> None:
    class Bar(ProgressBar):
        plain_text = plain

    trainer = al.Trainer(callbacks=Bar(), accelerator="cpu", enable_checkpointing=False)
    assert isinstance(trainer.callbacks[-1], ModelSummary)
    assert isinstance(trainer.callbacks[-1], RichModelSummary) != plain


def test_a_callback_that_a_resume_lacks_is_named(fit: Any, tmp_path: Path) -> None:
    """A key of its state is the user's: none of its names refuses the checkpoint."""
    trainer = fit({"val/score": [1.0]}, Keeps("a"), Keeps("b"))
    trainer.save_checkpoint(tmp_path / "saved")
    there = Keeps("b")
    with pytest.warns(UserWarning, match=r"Please add the following callbacks: \['Keeps-a'\]"):
        fit({"val/score": [1.0, 1.0]}, there, ckpt_path=tmp_path / "saved")
    assert there.loaded


def test_objects_with_the_callback_interface_are_accepted(fit: Any) -> None:
    stand_in = Mock(spec=al.Callback, **{"state_dict.return_value": {}})
    stand_in.state_key = "stand-in"
    fit({"val/score": [1.0]}, stand_in, enable_checkpointing=False)
    called = [call[0] for call in stand_in.method_calls]
    assert called.count("on_train_batch_end") == 4
    assert called.index("on_fit_start") < called.index("on_train_start") < called.index("on_fit_end")


def test_a_trial_run_has_a_logger_that_keeps_nothing(fit: Any, tmp_path: Path) -> None:
    trainer = fit({"val/score": [1.0]}, fast_dev_run=True)
    assert type(trainer.logger).__name__ == "DummyLogger"
    trainer.logger.experiment.add_scalar("anything", 1.0)
    assert not list(tmp_path.rglob("*.csv"))
    assert fit({"val/score": [1.0]}, fast_dev_run=True, logger=False).logger is None


@pytest.mark.parametrize(("interval", "batches"), [(None, 8), (1.0, 8), (0.5, 4), (0.01, 1), (3, 3)])
def test_batches_between_validations(fit: Any, interval: Any, batches: int) -> None:
    trainer = fit({"val/score": [1.0] * 8}, batches=8, max_epochs=1, val_check_interval=interval)
    assert trainer.val_check_batch == batches


def test_a_loss_that_is_no_number_ends_a_run_by_our_convention_only(
    make_trainer: Any, scripted: Any, make_rows: Any
) -> None:
    class Broken(scripted):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * math.nan

    trainer = make_trainer(max_epochs=1)
    trainer.behavior = dataclasses.replace(trainer.behavior, stop_on_nonfinite=False)
    trainer.fit(Broken(), make_rows(3))
    assert trainer.global_step == 3
    with pytest.raises(FloatingPointError, match="the loss is nan"):
        make_trainer(max_epochs=1).fit(Broken(), make_rows(3))
