"""Checkpoints of states that are sharded over processes: each writes and reads its own, and they open on any mesh."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import arclight as al
from arclight import checkpoint
from arclight.checkpoint import CheckpointError
from arclight.checkpoint.stored_tensor import StoredTensor
from arclight.fabric.distributed.sharding import shard_like
from arclight.fabric.memory import return_freed_memory
from arclight.fabric.strategies import FSDPStrategy, ModelParallelStrategy

torch.set_num_threads(1)


class Net(nn.Module):
    """Odd sizes, so that no division is even."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.up, self.down = nn.Linear(7, 10), nn.Linear(10, 7)
        self.register_buffer("shift", torch.arange(7.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        return x + self.down(self.up(x).relu()) + self.shift


def shard(model: nn.Module, mesh: Any) -> nn.Module:
    parallelize_module(model, mesh["tensor_parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["data_parallel"]) if mesh["data_parallel"].size() > 1 else model


def strategy_for(kind: str) -> tuple[int, Any]:
    if kind == "one":
        return 1, "auto"
    if kind.startswith("fsdp"):
        return int(kind[4:]), FSDPStrategy(start_method="fork")
    data, tensor = map(int, kind.split("x"))
    return data * tensor, ModelParallelStrategy(shard, data, tensor, start_method="fork")


def launch(kind: str, function: Callable[..., Any], *arguments: Any) -> Any:
    devices, strategy = strategy_for(kind)
    return al.Fabric(accelerator="cpu", devices=devices, strategy=strategy).launch(function, *arguments)


def digest(state: Any) -> str:
    """Of all values, whatever they were sharded over."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.update(f"{value.dtype}{tuple(value.shape)}".encode() + value.numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                found.update(str(key).encode())
                add(value[key])
        elif isinstance(value, list):
            for item in value:
                add(item)
        else:
            found.update(repr(value).encode())

    add(state)
    return found.hexdigest()


def train_and_save(fabric: al.Fabric, path: Path) -> None:
    torch.manual_seed(1)
    model = fabric.setup_module(Net())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.05))
    for _ in range(2):
        fabric.backward(model(torch.ones(2, 5)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    fabric.save(path, {"model": model, "optimizer": optimizer, "step": 2})


def load_and_save(fabric: al.Fabric, source: Path, target: Path) -> bool:
    torch.manual_seed(2 + fabric.global_rank)
    model = fabric.setup_module(Net())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.7))
    rest = fabric.load(source, {"model": model, "optimizer": optimizer})
    fabric.save(target, {"model": model, "optimizer": optimizer, **rest})
    return all(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(("fsdp4", "fsdp2", "fsdp3", "one"), marks=pytest.mark.slow),
        pytest.param(("2x2", "1x2", "fsdp3", "2x2"), marks=pytest.mark.slow),
        ("one", "1x2", "fsdp3"),
    ],
    ids=" ".join,
)
def test_state_is_unchanged_from_mesh_to_mesh(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    launch(kinds[0], train_and_save, tmp_path / "0")
    first = checkpoint.load(tmp_path / "0")
    assert set(first["optimizer"]["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    for number, kind in enumerate(kinds[1:], 1):
        launch(kind, load_and_save, tmp_path / str(number - 1), tmp_path / str(number))
        assert checkpoint.verify(tmp_path / str(number)) == []
        assert digest(checkpoint.load(tmp_path / str(number))) == digest(first), kind
    assert checkpoint.inspect(tmp_path / "0").parameters == sum(t.numel() for t in first["model"].values())


# -- any placement -------------------------------------------------------------------------------------------------


def _placements(fabric: al.Fabric, path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    table = torch.arange(77.0).reshape(7, 11)
    kinds = [
        [Shard(0), Shard(1)],
        [Shard(1), Shard(1)],
        [Replicate(), Shard(0)],
        [Replicate(), Replicate()],
        [Shard(0), Shard(0)],
    ]
    state: dict[str, Any] = {str(number): distribute_tensor(table, mesh, kind) for number, kind in enumerate(kinds)}
    state["tied"] = state["0"]
    state["scalar"] = distribute_tensor(torch.tensor(3), mesh, [Replicate(), Replicate()])
    state["half"] = distribute_tensor(table.bfloat16(), mesh["b"], [Shard(0)])
    state["empty"] = torch.zeros(0, 3)
    state["complex"] = torch.zeros(2, dtype=torch.complex128) + 2j
    rank = fabric.global_rank
    own = {f"layers.{rank}.weight": torch.full((2,), float(rank)), "shared": torch.ones(2)}  # a pipeline's stages
    groups = [{"params": [f"layers.{rank}.weight", "shared"], "lr": 0.1}]
    numbers = {rank: torch.tensor(rank)}
    tree = {"model": state, "stages": {"state": own, "param_groups": groups}, "numbers": numbers, "a/b": 1, "step": 5}
    checkpoint.save_shards(path, tree, fabric.strategy)
    found = checkpoint.load_shards(path, fabric.strategy, stored=["model"])
    assert isinstance(found["model"]["0"], StoredTensor)
    assert not isinstance(found["stages"]["state"]["shared"], StoredTensor)
    for name, value in state.items():
        if isinstance(value, DTensor):  # as it was, and as others might have it
            assert torch.equal(shard_like(found["model"][name], value).to_local(), value.to_local())
    for kind in kinds:
        wanted = distribute_tensor(table, mesh, kind)
        for number in range(len(kinds)):
            assert torch.equal(shard_like(found["model"][str(number)], wanted).to_local(), wanted.to_local())


def test_every_placement_and_what_only_some_processes_have(tmp_path: Path) -> None:
    path = tmp_path / "state"
    al.Fabric(accelerator="cpu", devices=4, strategy=FSDPStrategy(start_method="fork")).launch(_placements, path)
    found = checkpoint.load(path)
    table = torch.arange(77.0).reshape(7, 11)
    assert all(torch.equal(found["model"][name], table) for name in ("0", "1", "2", "3", "4", "tied"))
    assert torch.equal(found["model"]["half"], table.bfloat16())
    assert found["model"]["scalar"] == 3
    assert found["model"]["empty"].shape == (0, 3)
    assert (found["model"]["complex"] == 2j).all()
    names = [f"layers.{rank}.weight" for rank in range(4)]
    assert list(found["stages"]["state"]) == [names[0], "shared", *names[1:]]
    assert [float(found["stages"]["state"][name][0]) for name in names] == [0, 1, 2, 3]
    assert found["stages"]["param_groups"] == [{"params": [names[0], "shared", *names[1:]], "lr": 0.1}]
    assert found["numbers"] == {rank: torch.tensor(rank) for rank in range(4)}
    state = json.loads((path / "state.json").read_text())
    assert state["model"]["tied"] == state["model"]["0"]  # written once
    assert checkpoint.inspect(path).step == 5
    sizes = [sum(f.stat().st_size for f in path.glob(f"*-0000{rank}-of-00004*")) for rank in range(1, 5)]
    assert max(sizes) < 2 * min(sizes)  # what several hold is shared out too


def _disagreements(fabric: al.Fabric, path: Path) -> None:
    rank = fabric.global_rank
    with pytest.raises(
        CheckpointError, match=r"model\.w is float32 \(2,\) on one process and float32 \(3,\) on rank 1"
    ):
        checkpoint.save_shards(path, {"model": {"w": torch.zeros(2 + rank)}}, fabric.strategy)
    with pytest.raises(CheckpointError, match=r"by rank 1: thing is a builtins|by rank 1: thing is a"):
        checkpoint.save_shards(path, {"thing": object() if rank else 1}, fabric.strategy)
    with pytest.raises(CheckpointError, match="nothing has that name"):
        checkpoint.load_shards(path, fabric.strategy)
    checkpoint.save_shards(path, {"model": {"w": torch.zeros(2)}}, fabric.strategy)
    fabric.barrier()
    if rank == 0:
        file = next(path.glob("model-*"))
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    fabric.barrier()
    with pytest.raises(CheckpointError, match="SHA-256 differs"):
        checkpoint.load_shards(path, fabric.strategy)
    stored = checkpoint.load_shards(path, fabric.strategy, check=False)["model"]["w"]
    assert (stored + 1).shape == (2,)
    with pytest.raises(CheckpointError, match=r"take a copy of it first"):
        stored.add_(1)


def test_errors_are_raised_on_every_rank(tmp_path: Path) -> None:
    al.Fabric(accelerator="cpu", devices=2, strategy=FSDPStrategy(start_method="fork")).launch(
        _disagreements, tmp_path / "s"
    )


# -- what it costs -------------------------------------------------------------------------------------------------

SIZE = (4096, 1024)  # 16 MiB of float32


def _traffic() -> tuple[int, int]:
    """Bytes that this process has read and written by system calls."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"]), int(lines["wchar"])


def _peak(reset: bool = False) -> int:
    """Largest memory of this process since the last reset, in bytes."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(status["VmHWM"].split()[0]) * 1024


def _costs(fabric: al.Fabric, path: Path) -> list[dict[str, float]]:
    mesh = init_device_mesh("cpu", (4,))
    rank, strategy = fabric.global_rank, fabric.strategy
    part = torch.full((SIZE[0] // 4, SIZE[1]), float(rank))
    tensors = {str(number): DTensor.from_local(part + number, mesh, [Shard(0)]) for number in range(3)}
    whole = 3 * SIZE[0] * SIZE[1] * 4
    found: dict[str, float] = {}

    def measure(name: str, function: Callable[[], Any]) -> Any:
        dist.barrier()
        base, before = _peak(reset=True), _traffic()
        result = function()
        after = _traffic()
        found[f"{name} memory"] = (_peak() - base) / whole
        found[f"{name} read"], found[f"{name} written"] = ((b - a) / whole for a, b in zip(before, after, strict=True))
        return result

    return_freed_memory()  # or blocks of before are kept, or not, as the allocator likes
    checkpoint.save_shards(path.with_name("first"), {"w": tensors["0"]}, strategy)  # what is imported then is no buffer
    measure("save", lambda: checkpoint.save_shards(path, {"model": tensors}, strategy))
    state = measure("open", lambda: checkpoint.load_shards(path, strategy, check=False))
    measure("load", lambda: [shard_like(state["model"][name], like) for name, like in tensors.items()])
    half = DTensor.from_local(torch.empty(SIZE[0], SIZE[1] // 4), mesh, [Shard(1)])
    columns = measure("columns", lambda: shard_like(state["model"]["0"], half))
    assert columns.to_local()[:: SIZE[0] // 4, 0].tolist() == [0, 1, 2, 3]
    measure("checked", lambda: checkpoint.load_shards(path, strategy))
    return strategy.all_gather_object(found)


def test_a_process_writes_and_reads_its_own_part_and_keeps_little_beside_it(tmp_path: Path) -> None:
    """Everything in parts of the whole state of 48 MiB, a quarter of which each of four processes has."""
    fabric = al.Fabric(accelerator="cpu", devices=4, strategy=FSDPStrategy(start_method="fork"))
    for cost in fabric.launch(_costs, tmp_path / "state"):
        assert cost["save written"] == pytest.approx(0.25, abs=0.01)
        assert cost["save memory"] < 0.06
        assert cost["open read"] < 0.01
        assert cost["load read"] == pytest.approx(0.25, abs=0.01)
        assert cost["load memory"] < 0.25 + 0.04  # its own part
        assert (
            cost["columns memory"] < 0.25
        )  # its own part of one tensor (0.08) and a buffer of 4 MiB (0.08), not all of it (0.33)
        assert cost["checked read"] < 0.5  # all processes together read every file once
