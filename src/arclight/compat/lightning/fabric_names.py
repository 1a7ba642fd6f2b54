"""The part of the table of names that lies in our fabric: what a process runs on, and with. See :mod:`arclight.compat.lightning.names`."""

from __future__ import annotations


FABRIC: tuple[tuple[str, str, str], ...] = (
    (
        "fabric.accelerators pytorch.accelerators",
        "arclight.fabric.accelerators",
        "Accelerator CPUAccelerator CUDAAccelerator MPSAccelerator XLAAccelerator find_usable_cuda_devices",
    ),
    ("fabric.accelerators", "arclight.fabric.accelerators", "ACCELERATOR_REGISTRY"),
    ("pytorch.accelerators", "arclight.fabric.accelerators", "AcceleratorRegistry=ACCELERATOR_REGISTRY"),
    ("fabric.accelerators.registry", "arclight.fabric.accelerators.registry", "_AcceleratorRegistry=AcceleratorRegistry"),
    (
        "fabric.accelerators.accelerator pytorch.accelerators.accelerator",
        "arclight.fabric.accelerators.base",
        "Accelerator",
    ),
    ("fabric.accelerators.cpu pytorch.accelerators.cpu", "arclight.fabric.accelerators.cpu", "CPUAccelerator"),
    ("fabric.accelerators.cuda pytorch.accelerators.cuda", "arclight.fabric.accelerators.cuda", "CUDAAccelerator"),
    ("pytorch.accelerators.cpu", "arclight.fabric.accelerators.cpu", "get_cpu_stats"),
    (
        "fabric.accelerators.cuda",
        "arclight.fabric.accelerators.cuda",
        "find_usable_cuda_devices is_cuda_available num_cuda_devices",
    ),
    ("fabric.accelerators.mps pytorch.accelerators.mps", "arclight.fabric.accelerators.mps", "MPSAccelerator"),
    ("fabric.accelerators.xla pytorch.accelerators.xla", "arclight.fabric.accelerators.xla", "XLAAccelerator"),
    (
        "fabric.strategies pytorch.strategies",
        "arclight.fabric.strategies",
        "DDPStrategy FSDPStrategy ModelParallelStrategy ParallelStrategy SingleDeviceStrategy Strategy",
    ),
    ("fabric.strategies.fsdp pytorch.strategies.fsdp", "arclight.fabric.strategies.fsdp", "FSDPStrategy"),
    (
        "fabric.strategies.model_parallel pytorch.strategies.model_parallel",
        "arclight.fabric.strategies.model_parallel",
        "ModelParallelStrategy",
    ),
    ("fabric.strategies.parallel pytorch.strategies.parallel", "arclight.fabric.strategies.parallel", "ParallelStrategy"),
    ("fabric.strategies.ddp pytorch.strategies.ddp", "arclight.fabric.strategies.ddp", "DDPStrategy"),
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
    ("fabric.strategies", "arclight.fabric.strategies.registry", "STRATEGY_REGISTRY"),
    ("pytorch.strategies", "arclight.fabric.strategies.registry", "StrategyRegistry=STRATEGY_REGISTRY"),
    ("fabric.strategies.registry", "arclight.fabric.strategies.registry", "_StrategyRegistry=StrategyRegistry"),
    (
        "pytorch.plugins pytorch.plugins.layer_sync",
        "arclight.fabric.layer_sync",
        "LayerSync TorchSyncBatchNorm",
    ),
    ("fabric.strategies.single_device pytorch.strategies.single_device", "arclight.fabric.strategies.base", "SingleDeviceStrategy"),
    ("fabric.strategies.strategy pytorch.strategies.strategy", "arclight.fabric.strategies.base", "Strategy"),
    (
        "fabric.plugins fabric.plugins.precision pytorch.plugins pytorch.plugins.precision",
        "arclight.fabric.precision",
        "BitsandbytesPrecision DoublePrecision HalfPrecision MixedPrecision Precision TransformerEnginePrecision",
    ),
    (
        "fabric.plugins.precision.double pytorch.plugins.precision.double",
        "arclight.fabric.precision.one_type",
        "DoublePrecision",
    ),
    (
        "fabric.plugins.precision.bitsandbytes pytorch.plugins.precision.bitsandbytes",
        "arclight.fabric.precision.bitsandbytes",
        "BitsandbytesPrecision",
    ),
    (
        "fabric.plugins.precision.transformer_engine pytorch.plugins.precision.transformer_engine",
        "arclight.fabric.precision.transformer_engine",
        "TransformerEnginePrecision",
    ),
    ("fabric.plugins.precision.utils", "arclight.fabric.precision.base", "_DtypeContextManager=DefaultDtype"),
    ("fabric.plugins.precision.half pytorch.plugins.precision.half", "arclight.fabric.precision.one_type", "HalfPrecision"),
    ("fabric.plugins.precision.amp pytorch.plugins.precision.amp", "arclight.fabric.precision.mixed", "MixedPrecision"),
    ("fabric.plugins.precision.precision pytorch.plugins.precision.precision", "arclight.fabric.precision.base", "Precision"),
    (
        "fabric.plugins fabric.plugins.environments fabric.plugins.environments.cluster_environment "
        "pytorch.plugins.environments",
        "arclight.fabric.environments",
        "ClusterEnvironment",
    ),
    (
        "fabric.plugins.environments pytorch.plugins.environments",
        "arclight.fabric.environments",
        "KubeflowEnvironment LSFEnvironment LightningEnvironment MPIEnvironment SLURMEnvironment TorchElasticEnvironment",
    ),
    (
        "fabric.plugins.environments.lightning",
        "arclight.fabric.environments.variables",
        "LightningEnvironment",
    ),
    ("fabric.plugins.environments.lightning", "arclight.fabric.environments.base", "find_free_network_port"),
    ("fabric.plugins.environments.torchelastic", "arclight.fabric.environments.variables", "TorchElasticEnvironment"),
    ("fabric.plugins.environments.kubeflow", "arclight.fabric.environments.variables", "KubeflowEnvironment"),
    ("fabric.plugins.environments.slurm", "arclight.fabric.environments.slurm", "SLURMEnvironment"),
    ("fabric.plugins.environments.lsf", "arclight.fabric.environments.lsf", "LSFEnvironment"),
    ("fabric.plugins.environments.mpi", "arclight.fabric.environments.mpi", "MPIEnvironment"),
)
