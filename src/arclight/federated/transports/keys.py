"""Make and register the Ed25519 keys of nodes.

``arclight federate keys node`` and the Flower app make them; `authentication` and nodes in secure sums check signatures by a `Registry`.
Formats of key files and of the lines of a file of nodes are public and stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from arclight.fabric.signing import SigningError, SigningKey, is_public_key, is_signed
from arclight.federated.errors import FederatedError

_NAME = re.compile(r"[\w.-]{1,100}")


class NodeKey(SigningKey):
    """A node's private key."""

    extra = "federated"

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read the key in ``path``.

        Raises FederatedError for a file that holds none, or that others can read.
        """
        try:
            return super().read(path)
        except FileNotFoundError as error:
            raise FederatedError(f"there is no node key {path}; `arclight federate keys node` makes one") from error
        except SigningError as error:
            raise FederatedError(f"no node key: {error}; `arclight federate keys node` makes one") from error

    def line(self, node: str, clients: Iterable[str] = ()) -> str:
        """Return the line of a file of nodes that lets this key join as ``node``.

        clients: those that it may answer for; none: any.
        """
        return line_of(node, self.public, clients)


@dataclass(frozen=True)
class RegisteredNode:
    """A node that may join."""

    key: str
    clients: frozenset[str]
    """Clients that it may answer for; empty: any."""


class Registry:
    """Read the file of nodes: on each line a name, a public key and, optionally, clients.

    ``#`` begins a comment.

    A changed file counts from the next join on. Raises FederatedError, when it is made, for a file that cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.nodes()

    def vouches(self, node: str, client: str, text: bytes, signature: str) -> bool:
        """Return True if a registered node has signed the text and may act for the client."""
        known = self.nodes().get(node)
        return (
            known is not None
            and (not known.clients or client in known.clients)
            and is_signed(text, signature, known.key)
        )

    def unbound(self) -> list[str]:
        """List the nodes that may act for any client."""
        return [name for name, one in self.nodes().items() if not one.clients]

    def nodes(self) -> dict[str, RegisteredNode]:
        """Read the file: names to nodes. Raises FederatedError naming the line that is none."""
        try:
            lines = self.path.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, ValueError) as error:
            raise FederatedError(f"the file of nodes {self.path} cannot be read: {error}") from error
        found: dict[str, RegisteredNode] = {}
        for number, line in enumerate(lines, 1):
            fields = line.partition("#")[0].split()
            if not fields:
                continue
            if (
                len(fields) not in (2, 3)
                or not _NAME.fullmatch(fields[0])
                or not is_public_key(fields[1])
                or fields[0] in found
            ):
                raise FederatedError(
                    f"{self.path}, line {number}: a name that is not there yet, a public key of 32 bytes in base64 and, if "
                    f"wanted, clients with commas between them, got {line[:200]!r}"
                )
            clients = frozenset(fields[2].split(",")) if len(fields) == 3 else frozenset()
            found[fields[0]] = RegisteredNode(fields[1], clients)
        return found


def line_of(node: str, public: str, clients: Iterable[str] = ()) -> str:
    """Return the line of a file of nodes that lets a public key join as ``node``.

    Raises FederatedError for names or keys that cannot be written there.
    """
    named = tuple(clients)
    check_names(node, *named)
    if not is_public_key(public):
        raise FederatedError(f"a public key is 32 bytes in base64, got {public[:60]!r}")
    return " ".join(filter(None, (node, public, ",".join(named))))


def check_names(*names: str) -> None:
    """Raise FederatedError for a name that a file of nodes cannot hold."""
    for name in names:
        if not _NAME.fullmatch(name):
            raise FederatedError(f"a registered name is made of letters, digits, '.', '_' and '-', got {name!r}")
