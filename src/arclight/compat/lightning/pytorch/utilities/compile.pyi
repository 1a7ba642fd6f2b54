# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.loop.verification import from_compiled as from_compiled
from arclight.compat.lightning.utilities import to_uncompiled as to_uncompiled

__all__ = [
    "from_compiled",
    "to_uncompiled",
]
