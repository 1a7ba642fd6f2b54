"""Define `PlanStrategy`: run a parallel plan under a Trainer or Fabric.

`trainer.fabric.strategies` makes one of a `Plan` given as ``strategy=``, and `Pipeline` derives from it. It shards a module by
`parallelize`, `install` or `parallelize_steps` before the Trainer makes optimizers; under Fabric, existing optimizers get the sharded
parameters. Sharded checkpoints have the model's own names and open on any plan: keep that. A new dimension of a plan needs an axis in
`Mesh`, a check in `plan` and an estimate in ``planning``.
"""

from __future__ import annotations

import datetime
import functools
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from arclight.fabric.accelerators import Accelerator
from arclight.fabric.batches import map_tensors
from arclight.fabric.distributed import sharding
from arclight.fabric.distributed.dtensor import local_tensor
from arclight.fabric.environments import ClusterEnvironment
from arclight.fabric.precision import Float8Precision
from arclight.fabric.strategies.parallel import DEFAULT_TIMEOUT
from arclight.fabric.strategies.root_module import RoundsOwnWeights, StepRoot, reshard_without_backward
from arclight.fabric.strategies.sharded import ShardedStrategy
from arclight.parallel.layers.context_parallel import install_context_runner
from arclight.parallel.mesh import Mesh
from arclight.parallel.model.fsdp import FsdpTypes
from arclight.parallel.model.parallelize import check, parallelize, replicate
from arclight.parallel.pipeline.runtime.install import install
from arclight.parallel.pipeline.schedule.table import check_pipeline
from arclight.parallel.pipeline.splitting.layer_pruning import is_prunable
from arclight.parallel.pipeline.steps.auto_schedule import PipelineRequest
from arclight.parallel.pipeline.steps.parallelize_steps import (
    check_steps,
    parallelize_steps,
)
from arclight.parallel.pipeline.steps.pipelined_steps import PipelinedSteps
from arclight.parallel.plan import Plan, PlanError
from arclight.parallel.step_protocol import lacking


