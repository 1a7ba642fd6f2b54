"""Check certificates and private keys, and explain why one side does not trust the other.

`http_server` checks its certificate by it before it starts, `http_client` its file of authorities; ``arclight federate join`` prints what
`explain_link_error` adds. TLS 1.3 only. Texts may change; what is refused may not.
"""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from urllib.parse import urlsplit

from arclight.fabric.extras import require
from arclight.fabric.serving import certificates
from arclight.federated.errors import FederatedError, LinkError, UntrustedError

_PROBE_TIMEOUT_S = 3.0
"""Seconds to find out whether the peer supports TLS."""
_EXPIRED, _NOT_YET, _OTHER_NAME, _OTHER_ADDRESS = 10, 9, 62, 64
"""OpenSSL's numbers for what is wrong with a certificate."""


# -- files ---------------------------------------------------------------------------------------------------------


def check_certificate(certificate: str | Path, private_key: str | Path) -> None:
    """Raise FederatedError unless a server can show this certificate today and prove it."""
    try:
        certificates.check_certificate(certificate, private_key, extra="federated")
    except certificates.CertificateError as error:
        raise FederatedError(str(error)) from error


def client_context(cafile: str | Path | None) -> ssl.SSLContext:
    """Make a node's TLS 1.3 context.

    It trusts servers that the file's certificates vouch for, the system's by default.
    """
    context = ssl.create_default_context(cafile=cafile)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if cafile is not None:  # a server's own certificate need not be an authority's
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def check_ca_file(cafile: str | Path) -> None:
    """Raise FederatedError for a file without certificates that could vouch for a server."""
    try:
        ssl.create_default_context(cafile=cafile)
    except FileNotFoundError as error:
        raise FederatedError(
            f"there is no file {cafile}: the server's own certificate is the server.pem of its keys"
        ) from error
    except ssl.SSLError as error:
        raise FederatedError(
            f"{cafile} has no PEM certificate ({error.reason or error}): the server's own is the server.pem of its keys"
        ) from error


def certificate_names(certificate: bytes) -> list[str]:
    """Return the host names and addresses that a PEM certificate is for."""
    x509 = require("cryptography.x509", extra="federated")
    read = x509.load_pem_x509_certificate(certificate)
    try:
        names = read.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]


# -- the other side ------------------------------------------------------------------------------------------------


def explain_link_error(error: LinkError, address: str) -> LinkError:
    """Add to the error the reason why ``address`` cannot be reached or trusted, if found."""
    parts = urlsplit(address)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    if isinstance(error, UntrustedError):
        fault = _verification(error)
        return UntrustedError(_disbelief(fault, address, host, port)) if fault is not None else error
    tls = speaks_tls(host, port)
    if tls is None or tls == (parts.scheme == "https"):
        return error
    if tls:
        return UntrustedError(
            f"{address} speaks TLS: join https://{parts.netloc}, with the server's --ca or --fingerprint"
        )
    return UntrustedError(
        f"{address} does not speak TLS: either another program has that port, or the server was started without --tls-cert, "
        f"and is then joined from its own machine alone, as http://{parts.netloc}"
    )


def speaks_tls(host: str, port: int) -> bool | None:
    """Return True if the listener answers a TLS greeting, False if it answers otherwise.

    None if it cannot be reached, or if its answer does not tell.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((host, port), _PROBE_TIMEOUT_S) as plain, context.wrap_socket(plain):
            return True
    except ssl.SSLError as error:
        return False if error.reason in ("WRONG_VERSION_NUMBER", "UNKNOWN_PROTOCOL", "HTTP_REQUEST") else None
    except OSError:
        return None


def _verification(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error


def _disbelief(fault: ssl.SSLCertVerificationError, address: str, host: str, port: int) -> str:
    why = {
        _EXPIRED: "its certificate has expired: the server needs a new one (`arclight federate keys server`), and nodes to know it",
        _NOT_YET: "its certificate is not valid yet: see that this machine's clock is right",
    }
    if fault.verify_code in (_OTHER_NAME, _OTHER_ADDRESS):
        names = ", ".join(_shown_names(host, port)) or "no host at all"
        advice = f"its certificate is not for {host}, but for {names}: join it by such a name, or know it by its --fingerprint"
    else:
        advice = why.get(
            fault.verify_code,
            f"nothing here vouches for its certificate ({fault.verify_message}): give the server.pem that it uses as --ca, or "
            "its --fingerprint as `arclight federate keys server` printed it",
        )
    return f"{address} did not prove to be the server, and nothing was sent to it: {advice}"


def _shown_names(host: str, port: int) -> list[str]:
    try:
        return certificate_names(ssl.get_server_certificate((host, port), timeout=_PROBE_TIMEOUT_S).encode())
    except (OSError, ValueError):
        return []
