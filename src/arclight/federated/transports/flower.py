"""Flower as control plane: it knows the sites, ships the app, starts and restarts it; tensors travel beside it.

*Session* mode, the default: the ServerApp starts the server in a process of its own, asks each SuperNode for its public key (the private
one is made at the site and stays there), and sends it one long message with where the server is; the ClientApp is a `Node` with
persistent workers until the run is over. If the SuperLink dies, Flower ends the ServerApp, and the run goes on between server and nodes.
*Compat* mode: weights travel in Flower's own train and evaluate messages, so that any Flower client of today can take part; a fresh
process per message and all copies are Flower's.

Checked with Flower 1.41. This file alone imports it. FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 keep Flower from calling home.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight.fabric.extras import require
from arclight.federated.clients.client import Client
from arclight.federated.clients.learner import Outcome
from arclight.federated.errors import FederatedError
from arclight.federated.transports.detached import Detached, Orders, built
from arclight.federated.transports.keys import NodeKey, line_of
from arclight.federated.transports.link import InProcessLink
from arclight.federated.transports.settings import FLOWER_DEFAULTS

if TYPE_CHECKING:
    import torch

    from arclight.federated.clients.learner import Progress, Tensors
    from arclight.federated.protocol import Evaluate, Fit

log = logging.getLogger(__name__)

BuildClient = Callable[[str, Mapping[str, Any]], "Client"]
"""A client's name and the run config to the client."""

_LOOK = 1.0
_ATTEMPTS = 5
_KEY, _SESSION = "arrays", "session"
_MODEL = "model/"


def _flower(module: str) -> Any:
    return require(f"flwr.{module}", extra="flower")


def _be_heard() -> None:
    """What we log goes where Flower's own messages go."""
    ours = logging.getLogger("arclight")
    ours.setLevel(logging.INFO)
    for handler in logging.getLogger("flwr").handlers:
        if handler not in ours.handlers:
            ours.addHandler(handler)


# -- the server's side -------------------------------------------------------------------------------------------------


def server_app(build: str) -> Any:
    """A ServerApp; mode and addresses are said in the app's run config (see `settings.FLOWER_DEFAULTS`).

    build: ``module:function`` that makes a `Server` from run folder and run config; imported where that runs, and not waited for here.
    """
    app = _flower("serverapp").ServerApp()

    def main(grid: Any, context: Any) -> None:
        _be_heard()
        config = {**FLOWER_DEFAULTS, **context.run_config}
        folder = Path(str(config["folder"]) or f"runs/flower/{context.run_id}").resolve()
        mode = config["mode"]
        if mode not in ("session", "compat"):
            raise FederatedError(f'mode is "session" or "compat", got {mode!r}')
        (_serve_sessions if mode == "session" else _serve_messages)(build, grid, config, folder)

    app.main()(main)
    return app


def _serve_sessions(build: str, grid: Any, config: Mapping[str, Any], folder: Path) -> None:
    orders = Orders(
        build=build, folder=str(folder), config=dict(config), host=config["host"], port=config["port"], known_as=config["known-as"],
    )  # fmt: skip
    parent, served = os.getppid(), Detached(orders)
    place = served.place
    log.info("the run in %s is served at %s by process %d", folder, place.address, served.process)
    sessions = _Sessions(grid, served, ttl=86400 * float(config["days"]))
    try:
        sessions.look()
        while (over := served.ended(_LOOK)) is None:
            sessions.look()
    except BaseException:
        if os.getppid() == parent:  # somebody stops the run; else Flower itself has died, and the run need not
            served.stop()
        raise
    sessions.finish()
    if over.failed:
        raise FederatedError(f"the run in {folder} failed after round {over.round}: {over.why}")
    log.info("the run in %s is over after round %d: %s", folder, over.round, over.why)


