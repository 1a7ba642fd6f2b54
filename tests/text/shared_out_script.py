"""Two processes that hold models' weights in shares: from a folder and into another; of models that see or draw, gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from arclight.fabric.distributed.sharding import full_tensor
from arclight.parallel import Mesh, Plan, PlanError, initialize, parallelize
from arclight.text import ByteTokenizer, build_model, from_hf, generate, to_hf
from arclight.text.diffusion.flux import Conditions, Flux, FluxConfig
from arclight.text.hf.read import Folder
from arclight.text.vision_language.siglip import Images, VisionConfig

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
        if PLANS[name].tp == 1:  # a cut sequence of one token is none
            answers = [generate(each, ByteTokenizer(), ["ab", "hello"], 5, temperature=0) for each in (whole, model)]
            assert answers[0] == answers[1], answers
        total = sum(parameter.numel() for parameter in whole.parameters())
        assert read < 0.56 * total, f"{name}: {read} of {total} numbers were read"
        to_hf(model, Path(target) / name, max_shard_size="60KB")
        try:
            to_hf(model, Path(target) / name)
        except FileExistsError:  # on every process, or one would wait for the other
            print(f"passed {name}", flush=True)
    pictures()
    dist.destroy_process_group()


def pictures() -> None:
    vision = VisionConfig(dim=48, layers=1, heads=4, hidden=80, patch=4, grid=6)
    fields: dict[str, Any] = {"layers": 1, "dim": 64, "heads": 4, "kv_heads": 2, "hidden": 96, "vision": vision}
    flux = FluxConfig(
        in_channels=8, text_dim=12, summary_dim=10, dim=32, heads=2, hidden=128, double_layers=1, single_layers=1, axes=(4, 6, 6)
    )  # fmt: skip
    random = torch.Generator().manual_seed(1)
    images = Images(torch.randn(8, 48, generator=random), [(2, 2)] * 2)
    tokens = torch.tensor([[1, 2, 2047, 2047, 2047, 2047, 5, 6]] * 2)
    noise, places = torch.randn(2, 6, 8, generator=random), torch.ones(6, 3)
    given = Conditions(torch.ones(2, 3, 12), torch.ones(2, 10))
    models: list[tuple[Callable[[], Any], Callable[[Any], Tensor]]] = [
        (lambda: build_model("llama3-vision-debug", **fields), lambda model: model(tokens, images=images)),
        (lambda: Flux(flux), lambda model: model(noise, places, torch.tensor([0.3, 0.5]), given)),
    ]
    for make, run in models:
        alone = make()
        initialize(alone, seed=3)
        with torch.device("meta"):
            shared = make()
        shared = parallelize(shared, Mesh(Plan(dp_shard=2)), seed=3)
        for model in (alone, shared):
            (run(model) - 1).square().mean().backward()
        for name, parameter in shared.named_parameters():
            gradient = alone.get_parameter(name).grad
            torch.testing.assert_close(full_tensor(parameter.grad), gradient, rtol=0, atol=1e-7, msg=name)
        with pytest.raises(PlanError, match="no sharding table names"):
            parallelize(make(), Mesh(Plan(tp=2)), seed=3)
    print("passed pictures", flush=True)


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2:])
