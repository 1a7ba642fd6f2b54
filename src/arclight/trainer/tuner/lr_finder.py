"""Find a learning rate by a short fit whose rate grows at every step.

The callback `LearningRateFinder`, which `Tuner` runs too, calls `lr_find`; model, optimizer and progress are restored afterwards.
Arguments and ``results`` are Lightning's and stay; checkpoints hold ``results``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.extras import require
from arclight.fabric.rank_zero import rank_zero_info
from arclight.trainer.hparams import has_setting, set_setting
from arclight.trainer.loop.gradients import loss_of
from arclight.trainer.module import Module
from arclight.trainer.tuner.trial import TrialCallback, trials

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from arclight.fabric.strategies.base import Strategy
    from arclight.trainer.loop.optimizers import LRSchedulerConfig
    from arclight.trainer.trainer import Trainer


_LOG = logging.getLogger("arclight")
_EMA_DECAY = 0.98  # of the exponential moving average of losses


class LRFinder:
    """Result of a search: rates in ``results["lr"]``, smoothed losses in ``results["loss"]``.

    mode: ``exponential`` (rates evenly spaced in their logarithm) or ``linear``. lr_min, lr_max: first and last rate.
    num_training: number of rates. Raises ValueError for another mode, and MisconfigurationError for rates that are not positive
    in mode ``exponential``.
    """

    def __init__(self, mode: str, lr_min: float, lr_max: float, num_training: int) -> None:
        if mode not in ("linear", "exponential"):
            raise ValueError(f"mode should be either `linear` or `exponential`, got {mode!r}")
        if mode == "exponential" and min(lr_min, lr_max) <= 0:
            raise MisconfigurationError(f"rates that grow by a factor must be positive, got {lr_min} and {lr_max}")
        self.mode, self.lr_min, self.lr_max, self.num_training = mode, lr_min, lr_max, num_training
        self.results: dict[str, list[float]] = {}
        self._optimal_idx: int | None = None

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        share = step / max(1, self.num_training - 1)
        if self.mode == "linear":
            return self.lr_min + share * (self.lr_max - self.lr_min)
        return float(self.lr_min * (self.lr_max / self.lr_min) ** share)

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """Return the rate at which the loss fell most steeply, between the skipped ends.

        None, with an error in the log, where fewer than two finite losses remain.
        """
        losses = torch.tensor(self.results["loss"], dtype=torch.float64)
        rates = torch.tensor(self.results["lr"], dtype=torch.float64)
        indices = torch.arange(len(losses))[skip_begin : max(skip_begin, len(losses) - skip_end)]
        indices = indices[torch.isfinite(losses[indices])]
        self._optimal_idx = None
        if len(indices) < 2:
            _LOG.error(
                "Failed to compute suggestion for learning rate: it takes two finite losses between the %d skipped at the "
                "beginning and the %d at the end. Search with more steps, or skip fewer",
                skip_begin,
                skip_end,
            )
            return None
        (slopes,) = torch.gradient(losses[indices], spacing=[rates[indices]])
        self._optimal_idx = int(indices[slopes.argmin()])
        return self.results["lr"][self._optimal_idx]

    def plot(self, suggest: bool = False, show: bool = False, ax: Any = None) -> Any:
        """Plot loss over learning rate as a matplotlib figure, in ``ax`` if given.

        `suggest` marks the suggestion.

        Raises MissingExtraError without matplotlib.
        """
        plt = require("matplotlib.pyplot", extra="plots")
        figure, ax = plt.subplots() if ax is None else (ax.figure, ax)
        rates, losses = self.results["lr"], self.results["loss"]
        ax.plot(rates, losses)
        if self.mode == "exponential":
            ax.set_xscale("log")
        ax.set_xlabel("Learning rate")
        ax.set_ylabel("Loss")
        if suggest and self.suggestion() is not None and self._optimal_idx is not None:
            ax.plot(rates[self._optimal_idx], losses[self._optimal_idx], markersize=10, marker="o", color="red")
        if show:
            plt.show()
        return figure


def lr_find(
    trainer: Trainer,
    module: Module,
    finder: LRFinder,
    early_stop_threshold: float | None,
    update_attr: bool,
    attr_name: str,
) -> LRFinder | None:
    """Fill ``finder``; with ``update_attr`` the module and its optimizer get the suggested rate.

    None in a development run. Raises AttributeError if the module has no such attribute and MisconfigurationError for
    several optimizers.
    """
    if trainer.fast_dev_run:
        trainer.warn("Skipping learning rate finder since `fast_dev_run` is enabled.")
        return None
    if update_attr:
        _attribute(module, attr_name)
    if len(trainer.optimizers) != 1:
        raise MisconfigurationError(
            f"`configure_optimizers()` gave {len(trainer.optimizers)} optimizers, but the learning rate finder only works "
            "with single optimizer"
        )
    ramp = _Ramp(finder, early_stop_threshold)
    steps = trainer.global_step + finder.num_training
    with trials(trainer, module) as run:
        run(ramp, max_steps=steps, limit_val_batches=0)
    if len(ramp.losses) < finder.num_training:
        trainer.log_info(f"LR finder stopped early after {len(ramp.losses)} steps due to diverging loss.")
    finder.results = trainer.strategy.broadcast({"lr": ramp.rates, "loss": ramp.losses})
    if update_attr:
        use_suggestion(finder, module, attr_name, trainer.optimizers[0], trainer.lr_scheduler_configs)
    return finder


def use_suggestion(
    finder: LRFinder, module: Module, attr_name: str, optimizer: Optimizer, schedulers: Sequence[LRSchedulerConfig]
) -> None:
    """Set the suggested rate of module and optimizer, if there is one."""
    name = _attribute(module, attr_name)
    if (rate := finder.suggestion()) is None:
        return
    set_setting(module, name, rate)
    _apply(rate, optimizer, [config.scheduler for config in schedulers])
    rank_zero_info(f"Learning rate set to {rate}")


def _attribute(module: Module, name: str) -> str:
    """Return the attribute in which the module keeps its learning rate."""
    if name:
        if not has_setting(module, name):
            raise AttributeError(
                f"The attribute name for the learning rate was set to {name}, but could not find this as a field in "
                "`model` or `model.hparams`."
            )
        return name
    for usual in ("lr", "learning_rate"):
        if has_setting(module, usual):
            return usual
    raise AttributeError(
        "When using the learning rate finder, either `model` or `model.hparams` should have one of these fields: "
        "('lr', 'learning_rate'); name another with `attr_name`, or pass update_attr=False to be told the rate only"
    )


def _apply(rate: float, optimizer: Optimizer, schedulers: list[Any]) -> None:
    """Set ``rate`` in the optimizer and in schedules that multiply the initial rate."""
    for group in optimizer.param_groups:
        first = group.get("initial_lr")
        group["lr"] = rate * group["lr"] / first if first else rate  # a warm-up under way keeps its share
        if first is not None:
            group["initial_lr"] = rate
    for scheduler in chain.from_iterable(map(_with_inner, schedulers)):
        if hasattr(scheduler, "base_lrs"):
            scheduler.base_lrs = [rate] * len(scheduler.base_lrs)


def _with_inner(scheduler: Any) -> Iterator[Any]:
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _with_inner(inner)


class _Ramp(TrialCallback):
    """Set the rate of each step and record its loss."""

    def __init__(self, finder: LRFinder, threshold: float | None) -> None:
        self.finder, self.threshold = finder, threshold
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.batches = 0
        self._mean, self._counted, self._best, self._over = 0.0, 0, math.inf, False

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        rate = self.finder.rate(len(self.losses))
        for group in trainer.optimizers[0].param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._over:
            return
        self.batches += 1
        if trainer.window.count:
            return  # the step that this rate is for is still to come
        self.rates.append(self.finder.rate(len(self.losses)))
        smoothed = self._smoothed(trainer.strategy, outputs)
        self.losses.append(smoothed)
        diverged = False
        if self.threshold is not None and self._counted > 1:
            # for a negative loss the same distance from the best, if a multiple of it would be below
            bound = self._best + (self.threshold - 1) * abs(self._best)
            diverged = smoothed > bound
        self._best = min(self._best, smoothed) if math.isfinite(smoothed) else self._best
        if diverged or len(self.losses) >= self.finder.num_training:
            self._over = True
            trainer.request_stop()

    def _smoothed(self, strategy: Strategy, outputs: Any) -> float:
        """Return the running mean of the losses, the same on all ranks; NaN without a loss."""
        loss = loss_of(outputs) if not isinstance(outputs, Mapping) or "loss" in outputs else None
        value = torch.tensor(math.nan) if loss is None else loss.detach().float()
        if strategy.world_size > 1:
            value = strategy.all_reduce(value.to(strategy.root_device)) / strategy.world_size
        newest = value.item()
        if math.isnan(newest):
            return newest
        self._counted += 1
        self._mean = _EMA_DECAY * self._mean + (1 - _EMA_DECAY) * newest
        return self._mean / (1 - _EMA_DECAY**self._counted)