@dataclass
class _Sessions:
    """One long message to each SuperNode, and another where it came to nothing."""

    grid: Any
    served: Detached
    ttl: float
    asked: dict[str, int] = field(default_factory=dict)
    """Question for a key to the SuperNode that has it."""
    open: dict[str, int] = field(default_factory=dict)
    """Message to the SuperNode that has it."""
    failures: dict[int, int] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    """Node name to its line in the file of nodes."""

    def look(self) -> None:
        """Greet those that have come, hear those that have answered, forget those that have gone."""
        here = set(self.grid.get_node_ids())
        self._hear()
        for messages in (self.asked, self.open):
            for message, node in list(messages.items()):
                if node not in here:
                    log.warning("SuperNode %d has gone, its session with it; it gets another when it is back", node)
                    del messages[message]
                    self._register(_name(node), None)
        for node in sorted(here - set(self.open.values()) - set(self.asked.values())):
            if self.failures.get(node, 0) < _ATTEMPTS:
                self.asked[self._send(node, "query", {"want": "key"})] = node

    def finish(self) -> None:
        """Hear the last replies, but not for long."""
        end = time.monotonic() + 30
        while self.open and time.monotonic() < end:
            self._hear()
            time.sleep(0.2)
        if self.open:
            log.warning("no reply of SuperNodes %s within 30 s of the run's end", sorted(self.open.values()))

    def _greet(self, node: int, said: Mapping[str, Any]) -> None:
        """Let the SuperNode's key join for its clients, and tell it where."""
        place, name = self.served.place, _name(node)
        self._register(name, line_of(name, str(said["key"]), str(said["clients"]).split(",")))
        where = {"address": place.address, "fingerprint": place.fingerprint or "", "node": name}
        self.open[self._send(node, "train", where)] = node

    def _send(self, node: int, kind: str, said: Mapping[str, str]) -> str:
        app = _flower("app")
        content = app.RecordDict({_SESSION: app.ConfigRecord(dict(said))})
        (sent,) = self.grid.push_messages([app.Message(content, dst_node_id=node, message_type=kind, ttl=self.ttl)])
        if sent is None:
            raise FederatedError(f"the SuperLink did not take the {kind} message for SuperNode {node}")
        return str(sent)

    def _hear(self) -> None:
        waited = [*self.asked, *self.open]
        for reply in self.grid.pull_messages(waited) if waited else ():
            message = reply.metadata.reply_to_message_id
            asked = message in self.asked
            node = (self.asked if asked else self.open).pop(message)
            if reply.has_error():
                self._failed(node, reply.error.reason)
            elif asked:
                try:
                    self._greet(node, reply.content[_SESSION])
                except (FederatedError, KeyError) as error:
                    self._failed(node, f"it gave no key: {error}")
            else:
                self._register(_name(node), None)
                self.failures[node] = _ATTEMPTS  # it heard that the run is over

    def _failed(self, node: int, why: str) -> None:
        self._register(_name(node), None)
        self.failures[node] = self.failures.get(node, 0) + 1
        last = self.failures[node] >= _ATTEMPTS
        then = "it is left alone, having failed so often" if last else "it gets another"
        log.warning("the session of SuperNode %d has failed: %s; %s", node, why, then)

    def _register(self, name: str, line: str | None) -> None:
        """Add a node's key to those that may join, or take it away. The file is replaced, never half there."""
        self.keys.pop(name, None)
        if line is not None:
            self.keys[name] = line
        path = self.served.place.nodes
        new = path.with_name(path.name + ".new")
        new.touch(mode=0o600)
        new.write_text("".join(f"{line}\n" for line in self.keys.values()))
        new.replace(path)


def _name(node: int) -> str:
    return f"flower-{node}"


# -- a site's side -----------------------------------------------------------------------------------------------------


def client_app(build: BuildClient) -> Any:
    """A ClientApp whose sessions run `Node` for the SuperNode's clients, which ``build`` makes.

    The SuperNode's config says which they are: ``clients='a,b'``, or ``client='a'``, or else its ``partition-id``; and in ``folder``
    where they keep their state (by default ``runs/flower/<clients>`` below the folder that the SuperNode runs in); in ``blobs``, where
    else than at its host the server may keep tensors.
    """
    app = _flower("clientapp").ClientApp()

    def train(message: Any, context: Any) -> Any:
        _be_heard()
        if _SESSION not in message.content:
            raise FederatedError(
                "this app speaks with arclight's own server in session mode; for a plain Flower server write a plain ClientApp"
            )
        why = _work(build, message.content[_SESSION], context.node_config, context.run_config)
        return answered(message, {"why": why})

    def query(message: Any, context: Any) -> Any:
        key = _key_in(_folder_of(context.node_config))
        return answered(message, {"key": key.public, "clients": ",".join(_clients_of(context.node_config))})

    def answered(message: Any, said: Mapping[str, str]) -> Any:
        records = _flower("app")
        return records.Message(records.RecordDict({_SESSION: records.ConfigRecord(dict(said))}), reply_to=message)

    app.train()(train)
    app.query()(query)
    return app


