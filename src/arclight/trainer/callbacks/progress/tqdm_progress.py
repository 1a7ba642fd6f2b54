"""Draw tqdm progress bars, one for each stage, under Lightning's names.

Users pass it to a Trainer in place of the default bar. Attributes such as ``train_progress_bar`` are Lightning's and stay.
"""

from __future__ import annotations

import math
import os
import sys
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from arclight._intervals import NonNegativeInt, check
from arclight.fabric.extras import require
from arclight.trainer.callbacks.progress.progress_bar import ProgressBar

if TYPE_CHECKING:
    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer

_Base: Any = require("tqdm", extra="track").tqdm if find_spec("tqdm") is not None else object

_WIDTH = 5
"""Characters of a number in a bar."""
_REDRAW_S = 0.1
"""Shortest time between two redraws; on an accelerator also between two reads of logged values, which synchronise with it."""


class Tqdm(_Base):
    """A tqdm bar whose numbers keep their width, so that the line does not jump."""

    @staticmethod
    def format_num(n: float | str) -> str:
        text: str = n if isinstance(n, str) else _Base.format_num(n)
        if isinstance(n, int) or "e" in text:
            return text
        if "." not in text and len(text) < _WIDTH:
            if not text.lstrip("-").isdigit():
                return text
            text += "."
        return text + "0" * (_WIDTH - len(text))


