"""Stand-ins for clients, links and servers: learners of known results, nodes and servers that a test can see through."""

from __future__ import annotations

import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from arclight.federated.blobs import BlobStore
from arclight.federated.blobs.folder import FolderStore
from arclight.federated.blobs.manifest_io import Encoded, open_manifest, write_blobs
from arclight.federated.clients import Outcome
from arclight.federated.clients.local_policy import LocalPolicy
from arclight.federated.clients.node import Node
from arclight.federated.codecs.encoding import decode, encode
from arclight.federated.codecs.settings import from_table
from arclight.federated.coordination.settings import Waiting
from arclight.federated.errors import SessionError
from arclight.federated.protocol import (
    ActiveWork,
    Close,
    Evaluate,
    Evaluated,
    Failed,
    Fit,
    Heartbeat,
    Join,
    Leave,
    Manifest,
    Message,
    Receipt,
    Update,
    Wait,
    Welcome,
    WorkRequest,
)
from arclight.federated.transports.link import InProcessLink, Link

CALM = Waiting(heartbeat_interval_s=20.0)
"""For a `ScriptedNode`, which says nothing while it works: no machine that stands still for a second makes it a lost node."""


class Quadratic:
    """Gradient descent on ``|w - target|^2 / 2``: after n steps of rate lr, ``w = target + (1 - lr)^n (w0 - target)``."""

    def __init__(self, target: float, lr: float = 0.1, samples: int = 8, pause_s: float = 0.0) -> None:
        self.target, self.lr, self.samples, self.pause_s = target, lr, samples, pause_s
        self.steps = 0
        """Steps done in all, redone ones included."""

    def fit(
        self, order: Fit, weights: Mapping[str, torch.Tensor], progress: Callable[[int, float | None], None]
    ) -> Outcome:
        now = {key: tensor.clone() for key, tensor in weights.items()}
        for step in range(order.steps):
            if self.pause_s:
                time.sleep(self.pause_s)
            for tensor in now.values():
                if tensor.is_floating_point():
                    tensor.sub_(self.lr * (tensor - self.target))
            self.steps += 1
            progress(step + 1, None)
        if order.fragment is not None:
            now = {key: now[key] for key in LocalPolicy.of(order).transfer_mask.up(now, order.round)}
        return Outcome(
            tensors=now,
            samples=self.samples * order.steps,
            tokens=0,
            steps=order.steps,
            metrics={"train/loss": self.loss(now)},
        )

    def evaluate(self, order: Evaluate, weights: Mapping[str, torch.Tensor]) -> Outcome:
        return Outcome(samples=self.samples, metrics={"val/loss": self.loss(weights)})

    def loss(self, weights: Mapping[str, torch.Tensor]) -> float:
        return sum(
            float((t.double() - self.target).square().sum()) / 2 for t in weights.values() if t.is_floating_point()
        )

    def close(self) -> None:
        pass


