# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.environments.clusters import LightningEnvironment as LightningEnvironment
from arclight.fabric.environments.clusters import find_free_network_port as find_free_network_port

__all__ = [
    "LightningEnvironment",
    "find_free_network_port",
]