class PlanStrategy(ShardedStrategy):
    """Strategy of a `Plan`: starts processes, builds the mesh, shards the module over it.

    Processes may also join. Whatever in a module declares ``sharding`` is sharded by it; repeated blocks become units,
    and each step of the module is called as the outermost unit. A module made on the meta device (in ``configure_model``)
    gets memory for its shares only. Checkpoints hold original names and whole tensors, each process writes its shares,
    and they open on any plan. On processors as many processes start as the plan needs. If its replicas are
    independent, what a step agrees on (weights of batches, norms of gradients, gradients) is agreed on within each.
    ``sequence_length`` is checked against the plan before anything starts.
    """

    name = "plan"

    def __init__(
        self, plan: Plan, *, sequence_length: int | None = None, start_method: str = "popen",
        timeout: datetime.timedelta | None = DEFAULT_TIMEOUT, process_group_backend: str | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            start_method=start_method, timeout=timeout, process_group_backend=process_group_backend, **options
        )
        plan.check(sequence_length=sequence_length)
        if plan.pp > 1:
            check_pipeline(plan)
        self.plan, self.sequence_length = plan, sequence_length
        self.request = PipelineRequest()
        self._steps: dict[nn.Module, PipelinedSteps] = {}
        self._mesh: Mesh | None = None
        self._roots: dict[nn.Module, nn.Module] = {}

    @property
    def in_stages(self) -> bool:
        """Return True if a schedule takes micro-batches through stages."""
        return self.plan.pp > 1

    @property
    def mesh(self) -> Mesh:
        """The mesh. Raises RuntimeError before the processes have found each other."""
        if self._mesh is None:
            raise RuntimeError(
                "the processes of the plan have not started yet: ask for the mesh in configure_model or later"
            )
        return self._mesh

    def attach(
        self, accelerator: Accelerator, parallel_devices: list[torch.device], num_nodes: int, environment: ClusterEnvironment
    ) -> None:  # fmt: skip
        here, rest = divmod(self.plan.world_size, num_nodes)
        on_processors = accelerator.name() == "cpu" and not environment.creates_processes_externally
        if on_processors and len(parallel_devices) == 1 and not rest:
            parallel_devices = parallel_devices * here
        super().attach(accelerator, parallel_devices, num_nodes, environment)
        self.plan.check(world_size=self.world_size)

    def setup_environment(self) -> None:
        super().setup_environment()
        if self._mesh is None:
            self._mesh = Mesh(self.plan, self.root_device.type)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": self.plan.data_parallel, "rank": self.mesh.data_rank}

    @property
    def replica_mesh(self) -> Any:
        """The dp_replicate groups, if the plan lets them train independently."""
        return self.mesh.dense["dp_replicate"] if self.plan.independent_replicas else None

    def replicate_mesh(self, mesh: Any) -> Any:
        return self.mesh.replicate_mesh(mesh)

    @property
    def step_group(self) -> Any:
        return self.mesh.replica

    @property
    def evaluates_together(self) -> bool:  # type: ignore[override]
        return self.in_stages or not self.plan.only_replicates

    @property
    def contributes_logs(self) -> bool:  # type: ignore[override]
        """True on one rank of each ``tp`` or ``cp`` group and pipeline.

        All of their ranks log the same values.
        """
        return all(self.mesh.rank(dimension) == 0 for dimension in ("pp", "cp", "tp"))

    # -- model -----------------------------------------------------------------------------------------------------

    def setup_module(self, module: nn.Module) -> nn.Module:
        return self._shard(module, whole=True)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        if self.in_stages:
            raise PlanError(
                "stages of a pipeline have other parameters than the whole: make optimizers after setup_module"
            )
        before = dict(module.named_parameters())
        root = self._shard(module, whole=True)
        after = dict(module.named_parameters())
        for optimizer in optimizers:
            sharding.replace_parameters(optimizer, {parameter: after[name] for name, parameter in before.items()})
        return root, [self.setup_optimizer(optimizer) for optimizer in optimizers], scheduler

    def place(self, module: nn.Module, whole_step: bool = True) -> None:
        if module not in self._roots:
            self._shard(module, whole_step)

    def _shard(self, module: nn.Module, whole: bool) -> nn.Module:
        """Shard ``module`` in place; return the module to call."""
        if not whole and (self.in_stages or not self.plan.only_replicates):
            raise PlanError(
                "automatic_optimization=False hides from the plan what a step calls: use strategy='fsdp', or let the Trainer step"
            )
        own_steps = self.in_stages and self._cuts_steps(module)
        if own_steps:
            check_steps(self.plan, module)
        else:
            check(module, self.plan, self.sequence_length)
        if self.plan.float8 != "none" and isinstance(self.precision, Float8Precision):
            raise PlanError(
                f'precision="float8" and the plan\'s float8 = "{self.plan.float8}" are two ways to one thing: choose one'
            )
        sharding.copy_from_rank_zero(module, self.device)
        seed = self.broadcast(torch.initial_seed() % 2**32)
        options: dict[str, Any] = {"device": self.device, "types": self.types(module), "seed": seed}
        if own_steps:
            root = self._cut_steps(module, options)
        elif self.in_stages:
            root = self._shard_stages(module, options)
        else:
            if self.plan.cp > 1:
                install_context_runner(module, self.mesh.grid["cp"])
            root = parallelize(module, self.mesh, root=StepRoot(module, shared=whole), **options)
            root.register_forward_hook(reshard_without_backward)
        sharding.accept_full_weights(module)
        self._roots[module] = root
        return root

    def _shard_stages(self, module: nn.Module, options: dict[str, Any]) -> nn.Module:
        """Shard this process's stages of the module's model.

        A schedule calls them, so that nothing need be called around a step.
        """
        self._refuse_scaler()
        install(module, self.mesh, lambda model, part: parallelize(model, self.mesh, root=part, **options), self.device)
        return StepRoot(module, shared=False)

    def _cuts_steps(self, module: nn.Module) -> bool:
        """Return True if the module's steps are split into stages, instead of pruning its model.

        This is for modules that are not written for runners, and for models that deletion cannot cut (tied embeddings).
        """
        return not (lacking(module) is None and is_prunable(module.get_submodule("model")))

    def _cut_steps(self, module: nn.Module, options: dict[str, Any]) -> nn.Module:
        """Cut the module's own steps into stages: it keeps what this process's have."""
        self._refuse_scaler()
        if self.example is None:
            raise PlanError(
                f"{type(module).__name__} has steps of its own, which a Trainer runs: a loop by hand needs a module that is written as "
                "arclight.parallel.step_protocol says, or pp = 1"
            )
        self._draw_alike()
        self._steps[module] = parallelize_steps(
            module, self.mesh, example=self.example(self.request.example), request=self.request, **options
        )
        return StepRoot(module, shared=False)

    def _refuse_scaler(self) -> None:
        if self.precision.scaler is not None:
            raise PlanError(
                "a pipeline computes gradients before the scale of 16-bit losses is known: use precision bf16-mixed or 32, or pp = 1"
            )

    def _draw_alike(self) -> None:
        """Synchronise random states in a pipeline, for draws outside of the model's parts."""
        if (group := self.mesh.group("pp")) is not None and self.plan.pp > 1:
            state = torch.get_rng_state().to(self.device)
            dist.broadcast(state, dist.get_global_rank(group, 0), group=group)
            torch.set_rng_state(state.cpu())

    def types(self, module: nn.Module) -> FsdpTypes:
        """Choose FSDP's types: parameters are gathered in the compute type.

        Those of a ``module`` that rounds them are gathered as they are stored. Gradients of half types are summed in float32.
        """
        compute = getattr(self.precision, "compute_dtype", None)
        half = (torch.float16, torch.bfloat16)
        if compute == torch.bfloat16 and not any(isinstance(part, RoundsOwnWeights) for part in module.modules()):
            return FsdpTypes(compute, torch.float32)
        return FsdpTypes(None, torch.float32 if self.precision.dtype in half else None)

    def wrap_step(self, module: nn.Module, step: Callable[..., Any]) -> Callable[..., Any]:
        if module in self._steps:
            return self._steps[module].bound(step)
        if self.plan.only_replicates:  # other parameters may train than when the module was sharded
            root = self._roots[module]
            bare = root.module if isinstance(root, DistributedDataParallel) else root
            self._roots[module] = replicate(bare, self.plan)
        return partial(self._roots[module], _step=step)

    def wrap_evaluation_step(self, module: nn.Module, step: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an evaluation step; unwrapped if each process has the whole model.

        Nothing is exchanged then, and numbers of batches may differ.
        """
        return step if self.plan.only_replicates and not self.in_stages else self.wrap_step(module, step)

    def sync_module_attributes(self, module: nn.Module) -> None:
        if module in self._steps:
            self._steps[module].sync_attributes()

    def root_of(self, module: nn.Module) -> nn.Module:
        return self._roots.get(module, module)

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[Any]:
        root = self.root_of(module)
        if isinstance(root, DistributedDataParallel):
            return root.no_sync() if enabled else nullcontext()
        return super().no_backward_sync(module, enabled)

    def copy_from_rank_zero(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy from the first of the processes that have the same layers; shares stay."""
        if (group := self.mesh.loss_group) is not None:
            for tensor in tensors:
                if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor):
                    dist.broadcast(tensor, dist.get_global_rank(group, 0), group=group)

    def average_gradients(self, module: nn.Module) -> None:
        """Do nothing: backward has averaged gradients."""

    def unwrap(self, module: nn.Module) -> nn.Module:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        return module.module if isinstance(module, StepRoot) else module

    def portable(self, tree: Any) -> Any:
        """Gather a tree on rank 0, what only other stages have included."""
        if self.plan.pp == 1:
            return super().portable(tree)
        tree = self._of_last_stage(tree)
        first = all(self.mesh.rank(dimension) == 0 for dimension in ("dp_replicate", "dp_shard", "cp", "tp"))
        whole = sharding.gather_tree(tree, keep=first)
        if not first:
            return whole
        stages = self._from_all_stages(whole)
        return whole if stages is None else functools.reduce(_united, stages)

    def _from_all_stages(self, tree: Any) -> list[Any] | None:
        """Gather the trees of all stages on rank 0; None elsewhere.

        Each tensor is a message: one is on a device at a time.
        """
        group = self.mesh.group("pp")
        own: list[torch.Tensor] = []

        def outline(tensor: torch.Tensor) -> torch.Tensor:
            own.append(tensor)
            return tensor.detach().to("meta")

        outlines: list[Any] | None = [None] * self.plan.pp if self.is_global_zero else None
        dist.gather_object(map_tensors(tree, outline), outlines, dst=0, group=group)
        if outlines is None:
            for tensor in filter(torch.Tensor.numel, own):
                dist.send(_bytes(tensor.detach().to(self.device)), 0, group=group)
            return None

        def arrived(tensor: torch.Tensor, source: int) -> torch.Tensor:
            room = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
            if room.numel():
                dist.recv(_bytes(room), source, group=group)
            return room.cpu()

        sources = [dist.get_global_rank(group, place) for place in range(1, self.plan.pp)]
        others = zip(outlines[1:], sources, strict=True)
        return [tree, *(map_tensors(other, functools.partial(arrived, source=source)) for other, source in others)]

    def _of_last_stage(self, tree: Any) -> Any:
        """Return ``tree`` without stale values of tensors that belong to no part of a model.

        The last stage's are the newest of those.
        """
        names = {name for steps in self._steps.values() if not steps.last for name in steps.everybodys}
        return _without(tree, names) if names else tree

    def clip_norm(
        self, parameters: list[torch.Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip gradients by the norm over all processes, each parameter once.

        It takes one exchange of one number.
        """
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        copies = {p for steps in self._steps.values() for p in steps.counted_by_others}
        counted = [p.grad for p in parameters if p.grad is not None and p not in copies]
        total = self.total_norm(counted, norm_type)
        sharding.scale_to_norm(gradients, total, max_norm, error_if_nonfinite)
        return total

    @torch.no_grad()
    def total_norm(self, gradients: Iterable[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
        """Return the gradient norm over all processes, or those of an independent replica.

        Gradients may be sharded over any meshes. Every process calls this.
        """
        holders = (
            self.plan.world_size // self.plan.pp // (self.plan.dp_replicate if self.plan.independent_replicas else 1)
        )
        copies: dict[int, list[torch.Tensor]] = {}
        for gradient in gradients:
            parts = 1
            if isinstance(gradient, DTensor):
                sizes = zip(gradient.placements, gradient.device_mesh.shape, strict=True)
                parts = math.prod(size for placement, size in sizes if not placement.is_replicate())
            copies.setdefault(holders // parts, []).append(local_tensor(gradient))
        norms = {count: nn.utils.get_total_norm(parts, norm_type).to(self.device) for count, parts in copies.items()}
        nothing = torch.zeros((), device=self.device)
        if self.in_stages:  # of which one may have gradients of other types than another, or none
            norms, nothing = {count: norm.double() for count, norm in norms.items()}, nothing.double()
        if math.isinf(norm_type):
            total = torch.stack([nothing, *norms.values()]).max()
            dist.all_reduce(total, dist.ReduceOp.MAX, group=self.step_group)
            return total
        total = nothing
        for count, norm in norms.items():
            total = total + norm**norm_type / count
        dist.all_reduce(total, group=self.step_group)
        return total ** (1 / norm_type)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View ``tensor`` as bytes, which every back end sends."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _without(tree: Any, names: set[str]) -> Any:
    """Return ``tree`` without tensors under ``names``."""
    if isinstance(tree, dict):
        kept = {k: v for k, v in tree.items() if not (k in names and isinstance(v, torch.Tensor))}
        return type(tree)({k: _without(v, names) for k, v in kept.items()}) if type(tree) is dict else kept
    return [_without(member, names) for member in tree] if type(tree) is list else tree


def _united(one: Any, other: Any) -> Any:
    """Merge two trees recursively; ``one`` wins if both have values."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one | {key: _united(one[key], value) if key in one else value for key, value in other.items()}
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [_united(mine, theirs) for mine, theirs in zip(one, other, strict=True)]
    return one
