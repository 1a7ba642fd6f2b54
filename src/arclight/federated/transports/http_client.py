"""Connect a node to its server over HTTP: messages are retried, transfers resume.

A node (``clients.node``) sends its messages by an `HttpLink`; ``arclight federate join`` and the Flower app make one. The other side is
`http_server`. Paths and headers are the protocol: both sides change together, with `protocol.VERSION`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from arclight._intervals import former_names
from arclight.fabric.extras import require
from arclight.federated.blobs import BlobStore
from arclight.federated.blobs.blob_store import CHUNK_BYTES, check_digest, missing_blob, read_chunks
from arclight.federated.blobs.folder import FolderStore
from arclight.federated.blobs.object_store import ObjectStore
from arclight.federated.blobs.partial_blob import BusyError, PartialBlob
from arclight.federated.errors import (
    BlobError,
    FederatedError,
    LinkError,
    ProtocolError,
    RefusedError,
    SessionError,
    UntrustedError,
)
from arclight.federated.protocol import VERSION, Join, Message, SecureSumRequest, Welcome, WorkRequest, read
from arclight.federated.transports.authentication import signed_text
from arclight.federated.transports.keys import NodeKey
from arclight.federated.transports.settings import is_loopback
from arclight.federated.transports.tls import check_ca_file, client_context
from arclight.federated.transports.uploads import PART

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse, HTTPConnectionPool
    from urllib3.connection import HTTPSConnection


_CONNECT_TIMEOUT_S = 10.0
_READ_TIMEOUT_S = 60.0
"""Seconds without a byte."""
_ANSWER_TIMEOUT_S = 120.0
"""Seconds for an answer: the server reads an update's blobs before it gives one."""
_ACK_TIMEOUT_MS = 20_000
"""Milliseconds without an acknowledgement after which the network counts as broken."""
_MAX_CONNECTIONS = 16
_PAUSES = random.Random()
"""Draws the pauses between attempts: in threads beside training, whose data and seeds the process-wide generator is for."""
_OLDER_TLS_REASONS = ("TLSV1_ALERT_PROTOCOL_VERSION", "UNSUPPORTED_PROTOCOL", "WRONG_SSL_VERSION")
"""OpenSSL's words for a peer that speaks only older versions of TLS."""


