"""Processes started by MPI (``mpirun``), asked through mpi4py."""

from __future__ import annotations

import socket
from importlib.util import find_spec
from typing import Any

from arclight.fabric.environments.base import ClusterEnvironment, find_free_network_port

_MPI4PY_AVAILABLE = find_spec("mpi4py") is not None


class MPIEnvironment(ClusterEnvironment):
    """One process for each MPI rank; needs mpi4py. Raises ModuleNotFoundError without it."""

    def __init__(self) -> None:
        if not _MPI4PY_AVAILABLE:
            raise ModuleNotFoundError("MPIEnvironment needs mpi4py, built for your MPI: pip install mpi4py")
        from mpi4py import MPI

        self._comm_world: Any = MPI.COMM_WORLD
        self._comm_local: Any = None
        self._node_rank: int | None = None
        self._main_address: str | None = None
        self._main_port: int | None = None

    @staticmethod
    def detect() -> bool:
        """Return True if mpi4py is there, with an MPI, and MPI counts more than one process."""
        if not _MPI4PY_AVAILABLE:
            return False
        try:
            from mpi4py import MPI
        except ImportError:  # mpi4py without an MPI library
            return False
        return bool(MPI.COMM_WORLD.Get_size() > 1)

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        if self._main_address is None:
            self._main_address = str(self._comm_world.bcast(socket.gethostname(), root=0))
        return self._main_address

    @property
    def main_port(self) -> int:
        if self._main_port is None:
            self._main_port = int(self._comm_world.bcast(find_free_network_port(), root=0))
        return self._main_port

    def world_size(self) -> int:
        return int(self._comm_world.Get_size())

    def global_rank(self) -> int:
        return int(self._comm_world.Get_rank())

    def local_rank(self) -> int:
        self._find_node()
        return int(self._comm_local.Get_rank())

    def node_rank(self) -> int:
        return self._find_node()

    def _find_node(self) -> int:
        """Number the hosts in the order of their names; a communicator of each gives the ranks on it."""
        if self._node_rank is None:
            host = socket.gethostname()
            everyone = self._comm_world.gather(host, root=0)
            hosts = self._comm_world.bcast(sorted(set(everyone)) if everyone is not None else None, root=0)
            self._node_rank = int(hosts.index(host))
            self._comm_local = self._comm_world.Split(color=self._node_rank)
        return self._node_rank
