# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.environments.clusters import TorchElasticEnvironment as TorchElasticEnvironment

__all__ = [
    "TorchElasticEnvironment",
]
