"""The progress display, drawn for real into a text buffer."""

from __future__ import annotations

import dataclasses
import io
import math
import pickle
import re
import sys
import time
from typing import Any

import pytest
from rich.progress import TextColumn

from arclight.compat.lightning.trainer import LIGHTNING
from arclight.trainer.callback import Callback
from arclight.trainer.callbacks import ProgressBar, RichProgressBar, RichProgressBarTheme, TQDMProgressBar
from arclight.trainer.callbacks.progress.progress_bar import get_standard_metrics
from arclight.trainer.callbacks.progress.rich_progress import count_text, value_text
from arclight.trainer.callbacks.progress.timing import ProgressClock, clock_text, rate_text
from arclight.trainer.loggers.logger import DummyLogger
from arclight.trainer.loop.hooks import callback_hooks


def shown(terminal: bool, **arguments: Any) -> tuple[RichProgressBar, io.StringIO]:
    out = io.StringIO()
    return RichProgressBar(
        console_kwargs={"file": out, "stderr": False, "force_terminal": terminal, "width": 90, "color_system": None},
        **arguments,
    ), out


def plain(out: io.StringIO) -> str:
    """The text without control sequences, one screen after the other."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())


def test_it_hooks_into_no_batch(fit: Any) -> None:
    bar, _ = shown(True)
    trainer = fit({"val/score": [1.0]}, bar)
    hooks = [name for name in vars(Callback) if "batch" in name]
    assert hooks
    assert not [name for name in hooks if callback_hooks(trainer, trainer.lightning_module, [bar], name)]

    class Mine(RichProgressBar):
        def on_train_batch_end(self, *arguments: Any) -> None:
            seen.append(arguments[-1])
            super().on_train_batch_end(*arguments)

    seen: list[int] = []
    fit({"val/score": [1.0]}, Mine(console_kwargs={"file": io.StringIO()}))
    assert seen == [0, 1, 2, 3], "a subclass's own hook is called"


def test_a_terminal_sees_epoch_batches_speed_and_metrics(fit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arclight.trainer.loop.fit.PROGRESS_INTERVAL", 0.0)
    bar, out = shown(True, refresh_rate=math.inf)
    fit({"val/score": [1.0, 2.0]}, bar, batches=30)
    text = plain(out)
    assert re.search(r"Epoch 1/2 .*12/30.*it/s.*eta", text)
    assert re.search(r"Validation .*1/2", text)
    assert re.search(r"train/loss: \d+\.\d{3}", text)
    *_, last = re.findall(r"Epoch [^\n]*", text)
    assert re.fullmatch(r"Epoch 2/2 .*30/30.*it/s +0:0\d *", last), (
        "the last picture is the whole run and the time it took"
    )


def test_output_that_is_no_terminal_gets_whole_lines(fit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bar, out = shown(False)
    fit({"val/score": [1.0]}, bar, batches=6)
    assert re.fullmatch(r"Epoch 1/1  6/6  [\d.,]+ it/s  0:\d\d  train/loss: \d\.\d{3}\n", out.getvalue())
    monkeypatch.setattr("arclight.trainer.callbacks.progress.rich_progress.PLAIN_INTERVAL", 0.0)
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
    assert "mine: 0.500" in plain(out)


def test_evaluation_alone_has_its_own_bar(make_trainer: Any, scripted: Any, make_rows: Any) -> None:
    bar, out = shown(True)
    trainer = make_trainer(bar)
    trainer.validate(scripted(), make_rows(7), verbose=False)
    assert re.search(r"Validation .*7/7", plain(out))
    assert out.getvalue().count("\x1b[?25h") == 1, "and it ends with it"


def test_a_test_after_a_fit_counts_its_own_batches(fit: Any, make_rows: Any) -> None:
    bar, out = shown(True)
    trainer = fit({"val/score": [1.0]}, bar)
    trainer.test(dataloaders=make_rows(9), verbose=False)
    assert re.findall(r"Testing .*?(\d+/\d+)", plain(out))[-1] == "9/9"


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


def test_a_refresh_rate_of_zero_hides_the_bar_and_leave_keeps_each_epoch(fit: Any) -> None:
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
    values = (0.5, 0.0, 1e-5, -2e-4, 1234.5, 12, math.nan, "four")
    shown = ["0.500", "0.000", "1e-05", "-0.0002", "1234.500", "12", "nan", "four"]
    assert [value_text(value, ".3f") for value in values] == shown
    assert count_text(7, 1234) == "    7/1,234"
    assert count_text(7, math.inf) == "7"


def test_a_theme_and_columns_of_ones_own(fit: Any) -> None:
    class Mine(RichProgressBar):
        def configure_columns(self, trainer: Any) -> Any:
            return [TextColumn("now {task.completed}")]

    out = io.StringIO()
    theme = RichProgressBarTheme(metrics_format=".1e", metrics_text_delimiter=" | ")
    console = {"file": out, "stderr": False, "force_terminal": True, "width": 80, "color_system": None}
    bar = Mine(theme=theme, console_kwargs=console)
    bar.get_metrics = lambda trainer, module: {"a": 0.25, "b": 4}  # type: ignore[method-assign]
    fit({"val/score": [1.0]}, bar)
    assert re.search(r"now 4 *\n +a: 2\.5e-01 \| b: 4", plain(out))


def test_progress_bars_show_their_counts_and_are_pickled_without_output(fit: Any) -> None:
    bar, _ = shown(False)
    fit({"val/score": [1.0]}, bar, num_sanity_val_steps=1)
    assert (bar.train_progress_bar.completed, bar.train_progress_bar.total) == (4, 4)
    assert (bar.val_sanity_check_bar.completed, bar.val_sanity_check_bar.total) == (1, 1)
    assert (bar.val_progress_bar.completed, bar.val_progress_bar.total) == (2, 2)
    assert bar.train_progress_bar.visible
    assert not bar.val_progress_bar.visible
    assert pickle.loads(pickle.dumps(bar)).progress is None


def test_a_disabled_bar_and_the_limits_of_one_at_a_time(fit: Any, make_trainer: Any) -> None:
    bar, out = shown(True)
    bar.disable()
    assert bar.is_disabled
    fit({"val/score": [1.0]}, bar)
    assert (bar.progress, out.getvalue()) == (None, "")
    bar.enable()
    assert bar.is_enabled
    with pytest.raises(ValueError, match="only one progress bar is supported"):
        make_trainer(shown(True)[0], shown(True)[0], enable_progress_bar=True)
    with pytest.raises(TypeError, match="has not been set yet"):
        assert RichProgressBar().trainer


class Base(ProgressBar):
    def __init__(self) -> None:
        super().__init__()
        self.totals: list[Any] = []

    def enable(self) -> None: ...

    def disable(self) -> None: ...

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.totals.append(("train", self.total_train_batches, self.total_val_batches))

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self.has_dataloader_changed(dataloader_idx):
            self.totals.append((dataloader_idx, self.total_val_batches_current_dataloader))


def test_the_base_knows_totals(make_trainer: Any, scripted: Any, make_rows: Any) -> None:
    bar, module = Base(), scripted()
    module.validation_step = lambda batch, batch_idx, dataloader_idx: None
    trainer = make_trainer(bar, max_epochs=4, check_val_every_n_epoch=2, enable_progress_bar=True)
    trainer.fit(module, make_rows(3), [make_rows(4), make_rows(5)])
    loaders = [(0, 4), (1, 5)]
    assert bar.totals == [("train", 3, 0), ("train", 3, 0), *loaders, ("train", 3, 0), ("train", 3, 9), *loaders], (
        "how many there are is known once the loaders have been made"
    )


def test_a_name_that_the_bar_shows_already_warns(fit: Any) -> None:
    bar, _ = shown(False)
    trainer = fit({"val/score": [1.0]}, bar)
    assert set(bar.get_metrics(trainer, trainer.lightning_module)) == {"train/loss"}, "the run folder tells the number"
    for version, told in ((3, {"v_num": 3}), ("2026_11_21", {"v_num": "1_21"}), (None, {})):
        trainer = fit({"val/score": [1.0]}, bar, logger=Versioned(version))
        trainer.behavior = dataclasses.replace(trainer.behavior, run_folders=False)
        assert get_standard_metrics(trainer) == told
    trainer = fit({"val/score": [1.0]}, bar, logger=Versioned(3))
    trainer.behavior, trainer.run_state.metrics.bar["v_num"] = LIGHTNING, 4.0
    with pytest.warns(UserWarning, match="already tracks a metric with the name.s. 'v_num'"):
        assert bar.get_metrics(trainer, trainer.lightning_module)["v_num"] == 4.0


class Versioned(DummyLogger):
    def __init__(self, version: Any) -> None:
        super().__init__()
        self._version = version

    @property
    def version(self) -> Any:
        return self._version


def test_tqdm_bars(fit: Any, make_rows: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    bar = TQDMProgressBar(refresh_rate=3)
    trainer = fit({"val/score": [1.0, 1.0]}, bar, batches=7, enable_progress_bar=True)
    assert (bar.train_progress_bar.n, bar.train_progress_bar.total) == (7, 7)
    assert (bar.val_progress_bar.n, bar.val_progress_bar.total) == (2, 2)
    trainer.test(dataloaders=make_rows(5), verbose=False)
    assert (bar.test_progress_bar.n, bar.test_progress_bar.total) == (5, 5)
    out = capsys.readouterr().out
    assert re.search(r"Epoch 1: 100%.*7/7 .*train/loss=\d", out)
    assert "Testing DataLoader 0: 100%" in out
    assert pickle.loads(pickle.dumps(bar)).refresh_rate == 3


def test_without_tqdm_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ModuleNotFoundError, match=r"arclight-torch\[track\]"):
        TQDMProgressBar()


def test_a_bar_that_is_turned_off_is_not_imported(make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks and programs without a terminal would pay for it at every start."""
    name = "arclight.trainer.callbacks.progress.rich_progress"
    monkeypatch.delitem(sys.modules, name)
    make_trainer(enable_progress_bar=False)
    assert name not in sys.modules
