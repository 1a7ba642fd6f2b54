"""Run a federation across processes and machines: ``arclight federate serve`` and ``join``.

`federated_run` calls `serve` at the server and `join` at each node. The node gets its recipe from the server and adds its own
overrides (`Site`). Flags, and the line that joins a node, must stay.
"""

from __future__ import annotations

import errno
import logging
import os
import re
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
from urllib.parse import urlsplit

from arclight.cli.arguments import Parser, UsageError, problems_listed, read_as
from arclight.cli.federate.federated_run import describe_node_folder, folder_of, open_run, run_parser
from arclight.cli.federate.recipe import FederatedRecipe
from arclight.fabric.extras import require
from arclight.federated.errors import FederatedError, LinkError
from arclight.federated.protocol import Evaluate, Fit, Leave, Message, Receipt, Update, Wait, Welcome
from arclight.federated.transports.tls import explain_link_error
from arclight.trainer.run.folder import LogFile
from arclight.trainer.run.report import size_text

if TYPE_CHECKING:
    from arclight.federated.blobs import BlobStore
    from arclight.federated.clients import Learner
    from arclight.federated.clients.client import Client
    from arclight.federated.transports.link import Link
    from arclight.federated.transports.settings import Listening


REPORT_AFTER_S = 3.0
"""Seconds after which a node reports that it cannot reach its server; it keeps retrying."""
NODE_SETTINGS = ("task.", "trainer.")
"""Beginnings of the fields that a node may set itself, such as paths of its data and its devices."""


# -- serve ---------------------------------------------------------------------------------------------------------


def serve(arguments: list[str]) -> None:
    parser = run_parser(
        "federate serve", "Be the server of a federated run; nodes join it with `arclight federate join`."
    )
    parser.add_argument(
        "--address", default=f"127.0.0.1:{DEFAULT_PORT}", metavar="HOST:PORT",
        help="address to listen on; port 0 picks a free one (default: %(default)s, reachable from this machine only)",
    )  # fmt: skip
    parser.add_argument(
        "--tls-cert", type=Path, metavar="FILE", help="certificate of the server, PEM; see federate keys"
    )
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="private key of the certificate, PEM")
    parser.add_argument("--node-keys", type=Path, metavar="FILE", help="keys of the nodes that may join, one per line")
    recipe, options = read_as(FederatedRecipe, parser, arguments)
    where = read_listening(options)

    from arclight.cli.federate.progress import ObservedServer
    from arclight.cli.federate.sites import check_devices, check_division, check_masks
    from arclight.fabric.memory import return_freed_memory
    from arclight.federated.transports.http_server import HttpServer

    if recipe.partition is not None and recipe.federation.evaluate_on == "server":  # else the data need not be here
        check_division(recipe, "; where every site joins with --data of its own, leave [partition] out")
    check_devices(recipe)
    check_masks(recipe)
    return_freed_memory()
    with closing(listen_on(where)) as here:
        folder = folder_of(recipe, options)
        with (
            open_run(recipe, folder, options) as (run, progress),
            HttpServer(ObservedServer(run.service, progress), where, run.blobs, here) as server,
        ):
            progress.print_line(f"{recipe.name} is served at {server.address}, and kept in {folder.path}")
            progress.print_line(
                f"  nodes join it with: {join_line(public_address(server.address, where), server.fingerprint)}"
            )
            run.wait_for_nodes()


# -- join ----------------------------------------------------------------------------------------------------------


