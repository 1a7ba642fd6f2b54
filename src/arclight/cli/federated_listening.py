"""Where ``arclight federate serve`` listens: read from what was typed, and checked before anything of a run is made."""

from __future__ import annotations

import errno
import os
import socket
from argparse import Namespace
from typing import TYPE_CHECKING

from arclight.cli.arguments import UsageError
from arclight.fabric.extras import require

if TYPE_CHECKING:
    from arclight.federated.transports.settings import Listening

DEFAULT_PORT = 8470
_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - compared with, not listened at


def bound(where: Listening) -> socket.socket:
    """A socket that listens there. Raises UsageError where that cannot be, before anything of the run is made."""
    from arclight.federated.transports.http_server import bind

    try:
        return bind(where.host, where.port)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL or (error.errno or 0) < 0:
            # numbers below 0 are those of names that cannot be resolved
            why = "this machine has no such name or address; name one of its own, or 0.0.0.0 for all of them"
        else:
            why = f"{os.strerror(error.errno or 0)}; name another port, or 0 for a free one"
        raise UsageError(f"--address {where.host}:{where.port}: {why}") from error


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
            "makes a certificate and its key, `arclight federate keys node FILE NAME --client N --into NODES` a node's; "
            "on this machine alone 127.0.0.1 needs none of them"
        )
    try:
        where = Listening(
            host=host.strip("[]"), port=int(port), certificate=options.tls_cert, private_key=options.tls_key, nodes=options.node_keys
        )  # fmt: skip
    except ValueError as error:
        raise UsageError(f"--address {options.address}: {error}") from error
    check_means(where)
    return where


def check_means(where: Listening) -> None:
    """Raise FederatedError for files that a server cannot listen with, MissingExtraError where it cannot listen at all."""
    for module in ("uvicorn", "httptools", "starlette"):
        require(module, extra="federated")
    if where.certificate is not None and where.private_key is not None:
        from arclight.federated.transports.trust import check_certificate

        check_certificate(where.certificate, where.private_key)
    if where.nodes is not None:
        from arclight.federated.transports.keys import Registry

        Registry(where.nodes)


def reached_at(address: str, where: Listening) -> str:
    """The address for others: of a server that listens at every one, that with a name which its certificate has."""
    if where.host not in _EVERYWHERE or where.certificate is None:
        return address
    from arclight.federated.transports.settings import is_loopback
    from arclight.federated.transports.trust import names_of

    names = [name for name in names_of(where.certificate.read_bytes()) if not is_loopback(name)]
    name = names[0] if names else socket.gethostname()
    return f"https://{f'[{name}]' if ':' in name else name}:{address.rpartition(':')[2]}"


def join_line(address: str, fingerprint: str | None) -> str:
    tls = f" --fingerprint {fingerprint} --key node.key" if fingerprint else ""
    return f"arclight federate join {address} --name NAME{tls}"
