"""Define a federated run's recipe: training settings, clients and their data.

`federated_run`, `network` and `flower` read a `FederatedRecipe`, and `arguments` for verbs that take its plain part; the server sends it to nodes
that join. Names of fields are keys of recipes and travel between machines: they must stay.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from arclight.cli.schema import Recipe
from arclight.data.sites import IID, Dirichlet, Size
from arclight.federated.settings import Federation
from arclight.text.data.site_split import Source
from arclight.vision.data.site_split import Merchant

_AT_CLIENTS = "each client would do it for itself, and rounds continue until there are enough of them"


@dataclass(frozen=True, kw_only=True)
class FederatedRecipe(Recipe):
    """One federated run, completely described.

    The same on the server, on every node, in one process.
    """

    federation: Federation = field(default_factory=Federation)
    """Federated training: clients, rounds, strategy, exchange."""
    partition: Source | Merchant | IID | Dirichlet | Size | None = None
    """Partition of the task's data among clients; none: the task's own rule, for texts and images at random. A client that joins with data of
    its own uses all of that."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, why in (
            ("stopping", _AT_CLIENTS),
            (
                "ema",
                "a client's average of its own weights goes nowhere; averaging over rounds is the server's strategy",
            ),
            ("timeline", _AT_CLIENTS),
        ):
            if getattr(self, name) is not None:
                raise ValueError(f"[{name}] has no place in a federated run: {why}")
        if self.monitors:
            raise ValueError(
                "[[monitors]] are not used in a federated run: they measure a client's steps, which are not logged. The rounds' own "
                "page has drift and noise scale; monitor a run of one site, or the centralised one"
            )
        if self.trainer.max_epochs is not None or self.trainer.max_time is not None:
            raise ValueError(
                "a federated run is as long as federation.rounds x federation.local_steps: leave out trainer.max_epochs and max_time"
            )
        if self.trainer.num_nodes != 1:
            raise ValueError(
                f"trainer.num_nodes = {self.trainer.num_nodes}: what trains a client is one machine with trainer.devices; "
                "another machine is a node of its own"
            )
        least = self.federation.rounds * self.federation.local_steps
        if 0 <= self.trainer.max_steps < least:
            raise ValueError(
                f"trainer.max_steps is the length that schedules go by, and cannot be less than the {least} steps of "
                f"{self.federation.rounds} rounds"
            )

    @property
    def unused(self) -> list[str]:
        """Return the settings that were given and do nothing in a federated run."""
        usual = type(self.trainer)()
        names = ("val_check_interval", "check_val_every_n_epoch")
        changed = [f"trainer.{name}" for name in names if getattr(self.trainer, name) != getattr(usual, name)]
        return (["[checkpoint]"] if self.checkpoint != type(self.checkpoint)() else []) + changed

    @property
    def steps(self) -> int:
        """Return the optimizer steps of schedules: trainer.max_steps, else those of all rounds."""
        rounds = self.federation.rounds * self.federation.local_steps
        return rounds if self.trainer.max_steps < 0 else self.trainer.max_steps

    def plain(self) -> Recipe:
        """Return the part that a run without a federation has."""
        return Recipe(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Recipe)})

    def central(self) -> Recipe:
        """Return the same run without a federation, on as many samples.

        Each step uses the samples of one step of all clients of a round.
        """
        federation, batches = self.federation, self.trainer.accumulate_grad_batches
        batches *= federation.sampling.per_round or federation.clients
        trainer = dataclasses.replace(self.trainer, devices=1, max_steps=self.steps, accumulate_grad_batches=batches)
        if federation.evaluate_every:
            every = federation.evaluate_every * federation.local_steps * batches
            trainer = dataclasses.replace(trainer, val_check_interval=every, check_val_every_n_epoch=None)
        return dataclasses.replace(self.plain(), name=f"{self.name}-centralised", trainer=trainer)
