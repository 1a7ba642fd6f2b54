# Written by tests/compat/write_stubs.py from the table of names.
from arclight.compat.lightning.types import CollectibleGroup as CollectibleGroup
from arclight.compat.lightning.types import Optimizable as Optimizable
from arclight.compat.lightning.types import Steppable as Steppable

__all__ = [
    "CollectibleGroup",
    "Optimizable",
    "Steppable",
]
