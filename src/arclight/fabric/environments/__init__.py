"""Detect the cluster environment, and read ranks from it (``clusters``, the only module).

In: variables that a launcher or scheduler set; out: rank, world size, address of rank 0, for ``fabric.selection`` and strategies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.fabric.environments.clusters import ClusterEnvironment as ClusterEnvironment
    from arclight.fabric.environments.clusters import KubeflowEnvironment as KubeflowEnvironment
    from arclight.fabric.environments.clusters import LightningEnvironment as LightningEnvironment
    from arclight.fabric.environments.clusters import LSFEnvironment as LSFEnvironment
    from arclight.fabric.environments.clusters import MPIEnvironment as MPIEnvironment
    from arclight.fabric.environments.clusters import PlainEnvironment as PlainEnvironment
    from arclight.fabric.environments.clusters import SLURMEnvironment as SLURMEnvironment
    from arclight.fabric.environments.clusters import TorchElasticEnvironment as TorchElasticEnvironment
    from arclight.fabric.environments.clusters import detect_environment as detect_environment
    from arclight.fabric.environments.clusters import find_free_network_port as find_free_network_port

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "ClusterEnvironment": "arclight.fabric.environments.clusters",
        "KubeflowEnvironment": "arclight.fabric.environments.clusters",
        "LSFEnvironment": "arclight.fabric.environments.clusters",
        "LightningEnvironment": "arclight.fabric.environments.clusters",
        "MPIEnvironment": "arclight.fabric.environments.clusters",
        "PlainEnvironment": "arclight.fabric.environments.clusters",
        "SLURMEnvironment": "arclight.fabric.environments.clusters",
        "TorchElasticEnvironment": "arclight.fabric.environments.clusters",
        "detect_environment": "arclight.fabric.environments.clusters",
        "find_free_network_port": "arclight.fabric.environments.clusters",
    },
)
