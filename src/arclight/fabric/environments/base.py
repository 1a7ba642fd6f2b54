"""Define the interface of cluster environments: who started the processes, and ranks."""

from __future__ import annotations

import logging
import os
import socket

LOG = logging.getLogger("arclight.fabric.environments")

DEFAULT_PORT = 12910
"""Where processes meet when they were started from outside and nobody says where: the same number on each."""


class ClusterEnvironment:
    """Rank, size and meeting point of this process. A user's own environment is a subclass, passed in ``plugins=``."""

    @staticmethod
    def detect() -> bool:
        """Return True if this process was started by such an environment."""
        return False

    @property
    def creates_processes_externally(self) -> bool:
        """Return True if something outside this program starts every process; otherwise the program starts them itself."""
        return False

    @property
    def main_address(self) -> str:
        """Host name or address of the process with rank 0."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """TCP port on that host where the processes meet."""
        return int(os.environ.get("MASTER_PORT", DEFAULT_PORT))

    def world_size(self) -> int:
        """Number of processes on all nodes."""
        return 1

    def set_world_size(self, size: int) -> None:
        """Take the size that the program asked for; ignored where the cluster decides."""
        LOG.debug("%s: setting world size is not allowed, the cluster decides; ignored", type(self).__name__)

    def global_rank(self) -> int:
        """Number of this process among all."""
        return 0

    def set_global_rank(self, rank: int) -> None:
        """Take the rank that the program worked out; ignored where the cluster decides."""
        LOG.debug("%s: setting global rank is not allowed, the cluster decides; ignored", type(self).__name__)

    def local_rank(self) -> int:
        """Number of this process among those on its node."""
        return 0

    def node_rank(self) -> int:
        """Number of this process's node."""
        return 0

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raise ValueError where the cluster's processes are not ``num_devices`` on each of ``num_nodes``."""

    def teardown(self) -> None:
        """Undo what the environment changed in this process."""


def find_free_network_port() -> int:
    """A TCP port of this host that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
