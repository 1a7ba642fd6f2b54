"""A node's side of HTTP: its messages are repeated until the server answers or patience ends."""

from __future__ import annotations

import hashlib
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from arclight.fabric.extras import require
from arclight.federated.blobs import BlobStore
from arclight.federated.blobs.folder import FolderStore
from arclight.federated.blobs.object_store import ObjectStore
from arclight.federated.errors import FederatedError, LinkError, ProtocolError, UntrustedError
from arclight.federated.protocol import VERSION, Ask, Join, Message, Secure, Welcome, read
from arclight.federated.transports.guard import signed_text
from arclight.federated.transports.http_blobs import HttpBlobs
from arclight.federated.transports.keys import NodeKey
from arclight.federated.transports.responses import error_of, is_json, raise_passing
from arclight.federated.transports.retrying import Patience, T, UnavailableError
from arclight.federated.transports.settings import is_loopback
from arclight.federated.transports.trust import believing, check_vouching

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse, HTTPConnectionPool
    from urllib3.connection import HTTPSConnection

_CONNECT = 10.0
_READ = 60.0
"""Seconds without a byte."""
_ANSWER = 120.0
"""Seconds for an answer: the server reads an update's blobs before it gives one."""
_SILENT = 20_000
"""Milliseconds without an acknowledgement after which the network counts as broken."""
_CONNECTIONS = 16
_OLDER = ("TLSV1_ALERT_PROTOCOL_VERSION", "UNSUPPORTED_PROTOCOL", "WRONG_SSL_VERSION")
"""OpenSSL's words for a peer that speaks only older versions of TLS."""