def join(arguments: list[str]) -> None:
    options, overrides = join_options(arguments)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # classes named as package.module:Class are looked for here too

    from arclight.federated.clients.node import Node
    from arclight.federated.clients.secure_sum_client import Identity
    from arclight.federated.clients.worker_processes import ProcessExecutor
    from arclight.federated.transports.http_client import HttpLink
    from arclight.federated.transports.keys import NodeKey, Registry

    folder = options.folder or Path("runs") / "nodes" / options.name
    key = NodeKey.read(options.key) if options.key else None
    identity = Identity(
        sign=None if key is None else key.sign, vouches=Registry(options.nodes).vouches if options.nodes else None
    )
    ranks = count_processes(overrides)
    site = Site(options.data, overrides, options.client, ranks)
    link = LoggingLink(
        HttpLink(
            options.address, folder / "blobs", key=key, cafile=options.ca, fingerprint=options.fingerprint,
            retry_timeout_s=min(REPORT_AFTER_S, options.patience), stores=options.blobs,
        ),
        site,
        options.address,
    )  # fmt: skip

    def work() -> Node:
        """Train in separate processes, so that this one can send heartbeats."""
        executor = ProcessExecutor(site.client, ranks=ranks, names=options.client)
        node = Node(link, executor, folder, options.name, retry_timeout_s=options.patience, identity=identity)
        node.run()
        return node

    with log_to_folder(folder), closing(link):
        try:
            while (node := work()).moved:
                print(f"{node.closed}; the updates finished for it are kept", flush=True)
        except KeyboardInterrupt as error:
            raise KeyboardInterrupt(
                f"node {options.name} has left. The progress of its clients is kept in {folder}: the same command resumes it"
            ) from error
    if node.failed:
        back = (
            f". The progress of its clients is kept in {folder}: the same command joins again when the server is back"
        )
        raise FederatedError(f"node {options.name} ends: {node.closed}{back if link.run else ''}")
    print(f"node {options.name} is done: {node.closed}")
    print(describe_node_folder(folder))


def count_processes(overrides: list[str]) -> int:
    """Count the processes that train a client together, by ``--trainer.devices``.

    Raises UsageError if that is not a number.
    """
    devices = dict(pairwise(overrides)).get("--trainer.devices", "1")
    if not devices.isdigit() or int(devices) == 0:
        raise UsageError(
            f"--trainer.devices {devices}: give the number of processes that train one client here; the default is 1"
        )
    return int(devices)


@contextmanager
def log_to_folder(folder: Path) -> Iterator[None]:
    """Keep a node's log in its folder, and print warnings on standard error."""
    folder.mkdir(parents=True, exist_ok=True)
    kept, seen = LogFile(folder / "log.txt"), logging.StreamHandler(sys.stderr)
    kept.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    seen.setFormatter(OneLineFormatter())
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


class OneLineFormatter(logging.Formatter):
    """Format a message without its traceback, which only the log file has."""

    def format(self, record: logging.LogRecord) -> str:
        return f"arclight: {record.getMessage()}"


class LoggingLink:
    """Wrap a link: pass the server's recipe to the site, and print the server's requests."""

    def __init__(self, link: Link, site: Site, address: str) -> None:
        self._link, self._site, self._address, self._shown = link, site, address, ""
        self.run = ""
        """Name of the run that the node has joined; empty before."""

    @property
    def blobs(self) -> BlobStore:
        return self._link.blobs

    def cancel_on(self, stopping: threading.Event) -> None:
        self._link.cancel_on(stopping)

    def send(self, message: Message) -> Message:
        try:
            answer = self._link.send(message)
        except LinkError as error:
            raise explain_link_error(error, self._address) from error
        match answer:
            case Welcome():
                try:
                    self._site.take(answer.recipe)
                except BaseException as error:
                    why = str(error) or type(error).__name__
                    self._link.send(Leave(node=getattr(message, "node", ""), session=answer.session, reason=why))
                    raise
                self._show(f"joined run {answer.run}" + (" again" if answer.run == self.run else ""))
                self.run = answer.run
            case Fit():
                self._show(f"round {answer.round}: client {answer.client} trains {answer.steps} steps")
            case Evaluate():
                self._show(f"round {answer.round}: client {answer.client} evaluates")
            case Receipt() if isinstance(message, Update):
                size = size_text(message.manifest.size)
                taken = f"{size} sent" if answer.accepted else f"refused ({answer.reason}): {answer.message}"
                self._show(
                    f"round {message.round}: client {message.client}, {message.steps} steps in {message.seconds:.1f} s, {taken}"
                )
            case Wait() if answer.waiting_for:
                self._show(f"waiting: {answer.waiting_for}")
        return answer

    def close(self) -> None:
        self._link.close()

    def _show(self, text: str) -> None:
        """Print a line, unless it is the one printed last."""
        if text != self._shown:
            print(text, flush=True)
            self._shown = text


