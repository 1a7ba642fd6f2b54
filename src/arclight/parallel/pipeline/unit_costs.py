"""Hold costs of parts of a model: seconds of F, I and W, and bytes.

`cost.measure` fills them in, timed or predicted, and so do `planning.estimates` and `layer_pruning`; `partition`, `candidates` and
`simulation` compute with them. They are not stored: fields may change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class UnitCost:
    """A part of the model (a call, or a stage) at work on one micro-batch."""

    forward: float
    """Seconds of its forward (F)."""
    inputs: float
    """Seconds of the backward of its inputs (I). A backward in one (B) takes ``inputs + weights``."""
    weights: float
    """Seconds of the backward of its parameters (W)."""
    parameters: int = 0
    """Bytes of its parameters."""
    saved_activation_bytes: int = 0
    """Bytes that it keeps from its forward until its backward is over."""
    output: int = 0
    """Bytes that it gives to what comes after it."""

    @property
    def backward(self) -> float:
        """Seconds of a backward in one (B)."""
        return self.inputs + self.weights

    @property
    def seconds(self) -> float:
        """Return the seconds of all its work on a micro-batch."""
        return self.forward + self.inputs + self.weights

    @classmethod
    def total(cls, parts: Iterable[UnitCost]) -> UnitCost:
        """Add up the costs of consecutive ``parts``; the output is the last one's."""
        known = list(parts)
        return cls(
            sum(part.forward for part in known),
            sum(part.inputs for part in known),
            sum(part.weights for part in known),
            sum(part.parameters for part in known),
            sum(part.saved_activation_bytes for part in known),
            known[-1].output if known else 0,
        )

    def line_to(self, other: UnitCost, at: float) -> UnitCost:
        """Interpolate between this (0) and ``other`` (1) at ``at``; nothing below zero."""
        ends = ((name, value, getattr(other, name)) for name, value in asdict(self).items())
        found = {name: max(0.0, a + at * (b - a)) for name, a, b in ends}
        seconds = {name: found[name] for name in ("forward", "inputs", "weights")}
        return UnitCost(
            **seconds, **{name: round(found[name]) for name in ("parameters", "saved_activation_bytes", "output")}
        )


@dataclass(frozen=True)
class Link:
    """Describe the connection between neighbouring processes of a pipeline."""

    latency: float = 0.0
    """Seconds from a send to the arrival of its first byte."""
    bandwidth: float = float("inf")
    """Bytes in a second."""

    def seconds(self, nbytes: float) -> float:
        """Return the seconds from a send of ``nbytes`` to their arrival."""
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True)
class Tie:
    """Parameter that several units use.

    Each of them counts it among its parameters; a stage that has several holds it once.
    """

    units: tuple[int, ...]
    """Their numbers, ascending."""
    parameters: int
    """Its bytes."""


@dataclass(frozen=True)
class ModelCosts:
    """Hold costs of a model's units for micro-batches of ``samples``."""

    units: tuple[UnitCost, ...]
    crossing: tuple[int, ...] = ()
    """Bytes that cross a cut before each unit; none if it is the output of the unit before."""
    ties: tuple[Tie, ...] = ()
    closed: tuple[int, ...] = ()
    """Units before which there can be no cut, as they share a random draw or a change in place with earlier ones."""
    samples: int = 1
    source: str = ""
    """Origin of the numbers, for people."""

    def before(self, unit: int) -> int:
        """Return the bytes that cross a cut before ``unit``; none at both ends of the model."""
        if unit in (0, len(self.units)):
            return 0
        return self.crossing[unit] if self.crossing else self.units[unit - 1].output

    def stages(self, cuts: Sequence[int]) -> list[UnitCost]:
        """Return the costs of the stages that begin with the units ``cuts``.

        What came in is held too, and what is used twice counts once.
        """
        found = []
        for begin, end in zip(cuts, [*cuts[1:], len(self.units)], strict=True):
            whole = UnitCost.total(self.units[begin:end])
            again = sum(
                tie.parameters * max(0, sum(begin <= unit < end for unit in tie.units) - 1) for tie in self.ties
            )
            sizes = {
                "saved_activation_bytes": whole.saved_activation_bytes + self.before(begin),
                "output": self.before(end),
            }
            found.append(replace(whole, parameters=whole.parameters - again, **sizes))
        return found

    def line_to(self, other: ModelCosts, samples: float) -> ModelCosts:
        """Return the costs of micro-batches of ``samples``, by a line through two sizes.

        ``other`` has the costs of the second size.
        """
        at = (samples - self.samples) / (other.samples - self.samples)
        units = tuple(a.line_to(b, at) for a, b in zip(self.units, other.units, strict=True))
        crossing = tuple(max(0, round(a + at * (b - a))) for a, b in zip(self.crossing, other.crossing, strict=True))
        return replace(self, units=units, crossing=crossing, samples=round(samples))

    def scaled(self, samples: float) -> ModelCosts:
        """Return the costs of micro-batches of ``samples``, scaled in proportion."""
        nothing = tuple(UnitCost(0.0, 0.0, 0.0, unit.parameters) for unit in self.units)
        empty = replace(self, units=nothing, crossing=(0,) * len(self.crossing), samples=0)
        return empty.line_to(self, samples)

    def recomputed(self) -> ModelCosts:
        """Return the costs with recomputation, in which each unit keeps its output alone.

        Its forward is computed again before its backward. What one unit holds for the moment is not in them: see
        :meth:`moment`.
        """
        units = tuple(
            replace(
                unit,
                inputs=unit.inputs + unit.forward,
                saved_activation_bytes=min(unit.saved_activation_bytes, unit.output),
            )
            for unit in self.units
        )
        return replace(self, units=units)

    @property
    def moment(self) -> int:
        """Most bytes that one unit holds, which a stage needs besides when units are recomputed."""
        return max(unit.saved_activation_bytes for unit in self.units)

    def as_json(self) -> dict[str, Any]:
        """Return all of it, for a file."""
        return asdict(self)
