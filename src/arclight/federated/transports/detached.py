"""A server in a process of its own: it tells whoever started it where it is, and need not end when that one dies.

What starts it has bound the socket already, so nodes may be sent there at once, and writes one line of JSON to its standard input
(`Orders`), then ``stop`` if it is to end early; the end of the input without that word means that the other side is gone, and the run
goes on. It writes one line when the run is over (`Ended`); its log is ``<folder>/server.log``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty, Queue
from typing import IO, TYPE_CHECKING, Any

from arclight.federated.errors import FederatedError
from arclight.federated.transports.http_server import HttpServer, bind
from arclight.federated.transports.keys import fingerprint_of, make_certificate
from arclight.federated.transports.settings import Listening, is_loopback

if TYPE_CHECKING:
    from arclight.federated.server.server import Server

log = logging.getLogger(__name__)

_STOPPING = 60.0
_PATIENT = {"OMP_WAIT_POLICY": "passive"}
"""Torch's threads do not spin while they have nothing to do: others on this machine may have."""


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
    nodes: Path
    """File of the keys that may join, which whoever reads this may add to."""


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
        bound = bind(orders.host, orders.port)
        self.place = _place(orders, bound.getsockname()[1])
        with (self.folder / "server.log").open("ab") as logged, bound:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "arclight.federated.transports.detached", str(bound.fileno())],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=logged, pass_fds=[bound.fileno()], start_new_session=True,
                env=_PATIENT | os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )  # fmt: skip
        threading.Thread(target=self._listen, name="arclight-detached", daemon=True).start()
        self._say(json.dumps(asdict(orders)))

    @property
    def process(self) -> int:
        return self._process.pid

    def ended(self, seconds: float) -> Ended | None:
        """How the run went, once it is over; None where it is not yet after so many seconds. Raises FederatedError where it died."""
        try:
            said = self._lines.get(timeout=seconds)
        except Empty:
            return None
        if said is not None:
            return Ended(**said)
        code = self._process.wait(_STOPPING)
        last = (self.folder / "server.log").read_text(errors="replace").strip().splitlines()[-1:]
        raise FederatedError(
            f"the server's process has ended with status {code} before its run did: {''.join(last)} (all of it is in "
            f"{self.folder / 'server.log'}). Its folder holds all that was finished: start the run again to resume it"
        )

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


def _place(orders: Orders, port: int) -> Place:
    """Where the server will be: on loopback in the clear, elsewhere with a certificate of its own; only registered nodes join."""
    keys, host = Path(orders.folder) / "keys", orders.known_as or orders.host
    keys.mkdir(parents=True, exist_ok=True)
    nodes = keys / "nodes"
    nodes.touch(mode=0o600)
    certificate = _certificate(orders)
    if certificate is not None and not certificate.exists():
        make_certificate(keys, [host])
    scheme = "http" if certificate is None else "https"
    address = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    return Place(address=address, fingerprint=None if certificate is None else fingerprint_of(certificate), nodes=nodes)


def _certificate(orders: Orders) -> Path | None:
    return None if is_loopback(orders.host) else Path(orders.folder) / "keys" / "server.pem"


# -- inside the process ------------------------------------------------------------------------------------------------


def main() -> None:
    """Serve as standard input says, until the run is over."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    orders = Orders(**json.loads(sys.stdin.readline()))
    stop = threading.Event()
    threading.Thread(target=_obey, args=(sys.stdin, stop), daemon=True).start()
    from arclight.federated.server.malloc import tune_malloc

    tune_malloc()
    server = built(orders.build, Path(orders.folder), orders.config)
    certificate = _certificate(orders)
    listening = Listening(
        host=orders.host, port=orders.port, nodes=Path(orders.folder) / "keys" / "nodes", certificate=certificate,
        private_key=None if certificate is None else certificate.with_suffix(".key"),
    )  # fmt: skip
    bound = socket.socket(fileno=int(sys.argv[1]))
    with server.opened() as run, HttpServer(run.service, listening, run.blobs, bound):
        log.info("run %s is served at port %d by process %d", run.name, bound.getsockname()[1], os.getpid())
        while not run.runtime.wait(0.5) and not stop.is_set():
            pass
        over = run.runtime.ended
        if over is not None:
            run.tell_nodes()
        newest = server.rounds.newest()
    why, failed = ("it was stopped", False) if over is None else (over.why, over.failed)
    _tell(asdict(Ended(round=-1 if newest is None else newest, why=why, failed=failed)))


def built(build: str, folder: Path, config: Mapping[str, Any]) -> Server:
    """What ``module:function`` makes of folder and config."""
    module, _, name = build.partition(":")
    found = getattr(importlib.import_module(module), name, None)
    if not callable(found):
        raise FederatedError(f"{build} is no function that builds a server")
    made: Server = found(folder, config)
    return made


def _obey(said: IO[str], stop: threading.Event) -> None:
    for line in said:
        if line.strip() == "stop":
            stop.set()
            return
    log.warning("whoever started this server is gone: the run continues with the nodes that reach it")


def _tell(what: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more
        print(json.dumps(what), flush=True)  # noqa: T201 (this is the pipe to the other side)


if __name__ == "__main__":
    main()