def join_options(arguments: list[str]) -> tuple[Namespace, list[str]]:
    about = "Join a federated run as a node: train on local data. The server sends the recipe."
    usage = "arclight federate join ADDRESS --name NAME [options] [--task.field value ...] [--trainer.field value ...]"
    parser = Parser(prog="arclight federate join", usage=usage, description=about)
    parser.add_argument("address", metavar="ADDRESS", help="https://host:port; http:// only on the server's machine")
    parser.add_argument("--name", required=True, help="name of this node, the same at every join")
    parser.add_argument(
        "--client", action="append", default=[], metavar="N",
        help="client whose data only this node has; may be repeated (default: any that the server assigns)",
    )  # fmt: skip
    parser.add_argument(
        "--data", metavar="PATH",
        help="the client's own data, used completely (default: its share of the recipe's data, which must exist here)",
    )  # fmt: skip
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="folder for the node's state (default: runs/nodes/NAME)"
    )
    parser.add_argument(
        "--ca", type=Path, metavar="FILE", help="certificates to trust, of the server or its CA (default: the system's)"
    )
    parser.add_argument(
        "--fingerprint", metavar="SHA256", help="fingerprint of the server's certificate, instead of --ca"
    )
    parser.add_argument(
        "--blobs", action="append", default=[], metavar="ADDRESS",
        help="address, such as s3://bucket/folder, from which tensors may be read and written; may be repeated (default: only the server's host)",
    )  # fmt: skip
    parser.add_argument("--key", type=Path, metavar="FILE", help="private key of this node; see federate keys")
    parser.add_argument(
        "--nodes", type=Path, metavar="FILE",
        help="keys of all nodes, from a source that you trust: secure aggregation then masks only with their clients",
    )  # fmt: skip
    parser.add_argument(
        "--patience", type=float, default=120.0, metavar="SECONDS",
        help="how long to retry a server that does not answer (default: %(default)s)",
    )  # fmt: skip
    options, overrides = parser.parse_known_args(arguments)
    parser.check_spelling(overrides)
    check_address(options)
    wrong = [word for word in overrides if word.startswith("--") and not word[2:].startswith(NODE_SETTINGS)]
    if wrong:
        raise UsageError(
            f"{wrong[0]} is set by the server: a node may set fields that begin with --{' or --'.join(NODE_SETTINGS)}"
        )
    if strange := [name for name in options.client if not name.isdigit()]:
        raise UsageError(f"--client {strange[0]}: clients are numbered, from 0 to one less than federation.clients")
    if options.data is not None and len(options.client) != 1:
        raise UsageError("--data belongs to one client: name it with --client N")
    if options.data is not None and "://" not in options.data and not Path(options.data).exists():
        raise UsageError(f"--data {options.data}: there is no such file or folder")
    return options, overrides


def check_address(options: Namespace) -> None:
    """Raise UsageError or FederatedError for an address or trust that cannot work as typed."""
    try:
        parts = urlsplit(options.address)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and parts.path in ("", "/")
    except ValueError:  # a port that is none
        usable = False
    if not usable:
        raise UsageError(f"{options.address}: write https://host:port, as in https://server.example.org:{DEFAULT_PORT}")
    known = [
        flag for flag, value in (("--ca", options.ca), ("--fingerprint", options.fingerprint)) if value is not None
    ]
    if len(known) == 2:
        raise UsageError("--ca and --fingerprint: give only one of them")
    if known and parts.scheme == "http":
        raise UsageError(f"{options.address}: {known[0]} needs TLS: write https://, or leave it out")
    if options.fingerprint is not None and not re.fullmatch("[0-9a-fA-F]{64}", options.fingerprint.replace(":", "")):
        raise UsageError(
            f"--fingerprint {options.fingerprint}: it has 64 hexadecimal digits, as `arclight federate keys server` and the "
            "server's first lines say it"
        )


