"""Define the `Learner` protocol: a client's own training code, as federation calls it.

`ClientRunner` (`executor`) calls it for each round; `TrainerLearner` implements it for Modules, users for code of their own. It is public:
methods may get defaults, not further required arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from arclight.federated.protocol import Evaluate, Fit

    Tensors = Mapping[str, torch.Tensor]
    Progress = Callable[[int, float | None], None]
    """Called with steps done of this round, and the newest loss if one is at hand. It raises CancelledError if the work is
    no longer wanted: end it and let the error pass."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of training for a round, or of an evaluation."""

    tensors: Tensors = field(default_factory=dict)
    """Weights after training, and local moments if they were asked for, by manifest key (``model/...``); empty for evaluations.
    With masks or streaming those that ``LocalPolicy.of(order).transfer_mask.up(keys, order.round)`` lets through (`arclight.federated.clients.local_policy`).
    They may be read until the learner is asked for something else; if several processes train together, all of them read
    alike."""
    samples: int = 0
    tokens: int = 0
    steps: int = 0
    metrics: dict[str, float] = field(default_factory=dict)


class Learner(Protocol):
    """Train one client.

    One learner lives as long as its worker; between rounds it keeps what is the client's own.
    """

    def fit(self, order: Fit, weights: Tensors, progress: Progress) -> Outcome:
        """Train ``order.steps`` optimizer steps from ``weights``.

        weights: by manifest key; mapped files, not to be changed.
        """

    def evaluate(self, order: Evaluate, weights: Tensors) -> Outcome:
        """Evaluate ``weights`` on this client's validation data."""

    def close(self) -> None:
        """Release processes and memory."""
