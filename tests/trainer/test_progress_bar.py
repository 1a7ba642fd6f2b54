"""The progress display, drawn for real into a text buffer."""

from __future__ import annotations

import io
import math
import re
import time
from typing import Any

import pytest

from arclight.trainer.callback import Callback
from arclight.trainer.callbacks import RichProgressBar
from arclight.trainer.callbacks.progress_clock import ProgressClock, clock_text, rate_text, value_text


def shown(terminal: bool, **arguments: Any) -> tuple[RichProgressBar, io.StringIO]:
    out = io.StringIO()
    return RichProgressBar(
        console_kwargs={"file": out, "stderr": False, "force_terminal": terminal, "width": 90, "color_system": None},
        **arguments,
    ), out


def plain(out: io.StringIO) -> str:
    """The text without control sequences, one screen after the other."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())


def test_it_hooks_into_no_batch() -> None:
    assert not [name for name in vars(RichProgressBar) if "batch" in name and name in vars(Callback)]


def test_a_terminal_sees_epoch_batches_speed_and_metrics(fit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arclight.trainer.loop.PROGRESS_INTERVAL", 0.0)
    bar, out = shown(True)
    fit({"val/score": [1.0, 2.0]}, bar, batches=30)
    text = plain(out)
    assert re.search(r"Epoch 1/2 .*12/30.*it/s.*eta", text)
    assert re.search(r"Epoch 1/2  validate .*1/2", text)
    assert re.search(r"train/loss\W\d+\.\d{4}", text)
    *_, last = re.findall(r"Epoch [^\n]*", text)
    assert re.fullmatch(r"Epoch 2/2 .*30/30.*it/s +0:0\d *", last), (
        "the last picture is the whole run and the time it took"
    )


def test_output_that_is_no_terminal_gets_whole_lines(fit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bar, out = shown(False)
    fit({"val/score": [1.0]}, bar, batches=6)
    assert re.fullmatch(r"Epoch 1/1  6/6  [\d.,]+ it/s  0:\d\d  train/loss \d\.\d{4}\n", out.getvalue())
    monkeypatch.setattr("arclight.trainer.callbacks.rich_progress_bar.PLAIN_INTERVAL", 0.0)
    bar, out = shown(False)
    fit({"val/score": [1.0]}, bar, batches=6)
    assert len(out.getvalue().splitlines()) >= 3
    assert "\x1b" not in out.getvalue()


def test_it_redraws_by_time_and_not_by_batch(fit: Any) -> None:
    class Count(RichProgressBar):
        draws = 0

        def get_metrics(self, trainer: Any, pl_module: Any) -> dict[str, Any]:
            self.draws += 1
            return {"mine": 0.5}

    out = io.StringIO()
    bar = Count(console_kwargs={"file": out, "force_terminal": True, "width": 80})
    start = time.monotonic()
    fit({"val/score": [1.0]}, bar, batches=400)
    assert bar.draws <= 4 + 10 * (time.monotonic() - start)
    assert "mine\u00a00.5000" in plain(out)


def test_evaluation_alone_has_its_own_bar(make_trainer: Any, scripted: Any, make_rows: Any) -> None:
    bar, out = shown(True)
    trainer = make_trainer(bar)
    trainer.validate(scripted(), make_rows(7), verbose=False)
    assert re.search(r"Validate .*7/7", plain(out))
    assert out.getvalue().count("\x1b[?25h") == 1, "and it ends with it"


def test_a_test_after_a_fit_counts_its_own_batches(fit: Any, make_rows: Any) -> None:
    bar, out = shown(True)
    trainer = fit({"val/score": [1.0]}, bar)
    trainer.test(dataloaders=make_rows(9), verbose=False)
    assert re.findall(r"Test .*?(\d+/\d+)", plain(out))[-1] == "9/9"


def test_several_loaders_are_one_bar(make_trainer: Any, scripted: Any, make_rows: Any) -> None:
    bar, out = shown(True)
    module = scripted()
    module.validation_step = lambda batch, batch_idx, dataloader_idx: None
    make_trainer(bar).validate(module, [make_rows(3), make_rows(4)], verbose=False)
    assert re.findall(r"(\d+)/7", plain(out))[-1] == "7"


def test_after_a_failure_the_terminal_is_as_before(fit: Any, scripted: Any) -> None:
    bar, out = shown(True)
    module = scripted()
    module.training_step = lambda batch, batch_idx: 1 / 0
    with pytest.raises(ZeroDivisionError):
        fit(module, bar, max_epochs=1)
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h") == 1, (
        "the cursor was hidden and is shown again"
    )


def test_off_and_left(fit: Any) -> None:
    bar, out = shown(True, refresh_rate=0)
    fit({"val/score": [1.0]}, bar)
    assert out.getvalue() == ""
    bar, out = shown(True, leave=True)
    fit({"val/score": [1.0, 1.0, 1.0]}, bar)
    for epoch in (1, 2, 3):
        assert re.search(rf"Epoch {epoch}/3 [^\n]*4/4", plain(out))


def test_speed_and_time_left() -> None:
    now = [0.0]
    clock = ProgressClock(10, clock=lambda: now[0])
    assert clock.rate is None
    assert clock.left(100) is None
    for second in range(1, 11):
        now[0] = second
        clock.update(10 + 5 * second)
    assert clock.rate == pytest.approx(5.0)
    assert clock.left(110) == pytest.approx(10.0)
    clock.pause()
    now[0] = 20.0
    clock.update(60)
    clock.resume(60)
    now[0] = 21.0
    clock.update(65)
    assert clock.rate == pytest.approx(5.0), "ten seconds of validation do not slow the batches down"
    assert clock.left(110) == pytest.approx(45 * 21 / 55), "but they count in what is to come"
    assert clock.left(math.inf) is None


def test_texts() -> None:
    assert [clock_text(s) for s in (None, 7, 754.4, 3723, 200000)] == ["-:--", "0:07", "12:34", "1:02:03", "2d 07:33"]
    assert [rate_text(r) for r in (None, 0.25, 41.23, 1234.5)] == ["", "4.0 s/it", "41.2 it/s", "1,234 it/s"]
    assert [value_text(v) for v in (0.5, 0.0, 1e-5, 12, math.nan)] == ["0.5000", "0.0000", "1.000e-05", "12", "nan"]
