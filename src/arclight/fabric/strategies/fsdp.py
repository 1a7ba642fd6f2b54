"""Run fully sharded data parallel (FSDP2): shard weights, gradients and moments.

torch's ``fully_shard``: the weights of one unit are gathered for its forward and backward, then resharded. ``strategy="fsdp"`` and
``"fsdp_cpu_offload"`` make one (`strategy_registry`), or users do. Arguments are Lightning's and stay. Checkpoints open on any number of
ranks, and in one process.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from arclight.fabric.strategies.parallel import DEFAULT_TIMEOUT
from arclight.fabric.strategies.root_module import (
    StepRoot,
    outermost_submodules,
    reshard_without_backward,
    sum_on_gloo,
    whole_units,
)
from arclight.fabric.strategies.sharded import ShardedStrategy

Policy = Any
"""Which modules: a set of classes, a least number of parameters, one of torch's wrap policies, or such a function."""

_ALWAYS = {"use_orig_params": True, "limit_all_gathers": True, "sync_module_states": True}
"""Arguments of torch's first FSDP whose only possible values in FSDP2 are these."""

_INSTEAD = {
    "backward_prefetch": "FSDP2 prefetches by itself; call set_modules_to_backward_prefetch on a unit to choose",
    "forward_prefetch": "FSDP2 prefetches by itself; call set_modules_to_forward_prefetch on a unit to choose",
    "process_group": "give device_mesh",
    "param_init_fn": "give the modules a reset_parameters()",
    "device_id": "the accelerator and devices say it",
    "ignored_modules": "give ignored_params, a set of parameters",
    "ignored_states": "give ignored_params, a set of parameters",
}