class ScriptedNode:
    """A node, message by message; `work` does what a well-behaved one does until it is told to close."""

    def __init__(
        self, link: Link, learners: Mapping[str, Quadratic], name: str = "n", clients: tuple[str, ...] | None = None
    ) -> None:
        self.link, self.learners, self.name = link, learners, name
        self.folder = tempfile.TemporaryDirectory()
        self.own = FolderStore(Path(self.folder.name))
        self.clients = tuple(learners) if clients is None else clients
        self.process = secrets.token_hex(4)
        self.session = ""

    def join(self) -> Message:
        answer = self.link.send(Join(node=self.name, clients=self.clients, process=self.process))
        if isinstance(answer, Welcome):
            self.session = answer.session
        return answer

    def ask(self, wait: float = 20.0, having: Sequence[Fit] = ()) -> Message:
        """Request work; ``having``: orders that are here already."""
        active = tuple(ActiveWork(client=order.client, round=order.round) for order in having)
        return self.link.send(WorkRequest(node=self.name, session=self.session, hold_s=wait, active_work=active))

    def weights(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        opened = open_manifest(manifest, self.link.blobs)
        return {key: decode(key, told) for key, told in opened.items()}

    def trained(self, order: Fit) -> Update:
        before = self.weights(order.weights)
        outcome = self.learners[order.client].fit(order, before, lambda step, loss: None)
        change = {
            key: before[key] - after if order.form == "delta" else after for key, after in outcome.tensors.items()
        }
        return self.packed(order, change, outcome)

    def packed(self, order: Fit, change: Mapping[str, torch.Tensor], outcome: Outcome) -> Update:
        """An update whose blobs are put."""
        codec = from_table(order.codec)
        encoded: dict[str, Encoded] = {key: encode(key, tensor, codec)[0] for key, tensor in change.items()}
        manifest = write_blobs(encoded, self.own, kind="update", base=order.base)
        self.put(manifest)
        return Update(
            node=self.name,
            session=self.session,
            client=order.client,
            round=order.round,
            manifest=manifest,
            samples=outcome.samples,
            tokens=outcome.tokens,
            steps=outcome.steps,
            seconds=0.5,
            metrics=outcome.metrics,
        )

    def put(self, manifest: Manifest) -> None:
        for digest in manifest.blobs:
            self.link.blobs.put(digest, self.own.file(digest))

    def send(self, message: Message) -> Receipt:
        answer = self.link.send(message)
        assert isinstance(answer, Receipt), answer
        return answer

    def deliver(self, order: Fit) -> Receipt:
        """Train, and send the update as a node does: again where an equal blob of a failed attempt was removed behind the put."""
        update = self.trained(order)
        receipt = self.send(update)
        if receipt.reason == "damaged":
            self.put(update.manifest)
            receipt = self.send(update)
        return receipt

    def work(self, until: Callable[[Message], bool] = lambda message: False) -> Message:
        """Work till the server closes, or till an order for which ``until`` is true; returns that."""
        if not self.session:
            assert isinstance(self.join(), Welcome)
        while True:
            order = self.ask()
            if isinstance(order, Close) or until(order):
                return order
            if isinstance(order, Fit):
                receipt = self.deliver(order)
                assert receipt.accepted, receipt
            elif isinstance(order, Evaluate):
                outcome = self.learners[order.client].evaluate(order, self.weights(order.weights))
                self.send(
                    Evaluated(
                        node=self.name, session=self.session, client=order.client, round=order.round,
                        samples=outcome.samples, metrics=outcome.metrics,
                    )
                )  # fmt: skip


class EchoServer:
    """Answers as a server would; asks are held until `wake` is called or their time is up."""

    def __init__(self, blobs: BlobStore) -> None:
        self.blobs = blobs
        self.received: list[Message] = []
        self.sessions: dict[str, str] = {}
        self.held = 0
        self._work = threading.Condition()
        self._awake = False

    def wake(self) -> None:
        with self._work:
            self._awake = True
            self._work.notify_all()

    largest_message = 1 << 30
    run = "run"

    def reserve_upload(self, node: str, session: str, digest: str, size: int) -> AbstractContextManager[None]:
        return nullcontext()

    def answer(self, message: Message) -> Message:
        self.received.append(message)
        if isinstance(message, Join):
            session = f"session-of-{message.node}-{len(self.received)}"
            self.sessions[session] = message.node
            return Welcome(session=session, run="run", heartbeat_interval_s=0.5, recipe={"steps": 3})
        if getattr(message, "session", None) not in self.sessions:
            raise SessionError("the server does not know this session: join again")
        if isinstance(message, WorkRequest):
            with self._work:
                self.held += 1
                self._work.notify_all()
                self._work.wait_for(lambda: self._awake, message.hold_s)
                self.held -= 1
                return Close(reason="woken") if self._awake else Wait(retry_after_s=0.0, waiting_for="nothing")
        if isinstance(message, Update):
            lost = [blob for blob in message.manifest.blobs if self.blobs.size(blob) is None]
            return Receipt(accepted=not lost, reason="damaged" if lost else None, committed=message.round)
        assert isinstance(message, Heartbeat | Evaluated), message
        return Receipt(accepted=True)

    def wait_until_held(self, count: int, seconds: float = 30.0) -> None:
        with self._work:
            assert self._work.wait_for(lambda: self.held >= count, seconds), f"{self.held} of {count} asks came"


class AveragingServer:
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
        self.received: list[Message] = []
        self.manifests: list[Manifest] = []
        self.on_update: Callable[[Update], Receipt | None] = lambda update: None
        self.cancel: tuple[str, ...] = ()
        self._offer()

    def _offer(self) -> None:
        self.manifests.append(write_blobs(dict(sorted(self.weights.items())), self.blobs, kind="weights"))
        self.updates, self.given = {}, {}

    def of(self, kind: type[Message]) -> list[Any]:
        return [message for message in self.received if isinstance(message, kind)]

    def reserve_upload(self, *_: object) -> AbstractContextManager[None]:
        return nullcontext()

    def answer(self, message: Message) -> Message:
        with self.lock:
            if not isinstance(message, WorkRequest | Heartbeat):
                self.received.append(message)
            session = getattr(message, "session", None)
            if session is not None and session not in self.sessions:
                return Receipt(accepted=False, reason="session", message="who are you?")
            match message:
                case Join():
                    self.joined += 1
                    for client in message.clients:
                        self.given.pop(client, None)
                    self.sessions[str(self.joined)] = message
                    return Welcome(session=str(self.joined), run=self.run, heartbeat_interval_s=0.05)
                case WorkRequest():
                    return self._work(self.sessions[message.session].clients)
                case Heartbeat():
                    self.last_beat = message
                    return self._receipt(cancel=tuple(one for one in message.active_work if one.client in self.cancel))
                case Update():
                    return self._take(message)
                case Evaluated():
                    self.measured.setdefault(message.round, {})[message.client] = message
                    return self._receipt()
                case Failed():
                    if not message.retryable:
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
                return Wait(retry_after_s=0.02, waiting_for="measurements")
        if self.round > self.rounds or not self.clients:
            if self.evaluate and not set(self.clients) <= self.measured.get(self.round, {}).keys():
                return Wait(retry_after_s=0.02, waiting_for="measures that are under way")
            return Close(reason="all rounds are done")
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
        return Wait(retry_after_s=0.02, waiting_for="the other clients")

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


Tensors = Mapping[str, torch.Tensor]
LIMIT_S = 30.0
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


class NoisySteps:
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


def start_node(node: Node) -> tuple[threading.Thread, list[BaseException]]:
    failed: list[BaseException] = []

    def target() -> None:
        try:
            node.run()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=target, daemon=True, name=node.name)
    thread.start()
    return thread, failed


