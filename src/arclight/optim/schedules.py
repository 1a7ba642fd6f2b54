"""Learning-rate schedules: pure functions of the step, as factors of the peak rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR


def _warmed_up(step: int, warmup_steps: int) -> float:
    """Linear factor of the warm-up; its first step already moves."""
    return min(1.0, (step + 1) / (warmup_steps + 1))


def cosine(step: int, *, total_steps: int, warmup: float, final: float) -> float:
    """Linear warm-up over ``warmup * total_steps``, then half a cosine from 1 to ``final``."""
    warmup_steps = int(warmup * total_steps)
    if step < warmup_steps:
        return _warmed_up(step, warmup_steps)
    share = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * share))


def wsd(step: int, *, total_steps: int, warmup: float, decay: float, final: float) -> float:
    """Warm-up, stable, then linear decay over the last ``decay * total_steps`` (Hu et al. 2024, MiniCPM)."""
    warmup_steps, decay_steps = int(warmup * total_steps), max(1, int(decay * total_steps))
    if step < warmup_steps:
        return _warmed_up(step, warmup_steps)
    share = min(1.0, max(0, step - (total_steps - decay_steps)) / decay_steps)
    return 1 - (1 - final) * share


def constant(step: int, *, total_steps: int, warmup: float) -> float:
    """Linear warm-up, then 1."""
    return _warmed_up(step, int(warmup * total_steps))


def lambda_schedule(optimizer: torch.optim.Optimizer, factor: Callable[..., float], **arguments: Any) -> LambdaLR:
    """A per-step scheduler that multiplies the peak rate by ``factor(step, **arguments)``."""
    return LambdaLR(optimizer, partial(factor, **arguments))
