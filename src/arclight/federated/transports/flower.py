"""Launch a federation through Flower, which starts the processes; tensors travel beside it.

The ServerApp starts the server in a process of its own, asks each SuperNode for its public key (the private one is made at the site and
stays there), and sends it one long message with the server's address; the ClientApp is a `Node` until the run is over. If the
SuperLink dies, Flower ends the ServerApp, and the run goes on between server and nodes. Decision 022 says what Flower carries.

Checked with Flower 1.41. In this package this file alone imports it. FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 keep Flower from
calling home. Apps that ``arclight federate flower`` wrote call `server_app` and `client_app`: these names and the run config stay.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight.fabric.extras import require
from arclight.federated.errors import FederatedError
from arclight.federated.transports.keys import NodeKey, line_of
from arclight.federated.transports.server_process import Config, ServerProcess
from arclight.federated.transports.settings import FLOWER_DEFAULTS

if TYPE_CHECKING:
    from arclight.federated.clients.client import Client

log = logging.getLogger(__name__)

BuildClient = Callable[[str, Mapping[str, Any]], "Client"]
"""A client's name and the run config to the client."""

_POLL_S, _LAST_REPLIES_S = 1.0, 30.0
_ATTEMPTS = 5
_SESSION = "session"


def _flower(module: str) -> Any:
    return require(f"flwr.{module}", extra="flower")


def _log_beside_flower() -> None:
    ours = logging.getLogger("arclight")
    ours.setLevel(logging.INFO)
    for handler in logging.getLogger("flwr").handlers:
        if handler not in ours.handlers:
            ours.addHandler(handler)


# -- the server --------------------------------------------------------------------------------------------------------


def server_app(build: str) -> Any:
    """Make a ServerApp; addresses are in the app's run config (see `settings.FLOWER_DEFAULTS`).

    build: as of `ServerProcess`; imported in the server's process alone.
    """
    app = _flower("serverapp").ServerApp()

    def serve(grid: Any, context: Any) -> None:
        _log_beside_flower()
        config = {**FLOWER_DEFAULTS, **context.run_config}
        if config.get("mode", "session") != "session":
            raise FederatedError(
                f"mode = {config['mode']!r}: this app carries tensors beside Flower only; examples/flower_clients has a ServerApp for "
                "clients that know only Flower"
            )
        folder = Path(str(config["folder"]) or f"runs/flower/{context.run_id}").resolve()
        parent, server = os.getppid(), ServerProcess(build, folder, config)
        log.info("the run in %s is served at %s by process %d", folder, server.address, server.pid)
        sessions = Sessions(grid, server, ttl_s=86400 * float(config["days"]))
        try:
            sessions.poll()
            while not server.wait(_POLL_S):
                sessions.poll()
        except BaseException:
            if os.getppid() == parent:  # somebody stops the run; else Flower itself has died, and the run need not
                server.stop()
            raise
        sessions.finish()
        from arclight.federated.rounds.store import Rounds

        log.info("the run in %s is over after round %s", folder, Rounds(folder).newest())

    app.main()(serve)
    return app


@dataclass
class Sessions:
    """Keep one long message open with each SuperNode; send another if it came to nothing."""

    grid: Any
    server: ServerProcess
    ttl_s: float
    queries: dict[str, int] = field(default_factory=dict)
    """Message that asks for a key, to its SuperNode."""
    open: dict[str, int] = field(default_factory=dict)
    """Message that keeps a node running, to its SuperNode."""
    failures: dict[int, int] = field(default_factory=dict)
    """Failed sessions by SuperNode; one that has reached `_ATTEMPTS` gets no other."""
    keys: dict[str, str] = field(default_factory=dict)
    """Node name to its line in the file of nodes."""

    def poll(self) -> None:
        """Query new SuperNodes, handle replies, forget SuperNodes that have gone."""
        here = set(self.grid.get_node_ids())
        self._receive()
        for messages in (self.queries, self.open):
            for message, node in list(messages.items()):
                if node not in here:
                    log.warning("SuperNode %d has gone, its session with it; it gets another when it is back", node)
                    del messages[message]
                    self._register(_name(node), None)
        for node in sorted(here - set(self.open.values()) - set(self.queries.values())):
            if self.failures.get(node, 0) < _ATTEMPTS:
                self.queries[self._send(node, "query", {"want": "key"})] = node

    def finish(self) -> None:
        """Receive the last replies, for a limited time."""
        end = time.monotonic() + _LAST_REPLIES_S
        while self.open and time.monotonic() < end:
            self._receive()
            time.sleep(0.2)
        if self.open:
            log.warning("no reply of SuperNodes %s after the run's end", sorted(self.open.values()))

    def _start(self, node: int, settings: Mapping[str, Any]) -> None:
        """Let the SuperNode's key join for its clients, and send it the address."""
        name = _name(node)
        self._register(name, line_of(name, str(settings["key"]), str(settings["clients"]).split(",")))
        where = {"address": self.server.address, "fingerprint": self.server.fingerprint or "", "node": name}
        self.open[self._send(node, "train", where)] = node

    def _send(self, node: int, kind: str, fields: Mapping[str, str]) -> str:
        app = _flower("app")
        content = app.RecordDict({_SESSION: app.ConfigRecord(dict(fields))})
        (sent,) = self.grid.push_messages([app.Message(content, dst_node_id=node, message_type=kind, ttl=self.ttl_s)])
        if sent is None:
            raise FederatedError(f"the SuperLink did not take the {kind} message for SuperNode {node}")
        return str(sent)

    def _receive(self) -> None:
        waited = [*self.queries, *self.open]
        for reply in self.grid.pull_messages(waited) if waited else ():
            message = reply.metadata.reply_to_message_id
            is_key = message in self.queries
            node = (self.queries if is_key else self.open).pop(message)
            if reply.has_error():
                self._failed(node, reply.error.reason)
            elif is_key:
                try:
                    self._start(node, reply.content[_SESSION])
                except (FederatedError, KeyError) as error:
                    self._failed(node, f"it gave no key: {error}")
            else:
                self._register(_name(node), None)
                self.failures[node] = _ATTEMPTS  # it knows that the run is over

    def _failed(self, node: int, why: str) -> None:
        self._register(_name(node), None)
        self.failures[node] = self.failures.get(node, 0) + 1
        last = self.failures[node] >= _ATTEMPTS
        then = "it is left alone, having failed so often" if last else "it gets another"
        log.warning("the session of SuperNode %d has failed: %s; %s", node, why, then)

    def _register(self, name: str, line: str | None) -> None:
        """Add a node's key to those that may join, or remove it; the file is replaced atomically."""
        self.keys.pop(name, None)
        if line is not None:
            self.keys[name] = line
        path = self.server.nodes
        new = path.with_name(path.name + ".new")
        new.touch(mode=0o600)
        new.write_text("".join(f"{line}\n" for line in self.keys.values()))
        new.replace(path)


