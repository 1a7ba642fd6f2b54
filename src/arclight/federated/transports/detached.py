"""A server in a process of its own: it tells whoever started it where it is, and need not end when that one dies.

What starts it writes one line of JSON to its standard input (`Orders`), then ``stop`` if it is to end early; the end of the input
without that word means that the other side is gone, and the run goes on. It writes one line when nodes may come (`Place`) and one
when the run is over (`Ended`); its log is ``<folder>/server.log``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty, Queue
from typing import IO, TYPE_CHECKING, Any

from arclight.federated.errors import FederatedError
from arclight.federated.transports.keys import Registry, make_certificate
from arclight.federated.transports.settings import Listening, is_loopback

if TYPE_CHECKING:
    from arclight.federated.server.server import Server

log = logging.getLogger(__name__)

_UP = 120.0
_STOPPING = 60.0


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What is to be served."""

    build: str
    """``module:function``, called with folder and config, returns the `Server`."""
    folder: str
    config: dict[str, Any] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = 0
    known_as: str = ""
    """Name or address by which nodes reach ``host``; by default the same."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where nodes join."""

    address: str
    fingerprint: str | None
    nodes: str
    """File of the keys that may join, which its reader may add to."""
    run: str
    process: int


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How it went."""

    round: int
    why: str
    failed: bool


class Detached:
    """A server's process, seen from the one that started it."""

    def __init__(self, orders: Orders) -> None:
        self.orders, self.folder = orders, Path(orders.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lines: Queue[dict[str, Any] | None] = Queue()
        with (self.folder / "server.log").open("ab") as logged:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "arclight.federated.transports.detached"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=logged, start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )  # fmt: skip
        threading.Thread(target=self._listen, name="arclight-detached", daemon=True).start()
        self._say(json.dumps(asdict(orders)))
        self.place = Place(**self._line(_UP, "the server to come up"))

    def ended(self, seconds: float) -> Ended | None:
        """How the run went, once it is over; None where it is not yet after so many seconds. Raises FederatedError where it died."""
        try:
            return Ended(**self._line(seconds, "the run"))
        except Empty:
            return None

    def stop(self) -> None:
        """End the run, which can go on later; kill the process where it does not end within a minute."""
        with contextlib.suppress(OSError):
            self._say("stop")
        try:
            self._process.wait(_STOPPING)
        except subprocess.TimeoutExpired:
            log.error("the server's process %d did not stop within %.0f s: killed", self._process.pid, _STOPPING)
            self._process.kill()
            self._process.wait(_STOPPING)

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(json.loads(line))
        self._lines.put(None)

    def _line(self, seconds: float, about: str) -> dict[str, Any]:
        """The next line of the server's. Raises Empty where none comes in time, FederatedError where none can come."""
        try:
            said = self._lines.get(timeout=seconds)
        except Empty:
            if about == "the run":
                raise
            raise FederatedError(f"waited {seconds:.0f} s for {about}: see {self.folder / 'server.log'}") from None
        if said is None:
            code = self._process.wait(_STOPPING)
            last = (self.folder / "server.log").read_text(errors="replace").strip().splitlines()[-1:]
            raise FederatedError(
                f"the server's process has ended with status {code} before {about} did: {''.join(last)} (all of it is in "
                f"{self.folder / 'server.log'}). Its folder holds all that was finished: start the run again to go on"
            )
        return said


# -- inside the process ------------------------------------------------------------------------------------------------


def main() -> None:
    """Serve as standard input says, until the run is over."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    orders = Orders(**json.loads(sys.stdin.readline()))
    stop = threading.Event()
    threading.Thread(target=_obey, args=(sys.stdin, stop), daemon=True).start()
    server = _built(orders)
    with _at(orders, server) as (place, run):
        _tell(asdict(place))
        while not run.driver.wait(0.5) and not stop.is_set():
            pass
        over = run.driver.ended
        if over is not None:
            run.let_nodes_hear()
        newest = server.rounds.newest()
    why, failed = ("it was stopped", False) if over is None else (over.why, over.failed)
    _tell(asdict(Ended(round=-1 if newest is None else newest, why=why, failed=failed)))


@contextlib.contextmanager
def _at(orders: Orders, server: Server) -> Iterator[tuple[Place, Any]]:
    """The server, listening: on loopback in the clear, elsewhere with a certificate of its own; only registered nodes join."""
    from arclight.federated.transports.http_server import HttpServer

    keys = Path(orders.folder) / "keys"
    keys.mkdir(parents=True, exist_ok=True)
    nodes, host = keys / "nodes", orders.known_as or orders.host
    nodes.touch(mode=0o600)
    Registry(nodes)
    tls = not is_loopback(orders.host)
    certificate, private = (keys / "server.pem", keys / "server.key") if tls else (None, None)
    if certificate is not None and not certificate.exists():
        make_certificate(keys, [host])
    listening = Listening(host=orders.host, port=orders.port, nodes=nodes, certificate=certificate, private_key=private)
    with server.opened() as run, HttpServer(run.service, listening) as at:
        scheme = "https" if tls else "http"
        address = f"{scheme}://{f'[{host}]' if ':' in host else host}:{at.port}"
        yield (
            Place(address=address, fingerprint=at.fingerprint, nodes=str(nodes), run=run.name, process=os.getpid()),
            run,
        )


def _built(orders: Orders) -> Server:
    module, _, name = orders.build.partition(":")
    found = getattr(importlib.import_module(module), name, None)
    if not callable(found):
        raise FederatedError(f"{orders.build} is no function that builds a server")
    made: Server = found(Path(orders.folder), orders.config)
    return made


def _obey(said: IO[str], stop: threading.Event) -> None:
    for line in said:
        if line.strip() == "stop":
            stop.set()
            return
    log.warning("whoever started this server is gone: the run goes on with the nodes that reach it")


def _tell(what: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more
        print(json.dumps(what), flush=True)  # noqa: T201 (this is the pipe to the other side)


if __name__ == "__main__":
    main()
