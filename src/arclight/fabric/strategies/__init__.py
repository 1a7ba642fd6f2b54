"""Strategies: how one model's training is shared between processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.fabric.layer_sync import LayerSync as LayerSync
    from arclight.fabric.layer_sync import TorchSyncBatchNorm as TorchSyncBatchNorm
    from arclight.fabric.strategies.base import SingleDeviceStrategy as SingleDeviceStrategy
    from arclight.fabric.strategies.base import Strategy as Strategy
    from arclight.fabric.strategies.ddp import DDPStrategy as DDPStrategy
    from arclight.fabric.strategies.fsdp import FSDPStrategy as FSDPStrategy
    from arclight.fabric.strategies.model_parallel import ModelParallelStrategy as ModelParallelStrategy
    from arclight.fabric.strategies.parallel import ParallelStrategy as ParallelStrategy
    from arclight.fabric.strategies.registry import STRATEGY_REGISTRY as STRATEGY_REGISTRY
    from arclight.fabric.strategies.registry import StrategyRegistry as StrategyRegistry
    from arclight.fabric.strategies.replicas import ReplicaStrategy as ReplicaStrategy

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "DDPStrategy": "arclight.fabric.strategies.ddp",
        "FSDPStrategy": "arclight.fabric.strategies.fsdp",
        "LayerSync": "arclight.fabric.layer_sync",
        "ModelParallelStrategy": "arclight.fabric.strategies.model_parallel",
        "ParallelStrategy": "arclight.fabric.strategies.parallel",
        "ReplicaStrategy": "arclight.fabric.strategies.replicas",
        "STRATEGY_REGISTRY": "arclight.fabric.strategies.registry",
        "SingleDeviceStrategy": "arclight.fabric.strategies.base",
        "Strategy": "arclight.fabric.strategies.base",
        "StrategyRegistry": "arclight.fabric.strategies.registry",
        "TorchSyncBatchNorm": "arclight.fabric.layer_sync",
    },
)
