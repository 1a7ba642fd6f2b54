"""Optimizers on every placement compute what one process does: real processes over gloo."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.optim.processes import run
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from arclight.optim import ADOPT, QHADOPT, SGD, AdamW, Mixed, MixedOptimizer, Muon, NorMuon

SHAPES = {
    "up": (12, 8),
    "up2": (12, 8),
    "odd": (7, 5),
    "experts": (4, 6, 8),
    "few_experts": (3, 8, 6),
    "tok_embeddings.weight": (9, 8),
    "bias": (9,),
}
SETTINGS = {
    "muon": Muon(precision="float32", weight_decay=0.1),
    "normuon": NorMuon(precision="float32", scale="rms"),
    "half": Muon(state_dtype="bfloat16", others=AdamW(state_dtype="bfloat16")),
    "adamw": AdamW(state_dtype="bfloat16"),
    "adopt": Mixed(groups=(QHADOPT(pattern="^up"),), default=ADOPT(state_dtype="bfloat16")),
    "mixed": Mixed(groups=(SGD(pattern="^up"), NorMuon(pattern="odd|^experts")), default=AdamW()),
}
PLACEMENTS = {
    2: [(Shard(0),), (Shard(1),), (Replicate(),)],
    4: [(Shard(0),), (Shard(1),), (Shard(0), Shard(1)), (Shard(1), Shard(0)), (Replicate(), Shard(0)), (Shard(0), Shard(0)),
        (_StridedShard(0, split_factor=2), Shard(0))],
}  # fmt: skip


def placements_of(kind: str, count: int) -> list[tuple[Any, ...]]:
    """All of them for the settings that mix optimizers; on four processes the others take turns with those over two dimensions."""
    found: list[tuple[Any, ...]] = PLACEMENTS[count]
    return found if count == 2 or kind == "mixed" else [found[n] for n in {"normuon": (2, 4, 6), "half": (3, 5)}[kind]]


def numbers(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def fitting(placement: Any, ndim: int) -> Any:
    """A placement of the language of matrices for a tensor of ``ndim`` dimensions; vectors have rows only."""
    return Replicate() if isinstance(placement, Shard) and placement.dim >= ndim else placement


def spread(tensor: torch.Tensor, mesh: DeviceMesh, placements: tuple[Any, ...]) -> torch.Tensor:
    fitted = [fitting(placement, tensor.ndim) for placement in placements]
    if not any(isinstance(p, _StridedShard) for p in fitted):
        return distribute_tensor(tensor, mesh, fitted)
    # as fully_shard does it to a tensor that a tensor-parallel plan has shared out: first the inner dimension's chunk
    inner = tensor.tensor_split([-(-len(tensor) // 2)])[mesh.get_local_rank(1)]
    part = inner.tensor_split([-(-len(inner) // 2)])[mesh.get_local_rank(0)].contiguous()
    return DTensor.from_local(part, mesh, fitted, run_check=False, shape=tensor.shape, stride=tensor.stride())


def steps(optimizer: MixedOptimizer, parameters: dict[str, nn.Parameter], place: Any, first: int, last: int) -> None:
    for step in range(first, last):
        for name, push in numbers(100 + step).items():
            parameters[name].grad = place(push)
        optimizer.step()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def placements_equal_one_process(rank: int, count: int, kinds: Sequence[str]) -> None:
    meshes = {1: init_device_mesh("cpu", (count,), mesh_dim_names=("a",))}
    if count == 4:
        meshes[2] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for kind in kinds:
        settings = SETTINGS[kind]
        alone = {name: nn.Parameter(value) for name, value in numbers(1).items()}
        wanted = settings.build(alone.items())
        steps(wanted, alone, lambda tensor: tensor, 0, 3)
        for placements in placements_of(kind, count):
            mesh = meshes[len(placements)]

            def place(tensor: torch.Tensor, mesh: Any = mesh, placements: Any = placements) -> torch.Tensor:
                return spread(tensor, mesh, placements)

            shared = {name: nn.Parameter(place(value)) for name, value in numbers(1).items()}
            found = settings.build(shared.items())
            steps(found, shared, place, 0, 3)
            for name, parameter in shared.items():
                torch.testing.assert_close(
                    whole(parameter.detach()), alone[name].detach(), rtol=0, atol=1e-6,
                    msg=lambda text, at=(kind, placements, name): f"{at}: {text}",
                )  # fmt: skip
                for key, value in found.state[parameter].items():
                    torch.testing.assert_close(whole(value), wanted.state[alone[name]][key], rtol=1e-6, atol=1e-6)
            goes_on_elsewhere(settings, found, shared, alone, place)


def goes_on_elsewhere(settings: Any, found: MixedOptimizer, shared: Any, alone: Any, place: Any) -> None:
    """Whole tensors of a spread optimizer's state, as a checkpoint holds them, on one process and back."""
    from arclight.fabric.distributed.sharding import gather_tree

    state = gather_tree(found.state_dict(), keep=True)
    for target, put in (
        ({n: whole(p.detach()).clone() for n, p in shared.items()}, lambda t: t),
        ({n: p.detach().clone() for n, p in shared.items()}, place),
    ):
        again = {name: nn.Parameter(value) for name, value in target.items()}
        optimizer = settings.build(again.items())
        optimizer.load_state_dict(state)
        steps(optimizer, again, put, 3, 4)
        if target is not None and put is place:
            steps(found, shared, place, 3, 4)
            for name, parameter in again.items():
                assert torch.equal(whole(parameter.detach()), whole(shared[name].detach())), name


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tok_embeddings, self.norm = nn.Embedding(16, 8), nn.LayerNorm(8)
        self.up, self.down, self.output = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 16)
        self.double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        return self.output(self.norm(x + self.down(torch.tanh(self.up(x)))))


