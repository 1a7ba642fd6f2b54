"""Experts shared out over all processes: gradients, counts and biases beside one process; each check prints its name, once per rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from arclight.fabric.distributed.sharding import total_norm
from arclight.parallel import Mesh, Plan, initialize, parallelize
from arclight.parallel.layers.expert_parallel import shard_experts
from arclight.text import build_model
from arclight.text.model.balance import update_expert_bias, weigh_balance_loss
from arclight.text.model.moe import MoE, MoEConfig

CONFIG = MoEConfig(
    experts=8, top_k=2, hidden=24, shared=1, bias_rate=1e-2, score="sigmoid", route_norm=True, groups=4, top_groups=2
)
TOKENS = 64


def layer() -> MoE:
    torch.manual_seed(0)
    return MoE(CONFIG, 16, 0.15, 0.15)


def tokens() -> Tensor:
    return torch.randn(1, TOKENS, 16, generator=torch.Generator().manual_seed(1))


def bounds(rank: int, size: int) -> tuple[int, int]:
    """Unequal parts: the first process has one token, the last what is left."""
    ends = [0, *(1 + 9 * number for number in range(size - 1)), TOKENS]
    return ends[rank], ends[rank + 1]


def pass_through(moe: MoE, x: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """Outputs and the gradient of ``x`` of a loss per token, multiplied by ``weight``."""
    x = x.clone().requires_grad_()
    y = moe(x)
    (y.square().sum() * weight / TOKENS).backward()
    assert x.grad is not None
    return y.detach(), x.grad


def compare(moe: MoE, part: tuple[int, int], run: Callable[..., tuple[Tensor, Tensor]] = pass_through) -> None:
    """Each process scales its loss so that the average over processes is the whole; expert gradients must come out right by themselves."""
    alone, size = layer(), dist.get_world_size()
    y, d_x = pass_through(alone, tokens(), 1.0)
    own_y, own_d_x = run(moe, tokens()[:, slice(*part)], float(size))
    torch.testing.assert_close(own_y, y[:, slice(*part)], rtol=0, atol=1e-6)
    torch.testing.assert_close(own_d_x / size, d_x[:, slice(*part)], rtol=0, atol=1e-7)
    reference = dict(alone.named_parameters())
    for name, parameter in moe.named_parameters():
        grad = parameter.grad
        assert grad is not None, name
        if isinstance(grad, DTensor):
            grad = grad.full_tensor()
        else:
            dist.all_reduce(grad)
            grad = grad / size
        expected = reference[name].grad
        assert expected is not None
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(grad, expected, rtol=0, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")
    compare_balance(moe, alone)


def compare_balance(moe: MoE, alone: MoE) -> None:
    counts = moe.router.counts.clone()
    dist.all_reduce(counts)
    assert torch.equal(counts, alone.router.counts)
    assert counts.sum() == TOKENS * CONFIG.top_k
    statistics, expected = update_expert_bias(moe, dist.group.WORLD), update_expert_bias(alone)
    assert not statistics.pop("dropped", torch.zeros(()))
    assert statistics == expected
    assert moe.router.expert_bias is not None
    assert alone.router.expert_bias is not None
    assert torch.equal(moe.router.expert_bias, alone.router.expert_bias)
    assert moe.router.expert_bias.abs().max() > 0
    assert not moe.router.counts.any()


def whole_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))


def uneven() -> None:
    moe = layer()
    shard_experts(moe, whole_mesh())
    assert isinstance(moe.experts.w1, DTensor)
    assert moe.experts.w1.to_local().shape[0] == CONFIG.experts // dist.get_world_size()
    compare(moe, bounds(dist.get_rank(), dist.get_world_size()))


def all_on_one() -> None:
    moe = layer()
    shard_experts(moe, whole_mesh())
    compare(moe, (0, TOKENS) if dist.get_rank() == 0 else (TOKENS, TOKENS))


def fixed_sizes() -> None:
    moe = layer()
    shard_experts(moe, whole_mesh(), capacity=TOKENS * CONFIG.top_k)
    compare(moe, bounds(dist.get_rank(), dist.get_world_size()))
    assert float(moe.dispatcher.dropped) == 0.0  # type: ignore[attr-defined]
    with torch.no_grad():
        moe(tokens()[:, :0])
    assert float(moe.dispatcher.dropped) == 0.0  # type: ignore[attr-defined]
    lopsided = layer()
    shard_experts(lopsided, whole_mesh(), capacity=TOKENS * CONFIG.top_k)
    compare(lopsided, (0, TOKENS) if dist.get_rank() == 0 else (TOKENS, TOKENS))


def too_small() -> None:
    """Check that tokens beyond the capacity skip their experts, and keep the shared ones."""
    moe, alone, capacity = layer(), layer(), 3
    shard_experts(moe, whole_mesh(), capacity=capacity)
    x = tokens()[:, :32] + 0.1 * dist.get_rank()
    y, d_x = pass_through(moe, x, 1.0)
    _, chosen, counts = alone.router(x)
    size = dist.get_world_size()
    per_process = counts.view(size, -1).sum(1)
    dropped = (per_process - capacity).clamp(min=0).sum() / counts.sum()
    torch.testing.assert_close(moe.dispatcher.dropped, dropped.float())  # type: ignore[attr-defined]
    assert 0 < dropped < 1
    everyones = dropped.float()
    dist.all_reduce(everyones)
    torch.testing.assert_close(update_expert_bias(moe, dist.group.WORLD)["dropped"], everyones / size)
    assert "dropped" not in update_expert_bias(alone)
    assert torch.isfinite(d_x).all()
    kept = torch.zeros_like(chosen, dtype=torch.bool)
    seen: dict[int, int] = {}
    for number in chosen.flatten().argsort(stable=True).tolist():
        peer = int(chosen.flatten()[number]) // (CONFIG.experts // size)
        seen[peer] = seen.get(peer, 0) + 1
        kept.view(-1)[number] = seen[peer] <= capacity
    lost = ~kept.any(1)
    assert alone.shared is not None
    torch.testing.assert_close(y[0, lost], alone.shared(x)[0, lost], rtol=0, atol=1e-6)
    torch.testing.assert_close(y[0, kept.all(1)], alone(x)[0, kept.all(1)], rtol=0, atol=1e-6)


def recomputed() -> None:
    moe = layer()
    shard_experts(moe, whole_mesh())

    def run(module: MoE, x: Tensor, weight: float) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        y = checkpoint(module, x, use_reentrant=False)
        (y.square().sum() * weight / TOKENS).backward()
        assert x.grad is not None
        return y.detach(), x.grad

    compare(moe, bounds(dist.get_rank(), dist.get_world_size()), run)


def beside_fsdp() -> None:
    size = dist.get_world_size()
    if size < 4:
        return
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("efsdp", "ep"))
    moe = copy.deepcopy(layer())
    shard_experts(moe, mesh["ep"])
    sharded: Any = fully_shard(moe.experts, mesh=mesh["efsdp"], shard_placement_fn=lambda _: Shard(1))
    sharded.set_force_sum_reduction_for_comms(True)
    assert moe.experts.w1.placements == (Shard(1), Shard(0))  # type: ignore[attr-defined]
    compare(moe, bounds(dist.get_rank(), size))


def whole_model() -> None:
    """Three steps of a model on a plan: losses, balancing biases and the gradient norm are those of one process."""
    size = dist.get_world_size()
    tokens = torch.randint(0, 96, (8, 33), generator=torch.Generator().manual_seed(0))
    found = []
    for plan in (None, Plan(dp_shard=size, ep=2)):
        model: Any = build_model("deepseek-v3-debug", layers=2, vocab_size=96, dim=64, hidden=64)
        mesh = None if plan is None else Mesh(plan)
        if mesh is None:
            initialize(model, 3)
        else:
            initialize(model, 3)
            model = parallelize(model, mesh)
        own = tokens if mesh is None else tokens.chunk(size)[mesh.data_rank]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
        for _ in range(3):
            loss = cross_entropy(model(own[:, :-1]).flatten(0, 1), own[:, 1:].flatten())
            weigh_balance_loss(loss, model).backward()
            norm = total_norm([p.grad for p in model.parameters() if p.grad is not None], 2.0)
            statistics = update_expert_bias(model, None if mesh is None else mesh.loss_group)
            optimizer.step()
            optimizer.zero_grad()
            value = loss.detach().clone()
            if mesh is not None:
                dist.all_reduce(value)
            bias = model.layers["1"].feed_forward.router.expert_bias.clone()
            found.append((value / (1 if mesh is None else size), norm, bias, *statistics.values()))
    torch.testing.assert_close(found[:3], found[3:], rtol=1e-4, atol=1e-6)
    assert found[0][0] - found[2][0] > 0.1


def dropped_alike() -> None:
    """Processes that read the same tokens drop the same experts of each, wherever their random numbers are; others drop others."""
    rank, chosen = dist.get_rank(), []
    model: Any = build_model("sigma-moe-debug", layers=1, vocab_size=96, dim=64, moe={"expert_dropout": 0.5})
    initialize(model, 3)
    mesh = Mesh(Plan(tp=2, dp_replicate=dist.get_world_size() // 2))
    part: Any = parallelize(model, mesh)
    model.layers["0"].feed_forward.router.register_forward_hook(lambda _, __, out: chosen.append(out[1]))
    torch.manual_seed(rank)
    part(torch.randint(0, 96, (2, 32), generator=torch.Generator().manual_seed(0))).sum().backward()
    everyones = [torch.empty_like(chosen[0]) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, chosen[0])
    for first, second in zip(everyones[::2], everyones[1::2], strict=True):
        assert torch.equal(first, second)
    assert len(everyones) == 2 or not torch.equal(everyones[0], everyones[2])


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for check in (uneven, all_on_one, fixed_sizes, too_small, recomputed, beside_fsdp, whole_model, dropped_alike):
        check()
        print(f"passed {check.__name__}", flush=True)
    dist.destroy_process_group()
