"""Two processes that hold a model's weights in shares read them from a folder and write them into another."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from arclight.parallel import Mesh, Plan, parallelize
from arclight.text import from_hf, to_hf
from arclight.text.interchange.safetensors_folder import Folder

PLANS = {
    "llama": Plan(tp=2), "gpt2": Plan(dp_shard=2), "qwen3-tied": Plan(dp_shard=2), "deepseek-v3": Plan(dp_shard=2, ep=2)
}  # fmt: skip


def work(target: str, folders: list[str]) -> None:
    read = 0
    plainly = Folder.read

    def counted(self: Folder, name: str, bounds: tuple[tuple[int, int], ...]) -> Tensor:
        nonlocal read
        part = plainly(self, name, bounds)
        read += part.numel()
        return part

    Folder.read = counted  # type: ignore[method-assign]
    dist.init_process_group("gloo")
    for folder in folders:
        name = Path(folder).name
        whole = from_hf(folder)
        with torch.device("meta"):
            model = type(whole)(whole.config)
        model = parallelize(model, Mesh(PLANS[name]), seed=1)
        read = 0
        model = from_hf(folder, model=model)
        expected = dict(whole.named_parameters())
        for own, parameter in model.named_parameters():
            value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            assert torch.equal(value, expected[own]), own
        total = sum(parameter.numel() for parameter in whole.parameters())
        assert read < 0.56 * total, f"{name}: {read} of {total} numbers were read"
        to_hf(model, Path(target) / name, max_shard_size="60KB")
        try:
            to_hf(model, Path(target) / name)
        except FileExistsError:  # on every process, or one would wait for the other
            print(f"passed {name}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2:])
