"""On two processes: gradients of 8-bit products are as near to those of float32 as in one process; each case prints its name."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from arclight.fabric.distributed.sharding import full_tensor
from arclight.parallel import Mesh, Plan, initialize, parallelize
from arclight.parallel.model.float8 import convert_to_float8
from arclight.text import build_model


def build() -> nn.Module:
    model = build_model("llama3-debug", vocab_size=64, dim=64, layers=2, heads=4, kv_heads=4, hidden=128)
    initialize(model, 3)
    return model


def gradients(model: nn.Module, tokens: Tensor) -> Tensor:
    """All gradients, whole, in one vector."""
    logits = model(tokens[:, :-1])
    logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
    cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return torch.cat([full_tensor(parameter.grad).flatten() for parameter in model.parameters()])


def check(plan: Plan) -> None:
    tokens = torch.randint(0, 64, (8, 65), generator=torch.Generator().manual_seed(5))
    exact = gradients(build(), tokens)
    alone = build()
    names = convert_to_float8(alone, Plan(float8=plan.float8, float8_smallest=64), torch.device("cpu"))
    assert len(names) == 14
    mesh = Mesh(plan)
    model = parallelize(build(), mesh)
    share = tokens.chunk(plan.data_parallel)[mesh.data_rank]
    single, spread = (
        float((found - exact).norm() / exact.norm()) for found in (gradients(alone, tokens), gradients(model, share))
    )
    assert 0.005 < single < 0.1, single
    assert 0.005 < spread < 1.5 * single, (single, spread)
    print(f"passed {plan.float8} {plan}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for kind in ("tensorwise", "rowwise", "mxfp8"):
        check(Plan(dp_shard=2, float8=kind, float8_smallest=64))
        check(Plan(tp=2, float8=kind, float8_smallest=64))
        check(Plan(tp=2, float8=kind, float8_smallest=64, activation_checkpointing="selective"))
    dist.destroy_process_group()
