"""A line to a server in this process that takes its time, and learners whose training does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from arclight.federated.blobs import BlobStore
from arclight.federated.clients import Outcome
from arclight.federated.protocol import Evaluate, Fit, Message
from arclight.federated.transports.link import InProcessLink

Tensors = Mapping[str, torch.Tensor]
LIMIT = 30.0
"""Seconds that anything here is waited for."""


class SlowLine:
    """A link whose blobs take ``per_byte`` seconds each way, one after another in each direction.

    on_up, on_down: called with a blob's digest before it goes, to hold it up.
    """

    def __init__(self, link: InProcessLink, per_byte: float = 0.0) -> None:
        self._link, self.blobs = link, _SlowBlobs(link.blobs, per_byte)

    def send(self, message: Message) -> Message:
        return self._link.send(message)

    def close(self) -> None:
        pass

    def cancel_on(self, stopping: threading.Event) -> None:
        pass


class _SlowBlobs:
    def __init__(self, store: BlobStore, per_byte: float) -> None:
        self._store, self._per_byte = store, per_byte
        self._ways = {"up": threading.Lock(), "down": threading.Lock()}
        self.busy = {"up": 0.0, "down": 0.0}
        """Seconds that the line was at work."""
        self.on_up: Callable[[str], None] = lambda digest: None
        self.on_down: Callable[[str], None] = lambda digest: None

    def _carry(self, way: str, size: int) -> None:
        with self._ways[way]:
            began = time.monotonic()
            time.sleep(self._per_byte * size)
            self.busy[way] += time.monotonic() - began

    def size(self, digest: str) -> int | None:
        return self._store.size(digest)

    def read(self, digest: str, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        raise AssertionError("nodes read whole files")

    def put(self, digest: str, source: Path | bytes) -> None:
        assert isinstance(source, Path)
        self.on_up(digest)
        self._carry("up", source.stat().st_size)
        self._store.put(digest, source)

    def file(self, digest: str) -> Path:
        self.on_down(digest)
        path = self._store.file(digest)
        self._carry("down", path.stat().st_size)
        return path

    def forget(self, digest: str) -> None:
        self._store.forget(digest)

    def remove(self, digest: str) -> None:
        raise AssertionError("nodes remove nothing")


class Stepper:
    """Every step takes ``pause`` seconds and moves each weight by something that follows from order, step and weight."""

    def __init__(self, pause: float = 0.0, on_step: Callable[[Fit, int], None] = lambda order, step: None) -> None:
        self.pause, self.on_step = pause, on_step
        self.rounds: list[int] = []
        self.busy = 0.0
        self._state: dict[str, torch.Tensor] = {}

    def fit(self, order: Fit, weights: Tensors, progress: Callable[[int, float | None], None]) -> Outcome:
        self.rounds.append(order.round)
        began = time.monotonic()
        for key in weights:  # half of its own, as a client of a streamed run mixes
            self._state[key] = (self._state.get(key, weights[key]) + weights[key]) / 2
        for step in range(order.steps):
            self.on_step(order, step)
            time.sleep(self.pause)
            draw = torch.Generator().manual_seed(order.seed + step)
            for key, value in self._state.items():
                self._state[key] = 0.9 * value + 0.1 * torch.randn(value.shape, generator=draw)
            progress(step + 1, None)
        self.busy += time.monotonic() - began
        return Outcome(tensors=self._sent(order), samples=order.steps, tokens=0, steps=order.steps)

    def _sent(self, order: Fit) -> Tensors:
        names = sorted(self._state)
        turn = names if order.fragment is None else [names[order.fragment]]  # a tensor each
        return {key: self._state[key] for key in turn}

    def evaluate(self, order: Evaluate, weights: Tensors) -> Outcome:
        return Outcome(samples=1, metrics={"loss": float(sum(value.sum() for value in weights.values()))})

    def close(self) -> None:
        pass
