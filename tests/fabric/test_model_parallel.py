"""A user's own parallelism on a mesh gives what one process gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import arclight as al
from arclight import checkpoint
from arclight.fabric.strategies import ModelParallelStrategy


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def shard(model: nn.Module, mesh: Any) -> nn.Module:
    parallelize_module(model, mesh["tensor_parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["data_parallel"]) if mesh["data_parallel"].size() > 1 else model


def batches() -> torch.Tensor:
    return torch.randn(6, 8, 6, generator=torch.Generator().manual_seed(3))


def train(
    fabric: al.Fabric, path: Path | None = None, resume: bool = False, meta: bool = False
) -> tuple[Any, list[float]]:
    torch.set_num_threads(1)
    with fabric.init_module(empty_init=meta):
        torch.manual_seed(1)
        model = FeedForward()
    torch.manual_seed(1)
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.05, fused=path is not None))
    if resume:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        fabric.load(path, {"model": model, "optimizer": optimizer})
    share, norms = fabric.strategy.distributed_sampler_kwargs, []
    for number, batch in enumerate(batches()):
        if resume and number < 3:
            continue
        fabric.backward(model(batch.chunk(share["num_replicas"])[share["rank"]]).square().mean())
        norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.1)))
        optimizer.step()
        optimizer.zero_grad()
        if path is not None and not resume and number == 2:
            fabric.save(path, {"model": model, "optimizer": optimizer})
    state = fabric.strategy.portable(model.state_dict())
    return {name: tensor.tolist() for name, tensor in state.items()}, norms


def fabric_for(data: int, tensor: int, **options: Any) -> al.Fabric:
    strategy = ModelParallelStrategy(shard, data, tensor, start_method="fork", **options)
    return al.Fabric(accelerator="cpu", devices=data * tensor, strategy=strategy)


def assert_equal_runs(found: tuple[Any, list[float]], wanted: tuple[Any, list[float]]) -> None:
    assert found[1] == pytest.approx(wanted[1], rel=1e-5)
    for name, value in wanted[0].items():
        torch.testing.assert_close(torch.tensor(found[0][name]), torch.tensor(value), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("data", "tensor", "meta"), [(1, 2, True), pytest.param(2, 2, False, marks=pytest.mark.slow)])
def test_a_mesh_equals_one_process(data: int, tensor: int, meta: bool) -> None:
    wanted = train(al.Fabric(accelerator="cpu", devices=1))
    assert_equal_runs(fabric_for(data, tensor).launch(train, meta=meta), wanted)


@pytest.mark.parametrize(
    ("data", "shares"), [(1, True), *(pytest.param(2, shares, marks=pytest.mark.slow) for shares in (True, False))]
)
def test_a_checkpoint_of_a_mesh_opens_on_one_process_and_back(tmp_path: Path, data: int, shares: bool) -> None:
    path = tmp_path / "state"
    saved = fabric_for(data, 2, save_distributed_checkpoint=shares).launch(train, path)
    assert checkpoint.verify(path) == []
    alone = train(al.Fabric(accelerator="cpu", devices=1), path, resume=True)
    assert_equal_runs((alone[0], alone[1]), (saved[0], saved[1][3:]))
    again = fabric_for(data, 2).launch(train, path, True)
    assert_equal_runs(again, alone)


def _sizes(fabric: al.Fabric) -> None:
    """Never runs: the mesh is refused before."""


def test_sizes_must_make_up_the_world() -> None:
    with pytest.raises(
        Exception, match=r"data_parallel_size=2 and tensor_parallel_size=2 multiplied should equal the world size"
    ):
        al.Fabric(
            accelerator="cpu", devices=2, strategy=ModelParallelStrategy(shard, 2, 2, start_method="fork")
        ).launch(_sizes)
    with pytest.raises(RuntimeError, match="Accessing the device mesh before processes"):
        _ = ModelParallelStrategy(shard).device_mesh
