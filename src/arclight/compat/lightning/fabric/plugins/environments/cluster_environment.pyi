# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.environments import ClusterEnvironment as ClusterEnvironment

__all__ = [
    "ClusterEnvironment",
]
