"""List the names of Lightning that are not offered: they can be imported and asked about, and say why when they are used."""

from __future__ import annotations

from arclight.fabric.accelerators import NO_XLA as _XLA
from arclight.trainer.loggers import NO_NEPTUNE as _NEPTUNE

_HPU = "HPU devices are not supported; use accelerator='cuda', 'mps' or 'cpu'"
_DP = "one process that drives several devices is slower than one per device; use strategy='ddp'"
_DEEPSPEED = "sharded optimizers, gradients and parameters are strategy='fsdp', in plain torch; use that"
_LITLOGGER = "it reports to one vendor's service; use TensorBoardLogger, CSVLogger or a Logger of your own"
_MNIST = "it downloads a data set; read the files that you have with a DataModule of your own"

_NOT_OFFERED: tuple[tuple[str, str, str], ...] = (
    ("fabric.accelerators pytorch.accelerators", _XLA, "XLAAccelerator"),
    ("fabric.accelerators.xla pytorch.accelerators.xla", _XLA, "XLAAccelerator"),
    ("pytorch.loggers pytorch.loggers.neptune", _NEPTUNE, "NeptuneLogger"),
    ("fabric.strategies", _XLA, "XLAFSDPStrategy"),
    ("fabric.strategies pytorch.strategies", _XLA, "SingleDeviceXLAStrategy XLAStrategy"),
    ("fabric.strategies.xla pytorch.strategies.xla", _XLA, "XLAStrategy"),
    ("fabric.strategies.single_xla pytorch.strategies.single_xla", _XLA, "SingleDeviceXLAStrategy"),
    ("fabric.strategies.xla_fsdp", _XLA, "XLAFSDPStrategy"),
    (
        "fabric.plugins fabric.plugins.precision fabric.plugins.precision.xla "
        "pytorch.plugins pytorch.plugins.precision pytorch.plugins.precision.xla",
        _XLA,
        "XLAPrecision",
    ),
    ("fabric.plugins fabric.plugins.io pytorch.plugins pytorch.plugins.io", _XLA, "XLACheckpointIO"),
    ("fabric.plugins.environments pytorch.plugins.environments", _XLA, "XLAEnvironment"),
    ("pytorch.profilers pytorch.profilers.xla", _XLA, "XLAProfiler"),
    ("pytorch.accelerators", _HPU, "HPUAccelerator"),
    ("pytorch.strategies", _HPU, "HPUParallelStrategy SingleHPUStrategy"),
    ("pytorch.plugins pytorch.plugins.precision", _HPU, "HPUPrecisionPlugin"),
    ("pytorch.plugins pytorch.plugins.io", _HPU, "HPUCheckpointIO"),
    ("fabric.strategies fabric.strategies.dp", _DP, "DataParallelStrategy"),
    (
        "fabric.strategies fabric.strategies.deepspeed pytorch.strategies pytorch.strategies.deepspeed",
        _DEEPSPEED,
        "DeepSpeedStrategy",
    ),
    (
        "fabric.plugins fabric.plugins.precision fabric.plugins.precision.deepspeed "
        "pytorch.plugins pytorch.plugins.precision pytorch.plugins.precision.deepspeed",
        _DEEPSPEED,
        "DeepSpeedPrecision",
    ),
    ("pytorch.demos.mnist_datamodule", _MNIST, "MNIST MNISTDataModule"),
    ("pytorch.loggers pytorch.loggers.litlogger", _LITLOGGER, "LitLogger"),
)


def _reasons() -> dict[str, dict[str, str]]:
    reasons: dict[str, dict[str, str]] = {}
    for modules, reason, names in _NOT_OFFERED:
        for module in modules.split():
            reasons.setdefault(module, {}).update(dict.fromkeys(names.split(), reason))
    return reasons


REFUSED = _reasons()
"""Lightning's module -> name that is refused on purpose -> why, and what to use."""
