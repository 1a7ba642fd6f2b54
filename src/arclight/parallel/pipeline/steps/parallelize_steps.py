"""Parallelize a user's module over a plan: cut its steps into stages, shard each.

`PlanStrategy` (and so `Pipeline`) calls `parallelize_steps` once for a module, with the request's example or the first batch. In: a module
and its mesh; out: `PipelinedSteps` that run its steps in stages. All ranks must cut alike: rank 0 chooses.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from arclight.fabric.rank_zero import rank_zero_warn
from arclight.fabric.strategies.root_module import sum_on_gloo
from arclight.parallel.deterministic_init import declarations, materialize
from arclight.parallel.model.activation_checkpoint import checkpoint_block
from arclight.parallel.model.compile import compile_each
from arclight.parallel.model.fsdp import FsdpTypes, fsdp_options
from arclight.parallel.pipeline.runtime.consistency_check import PipelineFingerprint
from arclight.parallel.pipeline.runtime.engine import Engine
from arclight.parallel.pipeline.runtime.install import exchanges_within_step
from arclight.parallel.pipeline.runtime.runner import StepRunner
from arclight.parallel.pipeline.runtime.stage_program import PipelineTopology
from arclight.parallel.pipeline.runtime.tied_parameters import TiedParameters
from arclight.parallel.pipeline.schedule.table import schedule_kind
from arclight.parallel.pipeline.splitting.stage_tensors import meta_skeleton
from arclight.parallel.pipeline.steps.auto_schedule import PipelineChoice, PipelineRequest, choose_pipeline
from arclight.parallel.pipeline.steps.micro_batch import hides_targets, split_samples
from arclight.parallel.pipeline.steps.pipelined_steps import PipelinedSteps, StagePart, StepOptions
from arclight.parallel.pipeline.weights.initialize import initialize_stages
from arclight.parallel.plan import Plan, PlanError
from arclight.parallel.step_protocol import own_batch_weight

if TYPE_CHECKING:
    from arclight.parallel.mesh import Mesh


def only_stages(plan: Plan) -> bool:
    """Return True for plans that shard nothing within a stage but samples and weights."""
    return plan.cp == plan.tp == plan.ep == 1


def check_steps(plan: Plan, module: nn.Module) -> None:
    """Raise PlanError for a plan that a module's own steps cannot be run on."""
    for name in ("cp", "tp", "ep"):
        if getattr(plan, name) > 1:
            raise PlanError(
                f"{type(module).__name__} has steps of its own, which a pipeline cuts as they are, but cannot shard over {name} = "
                f"{getattr(plan, name)}: write them as arclight.parallel.step_protocol says, or use {name} = 1"
            )
    if plan.cpu_offload:
        raise PlanError("cpu_offload is not supported for pipelines of a module's own steps: leave it out")


def parallelize_steps(
    module: nn.Module,
    mesh: Mesh,
    device: torch.device,
    types: FsdpTypes,
    seed: int,
    example: tuple[Any, Any],
    request: PipelineRequest,
) -> PipelinedSteps:
    """Prune ``module`` to this process's stages, shard it, and return the pipelined steps.

    example: the step that decides where to cut, and a batch for it. All processes of ``mesh`` call this. Raises PlanError for what
    cannot be cut, before it is changed.
    """
    plan, (step, batch) = mesh.plan, example
    check_steps(plan, module)
    if hasattr(module, "scale_losses") and (request.reduction != "token_mean" or own_batch_weight(module) is None):
        raise PlanError(
            f"{type(module).__name__} adds losses in backward (scale_losses), which count beside means over what batch_weight counts alone: "
            'give it a batch_weight, and leave reduction = "token_mean"'
        )
    steps = PipelinedSteps(module, device)
    piece, _ = split_samples(module, batch, plan.pieces)[0]
    args = _arguments(step, piece)
    graph = steps.capture(step, args)
    samples = split_samples(module, batch, 1)[0][1]
    chosen = _choose_once(lambda: choose_pipeline(module, step, args, graph, samples, plan, request), device)
    kind = schedule_kind(chosen.schedule)
    topology = PipelineTopology(mesh.group("pp") if plan.pp > 1 else None, len(chosen.cuts), kind, device)
    if request.reduction == "token_mean" and chosen.micro_batches > 1 and hides_targets(module, batch):
        rank_zero_warn(
            "some targets of a batch are -100, and count nothing: the mean of micro-batches' means is not that of the batch. Give "
            f"{type(module).__name__} a batch_weight(batch) that says how many count, as (labels != -100).sum()"
        )
    options = StepOptions(chosen.micro_batches, request.evaluation_micro_batches, request.reduction)
    steps.cut(step, graph, chosen.cuts, topology, options)
    names = steps.names_of()
    own = {n: frozenset(name for name, stages in names.items() if n in stages) for n in topology.own}
    found = {n: StagePart(steps, n, own[n] if len(topology.own) > 1 else None) for n in topology.own}
    _shard_stages(steps, found, mesh, device, types, seed)
    named: dict[int, nn.Module] = {n: _NamedParameters(part) for n, part in found.items()}
    engine = Engine(dict(found), topology, functools.partial(_statement, steps, named, plan, chosen), steps.shared)
    steps.runner = StepRunner(
        engine, chosen.micro_batches, data=mesh.loss_group if plan.data_parallel > 1 else None,
        shared=TiedParameters(topology, named, steps.shared), in_step=exchanges_within_step(plan),
    )  # fmt: skip
    return steps


