"""Jobs of the SLURM workload manager, started with ``srun``."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys

from arclight.fabric.environments.base import DEFAULT_PORT, ClusterEnvironment
from arclight.fabric.rank_zero import rank_zero_warn
from arclight.fabric.warnings import PossibleUserWarning


class SLURMEnvironment(ClusterEnvironment):
    """One process for each task of a SLURM job.

    ``auto_requeue``: on ``requeue_signal`` (default SIGUSR1; ask SLURM for it with ``--signal=SIGUSR1@90``), save a checkpoint and
    put the job back into the queue. Inside an allocation one may still start processes oneself: name the job ``bash`` or ``interactive``.
    Raises RuntimeError where tasks are counted for the whole job instead of for each node.
    """

    def __init__(self, auto_requeue: bool = True, requeue_signal: signal.Signals | None = None) -> None:
        self.auto_requeue = auto_requeue
        self.requeue_signal = requeue_signal or getattr(signal, "SIGUSR1", None)
        _warn_unless_srun()
        tasks = int(os.environ.get("SLURM_NTASKS", "1"))
        if tasks > 1 and "SLURM_NTASKS_PER_NODE" not in os.environ:
            raise RuntimeError(
                f"You set `--ntasks={tasks}` in your SLURM script, which leaves open how many tasks each node runs: "
                f"set `--ntasks-per-node` (to {tasks} on a single node) instead"
            )

    @staticmethod
    def detect() -> bool:
        """Return True if ``srun`` started this process, and not as an interactive job."""
        _warn_unless_srun()
        return _started_by_srun()

    @staticmethod
    def job_name() -> str | None:
        return os.environ.get("SLURM_JOB_NAME")

    @staticmethod
    def job_id() -> int | None:
        """The job's number; None in an interactive job, whose runs must not share their logs, and where it is no number."""
        number = os.environ.get("SLURM_JOB_ID", "")
        return int(number) if number.isdigit() and not _interactive() else None

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        if "MASTER_ADDR" not in os.environ:
            os.environ["MASTER_ADDR"] = self.resolve_root_node_address(os.environ.get("SLURM_NODELIST", "127.0.0.1"))
        return os.environ["MASTER_ADDR"]

    @property
    def main_port(self) -> int:
        """``MASTER_PORT``, else 15000 plus the last four digits of the job's number, which every process knows."""
        if "MASTER_PORT" not in os.environ:
            job = os.environ.get("SLURM_JOB_ID")
            os.environ["MASTER_PORT"] = str(DEFAULT_PORT if job is None else 15000 + int(job[-4:]))
        return int(os.environ["MASTER_PORT"])

    def world_size(self) -> int:
        return int(os.environ["SLURM_NTASKS"])

    def global_rank(self) -> int:
        return int(os.environ["SLURM_PROCID"])

    def local_rank(self) -> int:
        return int(os.environ["SLURM_LOCALID"])

    def node_rank(self) -> int:
        return int(os.environ["SLURM_NODEID"])

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        if self.job_name() in _INTERACTIVE:
            return
        tasks = os.environ.get("SLURM_NTASKS_PER_NODE")
        if tasks is not None and int(tasks) != num_devices:
            raise ValueError(
                f"devices={num_devices} was given, but the number of tasks per node configured in SLURM (`--ntasks-per-node={tasks}`) "
                f"does not match; set devices={tasks}"
            )
        nodes = os.environ.get("SLURM_NNODES")
        if nodes is not None and int(nodes) != num_nodes:
            raise ValueError(
                f"num_nodes={num_nodes} was given, but the number of nodes configured in SLURM (`--nodes={nodes}`) does not match; "
                f"set num_nodes={nodes}"
            )

    @staticmethod
    def resolve_root_node_address(nodes: str) -> str:
        """The first host of a SLURM node list: of names between spaces or commas, with ranges such as ``host[5-9,12]``."""
        first = re.match(r"(?:[^\[\s,]|\[[^\]]*\])*", nodes.strip())
        assert first is not None  # it matches the empty string
        return re.sub(r"\[\s*([^\],\s-]*)[^\]]*\]", r"\1", first.group())


_INTERACTIVE = ("bash", "interactive")


def _interactive() -> bool:
    return SLURMEnvironment.job_name() in _INTERACTIVE


def _started_by_srun() -> bool:
    return "SLURM_NTASKS" in os.environ and not _interactive()


def _warn_unless_srun() -> None:
    """Forgetting ``srun`` is a usual slip, and the processes that were not started are then waited for in vain."""
    if shutil.which("srun") is not None and not _started_by_srun():
        command = " ".join(["srun", os.path.basename(sys.executable), *sys.argv])[:64]
        rank_zero_warn(
            "The `srun` command is available on this machine but is not used. HINT: to run as a SLURM job, "
            f"start your program through it: {command} ...",
            category=PossibleUserWarning,
        )
