# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.strategies.layer_sync import LayerSync as LayerSync
from arclight.fabric.strategies.layer_sync import TorchSyncBatchNorm as TorchSyncBatchNorm

__all__ = [
    "LayerSync",
    "TorchSyncBatchNorm",
]