def _choose_once(choose: Callable[[], PipelineChoice], device: torch.device) -> PipelineChoice:
    """Call ``choose`` on rank 0 and broadcast its result.

    A prediction takes seconds of CPU, and ranks of a host share its cores. Raises what ``choose`` raises there, on the
    other ranks a PlanError with its message.
    """
    box: list[Any] = [None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            box = [choose()]
        except Exception as error:
            box, failure = [str(error)], error
    dist.broadcast_object_list(box, 0, device=device if device.type == "cuda" else None)
    if failure is not None:
        raise failure
    if isinstance(box[0], str):
        raise PlanError(box[0])
    chosen: PipelineChoice = box[0]
    return chosen


def _arguments(step: Any, piece: Any) -> tuple[Any, ...]:
    import inspect

    wanted = [
        p for p in inspect.signature(step).parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    required = [p for p in wanted if p.default is p.empty]
    several = any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(step).parameters.values())
    return (piece, 0) if len(wanted) > 1 or several else (piece,) if required or wanted else ()


def _shard_stages(
    steps: PipelinedSteps, found: dict[int, StagePart], mesh: Mesh, device: torch.device, types: FsdpTypes, seed: int
) -> None:
    """Allocate the module's present parameters on the device, and shard it."""
    module, plan = steps.module, mesh.plan
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.is_meta and tensor.device.type != device.type:
            tensor.data = tensor.data.to(device)
    _begin(steps, device, seed)
    units = steps.parts_here()
    for block in steps.blocks_here():
        checkpoint_block(block, plan.activation_checkpointing)
    compile_each(steps.blocks_here(), plan)
    if plan.data_parallel > 1:
        _shard(steps, found, units, mesh, types)
    materialize(module, device, seed, local=True)
    steps.send_shared()


def _begin(steps: PipelinedSteps, device: torch.device, seed: int) -> None:
    """Initialise what declares no distribution, by its modules' own methods.

    What declares one is drawn in shards later.
    """
    declared = declarations(steps.module)
    tensors = (*steps.module.named_parameters(), *steps.module.named_buffers())
    if any(tensor.is_meta and name not in declared for name, tensor in tensors):
        with steps.skeleton.whole():
            model = meta_skeleton(steps.module)
        initialize_stages(steps.module, model=model, device=device, seed=seed)


def _shard(
    steps: PipelinedSteps, found: dict[int, StagePart], units: Sequence[nn.Module], mesh: Mesh, types: FsdpTypes
) -> None:
    options = fsdp_options(mesh, types)
    names = Counter(parameter for _, parameter in steps.module.named_parameters(remove_duplicate=False))
    for parameter in steps.module.parameters():
        if sum(any(p is parameter for p in part.parameters()) for part in found.values()) > 1:
            raise PlanError(
                "a parameter is in two stages of one process, each of which would gather it and let it go: use replicas = shards = 1, or a "
                "schedule with one stage for each process"
            )
    for unit in units:  # what has several names is gathered with the stage
        own = list(unit.parameters())
        if own and all(names[parameter] == 1 for parameter in own):
            fully_shard(unit, **options)
    for part in found.values():
        others = {p for p in steps.module.parameters() if p not in set(part.parameters())}
        fully_shard(part, **(options | {"reshard_after_forward": False}), ignored_params=others)
        sum_on_gloo(part)


class _NamedParameters(nn.Module):
    """A stage's parameters under their names in the module."""

    def __init__(self, part: StagePart) -> None:
        super().__init__()
        self.__dict__["part"] = part

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        return ((name.removeprefix("inner."), p) for name, p in self.__dict__["part"].named_parameters())

    def get_parameter(self, target: str) -> nn.Parameter:
        found: nn.Parameter = self.__dict__["part"].inner.get_parameter(target)
        return found


def _statement(
    steps: PipelinedSteps, named: dict[int, nn.Module], plan: Plan, chosen: PipelineChoice
) -> PipelineFingerprint:
    facts = {"the plan": str(plan), "what was chosen": repr(chosen), "how steps are run": repr(steps.options)}
    return PipelineFingerprint.of(named, facts, steps.shared)
