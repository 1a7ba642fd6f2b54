"""Find a model's repeated blocks, the units of compilation, checkpointing and FSDP.

``parallel.model`` (FSDP, activation checkpoints, compilation), `planning.chain`, the pipelined steps and the callback `ActivationMonitor`
divide a model by it. A changed answer changes units of sharding, and with them memory and speed, but no checkpoint. Planner and run
must find the same blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of the outermost repeated blocks of a model.

    They are members of a ModuleList or ModuleDict that are all of one class and have parameters.
    """
    return list(_blocks(model, ""))


def _blocks(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        full = f"{prefix}.{name}" if prefix else name
        members = dict(child.named_children()) if isinstance(child, (nn.ModuleList, nn.ModuleDict)) else {}
        alike = len({type(member) for member in members.values()}) == 1
        if alike and all(any(True for _ in member.parameters()) for member in members.values()):
            yield from ((f"{full}.{key}", member) for key, member in members.items())
        else:
            yield from _blocks(child, full)


def embeddings(model: nn.Module) -> list[nn.Module]:
    """Return the embeddings outside of blocks whose weights no other module shares."""
    inside = {part for _, block in repeated_blocks(model) for part in block.modules()}
    users: dict[nn.Parameter, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        users[parameter] = users.get(parameter, 0) + 1
    return [
        part
        for part in model.modules()
        if isinstance(part, nn.Embedding) and part not in inside and users[part._parameters["weight"]] == 1  # type: ignore[index]
    ]
