"""Read rank and world size from torchrun, SLURM, LSF, MPI, Kubeflow or plain variables.

``fabric.selection`` takes the environment that `detect_environment` finds or a user passes; `launchers` set the variables that children
read here; the Trainer asks `SLURMEnvironment` for requeueing and names of runs. Class names and variables are Lightning's and the
schedulers', and stay. A new environment goes into `KINDS`; users' own are entry points or ``plugins=``.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import socket
import sys
from importlib.util import find_spec
from typing import Any

from arclight.fabric.rank_zero import rank_zero_warn
from arclight.fabric.registry import installed
from arclight.fabric.warnings import PossibleUserWarning

LOG = logging.getLogger("arclight.fabric.environments")

DEFAULT_PORT = 12910
"""Rendezvous port if the processes were started from outside without one: the same number on each."""


class ClusterEnvironment:
    """Base class of cluster environments: rank, world size and main address.

    A user's own is passed in ``plugins=``.
    """

    @staticmethod
    def detect() -> bool:
        """Return True if this process was started by such an environment."""
        return False

    @property
    def creates_processes_externally(self) -> bool:
        """True if something outside this program starts every process."""
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
        """Return the number of processes on all nodes."""
        return 1

    def set_world_size(self, size: int) -> None:
        """Set the world size that the program computed; ignored if the cluster decides it."""
        LOG.debug("%s: setting world size is not allowed, the cluster decides; ignored", type(self).__name__)

    def global_rank(self) -> int:
        """Return this process' rank among all."""
        return 0

    def set_global_rank(self, rank: int) -> None:
        """Set the rank that the program computed; ignored if the cluster decides it."""
        LOG.debug("%s: setting global rank is not allowed, the cluster decides; ignored", type(self).__name__)

    def local_rank(self) -> int:
        """Return this process' rank on its node."""
        return 0

    def node_rank(self) -> int:
        """Return the rank of this process' node."""
        return 0

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raise ValueError unless ``num_devices`` processes run on each of ``num_nodes`` nodes."""

    def teardown(self) -> None:
        """Restore what the environment changed in this process."""


def find_free_network_port() -> int:
    """Return a TCP port of this host that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


class LightningEnvironment(ClusterEnvironment):
    """Environment of a program that is started once a node and launches its other processes.

    With several nodes set ``MASTER_ADDR``, ``MASTER_PORT`` and, on each, ``NODE_RANK``. ``LOCAL_RANK``, if it is set, says that
    all processes have been started. (The name is Lightning's.)
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
    """Environment of ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``.

    They are set by hand or by any scheduler. ``LOCAL_RANK`` and ``NODE_RANK`` are 0 if they are not set: one process on each of several
    one-device nodes needs no more.
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
        """Accept any settings: the job's own specification has the number of pods."""


class SLURMEnvironment(ClusterEnvironment):
    """One process for each task of a SLURM job.

    ``auto_requeue``: on ``requeue_signal`` (default SIGUSR1; ask SLURM for it with ``--signal=SIGUSR1@90``), save a checkpoint and
    put the job back into the queue. Inside an allocation one may still start processes oneself: name the job ``bash`` or ``interactive``.
    Raises RuntimeError if tasks are counted for the whole job instead of for each node.
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
        """Return the SLURM job's number; None in an interactive job or if it is not a number."""
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
        """``MASTER_PORT``, else 15000 plus the last four digits of the job's number."""
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
        """Return the first host of a SLURM node list.

        Names are separated by spaces or commas and may have ranges such as ``host[5-9,12]``.
        """
        first = re.match(r"(?:[^\[\s,]|\[[^\]]*\])*", nodes.strip())
        assert first is not None  # it matches the empty string
        return re.sub(r"\[\s*([^\],\s-]*)[^\]]*\]", r"\1", first.group())


_INTERACTIVE = ("bash", "interactive")


def _interactive() -> bool:
    return SLURMEnvironment.job_name() in _INTERACTIVE


def _started_by_srun() -> bool:
    return "SLURM_NTASKS" in os.environ and not _interactive()


def _warn_unless_srun() -> None:
    """Warn if ``srun`` is available but not used: processes would be missing."""
    if shutil.which("srun") is not None and not _started_by_srun():
        command = " ".join(["srun", os.path.basename(sys.executable), *sys.argv])[:64]
        rank_zero_warn(
            "The `srun` command is available on this machine but is not used. HINT: to run as a SLURM job, "
            f"start your program through it: {command} ...",
            category=PossibleUserWarning,
        )


class LSFEnvironment(ClusterEnvironment):
    """Environment of LSF, with one process for each task of a job step.

    Ranks come from ``JSM_NAMESPACE_*``, hosts from the file named in ``LSB_DJOB_RANKFILE`` (one line for each process, after
    one for the node that starts the job), the port from ``MASTER_PORT`` or ``LSB_JOBID``. Raises ValueError if one of these is missing.
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
        """Return this host's rank in the order of names, and split a communicator for it."""
        if self._node_rank is None:
            host = socket.gethostname()
            everyone = self._comm_world.gather(host, root=0)
            hosts = self._comm_world.bcast(sorted(set(everyone)) if everyone is not None else None, root=0)
            self._node_rank = int(hosts.index(host))
            self._comm_local = self._comm_world.Split(color=self._node_rank)
        return self._node_rank


KINDS: tuple[type[ClusterEnvironment], ...] = (
    TorchElasticEnvironment,  # torchrun may itself run inside a job of SLURM, LSF or MPI: it knows the processes better
    SLURMEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    PlainEnvironment,
)


def detect_environment() -> ClusterEnvironment:
    """Detect the environment that started this process.

    Environments of installed packages (entry points in the group ``arclight.environments``) are asked first;
    :class:`LightningEnvironment` is the last resort.
    """
    kinds = [*installed("environments").values(), *KINDS]
    return next((kind() for kind in kinds if kind.detect()), LightningEnvironment())
