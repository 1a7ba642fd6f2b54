"""What Fabric is given wrongly, said before anything happens."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from arclight.fabric.rank_zero import rank_zero_warn
from arclight.trainer.fabric_modules import FabricDataLoader, FabricModule, FabricOptimizer, uncompiled


def check_module(module: nn.Module, method: str) -> None:
    """Raise ValueError for a module that has been set up."""
    if isinstance(uncompiled(module)[0], FabricModule):
        raise ValueError(f"A model should be passed only once to the `{method}` method: this one has been set up")


def check_optimizers(optimizers: tuple[Optimizer, ...], method: str) -> None:
    """Raise ValueError for an optimizer that has been set up, RuntimeError for one of parameters that are not there yet."""
    for optimizer in optimizers:
        if isinstance(optimizer, FabricOptimizer):
            raise ValueError(
                f"An optimizer should be passed only once to the `{method}` method: this one has been set up"
            )
        if any(p.is_meta for group in optimizer.param_groups for p in group["params"]):
            raise RuntimeError(
                "The optimizer has references to the model's meta-device parameters, which get their values only in set-up. "
                "First `model = fabric.setup_module(model)`, then make the optimizer, then "
                "`optimizer = fabric.setup_optimizers(optimizer)`"
            )


def check_loaders(loaders: tuple[Any, ...]) -> None:
    """Raise ValueError for none, or for one that was set up; TypeError for what is data rather than a loader."""
    if not loaders:
        raise ValueError("`setup_dataloaders` requires at least one dataloader as input.")
    for loader in loaders:
        if isinstance(loader, FabricDataLoader):
            raise ValueError(
                "A dataloader should be passed only once to the `setup_dataloaders` method: this one has been"
            )
        if isinstance(loader, (range, list, tuple, dict, str)) or not hasattr(loader, "__iter__"):
            raise TypeError(
                "Only PyTorch DataLoader are currently supported in `setup_dataloaders`, and objects of other classes that "
                f"give batches; this is a {type(loader).__name__}: wrap it in a DataLoader"
            )


def check_filter(filter: Any, state: dict[str, Any]) -> None:
    """Raise TypeError or ValueError for a filter of ``save`` that says nothing about ``state``."""
    if filter is None:
        return
    if not isinstance(filter, dict):
        raise TypeError(f"fabric.save: the filter should be a dictionary of functions, given {filter!r}")
    if unknown := set(filter) - set(state):
        raise ValueError(f"fabric.save: the filter keys {unknown} are not present in the state keys {set(state)}")
    for name, function in filter.items():
        if not callable(function):
            raise TypeError(f"fabric.save: the filter for {name!r} should be a callable, given {function!r}")


def warn_of_devices(module: nn.Module) -> None:
    """Warn where a module that is about to be moved was spread over devices, perhaps on purpose."""
    devices = [(name, parameter.device) for name, parameter in module.named_parameters()]
    others = [(name, device) for name, device in devices if device != devices[0][1]]
    if others:
        rank_zero_warn(
            f"The model passed to `Fabric.setup()` has {len(others)} parameters on different devices (for example "
            f"{others[0][0]!r} on {others[0][1]} and {devices[0][0]!r} on {devices[0][1]}). All are moved to one device; to "
            "keep them where they are, `Fabric.setup(..., move_to_device=False)`"
        )
