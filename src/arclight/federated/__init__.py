"""Train one model on the data of many sites; only weights and their changes travel.

A server samples clients, sends weights, folds what comes back in fixed point and steps (`Server`); a client trains with
its own `Trainer` and keeps its data (`Client`). One protocol runs inside one process, over HTTPS, and under Flower. Open `server.server` and
`clients.client` first, what users make; then `coordination.coordinator`, which decides each round. What travels is chosen by `masks`, encoded
by `codecs`, kept in `blobs`, carried by `transports` and protected by `privacy`; `aggregation` sums it, `strategies` step by the mean, `rounds`
keeps checkpoints and history, and `simulation` predicts the time; all wait for room by `disk_full`. The names here are public and stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.federated.clients.client import Client as Client
    from arclight.federated.server.server import Server as Server
    from arclight.federated.settings import Federation as Federation
    from arclight.federated.simulation.simulate import simulate as simulate
    from arclight.federated.strategies import DiLoCo as DiLoCo
    from arclight.federated.strategies import FedAdam as FedAdam
    from arclight.federated.strategies import FedAvg as FedAvg
    from arclight.federated.strategies import FedMomentum as FedMomentum
    from arclight.federated.strategies import FedNesterov as FedNesterov
    from arclight.federated.strategies import FedYogi as FedYogi
    from arclight.federated.strategies import SparseLoCo as SparseLoCo

__getattr__, __dir__, __all__ = lazy(
    __name__,
    dict.fromkeys(
        ("DiLoCo", "FedAdam", "FedAvg", "FedMomentum", "FedNesterov", "FedYogi", "SparseLoCo"),
        "arclight.federated.strategies",
    )
    | {
        "Client": "arclight.federated.clients.client",
        "Federation": "arclight.federated.settings",
        "Server": "arclight.federated.server.server",
        "simulate": "arclight.federated.simulation.simulate",
    },
)