class FSDPStrategy(ShardedStrategy):
    """torch's FSDP2 with Lightning's arguments.

    ``auto_wrap_policy`` says which modules are units of their own, gathered and resharded one by one: a set of classes, a
    least number of parameters, or one of torch's policies; None makes the whole model one unit.
    ``activation_checkpointing_policy`` says in the same way whose activations are recomputed in backward.
    ``sharding_strategy``: ``FULL_SHARD`` reshards weights after forward, ``SHARD_GRAD_OP`` keeps them until after backward,
    ``HYBRID_SHARD`` (and ``_HYBRID_SHARD_ZERO2``) shard within a node and replicate between nodes, or as ``device_mesh`` =
    (replicas, shards) says; ``NO_SHARD`` replicates, as DDP does. ``mixed_precision`` is a torch ``MixedPrecisionPolicy`` (or the
    ``MixedPrecision`` of torch's first FSDP); by default it follows the precision. ``cpu_offload`` keeps the shards in
    host memory. ``state_dict_type`` is ``sharded`` (each rank writes its shards) or ``full`` (rank 0 gathers and writes
    full tensors); both load on any number of processes. ``reshard_after_forward``, ``shard_placement_fn`` and ``ignored_params``
    go to ``fully_shard``. Tied weights must lie in one unit.
    """

    name = "fsdp"
    evaluates_together = True

    def __init__(
        self, accelerator: Any = None, parallel_devices: Any = None, cluster_environment: Any = None, checkpoint_io: Any = None,
        precision: Any = None, *, precision_plugin: Any = None, cpu_offload: Any = None, mixed_precision: Any = None, auto_wrap_policy: Policy = None,
        activation_checkpointing: Any = None, activation_checkpointing_policy: Policy = None,
        sharding_strategy: Any = "FULL_SHARD", state_dict_type: str = "sharded", device_mesh: Any = None,
        start_method: str = "popen", timeout: datetime.timedelta | None = DEFAULT_TIMEOUT,
        process_group_backend: str | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            accelerator, parallel_devices, cluster_environment, checkpoint_io, precision, precision_plugin=precision_plugin,
            start_method=start_method, timeout=timeout, process_group_backend=process_group_backend,
        )  # fmt: skip
        from torch.distributed.fsdp import CPUOffload, ShardingStrategy

        if state_dict_type not in ("full", "sharded"):
            raise ValueError(f"Unknown state_dict_type: {state_dict_type!r}; choose full or sharded")
        name = getattr(sharding_strategy, "name", sharding_strategy).upper()
        if name not in ShardingStrategy.__members__:
            raise ValueError(
                f"sharding_strategy={name!r} is not known; choose {', '.join(ShardingStrategy.__members__)}"
            )
        self.sharding_strategy = ShardingStrategy[name]
        self.cpu_offload = cpu_offload if isinstance(cpu_offload, CPUOffload) else CPUOffload(bool(cpu_offload))
        self.mixed_precision, self.state_dict_type = mixed_precision, state_dict_type
        self.auto_wrap_policy = auto_wrap_policy
        self.activation_checkpointing_policy = activation_checkpointing_policy
        if activation_checkpointing is not None:
            kinds = (
                activation_checkpointing
                if isinstance(activation_checkpointing, Iterable)
                else [activation_checkpointing]
            )
            self.activation_checkpointing_policy = set(kinds)
        self.saves_shards = state_dict_type == "sharded"
        self.options = _checked(kwargs)
        self.device_mesh = device_mesh
        self._roots: dict[nn.Module, StepRoot] = {}

    @property
    def mixed_precision_config(self) -> Any:
        """The policy that the constructor was given; None if the precision decides."""
        return self.mixed_precision

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.device_mesh is None or isinstance(self.device_mesh, tuple):
            from torch.distributed.device_mesh import init_device_mesh

            shape = self.device_mesh or self._mesh_shape()
            names = ("replicate", "shard")[-len(shape) :]
            self.device_mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=names)

    def _mesh_shape(self) -> tuple[int, ...]:
        name = self.sharding_strategy.name
        if name == "NO_SHARD":
            return (self.world_size, 1)
        if "HYBRID" in name and self.num_nodes > 1:
            return (self.num_nodes, self.num_devices)
        return (self.world_size,)

    # -- model -----------------------------------------------------------------------------------------------------

    def setup_module(self, module: nn.Module) -> nn.Module:
        return self._shard(module, whole=True)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        from arclight.fabric.distributed.sharding import replace_parameters

        before = dict(module.named_parameters())
        root = self._shard(module, whole=True)
        after = dict(module.named_parameters())
        for optimizer in optimizers:
            replace_parameters(optimizer, {parameter: after[name] for name, parameter in before.items()})
        return root, [self.setup_optimizer(optimizer) for optimizer in optimizers], scheduler

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        from torch.distributed.tensor import DTensor

        from arclight.fabric.distributed.sharding import parameters_of

        if not any(isinstance(parameter, DTensor) for parameter in parameters_of(optimizer)):
            raise ValueError(
                "The optimizer does not seem to reference any FSDP parameters: sharing a model out replaces them. Make the "
                "optimizer after setting up the model"
            )
        return super().setup_optimizer(optimizer)

    def place(self, module: nn.Module, whole_step: bool = True) -> None:
        if module not in self._roots:
            self._shard(module, whole_step)

    def wrap_step(self, module: nn.Module, step: Callable[..., Any]) -> Callable[..., Any]:
        root = self._roots[module]
        return partial(root, _step=step) if root.shared else step

    wrap_evaluation_step = wrap_step

    def root_of(self, module: nn.Module) -> nn.Module:
        return self._roots.get(module, module)

    def average_gradients(self, module: nn.Module) -> None:
        """Do nothing: FSDP averages in backward."""

    def unwrap(self, module: nn.Module) -> nn.Module:
        return module.module if isinstance(module, StepRoot) else module

    def _shard(self, module: nn.Module, whole: bool) -> StepRoot:
        """Shard ``module`` in place, and return the root that gathers what no unit holds.

        Without ``whole``, where the model's own forward need not be called, every part that runs is a unit of its own.
        """
        from torch.distributed.fsdp import fully_shard

        from arclight.fabric.distributed import sharding

        own = [name for name, _ in module.named_parameters(recurse=False)]
        if own and not whole:
            raise ValueError(
                f"{type(module).__name__}.{own[0]} is a parameter of the module itself, which strategy='fsdp' cannot gather "
                "with automatic_optimization=False: put it into a submodule"
            )
        sharding.copy_from_rank_zero(module, self.device)
        for part in _chosen(module, self.activation_checkpointing_policy):
            _checkpoint_activations(part)
        units = whole_units(module, _chosen(module, self.auto_wrap_policy))
        outermost: list[nn.Module] = [StepRoot(module, shared=whole)] if whole else outermost_submodules(module)
        units = list(dict.fromkeys((*units, *outermost)))
        _refuse_tied_across(module, units)
        options = self._fully_shard_options()
        for unit in units:
            fully_shard(unit, **options)
        for unit in outermost:
            unit.register_forward_hook(reshard_without_backward)
        root = outermost[0] if whole else StepRoot(module, shared=whole)
        assert isinstance(root, StepRoot)
        sharding.materialize(module, self.device)
        sum_on_gloo(root)
        sharding.accept_full_weights(module)
        self._roots[module] = root
        return root

    def _fully_shard_options(self) -> dict[str, Any]:
        from torch.distributed.fsdp import CPUOffloadPolicy

        options = {"mesh": self.device_mesh, "mp_policy": self._precision_policy(), **self.options}
        if self.sharding_strategy.name in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2"):
            options.setdefault("reshard_after_forward", False)
        if self.cpu_offload.offload_params:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        return options

    def _precision_policy(self) -> Any:
        """Return the FSDP policy: half types are reduced in float32, autocast does the rest."""
        from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

        given = self.mixed_precision
        if isinstance(given, MixedPrecision):
            return MixedPrecisionPolicy(
                given.param_dtype, given.reduce_dtype, cast_forward_inputs=given.cast_forward_inputs
            )
        if given is not None:
            return given
        half = self.precision.dtype in (torch.float16, torch.bfloat16)
        return MixedPrecisionPolicy(reduce_dtype=torch.float32 if half else None, cast_forward_inputs=False)


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    """Check keyword arguments of ``fully_shard``.

    Raises ValueError or TypeError for those of torch's first FSDP that have no counterpart.
    """
    for name, only in _ALWAYS.items():
        if options.pop(name, only) != only:
            raise ValueError(f"FSDPStrategy({name}={not only}) is not possible: FSDP2 always works with {name}={only}")
    for name in options:
        if name in _INSTEAD:
            raise TypeError(f"FSDPStrategy({name}=...) belongs to torch's first FSDP: {_INSTEAD[name]}")
        if name not in ("reshard_after_forward", "shard_placement_fn", "ignored_params"):
            raise TypeError(f"FSDPStrategy has no argument {name!r}")
    return options