class HttpLink:
    """The line of one node to the server at ``address`` ("https://host:port").

    cache: folder of blobs that were fetched. key: the node's, where the server asks for registered ones. cafile: PEM file with
    the certificates that may vouch for the server, the system's by default; or fingerprint: SHA-256 of the server's own
    certificate, then nobody need vouch for it. patience: seconds for which a server that does not answer is tried.
    blobs: where blobs go and come from, where that is not the server itself (an object store). stores: addresses at or below which
    the server may say that they are; besides, only at its own host.
    Raises FederatedError for an address off this machine without TLS.
    """

    def __init__(
        self,
        address: str,
        cache: FolderStore | Path,
        *,
        key: NodeKey | None = None,
        cafile: str | Path | None = None,
        fingerprint: str | None = None,
        patience: float = 120.0,
        blobs: BlobStore | None = None,
        stores: Iterable[str] = (),
    ) -> None:
        require("urllib3", extra="federated")
        self.address, self._key = address.rstrip("/"), key
        self._patience = Patience(self.address, patience)
        parts = urlsplit(self.address)
        try:
            usable, port = parts.scheme in ("http", "https"), parts.port
        except ValueError:  # a port that is none
            usable, port = False, None
        if not usable or parts.hostname is None:
            raise FederatedError(f"a server's address is https://host:port (http:// on this machine), got {address!r}")
        if parts.scheme == "http" and not is_loopback(parts.hostname):
            raise FederatedError(f"{address} is another machine and not encrypted: nodes speak https:// there")
        self._host, self._port = parts.hostname, port or (443 if parts.scheme == "https" else 80)
        self._tls: Callable[[], ssl.SSLContext] | None = None
        if cafile is not None:
            check_vouching(cafile)
        if parts.scheme == "https":
            self._tls = lambda: self._pinned(fingerprint) if fingerprint else believing(cafile)
        self._connections: HTTPConnectionPool | None = None
        self._making, self._closed = threading.Lock(), False
        self._token = ""
        self._shown = ""
        """Fingerprint of the certificate that the server has shown; empty without TLS."""
        self._cache = cache if isinstance(cache, FolderStore) else FolderStore(cache, durable="none")
        self._blobs: BlobStore = blobs or HttpBlobs(self.request, self._cache, self._patience, self.address)
        self._elsewhere, self._stores = "", tuple(stores)

    @property
    def blobs(self) -> BlobStore:
        """Where blobs are: with the server, or where it said that they are when this node joined."""
        return self._blobs

    def send(self, message: Message) -> Message:
        """As `Link.send`. Raises SessionError where the server does not know this node's session any more: join again."""
        limit = _ANSWER + (message.wait if isinstance(message, Ask | Secure) else 0.0)
        answer = self._patience.call(f"answer {message.kind!r}", lambda: self._attempt(message, limit))
        if isinstance(answer, Welcome):
            self._token = answer.session
            if answer.blobs and answer.blobs != self._elsewhere:
                self._check_store(answer.blobs)
                self._blobs, self._elsewhere = ObjectStore(answer.blobs, self._cache), answer.blobs
        return answer

    def _check_store(self, address: str) -> None:
        """Raise UntrustedError for a place of which nobody here has said that this node's credentials may be used there."""
        parts = urlsplit(address)
        at_server = parts.scheme in ("http", "https") and parts.hostname == self._host
        named = any(f"{address.rstrip('/')}/".startswith(f"{one.rstrip('/')}/") for one in self._stores)
        if ".." in parts.path.split("/") or not (at_server or named):
            raise UntrustedError(
                f"the server keeps tensors at {address}, and nobody here has named that place, where this machine's credentials "
                f"would be used: if it is right, join with --blobs {address}"
            )

    def heed(self, stopping: threading.Event) -> None:
        self._patience.stopping = stopping

    def close(self) -> None:
        with self._making:
            self._closed, connections = True, self._connections
        if connections is not None:
            connections.close()

    def request(
        self,
        method: str,
        path: str,
        *,
        then: Callable[[BaseHTTPResponse], T],
        body: bytes | Iterable[bytes | memoryview] | None = None,
        headers: Mapping[str, str] | None = None,
        limit: float = _READ,
    ) -> T:
        """What ``then`` makes of the response, whose body it may stream. Raises UnavailableError for what may pass.

        limit: seconds without a byte of the answer. Raises LinkError where the other side is not the server it should be,
        SessionError and ProtocolError as `send`.
        """
        import urllib3

        own = {"authorization": f"Bearer {self._token}"} if self._token else {}
        try:
            response = self._pool().urlopen(
                method,
                path,
                body,  # type: ignore[arg-type]  # any bytes-like pieces are sent
                {**own, **(headers or {})},
                retries=False,
                redirect=False,
                timeout=urllib3.Timeout(connect=_CONNECT, read=limit),
                preload_content=False,
                decode_content=False,
            )
            try:
                if response.status >= 400:
                    raise_passing(response)
                made = then(response)
                response.drain_conn()
            except BaseException:
                response.close()
                raise
            return made
        except urllib3.exceptions.HTTPError as error:
            if _is_older_tls(error):
                raise UntrustedError(
                    f"{self.address} does not speak TLS 1.3, and nodes speak nothing older: is it arclight's server, or one that "
                    "stands in front of it?"
                ) from error
            if _is_wrong_certificate(error):
                raise UntrustedError(
                    f"{self.address} did not prove to be the server: {error}; nothing was sent to it. Give the cafile that vouches "
                    f"for it, or its fingerprint as `arclight federate keys` printed it"
                ) from error
            raise UnavailableError(f"{type(error).__name__} {error}".strip()) from error

    def _attempt(self, message: Message, limit: float) -> Message:
        headers = {"content-type": "application/json"}
        if session := getattr(message, "session", ""):  # which another thread may just have replaced by a newer one
            headers["authorization"] = f"Bearer {session}"
        if isinstance(message, Join):
            headers["authorization"] = ""
            if self._key is not None:
                challenge, run = self._challenge()
                message = replace(message, key=self._key.public, server=self._shown, run=run)
                message = replace(message, signature=self._key.sign(signed_text(message, challenge)))
                headers["x-arclight-challenge"] = challenge

        body = message.to_json().encode()
        return read(self.request("POST", "/v1/message", then=self._body, body=body, headers=headers, limit=limit))

    def _challenge(self) -> tuple[str, str]:
        """Ask for the server's challenge, and the run that it serves."""
        said = json.loads(self.request("GET", "/v1/challenge", then=self._body))
        if said.get("version") != VERSION:
            raise ProtocolError(
                f"the server speaks version {said.get('version')!r}, this node {VERSION}: install the same arclight"
            )
        return said["challenge"], said["run"]

    def _body(self, response: BaseHTTPResponse) -> bytes:
        if response.status != 200 or not is_json(response):
            raise error_of(response, self.address)
        return response.data

    def _pool(self) -> HTTPConnectionPool:
        with self._making:
            if self._closed:
                raise LinkError(f"the link to {self.address} was closed; what was to be sent is kept")
            self._connections = self._connections or self._new_pool()
            return self._connections

    def _new_pool(self) -> HTTPConnectionPool:
        import urllib3

        shared: dict[str, Any] = {"maxsize": _CONNECTIONS, "socket_options": _socket_options()}
        if self._tls is None:
            return urllib3.HTTPConnectionPool(self._host, self._port, **shared)
        context = self._tls()
        if not context.check_hostname:  # a pinned certificate may be of any name
            shared["assert_hostname"] = False
        pool = urllib3.HTTPSConnectionPool(self._host, self._port, ssl_context=context, **shared)
        pool.ConnectionCls = self._noting()
        return pool

    def _noting(self) -> type[HTTPSConnection]:
        """Make connections that note which certificate the server has shown."""
        from urllib3.connection import HTTPSConnection

        link = self

        class Noting(HTTPSConnection):
            def connect(self) -> None:
                super().connect()
                shown = self.sock.getpeercert(binary_form=True) if isinstance(self.sock, ssl.SSLSocket) else None
                link._shown = hashlib.sha256(shown or b"").hexdigest()

        return Noting

    def _pinned(self, fingerprint: str) -> ssl.SSLContext:
        """A context that believes the server's own certificate, if that has the fingerprint, and no other."""
        expected = fingerprint.replace(":", "").lower()
        try:
            pem = ssl.get_server_certificate((self._host, self._port), timeout=_CONNECT)
        except OSError as error:
            raise UnavailableError(f"{type(error).__name__} {error}") from error
        found = hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).hexdigest()
        if found != expected:
            raise UntrustedError(
                f"{self.address} shows a certificate of fingerprint {found}, not {expected}: it is another server, or somebody is "
                f"in between, or the server has a new certificate; nothing was sent to it"
            )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.load_verify_locations(cadata=pem)
        return context


def _is_wrong_certificate(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _is_older_tls(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ssl.SSLError) and error.reason in _OLDER:
            return True
        error = error.__cause__ or error.__context__
    return False


def _socket_options() -> list[tuple[int, int, int]]:
    """A network that takes bytes and gives nothing back is noticed, with something under way and without."""
    options = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        options += [
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        ]
    return options
