# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.fabric.wrappers import FabricDataLoader as __FabricDataLoader
from arclight.trainer.fabric.wrappers import FabricModule as __FabricModule
from arclight.trainer.fabric.wrappers import FabricOptimizer as __FabricOptimizer
from arclight.trainer.fabric.wrappers import uncompiled as __unwrap_compiled
from arclight.trainer.fabric.wrappers import unwrap as __unwrap_objects
from arclight.trainer.fabric.wrappers import is_wrapped as is_wrapped

__all__ = [
    "is_wrapped",
]
_FabricDataLoader = __FabricDataLoader
_FabricModule = __FabricModule
_FabricOptimizer = __FabricOptimizer
_unwrap_compiled = __unwrap_compiled
_unwrap_objects = __unwrap_objects
