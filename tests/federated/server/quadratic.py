"""A learner whose result is known in closed form, and a node that a test can see through."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from arclight.federated.blobs.folder import FolderStore
from arclight.federated.blobs.manifest_io import Encoded, open_manifest, write_blobs
from arclight.federated.clients import Outcome
from arclight.federated.clients.local_policy import LocalPolicy
from arclight.federated.codecs.encoding import decode, encode
from arclight.federated.codecs.settings import from_table
from arclight.federated.coordination.settings import Waiting
from arclight.federated.protocol import (
    Ask,
    Close,
    Doing,
    Evaluate,
    Evaluated,
    Fit,
    Join,
    Manifest,
    Message,
    Receipt,
    Update,
    Welcome,
)
from arclight.federated.transports.link import Link

CALM = Waiting(heartbeat_interval_s=20.0)
"""For a `Script`, which says nothing while it works: no machine that stands still for a second makes it a lost node."""


class Quadratic:
    """Gradient descent on ``|w - target|^2 / 2``: after n steps of rate lr, ``w = target + (1 - lr)^n (w0 - target)``."""

    def __init__(self, target: float, lr: float = 0.1, samples: int = 8) -> None:
        self.target, self.lr, self.samples = target, lr, samples
        self.steps = 0
        """Steps done in all, redone ones included."""

    def fit(
        self, order: Fit, weights: Mapping[str, torch.Tensor], progress: Callable[[int, float | None], None]
    ) -> Outcome:
        now = {key: tensor.clone() for key, tensor in weights.items()}
        for step in range(order.steps):
            for tensor in now.values():
                if tensor.is_floating_point():
                    tensor.sub_(self.lr * (tensor - self.target))
            self.steps += 1
            progress(step + 1, None)
        if order.fragment is not None:
            now = {key: now[key] for key in LocalPolicy.of(order).travel.up(now, order.round)}
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


class Script:
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
        """What there is to do; ``having``: orders that are here already."""
        doing = tuple(Doing(client=order.client, round=order.round) for order in having)
        return self.link.send(Ask(node=self.name, session=self.session, wait=wait, doing=doing))

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
        for digest in manifest.blobs:
            self.link.blobs.put(digest, self.own.file(digest))
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

    def send(self, message: Message) -> Receipt:
        answer = self.link.send(message)
        assert isinstance(answer, Receipt), answer
        return answer

    def work(self, until: Callable[[Message], bool] = lambda message: False) -> Message:
        """Work till the server closes, or till an order for which ``until`` is true; returns that."""
        if not self.session:
            assert isinstance(self.join(), Welcome)
        while True:
            order = self.ask()
            if isinstance(order, Close) or until(order):
                return order
            if isinstance(order, Fit):
                receipt = self.send(self.trained(order))
                assert receipt.accepted, receipt
            elif isinstance(order, Evaluate):
                outcome = self.learners[order.client].evaluate(order, self.weights(order.weights))
                self.send(
                    Evaluated(
                        node=self.name, session=self.session, client=order.client, round=order.round,
                        samples=outcome.samples, metrics=outcome.metrics,
                    )
                )  # fmt: skip
