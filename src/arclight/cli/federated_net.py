"""``arclight federate serve|join|keys``: the same run across processes and machines."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight.cli.arguments import Parser, UsageError, problems_listed, read_as
from arclight.cli.federate import folder_of, opened, run_parser
from arclight.cli.federated_schema import FederatedRecipe
from arclight.federated.errors import FederatedError
from arclight.federated.protocol import Evaluate, Fit, Leave, Message, Receipt, Update, Wait, Welcome
from arclight.trainer.report import size_text

if TYPE_CHECKING:
    from arclight.federated.blobs import BlobStore
    from arclight.federated.clients import Learner
    from arclight.federated.clients.client import Client
    from arclight.federated.transports.link import Link
    from arclight.federated.transports.settings import Listening

DEFAULT_PORT = 8470
SAY_AFTER = 3.0
"""Seconds after which a node says that it cannot reach its server; it goes on trying."""
OF_THE_NODE = ("task.", "trainer.")
"""Settings that a node may have otherwise than the server: where its data lie, what it computes on."""


# -- serve ---------------------------------------------------------------------------------------------------------


def serve(arguments: list[str]) -> None:
    parser = run_parser(
        "federate serve", "Be the server of a federated run; nodes join it with `arclight federate join`."
    )
    parser.add_argument(
        "--address", default=f"127.0.0.1:{DEFAULT_PORT}", metavar="HOST:PORT",
        help="where to listen; port 0 takes a free one (default: %(default)s, which only this machine reaches)",
    )  # fmt: skip
    parser.add_argument(
        "--tls-cert", type=Path, metavar="FILE", help="the server's certificate, PEM; see federate keys"
    )
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key, PEM")
    parser.add_argument(
        "--node-keys", type=Path, metavar="FILE", help="the keys of the nodes that may join, one on each line"
    )
    recipe, options = read_as(FederatedRecipe, parser, arguments)
    where = listening(options)

    from arclight.cli.federated_progress import Watched
    from arclight.federated.server.memory import give_back_freed_memory
    from arclight.federated.transports.http_server import HttpServer

    give_back_freed_memory()
    with closing(bound(where)) as here:
        folder = folder_of(recipe, options)
        with (
            opened(recipe, folder, options) as (run, progress),
            HttpServer(Watched(run.service, progress), where, run.blobs, here) as server,
        ):
            progress.say(f"{recipe.name} is served at {server.address}, and kept in {folder.path}")
            progress.say(f"  nodes join it with: {join_line(server.address, server.fingerprint)}")
            run.wait()
            run.let_nodes_hear()


def bound(where: Listening) -> socket.socket:
    """A socket that listens there. Raises UsageError where that cannot be, before anything of the run is made."""
    from arclight.federated.transports.http_server import bind

    try:
        return bind(where.host, where.port)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise UsageError(
            f"--address {where.host}:{where.port}: {why}; name another port, or 0 for a free one"
        ) from error


def listening(options: Namespace) -> Listening:
    """Where to listen. Raises UsageError for an address that is none, and off this machine for what is missing."""
    from arclight.federated.transports.settings import Listening, is_loopback

    host, colon, port = options.address.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        named = options.address.rstrip(":") or "127.0.0.1"
        raise UsageError(f"--address {options.address}: write host:port, as in {named}:{DEFAULT_PORT}")
    flags = {"--tls-cert": options.tls_cert, "--tls-key": options.tls_key, "--node-keys": options.node_keys}
    missing = [flag for flag, value in flags.items() if value is None]
    if missing and not is_loopback(host):
        raise UsageError(
            f"--address {options.address}: other machines can reach it, so that it needs TLS and registered nodes: "
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing. `arclight federate keys server FOLDER NAME` "
            "makes a certificate and its key, `arclight federate keys node FILE NAME --into NODES` a node's; "
            "on this machine alone 127.0.0.1 needs none of them"
        )
    try:
        return Listening(
            host=host.strip("[]"), port=int(port), certificate=options.tls_cert, private_key=options.tls_key, nodes=options.node_keys
        )  # fmt: skip
    except ValueError as error:
        raise UsageError(f"--address {options.address}: {error}") from error


def join_line(address: str, fingerprint: str | None) -> str:
    tls = f" --fingerprint {fingerprint} --key node.key" if fingerprint else ""
    return f"arclight federate join {address} --name NAME{tls}"


# -- join ----------------------------------------------------------------------------------------------------------


def join(arguments: list[str]) -> None:
    options, overrides = join_options(arguments)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # classes named as package.module:Class are looked for here too

    from arclight.federated.clients.node import Node
    from arclight.federated.clients.workers import Workers
    from arclight.federated.transports.http_link import HttpLink
    from arclight.federated.transports.keys import NodeKey

    folder = options.folder or Path("runs") / "nodes" / options.name
    key = NodeKey.read(options.key) if options.key else None
    site = Site(options.data, overrides, options.client)
    link = Told(
        HttpLink(
            options.address, folder / "blobs", key=key, cafile=options.ca, fingerprint=options.fingerprint,
            patience=min(SAY_AFTER, options.patience),
        ),
        site,
    )  # fmt: skip

    def work() -> Node:
        """Trained beside this process, which stays free to say that the node lives."""
        crew = Workers(site.client, ranks=processes(overrides), names=options.client)
        node = Node(link, crew, folder, options.name, patience=options.patience)
        node.run()
        return node

    with written_down(folder), closing(link):
        try:
            while (node := work()).another:
                print(f"{node.closed}; what was finished for that is kept", flush=True)
        except KeyboardInterrupt as error:
            raise KeyboardInterrupt(
                f"node {options.name} has left. What its clients have done is kept in {folder}: the same command goes on"
            ) from error
    if node.failed:
        raise FederatedError(f"node {options.name} ends: {node.closed}")
    print(f"node {options.name} is done: {node.closed}")


def processes(overrides: list[str]) -> int:
    """How many train a client together at this node: as many as it was told devices."""
    said = dict(pairwise(overrides)).get("--trainer.devices", "1")
    return int(said) if said.isdigit() and int(said) > 0 else 1


@contextmanager
def written_down(folder: Path) -> Iterator[None]:
    """Keep a node's log in its folder, and say on standard error what a person should know."""
    folder.mkdir(parents=True, exist_ok=True)
    kept, seen = logging.FileHandler(folder / "log.txt", encoding="utf-8"), logging.StreamHandler(sys.stderr)
    kept.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    seen.setFormatter(OneLine())
    seen.setLevel(logging.WARNING)
    log = logging.getLogger("arclight")
    log.setLevel(logging.INFO)
    log.addHandler(kept)
    log.addHandler(seen)
    try:
        yield
    finally:
        log.removeHandler(seen)
        log.removeHandler(kept)
        kept.close()


