"""Cluster environments, told from the variables that real launchers set (recorded, trimmed to what matters)."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from arclight.fabric import environments as env
from arclight.fabric import registry
from arclight.fabric.warnings import PossibleUserWarning

TORCHRUN = {
    "GROUP_RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node-a", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1",
    "RANK": "5", "ROLE_NAME": "default", "ROLE_RANK": "5", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "8",
}  # fmt: skip
SLURM = {
    "SLURM_JOB_ID": "4711234", "SLURM_JOB_NAME": "train", "SLURM_LOCALID": "3", "SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_NODELIST": "gpu[07-08]",
    "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4", "SLURM_PROCID": "7", "SLURM_STEP_ID": "0",
}  # fmt: skip
LSF = {
    "JSM_NAMESPACE_LOCAL_RANK": "2", "JSM_NAMESPACE_RANK": "8", "JSM_NAMESPACE_SIZE": "12", "LSB_JOBID": "98765", "LSB_DJOB_NUMPROC": "13",
}  # fmt: skip
PLAIN = {
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "1234",
    "RANK": "2",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "NODE_RANK": "1",
}
KUBEFLOW = {
    "KUBERNETES_PORT": "tcp://10.96.0.1:443",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "RANK": "1",
    "WORLD_SIZE": "3",
}


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher's variables but those of the test, and what the test sets is gone afterwards."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    with mock.patch.dict(os.environ, kept, clear=True):
        yield


def enter(**variables: str) -> None:
    os.environ.update(variables)


def lsf_hosts(folder: Path) -> str:
    """The file of a job with two hosts, this one the second; its first line is the host that starts the job."""
    hosts = folder / "rankfile"
    hosts.write_text("\n".join(["batch1", *["node-x"] * 6, *[socket.gethostname()] * 6]) + "\n")
    return str(hosts)


def facts(environment: env.ClusterEnvironment) -> tuple[object, ...]:
    return (
        environment.world_size(),
        environment.global_rank(),
        environment.local_rank(),
        environment.node_rank(),
        environment.main_address,
        environment.main_port,
    )


@pytest.mark.parametrize(
    ("recorded", "kind", "expected"),
    [
        (TORCHRUN, env.TorchElasticEnvironment, (8, 5, 1, 1, "node-a", 29500)),
        (SLURM, env.SLURMEnvironment, (8, 7, 3, 1, "gpu07", 16234)),
        (PLAIN, env.PlainEnvironment, (4, 2, 0, 1, "10.0.0.1", 1234)),
        ({**SLURM, **TORCHRUN}, env.TorchElasticEnvironment, (8, 5, 1, 1, "node-a", 29500)),
        (
            {**SLURM, "SLURM_JOB_NAME": "bash", "MASTER_PORT": "5"},
            env.LightningEnvironment,
            (1, 0, 0, 0, "127.0.0.1", 5),
        ),
    ],
    ids=["torchrun", "slurm", "plain", "torchrun in slurm", "interactive slurm"],
)
def test_the_environment_is_detected_by_its_variables(
    recorded: dict[str, str], kind: type[env.ClusterEnvironment], expected: tuple[object, ...]
) -> None:
    enter(**recorded)
    found = env.detect_environment()
    assert type(found) is kind
    assert facts(found) == expected
    assert found.creates_processes_externally is (kind is not env.LightningEnvironment)


def test_lsf_reads_hosts_from_its_file(tmp_path: Path) -> None:
    enter(**LSF, LSB_DJOB_RANKFILE=lsf_hosts(tmp_path))
    found = env.detect_environment()
    assert type(found) is env.LSFEnvironment
    assert facts(found) == (12, 8, 2, 1, "node-x", 10765)
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("node-x", "10765")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "Did not find the environment variable `LSB_DJOB_RANKFILE`"),
        ({"LSB_DJOB_RANKFILE": ""}, "`LSB_DJOB_RANKFILE` is empty"),
    ],
)
def test_lsf_names_missing_variables(variables: dict[str, str], message: str) -> None:
    enter(**variables)
    with pytest.raises(ValueError, match=message):
        env.LSFEnvironment()


def test_kubeflow_is_named_by_the_user() -> None:
    enter(**KUBEFLOW)
    with pytest.raises(NotImplementedError, match="can't be detected automatically"):
        env.KubeflowEnvironment.detect()
    assert facts(env.KubeflowEnvironment()) == (3, 1, 0, 1, "job-master-0", 23456)


def test_a_program_that_starts_its_own_processes_keeps_one_port_for_them() -> None:
    found = env.detect_environment()
    assert type(found) is env.LightningEnvironment
    assert found.main_port == found.main_port == int(os.environ["MASTER_PORT"])
    found.set_world_size(6)
    found.set_global_rank(4)
    assert (found.world_size(), found.global_rank()) == (6, 4)
    enter(LOCAL_RANK="1", NODE_RANK="2", WORLD_SIZE="6")
    assert found.creates_processes_externally
    assert (found.local_rank(), found.node_rank()) == (1, 2)
    found.teardown()
    assert "WORLD_SIZE" not in os.environ


def test_the_cluster_decides_on_ranks() -> None:
    enter(**TORCHRUN)
    found = env.TorchElasticEnvironment()
    found.set_world_size(100)
    found.set_global_rank(100)
    assert (found.world_size(), found.global_rank()) == (8, 5)


@pytest.mark.parametrize(
    ("kind", "variables", "settings", "message"),
    [
        (env.TorchElasticEnvironment, TORCHRUN, (2, 2), r"product \(2 \* 2\) does not match the world size \(8\)"),
        (env.SLURMEnvironment, SLURM, (2, 2), r"tasks per node configured in SLURM .* does not match; set devices=4"),
        (
            env.SLURMEnvironment,
            SLURM,
            (4, 1),
            r"number of nodes configured in SLURM .* does not match; set num_nodes=2",
        ),
    ],
)
def test_settings_that_contradict_the_cluster_are_named(
    kind: type[env.ClusterEnvironment], variables: dict[str, str], settings: tuple[int, int], message: str
) -> None:
    enter(**variables)
    kind().validate_settings(4, 2)
    with pytest.raises(ValueError, match=message):
        kind().validate_settings(*settings)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("alpha beta", "alpha"),
        ("alpha,beta", "alpha"),
        ("gpu[007-010,3],cpu1", "gpu007"),
        ("gpu[4]", "gpu4"),
        ("rack[2,1]n[5-6]", "rack2n5"),
        ("1.2.3.[089, 100-110]", "1.2.3.089"),
    ],
)
def test_the_first_host_of_a_slurm_node_list(nodes: str, first: str) -> None:
    assert env.SLURMEnvironment.resolve_root_node_address(nodes) == first


def test_slurm_tasks_must_be_counted_per_node() -> None:
    enter(SLURM_NTASKS="2")
    with pytest.raises(RuntimeError, match=r"You set `--ntasks=2` in your SLURM script.*--ntasks-per-node"):
        env.SLURMEnvironment()


def test_a_forgotten_srun_is_pointed_out(tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\n")
    srun.chmod(0o755)
    enter(PATH=str(tmp_path))
    with pytest.warns(PossibleUserWarning, match="`srun` command is available .* is not used"):
        assert not env.SLURMEnvironment.detect()


def test_an_installed_package_may_bring_an_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ours(env.LightningEnvironment):
        @staticmethod
        def detect() -> bool:
            return "OUR_CLUSTER" in os.environ

    monkeypatch.setattr(
        registry, "entry_points", lambda group: [mock.Mock(load=lambda: Ours)] if "env" in group else []
    )
    registry.installed.cache_clear()
    try:
        assert type(env.detect_environment()) is env.LightningEnvironment
        enter(OUR_CLUSTER="1")
        assert type(env.detect_environment()) is Ours
    finally:
        registry.installed.cache_clear()


def test_mpi_needs_its_package() -> None:
    if env.MPIEnvironment.detect():
        pytest.skip("this test runs under MPI")
    with mock.patch("arclight.fabric.environments.clusters._MPI4PY_AVAILABLE", False):
        assert not env.MPIEnvironment.detect()
        with pytest.raises(ModuleNotFoundError, match="pip install mpi4py"):
            env.MPIEnvironment()


def test_mpi_asks_its_communicator() -> None:
    world = mock.Mock()
    world.Get_size.return_value, world.Get_rank.return_value = 4, 3
    world.gather.return_value = ["a-host", socket.gethostname(), "a-host"]
    world.bcast.side_effect = lambda value, root: value
    world.Split.return_value.Get_rank.return_value = 1
    package = mock.Mock(MPI=mock.Mock(COMM_WORLD=world))
    with (
        mock.patch("arclight.fabric.environments.clusters._MPI4PY_AVAILABLE", True),
        mock.patch.dict("sys.modules", {"mpi4py": package}),
    ):
        assert env.MPIEnvironment.detect()
        expected = sorted(["a-host", socket.gethostname()]).index(socket.gethostname())
        found = env.MPIEnvironment()
        assert facts(found)[:5] == (4, 3, 1, expected, socket.gethostname())
        assert found.main_port == found.main_port > 0
        world.Split.assert_called_once_with(color=expected)
