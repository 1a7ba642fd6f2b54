"""Selection of a strategy from names, objects, plugins and defaults, and of contradicting choices."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from arclight.fabric import registry
from arclight.fabric.accelerators import CPUAccelerator, CUDAAccelerator, MPSAccelerator
from arclight.fabric.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment
from arclight.fabric.errors import MisconfigurationError, MissingDeviceError
from arclight.fabric.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from arclight.fabric.rank_zero import rank_zero_only
from arclight.fabric.selection import select
from arclight.fabric.strategies import (
    STRATEGY_REGISTRY,
    DDPStrategy,
    FSDPStrategy,
    LayerSync,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    StrategyRegistry,
    TorchSyncBatchNorm,
)
from arclight.fabric.warnings import PossibleUserWarning


class CheckpointIO:
    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None: ...
    def load_checkpoint(self, path: Any) -> Any: ...


@pytest.fixture(autouse=True)
def no_launcher() -> Iterator[None]:
    """No launcher's variables but those of the test, and what the test sets is gone afterwards."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    with mock.patch.dict(os.environ, kept, clear=True):
        yield
    del rank_zero_only.rank


def cuda_devices(count: int) -> Any:
    return mock.patch("arclight.fabric.accelerators.devices.num_cuda_devices", return_value=count)


def test_defaults_on_a_machine_without_devices() -> None:
    with cuda_devices(0):
        found = select()
    assert type(found) is SingleDeviceStrategy
    assert type(found.accelerator) is CPUAccelerator
    assert type(found.precision) is Precision
    assert found.root_device == torch.device("cpu")
    assert (found.num_devices, found.num_nodes, found.world_size) == (1, 1, 1)


@pytest.mark.parametrize(
    ("devices", "kind", "chosen"), [("auto", DDPStrategy, [0, 1, 2]), ([2], SingleDeviceStrategy, [2]), ("0,2", DDPStrategy, [0, 2])]
)  # fmt: skip
def test_devices_decide_on_the_strategy(devices: Any, kind: type, chosen: list[int]) -> None:
    with cuda_devices(3):
        found = select(devices=devices)
    assert type(found) is kind
    assert found.parallel_devices == [torch.device("cuda", number) for number in chosen]
    assert found.device_ids == chosen
    assert found.root_device.index == chosen[0]


@pytest.mark.parametrize("base", ["ddp", "ddp_spawn", "ddp_fork", "ddp_notebook", "DDP"])
@pytest.mark.parametrize("unused", ["", "_find_unused_parameters_true", "_find_unused_parameters_false"])
def test_names_of_the_ddp_family(base: str, unused: str) -> None:
    found = select(accelerator="cpu", strategy=base + unused, devices=2)
    assert type(found) is DDPStrategy
    expected = {"ddp": "popen", "ddp_spawn": "spawn", "ddp_fork": "fork", "ddp_notebook": "fork"}
    assert found._start_method == expected[base.lower()]
    assert found._ddp_kwargs == ({"find_unused_parameters": unused.endswith("true")} if unused else {})
    assert (found.num_processes, found.world_size, found.global_rank) == (2, 2, 0)


def test_other_names() -> None:
    assert type(select(accelerator="cpu", strategy="fsdp")) is FSDPStrategy
    assert type(select(accelerator="cpu", strategy="model_parallel")) is ModelParallelStrategy
    for wrong in ("cocofruit", object()):
        with pytest.raises(ValueError, match="You selected an invalid strategy name: `strategy="):
            select(strategy=wrong)


def test_several_nodes_count_ranks_across_them() -> None:
    os.environ["NODE_RANK"] = "1"
    os.environ["LOCAL_RANK"] = "1"
    found = select(accelerator="cpu", devices=3, num_nodes=2)
    assert type(found) is DDPStrategy
    assert (found.world_size, found.global_rank, found.local_rank, found.node_rank) == (6, 4, 1, 1)
    assert found.distributed_sampler_kwargs == {"num_replicas": 6, "rank": 4}
    assert rank_zero_only.rank == 4
    for wrong in (0, -1, 1.0):
        with pytest.raises(ValueError, match="`num_nodes` must be a positive integer"):
            select(num_nodes=wrong)  # type: ignore[arg-type]


def test_a_cluster_sets_the_number_of_processes() -> None:
    os.environ |= {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1"}
    found = select(accelerator="cpu", num_nodes=2)
    assert type(found.cluster_environment) is TorchElasticEnvironment
    assert (found.num_processes, found.world_size, found.global_rank, found.local_rank) == (2, 4, 3, 1)
    with pytest.raises(ValueError, match=r"product \(3 \* 1\) does not match the world size \(4\)"):
        select(accelerator="cpu", devices=3).launcher.launch(print)


def test_plugins_go_to_their_places() -> None:
    class Cluster(LightningEnvironment):
        creates_processes_externally = True

    cluster, precision, io, sync = Cluster(), DoublePrecision(), CheckpointIO(), TorchSyncBatchNorm()
    os.environ |= {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    found = select(accelerator="cpu", devices=2, plugins=[cluster, precision, io, sync])
    assert found.cluster_environment is cluster
    assert found.precision is found.precision_plugin is precision
    assert found.checkpoint_io is io
    assert isinstance(found, DDPStrategy)
    assert found.layer_sync is sync
    del os.environ["SLURM_NTASKS"]
    bare = select(accelerator="cpu", devices=2, sync_batchnorm=True)
    assert isinstance(bare, DDPStrategy)
    assert isinstance(bare.layer_sync, TorchSyncBatchNorm)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "16-true", "plugins": Precision()}, "both `precision=16-true` and `plugins="),
        ({"plugins": [Precision(), DoublePrecision(), LightningEnvironment(), LightningEnvironment()]}, "multiple values for Precision, ClusterEnvironment"),
        ({"plugins": [CheckpointIO(), CheckpointIO()]}, "multiple values for CheckpointIO"),
        ({"plugins": "ddp"}, "invalid type for plugin 'ddp'"),
        ({"strategy": DDPStrategy(accelerator=CPUAccelerator()), "accelerator": "mps"}, "accelerator set through both"),
        ({"strategy": DDPStrategy(precision=Precision()), "plugins": DoublePrecision()}, "precision set through both"),
        ({"strategy": DDPStrategy(cluster_environment=LightningEnvironment()), "plugins": LightningEnvironment()}, "cluster_environment set through both"),
        ({"strategy": DDPStrategy(parallel_devices=[torch.device("cpu")]), "accelerator": "cuda"}, "CPU parallel_devices set through"),
        ({"sync_batchnorm": True, "plugins": mock.Mock(spec=LayerSync)}, r"sync_batchnorm=True\)` and provided a"),
        ({"devices": 0, "accelerator": "cpu"}, r"`Trainer\(devices=0\)` value is not a valid input using cpu"),
        ({"devices": [], "accelerator": "tpu"}, "value is not a valid input using tpu"),
        ({"precision": "fp12"}, "Precision 'fp12' is invalid"),
    ],
)  # fmt: skip
def test_contradictions_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select(**options)


