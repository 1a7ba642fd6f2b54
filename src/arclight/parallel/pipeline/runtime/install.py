"""Cut a module's model down to this rank's stages, and build the runner of its batches.

`PlanStrategy` and ``arclight plan --verify`` call `install` for modules that split batches themselves (`Runnable`), on all ranks at once.
The module's ``model`` is pruned in place (`layer_pruning`); names of what remains stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from arclight.parallel.pipeline.runtime.engine import Engine
from arclight.parallel.pipeline.runtime.runner import StepRunner
from arclight.parallel.pipeline.runtime.stage_program import PipelineTopology, StageProgram
from arclight.parallel.pipeline.schedule.orders import stages_of
from arclight.parallel.pipeline.schedule.table import check_pipeline, schedule_kind
from arclight.parallel.pipeline.splitting.layer_pruning import assign_layers, prune, pruned_view
from arclight.parallel.plan import Plan, PlanError
from arclight.parallel.step_protocol import lacking

if TYPE_CHECKING:
    from arclight.parallel.mesh import Mesh

ShardStage = Callable[[nn.Module, nn.Module], Any]
"""Function of a stage's model and the module that calls it; shards the model over the other dimensions of the mesh, in place."""


def exchanges_within_step(plan: Plan) -> bool:
    """Return True if replicas of a pipeline exchange weights or rows in each micro-batch.

    Others exchange once in a step.
    """
    return plan.ep > 1 or (plan.reshard_after_forward == "always" and plan.dp_shard * plan.cp > 1)


def install(module: Any, mesh: Mesh, shard: ShardStage, device: torch.device) -> StepRunner:
    """Keep and shard the stages of ``module.model`` that this process runs.

    ``module.runner`` then runs all stages.

    ``module`` is as `arclight.parallel.step_protocol.Runnable` says. All processes of ``mesh`` call this. The model may be on the meta
    device: only what is left is given memory (by ``shard``). Names do not change, and ``load_state_dict`` takes a
    whole state, of which it leaves alone what other stages have. Raises PlanError for what cannot be cut, before it is changed.
    """
    plan = mesh.plan
    check_pipeline(plan)
    if (missing := lacking(module)) is not None:
        raise PlanError(
            f"{type(module).__name__} has no {missing}, so its steps cannot be run by a pipeline: write them as "
            "arclight.parallel.step_protocol says, or use pp = 1"
        )
    outside = [name for name, _ in module.named_parameters() if not name.startswith("model.")]
    if outside:
        raise PlanError(
            f"{outside[0]} lies outside of {type(module).__name__}.model, so no stage has it: put it into the model"
        )
    if not hasattr(module.model, "initial") and any(parameter.is_meta for parameter in module.model.parameters()):
        raise PlanError(
            f"{type(module.model).__name__} does not declare how its parameters begin, so stages on the meta device would not begin "
            "as the whole does: give its modules an `initial`, or build it in memory"
        )
    kind, group = schedule_kind(plan.schedule), mesh.group("pp")
    topology = PipelineTopology(group, plan.pp * kind.stages_per_process, kind, device)
    cuts = assign_layers(module.model, topology.stages)
    own = stages_of(mesh.rank("pp"), plan.pp, topology.stages, kind.v_shaped)
    before = set(module.model.state_dict())
    prune(module.model, [cuts[number] for number in own])
    _skip_on_load(module.model, before - set(module.model.state_dict()))
    parts: dict[int, StageProgram] = {}
    for number in own:
        model = module.model if len(own) == 1 else pruned_view(module.model, cuts[number])
        parts[number] = StageProgram(model, module.loss if number == topology.stages - 1 else None, first=number == 0)
        shard(model, parts[number])
    data = mesh.loss_group if plan.data_parallel * plan.cp > 1 else None
    runner = StepRunner(
        Engine(parts, topology), plan.pieces, cp=mesh.grid["cp"] if plan.cp > 1 else None, data=data, in_step=exchanges_within_step(plan),
    )  # fmt: skip
    module.runner = runner
    return runner


def _skip_on_load(model: nn.Module, of_others: set[str]) -> None:
    """Make loading a state into ``model`` skip what other stages have."""

    def drop(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in of_others:
            state.pop(prefix + name, None)

    model.register_load_state_dict_pre_hook(drop)
