"""Define learning-rate schedules as factors of the peak rate by step, and their scheduler.

`schedule_settings` builds a `FactorSchedule` of one of these functions; the fit loop steps it (``trainer.loop.schedulers``). Its state is
in checkpoints, and a LambdaLR's state loads into it: keys and meaning of `state_dict` stay.

The steps of a run are 0 to ``total_steps - 1``. A decay ends at ``total_steps``, one step after the last, so that the last
step still learns if ``final`` is 0. A phase's length is a number of steps (an int) or a fraction of ``total_steps`` (a float).
Tokens, or ticks of a clock (1 / `TICKS_PER_SECOND`), may be counted instead of steps. ``vision.tasks.module`` takes `phase` alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

from arclight._intervals import NonNegativeInt, check

DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda share: 1 - share,
    "cosine": lambda share: 0.5 * (1 + math.cos(math.pi * share)),
    "sqrt": lambda share: math.sqrt(1 - share),
    "1-sqrt": lambda share: 1 - math.sqrt(share),
}
"""Factor (1 to 0) at a share (0 to 1) of the decay. ``1-sqrt``: Hägele et al. 2024, section 4."""


def phase(length: float, total_steps: int) -> int:
    """Convert a phase's length to steps: their number (int) or a fraction of all (float).

    Raises ValueError for lengths out of range.
    """
    if isinstance(length, int):
        steps = length
    elif 0 <= length <= 1:
        steps = int(length * total_steps)
    else:
        raise ValueError(
            f"{length} is not a share of the steps: give a float in [0, 1], or an integer for a number of steps"
        )
    if not 0 <= steps <= max(0, total_steps):
        raise ValueError(f"a phase of {steps} steps does not fit into a run of {total_steps} steps: shorten it")
    return steps


def _warmed_up(step: int, warmup_steps: int) -> float:
    """Compute the linear warm-up's factor, which is above 0 in the first step."""
    return min(1.0, (step + 1) / (warmup_steps + 1))


def _decayed(step: int, start: int, end: int, shape: str, final: float) -> float:
    """Compute a decay's factor: 1 up to ``start``, ``final`` from ``end`` on."""
    share = min(1.0, max(0, step - start) / max(1, end - start))
    return final + (1 - final) * DECAYS[shape](share)


def cosine(step: int, *, total_steps: int, warmup: float, final: float) -> float:
    """Warm up linearly, then follow half a cosine from 1 to ``final``."""
    warmup_steps = phase(warmup, total_steps)
    if step < warmup_steps:
        return _warmed_up(step, warmup_steps)
    return _decayed(step, warmup_steps, total_steps, "cosine", final)


def linear(step: int, *, total_steps: int, warmup: float, final: float) -> float:
    """Warm up linearly, then decay linearly from 1 to ``final``."""
    warmup_steps = phase(warmup, total_steps)
    if step < warmup_steps:
        return _warmed_up(step, warmup_steps)
    return _decayed(step, warmup_steps, total_steps, "linear", final)


def wsd(step: int, *, total_steps: int, warmup: float, decay: float, final: float, shape: str = "linear") -> float:
    """Return the factor of WSD: warm up, stay at 1, then decay over the last ``decay`` steps.

    ``shape``: one of :data:`DECAYS`. Hu et al. 2024, MiniCPM.
    """
    warmup_steps, decay_steps = phase(warmup, total_steps), max(1, phase(decay, total_steps))
    if step < warmup_steps:
        return _warmed_up(step, warmup_steps)
    return _decayed(step, total_steps - decay_steps, total_steps, shape, final)


def inverse_sqrt(step: int, *, total_steps: int, warmup: float, timescale: int = 0) -> float:
    """Return the factor of a linear warm-up, then a decay as ``sqrt(t / (t + steps since))``.

    ``timescale`` t is in steps; 0: the steps of the warm-up and one more. Vaswani et al. 2017; Zhai et al. 2022.
    """
    warmup_steps = phase(warmup, total_steps)
    if step < warmup_steps:
        return _warmed_up(step, warmup_steps)
    scale = timescale or warmup_steps + 1
    return math.sqrt(scale / (scale + step - warmup_steps))


def constant(step: int, *, total_steps: int, warmup: float) -> float:
    """Warm up linearly, then stay at 1."""
    return _warmed_up(step, phase(warmup, total_steps))


