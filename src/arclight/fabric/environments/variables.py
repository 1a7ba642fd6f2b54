"""Environments that say everything in environment variables: our own processes, torchrun's, a scheduler's, Kubeflow's."""

from __future__ import annotations

import os

from arclight.fabric.environments.base import ClusterEnvironment, find_free_network_port


class LightningEnvironment(ClusterEnvironment):
    """One or more nodes on which this program was started once each; it starts the other processes of its node itself.

    With several nodes set ``MASTER_ADDR``, ``MASTER_PORT`` and, on each, ``NODE_RANK``. Whoever sets ``LOCAL_RANK`` says that
    all processes are there already. (The name is Lightning's.)
    """

    def __init__(self) -> None:
        self._world_size, self._global_rank = 1, 0

    @staticmethod
    def detect() -> bool:
        return True

    @property
    def creates_processes_externally(self) -> bool:
        return "LOCAL_RANK" in os.environ

    @property
    def main_port(self) -> int:
        """``MASTER_PORT``, or a free port that is kept there for the processes still to start."""
        if "MASTER_PORT" not in os.environ:
            os.environ["MASTER_PORT"] = str(find_free_network_port())
        return int(os.environ["MASTER_PORT"])

    def world_size(self) -> int:
        return self._world_size

    def set_world_size(self, size: int) -> None:
        self._world_size = size

    def global_rank(self) -> int:
        return self._global_rank

    def set_global_rank(self, rank: int) -> None:
        self._global_rank = rank

    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    def node_rank(self) -> int:
        return int(os.environ.get("NODE_RANK", os.environ.get("GROUP_RANK", "0")))

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        started = os.environ.get("WORLD_SIZE")
        if self.creates_processes_externally and started is not None and int(started) != num_devices * num_nodes:
            raise ValueError(
                f"this program runs in {started} processes, and devices={num_devices} with num_nodes={num_nodes} asks for "
                f"{num_devices * num_nodes}: keep to one number of processes in a program"
            )

    def teardown(self) -> None:
        os.environ.pop("WORLD_SIZE", None)


class PlainEnvironment(ClusterEnvironment):
    """Processes started by hand or by any scheduler that sets ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``.

    ``LOCAL_RANK`` and ``NODE_RANK`` are 0 where they are not set: one process on each of several one-device nodes needs no more.
    """

    @staticmethod
    def detect() -> bool:
        return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return int(os.environ["WORLD_SIZE"])

    def global_rank(self) -> int:
        return int(os.environ["RANK"])

    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    def node_rank(self) -> int:
        return int(os.environ.get("NODE_RANK", os.environ.get("GROUP_RANK", "0")))

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        if num_devices * num_nodes != self.world_size():
            raise ValueError(
                f"devices={num_devices} and num_nodes={num_nodes} were given, but the product ({num_devices} * {num_nodes}) does not match "
                f'the world size ({self.world_size()}) of the processes that were started; set devices="auto", or start as many as you ask for'
            )


class TorchElasticEnvironment(PlainEnvironment):
    """Processes started by torchrun."""

    @staticmethod
    def detect() -> bool:
        return "TORCHELASTIC_RUN_ID" in os.environ

    def local_rank(self) -> int:
        return int(os.environ["LOCAL_RANK"])

    def node_rank(self) -> int:
        return int(os.environ.get("GROUP_RANK", "0"))


class KubeflowEnvironment(PlainEnvironment):
    """Processes of a Kubeflow PyTorchJob: one for each pod, so that a pod is a node.

    Any other job on Kubernetes looks the same from inside: pass it in ``plugins=``.
    """

    @staticmethod
    def detect() -> bool:
        raise NotImplementedError(
            "A Kubeflow job can't be detected automatically: other jobs on Kubernetes look alike. "
            "Pass plugins=[KubeflowEnvironment()]."
        )

    @property
    def main_address(self) -> str:
        return os.environ["MASTER_ADDR"]

    @property
    def main_port(self) -> int:
        return int(os.environ["MASTER_PORT"])

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return self.global_rank()

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """The job's own specification says how many pods there are."""