def _folder_of(site: Mapping[str, Any]) -> Path:
    return Path(str(site.get("folder") or Path("runs/flower") / "-".join(_clients_of(site)))).resolve()


def _key_in(folder: Path) -> NodeKey:
    """The site's private key, made when it is first asked for. It never leaves the site."""
    path = folder / "node.key"
    return NodeKey.read(path) if path.exists() else NodeKey.make(path)


def _work(build: BuildClient, session: Mapping[str, Any], site: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Be a node until the server closes the session; returns why it did."""
    from arclight.federated.clients.node import Node
    from arclight.federated.clients.secure_sum_client import Identity
    from arclight.federated.transports.http_client import HttpLink

    names, patience = _clients_of(site), float(config.get("patience", FLOWER_DEFAULTS["patience"]))
    folder = _folder_of(site)
    key = _key_in(folder)
    link = HttpLink(
        session["address"], folder / "blobs", key=key,
        fingerprint=session["fingerprint"] or None, patience=patience, stores=str(site.get("blobs") or "").split(),
    )  # fmt: skip
    clients, identity = [build(name, config) for name in names], Identity(sign=key.sign)
    node = Node(link, clients, folder, session["node"], patience=patience, identity=identity)
    try:
        node.run()
    finally:
        link.close()
    return node.closed


def _clients_of(site: Mapping[str, Any]) -> list[str]:
    if said := site.get("clients") or site.get("client"):
        return [name.strip() for name in str(said).split(",")]
    if "partition-id" in site:
        return [str(site["partition-id"])]
    raise FederatedError(
        "the SuperNode does not say whose data it has: start it with --node-config \"client='name'\" (or clients='a,b', "
        "or partition-id=0)"
    )


# -- compat mode -------------------------------------------------------------------------------------------------------


def _serve_messages(build: str, grid: Any, config: Mapping[str, Any], folder: Path) -> None:
    """The server in this process, and beside it a node for each SuperNode, which turns orders into Flower's messages."""
    from arclight.federated.clients.node import Node
    from arclight.federated.server.secure_sums import refuse_unmasked_updates

    server = built(build, folder, config)
    refuse_unmasked_updates(server.federation)
    flower = _Messages(grid, float(config["reply-seconds"]))
    nodes: dict[int, tuple[Node, str, threading.Thread]] = {}
    with server.opened() as run:
        log.info("run %s is served in Flower's own messages, in %s", run.name, folder)
        roster = run.coordinator.roster
        free = [roster.name(number) for number in range(len(roster))]

        def work(node: Node) -> None:
            try:
                node.run()
            except FederatedError:
                log.exception("a node of this run is lost")

        try:
            while not run.runtime.wait(_LOOK):
                for gone in nodes.keys() - (here := set(flower.node_ids())):
                    node, client, _ = nodes.pop(gone)
                    log.warning("SuperNode %d has gone; client %s waits for another", gone, client)
                    free.insert(0, client)
                    node.stop()
                for came in sorted(here - nodes.keys())[: len(free)]:
                    client = free.pop(0)
                    learner = FlowerLearner(flower, came)
                    clients = [Client(client, learner=lambda folder, learner=learner: learner)]  # type: ignore[misc]
                    node = Node(InProcessLink(run.service), clients, folder / "nodes" / client, _name(came))
                    thread = threading.Thread(target=work, args=(node,), name=_name(came), daemon=True)
                    nodes[came] = node, client, thread
                    thread.start()
        finally:
            for node, *_ in nodes.values():
                node.stop()
            for *_, thread in nodes.values():
                thread.join(30)
        over = run.runtime.ended
        log.info("run %s is over: %s", run.name, over.why if over else "it was stopped")


class _Messages:
    """Flower's grid for several threads, one call at a time."""

    def __init__(self, grid: Any, reply_seconds: float) -> None:
        self._grid, self._lock, self._seconds = grid, threading.Lock(), reply_seconds

    def node_ids(self) -> Iterable[int]:
        with self._lock:
            return list(self._grid.get_node_ids())

    def ask(self, node: int, kind: str, content: Any) -> Any:
        """The content of a node's reply. Raises FederatedError for an error in its place, or none in time."""
        message = _flower("app").Message(content, dst_node_id=node, message_type=kind, ttl=self._seconds)
        with self._lock:
            (sent,) = self._grid.push_messages([message])
        if sent is None:
            raise FederatedError(f"the SuperLink did not take the {kind} message for SuperNode {node}")
        del message, content
        end = time.monotonic() + self._seconds
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
            f"SuperNode {node} did not answer a {kind} message within {self._seconds:g} s (reply-seconds)"
        )


