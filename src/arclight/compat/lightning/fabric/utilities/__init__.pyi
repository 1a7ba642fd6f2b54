# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.hparams import Hyperparameters as AttributeDict
from arclight.compat.lightning.utilities import LightningEnum as LightningEnum
from arclight.trainer.throughput import Throughput as Throughput
from arclight.trainer.throughput import ThroughputMonitor as ThroughputMonitor
from arclight.fabric.warnings import disable_possible_user_warnings as disable_possible_user_warnings
from arclight.compat.lightning.utilities import is_shared_filesystem as is_shared_filesystem
from arclight.trainer.throughput import measure_flops as measure_flops
from arclight.fabric.batches import move_batch as move_data_to_device
from arclight.fabric.rank_zero import rank_zero_deprecation as rank_zero_deprecation
from arclight.fabric.rank_zero import rank_zero_info as rank_zero_info
from arclight.fabric.rank_zero import rank_zero_only as rank_zero_only
from arclight.fabric.rank_zero import rank_zero_warn as rank_zero_warn
from arclight.compat.lightning.utilities import suggested_max_num_workers as suggested_max_num_workers
from . import apply_func as apply_func
from . import data as data
from . import distributed as distributed
from . import enums as enums
from . import exceptions as exceptions
from . import logger as logger
from . import rank_zero as rank_zero
from . import registry as registry
from . import seed as seed
from . import spike as spike
from . import throughput as throughput
from . import types as types
from . import warnings as warnings

__all__ = [
    "AttributeDict",
    "LightningEnum",
    "Throughput",
    "ThroughputMonitor",
    "disable_possible_user_warnings",
    "is_shared_filesystem",
    "measure_flops",
    "move_data_to_device",
    "rank_zero_deprecation",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
    "suggested_max_num_workers",
]
