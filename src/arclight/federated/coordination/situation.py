"""Hold all that a decision depends on (settings, run state, cluster), for the rules.

`coordinator` makes one and passes it to `message_rules`, `round_rules` and `answers` for each event. They only read it, and give changes back
as a decision.
"""

from __future__ import annotations

from dataclasses import dataclass

from arclight.federated.coordination.cluster import ClusterState
from arclight.federated.coordination.run_state import RecordApplier, RunState
from arclight.federated.coordination.sampling import Roster, Sampler
from arclight.federated.settings import Federation


@dataclass(frozen=True)
class Situation:
    """State of a run at this moment, read-only for rules.

    What is to change goes into their `Decision`.
    """

    settings: Federation
    run: str
    roster: Roster
    sampler: Sampler
    records: RecordApplier
    """Holds the durable state, and knows when a round may close."""
    cluster: ClusterState

    @property
    def state(self) -> RunState:
        """The durable state."""
        return self.records.state
