"""Apply a client's local policy: which weights it loads, trains, sends or keeps private.

`round_callback` applies it when a round is loaded, trained and sent, `trainer_learner` to a first fit, to results and to evaluations. The fields of
``Fit.local_policy`` are part of the protocol: a field that this version does not know is refused. `reset_randomised` depends on seed and module
name alone, so that a killed round repeats.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from arclight.fabric.distributed.dtensor import local_tensor
from arclight.fabric.seeding import isolate_rng
from arclight.federated.aggregation.fixed_point import has_changes
from arclight.federated.errors import ProtocolError
from arclight.federated.masks.experts import select_experts
from arclight.federated.masks.settings import Masks, matches
from arclight.federated.masks.transfer_mask import MODEL, TransferMask
from arclight.trainer.checkpoint.named_state import load_parameters, named_tensors

if TYPE_CHECKING:
    from torch import nn

    from arclight.federated.protocol import Evaluate, Fit


@dataclass(frozen=True, kw_only=True)
class LocalPolicy:
    """Hold the masks and flags of ``Fit.local_policy``."""

    transfer_mask: TransferMask = field(default_factory=TransferMask)
    """Which tensors are downloaded and uploaded; see `arclight.federated.masks`."""
    reset_optimizer: bool = False
    """Forget the optimizers' states before the round."""

    @classmethod
    def of(cls, order: Fit | Evaluate) -> LocalPolicy:
        """Read it from an order. Raises ProtocolError for fields that this version does not know."""
        table = dict(order.local_policy)
        reset = table.pop("reset_optimizer", False)
        if not isinstance(reset, bool):
            raise ProtocolError(f"reset_optimizer is true or false, got {reset!r}")
        names = (key.removeprefix(MODEL) for key in order.weights.tensors if key.startswith(MODEL))
        return cls(transfer_mask=TransferMask.from_table(table, names), reset_optimizer=reset)

    @property
    def masks(self) -> Masks:
        return self.transfer_mask.masks


def weights_to_measure(
    module: nn.Module, weights: Mapping[str, torch.Tensor], policy: LocalPolicy
) -> dict[str, torch.Tensor]:
    """Return a round's weights by parameter name, without private ones and others' experts.

    Private are personal and randomised weights.
    """
    own = (*policy.masks.personal, *policy.masks.randomised)
    keys = [key for key in weights if key.startswith(MODEL) and not matches(key.removeprefix(MODEL), own)]
    return {
        key.removeprefix(MODEL): value
        for key, value in select_for_module(module, weights, keys, policy.transfer_mask).items()
    }


def keys_to_load(weights: Mapping[str, torch.Tensor], policy: LocalPolicy, round: int, last: int | None) -> list[str]:
    """Return the keys of a round's weights that the client loads.

    last: the round that it has trained last, None before the first. One that has been further already, as before a run was set back,
    takes all but what is its own.
    """
    if last is not None and last >= round:
        own = (*policy.masks.personal, *policy.masks.randomised)
        return [key for key in weights if not matches(key.partition("/")[2], own)]
    return policy.transfer_mask.down(weights, round, last)


def select_for_module(
    module: nn.Module, weights: Mapping[str, torch.Tensor], keys: Iterable[str], transfer_mask: TransferMask
) -> dict[str, torch.Tensor]:
    """Select weights and local moments by key; of stacked experts only those of the module."""
    own, found = named_tensors(module), {}
    for key in keys:
        here, value = own.get(key.partition("/")[2]), weights[key]
        numbers = transfer_mask.numbers(key)
        if numbers is not None and here is not None and here.dim():
            fewer = here.shape[0] == len(numbers) < len(value)
            value = select_experts(value, numbers) if fewer else value
        found[key] = value
    return found


@torch.no_grad()
def load_mixed(
    module: nn.Module, weights: Mapping[str, torch.Tensor], keys: Sequence[str], transfer_mask: TransferMask, mix: float
) -> None:
    """Copy weights into the module, keeping the share ``mix`` of its own values.

    A module that has a client's own experts only gets these out of the stacks of all.
    """
    own = named_tensors(module)
    given = {
        key.removeprefix(MODEL): value for key, value in select_for_module(module, weights, keys, transfer_mask).items()
    }
    mixed = [name for name in given if mix and name in own and own[name].is_floating_point()]
    before = {name: local_tensor(own[name]).detach().clone() for name in mixed}
    load_parameters(module, given)
    for name in mixed:
        here = local_tensor(own[name])
        here.copy_(mix * before.pop(name).to(torch.float32) + (1 - mix) * here.to(torch.float32))


def moments_by_state(weights: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Group the local moments among a round's weights by state and parameter name."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in weights.items():
        state, _, name = key.partition("/")
        if not key.startswith(MODEL):
            found.setdefault(state, {})[name] = value
    return found


def trained_names(module: nn.Module) -> list[str]:
    """List the names that training changes and that can be averaged.

    Trained parameters, and saved buffers of real numbers.
    """
    parameters = dict(module.named_parameters())
    return [
        name
        for name, value in named_tensors(module).items()
        if (parameters[name].requires_grad if name in parameters else has_changes(value.dtype))
    ]


def reset_randomised(module: nn.Module, policy: LocalPolicy, seed: int) -> dict[str, torch.Tensor]:
    """Draw new values for the randomised weights with ``reset_parameters`` of their modules.

    They depend on the seed and the module's name alone. Raises ProtocolError for weights whose module cannot draw any.
    """
    found: dict[str, torch.Tensor] = {}
    for prefix, part in module.named_modules():
        own = {f"{prefix}.{name}" if prefix else name: p for name, p in part.named_parameters(recurse=False)}
        wanted = {name: p for name, p in own.items() if matches(name, policy.masks.randomised)}
        if not wanted:
            continue
        reset = getattr(part, "reset_parameters", None)
        if not callable(reset):
            raise ProtocolError(
                f"{next(iter(wanted))} cannot be drawn again: {type(part).__name__} has no reset_parameters()"
            )
        before = {name: p.detach().clone() for name, p in own.items()}
        with isolate_rng(), torch.no_grad():
            digest = hashlib.sha256(f"{seed}/{prefix}".encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            reset()
            found |= {name: p.detach().clone() for name, p in wanted.items()}
            for name, p in own.items():
                p.copy_(before[name])
    return found


@torch.no_grad()
def clamp_adam_moments(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Clamp Adam's ``exp_avg`` to what its ``exp_avg_sq`` allows after one was replaced.

    Whatever the gradients, ``|exp_avg| <= c sqrt(exp_avg_sq)`` with ``c = (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2))``, by
    Cauchy and Schwarz. A mean of other clients' averages beside this one's own squares may break that if this client has
    seen no or tiny gradients, and one step would throw those weights away. If both came together nothing changes.
    """
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Adam):
            continue
        for group in optimizer.param_groups:
            first, second = (float(beta) for beta in group["betas"])
            if first**2 >= second:
                continue  # no such bound
            bound = (1 - first) / math.sqrt((1 - second) * (1 - first**2 / second))
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                if "exp_avg" in state and "exp_avg_sq" in state:
                    mean, most = local_tensor(state["exp_avg"]), local_tensor(state["exp_avg_sq"]).sqrt().mul_(bound)
                    mean.clamp_(-most, most)
