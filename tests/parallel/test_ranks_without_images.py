"""A rank whose batch has no image, beside others that have some."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parallel.pipeline.runtime.test_failures import PROCESSES, everyone
from torch import Tensor
from torch.nn.functional import cross_entropy

from arclight.fabric.distributed.sharding import full_tensor
from arclight.parallel import Plan, initialize, parallelize
from arclight.text import build_model
from arclight.text.vision_language.siglip import Images, VisionConfig


def sees() -> Any:
    vision = VisionConfig(dim=16, layers=2, heads=2, hidden=24, patch=4, grid=4)
    sizes = {"vocab_size": 64, "layers": 2, "dim": 32, "heads": 4, "kv_heads": 2, "hidden": 48, "image_token": 63}
    model = build_model("llama3-vision-debug", **sizes, vision=vision).double()
    initialize(model, 3)
    return model


def loss_of(model: Any, rank: int) -> Tensor:
    """Of a text, with an image of two patches on even ranks."""
    tokens = torch.arange(8)[None] + rank
    images = None
    if rank % 2 == 0:
        tokens[0, 2:4] = 63
        images = Images(torch.linspace(-1, 1, 2 * 48).view(2, 48).double(), [(1, 2)])
    return cross_entropy(model(tokens, images=images)[0, :-1], tokens[0, 1:])


def same_gradients(rank: int, plan: Plan) -> None:
    whole = sees()
    sum(loss_of(whole, one) for one in range(PROCESSES)).div(PROCESSES).backward()  # type: ignore[union-attr]
    model = parallelize(sees(), plan)
    loss_of(model, rank).backward()
    for (name, own), wanted in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(full_tensor(own.grad), wanted.grad, rtol=0, atol=1e-12, msg=name)
    with torch.no_grad():  # nor does anybody wait where nothing is learned
        loss_of(model, rank)


@pytest.mark.parametrize(
    "plan", [pytest.param(Plan(dp_shard=PROCESSES), marks=pytest.mark.slow), Plan(dp_replicate=PROCESSES)], ids=str
)
def test_a_rank_without_images_holds_nobody_up(plan: Plan, tmp_path: Path) -> None:
    said = everyone(tmp_path, same_gradients, plan, limit=60)
    assert len(said) == PROCESSES
    assert all(text.endswith("finished") for text in said.values()), said
