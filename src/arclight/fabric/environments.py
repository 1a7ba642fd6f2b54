"""Cluster environments: who started these processes, and which of them am I?"""

from __future__ import annotations

import os
import socket


class ClusterEnvironment:
    """Rank, size and rendezvous address of this process. A user's own environment is a subclass."""

    creates_processes_externally = False
    """True where a launcher outside this program starts every process."""

    @staticmethod
    def detect() -> bool:
        """Whether this process was started by such an environment."""
        return False

    @property
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        if "MASTER_PORT" not in os.environ:
            os.environ["MASTER_PORT"] = str(free_port())
        return int(os.environ["MASTER_PORT"])

    def world_size(self) -> int:
        return 1

    def global_rank(self) -> int:
        return 0

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return 0

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raise ValueError where the launcher's process count is not ``num_devices * num_nodes``."""


class LightningEnvironment(ClusterEnvironment):
    """Processes that this program starts itself, one node after another or all on this one."""

    def __init__(self) -> None:
        self._world_size, self._global_rank = 1, 0

    def set_world_size(self, size: int) -> None:
        self._world_size = size

    def set_global_rank(self, rank: int) -> None:
        self._global_rank = rank

    def world_size(self) -> int:
        return self._world_size

    def global_rank(self) -> int:
        return self._global_rank

    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    def node_rank(self) -> int:
        return int(os.environ.get("NODE_RANK", os.environ.get("GROUP_RANK", "0")))


class TorchElasticEnvironment(ClusterEnvironment):
    """Processes started by torchrun."""

    creates_processes_externally = True

    @staticmethod
    def detect() -> bool:
        return all(name in os.environ for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"))

    def world_size(self) -> int:
        return int(os.environ["WORLD_SIZE"])

    def global_rank(self) -> int:
        return int(os.environ["RANK"])

    def local_rank(self) -> int:
        return int(os.environ["LOCAL_RANK"])

    def node_rank(self) -> int:
        return int(os.environ.get("GROUP_RANK", "0"))

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        if num_devices * num_nodes != self.world_size():
            raise ValueError(
                f"torchrun started {self.world_size()} processes, the trainer was given devices={num_devices} x num_nodes={num_nodes}; "
                f'set devices="auto" or start {num_devices * num_nodes} processes'
            )


def detect_environment() -> ClusterEnvironment:
    """The environment that started this process."""
    return TorchElasticEnvironment() if TorchElasticEnvironment.detect() else LightningEnvironment()


def free_port() -> int:
    """A TCP port on loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
