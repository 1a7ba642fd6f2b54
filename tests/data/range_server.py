"""A loopback HTTP server that gives ranges of the files in a folder, and fails as it is told to."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Fault = Callable[[str, str, int], Any]
"""Method, path and number of the request for that path so far, from 1, to a fault: a status, ``cut``, ``drop``, ``whole`` or None."""


class RangeServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder: Path, fault: Fault | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.fault = folder, fault
        self.requests: Counter[tuple[str, str]] = Counter()
        self.lock = threading.Lock()
        self.sent = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left is no fault of the server."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: RangeServer

    def log_message(self, *_: Any) -> None: ...

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        with self.server.lock:
            self.server.requests[self.command, self.path] += 1
            number = self.server.requests[self.command, self.path]
        fault = self.server.fault and self.server.fault(self.command, self.path, number)
        path = self.server.folder / self.path.lstrip("/")
        if isinstance(fault, int) or not path.is_file():
            self.send_response(fault if isinstance(fault, int) else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content, wanted = path.read_bytes(), self.headers.get("Range")
        size, status = len(content), 200
        if wanted and fault != "whole":
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last), size - 1)
            if begin >= size:
                self.send_response(416)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            content, status = content[begin : end + 1], 206
        if fault == "short" and status == 206:  # a proxy that ends bodies early and says so
            content = content[: len(content) // 2]
        self.send_response(status)
        self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
        self.send_header("Content-Length", str(len(content)))
        if status == 206:
            self.send_header("Content-Range", f"bytes {begin}-{end}/{size}")
        self.end_headers()
        if self.command == "GET":
            if fault in ("cut", "drop"):
                self.wfile.write(content[: len(content) // 2 if fault == "cut" else 0])
                self.wfile.flush()
                self.close_connection = True
                self.connection.close()
                return
            self.wfile.write(content)
            with self.server.lock:
                self.server.sent += len(content)


@contextmanager
def serving(folder: Path, fault: Fault | None = None) -> Iterator[RangeServer]:
    server = RangeServer(folder, fault)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
