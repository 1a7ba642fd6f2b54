"""Everything that two real processes are needed for, in one run; each check prints its name, once per rank."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import arclight as al
from arclight.compat.lightning.collectives import TorchCollective
from arclight.compat.lightning.utilities import is_shared_filesystem
from arclight.fabric.strategies import DDPStrategy


def exchanges(fabric: al.Fabric) -> None:
    strategy, rank = fabric.strategy, fabric.global_rank
    mine = torch.tensor([rank + 1.0])
    assert strategy.reduce(mine, reduce_op="sum").item() == 3
    assert strategy.reduce(mine).item() == 1.5
    assert strategy.all_reduce(mine, reduce_op="max").item() == 2
    assert strategy.reduce("text") == "text"
    assert strategy.all_gather(mine).tolist() == [[1.0], [2.0]]
    assert strategy.broadcast({"rank": rank}, src=1) == {"rank": 1}
    assert strategy.reduce_boolean_decision(rank == 0, all=False)
    assert not strategy.reduce_boolean_decision(rank == 0)
    assert os.environ["OMP_NUM_THREADS"]


def groups(fabric: al.Fabric) -> None:
    own = TorchCollective().create_group(ranks=[1])
    everyone = TorchCollective().create_group()
    rank = fabric.global_rank
    assert everyone.world_size == 2
    assert everyone.rank == rank
    assert everyone.all_reduce(torch.tensor(rank + 1), op="product").item() == 2
    parts = [torch.zeros(2, dtype=torch.long) for _ in range(2)]
    assert torch.equal(torch.cat(everyone.all_gather(parts, torch.arange(2) + 2 * rank)), torch.arange(4))
    if rank == 1:
        assert own.world_size == 1
    own.barrier()
    swapped = everyone.all_gather_object([None, None], f"rank {rank}")
    assert swapped == ["rank 0", "rank 1"]
    own.teardown()
    everyone.teardown()
    assert torch.distributed.is_initialized()


def filesystem(fabric: al.Fabric) -> None:
    folder = Path(sys.argv[1])
    alone = folder / f"of-rank-{fabric.global_rank}"
    alone.mkdir()
    assert not is_shared_filesystem(fabric.strategy, alone)
    assert is_shared_filesystem(fabric.strategy, folder)
    assert is_shared_filesystem(fabric.strategy, "s3://bucket/key")
    with pytest.raises(FileNotFoundError, match="does not exist on every rank"):
        is_shared_filesystem(fabric.strategy, "not/there")
    fabric.barrier()
    assert sorted(path.name for path in folder.iterdir()) == ["of-rank-0", "of-rank-1"]


def gradients(fabric: al.Fabric, **options: Any) -> torch.Tensor:
    """The gradient that a strategy with these options leaves; rank r sees the input r + 1."""
    strategy = DDPStrategy(**options)
    strategy.attach(fabric.strategy.accelerator, [torch.device("cpu")] * 2, 1, fabric.strategy.cluster_environment)
    torch.manual_seed(0)
    model = strategy.setup_module(nn.Linear(1, 1, bias=False))
    model(torch.tensor([[fabric.global_rank + 1.0]])).sum().backward()
    (parameter,) = model.parameters()
    return parameter.grad


def comm_hooks(fabric: al.Fabric) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    calls = []

    def halved(state: list[int], bucket: Any) -> Any:
        state.append(bucket.index())
        return default_hooks.allreduce_hook(None, bucket).then(lambda future: future.value() / 2)

    halved.__annotations__ = {"bucket": torch.distributed.GradBucket}  # torch looks at it, and not as text

    assert gradients(fabric).item() == 1.5
    assert gradients(fabric, ddp_comm_state=calls, ddp_comm_hook=halved).item() == 0.75
    assert calls == [0]
    wrapped = gradients(
        fabric,
        ddp_comm_hook=default_hooks.allreduce_hook,
        ddp_comm_wrapper=default_hooks.fp16_compress_wrapper,
    )
    assert wrapped.item() == 1.5
    assert gradients(fabric, static_graph=True, gradient_as_bucket_view=True).item() == 1.5


def local_sgd(fabric: al.Fabric) -> None:
    """Every rank steps by itself after its first step; parameters are averaged every second step."""
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post

    own = torch.distributed.new_group([fabric.global_rank], use_local_synchronization=True)
    state = post.PostLocalSGDState(process_group=None, subgroup=own, start_localSGD_iter=1)
    strategy = DDPStrategy(ddp_comm_state=state, ddp_comm_hook=post.post_localSGD_hook, model_averaging_period=2)
    strategy.attach(fabric.strategy.accelerator, [torch.device("cpu")] * 2, 1, fabric.strategy.cluster_environment)
    torch.manual_seed(0)
    model = strategy.setup_module(nn.Linear(1, 1, bias=False))
    (weight,) = model.parameters()
    optimizer = strategy.setup_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    apart = []
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.tensor([[fabric.global_rank + 1.0]])).sum().backward()
        optimizer.step()
        both = fabric.all_gather(weight.detach())
        apart.append(not torch.equal(both[0], both[1]))
    assert True in apart
    assert False in apart[2:]
    with pytest.raises(ValueError, match="model averaging period is not provided"):
        DDPStrategy(ddp_comm_state=state).setup_optimizer(optimizer)


def main() -> None:
    fabric = al.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    for check in (exchanges, groups, filesystem, comm_hooks, local_sgd):
        check(fabric)
        print(f"passed {check.__name__}", flush=True)


if __name__ == "__main__":
    main()
