"""Gather and load full (unsharded) tensors by parameter name.

Federated clients (``clients.round_callback``, ``clients.local_policy``) load and send weights and moments by it; the server takes its
first weights from `named_tensors`. Tensors go in and out whole and plain, one at a time, under the names of ``module.named_parameters``
and of saved buffers, which are the protocol's. Every rank makes the same calls, with the same names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from arclight.fabric.distributed.dtensor import is_dtensor, local_tensor
from arclight.fabric.distributed.optimizer_names import name_parameters
from arclight.trainer.checkpoint.loading import WeightsMisfitError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from arclight.fabric.strategies import Strategy


@runtime_checkable
class RecordsTraining(Protocol):
    """Protocol of modules that record in buffers how their weights were trained."""

    def training_records(self) -> tuple[str, ...]:
        """Name the buffers with the record, as the module's state dict does."""

    def check_trained_alike(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Raise MisconfigurationError for full weights that were trained in another way.

        ``weights``: by name in the module.
        """


class Inside(Mapping[str, torch.Tensor]):
    """Lazy view of the weights whose names begin with ``prefix``, under the rest of the name."""

    def __init__(self, weights: Mapping[str, torch.Tensor], prefix: str) -> None:
        self._weights, self._prefix = weights, prefix

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._weights[self._prefix + name]

    def __contains__(self, name: object) -> bool:
        return f"{self._prefix}{name}" in self._weights

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in self._weights if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def check_trained_alike(module: nn.Module, weights: Mapping[str, torch.Tensor], prefix: str = "") -> None:
    """Raise MisconfigurationError for full weights that contradict the module's record.

    Their names follow ``prefix``. The record is what parts of the module say of how they were trained.
    """
    for path, part in _recording(module):
        part.check_trained_alike(Inside(weights, prefix + _inside(path, "")))


def training_records(module: nn.Module) -> set[str]:
    """Name the buffers in which parts of ``module`` record how they were trained."""
    return {_inside(prefix, name) for prefix, part in _recording(module) for name in part.training_records()}


def _recording(module: nn.Module) -> list[tuple[str, RecordsTraining]]:
    return [(prefix, part) for prefix, part in module.named_modules() if isinstance(part, RecordsTraining)]


def _inside(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and saved buffers, which can be loaded and gathered.

    Each has one name; a shared one its first.
    """
    saved = module.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in saved}
    return dict(module.named_parameters()) | buffers


@torch.no_grad()
def load_parameters(module: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy ``weights`` into ``module``, each process its shard. No communication.

    Raises WeightsMisfitError for a name that the module has not, and for another shape, MisconfigurationError for weights that were
    trained in another way than the module records; the module is as before then.
    """
    own = named_tensors(module) | dict(module.named_parameters(remove_duplicate=False))
    for name, value in weights.items():
        if name not in own:
            has = ", ".join(list(own)[:8])
            raise WeightsMisfitError(f"{type(module).__name__} has no weight {name}; it has {has}, ...")
        if own[name].shape != value.shape:
            raise WeightsMisfitError(
                f"{name} of {type(module).__name__} has shape {tuple(own[name].shape)}, given was {tuple(value.shape)}"
            )
    for prefix, part in _recording(module):
        inside = Inside(weights, _inside(prefix, ""))
        if any(name in inside for name in part.training_records()):  # else these are a part of the weights, maybe
            part.check_trained_alike(inside)
    for name, value in weights.items():
        _copy(own[name], value)


def gather_parameters(
    module: nn.Module, strategy: Strategy, names: Iterable[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Gather the named weights on the CPU of rank 0, one after another.

    With a sharded strategy other ranks get empty tensors.
    """
    own = named_tensors(module)
    for name in names:
        yield name, _full(strategy, own[name].detach())


def optimizer_state_names(module: nn.Module, optimizers: Iterable[Optimizer], state: str) -> list[str]:
    """Name the parameters with an optimizer ``state`` tensor of their shape.

    ``state``: ``exp_avg`` for example. The order is the module's.
    """
    found = {name for name, _, entries in _entries(module, optimizers) if _is_moment(entries.get(state))}
    return [name for name, _ in module.named_parameters() if name in found]


def gather_optimizer_state(
    module: nn.Module, strategy: Strategy, optimizers: Iterable[Optimizer], state: str, names: Iterable[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Copy a state tensor of the named parameters, as `gather_parameters`."""
    found = _entries(module, optimizers)
    own = {name: entries[state] for name, _, entries in found if _is_moment(entries.get(state))}
    for name in names:
        yield name, _full(strategy, own[name])


@torch.no_grad()
def load_optimizer_state(
    module: nn.Module, optimizers: Sequence[Optimizer], state: str, moments: Mapping[str, torch.Tensor], steps: int
) -> None:
    """Copy ``moments`` into the optimizers' ``state`` tensors.

    Parameters that have no state yet get one first, which counts ``steps`` steps. Raises WeightsMisfitError if an optimizer
    keeps no such state.
    """
    for optimizer in optimizers:
        _initialise(optimizer, steps)
    own = {name: entries.get(state) for name, _, entries in _entries(module, optimizers)}
    for name, value in moments.items():
        kept = own.get(name)
        if not isinstance(kept, torch.Tensor) or kept.shape != value.shape:
            raise WeightsMisfitError(
                f"no optimizer keeps {state} of shape {tuple(value.shape)} for {name}: average only states that every client's "
                "optimizer has"
            )
        _copy(kept, value)


def _copy(target: torch.Tensor, value: torch.Tensor) -> None:
    if is_dtensor(target):
        from arclight.fabric.distributed.sharding import shard_like

        value = local_tensor(shard_like(value, target))
    local_tensor(target).copy_(value)


def _full(strategy: Strategy, tensor: torch.Tensor) -> torch.Tensor:
    if not is_dtensor(tensor):
        return tensor.detach().to("cpu", copy=True)
    full: torch.Tensor = strategy.portable([tensor])[0]
    return full


def _entries(module: nn.Module, optimizers: Iterable[Optimizer]) -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
    names = name_parameters([module])
    for optimizer in optimizers:
        for parameter, entries in optimizer.state.items():
            if parameter in names:
                yield names[parameter], parameter, entries


def _is_moment(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _initialise(optimizer: Optimizer, steps: int) -> None:
    """Initialise an optimizer's state by a step of rate 0 with gradients of 0."""
    if optimizer.state:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    held = [(p, p.grad) for p in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    before = [local_tensor(p).clone() for p in parameters]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer.step()
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for parameter, gradient in held:
            parameter.grad = gradient
        for parameter, value in zip(parameters, before, strict=True):
            local_tensor(parameter).copy_(value)
    for entries in optimizer.state.values():
        for name, value in entries.items():
            if isinstance(value, torch.Tensor) and value.ndim > 0:
                value.zero_()
            elif name == "step":
                entries[name] = torch.full_like(value, steps) if isinstance(value, torch.Tensor) else steps
