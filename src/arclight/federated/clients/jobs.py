"""What a node does for a client at the moment, as beats tell it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from arclight.federated.errors import CancelledError
from arclight.federated.protocol import Evaluate, Fit


@dataclass
class Job:
    """What is being done for a client."""

    round: int
    steps: int = 0
    loss: float | None = None
    until: float | None = None
    cancelled: str = ""

    @classmethod
    def of(cls, order: Fit | Evaluate) -> Job:
        return cls(order.round, until=None if order.deadline is None else time.monotonic() + order.deadline)

    def progress(self, steps: int, loss: float | None) -> None:
        self.steps, self.loss = steps, self.loss if loss is None else loss
        if self.until is not None and time.monotonic() > self.until:
            raise CancelledError(f"round {self.round} has run out of time after {steps} steps")
        if self.cancelled:
            raise CancelledError(self.cancelled)