class FlowerLearner:
    """Implements `Learner` with a Flower client that knows nothing of arclight: one train or evaluate message for each order.

    Weights are the ArrayRecord ``arrays`` under their parameter names, in the order of names; the config says ``server-round`` (from 1),
    ``local-steps`` and ``clock``, which a client may heed or not. What comes back may have the same names or, as lists of arrays
    have, "0", "1", ...; its metric ``num-examples`` is its weight. Flower's arrays know neither bfloat16 nor 8-bit floats: such weights
    travel as float32 and come back rounded to their own type.
    """

    def __init__(self, messages: _Messages, node: int) -> None:
        self._messages, self._node = messages, node

    def fit(self, order: Fit, weights: Tensors, progress: Progress) -> Outcome:
        began = {"server-round": order.round + 1, "local-steps": order.steps, "clock": order.clock}
        reply = self._ask("train", weights, began)
        if _KEY not in reply:
            raise FederatedError(f"SuperNode {self._node} sends no {_KEY!r} back, but {sorted(reply)}")
        tensors = _tensors_of(reply[_KEY], weights, self._node)
        samples, metrics = self._measured(reply)
        progress(order.steps, metrics.get("train/loss"))
        return Outcome(tensors=tensors, samples=samples, tokens=samples, steps=order.steps, metrics=metrics)

    def evaluate(self, order: Evaluate, weights: Tensors) -> Outcome:
        samples, metrics = self._measured(self._ask("evaluate", weights, {"server-round": order.round + 1}))
        return Outcome(samples=samples, metrics=metrics)

    def close(self) -> None:
        """Nothing is held between messages."""

    def _ask(self, kind: str, weights: Tensors, config: dict[str, int]) -> Any:
        app = _flower("app")
        arrays = {key.removeprefix(_MODEL): app.Array(_plain(weights[key]).numpy()) for key in sorted(weights)}
        content = app.RecordDict({_KEY: app.ArrayRecord(arrays), "config": app.ConfigRecord(config)})
        return self._messages.ask(self._node, kind, content)

    def _measured(self, reply: Any) -> tuple[int, dict[str, float]]:
        found = {
            name: float(value) for record in reply.metric_records.values() for name, value in record.items()
            if not isinstance(value, list)
        }  # fmt: skip
        if "num-examples" not in found:
            raise FederatedError(
                f"SuperNode {self._node} does not say how many examples it used: its reply needs a MetricRecord with "
                f"'num-examples', got {sorted(found)}"
            )
        return int(found.pop("num-examples")), found


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    known = (torch.float64, torch.float32, torch.float16)
    return (
        tensor.detach().cpu()
        if tensor.dtype in known or not tensor.is_floating_point()
        else tensor.detach().cpu().float()
    )


def _tensors_of(record: Any, sent: Tensors, node: int) -> dict[str, torch.Tensor]:
    """What a client sent back, under the keys and in the types of what it was sent. Raises FederatedError for other names or shapes."""
    import torch

    keys = sorted(sent)
    names = [key.removeprefix(_MODEL) for key in keys]
    given = list(record)
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
