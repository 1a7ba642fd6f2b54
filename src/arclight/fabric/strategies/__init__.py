"""Strategies: how one model's training is shared between processes."""

from __future__ import annotations

from typing import Any

from arclight.fabric.accelerators import Accelerator
from arclight.fabric.environments import ClusterEnvironment
from arclight.fabric.strategies.base import SingleDeviceStrategy, Strategy
from arclight.fabric.strategies.ddp import DDPStrategy
from arclight.fabric.strategies.fsdp import FSDPStrategy
from arclight.fabric.strategies.model_parallel import ModelParallelStrategy
from arclight.fabric.strategies.parallel import ParallelStrategy

__all__ = [
    "DDPStrategy",
    "FSDPStrategy",
    "ModelParallelStrategy",
    "ParallelStrategy",
    "SingleDeviceStrategy",
    "Strategy",
    "resolve_strategy",
]

_DDP = {"ddp": "popen", "ddp_spawn": "spawn", "ddp_fork": "fork", "ddp_notebook": "fork"}


def resolve_strategy(
    choice: str | Strategy,
    accelerator: Accelerator,
    devices: int | str | list[int],
    num_nodes: int,
    environment: ClusterEnvironment,
) -> Strategy:
    """The strategy a user asked for, connected to its devices.

    ``auto`` is DDP for more than one process, else a single device. Raises ValueError for an unknown name.
    """
    if devices in ("auto", -1, "-1"):
        local = (
            environment.world_size() // num_nodes
            if environment.creates_processes_externally
            else accelerator.auto_device_count()
        )
    else:
        local = len(devices) if isinstance(devices, list) else int(devices)
    if local < 1:
        raise ValueError(f"devices={devices!r}: need at least one")
    environment.validate_settings(local, num_nodes)
    if isinstance(choice, Strategy):
        strategy = choice
    elif choice == "auto":
        strategy = DDPStrategy() if local * num_nodes > 1 else SingleDeviceStrategy()
    else:
        strategy = _named(choice)
    strategy.connect(accelerator, local, num_nodes, environment, devices if isinstance(devices, list) else None)
    return strategy


def _named(name: str) -> Strategy:
    base, _, find_unused = name.partition("_find_unused_parameters_")
    if base in _DDP and find_unused in ("", "true", "false"):
        options: dict[str, Any] = {"find_unused_parameters": find_unused == "true"} if find_unused else {}
        return DDPStrategy(start_method=_DDP[base], **options)
    if name in ("fsdp", "fsdp_cpu_offload"):
        return FSDPStrategy(cpu_offload=name == "fsdp_cpu_offload")
    if name == "model_parallel":
        return ModelParallelStrategy()
    raise ValueError(
        f"strategy={name!r} is not known; choose auto, {', '.join(_DDP)}, fsdp, fsdp_cpu_offload, model_parallel, or pass a Strategy"
    )
