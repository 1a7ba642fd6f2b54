"""Check the certificate and private key with which a server speaks TLS, before it starts."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from pathlib import Path

from arclight.fabric.extras import require
from arclight.fabric.signing import SigningError, check_private


class CertificateError(ValueError):
    """A certificate or its private key is not one that a server can show."""


def check_certificate(certificate: str | Path, private_key: str | Path, *, extra: str) -> None:
    """Raise CertificateError unless a server can show this certificate today and prove it; ``extra`` brings cryptography."""
    for path, what in ((certificate, "certificate"), (private_key, "private key")):
        if not Path(path).is_file():
            raise CertificateError(f"there is no {what} {path}; `arclight federate keys server` makes both")
    begins, ends = _valid(certificate, extra)
    if not begins <= datetime.now(UTC) <= ends:
        raise CertificateError(
            f"{certificate} is good from {begins:%Y-%m-%d} to {ends:%Y-%m-%d}, and no client believes it today: make a new one "
            "with `arclight federate keys server`, and let clients know it"
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
        "the server's private key has a password, which nobody could type when the server is started again: take it off "
        "(`openssl pkey`), and let nobody else read the file"
    )
