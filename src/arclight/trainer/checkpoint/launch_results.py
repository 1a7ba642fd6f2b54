"""Copy weights, progress and callback state from spawned workers to the launcher.

`session` calls these for strategies that start processes of their own (``ddp_spawn``, notebooks). Weights and buffers cross as bytes of
safetensors; the launcher pickles the rest of the dictionary between processes of this one run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes
from torch import nn

if TYPE_CHECKING:
    from arclight.fabric.strategies import Strategy
    from arclight.trainer.loop.run_state import RunState
    from arclight.trainer.run.folder import RunFolder


def collect_launch_results(
    module: nn.Module,
    strategy: Strategy,
    run: RunState,
    callback_states: Mapping[str, Any],
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
        "callbacks": dict(callback_states),
        "folder": None if folder is None or not folder.path.is_dir() else str(folder.path),  # an empty one is gone
    }


def _as_bytes(tensors: dict[str, torch.Tensor]) -> bytes:
    return save_bytes(
        {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    )


def restore_module(module: nn.Module, outcome: dict[str, Any]) -> None:
    """Load the weights and buffers that rank 0 of the spawned processes ended with.

    ``module`` has all layers that it had there.
    """
    _give_memory(module, load_bytes(outcome["buffers"]))
    weights = load_bytes(outcome["weights"])
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name in weights and weights[name].dtype != tensor.dtype:  # as of precision="64-true"
            tensor.data = tensor.data.to(weights[name].dtype)
    module.load_state_dict({**weights, **outcome["extra"]})


def restore_state(run: RunState, outcome: dict[str, Any]) -> None:
    """Load the progress and metrics that rank 0 of the spawned processes had."""
    run.progress = outcome["progress"]
    run.metrics.load_state(outcome["metrics"])
    run.measured = outcome["measured"]


def _give_memory(module: nn.Module, buffers: dict[str, torch.Tensor]) -> None:
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
