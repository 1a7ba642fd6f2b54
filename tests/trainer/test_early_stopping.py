"""EarlyStopping against hand-worked curves."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest

from arclight.trainer.callbacks import EarlyStopping, EarlyStoppingReason, MissingMetricError, ModelCheckpoint


@pytest.mark.parametrize(
    ("arguments", "curve", "epochs", "reason"),
    [
        ({"patience": 2}, [5, 4, 3, 3, 3, 2], 5, EarlyStoppingReason.PATIENCE_EXHAUSTED),
        ({"patience": 2}, [5, 4, 4, 3, 3, 2], 6, EarlyStoppingReason.NOT_STOPPED),
        ({"patience": 1, "min_delta": 0.5}, [5, 4, 3.6, 1], 3, EarlyStoppingReason.PATIENCE_EXHAUSTED),
        ({"patience": 1, "min_delta": 0.5, "mode": "max"}, [1, 2, 2.4, 9], 3, EarlyStoppingReason.PATIENCE_EXHAUSTED),
        ({"patience": 1, "mode": "max"}, [1, 2, 3, 4], 4, EarlyStoppingReason.NOT_STOPPED),
        ({"stopping_threshold": 1.5}, [5, 2, 1.4, 0], 3, EarlyStoppingReason.STOPPING_THRESHOLD),
        ({"divergence_threshold": 6.0}, [5, 5.5, 6.5, 0], 3, EarlyStoppingReason.DIVERGENCE_THRESHOLD),
        ({"divergence_threshold": 1.0, "mode": "max"}, [5, 2, 0.5, 9], 3, EarlyStoppingReason.DIVERGENCE_THRESHOLD),
        ({}, [5, math.nan, 1], 2, EarlyStoppingReason.NON_FINITE_METRIC),
        (
            {"patience": 2, "check_finite": False},
            [5, math.nan, 1, math.inf, math.inf, 0],
            5,
            EarlyStoppingReason.PATIENCE_EXHAUSTED,
        ),
    ],
)
def test_stops_when_it_should(fit: Any, arguments: Any, curve: list[float], epochs: int, reason: Any) -> None:
    stopper = EarlyStopping("val/score", **arguments)
    trainer = fit({"val/score": curve}, stopper, batches=1)
    assert trainer.global_step == epochs
    assert stopper.stopping_reason is reason
    assert (stopper.stopping_reason_message is None) == (reason is EarlyStoppingReason.NOT_STOPPED)
    assert stopper.stopped_epoch == (0 if reason is EarlyStoppingReason.NOT_STOPPED else epochs - 1)


def test_a_missing_value_is_an_error_by_default(fit: Any) -> None:
    with pytest.raises(
        MissingMetricError, match=r"EarlyStopping\(monitor='val/scor'\)` could not find.*did you mean 'val/score'"
    ):
        fit({"val/score": [1.0, 1.0]}, EarlyStopping("val/scor"))
    assert fit({"val/score": [1.0, 1.0]}, EarlyStopping("val/scor", strict=False), batches=1).global_step == 2
    with pytest.raises(ValueError, match=r"`mode` can be min .* got lowest"):
        EarlyStopping("x", mode="lowest")


def test_values_of_the_training_epoch_can_be_watched(fit: Any, scripted: Any) -> None:
    stopper = EarlyStopping("train/constant", patience=1)

    class Constant(scripted):  # type: ignore[misc, valid-type]
        def on_train_epoch_end(self) -> None:
            self.log("train/constant", 1.0)

    assert fit(Constant(), stopper, max_epochs=5, batches=1).global_step == 2


def test_validation_within_epochs_is_checked_each_time(fit: Any) -> None:
    stopper = EarlyStopping("val/score", patience=2)
    trainer = fit({"val/score": [3, 2, 2, 2, 1, 0]}, stopper, max_epochs=3, val_check_interval=2)
    assert trainer.global_step == 8
    per_epoch = EarlyStopping("val/score", patience=2, check_on_train_epoch_end=True)
    trainer = fit({"val/score": [3, 2, 2, 2, 2, 0]}, per_epoch, max_epochs=3, val_check_interval=2)
    assert trainer.global_step == 12, "three checks: 2, 2, 0"


def test_a_resumed_run_stops_where_the_whole_one_does(fit: Any, scripted: Any) -> None:
    curve = [5.0, 4.0, 4.5, 4.6, 4.7, 4.8]
    # The callback that saves is given first; it must still save after the other has judged the same validation.
    fit(
        {"val/score": curve},
        ModelCheckpoint(save_top_k=-1, filename="{epoch}"),
        saver := EarlyStopping("val/score", patience=3),
    )
    assert saver.stopped_epoch == 4
    trainer = fit(
        {"val/score": curve[:3]},
        ModelCheckpoint(save_top_k=-1, filename="{epoch}"),
        EarlyStopping("val/score", patience=3),
    )
    module = scripted({"val/score": curve})
    module.validations = 3
    stopper = EarlyStopping("val/score", patience=3)
    resumed = fit(module, stopper, ckpt_path=trainer.run_folder.checkpoints / "epoch=2.ckpt", max_epochs=6)
    assert stopper.stopped_epoch == 4
    assert resumed.global_step == 20


def test_a_stopped_run_stays_stopped_when_it_is_resumed_and_a_new_fit_does_not(fit: Any, scripted: Any) -> None:
    saver = ModelCheckpoint(save_last=True, filename="{epoch}")
    stopper = EarlyStopping("val/score", patience=1)
    first = fit({"val/score": [2.0, 3.0, 1.0, 0.0]}, stopper, saver)
    assert first.global_step == 8
    again, module = EarlyStopping("val/score", patience=1), scripted({"val/score": [0.0] * 4})
    with pytest.warns(UserWarning, match="had stopped the run .*val/score did not improve.*leave out EarlyStopping"):
        resumed = fit(module, again, ckpt_path=saver.last_model_path, max_epochs=9)
    assert (resumed.global_step, module.validations, again.stopped_epoch) == (8, 0, 1)
    onward = fit(scripted({"val/score": [0.0] * 4}), ckpt_path=saver.last_model_path, max_epochs=3)
    assert onward.global_step == 12, "without the callback it goes on"
    stopper.wait_count = 0
    fresh = fit({"val/score": [1.0, 0.5]}, stopper)
    assert fresh.global_step == 8, "the same object in a new fit does not stop at once"


def test_verbose_logs_the_reason(fit: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "arclight"):
        fit({"val/score": [2.0, 1.0, 1.0]}, EarlyStopping("val/score", patience=1, verbose=True), batches=1)
    assert "val/score improved from 2 to 1" in caplog.text
    assert "val/score did not improve in the last 1 checks" in caplog.text


def test_sanity_check_and_later_validation_do_not_count(fit: Any, make_rows: Any) -> None:
    stopper = EarlyStopping("val/score", patience=1)
    trainer = fit({"val/score": [2.0, 1.0, 0.5]}, stopper, batches=1, max_epochs=2, num_sanity_val_steps=1)
    assert (trainer.global_step, stopper.wait_count, stopper.best_score) == (2, 0, 1.0)
    trainer.validate(dataloaders=make_rows(1), verbose=False)
    assert stopper.best_score == 1.0
