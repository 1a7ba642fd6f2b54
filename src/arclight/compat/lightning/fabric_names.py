"""The part of the table of names that lies in our fabric: what a process runs on, and with. See :mod:`arclight.compat.lightning.names`."""

from __future__ import annotations

_STRATEGIES = "arclight.fabric.strategies"
_PRECISION = "arclight.fabric.precision"
_ENVIRONMENTS = "arclight.fabric.environments"
_ACCELERATORS = "arclight.fabric.accelerators"

FABRIC: tuple[tuple[str, str, str], ...] = (
    (
        "fabric.accelerators pytorch.accelerators",
        _ACCELERATORS,
        "Accelerator CPUAccelerator CUDAAccelerator MPSAccelerator XLAAccelerator find_usable_cuda_devices",
    ),
    ("fabric.accelerators", _ACCELERATORS, "ACCELERATOR_REGISTRY"),
    ("pytorch.accelerators", _ACCELERATORS, "AcceleratorRegistry=ACCELERATOR_REGISTRY"),
    ("fabric.accelerators.registry", f"{_ACCELERATORS}.registry", "_AcceleratorRegistry=AcceleratorRegistry"),
    (
        "fabric.accelerators.accelerator pytorch.accelerators.accelerator",
        f"{_ACCELERATORS}.base",
        "Accelerator",
    ),
    ("fabric.accelerators.cpu pytorch.accelerators.cpu", f"{_ACCELERATORS}.cpu", "CPUAccelerator"),
    ("fabric.accelerators.cuda pytorch.accelerators.cuda", f"{_ACCELERATORS}.cuda", "CUDAAccelerator"),
    ("pytorch.accelerators.cpu", f"{_ACCELERATORS}.cpu", "get_cpu_stats"),
    (
        "fabric.accelerators.cuda",
        f"{_ACCELERATORS}.cuda",
        "find_usable_cuda_devices is_cuda_available num_cuda_devices",
    ),
    ("fabric.accelerators.mps pytorch.accelerators.mps", f"{_ACCELERATORS}.mps", "MPSAccelerator"),
    ("fabric.accelerators.xla pytorch.accelerators.xla", f"{_ACCELERATORS}.xla", "XLAAccelerator"),
    (
        "fabric.strategies pytorch.strategies",
        _STRATEGIES,
        "DDPStrategy FSDPStrategy ModelParallelStrategy ParallelStrategy SingleDeviceStrategy Strategy",
    ),
    ("fabric.strategies.fsdp pytorch.strategies.fsdp", f"{_STRATEGIES}.fsdp", "FSDPStrategy"),
    (
        "fabric.strategies.model_parallel pytorch.strategies.model_parallel",
        f"{_STRATEGIES}.model_parallel",
        "ModelParallelStrategy",
    ),
    ("fabric.strategies.parallel pytorch.strategies.parallel", f"{_STRATEGIES}.parallel", "ParallelStrategy"),
    ("fabric.strategies.ddp pytorch.strategies.ddp", f"{_STRATEGIES}.ddp", "DDPStrategy"),
    (
        "fabric.plugins.collectives fabric.plugins.collectives.torch_collective",
        "arclight.fabric.collectives",
        "TorchCollective",
    ),
    (
        "fabric.plugins.collectives fabric.plugins.collectives.single_device",
        "arclight.fabric.collectives",
        "SingleDeviceCollective",
    ),
    (
        "fabric.plugins.collectives fabric.plugins.collectives.collective",
        "arclight.fabric.collectives",
        "Collective",
    ),
    ("fabric.strategies", f"{_STRATEGIES}.registry", "STRATEGY_REGISTRY"),
    ("pytorch.strategies", f"{_STRATEGIES}.registry", "StrategyRegistry=STRATEGY_REGISTRY"),
    ("fabric.strategies.registry", f"{_STRATEGIES}.registry", "_StrategyRegistry=StrategyRegistry"),
    (
        "pytorch.plugins pytorch.plugins.layer_sync",
        "arclight.fabric.layer_sync",
        "LayerSync TorchSyncBatchNorm",
    ),
    ("fabric.strategies.single_device pytorch.strategies.single_device", f"{_STRATEGIES}.base", "SingleDeviceStrategy"),
    ("fabric.strategies.strategy pytorch.strategies.strategy", f"{_STRATEGIES}.base", "Strategy"),
    (
        "fabric.plugins fabric.plugins.precision pytorch.plugins pytorch.plugins.precision",
        _PRECISION,
        "BitsandbytesPrecision DoublePrecision HalfPrecision MixedPrecision Precision TransformerEnginePrecision",
    ),
    (
        "fabric.plugins.precision.double pytorch.plugins.precision.double",
        f"{_PRECISION}.one_type",
        "DoublePrecision",
    ),
    (
        "fabric.plugins.precision.bitsandbytes pytorch.plugins.precision.bitsandbytes",
        f"{_PRECISION}.bitsandbytes",
        "BitsandbytesPrecision",
    ),
    (
        "fabric.plugins.precision.transformer_engine pytorch.plugins.precision.transformer_engine",
        f"{_PRECISION}.transformer_engine",
        "TransformerEnginePrecision",
    ),
    ("fabric.plugins.precision.utils", f"{_PRECISION}.base", "_DtypeContextManager=DefaultDtype"),
    ("fabric.plugins.precision.half pytorch.plugins.precision.half", f"{_PRECISION}.one_type", "HalfPrecision"),
    ("fabric.plugins.precision.amp pytorch.plugins.precision.amp", f"{_PRECISION}.mixed", "MixedPrecision"),
    ("fabric.plugins.precision.precision pytorch.plugins.precision.precision", f"{_PRECISION}.base", "Precision"),
    (
        "fabric.plugins fabric.plugins.environments fabric.plugins.environments.cluster_environment "
        "pytorch.plugins.environments",
        _ENVIRONMENTS,
        "ClusterEnvironment",
    ),
    (
        "fabric.plugins.environments pytorch.plugins.environments",
        _ENVIRONMENTS,
        "KubeflowEnvironment LSFEnvironment LightningEnvironment MPIEnvironment SLURMEnvironment TorchElasticEnvironment",
    ),
    (
        "fabric.plugins.environments.lightning",
        f"{_ENVIRONMENTS}.variables",
        "LightningEnvironment",
    ),
    ("fabric.plugins.environments.lightning", f"{_ENVIRONMENTS}.base", "find_free_network_port"),
    ("fabric.plugins.environments.torchelastic", f"{_ENVIRONMENTS}.variables", "TorchElasticEnvironment"),
    ("fabric.plugins.environments.kubeflow", f"{_ENVIRONMENTS}.variables", "KubeflowEnvironment"),
    ("fabric.plugins.environments.slurm", f"{_ENVIRONMENTS}.slurm", "SLURMEnvironment"),
    ("fabric.plugins.environments.lsf", f"{_ENVIRONMENTS}.lsf", "LSFEnvironment"),
    ("fabric.plugins.environments.mpi", f"{_ENVIRONMENTS}.mpi", "MPIEnvironment"),
)
