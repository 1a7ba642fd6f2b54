"""A real Flower deployment on loopback: one SuperLink and its SuperNodes, all in one folder and all gone at the end."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[3]
BIN = ROOT / ".flower-venv" / "bin"
ABSENT = f"Flower is not here: {BIN.parent} does not exist; `make flower-venv` builds it"
QUICK = {"OMP_NUM_THREADS": "1", "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1"}
"""What has Flower's executors look for work ten times as often as by default."""
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


def installed() -> bool:
    return (BIN / "flower-superlink").is_file()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listened on a moment ago."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


def until(done: Callable[[], Any], seconds: float, about: str) -> Any:
    """Return the value of ``done`` once it is true. Raises TimeoutError, which names what was waited for."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := done():
            return found
        time.sleep(0.1)
    raise TimeoutError(f"waited {seconds:g} s for {about}")


class Deployment:
    """SuperLink and SuperNodes. ``secure`` adds TLS and registered node keys. Leave it, and all that it started is gone."""

    def __init__(
        self,
        folder: Path,
        nodes: int,
        *,
        secure: bool = False,
        names: tuple[str, ...] = (),
        environment: Mapping[str, str] = QUICK,
    ) -> None:
        self.folder, self.secure, self.names = folder, secure, names or tuple(f"site-{n}" for n in range(nodes))
        folder.mkdir(parents=True, exist_ok=True)
        self.home = folder / "home"
        self.home.mkdir(exist_ok=True)
        self.port, *self.node_ports = free_ports(1 + nodes)
        path = [str(ROOT / "src"), str(ROOT)]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "FLWR_"))}
        self.env = inherited | QUIET | {
            "FLWR_HOME": str(self.home), "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": ":".join(path),
            "PYTHONUNBUFFERED": "1", **environment,
        }  # fmt: skip
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Deployment:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def _start(self) -> None:
        if self.secure:
            _keys(self.folder, self.names)
        if not self.secure:  # they try until the SuperLink is there
            for number in range(len(self.names)):
                self.supernode(number)
        self.superlink()
        where = f'address = "127.0.0.1:{self.port}"'
        trust = f'root-certificates = "{self.folder / "ca.crt"}"' if self.secure else "insecure = true"
        (self.home / "config.toml").write_text(f'[superlink]\ndefault = "here"\n\n[superlink.here]\n{where}\n{trust}\n')
        if self.secure:
            for name in self.names:
                done = self.flwr("supernode", "register", str(self.folder / f"{name}.pub"), "here", wait=60)
                assert done.returncode == 0, done.stdout
            for number in range(len(self.names)):
                self.supernode(number)

    def superlink(self) -> None:
        """Start the SuperLink (again), and wait until it takes connections."""
        files = {"certfile": "server.crt", "keyfile": "server.key", "ca-certfile": "ca.crt"}
        tls = [x for name, file in files.items() for x in (f"--ssl-{name}", str(self.folder / file))]
        options = [*tls, "--enable-supernode-auth"] if self.secure else ["--insecure"]
        self.spawn(
            "superlink", "flower-superlink", "--host", "127.0.0.1", "--port", str(self.port), *options,
            "--disable-runtime-dependency-installation", "--database", str(self.folder / "state.db"),
        )  # fmt: skip
        until(lambda: _listens(self.port), 60, f"the SuperLink on port {self.port}: {self.log('superlink')}")

    def supernode(self, number: int) -> None:
        """Start a SuperNode, whose node config names its client."""
        name = self.names[number]
        options = (
            [
                "--root-certificates",
                str(self.folder / "ca.crt"),
                "--auth-supernode-private-key",
                str(self.folder / name),
            ]
            if self.secure
            else ["--insecure"]
        )
        self.spawn(
            name, "flower-supernode", *options, "--superlink", f"127.0.0.1:{self.port}", "--host", "127.0.0.1",
            "--port", str(self.node_ports[number]), "--node-config", f"client='{name}' partition-id={number} num-partitions={len(self.names)}",
        )  # fmt: skip

    def spawn(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.started[name] = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]], cwd=self.folder, env=self.env, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        return self.started[name]

    def flwr(self, *arguments: str, wait: float) -> subprocess.CompletedProcess[str]:
        """A command of Flower's, to its end."""
        return subprocess.run(
            [str(BIN / "flwr"), *arguments], cwd=self.folder, env=self.env, stdin=subprocess.DEVNULL, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=wait, check=False,
        )  # fmt: skip

    def run(self, app: Path, **config: str | int | float | bool) -> subprocess.Popen[bytes]:
        """`flwr run` of an app, its output in run.log; it goes on for as long as the run does."""
        said = " ".join(f"{key.replace('_', '-')}={_toml(value)}" for key, value in config.items())
        return self.spawn("run", "flwr", "run", str(app), "here", "--stream", *(["--run-config", said] if said else []))

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def processes(self, kind: str) -> Iterator[psutil.Process]:
        """Processes below this deployment whose command line names ``kind`` (flwr-serverapp, flwr-clientapp)."""
        for process in psutil.process_iter(["cmdline"]):
            if any(kind in part for part in process.info["cmdline"] or ()) and _home(process) == str(self.home):
                yield process

    def kill(self, name: str) -> None:
        """SIGKILL to one of the processes that were started here, not to its children."""
        self.started[name].kill()
        self.started[name].wait(60)

    def close(self) -> None:
        """End everything that was started here, its children included; whatever does not go is killed."""
        mine = [p for p in psutil.process_iter() if _home(p) == str(self.home)]
        for process in mine:
            _signal(process, signal.SIGTERM)
        _, left = psutil.wait_procs(mine, timeout=8)
        for process in left:
            _signal(process, signal.SIGKILL)
        _, left = psutil.wait_procs(left, timeout=60)
        for one in self.started.values():
            one.wait(60)
        assert not left, f"these do not end: {left}"

    def __exit__(self, *_: object) -> None:
        self.close()


def _home(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("FLWR_HOME")
    except psutil.Error:  # gone, or another user's
        return None


def _signal(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        pass


def _listens(port: int) -> bool:
    with socket.socket() as one:
        one.settimeout(10)
        return one.connect_ex(("127.0.0.1", port)) == 0


def _toml(value: str | int | float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else f"'{value}'" if isinstance(value, str) else str(value)


def _keys(folder: Path, names: tuple[str, ...]) -> None:
    """A certificate authority, the server's certificate for loopback, and a key for each node."""
    script = """
    openssl req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.crt -days 2 -subj /CN=test-authority
    openssl req -newkey rsa:2048 -nodes -keyout server.key -out server.csr -subj /CN=localhost
    printf 'subjectAltName=DNS:localhost,IP:127.0.0.1' > san.txt
    openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -out server.crt -days 2 -extfile san.txt
    """
    script += "\n".join(f"ssh-keygen -q -t ecdsa -b 384 -N '' -f {shlex.quote(name)}" for name in names)
    subprocess.run(["bash", "-ec", script], cwd=folder, check=True, capture_output=True, timeout=60)


if __name__ == "__main__":
    sys.exit("this is imported by tests and benchmarks")