class Site:
    """Build a node's learners from the server's recipe and this site's overrides.

    It is pickled for the worker processes.
    """

    def __init__(self, data: str | None, overrides: list[str], clients: Sequence[str] = (), devices: int = 1) -> None:
        self._data, self._overrides, self._clients, self._devices = data, overrides, tuple(clients), devices
        self._recipe: dict[str, Any] = {}

    def take(self, recipe: dict[str, Any]) -> None:
        """Take the recipe that the server sent at the join.

        Raises UsageError if it cannot be used here.
        """
        from arclight.cli.federate.sites import check_division, check_vocabularies

        if recipe == self._recipe:
            return  # it has joined again
        self._recipe = recipe
        sites = {client: self._at(client) for client in (self._clients or ("0",) if recipe else ())}
        if sites:
            check_vocabularies(self._read(), sites)
        if recipe and self._data is None:
            check_division(self._read())

    def client(self, name: str) -> Client:
        from arclight.federated.clients.client import Client

        return Client(name, learner=partial(self.learner, name))

    def learner(self, client: str, folder: Path) -> Learner:
        """Build the learner for a client of the server's recipe.

        Raises UsageError if it cannot be used here.
        """
        from arclight.cli.federate.sites import learner_at

        return learner_at(self._at(client), folder, self._devices)

    def _at(self, client: str) -> FederatedRecipe:
        from arclight.cli.federate.sites import recipe_at_site, recipe_with_data

        if not self._recipe:
            raise UsageError(
                "the server has sent no recipe: it was not started by `arclight federate serve`, but by a program of its own"
            )
        recipe = self._read()
        return recipe_at_site(recipe, int(client)) if self._data is None else recipe_with_data(recipe, self._data)

    def _read(self) -> FederatedRecipe:
        from arclight.recipe import read

        with problems_listed("the server's recipe cannot be used here"):
            return read(FederatedRecipe, self._recipe, self._overrides)


DEFAULT_PORT = 8470
_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - compared with, not listened at


def listen_on(where: Listening) -> socket.socket:
    """Listen at the address of a server.

    Raises UsageError if that fails, before the run has a folder.
    """
    from arclight.fabric.serving.listening import AddressError
    from arclight.federated.transports.http_server import listen

    try:
        return listen(where.host, where.port)
    except AddressError as error:
        if error.errno is None:
            raise UsageError(f"--address {where.host}:{where.port}: {error}") from error
        if error.errno == errno.EADDRNOTAVAIL or (error.errno or 0) < 0:
            # numbers below 0 are those of names that cannot be resolved
            why = "this machine has no such name or address; name one of its own, or 0.0.0.0 for all of them"
        else:
            why = f"{os.strerror(error.errno or 0)}; name another port, or 0 for a free one"
        raise UsageError(f"--address {where.host}:{where.port}: {why}") from error


def read_listening(options: Namespace) -> Listening:
    """Read where to listen.

    Raises UsageError for a bad address, and beyond loopback without a certificate, its key and registered nodes.
    """
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
            "makes a certificate and its key, `arclight federate keys node FILE NAME --client N --into NODES` a node's; "
            "on this machine alone 127.0.0.1 needs none of them"
        )
    try:
        where = Listening(
            host=host.strip("[]"), port=int(port), certificate=options.tls_cert, private_key=options.tls_key, nodes=options.node_keys
        )  # fmt: skip
    except ValueError as error:
        raise UsageError(f"--address {options.address}: {error}") from error
    check_requirements(where)
    return where


def check_requirements(where: Listening) -> None:
    """Raise FederatedError for unusable files, MissingExtraError without the extra."""
    for module in ("uvicorn", "httptools", "starlette"):
        require(module, extra="federated")
    if where.certificate is not None and where.private_key is not None:
        from arclight.federated.transports.tls import check_certificate

        check_certificate(where.certificate, where.private_key)
    if where.nodes is not None:
        from arclight.federated.transports.keys import Registry

        Registry(where.nodes)


def public_address(address: str, where: Listening) -> str:
    """Return the address by which nodes reach a server.

    If it listens at all addresses, that has the name in its certificate.
    """
    if where.host not in _EVERYWHERE or where.certificate is None:
        return address
    from arclight.federated.transports.settings import is_loopback
    from arclight.federated.transports.tls import certificate_names

    names = [name for name in certificate_names(where.certificate.read_bytes()) if not is_loopback(name)]
    name = names[0] if names else socket.gethostname()
    return f"https://{f'[{name}]' if ':' in name else name}:{address.rpartition(':')[2]}"


def join_line(address: str, fingerprint: str | None) -> str:
    tls = f" --fingerprint {fingerprint} --key node.key" if fingerprint else ""
    return f"arclight federate join {address} --name NAME{tls}"
