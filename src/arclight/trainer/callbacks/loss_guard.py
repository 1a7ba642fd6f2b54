"""Handle loss spikes and NaN or infinite losses or gradients: stop, skip or roll back.

A recipe's ``[guard]`` or users choose `LossGuard`, which judges on the device and logs what it left out to ``loss_guard.jsonl``.
`SpikeDetection` (and `FabricSpikeDetection`, for a loop of one's own) is Lightning's: it reads each loss, lists the batches to leave out
of the next run in ``skip_batches.json``, and ends the run. Keys of their state are in checkpoints.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch.optim import Optimizer

from arclight import checkpoint as checkpoints
from arclight._intervals import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, check
from arclight.checkpoint.remote import to_path
from arclight.fabric.errors import MisconfigurationError
from arclight.optim import MixedOptimizer
from arclight.trainer.callback import Callback
from arclight.trainer.checkpoint.loading import load_weights
from arclight.trainer.hparams import known_fields
from arclight.trainer.logging.reporting import NonFiniteLossError
from arclight.trainer.loop.gradients import parameters_of

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
    """Detect loss spikes in a :class:`~arclight.Fabric` loop and end the training.

    Call :meth:`on_train_batch_end` after each batch.

    A loss is a spike when it is worse than the one before and further from the mean of the newest ``window`` losses
    than both ``atol`` and ``rtol`` times that mean (None leaves a test out). The first ``warmup`` batches are not judged.
    ``mode``: whether lower ("min") or higher ("max") is better. ``finite_only``: NaN and infinity are spikes whatever
    the tolerances.

    Then the numbers of that batch and of the one before it, which may have corrupted the weights, are written to
    ``exclude_batches_path``, after those of the resumed state (a JSON file, or the folder for ``skip_batches.json``; default: the
    working directory) and every process raises :class:`TrainingSpikeException`. Judging each batch reads its loss: a wait for the
    device per step.
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
    """Detect spikes of the training loss and end the fit.

    Raises :class:`~arclight.trainer.callbacks.loss_guard.TrainingSpikeException`.

    The rules and settings are those of :class:`arclight.trainer.callbacks.loss_guard.FabricSpikeDetection`; the list of batches to leave out
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


Policy = Literal["skip", "rollback", "stop"]


class _History:
    """Losses of the newest good updates, judged on the device without synchronization."""

    def __init__(self, window: int, warmup: int, sigma: float | None, device: torch.device) -> None:
        self.warmup, self.sigma = warmup, sigma
        self.losses = torch.zeros(window, device=device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        """Good updates so far."""

    def judge(self, loss: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        """Return True if the update is bad; add the loss of a good one to the history.

        ``loss``, ``norm``: scalars, the loss and the norm of the gradients.
        """
        bad = ~(torch.isfinite(loss) & torch.isfinite(norm))
        window = len(self.losses)
        if self.sigma is not None:
            known = self.count.clamp(max=window)
            there = torch.arange(window, device=loss.device) < known
            mean = (self.losses * there).sum() / known.clamp(min=1)
            spread = ((self.losses - mean).square() * there).sum() / known.clamp(min=1)
            limit = mean + self.sigma * torch.maximum(spread.sqrt(), 0.01 * mean.abs())
            bad = bad | ((self.count >= self.warmup) & (loss > limit))
        here = torch.arange(window, device=loss.device) == self.count % window
        self.losses = torch.where(here & ~bad, loss, self.losses)
        self.count = self.count + ~bad
        return bad


@dataclass
class Event:
    """An update that was left out."""

    step: int
    """Updates before it."""
    batches: list[tuple[int, int]]
    """(epoch, batch in it) of each batch that took part."""
    loss: float
    """Mean over batches and processes."""
    grad_norm: float
    samples: list[Any] = field(default_factory=list)
    """Per process, what the batches have under ``ids``."""
    action: str = "skip"


@dataclass
class _Waiting:
    """An update whose judgement is on its way from the device."""

    step: int
    batches: list[tuple[int, int]]
    samples: list[Any]
    values: torch.Tensor
    arrived: Any

    def read(self) -> list[float]:
        if self.arrived is not None:
            self.arrived.synchronize()
        return list(map(float, self.values.tolist()))


class LossGuard(Callback):
    """Skip updates with a loss spike, or with a NaN or infinite loss or gradient.

    A spike is more than ``sigma`` standard deviations above the mean of the newest ``window`` losses of good updates (None: only
    finite numbers are asked for; deviations below 1 % of the mean count as that much), once there are ``warmup`` of them.
    Loss and gradient norm (not the norm under a loss scaler, which looks for infinite gradients itself) are averaged over all
    processes before they are judged, so all decide alike; of a window of accumulated batches it is the whole that is judged (after a resume
    within one, its first batches by the losses of rank 0).
    ``policy``: what else happens.

    * ``skip``: training goes on with the next batch; the step counts, for schedules too. After ``patience`` bad
      updates in a row it ends with NonFiniteLossError.
    * ``rollback``: weights, optimizers, schedules and logged rows go back to the newest checkpoint of a ModelCheckpoint that is
      at least ``margin`` steps older than the bad update, and training goes on with the data that comes next: the batches since
      then, the bad ones among them, are not met again. The ``patience``-th rollback ends training instead.
    * ``stop``: the run ends with NonFiniteLossError or TrainingSpikeException; the weights are those before the bad update.

    Each event goes to ``events``, into ``file`` (one JSON object per line; default ``loss_guard.jsonl`` in the run folder) and to the
    user: its epoch and batches, and the entry ``ids`` of batches that are mappings and have one.

    With a :class:`~arclight.optim.MixedOptimizer` on a GPU nobody waits for the device: the update is left out there, and what else
    is to be done follows one step later. Other optimizers wait for the judgement in each step.
    """

    def __init__(
        self,
        policy: Policy = "skip",
        sigma: float | None = 6.0,
        window: int = 100,
        warmup: int = 20,
        patience: int = 10,
        margin: int = 1,
        ids: str = "ids",
        file: str | Path | None = None,
    ) -> None:
        if policy not in ("skip", "rollback", "stop"):
            raise ValueError(f"policy={policy!r} is not known; choose skip, rollback or stop")
        check("sigma", sigma, PositiveFloat | None)
        if not 1 < warmup <= window or patience < 1 or margin < 0:
            raise ValueError(
                "LossGuard needs 1 < warmup <= window, patience >= 1 and margin >= 0, got "
                f"{warmup=}, {window=}, {patience=}, {margin=}"
            )
        self.policy, self.sigma, self.window, self.warmup = policy, sigma, window, warmup
        self.patience, self.margin, self.ids, self.file = patience, margin, ids, file
        self.events: list[Event] = []
        self.in_a_row, self.rollbacks = 0, 0
        self._history: _History | None = None
        self._saved: dict[str, Any] = {}
        self._forget()

    def _forget(self) -> None:
        self._losses: list[torch.Tensor] = []
        self._batches: list[tuple[int, int]] = []
        self._samples: list[Any] = []
        self._waiting: list[_Waiting] = []
        self._good_loss: torch.Tensor | None = None
        self._bad: torch.Tensor | None = None

    # -- detection -------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        if not pl_module.automatic_optimization:
            raise MisconfigurationError(
                "LossGuard judges updates that the trainer makes; automatic_optimization is False"
            )
        if self.policy == "rollback" and not trainer.checkpoint_callbacks:
            raise MisconfigurationError(
                "LossGuard(policy='rollback') needs a ModelCheckpoint that saves during training"
            )
        self._forget()
        self._history = _History(self.window, self.warmup, self.sigma, trainer.strategy.device)
        saved, self._saved = self._saved, {}
        if len(saved.get("losses", ())) == self.window:
            self._history.losses.copy_(saved["losses"])
            self._history.count.copy_(saved["count"])
        if trainer.window.count and (begun := saved.get("begun")):
            self._losses = list(begun["losses"].to(trainer.strategy.device))
            self._batches, self._samples = [tuple(batch) for batch in begun["batches"]], begun["samples"]

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        self._batches.append((trainer.current_epoch, batch_idx))
        if isinstance(batch, Mapping) and self.ids in batch:
            self._samples.append(batch[self.ids])

    def on_before_backward(self, trainer: Trainer, pl_module: Module, loss: torch.Tensor) -> None:
        self._losses.append(loss.detach())

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Module, optimizer: Optimizer) -> None:
        """Judge the next update, and skip it if it is bad."""
        if not self._losses:
            return  # training_step gave None for every batch
        assert self._history is not None
        loss = torch.stack([loss.float() for loss in self._losses]).mean()
        # Under a scaler infinite gradients are its business: it looks for the scale at which there are none.
        scaled = trainer.precision_plugin.scaler is not None
        norm = torch.zeros_like(loss) if scaled else self._norm(trainer, optimizer).to(loss)
        values = trainer.strategy.all_reduce(torch.stack([loss, norm]))
        bad = self._history.judge(values[0], values[1])
        self._bad = bad
        on_device = isinstance(optimizer, MixedOptimizer) and not scaled
        if on_device:
            optimizer.skip = bad  # type: ignore[attr-defined]
        elif bool(bad):
            for parameter in parameters_of(optimizer):
                parameter.grad = None
        self._send(
            trainer, torch.cat([values.double() if values.device.type != "mps" else values, bad.to(values).view(1)])
        )

    def _norm(self, trainer: Trainer, optimizer: Optimizer) -> torch.Tensor:
        return trainer.strategy.clip_norm(parameters_of(optimizer), math.inf)

    def _send(self, trainer: Trainer, values: torch.Tensor) -> None:
        """Copy the judgement to the host asynchronously."""
        arrived = None
        if values.device.type == "cuda":
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            host.copy_(values, non_blocking=True)
            values, arrived = host, torch.cuda.Event()
            arrived.record()
        self._waiting.append(_Waiting(trainer.global_step, self._batches, self._samples, values, arrived))
        self._losses, self._batches, self._samples = [], [], []

    # -- actions ---------------------------------------------------------------------------------------------------

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (
            trainer.last_loss is not None
        ):  # the trainer's alarm is for losses that corrupt the weights, which a bad one did not
            loss = trainer.last_loss.detach()
            before = torch.zeros_like(loss) if self._good_loss is None else self._good_loss
            bad = ~torch.isfinite(loss) if self._bad is None else self._bad
            self._good_loss, self._bad = torch.where(bad, before, loss), None
            trainer.report_loss(self._good_loss)
        newest = bool(self._waiting) and self._waiting[-1].arrived is not None
        self._act(trainer, pl_module, len(self._waiting) - newest)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._act(trainer, pl_module, len(self._waiting))

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._act(trainer, pl_module, len(self._waiting))

    def _act(self, trainer: Trainer, module: Module, count: int) -> None:
        """Read the first ``count`` waiting judgements, and apply the policy."""
        for _ in range(min(count, len(self._waiting))):
            waiting = self._waiting.pop(0)
            loss, norm, bad = waiting.read()
            if not bad:
                self.in_a_row = 0
                continue
            self.in_a_row += 1
            own = _as_lists(waiting.samples)
            event = Event(
                waiting.step, waiting.batches, loss, norm, trainer.strategy.all_gather_object(own), self.policy
            )
            self.events.append(event)
            self._report_event(trainer, event)
            if self.policy == "stop":
                self._end(event, "")
            elif self.policy == "rollback":
                self._roll_back(trainer, module, event)
                self._waiting.clear()  # judgements of weights that are no more
                return
            elif self.in_a_row >= self.patience:
                self._end(event, f"; it is the last of {self.in_a_row} bad updates in a row")

    def _end(self, event: Event, more: str) -> None:
        description = _described(event)
        if math.isfinite(event.loss) and math.isfinite(event.grad_norm) and not more:
            raise TrainingSpikeException(event.batches[-1][1], description)
        raise NonFiniteLossError(
            f"{description}{more}. The weights are those before it: look at these batches, or lower the rate"
        )

    def _report_event(self, trainer: Trainer, event: Event) -> None:
        trainer.log_warning(f"{_described(event)}: {event.action}")
        folder = trainer.log_dir  # asked for on every rank
        path = Path(self.file) if self.file is not None else Path(folder or ".") / "loss_guard.jsonl"
        if trainer.is_global_zero:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(event), default=str) + "\n")

    def _roll_back(self, trainer: Trainer, module: Module, event: Event) -> None:
        """Restore weights, optimizers, schedules, the step count and the loggers' rows.

        Data, random draws and callbacks go on from where they are.
        """
        self.rollbacks += 1
        if self.rollbacks >= self.patience:
            self._end(event, f"; it is number {self.rollbacks} for which training would have gone back")
        path = self._checkpoint_before(trainer, event.step - self.margin)
        if path is None:
            self._end(event, f"; there is no checkpoint from {self.margin} steps before it to go back to")
        checkpoint = trainer.checkpoints.load(str(path))
        weights = trainer.strategy.own_weights(module, checkpoint["state_dict"])
        load_weights(module, weights, strict=module.strict_loading)
        trainer.checkpoints.restore_optimization(checkpoint)
        module.zero_grad()
        then = checkpoint["loops"]["progress"]
        trainer.run_state.rewind(then["global_step"], then.get("plateau_step", then["global_step"]))
        for callback in trainer.checkpoint_callbacks:
            callback.forget_later_steps(trainer)
        for logger in trainer.loggers if trainer.is_global_zero else []:
            logger.rewind(trainer.reporter.newest_row)
        trainer.log_warning(f"back to {path}, step {trainer.global_step}; training continues with the next batch")

    def _checkpoint_before(self, trainer: Trainer, step: int) -> str | None:
        """Return the newest kept checkpoint of at most ``step`` steps; the same on every rank."""
        if hasattr(trainer.checkpoint_io, "wait"):
            trainer.checkpoint_io.wait()
        found: dict[str, int] = {}
        for callback in trainer.checkpoint_callbacks if trainer.is_global_zero else []:
            for path in callback.saved_paths():
                made = checkpoints.inspect(path).step if to_path(path).is_dir() else None
                if made is not None and made <= step:
                    found[str(path)] = made
        newest: str | None = trainer.strategy.broadcast(max(found, key=found.__getitem__, default=None))
        return newest

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        if self._history is None:
            return self._saved
        return {
            "losses": self._history.losses.clone(),
            "count": self._history.count.clone(),
            "in_a_row": self.in_a_row,
            "rollbacks": self.rollbacks,
            "events": [asdict(event) for event in self.events],
            "begun": {
                "losses": torch.stack([loss.float().cpu() for loss in self._losses]),
                "batches": [list(batch) for batch in self._batches],
                "samples": _as_lists(self._samples),
            }
            if self._losses
            else None,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict
        self.in_a_row, self.rollbacks = state_dict["in_a_row"], state_dict["rollbacks"]
        self.events = [Event(**known_fields(Event, event, "LossGuard event")) for event in state_dict["events"]]


def _as_lists(samples: list[Any]) -> list[Any]:
    """Return the names of each batch's samples, those of a tensor or an array as a list.

    A checkpoint holds no array of strings.
    """
    return [value.tolist() if isinstance(value, torch.Tensor | np.ndarray) else value for value in samples]


def _described(event: Event) -> str:
    where = ", ".join(f"epoch {epoch} batch {batch}" for epoch, batch in event.batches)
    samples = f", samples {event.samples}" if any(event.samples) else ""
    return f"the update of step {event.step} ({where}{samples}) has a loss of {event.loss:g} and a gradient norm of {event.grad_norm:g}"