class TQDMProgressBar(ProgressBar):
    """Show tqdm bars of all stages on stdout; needs the package tqdm.

    ``refresh_rate``: batches between two updates, 0 for no display (at least ``TQDM_MINITERS``; 20 on Colab by default);
    ``process_position``: rows above that other processes' bars take; ``leave``: keep a bar for every epoch.

    To change a bar, override its ``init_..._tqdm`` and change what ``super()`` gives. Raises MissingExtraError without tqdm.
    """

    plain_text = True
    BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_noinv_fmt}{postfix}]"

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        require("tqdm", extra="track")
        super().__init__()
        check("refresh_rate", refresh_rate, NonNegativeInt)
        check("process_position", process_position, NonNegativeInt)
        if os.getenv("COLAB_GPU") and refresh_rate == 1:
            refresh_rate = 20  # notebooks on Colab do not keep up with more
        self._refresh_rate = max(refresh_rate, int(os.environ.get("TQDM_MINITERS", refresh_rate)))
        self._process_position, self._leave, self._enabled = process_position, leave, True
        self._bars: dict[str, Any] = {}
        self._drawn = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_bars": {}}

    @property
    def refresh_rate(self) -> int:
        return self._refresh_rate

    @property
    def process_position(self) -> int:
        return self._process_position

    @property
    def is_enabled(self) -> bool:
        return self._enabled and self._refresh_rate > 0

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    # -- the bars --------------------------------------------------------------------------------------------------

    def init_sanity_tqdm(self) -> Tqdm:
        return self._make(self.sanity_check_description, leave=False)

    def init_train_tqdm(self) -> Tqdm:
        return self._make(self.train_description, leave=True, smoothing=0)

    def init_validation_tqdm(self) -> Tqdm:
        within_fit = self.trainer.state.fn == "fit"
        return self._make(self.validation_description, leave=not within_fit, below=within_fit)

    def init_test_tqdm(self) -> Tqdm:
        return self._make(self.test_description, leave=True)

    def init_predict_tqdm(self) -> Tqdm:
        return self._make(self.predict_description, leave=True, smoothing=0)

    def _make(self, description: str, leave: bool, below: bool = False, **options: Any) -> Tqdm:
        return Tqdm(
            desc=description,
            position=2 * self.process_position + below,
            disable=self.is_disabled,
            leave=leave,
            dynamic_ncols=True,
            file=sys.stdout,
            bar_format=self.BAR_FORMAT,
            **options,
        )

    def _bar(self, kind: str) -> Any:
        if kind not in self._bars:
            raise TypeError(f"The `{type(self).__name__}._{kind}_progress_bar` reference has not been set yet.")
        return self._bars[kind]

    @property
    def train_progress_bar(self) -> Any:
        """The bar of training; TypeError before there is one."""
        return self._bar("train")

    @train_progress_bar.setter
    def train_progress_bar(self, bar: Any) -> None:
        self._bars["train"] = bar

    @property
    def val_progress_bar(self) -> Any:
        """The bar of validation or of the sanity check."""
        return self._bar("val")

    @val_progress_bar.setter
    def val_progress_bar(self, bar: Any) -> None:
        self._bars["val"] = bar

    @property
    def test_progress_bar(self) -> Any:
        return self._bar("test")

    @test_progress_bar.setter
    def test_progress_bar(self, bar: Any) -> None:
        self._bars["test"] = bar

    @property
    def predict_progress_bar(self) -> Any:
        return self._bar("predict")

    @predict_progress_bar.setter
    def predict_progress_bar(self, bar: Any) -> None:
        self._bars["predict"] = bar

    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        active = next((bar for bar in self._bars.values() if not bar.disable), None)
        if active is None:
            super().print(*args, sep=sep, **kwargs)
        else:
            active.write(sep.join(map(str, args)), **kwargs)

    # -- drawing ---------------------------------------------------------------------------------------------------

    def _begin(self, bar: Any, total: float, description: str) -> None:
        bar.reset()
        bar.total, bar.initial = convert_inf(total), 0
        bar.set_description(description)

    def _advance(self, bar: Any, done: int, metrics: bool = False) -> None:
        """Show ``done`` batches every ``refresh_rate`` batches, at most ten times a second."""
        last = done == bar.total
        if self.is_disabled or not (last or done % self.refresh_rate == 0):
            return
        trainer, now = self.trainer, time.monotonic()
        draw = last or now >= self._drawn + _REDRAW_S
        if metrics and (draw or trainer.strategy.root_device.type == "cpu"):
            bar.set_postfix(self.get_metrics(trainer, trainer.lightning_module), refresh=False)
        if bar.disable:
            return
        bar.n = done
        if draw:
            self._drawn = now
            bar.refresh()

    def _start_loader(self, bar: Any, index: int, description: str, total: str) -> None:
        if self.has_dataloader_changed(index):
            self._begin(bar, getattr(self, total), f"{description} DataLoader {index}")

    def _finish(self, bar: Any) -> None:
        bar.close()
        self.reset_dataloader_idx_tracker()

    # -- training --------------------------------------------------------------------------------------------------

    def on_sanity_check_start(self, trainer: Trainer, pl_module: Module) -> None:
        self.val_progress_bar = self.init_sanity_tqdm()
        self.train_progress_bar = Tqdm(disable=True)

    def on_sanity_check_end(self, trainer: Trainer, pl_module: Module) -> None:
        self.train_progress_bar.close()
        self.val_progress_bar.close()

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        self.train_progress_bar = self.init_train_tqdm()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Module) -> None:
        if self._leave:
            self.train_progress_bar = self.init_train_tqdm()
        self._begin(self.train_progress_bar, self.total_train_batches, f"Epoch {trainer.current_epoch}")

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._advance(self.train_progress_bar, batch_idx + 1, metrics=True)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        if not self.train_progress_bar.disable:
            self.train_progress_bar.set_postfix(self.get_metrics(trainer, pl_module))
        if self._leave:
            self.train_progress_bar.close()

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        self.train_progress_bar.close()

    # -- evaluation ------------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: Module) -> None:
        if not trainer.sanity_checking:
            self.val_progress_bar = self.init_validation_tqdm()

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        name = self.sanity_check_description if trainer.sanity_checking else self.validation_description
        self._start_loader(self.val_progress_bar, dataloader_idx, name, "total_val_batches_current_dataloader")

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._advance(self.val_progress_bar, batch_idx + 1)

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._finish(self.val_progress_bar)
        if "train" in self._bars and trainer.state.fn == "fit":
            self.train_progress_bar.set_postfix(self.get_metrics(trainer, pl_module))

    def on_test_start(self, trainer: Trainer, pl_module: Module) -> None:
        self.test_progress_bar = self.init_test_tqdm()

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        total = "total_test_batches_current_dataloader"
        self._start_loader(self.test_progress_bar, dataloader_idx, self.test_description, total)

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._advance(self.test_progress_bar, batch_idx + 1)

    def on_test_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._finish(self.test_progress_bar)

    def on_predict_start(self, trainer: Trainer, pl_module: Module) -> None:
        self.predict_progress_bar = self.init_predict_tqdm()

    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        total = "total_predict_batches_current_dataloader"
        self._start_loader(self.predict_progress_bar, dataloader_idx, self.predict_description, total)

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._advance(self.predict_progress_bar, batch_idx + 1)

    def on_predict_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._finish(self.predict_progress_bar)

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        for bar in self._bars.values():
            bar.close()


def convert_inf(x: float | None) -> float | None:
    """Return ``x``, or None, which is tqdm's unknown total, for infinity and NaN."""
    return x if x is not None and math.isfinite(x) else None