@former_names(patience="retry_timeout_s")
class HttpLink:
    """Connect one node to the server at ``address`` ("https://host:port").

    cache: folder of blobs that were fetched. key: the node's, if the server asks for registered ones. cafile: PEM file with
    the certificates that may vouch for the server, the system's by default; or fingerprint: SHA-256 of the server's own
    certificate, then nobody need vouch for it. retry_timeout_s: how long a server that does not answer is tried.
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
        retry_timeout_s: float = 120.0,
        blobs: BlobStore | None = None,
        stores: Iterable[str] = (),
    ) -> None:
        require("urllib3", extra="federated")
        self.address, self._key = address.rstrip("/"), key
        self._retrier = Retrier(self.address, retry_timeout_s)
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
            check_ca_file(cafile)
        if parts.scheme == "https":
            self._tls = lambda: self._pinned(fingerprint) if fingerprint else client_context(cafile)
        self._connections: HTTPConnectionPool | None = None
        self._making, self._closed = threading.Lock(), False
        self._token = ""
        self._shown = ""
        """Fingerprint of the certificate that the server has shown; empty without TLS."""
        self._cache = cache if isinstance(cache, FolderStore) else FolderStore(cache, durable="none")
        self._blobs: BlobStore = blobs or HttpBlobStore(self.request, self._cache, self._retrier, self.address)
        self._elsewhere, self._stores = "", tuple(stores)

    @property
    def blobs(self) -> BlobStore:
        """Return the store of blobs: the server, or the address that it named when this node joined."""
        return self._blobs

    def send(self, message: Message) -> Message:
        """Send as `Link.send`.

        Raises SessionError if the server does not know this node's session any more: join again.
        """
        limit = _ANSWER_TIMEOUT_S + (message.hold_s if isinstance(message, WorkRequest | SecureSumRequest) else 0.0)
        answer = self._retrier.call(f"answer {message.kind!r}", lambda: self._attempt(message, limit))
        if isinstance(answer, Welcome):
            self._token = answer.session
            if answer.blob_address and answer.blob_address != self._elsewhere:
                self._check_store(answer.blob_address)
                self._blobs, self._elsewhere = ObjectStore(answer.blob_address, self._cache), answer.blob_address
        return answer

    def _check_store(self, address: str) -> None:
        """Raise UntrustedError for a store that nobody here has allowed for this node's credentials."""
        parts = urlsplit(address)
        at_server = parts.scheme in ("http", "https") and parts.hostname == self._host
        named = any(f"{address.rstrip('/')}/".startswith(f"{one.rstrip('/')}/") for one in self._stores)
        if ".." in parts.path.split("/") or not (at_server or named):
            raise UntrustedError(
                f"the server keeps tensors at {address}, and nobody here has named that place, where this machine's credentials "
                f"would be used: if it is right, join with --blobs {address}"
            )

    def cancel_on(self, stopping: threading.Event) -> None:
        self._retrier.stopping = stopping

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
        limit: float = _READ_TIMEOUT_S,
    ) -> T:
        """Return ``then(response)``, which may stream the body.

        Raises TransientHttpError for what may pass.

        limit: seconds without a byte of the answer. Raises LinkError if the other side is not the server it should be,
        SessionError and ProtocolError as `send`.
        """
        import urllib3

        own = {"authorization": f"Bearer {self._token}"} if self._token else {}
        try:
            response = self._pool().urlopen(
                method,
                path,
                body,  # type: ignore[arg-type]  # any bytes-like chunks are sent
                {**own, **(headers or {})},
                retries=False,
                redirect=False,
                timeout=urllib3.Timeout(connect=_CONNECT_TIMEOUT_S, read=limit),
                preload_content=False,
                decode_content=False,
            )
            try:
                if response.status >= 400:
                    raise_transient(response)
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
            raise TransientHttpError(f"{type(error).__name__} {error}".strip()) from error

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
        """Request the server's challenge, and the run that it serves."""
        challenge = json.loads(self.request("GET", "/v1/challenge", then=self._body))
        if challenge.get("version") != VERSION:
            raise ProtocolError(
                f"the server speaks version {challenge.get('version')!r}, this node {VERSION}: install the same arclight"
            )
        return challenge["challenge"], challenge["run"]

    def _body(self, response: BaseHTTPResponse) -> bytes:
        if response.status != 200 or not is_json(response):
            raise protocol_error(response, self.address)
        return response.data

    def _pool(self) -> HTTPConnectionPool:
        with self._making:
            if self._closed:
                raise LinkError(f"the link to {self.address} was closed; what was to be sent is kept")
            self._connections = self._connections or self._new_pool()
            return self._connections

    def _new_pool(self) -> HTTPConnectionPool:
        import urllib3

        shared: dict[str, Any] = {"maxsize": _MAX_CONNECTIONS, "socket_options": _socket_options()}
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

        class NotingConnection(HTTPSConnection):
            def connect(self) -> None:
                super().connect()
                shown = self.sock.getpeercert(binary_form=True) if isinstance(self.sock, ssl.SSLSocket) else None
                link._shown = hashlib.sha256(shown or b"").hexdigest()

        return NotingConnection

    def _pinned(self, fingerprint: str) -> ssl.SSLContext:
        """Make a context that trusts the certificate of that fingerprint alone."""
        expected = fingerprint.replace(":", "").lower()
        try:
            pem = ssl.get_server_certificate((self._host, self._port), timeout=_CONNECT_TIMEOUT_S)
        except OSError as error:
            raise TransientHttpError(f"{type(error).__name__} {error}") from error
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
        if isinstance(error, ssl.SSLError) and error.reason in _OLDER_TLS_REASONS:
            return True
        error = error.__cause__ or error.__context__
    return False


def _socket_options() -> list[tuple[int, int, int]]:
    """Return options that notice a network that takes bytes and gives nothing back."""
    options = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        options += [
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _ACK_TIMEOUT_MS),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        ]
    return options


_ATTEMPTS = 3
"""Transfers of a blob that may arrive damaged before it is given up."""
_BUSY_PAUSE_S = 0.2
_BLOCK_BYTES = 1 << 17
"""Bytes that are handed to the network at once: over a slow line that has to be done within a timeout."""