def train(model: nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    optimizer = NorMuon(lr=0.05).build(model.named_parameters())
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten()).backward()
        optimizer.step()
    return {name: whole(parameter.detach()) for name, parameter in model.named_parameters()}


def models_equal_one_process(rank: int, count: int) -> None:
    tokens = torch.arange(64).view(8, 8) * 5 % 16
    wanted = train(Block(), tokens)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for shape in [(count, 1), (1, count), (2, 2)][: 3 if count == 4 else 2]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        model = Block()
        if shape[1] > 1:
            parallelize_module(model, mesh["tp"], plan)
        if shape[0] > 1:
            for part in (model.up, model.down, model):
                fully_shard(part, mesh=mesh["dp"])
                part.set_force_sum_reduction_for_comms(True)
        own = tokens.chunk(shape[0])[mesh.get_local_rank("dp")]
        for name, value in train(model, own).items():
            torch.testing.assert_close(
                value, wanted[name], rtol=0, atol=1e-6, msg=lambda t, n=name, s=shape: f"{s} {n} {t}"
            )


def each_matrix_is_orthogonalised_once(rank: int, count: int) -> None:
    from arclight.optim import muon

    done, mesh = [], init_device_mesh("cpu", (count,))
    original = muon.newton_schulz
    muon.newton_schulz = lambda matrices, steps: done.append(len(matrices)) or original(matrices, steps)
    try:
        shared = {name: nn.Parameter(spread(value, mesh, (Shard(1),))) for name, value in numbers(1).items()}
        steps(Muon().build(shared.items()), shared, lambda tensor: spread(tensor, mesh, (Shard(1),)), 0, 1)
    finally:
        muon.newton_schulz = original
    everyones: list[Any] = [None] * count
    dist.all_gather_object(everyones, sum(done))
    assert sum(everyones) == 2 + 1 + 4 + 3
    assert max(everyones) <= {2: 5, 4: 3}[count]


def everything(rank: int, count: int, kinds: Sequence[str]) -> None:
    each_matrix_is_orthogonalised_once(rank, count)
    models_equal_one_process(rank, count)
    placements_equal_one_process(rank, count, kinds)


@pytest.mark.parametrize(
    ("count", "kinds"),
    [
        (2, ("mixed",)),
        pytest.param(2, tuple(SETTINGS), marks=pytest.mark.slow),
        pytest.param(4, ("normuon", "half", "mixed"), marks=pytest.mark.slow),
    ],
    ids=["2", "2-all", "4"],
)
def test_any_mesh_equals_one_process(tmp_path: Path, count: int, kinds: Sequence[str]) -> None:
    """Every placement with given gradients, then models under FSDP2, tensor parallelism and both; each rank its share of work."""
    run(count, tmp_path, everything, count, kinds)
