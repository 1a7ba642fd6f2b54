"""Cluster environments: who started these processes, and which of them is this one?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.fabric.environments.base import ClusterEnvironment as ClusterEnvironment
    from arclight.fabric.environments.base import find_free_network_port as find_free_network_port
    from arclight.fabric.environments.detection import detect_environment as detect_environment
    from arclight.fabric.environments.lsf import LSFEnvironment as LSFEnvironment
    from arclight.fabric.environments.mpi import MPIEnvironment as MPIEnvironment
    from arclight.fabric.environments.slurm import SLURMEnvironment as SLURMEnvironment
    from arclight.fabric.environments.variables import KubeflowEnvironment as KubeflowEnvironment
    from arclight.fabric.environments.variables import LightningEnvironment as LightningEnvironment
    from arclight.fabric.environments.variables import PlainEnvironment as PlainEnvironment
    from arclight.fabric.environments.variables import TorchElasticEnvironment as TorchElasticEnvironment

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "ClusterEnvironment": "arclight.fabric.environments.base",
        "KubeflowEnvironment": "arclight.fabric.environments.variables",
        "LSFEnvironment": "arclight.fabric.environments.lsf",
        "LightningEnvironment": "arclight.fabric.environments.variables",
        "MPIEnvironment": "arclight.fabric.environments.mpi",
        "PlainEnvironment": "arclight.fabric.environments.variables",
        "SLURMEnvironment": "arclight.fabric.environments.slurm",
        "TorchElasticEnvironment": "arclight.fabric.environments.variables",
        "detect_environment": "arclight.fabric.environments.detection",
        "find_free_network_port": "arclight.fabric.environments.base",
    },
)
