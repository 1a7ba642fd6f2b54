"""Hold the newest logged values for callbacks and progress bars, computed on demand.

`RunState` holds one, `reporting` updates it; callbacks and bars read it as ``trainer.callback_metrics`` and its like. Reading a tensor
waits for the device, so values stay there until a bar or a caller reads them.
"""

from __future__ import annotations

from typing import Any

import torch

from arclight.trainer.logging.results import ResultCollection, ResultMetric


class Metrics:
    """Values of ``trainer.callback_metrics``, ``logged_metrics`` and ``progress_bar_metrics``.

    Values stay tensors on their device; only a progress bar's are read back, in one transfer.
    """

    def __init__(self, rows: dict[tuple[str, int], int] | None = None) -> None:
        self.callback: dict[str, torch.Tensor] = {}
        self.logged: dict[str, torch.Tensor] = {}
        self.bar: dict[str, torch.Tensor | float] = {}
        self.rows: dict[tuple[str, int], int] = {} if rows is None else rows
        """Evaluation batches seen so far by kind of evaluation and loader: the x-axis of their step values."""

    def copy(self) -> Metrics:
        """Return a copy of the current values."""
        other = Metrics(self.rows)
        other.callback, other.logged, other.bar = dict(self.callback), dict(self.logged), dict(self.bar)
        return other

    def update(self, values: ResultCollection) -> Metrics:
        """Add what was logged since the last update; return these metrics."""
        if values.in_batches:
            self.update_steps(values)
        else:
            for entry in values.entries():
                if entry.settings.on_epoch and entry.count and entry.reduced != entry.count:
                    # logged in a hook of the epoch that is still running: this process's part of it
                    if entry.metric is not None:
                        entry.result, entry.reduced = entry.compute_metric(), entry.count
                    else:
                        entry.finish(*entry.summary())
                    self.update_epoch([entry])
                    entry.reduced = -1  # to be reduced over all processes when the hook is over
        return self

    def update_steps(self, values: ResultCollection) -> None:
        """Update the metrics with the newest step values.

        Those of an evaluation stay out of `callback_metrics`.
        """
        for entry in values.entries():
            value = entry.last
            if value is None or value is entry.shown:
                continue
            entry.check_unchanged([value])
            entry.shown = value
            value = to_float32(value)
            if values.stage == "train":
                self.callback[entry.log_name] = self.callback[entry.step_name] = value
            self._show(entry, entry.step_name, value)

    def update_epoch(self, entries: list[ResultMetric]) -> None:
        """Update the metrics with the epoch value of each entry that has one."""
        for entry in entries:
            if entry.result is not None:
                self.callback[entry.log_name] = self.callback[entry.epoch_name] = entry.result
                self._show(entry, entry.epoch_name, entry.result)

    def _show(self, entry: ResultMetric, name: str, value: torch.Tensor) -> None:
        if entry.settings.logger:
            self.logged[name] = value
        if entry.settings.prog_bar:
            self.bar[name] = value

    def bar_values(self) -> dict[str, float]:
        """Return the progress bar's values as numbers."""
        tensors = {name: value for name, value in self.bar.items() if isinstance(value, torch.Tensor)}
        self.bar.update(read_scalars(tensors))
        return self.bar  # type: ignore[return-value]

    def to_host(self) -> None:
        """Move the values to the host, to free device memory."""
        for values in (self.callback, self.logged):
            values.update({name: value.cpu() for name, value in values.items()})
        self.bar_values()

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the metrics as plain numbers with their types, to be sent to another process."""
        return {
            "callback": {name: (value.tolist(), str(value.dtype)) for name, value in self.callback.items()},
            "logged": {name: (value.tolist(), str(value.dtype)) for name, value in self.logged.items()},
            "bar": dict(self.bar_values()),
        }

    def load_state(self, state: dict[str, dict[str, Any]]) -> None:
        self.callback, self.logged = (
            {
                name: torch.tensor(value, dtype=getattr(torch, dtype.removeprefix("torch.")))
                for name, (value, dtype) in state[which].items()
            }
            for which in ("callback", "logged")
        )
        self.bar = dict(state["bar"])


def to_float32(value: torch.Tensor) -> torch.Tensor:
    """Return a type that shows a value as it is: float64 for float64, else float32."""
    return value if value.dtype in (torch.float32, torch.float64) else value.float()


def read_scalars(values: dict[str, torch.Tensor]) -> dict[str, float]:
    """Read each value as a float, in one transfer per device and type.

    Raises ValueError for a value of several numbers.
    """
    by_device: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for name, value in values.items():
        if value.numel() != 1:
            raise ValueError(
                f"The metric `{name}` does not contain a single element but has shape {tuple(value.shape)}, thus it cannot be "
                "shown as a number; log it with logger=False, prog_bar=False"
            )
        by_device.setdefault((value.device, value.dtype), []).append(name)
    read: dict[str, float] = {}
    for names in by_device.values():
        read |= zip(names, torch.stack([values[name].detach().reshape(()) for name in names]).tolist(), strict=True)
    return {name: read[name] for name in values}
