"""Copy weights, progress and callback state from spawned workers to the launcher.

`session` calls both functions, for strategies that spawn processes (``ddp_spawn``, notebooks). Values cross as bytes and plain data; nothing
is pickled here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes
from torch import nn

from arclight.trainer.checkpoint.loading import ReplacesLayers
from arclight.trainer.loop.hooks import overridden
from arclight.trainer.module import Module

if TYPE_CHECKING:
    from arclight.fabric.strategies import Strategy
    from arclight.trainer.callback import Callback
    from arclight.trainer.loop.run_state import RunState
    from arclight.trainer.run.folder import RunFolder


def collect_launch_results(
    module: Module,
    strategy: Strategy,
    run: RunState,
    callbacks: Iterable[Callback],
    folder: RunFolder | None,
    result: Any,
) -> dict[str, Any] | None:
    """Collect rank 0's weights, progress and callback state as bytes and plain data.

    None on other ranks. A collective.
    """
    state = module.state_dict()
    others = {name: buffer for name, buffer in module.named_buffers() if name not in state}
    state, others = strategy.portable([dict(state), others])
    if not strategy.is_global_zero:
        return None
    weights = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return {
        "result": result,
        "weights": _as_bytes(weights),
        "extra": {name: value for name, value in state.items() if name not in weights},
        "buffers": _as_bytes(others),
        "progress": run.progress,
        "metrics": run.metrics.state(),
        "measured": run.measured,
        "callbacks": {c.state_key: c.state_dict() for c in callbacks},
        "folder": None if folder is None or not folder.path.is_dir() else str(folder.path),  # an empty one is gone
    }


def _as_bytes(tensors: dict[str, torch.Tensor]) -> bytes:
    return save_bytes(
        {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    )


def restore_module(module: Module, callbacks: Iterable[Callback], outcome: dict[str, Any]) -> None:
    """Load the weights and buffers that rank 0 of the spawned processes ended with."""
    if overridden(module, "configure_model", Module):
        module.configure_model()  # the new processes made layers that this one has not
    for callback in callbacks:
        if isinstance(callback, ReplacesLayers):
            callback.replace_layers(module)
    _give_memory(module, load_bytes(outcome["buffers"]))
    module.load_state_dict({**load_bytes(outcome["weights"]), **outcome["extra"]})


def restore_state(run: RunState, callbacks: Iterable[Callback], outcome: dict[str, Any]) -> None:
    """Load the progress, metrics and callback state that rank 0 of the spawned processes had."""
    run.progress = outcome["progress"]
    run.metrics.load_state(outcome["metrics"])
    run.measured = outcome["measured"]
    for callback in callbacks:
        if callback.state_key in outcome["callbacks"]:
            callback.load_state_dict(outcome["callbacks"][callback.state_key])


def _give_memory(module: Module, buffers: dict[str, torch.Tensor]) -> None:
    """Allocate meta tensors on the CPU: buffers with their values, others to be loaded."""
    made: dict[torch.Tensor, torch.Tensor] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        for entries in (part._parameters, part._buffers):
            for name, tensor in entries.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if tensor not in made:  # else tied to another
                    value = buffers.get(f"{prefix}.{name}" if prefix else name)
                    value = torch.empty_like(tensor, device="cpu") if value is None else value
                    parameter = isinstance(tensor, nn.Parameter)
                    made[tensor] = nn.Parameter(value, tensor.requires_grad) if parameter else value
                entries[name] = made[tensor]
