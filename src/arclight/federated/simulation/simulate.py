"""Simulate a federation of any size without training: the public function ``simulate``.

Public as ``arclight.federated.simulate``: its arguments stay. It runs a `Simulator` with `Sizes`; the rules are those of ``coordination``, so a
changed rule changes forecasts with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from arclight.federated.settings import Federation
from arclight.federated.simulation.fleet import Fleet
from arclight.federated.simulation.result import SimulationResult


def simulate(
    federation: Federation,
    model: Mapping[str, Sequence[int]] | int,
    fleet: Fleet | None = None,
    *,
    dtype: str = "F32",
    seed: int = 0,
) -> SimulationResult:
    """Simulate a federation with a fleet of given lines, speeds and failures.

    Report times and traffic.

    The coordinator is the one of real runs, on a virtual clock; messages weigh what they would weigh. A million clients of which
    a thousand are drawn take seconds. ``waiting.heartbeat_interval_s`` may be raised to 30 s if clients train for minutes, which saves
    time here in fleets of which clients vanish.

    model: parameter name to shape, or the model's bytes. dtype: of its weights, as safetensors names it.
    Raises FederatedError for a run that comes to a halt; one that fails by its own rules is reported in the result.
    """
    from arclight.federated.simulation.simulator import Simulator
    from arclight.federated.simulation.sizes import Sizes

    return Simulator(federation, Sizes(federation, model, dtype), Fleet() if fleet is None else fleet, seed).run()
