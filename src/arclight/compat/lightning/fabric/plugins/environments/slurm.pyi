# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.environments.clusters import SLURMEnvironment as SLURMEnvironment

__all__ = [
    "SLURMEnvironment",
]