class OneLine(logging.Formatter):
    """A message without where it was raised, which the file has."""

    def format(self, record: logging.LogRecord) -> str:
        return f"arclight: {record.getMessage()}"


class Told:
    """A link that lets the site know the server's recipe, and says in a line what is asked of this node."""

    def __init__(self, link: Link, site: Site) -> None:
        self._link, self._site, self._shown, self._run = link, site, "", ""

    @property
    def blobs(self) -> BlobStore:
        return self._link.blobs

    def heed(self, stopping: threading.Event) -> None:
        self._link.heed(stopping)

    def send(self, message: Message) -> Message:
        answer = self._link.send(message)
        match answer:
            case Welcome():
                try:
                    self._site.take(answer.recipe)
                except BaseException:
                    self._link.send(Leave(node=getattr(message, "node", ""), session=answer.session))
                    raise
                self._show(f"joined run {answer.run}" + (" again" if answer.run == self._run else ""))
                self._run = answer.run
            case Fit():
                self._show(f"round {answer.round}: client {answer.client} trains {answer.steps} steps")
            case Evaluate():
                self._show(f"round {answer.round}: client {answer.client} measures")
            case Receipt() if isinstance(message, Update):
                size = size_text(message.manifest.size)
                taken = f"{size} sent" if answer.accepted else f"refused ({answer.reason}): {answer.message}"
                self._show(
                    f"round {message.round}: client {message.client}, {message.steps} steps in {message.seconds:.1f} s, {taken}"
                )
            case Wait() if answer.about:
                self._show(f"waiting: {answer.about}")
        return answer

    def close(self) -> None:
        self._link.close()

    def _show(self, text: str) -> None:
        """Once, however often it is said."""
        if text != self._shown:
            print(text, flush=True)
            self._shown = text


def join_options(arguments: list[str]) -> tuple[Namespace, list[str]]:
    about = (
        "Be a node of a federated run: train here, on the data that are here. What is trained and how the server says."
    )
    usage = "arclight federate join ADDRESS --name NAME [options] [--task.field value ...] [--trainer.field value ...]"
    parser = Parser(prog="arclight federate join", usage=usage, description=about)
    parser.add_argument("address", metavar="ADDRESS", help="https://host:port; http:// only on the server's machine")
    parser.add_argument("--name", required=True, help="of this node, the same each time that it joins")
    parser.add_argument(
        "--client", action="append", default=[], metavar="N",
        help="number of a client whose data are here alone, may be repeated (default: any that the server gives this node)",
    )  # fmt: skip
    parser.add_argument(
        "--data", metavar="PATH",
        help="the client's own data, all of which it trains on; default: its share of the recipe's data, which must be here then",
    )  # fmt: skip
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="where the node keeps its state (default: runs/nodes/NAME)"
    )
    parser.add_argument(
        "--ca", type=Path, metavar="FILE", help="certificates that may vouch for the server (default: the system's)"
    )
    parser.add_argument(
        "--fingerprint", metavar="SHA256", help="of the server's certificate; then nobody need vouch for it"
    )
    parser.add_argument("--key", type=Path, metavar="FILE", help="this node's private key; see federate keys")
    parser.add_argument(
        "--patience", type=float, default=120.0, metavar="SECONDS",
        help="how long a server that does not answer is tried again (default: %(default)s)",
    )  # fmt: skip
    options, overrides = parser.parse_known_args(arguments)
    parser.check_spelling(overrides)
    wrong = [word for word in overrides if word.startswith("--") and not word[2:].startswith(OF_THE_NODE)]
    if wrong:
        raise UsageError(
            f"{wrong[0]} is the server's to say: a node may set what begins with --{' or --'.join(OF_THE_NODE)}"
        )
    if strange := [name for name in options.client if not name.isdigit()]:
        raise UsageError(f"--client {strange[0]}: clients are numbered, from 0 to one less than federation.clients")
    if options.data is not None and len(options.client) != 1:
        raise UsageError("--data are one client's: say whose with --client N")
    if options.data is not None and "://" not in options.data and not Path(options.data).exists():
        raise UsageError(f"--data {options.data}: there is no such file or folder")
    return options, overrides


