"""Two processes that hold a model's weights in shares read them from a folder and write them into another."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from arclight.text import from_hf, to_hf


def work(rank: int, port: str, target: str, folders: list[str]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for place, folder in enumerate(folders):
        whole = from_hf(folder)
        with torch.device("meta"):
            model = type(whole)(whole.config)
        if place == 0:  # matrices cut by columns and rows
            for block in model.layers.values():
                parallelize_module(
                    block, mesh, {"attention.wq": ColwiseParallel(), "attention.wo": RowwiseParallel(), "feed_forward.w2": RowwiseParallel()}
                )  # fmt: skip
        else:
            for block in model.layers.values():
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        model = from_hf(folder, model=model)
        expected = dict(whole.named_parameters())
        shares = 0
        for name, parameter in model.named_parameters():
            if isinstance(parameter, DTensor):
                assert parameter.to_local().numel() <= parameter.numel() // 2 + parameter[0].numel(), name
                share = distribute_tensor(expected[name].detach(), mesh, parameter.placements)
                assert torch.equal(share.to_local(), parameter.to_local()), name
                shares += 1
            else:
                assert torch.equal(parameter, expected[name]), name
        assert shares >= 3
        to_hf(model, Path(target) / Path(folder).name, max_shard_size="60KB")
        try:
            to_hf(model, Path(target) / Path(folder).name)
        except FileExistsError:  # on every process, or one would wait for the other
            print(f"passed {Path(folder).name}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes.spawn(work, args=(port, sys.argv[1], sys.argv[2:]), nprocs=2)