def rewarmed(step: int, *, since: int, steps: int) -> float:
    """Return the factor of a second warm-up: linear from step ``since``, 1 after ``steps``."""
    return 1.0 if step < since else _warmed_up(step - since, steps)


TICKS_PER_SECOND = 1000
Unit = Literal["steps", "tokens", "seconds"]


class FactorSchedule(LambdaLR):
    """Schedule that multiplies each group's peak rate by ``factor(step)``.

    With ``rewarm`` it warms up again over so many steps after each resume. With ``unit`` "tokens" ``factor`` takes the tokens counted by
    `advance`; with "seconds" the ticks since `start_clock` (or since the first step), without the time between a checkpoint and its
    resume. All ranks use the clock of rank 0.

    Restore the optimizer first: peak rates are taken from its groups (``initial_lr``), which `MixedOptimizer` matches by parameter
    name, where torch's class saves them by position.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, factor: Callable[[int], float], rewarm: int = 0, unit: Unit = "steps"
    ) -> None:
        check("rewarm", rewarm, NonNegativeInt)
        self.factor, self.rewarm, self.unit = factor, rewarm, unit
        self.resumed_at = -1
        self.position = 0
        """Tokens or ticks so far."""
        self.stepped_at = 0
        """Position at the newest step, which the rate is of: tokens may have been counted since, in an accumulation window."""
        self._clock: float | None = None
        super().__init__(optimizer, self._factor_at)

    def advance(self, tokens: int) -> None:
        """Add the ``tokens`` of all ranks in the current update."""
        self.position += tokens

    def drop_window(self) -> None:
        """Discard the tokens counted since the newest step, whose batches will be read again."""
        self.position = self.stepped_at

    def start_clock(self) -> None:
        """Start the clock of a schedule over seconds."""
        if self.unit == "seconds":
            self._clock = time.monotonic()

    def step(self, epoch: int | None = None) -> None:
        if self.unit == "seconds" and self.last_epoch >= 0:  # torch's constructor calls it too
            now = time.monotonic()
            since = now if self._clock is None else self._clock
            passed = round((now - since) * TICKS_PER_SECOND)
            self._clock = since + passed / TICKS_PER_SECOND  # the rest of a tick counts with the next step
            ticks = [self.position + passed]
            if dist.is_available() and dist.is_initialized():
                dist.broadcast_object_list(ticks)
            self.position = ticks[0]
        self.stepped_at = self.position
        super().step(epoch)

    def _factor_at(self, step: int) -> float:
        again = rewarmed(step, since=self.resumed_at, steps=self.rewarm) if self.resumed_at >= 0 else 1.0
        return self.factor(step if self.unit == "steps" else self.stepped_at) * again

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"last_epoch": self.last_epoch, "resumed_at": self.resumed_at}
        if self.unit != "steps":
            state |= {"unit": self.unit, "position": self.position, "stepped_at": self.stepped_at}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the position, also from torch's state of a LambdaLR.

        Raises ValueError for a state with another unit.
        """
        saved = state_dict.get("unit", "steps")
        if self.unit not in ("steps", saved):
            raise ValueError(
                f"the saved schedule ran over {saved} and is resumed over {self.unit}, of which it has no count: resume with "
                f"{saved}, or load only the weights"
            )
        self.position = state_dict.get("position", 0)
        self.stepped_at = state_dict.get("stepped_at", self.position)  # older states do not say
        self._clock = None
        self.last_epoch, self.resumed_at = state_dict["last_epoch"], state_dict.get("resumed_at", -1)
        self._step_count = self.last_epoch + 1
        groups = self.optimizer.param_groups
        self.base_lrs = [group.setdefault("initial_lr", group["lr"]) for group in groups]
        self.lr_lambdas = [self._factor_at] * len(groups)
        if self.rewarm:
            self.resumed_at = self.last_epoch
        for group in groups:  # this schedule's rate for the next step; it may have another length than the saved one
            group["lr"] = group["initial_lr"] * self._factor_at(self.last_epoch)
        self._last_lr = [group["lr"] for group in groups]


def lambda_schedule(
    optimizer: torch.optim.Optimizer, factor: Callable[..., float], rewarm: int = 0, **arguments: Any
) -> FactorSchedule:
    """Return a scheduler that multiplies the peak rate by ``factor(step, **arguments)``."""
    return FactorSchedule(optimizer, partial(factor, **arguments), rewarm)
