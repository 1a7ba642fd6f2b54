"""Jobs of the LSF resource manager, started with ``jsrun``."""

from __future__ import annotations

import os
import socket

from arclight.fabric.environments.base import ClusterEnvironment


class LSFEnvironment(ClusterEnvironment):
    """One process for each task of a job step. Ranks come from ``JSM_NAMESPACE_*``, hosts from the file named in
    ``LSB_DJOB_RANKFILE`` (one line for each process, after one for the node that starts the job), the port from ``LSB_JOBID``.

    Raises ValueError where one of these is missing.
    """

    def __init__(self) -> None:
        hosts = self._read_hosts()
        self._main_address = hosts[0]
        self._main_port = _port()
        self._node_rank = list(dict.fromkeys(hosts)).index(socket.gethostname())
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = self._main_address, str(self._main_port)

    @staticmethod
    def detect() -> bool:
        needed = ("LSB_JOBID", "LSB_DJOB_RANKFILE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_SIZE")
        return all(name in os.environ for name in needed)

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return self._main_address

    @property
    def main_port(self) -> int:
        return self._main_port

    def world_size(self) -> int:
        return _number("JSM_NAMESPACE_SIZE", "world size")

    def global_rank(self) -> int:
        return _number("JSM_NAMESPACE_RANK", "global rank")

    def local_rank(self) -> int:
        return _number("JSM_NAMESPACE_LOCAL_RANK", "local rank")

    def node_rank(self) -> int:
        return self._node_rank

    @staticmethod
    def _read_hosts() -> list[str]:
        path = os.environ.get("LSB_DJOB_RANKFILE")
        if path is None:
            raise ValueError("Did not find the environment variable `LSB_DJOB_RANKFILE`, which names the file of hosts")
        if not path:
            raise ValueError("The environment variable `LSB_DJOB_RANKFILE` is empty; it names the file of hosts")
        with open(path) as lines:
            return [line.strip() for line in lines][1:]


def _port() -> int:
    if "MASTER_PORT" in os.environ:
        return int(os.environ["MASTER_PORT"])
    if "LSB_JOBID" not in os.environ:
        raise ValueError("Could not find job id in environment variable LSB_JOBID, from which the port is derived")
    return 10000 + int(os.environ["LSB_JOBID"]) % 1000


def _number(name: str, what: str) -> int:
    if name not in os.environ:
        raise ValueError(
            f"Cannot determine {what}: environment variable `{name}` not found; start the program with `jsrun`"
        )
    return int(os.environ[name])