def test_components_of_a_strategy_are_kept() -> None:
    class Mine(DDPStrategy):
        pass

    mine = Mine(
        accelerator=CPUAccelerator(), parallel_devices=[torch.device("cpu")] * 3, precision_plugin=HalfPrecision("bf16-true"),
        cluster_environment=LightningEnvironment(), checkpoint_io=CheckpointIO(),
    )  # fmt: skip
    held = (mine.accelerator, mine.precision, mine.cluster_environment, mine.checkpoint_io)
    found = select(strategy=mine)
    assert found is mine
    assert (found.accelerator, found.precision, found.cluster_environment, found.checkpoint_io) == held
    assert found.world_size == 3
    assert select(strategy=mine, accelerator="cpu") is mine
    assert type(select(strategy=Mine, accelerator="cpu", devices=2)) is Mine


def test_precisions_follow_the_device() -> None:
    assert isinstance(select(accelerator="cpu", precision="16-true").precision, HalfPrecision)
    with cuda_devices(1):
        mixed = select(accelerator="cuda", precision="bf16-mixed").precision
    assert isinstance(mixed, MixedPrecision)
    assert mixed.device == "cuda"


def test_one_device_of_apple_takes_no_processes() -> None:
    with (
        mock.patch.object(MPSAccelerator, "is_available", return_value=True),
        pytest.raises(ValueError, match="strategies from the DDP family are not supported on the MPS"),
    ):
        select(accelerator="mps", strategy="ddp")


def test_notebooks_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    found = select(accelerator="cpu", devices=2)
    assert isinstance(found, DDPStrategy)
    assert found._start_method == "fork"
    assert found.launcher.is_interactive_compatible
    with cuda_devices(4):
        assert select().num_devices == 1
    for name in ("ddp", "ddp_spawn"):
        with pytest.raises(
            MissingDeviceError, match=rf"`Fabric\(strategy='{name}'\)` is not compatible with an interactive"
        ):
            select(accelerator="cpu", strategy=name, devices=2, owner="Fabric")


def test_slurm_is_detected_unless_the_job_is_interactive() -> None:
    os.environ |= {
        "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NAME": "train", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0",
    }  # fmt: skip
    found = select(accelerator="cpu", devices=2)
    assert type(found.cluster_environment) is SLURMEnvironment
    assert (found.global_rank, found.local_rank) == (1, 1)
    os.environ["SLURM_JOB_NAME"] = "bash"
    assert type(select(accelerator="cpu", devices=2).cluster_environment) is LightningEnvironment


def test_users_and_packages_add_names(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(DDPStrategy):
        pass

    names = StrategyRegistry()
    names.register("mine", Mine, description="as I like it", find_unused_parameters=True)
    assert names["mine"] == {
        "strategy": Mine, "strategy_name": "mine", "description": "as I like it", "init_params": {"find_unused_parameters": True},
    }  # fmt: skip
    assert names.get("mine")._ddp_kwargs == {"find_unused_parameters": True}
    assert names.available_strategies() == ["mine"]
    assert "ddp_spawn" in STRATEGY_REGISTRY.available_strategies()
    entry = mock.Mock(load=lambda: Mine)
    entry.name = "theirs"
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry] if group == "arclight.strategies" else [])
    registry.installed.cache_clear()
    try:
        assert type(select(accelerator="cpu", strategy="theirs", devices=2)) is Mine
    finally:
        registry.installed.cache_clear()


def test_an_unused_device_is_pointed_out() -> None:
    with cuda_devices(1), pytest.warns(PossibleUserWarning, match="GPU available but not used"):
        select(accelerator="cpu")


def test_an_error_is_of_every_kind_that_people_catch() -> None:
    with pytest.raises(MisconfigurationError) as caught:
        select(devices=0)
    assert isinstance(caught.value, (ValueError, TypeError))
    with cuda_devices(0), pytest.raises(RuntimeError, match="can not run on your system"):
        select(accelerator=CUDAAccelerator())


def test_methods_of_a_strategy_are_still_overridden_by_their_former_names() -> None:
    with pytest.warns(FutureWarning, match="Wrapping.bare is called unwrap now"):

        class Wrapping(SingleDeviceStrategy):
            def bare(self, module: torch.nn.Module) -> torch.nn.Module:
                return next(module.children())

    inner = torch.nn.Linear(2, 2)
    assert Wrapping().unwrap(torch.nn.Sequential(inner)) is inner
