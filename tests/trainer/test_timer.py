"""Timer: what it measures, and when it ends a run."""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from typing import Any

import pytest

import arclight as al
from arclight.trainer.callbacks import ModelCheckpoint, Timer


class Sleep(al.Callback):
    def on_train_batch_start(self, trainer: Any, *rest: Any) -> None:
        time.sleep(0.01)


@pytest.mark.parametrize("given", ["60s", "1min", "00:00:01:00", timedelta(minutes=1), {"seconds": 60}])
def test_the_limit_in_any_form(given: Any) -> None:
    timer = Timer(given)
    assert timer.time_remaining() == 60
    assert timer.time_elapsed() == 0
    assert timer.start_time() is timer.end_time() is None


def test_invalid_times_are_refused() -> None:
    for given in ("6:00:00", "60 minutes", "10ep"):
        with pytest.raises(ValueError, match="format DD:HH:MM:SS"):
            Timer(given)
    with pytest.raises(ValueError, match=r"Unsupported parameter value.*'step' or 'epoch'"):
        Timer(interval="batch")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no stage 'tset'"):
        Timer().time_elapsed("tset")
    assert Timer().time_remaining() is None


def test_training_stops_when_time_is_over(fit: Any, caplog: pytest.LogCaptureFixture) -> None:
    timer = Timer("0.05s")
    with caplog.at_level(logging.INFO, "arclight"):
        trainer = fit({"val/score": [0.0] * 100}, timer, Sleep())
    assert 1 <= trainer.global_step < 40
    assert "Time limit reached" in caplog.text
    assert timer.time_elapsed() >= 0.05
    assert timer.time_remaining() <= 0


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_no_time_at_all(fit: Any, interval: Any) -> None:
    assert fit({"val/score": [0.0]}, Timer("0s", interval)).global_step == 0
    assert fit({"val/score": [0.0]}, Timer("0s", interval), min_steps=2).global_step >= 2


def test_epochs_are_finished_if_asked(fit: Any) -> None:
    trainer = fit({"val/score": [0.0] * 9}, Timer("0.03s", interval="epoch"), Sleep())
    assert trainer.global_step % 4 == 0
    assert trainer.global_step < 36


def test_time_of_earlier_sessions_counts(fit: Any, scripted: Any) -> None:
    saver, timer = ModelCheckpoint(save_last=True), Timer("0.05s")
    first = fit({"val/score": [0.0] * 100}, timer, Sleep(), saver)
    assert timer.state_dict()["time_elapsed"]["train"] >= 0.05
    resumed = fit(scripted(), Timer("0.05s"), ckpt_path=saver.last_model_path, max_epochs=100)
    assert resumed.global_step == first.global_step, "its time was already over"
    longer = Timer("1h")
    fit(scripted(), longer, ckpt_path=saver.last_model_path, max_steps=first.global_step + 1)
    assert 0.05 < longer.time_elapsed() < 60


def test_each_stage_is_measured(fit: Any, make_rows: Any, scripted: Any) -> None:
    timer = Timer()
    trainer = fit(scripted(), timer, max_epochs=1)
    assert timer.time_elapsed() == timer.time_elapsed("train") > 0
    assert timer.time_elapsed("train") > timer.time_elapsed("validate") == timer.time_elapsed("validation") > 0
    assert timer.time_elapsed("test") == 0
    trainer.lightning_module.test_step = trainer.lightning_module.validation_step
    trainer.test(dataloaders=make_rows(2), verbose=False)
    assert timer.time_elapsed("test") > 0
