"""Read ranges of files at an address through fsspec, with retries.

`remote_shards` and ``text.data.corpus`` read files at addresses by `RemoteFiles`; ``cli.commands.corpora`` asks `is_address`. Transient
errors are retried here, so callers need not; what is raised names the address.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from arclight._installed import pip_install

_T = TypeVar("_T")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
_LOOK_S = 0.25
"""Seconds between two checks whether a request is cancelled."""
_TRANSIENT_CODES = frozenset(
    getattr(errno, name)
    for name in (
        "EIO", "EBUSY", "EAGAIN", "EINTR", "EPIPE", "ETIMEDOUT", "ECONNRESET", "ECONNREFUSED", "ECONNABORTED", "ENETDOWN",
        "ENETUNREACH", "ENETRESET", "EHOSTUNREACH", "EHOSTDOWN",
    )
)  # fmt: skip
_TRANSIENT_STATUS = frozenset({408, 425, 429})
_TRANSIENT_NAMES = frozenset({"ClientConnectionError", "ClientPayloadError", "HTTPClientError", "IncompleteRead"})
"""Classes of aiohttp, botocore and http.client for connections that failed or broke off, known by name: none is imported here."""
_PERMANENT_NAMES = frozenset({"ClientSSLError", "ClientConnectorCertificateError", "SSLError", "InvalidURL"})


class RemoteReadError(OSError):
    """Raised if an address cannot be read; names it, the cause and the remedy."""


class ReadCancelledError(RemoteReadError):
    """A read that was given up because its reader was closed."""


class Found(NamedTuple):
    """Facts of a file at an address."""

    size_bytes: int | None
    """None if the server does not say."""
    etag: str | None


class _CutShortError(ConnectionError):
    """A body with fewer bytes than were asked for."""


def is_transient(error: BaseException) -> bool:
    """Return True for an error that a retry may cure.

    Lost connections, timeouts, HTTP 408, 425, 429 and 5xx.
    """
    error = _origin(error)
    for name in ("status", "code"):  # aiohttp; gcsfs
        status = getattr(error, name, None)
        if isinstance(status, int) and 100 <= status < 600:
            return status >= 500 or status in _TRANSIENT_STATUS
    names = {base.__name__ for base in type(error).__mro__}
    if names & _PERMANENT_NAMES or isinstance(error, FileNotFoundError | PermissionError):
        return False
    if isinstance(error, ConnectionError | TimeoutError | asyncio.TimeoutError) or names & _TRANSIENT_NAMES:
        return True
    return isinstance(error, OSError) and error.errno in _TRANSIENT_CODES


def _origin(error: BaseException) -> BaseException:
    """Return the failure behind an error of fsspec, which calls all failures missing files."""
    cause = error.__cause__
    status = getattr(cause, "status", None)
    missing = isinstance(error, FileNotFoundError)
    return cause if missing and cause is not None and status not in (404, 410) else error


class RemoteFiles:
    """The files below an address.

    patience_s: seconds for which a transient failure is tried again, at growing intervals; any other is raised at once.
    request_timeout_s: seconds without an answer after which a request has failed.
    Raises RemoteReadError if the file system is not installed, and from all methods what keeps them from reading.
    """

    def __init__(self, address: str, *, patience_s: float = 300.0, request_timeout_s: float = 60.0) -> None:
        self.address = address.rstrip("/")
        self.patience_s, self.request_timeout_s = patience_s, request_timeout_s
        self._protocol = address.partition("://")[0]
        self._opened()

    def read(
        self, name: str, start: int, stop: int, *, size: int | None = None, cancel: threading.Event | None = None
    ) -> bytes:
        """Return the bytes ``start`` up to ``stop`` of a file.

        size: bytes that the file must have, which is asked again if fewer came. cancel: gives up when it is set.
        """
        wanted = stop - start

        def request() -> bytes:
            try:
                found = bytes(self._call("cat_file", self._key(name), cancel, start=start, end=stop))
            except Exception as error:
                if getattr(error, "status", None) == 416:
                    raise self._changed(name, f"it ends before byte {stop:,}") from error
                raise
            if len(found) > wanted:
                raise self._error(
                    name,
                    f"{len(found):,} bytes came for a range of {wanted:,}: the server ignores ranges; use one that does not",
                )
            if len(found) < wanted:
                if size is not None and (there := self._info(name, cancel).size_bytes) not in (None, size):
                    raise self._changed(name, f"it has {there:,} bytes, not {size:,}")
                raise _CutShortError(f"{len(found):,} bytes came of {wanted:,}")
            return found

        return self._patiently(name, request, cancel)

    def read_whole(self, name: str, most_bytes: int) -> bytes:
        """Read a small file.

        Raises FileNotFoundError if there is none and RemoteReadError for more than ``most_bytes``.
        """

        def request() -> bytes:
            size = self._info(name, None).size_bytes
            if size is not None and size > most_bytes:
                raise self._error(
                    name, f"it has {size:,} bytes, more than the {most_bytes:,} that such a file may have"
                )
            found = bytes(self._call("cat_file", self._key(name), None))
            if size is not None and len(found) < size:
                raise _CutShortError(f"{len(found):,} bytes came of {size:,}")
            return found

        return self._patiently(name, request, None)

    def find(self, name: str, cancel: threading.Event | None = None) -> Found:
        """Return size and ETag of a file. Raises FileNotFoundError for none."""
        return self._patiently(name, lambda: self._info(name, cancel), cancel)

    def _info(self, name: str, cancel: threading.Event | None) -> Found:
        facts = self._call("info", self._key(name), cancel)
        size, etag = facts.get("size"), facts.get("ETag")
        return Found(None if size is None else int(size), None if etag is None else str(etag))

    def _patiently(self, name: str, request: Callable[[], _T], cancel: threading.Event | None) -> _T:
        until, pause = time.monotonic() + self.patience_s, _FIRST_PAUSE_S
        jitter = random.Random()  # own: the training's random state is not touched
        while True:
            try:
                return request()
            except RemoteReadError:
                raise
            except Exception as raised:  # each file system has errors of its own
                error = _origin(raised)
                left = until - time.monotonic()
                if not is_transient(error):
                    if isinstance(error, FileNotFoundError):
                        raise FileNotFoundError(
                            errno.ENOENT, "there is no such file", f"{self.address}/{name}"
                        ) from error
                    raise self._error(
                        name, f"{type(error).__name__}: {error}; check the address and the credentials"
                    ) from error
                if left <= 0:
                    problem = f"{type(error).__name__}: {error}; tried again for {self.patience_s:g} s: check the network and the server"
                    raise self._error(name, problem) from error
            _wait(cancel, min(pause * jitter.uniform(0.5, 1.0), left), f"{self.address}/{name}")
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _call(self, method: str, key: str, cancel: threading.Event | None, **options: Any) -> Any:
        """Call the file system; leave an asynchronous one at a timeout or ``cancel``."""
        system = self._opened()
        if not getattr(system, "async_impl", False):
            return getattr(system, method)(key, **options)
        future = asyncio.run_coroutine_threadsafe(getattr(system, f"_{method}")(key, **options), system.loop)
        until = time.monotonic() + self.request_timeout_s
        try:
            while not concurrent.futures.wait([future], timeout=_LOOK_S).done:
                if cancel is not None and cancel.is_set():
                    raise ReadCancelledError(f"{key}: the reader was closed")
                if time.monotonic() > until:
                    raise TimeoutError(f"no answer for {self.request_timeout_s:g} s")
            return future.result()
        finally:
            future.cancel()

    def _opened(self) -> Any:
        """Return this process's file system, which fsspec keeps."""
        import fsspec

        # Compressed on the way, a range would be one of the compressed bytes.
        options = {"headers": {"Accept-Encoding": "identity"}} if self._protocol in ("http", "https") else {}
        try:
            return fsspec.filesystem(self._protocol, **options)
        except ImportError as error:
            known = {"s3": "s3", "s3a": "s3", "http": "http", "https": "http"}.get(self._protocol)
            extra = str(error) if known is None else pip_install(known)
            raise RemoteReadError(
                f"{self.address}: the file system {self._protocol}:// is not installed: {extra}"
            ) from error
        except ValueError as error:
            raise RemoteReadError(f"{self.address}: {error}") from error

    def _key(self, name: str) -> str:
        return str(self._opened()._strip_protocol(f"{self.address}/{name}"))

    def _error(self, name: str, problem: str) -> RemoteReadError:
        return RemoteReadError(f"{self.address}/{name}: {problem}")

    def _changed(self, name: str, difference: str) -> RemoteReadError:
        return RemoteReadError(
            f"{self.address}/{name} changed at its address: {difference}; what its index lists must stay as it is"
        )


def _wait(cancel: threading.Event | None, pause_s: float, name: str) -> None:
    if cancel is None:
        time.sleep(pause_s)
    elif cancel.wait(pause_s):
        raise ReadCancelledError(f"{name}: the reader was closed")


def is_address(place: object) -> bool:
    """Return True for the name of a place that fsspec reads (``s3://bucket/corpus``)."""
    return isinstance(place, str | os.PathLike) and "://" in str(place)
