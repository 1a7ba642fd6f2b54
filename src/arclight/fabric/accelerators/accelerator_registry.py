"""Register accelerators by name, and resolve ``accelerator=`` of Trainer and Fabric.

``fabric.selection`` and ``cli.commands.run`` call `resolve_accelerator`. An object, class or name comes in, an accelerator goes out. Names
are Lightning's, are in recipes, and stay.
"""

from __future__ import annotations

from typing import Any

from arclight.fabric.accelerators import NO_XLA
from arclight.fabric.accelerators.base import Accelerator
from arclight.fabric.accelerators.devices import CPUAccelerator, CUDAAccelerator, MPSAccelerator
from arclight.fabric.errors import MissingDeviceError
from arclight.fabric.registry import Registry


class AcceleratorRegistry(Registry):
    """Accelerator classes by the name that ``accelerator=`` takes.

    Installed packages add theirs as entry points in the group ``arclight.accelerators``.
    """

    def __init__(self) -> None:
        super().__init__("accelerator", "accelerators")

    def available_accelerators(self) -> set[str]:
        """Return all registered names."""
        return set(self.names())


ACCELERATOR_REGISTRY = AcceleratorRegistry()
for _kind in (CPUAccelerator, CUDAAccelerator, MPSAccelerator):
    _kind.register_accelerators(ACCELERATOR_REGISTRY)


def resolve_accelerator(choice: str | Accelerator | type[Accelerator]) -> Accelerator:
    """Resolve ``choice`` to an accelerator.

    ``auto`` is the first available of CUDA, MPS and CPU, ``gpu`` of CUDA and MPS. Raises ValueError for an unknown name,
    MissingDeviceError if this machine has no such device.
    """
    if isinstance(choice, type) and issubclass(choice, Accelerator):
        choice = choice()
    if isinstance(choice, Accelerator):
        return _require_available(choice)
    if choice == "auto":
        kinds = (CUDAAccelerator, MPSAccelerator, CPUAccelerator)
        return next(kind() for kind in kinds if kind.is_available())
    if choice in ("tpu", "xla") and choice not in ACCELERATOR_REGISTRY.available_accelerators():
        raise MissingDeviceError(f"accelerator={choice!r}: {NO_XLA}")
    if choice == "gpu":
        kind = next((kind for kind in (CUDAAccelerator, MPSAccelerator) if kind.is_available()), None)
        if kind is None:
            raise MissingDeviceError("No supported gpu backend found! accelerator='gpu' needs a CUDA or Apple GPU")
        return kind()
    if not isinstance(choice, str) or choice not in ACCELERATOR_REGISTRY.available_accelerators():
        names = ", ".join(["auto", "gpu", *ACCELERATOR_REGISTRY.names()])
        raise ValueError(
            f"You selected an invalid accelerator name: `accelerator={choice!r}`. Names are {names}; or pass an Accelerator"
        )
    return _require_available(ACCELERATOR_REGISTRY.get(choice))


def _require_available(accelerator: Accelerator) -> Accelerator:
    if not accelerator.is_available():
        there = [name for name, entry in ACCELERATOR_REGISTRY.items() if _available(entry["accelerator"])]
        raise MissingDeviceError(
            f"`{type(accelerator).__qualname__}` can not run on your system since the accelerator is not available. "
            f"Available and possible as `accelerator` are: {', '.join(there)}; see `arclight doctor`"
        )
    return accelerator


def _available(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Accelerator) and kind.is_available()
