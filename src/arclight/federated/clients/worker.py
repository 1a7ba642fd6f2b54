"""A worker process: it trains clients for a node as long as the node lives, one at a time, alone or as one rank of several.

Node and worker talk over a pipe in JSON. The node says ``open`` (which run), ``fit``, ``evaluate``, ``cancel`` and ``close``; the
worker says ``ready``, ``progress``, ``done`` and ``failed``. A pipe that ends is a node that has died: the worker ends at once.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight.federated.errors import CancelledError, FederatedError

if TYPE_CHECKING:
    from arclight.federated.clients.client import Client

    Make = Callable[[str], Client]

log = logging.getLogger(__name__)

_TELL_EVERY = 0.1
"""Seconds between two words about progress."""
_ENDED = 3


def main(
    clients: Sequence[Client] | Make, pipe: Connection, environment: Mapping[str, str], resident: int | None
) -> None:
    """What a worker process runs. ``environment``: torchrun's variables where it is one of several ranks. ``resident``: see `Works`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the node decides what ends
    os.environ.update(environment)
    _Worker(
        clients if callable(clients) else {client.name: client for client in clients}.__getitem__,
        pipe,
        int(environment.get("RANK", "0")) == 0,
        resident,
    ).run()


class _Worker:
    def __init__(self, client_of: Make, pipe: Connection, leads: bool, resident: int | None) -> None:
        from arclight.federated.clients.work import Works

        self._pipe, self._leads = pipe, leads
        self._works = Works(lambda client, folder: client_of(client).learner(folder), resident, leads)
        self._orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._cancelled, self._told_at = "", 0.0

    def run(self) -> None:
        threading.Thread(target=self._listen, name="arclight-pipe", daemon=True).start()
        self._say(**{"is": "ready", "pid": os.getpid()})
        while (order := self._orders.get())["do"] != "close":
            if order["do"] == "open":
                self._works.open(Path(order["folder"]), order["run"])
                continue
            self._cancelled, self._told_at = "", 0.0
            try:
                message = self._do(order)
            except CancelledError as error:
                self._say(**{"is": "failed", "cancelled": True, "error": str(error), "again": True})
            except Exception as error:  # whatever a client's code raises is told; the worker goes on
                from arclight.federated.clients.session import told

                what, trace = told(error), traceback.format_exc()
                self._say(
                    **{"is": "failed", "cancelled": False, "error": str(what), "again": what.again, "trace": trace}
                )
                self._works.forget(order["client"])
            else:
                self._say(**{"is": "done", "message": message})
        self._works.close()

    def _listen(self) -> None:
        while True:
            try:
                order = json.loads(self._pipe.recv_bytes())
            except (EOFError, OSError):
                os._exit(_ENDED)  # nobody is there to train for, whatever this process is in the middle of
            if order["do"] == "cancel":
                self._cancelled = order["why"]
            else:
                self._orders.put(order)

    def _say(self, **what: Any) -> None:
        try:
            self._pipe.send_bytes(json.dumps(what).encode())
        except OSError:
            os._exit(_ENDED)

    def _do(self, order: dict[str, Any]) -> str | None:
        from arclight.federated.blobs.folder import FolderStore
        from arclight.federated.protocol import Evaluate, Fit, read

        asked, store = read(order["order"]), FolderStore(order["weights"])
        if isinstance(asked, Fit):
            message: Any = self._works.fit(asked, store, self._progress)
        elif isinstance(asked, Evaluate):
            message = self._works.evaluate(asked, store)
        else:
            raise FederatedError(f"a worker was given a message {asked.kind!r}")
        return None if message is None else message.to_json()

    def _progress(self, steps: int, loss: float | None) -> None:
        if not self._leads:
            return
        if self._cancelled:
            raise CancelledError(self._cancelled)
        now = time.monotonic()
        if now >= self._told_at or loss is not None:
            self._told_at = now + _TELL_EVERY
            self._say(**{"is": "progress", "steps": steps, "loss": _finite(loss)})


def _finite(loss: float | None) -> float | None:
    return loss if loss is not None and math.isfinite(loss) else None
