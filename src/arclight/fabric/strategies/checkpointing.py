"""The part of a strategy that is about checkpoints: what of modules and optimizers goes into one, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from arclight.fabric.distributed.optimizer_names import add_parameter_names, name_parameters, select_optimizer_state


class Checkpointing:
    """Save and load state trees; strategies that shard models override parts of it."""

    checkpoint_io: Any

    @property
    def is_global_zero(self) -> bool:
        """Return True if this process writes what all have alike."""
        raise NotImplementedError

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:  # fmt: skip
        """Write ``state``; what has a ``state_dict()`` saves that. ``filter`` says for an entry which of its items to keep."""
        names = self.parameter_names(state.values())
        tree = {
            name: kept
            for name, value in state.items()
            if (kept := _filtered(self.state_of(value, names), (filter or {}).get(name))) is not None
        }
        self.write_checkpoint(self.checkpoint_io, tree, path, storage_options)

    def write_checkpoint(self, io: Any, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Let ``io`` write a state tree; every rank calls this, and returns when its part is done."""
        checkpoint = self.portable(checkpoint)
        if self.is_global_zero:
            io.save_checkpoint(checkpoint=checkpoint, path=path, storage_options=storage_options)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint into the objects of ``state`` (or into the one module or optimizer); what is left over.

        Raises KeyError with ``strict`` for an object that the checkpoint has nothing for.
        """
        tree = self.read_checkpoint(self.checkpoint_io, path, weights_only=weights_only)
        if isinstance(state, (nn.Module, Optimizer)):
            self.restore(state, tree, strict)
            return {}
        missing = [name for name in state or {} if name not in tree]
        if missing and strict:
            raise KeyError(
                f"{path} contains no key {missing[0]!r}, which was asked for; it has {', '.join(map(str, tree))}. "
                "To disable strict loading, set `strict=False`"
            )
        names = self.parameter_names((state or {}).values())
        for name in [name for name in state or {} if name in tree]:
            value = tree.pop(name)
            if isinstance(state[name], Optimizer):
                value = select_optimizer_state(state[name], value, names)
            elif not isinstance(state[name], nn.Module):
                value = self.in_memory(value)
            if hasattr(state[name], "load_state_dict"):
                self.restore(state[name], value, strict)
            else:
                state[name] = value
        rest: dict[str, Any] = self.in_memory(tree)
        return rest

    def read_checkpoint(self, io: Any, path: Any, **options: Any) -> dict[str, Any]:
        """Read the checkpoint at ``path`` by ``io``; every rank calls this."""
        found: dict[str, Any] = io.load_checkpoint(path, **options)
        return found

    def in_memory(self, tree: Any) -> Any:
        """``tree`` without tensors that are still in a file."""
        return tree

    def state_of(self, value: Any, names: Mapping[torch.Tensor, str] | None = None) -> Any:
        """Return the state of an object for a checkpoint; an optimizer's with parameter ``names``."""
        if isinstance(value, nn.Module):
            return self.get_module_state_dict(value)
        if isinstance(value, Optimizer):
            state = self.get_optimizer_state(value)
            return state if names is None else self.named_optimizer_state(value, state, names)
        return value.state_dict() if hasattr(value, "state_dict") else value

    def restore(self, target: Any, state: Any, strict: bool = True) -> None:
        """The inverse of :meth:`state_of`."""
        if isinstance(target, nn.Module):
            self.load_module_state_dict(target, state, strict)
        else:
            target.load_state_dict(state)

    def parameter_names(self, parts: Iterable[Any]) -> dict[torch.Tensor, str]:
        """The names that checkpoints have for the parameters of the modules among ``parts``."""
        return name_parameters(self.bare(part) for part in parts if isinstance(part, nn.Module))

    def bare(self, module: nn.Module) -> nn.Module:
        """The user's module in what :meth:`setup_module` gave."""
        return module

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Weights under their own names."""
        return self.bare(module).state_dict()

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Whole weights, into what may be a share of them."""
        self.bare(module).load_state_dict(state_dict, strict=strict)

    def own_weights(self, module: nn.Module, weights: dict[str, Any]) -> dict[str, Any]:
        """Select the ``weights`` that this process's ``module`` has to take or to refuse."""
        return weights

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return optimizer.state_dict()

    def named_optimizer_state(
        self, optimizer: Optimizer, state: dict[str, Any], names: Mapping[torch.Tensor, str]
    ) -> dict[str, Any]:
        """A ``state_dict`` of ``optimizer`` in a form that fits any division of the model; every rank calls this."""
        return add_parameter_names(optimizer, state, names)

    def share_of(self, whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return the shard of a full tensor that this process keeps, sharded as ``like`` is."""
        return whole

    def portable(self, tree: Any) -> Any:
        """A state tree whose tensors are whole, on rank 0; a collective where tensors are spread over processes."""
        return tree


def _filtered(value: Any, keep: Callable[[str, Any], bool] | None) -> Any:
    """The items of a dict that a filter keeps, None where it keeps none; anything else as it is."""
    if keep is None or not isinstance(value, dict):
        return value
    return {key: item for key, item in value.items() if keep(key, item)} or None
