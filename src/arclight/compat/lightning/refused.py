"""Names of Lightning that are not offered: they can be imported and asked about, and say why when they are used."""

from __future__ import annotations

from functools import cache
from typing import Any

_XLA = "XLA devices are not supported; use accelerator='cuda', 'mps' or 'cpu'"
_HPU = "HPU devices are not supported; use accelerator='cuda', 'mps' or 'cpu'"
_DP = "one process that drives several devices is slower than one per device; use strategy='ddp'"
_DEEPSPEED = "sharded optimizers, gradients and parameters are strategy='fsdp', in plain torch; use that"
_LITLOGGER = "it reports to one vendor's service; use TensorBoardLogger, CSVLogger or a Logger of your own"
_MNIST = "it downloads a data set; read the files that you have with a DataModule of your own"

_NOT_OFFERED: tuple[tuple[str, str, str], ...] = (
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


class Refused:
    """Base of the stand-ins. Nothing is an instance of one; making or subclassing one raises NotImplementedError."""

    reason: str

    def __new__(cls, *arguments: Any, **options: Any) -> Refused:
        raise NotImplementedError(f"`{cls.__name__}` is not offered: {cls.reason}")

    @staticmethod
    def is_available() -> bool:
        """Return True if such a device can be used: asked of every accelerator by code that chooses one."""
        return False

    def __init_subclass__(cls) -> None:
        if "reason" not in vars(cls):
            raise NotImplementedError(f"`{cls.__bases__[0].__name__}` is not offered: {cls.reason}")


@cache
def refusal(name: str, reason: str) -> type[Refused]:
    """The stand-in for ``name``; always the same class for the same words."""
    return type(name, (Refused,), {"reason": reason, "__doc__": f"Not offered: {reason}", "__module__": __name__})
