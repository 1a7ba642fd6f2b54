"""Make a certificate for the server and keys for nodes: ``arclight federate keys``.

`federated_run` calls `keys`. ``arclight federate serve`` reads the files (``--tls-cert``, ``--tls-key``, ``--node-keys``), ``arclight serve`` the
first two, a node its private key (``join --key``). Verbs and flags are public and stay; certificates, keys and lines of ``--node-keys`` that were
written before must stay valid, and no file is overwritten.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from arclight.cli.arguments import Parser, UsageError


def keys(arguments: list[str]) -> None:
    about = "Create the certificate of a server and the keys of its nodes."
    parser = Parser(prog="arclight federate keys", description=about)
    verbs = parser.add_subparsers(required=True, metavar="server|node")

    verb = verbs.add_parser("server", help="write a self-signed certificate and its private key")
    verb.add_argument("folder", type=Path, metavar="DIR", help="folder for server.pem and server.key")
    verb.add_argument("hosts", nargs="+", metavar="HOST", help="names and addresses by which nodes reach the server")
    verb.set_defaults(run=make_server_keys)

    verb = verbs.add_parser("node", help="write a node's private key, and print its line for the server")
    verb.add_argument("file", type=Path, metavar="FILE", help="file for the private key, which stays at the node")
    verb.add_argument("name", metavar="NAME", help="name of the node")
    verb.add_argument(
        "--client",
        action="append",
        default=[],
        metavar="N",
        help="client that it may speak for; may be repeated",
    )
    verb.add_argument(
        "--any-client", action="store_true", help="let it speak for all clients, also those of other nodes"
    )
    verb.add_argument("--into", type=Path, metavar="FILE", help="append the line to this file, for serve --node-keys")
    verb.set_defaults(run=make_node_key)
    options = parser.parse_args(arguments)
    options.run(options)


def make_server_keys(options: Namespace) -> None:
    from arclight.fabric.serving.certificates import CertificateError, make_certificate

    try:
        made = make_certificate(options.folder, options.hosts, extra="federated")
    except FileExistsError as error:
        raise UsageError(
            f"{error.filename} already exists, and a key is not overwritten: name another folder"
        ) from error
    except CertificateError as error:
        raise UsageError(str(error)) from error
    print(f"wrote {made.certificate} and {made.private_key}, which nobody else may read")
    print(f"nodes verify the server with: --fingerprint {made.fingerprint}")


def make_node_key(options: Namespace) -> None:
    from arclight.federated.transports.keys import NodeKey, Registry, check_names

    if options.any_client == bool(options.client):
        raise UsageError(
            f"name the clients of {options.name}: --client N, once for each; or --any-client, which lets it speak for all of them"
        )
    check_names(options.name, *options.client)
    into: Path | None = options.into
    if into is not None and into.exists() and options.name in Registry(into).nodes():
        raise UsageError(f"{into} already has a line for {options.name}: remove it first to give the node a new key")
    try:
        line = NodeKey.make(options.file).line(options.name, options.client)
    except FileExistsError as error:
        raise UsageError(f"{options.file} already exists, and a key is not overwritten: name another file") from error
    print(f"wrote {options.file}, which stays with node {options.name}")
    if into is None:
        print(f"add this line to the server's file of nodes:\n{line}")
        return
    into.parent.mkdir(parents=True, exist_ok=True)
    before = into.read_text(encoding="utf-8") if into.exists() else ""
    with into.open("a", encoding="utf-8") as file:
        file.write(f"{'' if before.endswith(chr(10)) or not before else chr(10)}{line}\n")
    print(f"{into} lets it join")