def join_node(thread: threading.Thread, failed: list[BaseException], seconds: float = 300) -> None:
    thread.join(seconds)
    assert not thread.is_alive(), f"node {thread.name} has not ended within {seconds} s"
    if failed:
        raise failed[0]


def run_node(node: Node, seconds: float = 300) -> None:
    """`Node.run`, but not for ever."""
    join_node(*start_node(node), seconds)


class RandomUpdates(Quadratic):
    """Steps of a known length, then weights that have changed."""

    def fit(
        self, order: Fit, weights: Mapping[str, torch.Tensor], progress: Callable[[int, float | None], None]
    ) -> Outcome:
        for step in range(order.steps - 1):
            time.sleep(self.pause_s)
            progress(step + 1, None)
        time.sleep(self.pause_s)
        draw = torch.Generator().manual_seed(order.seed)  # equal updates would be sent once
        sent = LocalPolicy.of(order).transfer_mask.up(weights, order.round)
        now = {key: weights[key] + 0.01 * torch.randn(weights[key].shape, generator=draw) for key in sent}
        return Outcome(tensors=now, samples=order.steps, tokens=0, steps=order.steps, metrics={"train/loss": 1.0})


class TemporaryStore(FolderStore):
    """Blobs in a folder that goes with the object."""

    def __init__(self) -> None:
        self._temporary = tempfile.TemporaryDirectory()
        super().__init__(self._temporary.name, durable="none")
