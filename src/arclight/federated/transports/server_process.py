"""Run a `Server` in a process that outlives the one that started it.

`transports.flower` makes a `ServerProcess`, which starts this module by ``python -m``. A node's workers end with their node, whose orders they
take through a pipe; this process gets its socket and one text at its start and nothing after, calls `Server.serve`, and reports its end by
its exit status: 0 if the run is over, `STOPPED` if it can go on.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight.fabric.serving.certificates import CertificateError, fingerprint_of, make_certificate
from arclight.federated.errors import FederatedError
from arclight.federated.transports.http_server import listen
from arclight.federated.transports.settings import FLOWER_DEFAULTS, Listening, is_loopback

if TYPE_CHECKING:
    from arclight.federated.server.server import Server

log = logging.getLogger(__name__)

Config = Mapping[str, Any]
_STOP_S = 60.0
STOPPED = 128 + signal.SIGTERM
"""Status of a process that SIGTERM has ended in order, before the run was over."""


class ServerProcess:
    """Run a server in a process that need not end when the one that started it dies.

    build: ``module:function``, called with folder and config, returns the `Server`. config: see `FLOWER_DEFAULTS`. The socket listens
    before it starts, so nodes may be sent to ``address`` at once: in the clear on loopback, elsewhere with a certificate of the folder; only nodes
    in the file ``nodes`` may join. The log is ``<folder>/server.log``. SIGTERM ends the process once all is written, with
    status 0 if the run is over and `STOPPED` if it can go on later.
    """

    def __init__(self, build: str, folder: str | Path, config: Config | None = None) -> None:
        config, self.folder = {**FLOWER_DEFAULTS, **(config or {})}, Path(folder)
        keys, host = self.folder / "keys", config["known-as"] or config["host"]
        keys.mkdir(parents=True, exist_ok=True)
        self.nodes, self.log, certificate = (
            keys / "nodes",
            self.folder / "server.log",
            _certificate(self.folder, config),
        )
        self.nodes.touch(mode=0o600)
        if certificate is not None and not certificate.exists():
            try:
                make_certificate(keys, [host], extra="federated")
            except CertificateError as error:
                raise FederatedError(str(error)) from error
        self.fingerprint = None if certificate is None else fingerprint_of(certificate, extra="federated")
        bound = listen(config["host"], config["port"])
        place = f"{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}"
        self.address = f"{'http' if certificate is None else 'https'}://{place}"
        with self.log.open("ab") as log_file, bound:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(bound.fileno())],
                stdin=subprocess.PIPE, stdout=log_file, stderr=log_file, pass_fds=[bound.fileno()], start_new_session=True,
                # torch's threads do not spin while they have nothing to do: others on this machine may have
                env={"OMP_WAIT_POLICY": "passive", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )  # fmt: skip
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            stdin.write(json.dumps([build, str(self.folder), config]).encode())
        self.pid, self._asked = self._process.pid, False

    def wait(self, timeout_s: float) -> bool:
        """Return True once the run is over or `stop` has ended the process, else False.

        Raises FederatedError if the run failed, or the process died or was stopped by somebody else.
        """
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        if self._asked and status in (STOPPED, -signal.SIGTERM):
            return True
        if status in (STOPPED, -signal.SIGTERM):
            raise FederatedError(
                f"the server's process {self.pid} was stopped by SIGTERM before the run was over. Its folder {self.folder} holds all that was "
                "finished: start the run again to resume it"
            )
        if status:
            last = "".join(self.log.read_text(errors="replace").strip().splitlines()[-1:])
            raise FederatedError(
                f"the server's process has ended with status {status}: {last} (all of it is in {self.log}). Its folder holds all that was "
                "finished: start the run again to resume it"
            )
        return True

    def stop(self) -> None:
        """End the run, which can go on later; kill the process where it does not end in time."""
        self._asked = True
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            log.error("the server's process %d did not stop within %.0f s: killed", self.pid, _STOP_S)
            self._process.kill()
            self._process.wait()


def _certificate(folder: Path, config: Config) -> Path | None:
    return None if is_loopback(config["host"]) else folder / "keys" / "server.pem"


def build_server(build: str, folder: Path, config: Config) -> Server:
    """Call ``module:function`` with folder and config."""
    module, _, name = build.partition(":")
    function = getattr(importlib.import_module(module), name, None)
    if not callable(function):
        raise FederatedError(f"{build} is not a function that builds a server")
    server: Server = function(folder, config)
    return server


def main() -> None:
    """Serve on the inherited socket until the run is over or SIGTERM comes.

    Standard input names what is served. Until there is a server, SIGTERM ends the process at once: nothing is being written.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    threading.Thread(target=_report_orphaned, name="arclight-parent", daemon=True).start()
    build, place, config = json.load(sys.stdin)
    from arclight.fabric.memory import return_freed_memory

    return_freed_memory()
    folder = Path(place)
    server, certificate = build_server(build, folder, config), _certificate(folder, config)
    listening = Listening(
        host=config["host"], port=config["port"], nodes=folder / "keys" / "nodes", certificate=certificate,
        private_key=None if certificate is None else certificate.with_suffix(".key"),
    )  # fmt: skip
    signal.signal(signal.SIGTERM, partial(_leave, server))
    server.serve(listening, bound=socket.socket(fileno=int(sys.argv[1])))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # all is written: the status is known
    sys.exit(0 if server.over else STOPPED)


def _leave(server: Server, *_: object) -> None:
    """End ``serve`` in order, wherever the main thread is.

    By a thread of its own: the main thread may hold a lock that the run's threads wait for.
    """
    threading.Thread(target=server.leave, name="arclight-leave", daemon=True).start()


def _report_orphaned() -> None:
    """Wait until the process that started this one is gone, and log it."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.5)
    log.warning("whoever started this server is gone: the run continues with the nodes that reach it")


if __name__ == "__main__":
    main()