class HttpBlobStore:
    """Implement `BlobStore` over HTTP.

    What is fetched is kept in ``cache`` until it is forgotten; nodes remove nothing, so `remove` only does that too.

    request: `HttpLink.request`.
    """

    def __init__(self, request: Callable[..., Any], cache: FolderStore, retrier: Retrier, address: str) -> None:
        self._request, self._cache, self._retrier, self._address = request, cache, retrier, address

    def size(self, digest: str) -> int | None:
        return self._retrier.call(f"tell the size of blob {digest[:12]}", lambda: self._head(check_digest(digest))[0])

    def read(self, digest: str, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        """Read a part without keeping it.

        It is not verified, as it is only part of what has the digest.
        """
        check_digest(digest)
        left, ended = length, False
        while not ended if left is None else left > 0:
            held: list[bytes] = []
            ended = self._retrier.call(f"send blob {digest[:12]}", partial(self._read_some, digest, offset, left, held))
            yield from held
            got = sum(map(len, held))
            offset += got
            left = None if left is None else left - got

    def put(self, digest: str, source: Path | bytes) -> None:
        check_digest(digest)
        damaged = seen = 0
        size = len(source) if isinstance(source, bytes) else source.stat().st_size

        def attempt() -> bool:
            nonlocal seen
            found, received, busy = self._head(digest)
            if found is not None:
                return True
            before, seen = seen, received
            if busy:
                raise TransientHttpError(
                    "it is receiving the blob from someone else", progress=received > before, after=_BUSY_PAUSE_S
                )
            start = received if received <= size else 0
            try:
                while (whole := self._send(digest, source, start, size)) is None:
                    start = seen = start + PART
                return whole
            except TransientHttpError as error:
                raise TransientHttpError(str(error), progress=seen > before, after=error.after) from error

        while not self._retrier.call(f"take blob {digest[:12]}", attempt):
            damaged += 1
            if damaged == _ATTEMPTS:
                raise BlobError(
                    f"blob {digest[:12]} reached {self._address} damaged {damaged} times, or is not what it is called here: compare "
                    f"its SHA-256 with its name, then look at what lies between"
                )

    def file(self, digest: str) -> Path:
        """Return the blob's file from the cache, fetched into it if need be."""
        damaged = 0
        while self._cache.size(digest) is None:
            try:
                self._retrier.call(f"send blob {digest[:12]}", lambda: self._fetch(digest))
            except BlobError:
                damaged += 1
                if damaged == _ATTEMPTS or self.size(digest) is None:
                    raise
        return self._cache.file(digest)

    def forget(self, digest: str) -> None:
        self._cache.remove(digest)

    def remove(self, digest: str) -> None:
        self._cache.remove(digest)

    def _head(self, digest: str) -> tuple[int | None, int, bool]:
        """Return the blob's size if it is there.

        Else the bytes that have come, and whether more are coming.
        """

        def then(response: BaseHTTPResponse) -> tuple[int | None, int, bool]:
            if response.status == 404:
                headers = response.headers
                return None, int(headers.get("x-arclight-received", "0")), "x-arclight-busy" in headers
            if response.status != 200:
                raise protocol_error(response, self._address)
            return int(response.headers["content-length"]), 0, False

        found: tuple[int | None, int, bool] = self._request("HEAD", f"/v1/blobs/{digest}", then=then)
        return found

    def _send(self, digest: str, source: Path | bytes, start: int, size: int) -> bool | None:
        """Send the next part.

        None if more are to come, False if the server found that it is not the blob.
        """
        stop = min(size, start + PART)
        headers = {"content-length": str(stop - start)}
        if stop - start < size:
            headers["content-range"] = f"bytes {start}-{stop - 1}/{size}" if start < size else f"bytes */{size}"

        def then(response: BaseHTTPResponse) -> bool | None:
            status = response.status
            if status == 409:
                raise TransientHttpError("it has received another part of the blob meanwhile")
            if status in (200, 201, 202):
                return None if status == 202 else True
            if status == 422:
                return False
            if status == 507:
                raise OSError(errno.ENOSPC, f"{self._address}: {error_text(response)}")
            if status == 413:
                raise RefusedError("too_large", f"{self._address}: {error_text(response)}")
            raise protocol_error(response, self._address)

        part = (
            (source[start:stop],)
            if isinstance(source, bytes)
            else read_chunks(source, start, stop - start, _BLOCK_BYTES)
        )
        sent: bool | None = self._request("PUT", f"/v1/blobs/{digest}", then=then, body=part, headers=headers)
        return sent

    def _fetch(self, digest: str) -> None:
        """Fetch the rest into the cache."""
        try:
            incoming = self._cache.receive(digest)
        except BusyError as error:  # another thread or process of this node: it has a deadline of its own
            raise TransientHttpError(str(error), progress=True) from error
        with incoming:
            if self._cache.size(digest) is not None:
                incoming.give_up()
                return
            start = incoming.offset
            headers = {"range": f"bytes={start}-"} if start else {}
            try:
                self._request("GET", f"/v1/blobs/{digest}", then=partial(self._take, incoming, digest), headers=headers)
            except TransientHttpError as error:
                raise TransientHttpError(str(error), progress=incoming.offset > start, after=error.after) from error
            incoming.finish()

    def _take(self, incoming: PartialBlob, digest: str, response: BaseHTTPResponse) -> None:
        if response.status == 416:
            return  # all of it is here already
        if response.status not in (200, 206):
            raise (
                missing_blob(digest, self._address)
                if response.status == 404
                else protocol_error(response, self._address)
            )
        if response.status == 200:
            incoming.restart()
        while chunk := response.read1(CHUNK_BYTES):
            incoming.write((chunk,))

    def _read_some(self, digest: str, offset: int, length: int | None, held: list[bytes]) -> bool:
        """Read up to `CHUNK_BYTES` bytes into ``held``; return True at the end of the blob."""
        last = offset + min(CHUNK_BYTES, CHUNK_BYTES if length is None else length) - 1
        held.clear()

        def then(response: BaseHTTPResponse) -> bool:
            if response.status == 206:
                held.append(response.data)
                return int(response.headers["content-range"].rpartition("/")[2]) == offset + len(response.data)
            if response.status == 416 and length is None:
                return True
            if response.status == 416:
                raise BlobError(f"blob {digest[:12]} ends {length} bytes before the part that was asked for does")
            raise (
                missing_blob(digest, self._address)
                if response.status == 404
                else protocol_error(response, self._address)
            )

        headers = {"range": f"bytes={offset}-{last}"}
        ended: bool = self._request("GET", f"/v1/blobs/{digest}", then=then, headers=headers)
        return ended


def error_text(response: BaseHTTPResponse) -> str:
    """Return the server's explanation of a refusal."""
    try:
        return str(json.loads(response.data)["error"])
    except (ValueError, KeyError, TypeError):
        return response.data[:300].decode(errors="replace") or f"status {response.status}"


def raise_transient(response: BaseHTTPResponse) -> None:
    """Raise for a status that may pass, and for a lost session."""
    status = response.status
    if status == 401:
        raise SessionError(error_text(response))
    if status in (408, 423, 429, 500, 502, 503, 504):
        after = response.headers.get("retry-after", "0")
        raise TransientHttpError(
            f"it says {status}: {error_text(response)}", after=float(after) if after.isdigit() else 0.0
        )


def is_json(response: BaseHTTPResponse) -> bool:
    """Return True if it is an answer as our servers give them."""
    return response.headers.get("content-type", "").partition(";")[0] == "application/json"


def protocol_error(response: BaseHTTPResponse, address: str) -> ProtocolError:
    """Return the error for a refusal that will not pass."""
    if not is_json(response):
        return ProtocolError(
            f"{address} is nothing that an arclight server has ({response.status} {response.reason}): see that "
            "the address and its port are the server's"
        )
    return ProtocolError(f"the server refuses with {response.status}: {error_text(response)}")


T = TypeVar("T")

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 5.0


class TransientHttpError(Exception):
    """An attempt that failed for a reason that may pass.

    progress: something got across, so that waiting begins again. after: seconds that the other side asked to be left alone.
    """

    def __init__(self, why: str, *, progress: bool = False, after: float = 0.0) -> None:
        super().__init__(why)
        self.progress, self.after = progress, after


class Retrier:
    """Retry attempts until a deadline that progress renews.

    Waits double from 50 ms to 5 s, each shortened by chance by up to half.
    """

    def __init__(self, other: str, seconds: float) -> None:
        self._other, self._seconds = other, seconds
        self.stopping = threading.Event()
        """Set: no further attempt is made."""

    def call(self, what: str, attempt: Callable[[], T]) -> T:
        """Return ``attempt()``'s result.

        Raises LinkError if it was unavailable for all of the time; other errors pass.
        """
        began = since = time.monotonic()
        tries, wait = 0, _FIRST_WAIT_S
        while True:
            try:
                tries += 1
                return attempt()
            except TransientHttpError as error:
                now = time.monotonic()
                if error.progress:
                    since, wait = now, _FIRST_WAIT_S
                pause = max(error.after, wait * _PAUSES.uniform(0.5, 1.0))
                wait = min(2 * wait, _LONGEST_WAIT_S)
                if now + pause - since > self._seconds:
                    raise LinkError(
                        f"{self._other} did not {what} within {now - since:.1f} s ({tries} attempts in {now - began:.1f} s): {error}; "
                        f"see that the server runs and can be reached"
                    ) from error
                if self.stopping.wait(pause):
                    raise LinkError(f"{self._other} did not {what}, and is tried no more: {error}") from error
