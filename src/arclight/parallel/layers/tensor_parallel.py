"""Apply tensor and sequence parallelism, as modules declare it in their ``sharding`` tables.

`parallelize` calls `apply_tensor_parallel` for plans with ``tp`` and checks all tables; `float8` and the planner (`chain`,
`sharded_shapes`) read `declared_styles`. A new layer needs a table, no code here; a new style is one of `STYLES`, with its rule here and in
`sharded_shapes`.

Between ``gather`` and ``row`` (Megatron's f and g: Shoeybi et al. 2020, Korthikanti et al. 2022) every process of the group has
the whole sequence and a shard of heads or of the hidden width. In between, tensors that are replicated over the ``tp`` group have partial
gradients (DTensor's Partial); the backward of ``gather`` sums them once. Parameters are DTensors on the ``tp`` mesh, and modules see their
local shards: activations stay plain tensors, which costs nothing per operation.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from arclight.parallel.plan import Plan, PlanError

STYLES = (
    "column",
    "row",
    "vocabulary",
    "head",
    "sequence",
    "sequence_gather",
    "gather",
    "shared",
    "part",
    "experts",
    "heads",
)


def declared_styles(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (full name, module, style) of all sharding that modules of ``model`` declare.

    Children that are None are left out. Raises PlanError for a child that does not exist and for a style that is not
    known.
    """
    for prefix, module in model.named_modules():
        for name, style in getattr(module, "sharding", {}).items():
            full = ".".join(part for part in (prefix, name) if part)
            try:
                child = cast(nn.Module | None, _descend(module, name))
            except AttributeError:
                raise PlanError(
                    f"the sharding table of {type(module).__name__} names {full}, which does not exist: correct the table"
                ) from None
            if style not in STYLES:
                raise PlanError(f"{full} is to be sharded by {style!r}, which is not known; choose {', '.join(STYLES)}")
            if child is not None:
                yield full, child, style


def _descend(module: nn.Module, name: str) -> Any:
    found: Any = module
    for part in name.split(".") if name else []:
        if found is None:
            return None
        found = found[part] if isinstance(found, nn.ModuleDict) else getattr(found, part)
    return found


def check_sharding_tables(model: nn.Module, plan: Plan) -> None:
    """Raise PlanError if the sharding tables of ``model`` do not fit the plan's ``tp``.

    Nothing is changed.
    """
    styles = list(declared_styles(model))
    if plan.tp == 1:
        return
    if not styles:
        raise PlanError(
            f"{type(model).__name__} declares no sharding, so its matrices cannot be cut into tp = {plan.tp} parts: use tp = 1, "
            "or give its modules a `sharding` table"
        )
    covered: set[nn.Parameter] = set()
    for name, module, style in styles:
        if style != "gather":
            covered |= set(module.parameters())
        if style in _CUT:
            for own, parameter in module.named_parameters(recurse=False):
                dimension = _cut_dimension(style, own)
                if dimension is not None and parameter.shape[dimension] % plan.tp:
                    raise PlanError(
                        f"{name}.{own} has {parameter.shape[dimension]} {'rows' if dimension == 0 else 'columns'}, which tp = "
                        f"{plan.tp} does not divide: use a tp that does, or pad them"
                    )
    for name, parameter in model.named_parameters():
        if parameter not in covered:
            raise PlanError(
                f"no sharding table names the module of {name}, so its gradient would be wrong with tp = {plan.tp}: add it, as "
                "'shared' where it works on whole sequences or on shares of heads"
            )


_CUT = ("column", "head", "row", "part", "vocabulary")


def _cut_dimension(style: str, parameter: str) -> int | None:
    """Return the dimension of a parameter that is cut; None if each process has all of it."""
    if style not in _CUT:
        return None
    if style not in ("row", "part"):
        return 0
    return None if parameter == "bias" else 1


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, *, sequence: bool = True, logits: bool = True) -> None:
    """Shard the parameters below ``model`` as declared, and add the collectives, in place.

    sequence: whether norms and the residual stream work on parts of the sequence. logits: whether the ``head``'s output stays
    sharded (a DTensor, ``Shard(-1)``) or is made whole. Raises PlanError for tables that do not fit.
    """
    outside: Placement = Shard(1) if sequence else Replicate()
    made: dict[nn.Parameter, nn.Parameter] = {}
    for _, module, style in list(declared_styles(model)):
        if style == "gather":
            module.register_forward_pre_hook(lambda _, given: (_whole(given[0], mesh, outside), *given[1:]))
            continue
        if style == "experts":  # see `arclight.parallel.layers.expert_parallel`: they are cut in two ways at once
            continue
        if style == "heads":  # no parameters, but another computation for each head
            module.part = (mesh.get_local_rank(), mesh.size())  # type: ignore[assignment]
            continue
        for part in module.modules():
            _cut(part, mesh, style, outside, made)
        if style == "row":
            module.register_forward_hook(lambda _, given, output: _summed(output, mesh, outside))
        elif style == "vocabulary":
            _look_up_own_rows(module, mesh, outside)
        elif style == "sequence_gather":
            module.register_forward_hook(lambda _, given, output: _whole(output, mesh, outside))
        elif style == "head":
            module.register_forward_hook(lambda _, given, output: _logits(output, mesh, logits))


