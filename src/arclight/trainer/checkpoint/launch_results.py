"""What processes that a run has started leave to the one that started them: weights, progress, callbacks' states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes
from torch import nn

from arclight.trainer.loop.hooks import overridden
from arclight.trainer.module import Module
from arclight.trainer.run.folder import RunFolder

if TYPE_CHECKING:
    from arclight.trainer.trainer import Trainer


def collect_launch_results(trainer: Trainer, result: Any) -> dict[str, Any] | None:
    """What rank 0 leaves, as bytes and plain data; None elsewhere. Every process calls this."""
    module = trainer.lightning_module
    state = module.state_dict()
    others = {name: buffer for name, buffer in module.named_buffers() if name not in state}
    state, others = trainer.strategy.portable([dict(state), others])
    if not trainer.is_global_zero:
        return None
    folder = trainer._run_folder
    weights = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return {
        "result": result,
        "weights": _as_bytes(weights),
        "extra": {name: value for name, value in state.items() if name not in weights},
        "buffers": _as_bytes(others),
        "progress": trainer.progress,
        "metrics": trainer.metrics.state(),
        "callbacks": {c.state_key: c.state_dict() for c in trainer.callbacks},
        "folder": None if folder is None or not folder.path.is_dir() else str(folder.path),  # an empty one is gone
    }


def _as_bytes(tensors: dict[str, torch.Tensor]) -> bytes:
    return save_bytes(
        {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    )


def restore_from_worker(trainer: Trainer, module: Module | None, outcome: dict[str, Any]) -> Any:
    """What rank 0 of other processes ended with becomes this trainer's own state; the run's result."""
    if module is not None:
        if overridden(module, "configure_model", Module):
            module.configure_model()  # the new processes made layers that this one has not
        _give_memory(module, load_bytes(outcome["buffers"]))
        module.load_state_dict({**load_bytes(outcome["weights"]), **outcome["extra"]})
        trainer._module = module
    trainer.progress = outcome["progress"]
    trainer.metrics.load_state(outcome["metrics"])
    for callback in trainer.callbacks:
        if callback.state_key in outcome["callbacks"]:
            callback.load_state_dict(outcome["callbacks"][callback.state_key])
    if outcome["folder"] is not None:
        trainer.run_folder = RunFolder.open(outcome["folder"])
    return outcome["result"]


def _give_memory(module: Module, buffers: dict[str, torch.Tensor]) -> None:
    """Memory for what is on the meta device: what a state has is about to be loaded, ``buffers`` are the rest."""
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
