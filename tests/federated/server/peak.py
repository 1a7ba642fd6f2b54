"""A server in a process of its own that says how much memory it took: ``python -m tests.federated.server.peak MB CLIENTS [STRATEGY]``."""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import threading
from pathlib import Path

import torch

from arclight.federated import strategies
from arclight.federated.blobs.manifest_io import write_blobs
from arclight.federated.coordination.settings import Waiting
from arclight.federated.protocol import Close, Evaluate, Fit, Join, Receipt, Update, Welcome, WorkRequest
from arclight.federated.server.server import Server
from arclight.federated.settings import Federation
from arclight.federated.transports.link import InProcessLink


def peak() -> float:
    """Largest resident memory of this process so far, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def weights(megabytes: int) -> dict[str, torch.Tensor]:
    """Sixteen tensors of float32."""
    return {f"layer{n:02d}": torch.full((megabytes << 14,), 0.5 + n) for n in range(16)}


def main(megabytes: int, clients: int, strategy: str) -> None:
    folder = tempfile.TemporaryDirectory()
    given = Federation(
        clients=clients,
        rounds=2,
        local_steps=1,
        strategy=getattr(strategies, strategy)(),
        waiting=Waiting(heartbeat_interval_s=60.0),  # it does not beat while it makes updates
    )
    imported = peak()
    start = Path(folder.name) / "start"
    pid = _forked(lambda: _save(start, megabytes))
    server = Server(given, start, folder=Path(folder.name) / "run")
    with server.opened() as run:
        done = threading.Event()
        link = InProcessLink(run.service)
        session = link.send(Join(node="n", clients=tuple(map(str, range(clients))), process="p"))
        assert isinstance(session, Welcome), pid
        while not done.is_set():
            order = link.send(WorkRequest(node="n", session=session.session, hold_s=20.0))
            if isinstance(order, Close):
                done.set()
            elif isinstance(order, Fit):
                receipt = _sent(link, order, session, Path(folder.name), megabytes)
                # with blobs of the round before, which were being removed: as nodes do, once more
                if receipt.reason == "damaged":
                    receipt = _sent(link, order, session, Path(folder.name), megabytes)
                assert receipt.accepted, receipt
            else:
                assert not isinstance(order, Evaluate)
        assert run.runtime.wait(60)
    print(json.dumps({"imported": imported, "peak": peak()}))


def _sent(link: InProcessLink, order: Fit, session: Welcome, folder: Path, megabytes: int) -> Receipt:
    _forked(lambda: _update(order, folder, megabytes))
    receipt = link.send(Update(**{**_read(folder), "session": session.session}))
    assert isinstance(receipt, Receipt)
    return receipt


def _forked(work) -> int:  # type: ignore[no-untyped-def]
    """Do something in a process whose memory does not count."""
    import os

    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert status == 0
    return pid


def _save(start: Path, megabytes: int) -> None:
    from arclight import checkpoint

    checkpoint.save(start, {"model": weights(megabytes)})


def _update(order: Fit, folder: Path, megabytes: int) -> None:
    """A client's update, its blobs in the server's folder."""
    from arclight.federated.blobs.folder import FolderStore

    number = int(order.client)
    changes = ((f"model/{name}", tensor * 1e-3 * (number + 1)) for name, tensor in weights(megabytes).items())
    manifest = write_blobs(changes, FolderStore(folder / "run" / "blobs"), kind="update", base=order.base)
    update = Update(
        node="n", session="", client=order.client, round=order.round, manifest=manifest,
        samples=4, tokens=0, steps=1, seconds=0.0,
    )  # fmt: skip
    (folder / "update.json").write_text(update.to_json())


def _read(folder: Path) -> dict[str, object]:
    from dataclasses import fields

    from arclight.federated.protocol import read

    update = read((folder / "update.json").read_text())
    return {item.name: getattr(update, item.name) for item in fields(update)}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "FedAvg")