def _cut(module: nn.Module, mesh: DeviceMesh, style: str, outside: Placement, made: dict[Any, nn.Parameter]) -> None:
    """Replace the module's own parameters by DTensors; its forward sees the local shards."""
    own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    gradients: dict[str, Placement] = {}
    for name, parameter in own.items():
        dimension = _cut_dimension(style, name)
        placement: Placement = Replicate() if dimension is None else Shard(dimension)
        if parameter not in made and not isinstance(parameter, DTensor):
            value = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
            made[parameter] = nn.Parameter(value, parameter.requires_grad)
        module._parameters[name] = made.get(parameter, parameter)
        summed = style in ("row", "part", "shared") or isinstance(outside, Shard)
        gradients[name] = placement if dimension is not None else Partial() if summed else Replicate()
    if own:
        once = {"bias"} if style in ("row", "part") and mesh.get_local_rank() > 0 else set()
        module.__class__ = _seeing_own_part(cast(Any, type(module)), tuple(gradients.items()), frozenset(once))


@cache
def _seeing_own_part(
    kind: type[nn.Module], gradients: tuple[tuple[str, Placement], ...], zeroed: frozenset[str]
) -> type[nn.Module]:
    """Return a subclass whose parameters are read as local tensors.

    Their gradients have the given placements. One class for all that are alike: blocks of different classes would be
    compiled one by one.
    """

    def reader(name: str, placement: Placement) -> property:
        def read(self: nn.Module) -> Tensor:
            parameter = self._parameters[name]
            if (
                not isinstance(parameter, DTensor) or parameter.device_mesh.ndim > 1
            ):  # at rest: a share over `fsdp` as well
                return cast(Tensor, parameter)
            own: Tensor = parameter.to_local(grad_placements=[placement])
            return own * 0 if name in zeroed else own  # added by one process of the group only

        return property(read)

    return type(
        kind.__name__,
        (kind,),
        {name: reader(name, placement) for name, placement in gradients} | {"__module__": kind.__module__},
    )


def _whole(x: Any, mesh: DeviceMesh, placement: Placement) -> Tensor:
    """Gather a sharded (or replicated) tensor; in backward partial gradients are summed."""
    shared = DTensor.from_local(x, mesh, [placement], run_check=False)
    whole: Tensor = shared.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    return whole


def _summed(x: Tensor, mesh: DeviceMesh, placement: Placement) -> Tensor:
    """Return the sum over processes of their ``x``, or each one's share of the sum."""
    summed: Tensor = (
        DTensor.from_local(x, mesh, [Partial()], run_check=False).redistribute(placements=[placement]).to_local()
    )
    return summed


def _logits(x: Tensor, mesh: DeviceMesh, stay: bool) -> Tensor:
    cut = DTensor.from_local(x, mesh, [Shard(x.ndim - 1)], run_check=False)
    return cut if stay else cut.full_tensor()


def _look_up_own_rows(embedding: nn.Module, mesh: DeviceMesh, outside: Placement) -> None:
    """Shard an embedding by rows: others are zero, until all are summed."""
    rank, parts = mesh.get_local_rank(), mesh.size()

    def shift(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        ids, rows = given[0], cast(Tensor, module.weight).shape[0]
        if isinstance(outside, Shard) and ids.shape[1] % parts:
            raise PlanError(
                f"sequences of {ids.shape[1]} tokens cannot be cut into tp = {parts} equal parts: pad them, or set "
                "sequence_parallel = false"
            )
        own = ids - rank * rows
        missing = (own < 0) | (own >= rows)
        module.__dict__["_missing"] = missing
        return (own.masked_fill(missing, 0), *given[1:])

    def total(module: nn.Module, given: Any, output: Tensor) -> Tensor:
        output = output.masked_fill(module.__dict__.pop("_missing")[..., None], 0)
        # A result that is still on its way breaks compiled blocks (torch 2.13: their backward takes it for what it stands for);
        # multiplying waits for it.
        return _summed(output, mesh, outside) * 1.0

    embedding.register_forward_pre_hook(shift)
    embedding.register_forward_hook(total)
