# Written by tests/compat/write_stubs.py from the table of names.
from arclight.compat.lightning.types import DistributedDataParallel as DistributedDataParallel
from arclight.compat.lightning.types import EVAL_DATALOADERS as EVAL_DATALOADERS
from arclight.trainer.loop.optimizers import LRSchedulerConfig as LRSchedulerConfig
from arclight.compat.lightning.types import LRSchedulerConfigType as LRSchedulerConfigType
from arclight.compat.lightning.types import LRSchedulerPLType as LRSchedulerPLType
from arclight.compat.lightning.types import LRSchedulerType as LRSchedulerType
from arclight.compat.lightning.types import LRSchedulerTypeTuple as LRSchedulerTypeTuple
from arclight.compat.lightning.types import LRSchedulerTypeUnion as LRSchedulerTypeUnion
from arclight.compat.lightning.types import OptimizerConfig as OptimizerConfig
from arclight.compat.lightning.types import OptimizerLRScheduler as OptimizerLRScheduler
from arclight.compat.lightning.types import OptimizerLRSchedulerConfig as OptimizerLRSchedulerConfig
from arclight.compat.lightning.types import STEP_OUTPUT as STEP_OUTPUT
from arclight.compat.lightning.types import TRAIN_DATALOADERS as TRAIN_DATALOADERS

__all__ = [
    "DistributedDataParallel",
    "EVAL_DATALOADERS",
    "LRSchedulerConfig",
    "LRSchedulerConfigType",
    "LRSchedulerPLType",
    "LRSchedulerType",
    "LRSchedulerTypeTuple",
    "LRSchedulerTypeUnion",
    "OptimizerConfig",
    "OptimizerLRScheduler",
    "OptimizerLRSchedulerConfig",
    "STEP_OUTPUT",
    "TRAIN_DATALOADERS",
]
