"""Apply fully sharded data parallelism (FSDP2) over the mesh of a plan.

`parallelize` shards a model by `shard_parameters` after compilation, `parallelize_steps` a stage's parts by `fsdp_options`. A module and a
`Mesh` come in; parameters become DTensors, in place. Names stay, so that checkpoints open under other plans. `planning.fsdp_shards`
predicts the shards: change both.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from arclight.fabric.strategies.root_module import sum_on_gloo
from arclight.parallel.blocks import embeddings, repeated_blocks
from arclight.parallel.layers.expert_parallel import fsdp_placement
from arclight.parallel.mesh import Mesh
from arclight.parallel.plan import PlanError


@dataclass(frozen=True)
class FsdpTypes:
    """Dtypes in which parameters are gathered and gradients are summed; None: their own."""

    parameters: torch.dtype | None = None
    gradients: torch.dtype | None = None


def shard_parameters(
    model: nn.Module, mesh: Mesh, types: FsdpTypes | None = None, root: nn.Module | None = None
) -> None:
    """Shard all parameters of ``model`` by FSDP: blocks, then embeddings, then ``root``.

    It is done in place, and ``root`` is a unit with all other parameters.
    root: the outermost module that is called, ``model`` by default. Its own parameters (the last norm, the output) stay gathered
    from its forward to the end of its backward, so that a loss inside it may use the output's weights.
    """
    root = root if root is not None else model
    options = fsdp_options(mesh, types or FsdpTypes())
    if mesh.sparse is not None:
        options["shard_placement_fn"] = fsdp_placement(model, mesh)
    units = [block for _, block in repeated_blocks(model)]
    for unit in units:
        fully_shard(unit, **options)
    for embedding in embeddings(model):
        fully_shard(embedding, **options)
    fully_shard(root, **(options | {"reshard_after_forward": False}))
    if mesh.device_type == "cuda":
        _prefetch(units)
    sum_on_gloo(root)


def check_tied(model: nn.Module) -> None:
    """Raise PlanError for a parameter in two FSDP units.

    Each of them would gather it and free it.
    """
    unit_of = {part: name for name, block in repeated_blocks(model) for part in block.modules()}
    first: dict[nn.Parameter, tuple[str, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        unit = unit_of.get(model.get_submodule(name.rpartition(".")[0]), "")
        other, known = first.setdefault(parameter, (unit, name))
        if other != unit:
            raise PlanError(
                f"{known} and {name} are one parameter in two parts of the model that are gathered one by one: hold it in one module "
                "that both call, outside of the repeated blocks, or use dp_replicate alone"
            )


def fsdp_options(mesh: Mesh, types: FsdpTypes) -> dict[str, Any]:
    """Return the arguments of ``fully_shard`` for a unit."""
    plan = mesh.plan
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if plan.cpu_offload else OffloadPolicy()
    reshard = plan.reshard_after_forward == "always" or (plan.reshard_after_forward == "default" and plan.pp == 1)
    return {
        "mesh": mesh.fsdp,
        "mp_policy": MixedPrecisionPolicy(types.parameters, types.gradients, cast_forward_inputs=False),
        "offload_policy": offload,
        "reshard_after_forward": reshard,
    }


def _prefetch(units: list[nn.Module]) -> None:
    """Gather the next unit while one computes, in the order in which they run."""
    for one, following in pairwise(units):
        assert isinstance(one, FSDPModule)
        assert isinstance(following, FSDPModule)
        one.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([one])
