"""A ServerApp that runs a federation in Flower's own messages: the server here, and beside it a node for each SuperNode."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

from arclight.federated import Client
from arclight.federated.clients import Outcome
from arclight.federated.clients.node import Node
from arclight.federated.errors import FederatedError
from arclight.federated.protocol import Evaluate, Fit
from arclight.federated.server.secure_sums import refuse_unmasked_updates
from arclight.federated.transports.link import InProcessLink
from flower_clients.building import server as build_server

log = logging.getLogger("flwr")
app = ServerApp()
Tensors = Mapping[str, torch.Tensor]
MODEL = "model/"
FLOWER_TYPES = (torch.float64, torch.float32, torch.float16)


@app.main()
def main(grid: Any, context: Any) -> None:
    folder = Path(str(context.run_config["folder"]) or f"runs/flower/{context.run_id}").resolve()
    server = build_server(folder, dict(context.run_config))
    refuse_unmasked_updates(server.federation)
    messages = Messages(grid, float(context.run_config["reply-seconds"]))
    free, nodes = ["site-0", "site-1"], dict[int, RunningNode]()
    with server.opened() as run:
        try:
            while not run.runtime.wait(1.0):
                for gone in nodes.keys() - (here := messages.node_ids()):
                    log.warning("SuperNode %d has gone; client %s waits for another", gone, nodes[gone].client)
                    free.insert(0, nodes[gone].client)
                    nodes.pop(gone).node.stop()
                for came in sorted(here - nodes.keys())[: len(free)]:
                    client, learner = free.pop(0), FlowerLearner(messages, came)
                    clients = [Client(client, learner=lambda folder, learner=learner: learner)]  # type: ignore[misc]
                    node = Node(InProcessLink(run.service), clients, folder / "nodes" / client, f"flower-{came}")
                    nodes[came] = RunningNode(client, node)
        finally:
            for running in nodes.values():
                running.node.stop()
            for running in nodes.values():
                running.thread.join(30)
        over = run.runtime.ended
        log.info("run %s is over: %s", run.name, over.why if over else "it was stopped")


class RunningNode:
    """A node in a thread of its own."""

    def __init__(self, client: str, node: Node) -> None:
        self.client, self.node = client, node
        self.thread = threading.Thread(target=self._run, name=node.name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.node.run()
        except FederatedError:
            log.exception("a node of this run is lost")


class Messages:
    """Flower's grid for several threads, one call at a time."""

    def __init__(self, grid: Any, reply_timeout_s: float) -> None:
        self._grid, self._lock, self._reply_timeout_s = grid, threading.Lock(), reply_timeout_s

    def node_ids(self) -> set[int]:
        with self._lock:
            return set(self._grid.get_node_ids())

    def request(self, node: int, kind: str, content: RecordDict) -> RecordDict:
        """Return the content of a node's reply. Raises FederatedError for an error in its place, or none in time."""
        message = Message(content, dst_node_id=node, message_type=kind, ttl=self._reply_timeout_s)
        with self._lock:
            (sent,) = self._grid.push_messages([message])
        if sent is None:
            raise FederatedError(f"the SuperLink did not take the {kind} message for SuperNode {node}")
        end = time.monotonic() + self._reply_timeout_s
        while time.monotonic() < end:
            with self._lock:
                replies = list(self._grid.pull_messages([sent]))
            if replies:
                if replies[0].has_error():
                    raise FederatedError(
                        f"SuperNode {node} answers a {kind} message by an error: {replies[0].error.reason}"
                    )
                return replies[0].content
            time.sleep(0.25)
        raise FederatedError(
            f"SuperNode {node} did not answer a {kind} message within {self._reply_timeout_s:g} s (reply-seconds)"
        )


@dataclass
class FlowerLearner:
    """Implements `Learner` with a Flower client that knows nothing of arclight: one train or evaluate message for each order.

    Weights are the ArrayRecord ``arrays`` under their parameter names, in the order of names; the config holds ``server-round`` (from 1),
    ``local-steps`` and ``clock``, which a client may follow or not. What comes back may have the same names or, as lists of arrays
    have, "0", "1", ...; its metric ``num-examples`` is its weight. Flower's arrays know neither bfloat16 nor 8-bit floats: such weights
    travel as float32 and come back rounded to their own type.
    """

    messages: Messages
    node: int

    def fit(self, order: Fit, weights: Tensors, progress: Callable[[int, float | None], None]) -> Outcome:
        config = {"server-round": order.round + 1, "local-steps": order.steps, "clock": order.clock}
        reply = self._request("train", weights, config)
        if "arrays" not in reply:
            raise FederatedError(f"SuperNode {self.node} sends no 'arrays' back, but {sorted(reply)}")
        tensors = tensors_of(reply["arrays"], weights, self.node)
        samples, metrics = self._metrics(reply)
        progress(order.steps, metrics.get("train/loss"))
        return Outcome(tensors=tensors, samples=samples, tokens=samples, steps=order.steps, metrics=metrics)

    def evaluate(self, order: Evaluate, weights: Tensors) -> Outcome:
        samples, metrics = self._metrics(self._request("evaluate", weights, {"server-round": order.round + 1}))
        return Outcome(samples=samples, metrics=metrics)

    def close(self) -> None:
        """Nothing is held between messages."""

    def _request(self, kind: str, weights: Tensors, config: dict[str, int]) -> RecordDict:
        arrays = {key.removeprefix(MODEL): Array(as_flower_type(weights[key]).numpy()) for key in sorted(weights)}
        content = RecordDict({"arrays": ArrayRecord(arrays), "config": ConfigRecord(config)})
        return self.messages.request(self.node, kind, content)

    def _metrics(self, reply: RecordDict) -> tuple[int, dict[str, float]]:
        values = {name: value for record in reply.metric_records.values() for name, value in record.items()}
        found = {name: float(value) for name, value in values.items() if not isinstance(value, list)}
        if "num-examples" not in found:
            raise FederatedError(
                f"SuperNode {self.node} does not say how many examples it used: its reply needs a MetricRecord with 'num-examples', "
                f"got {sorted(found)}"
            )
        return int(found.pop("num-examples")), found


def as_flower_type(tensor: torch.Tensor) -> torch.Tensor:
    known = tensor.dtype in FLOWER_TYPES or not tensor.is_floating_point()
    return tensor.detach().cpu() if known else tensor.detach().cpu().float()


def tensors_of(record: ArrayRecord, sent: Tensors, node: int) -> dict[str, torch.Tensor]:
    """Return a client's arrays under the keys and in the types of what it was sent. Raises FederatedError for other names or shapes."""
    keys = sorted(sent)
    names, given = [key.removeprefix(MODEL) for key in keys], list(record)
    if set(given) != set(names):
        if given != [str(number) for number in range(len(keys))]:
            odd = sorted(set(given) ^ set(names))
            raise FederatedError(
                f"SuperNode {node} sends back other arrays than it was sent: {odd[0]} ({len(odd)} differ)"
            )
        names = given
    found = {}
    for key, name in zip(keys, names, strict=True):
        tensor = torch.from_numpy(record[name].numpy().copy())
        if tensor.shape != sent[key].shape:
            raise FederatedError(
                f"SuperNode {node} sends {key} back as {list(tensor.shape)}, it was sent {list(sent[key].shape)}"
            )
        found[key] = tensor.to(sent[key].dtype)
    return found
