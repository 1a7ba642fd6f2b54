# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.environments import ClusterEnvironment as ClusterEnvironment
from arclight.fabric.environments import KubeflowEnvironment as KubeflowEnvironment
from arclight.fabric.environments import LSFEnvironment as LSFEnvironment
from arclight.fabric.environments import LightningEnvironment as LightningEnvironment
from arclight.fabric.environments import MPIEnvironment as MPIEnvironment
from arclight.fabric.environments import SLURMEnvironment as SLURMEnvironment
from arclight.fabric.environments import TorchElasticEnvironment as TorchElasticEnvironment
from . import cluster_environment as cluster_environment
from . import kubeflow as kubeflow
from . import lightning as lightning
from . import lsf as lsf
from . import mpi as mpi
from . import slurm as slurm
from . import torchelastic as torchelastic
from arclight._lazy import Refused as _Refused

__all__ = [
    "ClusterEnvironment",
    "KubeflowEnvironment",
    "LSFEnvironment",
    "LightningEnvironment",
    "MPIEnvironment",
    "SLURMEnvironment",
    "TorchElasticEnvironment",
]
class XLAEnvironment(_Refused): ...