def _chosen(module: nn.Module, policy: Policy) -> list[nn.Module]:
    """List the submodules that a policy chooses, inner ones first, without ``module`` itself."""
    if policy is None:
        return []
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

    if isinstance(policy, (set, frozenset, list, tuple)):
        policy = ModuleWrapPolicy(set(policy))
    elif isinstance(policy, int):
        policy = partial(size_based_auto_wrap_policy, min_num_params=policy)
    order = {part: number for number, part in enumerate(module.modules())}
    if hasattr(policy, "_run_policy"):
        found = policy._run_policy(module, set(), {})
        return sorted((part for part in found if part is not module), key=lambda part: -order[part])
    chosen: list[nn.Module] = []
    _walk(module, policy, chosen)
    return chosen


def _walk(module: nn.Module, policy: Callable[..., bool], chosen: list[nn.Module]) -> int:
    """Collect the descendants that ``policy`` chooses; return the parameters in them."""
    inside = 0
    for child in module.children():
        own = sum(parameter.numel() for parameter in child.parameters())
        if policy(child, True, own):
            taken = _walk(child, policy, chosen)
            if child not in chosen and policy(child, False, own - taken):
                chosen.append(child)
                taken = own
            inside += taken
    return inside


def _refuse_tied_across(module: nn.Module, units: list[nn.Module]) -> None:
    """Raise ValueError for a parameter in two units: sharded twice, its copies would diverge."""
    owner: dict[nn.Module, nn.Module] = {}
    for unit in units:  # inner ones first
        for part in unit.modules():
            owner.setdefault(part, unit)
    places = dict(module.named_modules(remove_duplicate=False))  # a submodule may be called like an attribute
    seen: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        place = places[name.rpartition(".")[0]]
        first = seen.setdefault(parameter, (owner[place], name))
        if first[0] is not owner[place]:
            raise ValueError(
                f"{first[1]} and {name} are one parameter in two FSDP units: choose an auto_wrap_policy that leaves both to "
                "the same unit"
            )


def _checkpoint_activations(module: nn.Module) -> None:
    """Recompute the module's activations in backward."""
    from torch.utils.checkpoint import checkpoint

    module.forward = partial(checkpoint, module.forward, use_reentrant=False)
