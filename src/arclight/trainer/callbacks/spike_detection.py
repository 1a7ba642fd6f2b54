"""Stop at loss spikes, in a Fabric's loop and as a callback; a file says which batches to leave out of the next run."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from arclight._intervals import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, check
from arclight.trainer.callback import Callback

if TYPE_CHECKING:
    from arclight.trainer.fabric.fabric import Fabric
    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer


class TrainingSpikeException(RuntimeError):  # noqa: N818 - the field's name
    """The loss of batch ``batch_idx`` left the range of those before it."""

    def __init__(self, batch_idx: int, *arguments: Any) -> None:
        super().__init__(f"Training spike detected in batch {batch_idx}", *arguments)
        self.batch_idx = batch_idx


class FabricSpikeDetection:
    """Ends training at a loss spike, for a loop written with :class:`~arclight.Fabric`: call :meth:`on_train_batch_end`.

    A loss is a spike when it is worse than the one before and further from the mean of the newest ``window`` losses
    than both ``atol`` and ``rtol`` times that mean (None leaves a test out). The first ``warmup`` batches are not judged.
    ``mode``: whether lower ("min") or higher ("max") is better. ``finite_only``: NaN and infinity are spikes whatever
    the tolerances.

    Then the numbers of that batch and of the one before it, which may have spoiled the weights, are added to
    ``exclude_batches_path`` (a JSON file, or the folder for ``skip_batches.json``; default: the working directory) and
    every process raises :class:`TrainingSpikeException`. Judging each batch reads its loss: a wait for the device per step.
    """

    def __init__(
        self,
        mode: Literal["min", "max"] = "min",
        window: int = 10,
        warmup: int = 1,
        atol: float | None = None,
        rtol: float | None = 2.0,
        exclude_batches_path: str | Path | None = None,
        finite_only: bool = True,
    ) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f"Invalid mode. Has to be min or max, found {mode}")
        check("window", window, PositiveInt)
        check("warmup", warmup, NonNegativeInt)
        check("atol", atol, NonNegativeFloat | None)
        check("rtol", rtol, PositiveFloat | None)
        self.mode, self.warmup, self.atol, self.rtol = mode, warmup, atol, rtol
        self.exclude_batches_path, self.finite_only = exclude_batches_path, finite_only
        self.last_val = 0.0
        """The newest loss that was no spike."""
        self.running: deque[float] = deque(maxlen=window)
        self.bad_batches: list[int] = []

    def on_train_batch_end(self, fabric: Fabric, loss: torch.Tensor, batch: Any, batch_idx: int) -> None:
        """Judge ``loss``. A collective: every process must call this for every batch."""
        value = float(loss.detach())
        spike = batch_idx >= self.warmup and self._is_spike(value)
        if fabric.strategy.reduce_boolean_decision(spike, all=False):  # what one process meets ends all of them
            self._handle_spike(fabric, batch_idx)
        elif math.isfinite(value):
            self.running.append(value)
            self.last_val = value

    def _is_spike(self, value: float) -> bool:
        if not math.isfinite(value) and self.finite_only:
            return True
        change = value - self.last_val
        if not self.running or (change <= 0 if self.mode == "min" else change >= 0):
            return False
        mean = sum(self.running) / len(self.running)
        distance = abs(value - mean)  # NaN compares false: no spike where only finite losses are judged by distance
        beyond_absolute = self.atol is None or distance >= abs(self.atol)
        beyond_relative = self.rtol is None or distance >= abs(self.rtol * mean)
        return beyond_absolute and beyond_relative

    def _handle_spike(self, fabric: Fabric, batch_idx: int) -> None:
        self.bad_batches += [batch_idx - 1, batch_idx] if batch_idx else [batch_idx]
        if fabric.global_rank == 0:
            path = Path(self.exclude_batches_path or ".")
            path = path if path.suffix == ".json" else path / "skip_batches.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.bad_batches, indent=4), encoding="utf-8")
        raise TrainingSpikeException(batch_idx)

    def state_dict(self) -> dict[str, Any]:
        return {
            "last_val": self.last_val,
            "mode": self.mode,
            "warmup": self.warmup,
            "atol": self.atol,
            "rtol": self.rtol,
            "bad_batches": list(self.bad_batches),
            "bad_batches_path": None if self.exclude_batches_path is None else str(self.exclude_batches_path),
            "window": self.running.maxlen,
            "running": list(self.running),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_val, self.mode, self.warmup = state_dict["last_val"], state_dict["mode"], state_dict["warmup"]
        self.atol, self.rtol = state_dict["atol"], state_dict["rtol"]
        self.bad_batches = list(state_dict["bad_batches"])
        self.exclude_batches_path = state_dict["bad_batches_path"]
        self.running = deque(state_dict["running"], maxlen=state_dict["window"])


class SpikeDetection(FabricSpikeDetection, Callback):
    """Ends a fit with :class:`~arclight.trainer.callbacks.spike_detection.TrainingSpikeException` when the training loss jumps.

    The rules and settings are those of :class:`arclight.trainer.callbacks.spike_detection.FabricSpikeDetection`; the list of batches to leave out
    goes to ``<default_root_dir>/skip_batches.json`` by default.
    """

    def on_train_batch_end(  # type: ignore[override]
        self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.exclude_batches_path is None:
            self.exclude_batches_path = Path(trainer.default_root_dir) / "skip_batches.json"
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        if not isinstance(loss, torch.Tensor):
            raise TypeError(
                f"outputs have to be of type torch.Tensor or Mapping, got {type(outputs).__qualname__}: return the loss "
                "from training_step"
            )
        super().on_train_batch_end(trainer, loss, batch, batch_idx)  # type: ignore[arg-type]
