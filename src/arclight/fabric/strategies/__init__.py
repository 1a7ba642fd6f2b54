"""Define strategies: single device, DDP, FSDP, replicas and the user's own sharding.

In: a module, optimizers, values; out: the same wrapped or sharded, and collectives. Open ``base`` first: the interface, and one process.
``parallel`` adds processes (and replicas that train alone), ``ddp`` averages gradients; ``sharded`` is the base of ``fsdp``,
``model_parallel`` and ``arclight.parallel``'s, ``root_module`` is FSDP's root. ``layer_sync`` is SyncBatchNorm. A new strategy gets a
name in ``strategy_registry``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.fabric.strategies.base import SingleDeviceStrategy as SingleDeviceStrategy
    from arclight.fabric.strategies.base import Strategy as Strategy
    from arclight.fabric.strategies.ddp import DDPStrategy as DDPStrategy
    from arclight.fabric.strategies.fsdp import FSDPStrategy as FSDPStrategy
    from arclight.fabric.strategies.layer_sync import LayerSync as LayerSync
    from arclight.fabric.strategies.layer_sync import TorchSyncBatchNorm as TorchSyncBatchNorm
    from arclight.fabric.strategies.model_parallel import ModelParallelStrategy as ModelParallelStrategy
    from arclight.fabric.strategies.parallel import ParallelStrategy as ParallelStrategy
    from arclight.fabric.strategies.parallel import ReplicaStrategy as ReplicaStrategy
    from arclight.fabric.strategies.strategy_registry import STRATEGY_REGISTRY as STRATEGY_REGISTRY
    from arclight.fabric.strategies.strategy_registry import StrategyRegistry as StrategyRegistry

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "DDPStrategy": "arclight.fabric.strategies.ddp",
        "FSDPStrategy": "arclight.fabric.strategies.fsdp",
        "LayerSync": "arclight.fabric.strategies.layer_sync",
        "ModelParallelStrategy": "arclight.fabric.strategies.model_parallel",
        "ParallelStrategy": "arclight.fabric.strategies.parallel",
        "ReplicaStrategy": "arclight.fabric.strategies.parallel",
        "STRATEGY_REGISTRY": "arclight.fabric.strategies.strategy_registry",
        "SingleDeviceStrategy": "arclight.fabric.strategies.base",
        "Strategy": "arclight.fabric.strategies.base",
        "StrategyRegistry": "arclight.fabric.strategies.strategy_registry",
        "TorchSyncBatchNorm": "arclight.fabric.strategies.layer_sync",
    },
)
