# Written by tests/compat/write_stubs.py from the table of names.
from arclight.compat.lightning.cli import ArgsType as ArgsType
from arclight.compat.lightning.cli import LRSchedulerCallable as LRSchedulerCallable
from arclight.compat.lightning.cli import LRSchedulerType as LRSchedulerType
from arclight.compat.lightning.cli import LRSchedulerTypeTuple as LRSchedulerTypeTuple
from arclight.compat.lightning.cli import LRSchedulerTypeUnion as LRSchedulerTypeUnion
from arclight.compat.lightning.cli import LightningArgumentParser as LightningArgumentParser
from arclight.compat.lightning.cli import LightningCLI as LightningCLI
from arclight.compat.lightning.cli import OptimizerCallable as OptimizerCallable
from arclight.compat.lightning.cli import ReduceLROnPlateau as ReduceLROnPlateau
from arclight.compat.lightning.cli import SaveConfigCallback as SaveConfigCallback
from arclight.compat.lightning.cli import instantiate_class as instantiate_class
from arclight.compat.lightning.cli import instantiate_module as instantiate_module

__all__ = [
    "ArgsType",
    "LRSchedulerCallable",
    "LRSchedulerType",
    "LRSchedulerTypeTuple",
    "LRSchedulerTypeUnion",
    "LightningArgumentParser",
    "LightningCLI",
    "OptimizerCallable",
    "ReduceLROnPlateau",
    "SaveConfigCallback",
    "instantiate_class",
    "instantiate_module",
]
