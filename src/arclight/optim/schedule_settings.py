"""Define settings of learning-rate schedules, without importing torch.

A recipe's table ``[task.schedule]`` is one of these classes; ``text.language_model``, ``text.heads`` and ``vision.tasks.module`` call
`build` on it. Field names are recipe keys and stay, their docstrings are texts of ``arclight train --help``. Recipes in checkpoints name
the classes by module: a move needs an entry in ``_stored_names``. The curves are in `schedules`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from arclight._intervals import Checked, Fraction, NonNegativeInt, PositiveFloat, PositiveInt

if TYPE_CHECKING:
    import torch

    from arclight.optim.schedules import FactorSchedule


@dataclass(frozen=True, kw_only=True)
class _Schedule(Checked):
    """Base of the schedules' settings."""

    warmup: NonNegativeInt | Fraction = 0.05
    """Warm-up: number of steps, or a fraction of all steps in [0, 1] (with a decimal point)."""
    rewarm: NonNegativeInt = 0
    """Steps of another warm-up after each resume; 0 for none."""
    tokens: PositiveInt | None = None
    """Run the curve over so many tokens, of all ranks, instead of the run's steps; lengths of phases are tokens then."""
    seconds: PositiveFloat | None = None
    """Run the curve over so many seconds of training instead of steps; lengths of phases are seconds then."""
    _factor: ClassVar[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens is not None and self.seconds is not None:
            raise ValueError(
                f"tokens = {self.tokens} and seconds = {self.seconds}: a schedule runs over one; leave one out"
            )

    def build(
        self, optimizer: torch.optim.Optimizer, total_steps: float, counts_tokens: bool = False
    ) -> FactorSchedule:  # fmt: skip
        """Return a scheduler to be stepped after each of ``total_steps`` optimizer steps.

        counts_tokens: whether the caller reports tokens to `FactorSchedule.advance`. Raises ValueError for a run without an end
        (``total_steps`` infinite), for phases that do not fit, and for a schedule over tokens in a task that counts none.
        """
        from arclight.optim import schedules

        if total_steps == math.inf:
            raise ValueError("a schedule needs an end: set trainer.max_steps or trainer.max_epochs")
        if self.tokens is not None and not counts_tokens:
            raise ValueError(
                f"tokens = {self.tokens}: this task counts no tokens; give seconds, or leave it out for steps"
            )
        unit: schedules.Unit = "tokens" if self.tokens else "seconds" if self.seconds else "steps"
        scale = schedules.TICKS_PER_SECOND if self.seconds else 1
        total = self.tokens or (max(1, round(self.seconds * scale)) if self.seconds else int(total_steps))
        given: dict[str, Any] = {k: v for k, v in asdict(self).items() if k not in ("rewarm", "tokens", "seconds")}
        given |= {k: given[k] * scale for k in ("warmup", "decay", "timescale") if isinstance(given.get(k), int)}
        phases: dict[str, int] = {
            name: schedules.phase(given[name], total) for name in ("warmup", "decay") if name in given
        }
        if sum(phases.values()) > total:
            both = " and ".join(f"{k} = {getattr(self, k)} ({v / scale:g} {unit})" for k, v in phases.items())
            raise ValueError(f"{both} do not fit into a run of {total / scale:g} {unit}: shorten one of them")
        self._check_phases(phases, unit)
        factor = partial(getattr(schedules, self._factor), total_steps=total, **given)
        return schedules.FactorSchedule(optimizer, factor, self.rewarm, unit)

    def _check_phases(self, phases: dict[str, int], unit: str) -> None:
        """Raise ValueError for phases, in steps, tokens or ticks, of which no curve can be made."""


@dataclass(frozen=True, kw_only=True)
class Cosine(_Schedule):
    """Linear warm-up, then half a cosine down to ``final`` times the peak."""

    final: Fraction = 0.01
    """Final learning rate as a fraction of the peak."""
    _factor: ClassVar[str] = "cosine"


@dataclass(frozen=True, kw_only=True)
class Linear(_Schedule):
    """Linear warm-up, then a straight line down to ``final`` times the peak."""

    final: Fraction = 0.0
    """Final learning rate as a fraction of the peak."""
    _factor: ClassVar[str] = "linear"


@dataclass(frozen=True, kw_only=True)
class WSD(_Schedule):
    """Warm-up, stable, decay: linear up, constant, then down to ``final`` times the peak.

    Hu et al. 2024.
    """

    decay: NonNegativeInt | Fraction = 0.2
    """Decay phase: number of steps, or a fraction of all steps in [0, 1] (with a decimal point)."""
    final: Fraction = 0.0
    """Final learning rate as a fraction of the peak, reached one step after the last."""
    shape: Literal["linear", "cosine", "sqrt", "1-sqrt"] = "linear"
    """Shape of the decay at its fraction x: 1 - x, half a cosine, sqrt(1 - x), or 1 - sqrt(x)."""
    _factor: ClassVar[str] = "wsd"


@dataclass(frozen=True, kw_only=True)
class InverseSqrt(_Schedule):
    """Linear warm-up, then falling as 1 / sqrt(step), however long the run is."""

    timescale: NonNegativeInt = 0
    """Steps after the warm-up until the rate has fallen to 1 / sqrt(2) of the peak; 0: as long as the warm-up."""
    _factor: ClassVar[str] = "inverse_sqrt"

    def _check_phases(self, phases: dict[str, int], unit: str) -> None:
        if unit != "steps" and not self.timescale and not phases["warmup"]:
            raise ValueError(
                f"warmup = {self.warmup} and timescale = 0: the rate would fall as 1 / sqrt({unit}) from the first on; set timescale, "
                f"{unit} until it has fallen to 1 / sqrt(2) of the peak"
            )


@dataclass(frozen=True, kw_only=True)
class Constant(_Schedule):
    """Linear warm-up, then constant."""

    warmup: NonNegativeInt | Fraction = 0.0
    """Warm-up: number of steps, or a fraction of all steps in [0, 1] (with a decimal point)."""
    _factor: ClassVar[str] = "constant"
