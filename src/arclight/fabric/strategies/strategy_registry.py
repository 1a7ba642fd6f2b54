"""Register strategies by name, such as ``"ddp"`` and ``"fsdp"``.

`selection` looks up ``strategy=`` here; ``trainer.fabric.strategies`` adds those of ``parallel``, users register their own, packages bring
theirs. Names (most are Lightning's) are in recipes and stay; a new strategy is registered in `_built_in`.
"""

from __future__ import annotations

from arclight.fabric.registry import Registry
from arclight.fabric.strategies.ddp import DDPStrategy
from arclight.fabric.strategies.fsdp import FSDPStrategy
from arclight.fabric.strategies.model_parallel import ModelParallelStrategy
from arclight.fabric.strategies.parallel import ReplicaStrategy

DDP_START_METHODS = {"ddp": "popen", "ddp_spawn": "spawn", "ddp_fork": "fork", "ddp_notebook": "fork"}
"""How processes start under each name of the family."""


class StrategyRegistry(Registry):
    """Registry of strategy names, with their classes and arguments.

    Installed packages add theirs as entry points in the group ``arclight.strategies``.
    """

    def __init__(self) -> None:
        super().__init__("strategy", "strategies")

    def available_strategies(self) -> list[str]:
        """Return every name."""
        return self.names()


def _built_in() -> StrategyRegistry:
    names = StrategyRegistry()
    for name, start_method in DDP_START_METHODS.items():
        names.register(name, DDPStrategy, f"DDP, processes started by {start_method}", start_method=start_method)
        for unused in (False, True):
            names.register(
                f"{name}_find_unused_parameters_{str(unused).lower()}",
                DDPStrategy,
                f"DDP, processes started by {start_method}, {'with' if unused else 'without'} a search for unused parameters",
                start_method=start_method,
                find_unused_parameters=unused,
            )
    names.register("fsdp", FSDPStrategy, "FSDP2: shards of parameters, gradients and moments")
    names.register("fsdp_cpu_offload", FSDPStrategy, "FSDP2 with the shards in host memory", cpu_offload=True)
    names.register("model_parallel", ModelParallelStrategy, "tensor parallelism and FSDP2 by hand, on a mesh")
    names.register("replicas", ReplicaStrategy, "copies that train alone; the DiLoCo callback synchronises them")
    return names


STRATEGY_REGISTRY = _built_in()
