"""Make self-signed certificates of servers, and check those that they are given.

``arclight federate keys server`` and ``federated.transports.server_process`` make them; ``serve.server`` and, through
``federated.transports.tls``, federated servers check theirs. The names ``server.pem`` and ``server.key`` are documented, and nodes hold
fingerprints: both stay.
"""

from __future__ import annotations

import errno
import hashlib
import ipaddress
import os
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from arclight.fabric.extras import require
from arclight.fabric.signing import SigningError, check_private, private_pem, write_new

_YEARS = 10
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")


class CertificateError(ValueError):
    """A certificate or its private key cannot be used by a server."""


@dataclass(frozen=True)
class Certificate:
    """A server's certificate on the disk."""

    certificate: Path
    private_key: Path
    fingerprint: str
    """SHA-256 of the certificate in hexadecimal, by which nodes can recognise it without an authority."""


def make_certificate(folder: str | Path, hosts: Sequence[str], *, extra: str) -> Certificate:
    """Make a key and a self-signed certificate for ``hosts`` (names, addresses), for ten years.

    It is no authority (``CA:FALSE``): whoever trusts it need not trust what its key signs. Writes ``server.pem`` and ``server.key``
    (readable by its owner alone) into ``folder``; ``extra`` installs cryptography. Raises FileExistsError if one is there,
    CertificateError for no host, or what is none.
    """
    x509 = require("cryptography.x509", extra=extra)
    ec = require("cryptography.hazmat.primitives.asymmetric.ec", extra=extra)
    if not hosts:
        raise CertificateError(
            "a certificate is for at least one host name or address: give those by which nodes reach the server"
        )
    folder, names = Path(folder), [_general_name(x509, host) for host in hosts]
    for path in (folder / "server.key", folder / "server.pem"):
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "arclight server")])
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
    made = builder.sign(key, require("cryptography.hazmat.primitives.hashes", extra=extra).SHA256())
    serialization = require("cryptography.hazmat.primitives.serialization", extra=extra)
    folder.mkdir(parents=True, exist_ok=True)
    write_new(folder / "server.key", private_pem(key), secret=True)
    write_new(folder / "server.pem", made.public_bytes(serialization.Encoding.PEM), secret=False)
    return Certificate(folder / "server.pem", folder / "server.key", fingerprint_of(folder / "server.pem", extra=extra))


def fingerprint_of(certificate: str | Path, *, extra: str) -> str:
    """Return the SHA-256 of a PEM file's first certificate, in hexadecimal.

    Raises CertificateError without one.
    """
    serialization = require("cryptography.hazmat.primitives.serialization", extra=extra)
    try:
        read = require("cryptography.x509", extra=extra).load_pem_x509_certificate(Path(certificate).read_bytes())
    except ValueError as error:
        raise CertificateError(f"{certificate} has no PEM certificate: {error}") from error
    return hashlib.sha256(read.public_bytes(serialization.Encoding.DER)).hexdigest()


def check_certificate(certificate: str | Path, private_key: str | Path, *, extra: str) -> None:
    """Check that the certificate is valid now and that ``private_key`` belongs to it.

    The key must be readable by its owner alone. Raises CertificateError. ``extra`` installs cryptography.
    """
    for path, what in ((certificate, "certificate"), (private_key, "private key")):
        if not Path(path).is_file():
            raise CertificateError(f"there is no {what} {path}; `arclight federate keys server` makes both")
    begins, ends = _valid(certificate, extra)
    if not begins <= datetime.now(UTC) <= ends:
        raise CertificateError(
            f"{certificate} is valid from {begins:%Y-%m-%d} to {ends:%Y-%m-%d}, and clients do not trust it today: make a new one "
            "with `arclight federate keys server`, and give it to the clients"
        )
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, private_key, password=_no_password)
    except ssl.SSLError as error:
        raise CertificateError(
            f"{private_key} is not the private key of {certificate} ({error.reason or error}): give the two files that "
            "`arclight federate keys server` wrote together"
        ) from error
    try:
        check_private(private_key)
    except SigningError as error:
        raise CertificateError(str(error)) from error


def _valid(certificate: str | Path, extra: str) -> tuple[datetime, datetime]:
    x509 = require("cryptography.x509", extra=extra)
    try:
        read = x509.load_pem_x509_certificate(Path(certificate).read_bytes())
    except ValueError as error:
        raise CertificateError(
            f"{certificate} has no PEM certificate: `arclight federate keys server` makes one"
        ) from error
    return read.not_valid_before_utc, read.not_valid_after_utc


def _no_password() -> str:
    raise CertificateError(
        "the server's private key has a password, which nobody could type when the server restarts: remove it "
        "(`openssl pkey`), and make the file readable by its owner only"
    )


def _general_name(x509: Any, host: str) -> Any:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not _HOST.fullmatch(host):
            raise CertificateError(
                f"a host is a name or an address alone, as server.example.org or 10.0.0.7, got {host!r}"
            ) from None
        return x509.DNSName(host)