class Site:
    """What a node trains clients with: the server's recipe, with what is otherwise here. It goes to worker processes as it is."""

    def __init__(self, data: str | None, overrides: list[str], clients: Sequence[str] = ()) -> None:
        self._data, self._overrides, self._clients = data, overrides, tuple(clients)
        self._recipe: dict[str, Any] = {}

    def take(self, recipe: dict[str, Any]) -> None:
        """The recipe that the server has sent when the node joined. Raises UsageError where it cannot be used here."""
        self._recipe = recipe
        for client in self._clients or ("0",) if recipe else ():
            self._at(client)

    def client(self, name: str) -> Client:
        from arclight.federated.clients.client import Client

        return Client(name, learner=partial(self.learner, name))

    def learner(self, client: str, folder: Path) -> Learner:
        """For a client of the recipe that the server has sent. Raises UsageError where it cannot be used here."""
        from arclight.cli.federated_sites import learner_at

        return learner_at(self._at(client), folder)

    def _at(self, client: str) -> FederatedRecipe:
        from arclight.cli.federated_sites import at_site, with_data
        from arclight.recipe import read

        if not self._recipe:
            raise UsageError(
                "the server has sent no recipe: it was not started by `arclight federate serve`, but by a program of its own"
            )
        with problems_listed("the server's recipe cannot be used here"):
            recipe = read(FederatedRecipe, self._recipe, self._overrides)
        return at_site(recipe, int(client)) if self._data is None else with_data(recipe, self._data)


# -- keys ----------------------------------------------------------------------------------------------------------


def keys(arguments: list[str]) -> None:
    about = "Make what a federation needs off one machine: a certificate for the server, a key for each node."
    parser = Parser(prog="arclight federate keys", description=about)
    verbs = parser.add_subparsers(required=True, metavar="server|node")

    verb = verbs.add_parser("server", help="a certificate that it signs itself, and its private key")
    verb.add_argument("folder", type=Path, metavar="DIR", help="where server.pem and server.key go")
    verb.add_argument("hosts", nargs="+", metavar="HOST", help="names and addresses by which nodes reach the server")
    verb.set_defaults(run=make_server_keys)

    verb = verbs.add_parser("node", help="a node's private key, and the line by which the server knows it")
    verb.add_argument("file", type=Path, metavar="FILE", help="where the private key goes; it stays with the node")
    verb.add_argument("name", metavar="NAME", help="of the node")
    verb.add_argument(
        "--client",
        action="append",
        default=[],
        metavar="N",
        help="a client that it may answer for, may be repeated (default: any)",
    )
    verb.add_argument(
        "--into", type=Path, metavar="FILE", help="add the line to this file of nodes, for serve --node-keys"
    )
    verb.set_defaults(run=make_node_key)
    options = parser.parse_args(arguments)
    options.run(options)


def make_server_keys(options: Namespace) -> None:
    from arclight.federated.transports.keys import make_certificate

    try:
        made = make_certificate(options.folder, options.hosts)
    except FileExistsError as error:
        raise UsageError(
            f"{error.filename} is there already, and a key is not overwritten: name another folder"
        ) from error
    print(f"wrote {made.certificate} and {made.private_key}, which nobody else may read")
    print(f"nodes know the server by: --fingerprint {made.fingerprint}")


def make_node_key(options: Namespace) -> None:
    from arclight.federated.transports.keys import NodeKey

    try:
        line = NodeKey.make(options.file).line(options.name, options.client)
    except FileExistsError as error:
        raise UsageError(f"{options.file} is there already, and a key is not overwritten: name another file") from error
    print(f"wrote {options.file}, which stays with node {options.name}")
    if options.into is None:
        print(f"the server's file of nodes needs the line:\n{line}")
        return
    options.into.parent.mkdir(parents=True, exist_ok=True)
    with options.into.open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
    print(f"{options.into} lets it join")
