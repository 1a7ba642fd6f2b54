"""Make and register identities: a certificate for the server, Ed25519 keys for nodes.

``arclight federate keys`` writes them, `authentication` and `tls` check them. Formats of key files and of the lines of ``nodes.txt`` are
public; the text that a node signs is part of the protocol.
"""

from __future__ import annotations

import errno
import hashlib
import ipaddress
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

from arclight.fabric.extras import require
from arclight.fabric.signing import SigningError, SigningKey, is_public_key, is_signed, private_pem, write_new
from arclight.federated.errors import FederatedError

_YEARS = 10
_NAME = re.compile(r"[\w.-]{1,100}")
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")


@dataclass(frozen=True)
class Certificate:
    """A server's certificate on the disk."""

    certificate: Path
    private_key: Path
    fingerprint: str
    """SHA-256 of the certificate, by which nodes can know it without anybody vouching for it."""


def make_certificate(folder: str | Path, hosts: Sequence[str]) -> Certificate:
    """Make a key and a self-signed certificate for ``hosts`` (names, addresses), for ten years.

    It vouches for itself and nothing else: whoever trusts it need not trust what its key signs.
    Writes ``server.pem`` and ``server.key`` (readable by its owner alone) into ``folder``. Raises FileExistsError where one is there.
    """
    x509 = _cryptography("x509")
    ec = _cryptography("hazmat.primitives.asymmetric.ec")
    if not hosts:
        raise FederatedError(
            "a certificate is for at least one host name or address: give those by which nodes reach the server"
        )
    folder, names = Path(folder), [_general_name(x509, host) for host in hosts]
    for path in (folder / "server.key", folder / "server.pem"):
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "arclight federation")])
    known_as = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    now = datetime.now(UTC)
    others = dict.fromkeys(
        (
            "key_cert_sign",
            "crl_sign",
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=365 * _YEARS))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(digital_signature=True, **others), critical=True)
        .add_extension(x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(known_as, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(known_as), critical=False)
    )
    made = builder.sign(key, _cryptography("hazmat.primitives.hashes").SHA256())
    serialization = _cryptography("hazmat.primitives.serialization")
    folder.mkdir(parents=True, exist_ok=True)
    write_new(folder / "server.key", private_pem(key), secret=True)
    write_new(folder / "server.pem", made.public_bytes(serialization.Encoding.PEM), secret=False)
    return Certificate(folder / "server.pem", folder / "server.key", fingerprint_of(folder / "server.pem"))


def fingerprint_of(certificate: str | Path) -> str:
    """Return the SHA-256 of a PEM file's first certificate, in hexadecimal."""
    serialization = _cryptography("hazmat.primitives.serialization")
    try:
        read = _cryptography("x509").load_pem_x509_certificate(Path(certificate).read_bytes())
    except ValueError as error:
        raise FederatedError(f"{certificate} has no PEM certificate: {error}") from error
    return hashlib.sha256(read.public_bytes(serialization.Encoding.DER)).hexdigest()


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
        """Return True if a registered node has signed the text and may speak for the client."""
        known = self.nodes().get(node)
        return (
            known is not None
            and (not known.clients or client in known.clients)
            and is_signed(text, signature, known.key)
        )

    def unbound(self) -> list[str]:
        """List the nodes that may speak for any client."""
        return [name for name, one in self.nodes().items() if not one.clients]

    def nodes(self) -> dict[str, RegisteredNode]:
        """Read the file: names to nodes. Raises FederatedError naming the line that is none."""
        try:
            lines = self.path.read_text().splitlines()
        except OSError as error:
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


def _general_name(x509: Any, host: str) -> Any:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not _HOST.fullmatch(host):
            raise FederatedError(
                f"a host is a name or an address alone, as server.example.org or 10.0.0.7, got {host!r}"
            ) from None
        return x509.DNSName(host)


def _cryptography(module: str) -> Any:
    return require(f"cryptography.{module}", extra="federated")
