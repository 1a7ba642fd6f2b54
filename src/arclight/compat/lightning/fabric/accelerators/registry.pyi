# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.accelerators.accelerator_registry import AcceleratorRegistry as __AcceleratorRegistry

__all__ = [
]
_AcceleratorRegistry = __AcceleratorRegistry
