# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.seeding import isolate_rng as isolate_rng

__all__ = [
    "isolate_rng",
]
