# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.environments.clusters import MPIEnvironment as MPIEnvironment

__all__ = [
    "MPIEnvironment",
]
