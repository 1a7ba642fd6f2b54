"""A server for tests of nodes: it averages what clients send, in float64, and notes everything that it is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from arclight.federated.blobs.folder import FolderStore
from arclight.federated.blobs.manifest_io import open_manifest, write_blobs
from arclight.federated.codecs.encoding import decode
from arclight.federated.protocol import (
    Ask,
    Beat,
    Close,
    Evaluate,
    Evaluated,
    Failed,
    Fit,
    Join,
    Leave,
    Manifest,
    Message,
    Receipt,
    Update,
    Wait,
    Welcome,
)


class Scripted:
    """Rounds, from 1 on, of ``steps`` steps for all clients; lives in one process, without a disk journal."""

    largest_message = 1 << 24

    def __init__(
        self,
        folder: Path,
        weights: Mapping[str, torch.Tensor],
        clients: tuple[str, ...],
        rounds: int,
        steps: int,
        *,
        form: str = "weights",
        evaluate: bool = False,
        **order: Any,
    ) -> None:
        self.blobs = FolderStore(folder)
        self.clients, self.rounds, self.steps, self.form, self.evaluate = clients, rounds, steps, form, evaluate
        self.order, self.run = order, "run"
        self.lock = threading.RLock()
        self.weights = dict(weights)
        self.round, self.sessions, self.joined = 1, dict[str, Join](), 0
        self.updates: dict[str, Update] = {}
        self.given: dict[str, float] = {}
        self.measured: dict[int, dict[str, Evaluated]] = {}
        self.said: list[Message] = []
        self.manifests: list[Manifest] = []
        self.on_update: Callable[[Update], Receipt | None] = lambda update: None
        self.cancel: tuple[str, ...] = ()
        self._offer()

    def _offer(self) -> None:
        self.manifests.append(write_blobs(dict(sorted(self.weights.items())), self.blobs, kind="weights"))
        self.updates, self.given = {}, {}

    def of(self, kind: type[Message]) -> list[Any]:
        return [message for message in self.said if isinstance(message, kind)]

    def taking(self, *_: object) -> AbstractContextManager[None]:
        return nullcontext()

    def answer(self, message: Message) -> Message:
        with self.lock:
            if not isinstance(message, Ask | Beat):
                self.said.append(message)
            session = getattr(message, "session", None)
            if session is not None and session not in self.sessions:
                return Receipt(accepted=False, reason="session", message="who are you?")
            match message:
                case Join():
                    self.joined += 1
                    for client in message.clients:
                        self.given.pop(client, None)
                    self.sessions[str(self.joined)] = message
                    return Welcome(session=str(self.joined), run=self.run, beat_every=0.05)
                case Ask():
                    return self._work(self.sessions[message.session].clients)
                case Beat():
                    self.last_beat = message
                    return self._receipt(cancel=tuple(one for one in message.doing if one.client in self.cancel))
                case Update():
                    return self._take(message)
                case Evaluated():
                    self.measured.setdefault(message.round, {})[message.client] = message
                    return self._receipt()
                case Failed():
                    if not message.again:
                        self.clients = tuple(client for client in self.clients if client != message.client)
                    self.given.pop(message.client, None)
                    self._close()
                    return self._receipt()
                case Leave():
                    return self._receipt()
        raise AssertionError(message)

    def _receipt(self, **more: Any) -> Receipt:
        return Receipt(accepted=True, committed=self.round - 1, **more)

    def _work(self, clients: tuple[str, ...]) -> Message:
        manifest = self.manifests[-1]
        if self.evaluate:
            for client in clients:
                if client not in self.measured.setdefault(self.round, {}) and f"e{client}" not in self.given:
                    self.given[f"e{client}"] = time.monotonic()
                    return Evaluate(
                        run=self.run, client=client, round=self.round, base=manifest.digest, weights=manifest
                    )
            if len(self.measured[self.round]) < len(clients):
                return Wait(seconds=0.02, about="measurements")
        if self.round > self.rounds or not self.clients:
            if self.evaluate and not set(self.clients) <= self.measured.get(self.round, {}).keys():
                return Wait(seconds=0.02, about="measures that are under way")
            return Close(why="all rounds are done")
        for client in clients:
            if client in self.clients and client not in {*self.given, *self.updates}:
                self.given[client] = time.monotonic()
                return Fit(
                    **{
                        "run": self.run,
                        "client": client,
                        "round": self.round,
                        "steps": self.steps,
                        "clock": (self.round - 1) * self.steps,
                        "base": manifest.digest,
                        "weights": manifest,
                        "form": self.form,
                        **self.order,
                    }
                )
        return Wait(seconds=0.02, about="the other clients")

    def _take(self, update: Update) -> Receipt:
        if (answer := self.on_update(update)) is not None:
            if not answer.accepted and answer.reason not in ("damaged", "session", "stale"):
                self.clients = tuple(client for client in self.clients if client != update.client)
                self._close()
            return answer
        if update.round != self.round:
            return Receipt(accepted=False, reason="stale", message="that round is over", committed=self.round - 1)
        for digest, size in update.manifest.blobs.items():
            assert self.blobs.size(digest) == size
        self.updates[update.client] = update
        self._close()
        return self._receipt()

    def _close(self) -> None:
        """The mean of what came, weighed by samples."""
        if not self.clients or any(client not in self.updates for client in self.clients):
            return
        total = sum(update.samples for update in self.updates.values())
        sums: dict[str, torch.Tensor] = {}
        only = len(self.updates) == 1
        for _, update in sorted(self.updates.items()):
            opened = open_manifest(update.manifest, self.blobs)
            for key in opened:
                value = decode(key, opened[key])
                if self.form == "delta" and key.startswith("model/"):
                    value = (self.weights[key].to(value.dtype) - value).to(self.weights[key].dtype)
                share = value if only else value.double() * (update.samples / total)
                sums[key] = share if key not in sums else sums[key] + share
        for key, value in sums.items():
            self.weights[key] = value.to(self.weights[key].dtype) if key in self.weights else value
        self.round += 1
        self._offer()
