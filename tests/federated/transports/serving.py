"""A server in a process of its own, for tests that kill it; and a line to it that breaks when it is told to."""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests import warm
from tests.federated.fakes import EchoServer

from arclight.federated.blobs.folder import FolderStore
from arclight.federated.transports.http_server import HttpServer
from arclight.federated.transports.settings import Listening

REPOSITORY = Path(__file__).parents[3]


class Serving:
    """``folder``'s blobs, served by another process."""

    module = "tests.federated.transports.serving"

    def __init__(
        self,
        folder: Path,
        host: str = "127.0.0.1",
        port: int = 0,
        keys: Sequence[Path] = (),
        before: Sequence[str] = (),
    ) -> None:
        words = ["-m", self.module, str(folder), host, str(port), *map(str, keys)]
        self.process: subprocess.Popen[str] | warm.Program
        if before:  # a command that starts it elsewhere
            path = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)])
            self.process = subprocess.Popen(
                [*before, sys.executable, *words], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": path},
            )  # fmt: skip
            assert self.process.stdout is not None
            with self.process.stdout as said:
                self.address = said.readline().strip()
        else:
            self.process = warm.Program(*words, cwd=REPOSITORY)
            self.address = self.process.until("http", 120).strip()
        assert self.address, "the server did not start"
        self.port = int(self.address.rpartition(":")[2])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)

    close = kill


class Line:
    """A TCP connection after the other to ``port``, through here: counted, slowed, cut and falsified.

    up, down: bytes that went to the server, and back. rate: bytes a second, both ways together. change: what becomes of a chunk,
    given whether it goes up and the bytes that went that way before; None cuts the connection.
    """

    def __init__(self, port: int) -> None:
        self.target = port
        self.up = self.down = self.connections = 0
        self.rate: float | None = None
        self.change: Callable[[bool, int, bytes], bytes | None] = lambda up, before, chunk: chunk
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._carry, args=(near,), daemon=True).start()

    def _carry(self, near: socket.socket) -> None:
        try:
            far = socket.create_connection(("127.0.0.1", self.target), 60)
        except OSError:
            near.close()
            return
        with near, far, selectors.DefaultSelector() as selector:
            selector.register(near, selectors.EVENT_READ, far)
            selector.register(far, selectors.EVENT_READ, near)
            try:
                while True:
                    for key, _ in selector.select():
                        assert isinstance(key.fileobj, socket.socket)
                        if not self._pass(key.fileobj, key.data, up=key.fileobj is near):
                            return
            except OSError:
                return

    def _pass(self, source: socket.socket, target: socket.socket, *, up: bool) -> bool:
        chunk = source.recv(16384)
        changed = self.change(up, self.up if up else self.down, chunk)
        if not chunk or changed is None:
            return False
        if self.rate:
            time.sleep(len(chunk) / self.rate)
        if up:  # counted before the other end, which may then look, has it
            self.up += len(chunk)
        else:
            self.down += len(chunk)
        target.sendall(changed)
        return True


def wait_until(true: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.01)


def main(folder: str, host: str, port: str, *keys: str) -> None:
    given = dict(zip(("certificate", "private_key", "nodes"), map(Path, keys), strict=False))
    with HttpServer(EchoServer(FolderStore(folder)), Listening(host=host, port=int(port), **given)) as served:  # type: ignore[arg-type]
        print(served.address, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