def _name(node: int) -> str:
    return f"flower-{node}"


# -- a site ------------------------------------------------------------------------------------------------------------


def client_app(build: BuildClient) -> Any:
    """Make a ClientApp that runs a `Node` for the clients that ``build`` makes.

    The SuperNode's config names them: ``clients='a,b'``, or ``client='a'``, or else its ``partition-id``; in ``folder``, where they keep
    their state (by default ``runs/flower/<clients>`` below the SuperNode's folder); in ``blobs``, where else than at its host the
    server may keep tensors.
    """
    app = _flower("clientapp").ClientApp()

    def train(message: Any, context: Any) -> Any:
        _log_beside_flower()
        if _SESSION not in message.content:
            raise FederatedError(
                "this app speaks with arclight's own server; for a plain Flower server write a plain ClientApp"
            )
        why = _run_node(build, message.content[_SESSION], context.node_config, context.run_config)
        return answered(message, {"why": why})

    def query(message: Any, context: Any) -> Any:
        key = _key_in(_folder_of(context.node_config))
        return answered(message, {"key": key.public, "clients": ",".join(_clients_of(context.node_config))})

    def answered(message: Any, content: Mapping[str, str]) -> Any:
        records = _flower("app")
        return records.Message(records.RecordDict({_SESSION: records.ConfigRecord(dict(content))}), reply_to=message)

    app.train()(train)
    app.query()(query)
    return app


def _run_node(build: BuildClient, session: Config, site: Config, config: Config) -> str:
    """Be a node until the server closes the session; return why it did."""
    from arclight.federated.clients.node import Node
    from arclight.federated.clients.secure_sum_client import Identity
    from arclight.federated.transports.http_client import HttpLink

    names, retry_timeout_s = _clients_of(site), float(config.get("patience", FLOWER_DEFAULTS["patience"]))
    folder = _folder_of(site)
    key = _key_in(folder)
    link = HttpLink(
        session["address"], folder / "blobs", key=key,
        fingerprint=session["fingerprint"] or None, retry_timeout_s=retry_timeout_s, stores=str(site.get("blobs") or "").split(),
    )  # fmt: skip
    clients, identity = [build(name, config) for name in names], Identity(sign=key.sign)
    node = Node(link, clients, folder, session["node"], retry_timeout_s=retry_timeout_s, identity=identity)
    try:
        node.run()
    finally:
        link.close()
    return node.closed


def _folder_of(site: Config) -> Path:
    return Path(str(site.get("folder") or Path("runs/flower") / "-".join(_clients_of(site)))).resolve()


def _key_in(folder: Path) -> NodeKey:
    """Return the site's private key, made when it is first asked for. It never leaves the site."""
    path = folder / "node.key"
    return NodeKey.read(path) if path.exists() else NodeKey.make(path)


def _clients_of(site: Config) -> list[str]:
    if names := site.get("clients") or site.get("client"):
        return [name.strip() for name in str(names).split(",")]
    if "partition-id" in site:
        return [str(site["partition-id"])]
    raise FederatedError(
        "the SuperNode does not say whose data it has: start it with --node-config \"client='name'\" (or clients='a,b', or partition-id=0)"
    )
