"""Detect the cluster environment that started this process."""

from __future__ import annotations

from arclight.fabric.environments.base import ClusterEnvironment
from arclight.fabric.environments.lsf import LSFEnvironment
from arclight.fabric.environments.mpi import MPIEnvironment
from arclight.fabric.environments.slurm import SLURMEnvironment
from arclight.fabric.environments.variables import LightningEnvironment, PlainEnvironment, TorchElasticEnvironment
from arclight.fabric.registry import installed

KINDS: tuple[type[ClusterEnvironment], ...] = (
    TorchElasticEnvironment,  # torchrun may itself run inside a job of SLURM, LSF or MPI: it knows the processes better
    SLURMEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    PlainEnvironment,
)


def detect_environment() -> ClusterEnvironment:
    """The environment that started this process; environments of installed packages (entry points in the group
    ``arclight.environments``) are asked first, :class:`LightningEnvironment` is what remains.
    """
    kinds = [*installed("environments").values(), *KINDS]
    return next((kind() for kind in kinds if kind.detect()), LightningEnvironment())
