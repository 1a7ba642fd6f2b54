"""Settings of learning-rate schedules (no torch here: a recipe is read without it)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from arclight._intervals import Checked, Fraction, NonNegativeInt

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
    _factor: ClassVar[str]

    def build(self, optimizer: torch.optim.Optimizer, total_steps: int) -> FactorSchedule:
        """Return a scheduler to be stepped after each of ``total_steps`` optimizer steps. Raises ValueError for phases that do not fit."""
        from arclight.optim import schedules

        given: dict[str, Any] = {name: value for name, value in asdict(self).items() if name != "rewarm"}
        phases = {name: schedules.phase(given[name], total_steps) for name in ("warmup", "decay") if name in given}
        if sum(phases.values()) > total_steps:
            both = " and ".join(f"{name} = {given[name]} ({steps} steps)" for name, steps in phases.items())
            raise ValueError(f"{both} do not fit into a run of {total_steps} steps: shorten one of them")
        factor = getattr(schedules, self._factor)
        return schedules.lambda_schedule(optimizer, factor, self.rewarm, total_steps=total_steps, **given)


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
    """Warm-up, stable, decay: linear up, constant, then down to ``final`` times the peak (Hu et al. 2024)."""

    decay: NonNegativeInt | Fraction = 0.2
    """Decay phase: number of steps, or a fraction of all steps in [0, 1] (with a decimal point)."""
    final: Fraction = 0.0
    """Final learning rate as a fraction of the peak, reached one step after the last."""
    shape: Literal["linear", "cosine", "sqrt", "1-sqrt"] = "linear"
    """Shape of the decay at its fraction x: 1 - x, half a cosine, sqrt(1 - x), or 1 - sqrt(x)."""
    _factor: ClassVar[str] = "wsd"


@dataclass(frozen=True, kw_only=True)
class InverseSqrt(_Schedule):
    """Linear warm-up, then falling as 1 / sqrt(step); good for runs without a known end."""

    timescale: NonNegativeInt = 0
    """Steps after the warm-up until the rate has fallen to 1 / sqrt(2) of the peak; 0: as long as the warm-up."""
    _factor: ClassVar[str] = "inverse_sqrt"


@dataclass(frozen=True, kw_only=True)
class Constant(_Schedule):
    """Linear warm-up, then constant."""

    warmup: NonNegativeInt | Fraction = 0.0
    """Warm-up: number of steps, or a fraction of all steps in [0, 1] (with a decimal point)."""
    _factor: ClassVar[str] = "constant"
