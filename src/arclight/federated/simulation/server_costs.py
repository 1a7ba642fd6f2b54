"""Measure a server's costs on this machine, by rounds of a real server without training.

People who plan a federation call `measure_costs`, nothing in Arclight does: its result is the ``costs`` of a `Fleet`, which `simulate` takes. It
runs a real server through `Server.opened` and `Service.answer`, and changes with them.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from arclight.federated.coordination.settings import Waiting
from arclight.federated.errors import FederatedError
from arclight.federated.protocol import Fit, Join, Receipt, Update, Welcome, WorkRequest
from arclight.federated.settings import Federation
from arclight.federated.simulation.fleet import Costs

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from arclight.federated.server.server_run import ServerRun

_SMALL, _FEW, _MANY, _ROUNDS = 4096, 2, 5, 3


def measure_costs(
    model_bytes: int = 32 << 20, *, folder: str | Path | None = None, rate: float = 10e9, threads: int = 4
) -> Costs:
    """Measure costs in rounds of a real server, journal, hashing and checkpoints included.

    model_bytes: of its model.

    folder: on the disk that is to be measured; by default a temporary one. rate and threads are taken as they are given.
    Takes some seconds, and room for about 20 models. Raises FederatedError if the server refuses what it is sent.
    """
    with tempfile.TemporaryDirectory(dir=folder) as place:
        small, _ = _rounds(Path(place) / "small", _FEW, _SMALL)
        few, check = _rounds(Path(place) / "few", _FEW, model_bytes)
        many, _ = _rounds(Path(place) / "many", _MANY, model_bytes)
    fold = max(0.0, (many - few) / (_MANY - _FEW) / model_bytes)
    step = max(0.0, (few - small) / model_bytes - _FEW * fold)
    return Costs(check=check / model_bytes, fold=fold, step=step, round_s=small, threads=threads, rate=rate)


def _rounds(folder: Path, clients: int, bytes: int) -> tuple[float, float]:
    """Return median seconds of a fold with its step and checkpoint, and of accepting an update."""
    import torch

    from arclight.federated.server.server import Server

    federation = Federation(
        clients=clients, rounds=_ROUNDS, local_steps=1, evaluate_every=0, waiting=Waiting(heartbeat_interval_s=600.0)
    )
    draw = torch.Generator().manual_seed(0)
    weights = {f"w{n}": torch.randn(max(1, bytes // 16), generator=draw) for n in range(4)}
    checks = []
    with Server(federation, weights, folder=folder).opened() as run:
        session = _join(run)
        for _ in range(_ROUNDS):
            for number in range(clients):
                order = run.service.answer(WorkRequest(node="node", session=session))
                if not isinstance(order, Fit):
                    raise FederatedError(f"the server gave no order but {order}")
                change = {
                    key: 0.01 * torch.randn(entry.shape, generator=draw) for key, entry in order.weights.tensors.items()
                }
                began = time.perf_counter()
                receipt = run.service.answer(_update(run, order, session, change))
                if not isinstance(receipt, Receipt) or not receipt.accepted:
                    raise FederatedError(f"the server refused an update: {receipt}")
                if number < clients - 1:
                    checks.append(time.perf_counter() - began)
        run.wait(600)
        folds = [record.seconds["fold"] for record in run.service.history.rounds if "fold" in record.seconds]
    return median(folds), median(checks)


def _join(run: ServerRun) -> str:
    answer = run.service.answer(Join(node="node", clients=()))
    if not isinstance(answer, Welcome):
        raise FederatedError(f"the server did not let a node in: {answer}")
    return answer.session


def _update(run: ServerRun, order: Fit, session: str, change: Mapping[str, torch.Tensor]) -> Update:
    """Make an update whose bytes are hashed and written, as those that arrive over a line are."""
    from arclight.federated.blobs.manifest_io import write_blobs

    manifest = write_blobs(change, run.blobs, kind="update", base=order.base)
    return Update(
        node="node", session=session, client=order.client, round=order.round, manifest=manifest, samples=1, tokens=0,
        steps=order.steps, seconds=1.0,
    )  # fmt: skip
