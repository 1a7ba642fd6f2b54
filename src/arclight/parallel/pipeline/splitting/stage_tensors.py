"""List and replace the tensors of a stage, keeping ties.

``pipeline.weights`` loads, saves and initialises stages with it; `pipe` and `parallelize_steps` keep a `meta_skeleton` of the whole model. Tied
parameters must be tied after each of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from arclight.parallel.pipeline.splitting.proxy_modules import copy_tree


def meta_skeleton(model: nn.Module) -> nn.Module:
    """Return a copy of ``model``'s tree on the meta device, which takes no memory.

    It is what stages must know of the whole. If parameters of the model are on the meta device themselves the copy
    has the same tensors, buffers with values included.
    """
    made: dict[torch.Tensor, torch.Tensor] = {}

    def drop(_: str, module: nn.Module) -> None:
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    if tensor not in made:
                        made[tensor] = like(torch.empty_like(tensor, device="meta"), tensor)
                    tensors[name] = made[tensor]  # type: ignore[assignment]

    deferred = any(parameter.is_meta for parameter in model.parameters())
    return copy_tree(model, lambda *_: None, None if deferred else drop)


def named_tensors(stage: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters and buffers of ``stage``, each under all of its names."""
    return [*stage.named_parameters(remove_duplicate=False), *stage.named_buffers(remove_duplicate=False)]


def stored_tensors(stage: nn.Module, model: nn.Module | None = None) -> dict[torch.Tensor, list[str]]:
    """List the tensors of ``stage`` to save, with their names (several for tied ones).

    With ``model``, also buffers that are lasting there, and are kept out of this stage's state because another one saves them.
    Raises TypeError for what a module adds to its state that is no tensor.
    """
    found: dict[torch.Tensor, list[str]] = {}
    state = stage.state_dict(keep_vars=True)
    if model is not None:
        lasting = model.state_dict(keep_vars=True).keys() - state.keys()
        state |= {name: buffer for name, buffer in stage.named_buffers(remove_duplicate=False) if name in lasting}
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{name} is a {type(tensor).__name__}, which has no place in a safetensors file: keep it out of the state"
            )
        found.setdefault(tensor, []).append(name)
    return found


def like(value: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return ``value`` as what ``old`` is: a parameter (that trains or does not), or a buffer."""
    if not isinstance(old, nn.Parameter) or isinstance(value, nn.Parameter):
        return value
    return nn.Parameter(value, requires_grad=old.requires_grad)


def replace_tensors(stages: Iterable[nn.Module], new: Mapping[torch.Tensor, torch.Tensor]) -> None:
    """Replace tensors in all modules of ``stages``: those that are tied stay so."""
    for stage in stages:
        for module in stage.modules():
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None and tensor in new:
                    setattr(module, name, new[tensor])


def replace_named_tensors(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Replace tensors of ``model`` by their names."""
    for name, tensor in tensors.items():
        path, _, own = name.rpartition(".")
        setattr(model.get_submodule(path), own, tensor)
