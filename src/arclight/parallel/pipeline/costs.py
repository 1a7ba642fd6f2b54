"""What parts of a model cost: seconds of their forward and of the two halves of their backward, and bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class UnitCost:
    """A part of the model (a call, or a stage) at work on one micro-batch."""

    forward: float
    """Seconds of its forward (F)."""
    inputs: float
    """Seconds of the backward of what came in (I). A backward in one (B) takes ``inputs + weights``."""
    weights: float
    """Seconds of the backward of its parameters (W)."""
    parameters: int = 0
    """Bytes of its parameters."""
    held: int = 0
    """Bytes that it keeps from its forward until its backward is over."""
    output: int = 0
    """Bytes that it gives to what comes after it."""

    @property
    def backward(self) -> float:
        """Seconds of a backward in one (B)."""
        return self.inputs + self.weights

    @property
    def seconds(self) -> float:
        """Of all its work on a micro-batch."""
        return self.forward + self.inputs + self.weights

    @classmethod
    def total(cls, parts: Iterable[UnitCost]) -> UnitCost:
        """Of ``parts``, one after the other: times, parameters and what is held add up, the last one's output goes on."""
        known = list(parts)
        return cls(
            sum(part.forward for part in known),
            sum(part.inputs for part in known),
            sum(part.weights for part in known),
            sum(part.parameters for part in known),
            sum(part.held for part in known),
            known[-1].output if known else 0,
        )


@dataclass(frozen=True)
class Link:
    """What lies between two processes of a pipeline that are neighbours."""

    latency: float = 0.0
    """Seconds from a send to the arrival of its first byte."""
    bandwidth: float = float("inf")
    """Bytes in a second."""

    def seconds(self, nbytes: float) -> float:
        """From a send of ``nbytes`` to their arrival."""
        return self.latency + nbytes / self.bandwidth
