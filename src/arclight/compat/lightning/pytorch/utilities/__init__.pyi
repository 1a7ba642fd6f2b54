# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.hparams import Hyperparameters as AttributeDict
from arclight.data.combined import CombinedLoader as CombinedLoader
from arclight.compat.lightning.utilities import GradClipAlgorithmType as GradClipAlgorithmType
from arclight.compat.lightning.utilities import LightningEnum as LightningEnum
from arclight.fabric.warnings import disable_possible_user_warnings as disable_possible_user_warnings
from arclight.fabric.modules import find_shared_parameters as find_shared_parameters
from arclight.compat.lightning.utilities import grad_norm as grad_norm
from arclight.trainer.hparams import is_picklable as is_picklable
from arclight.compat.lightning.utilities import is_shared_filesystem as is_shared_filesystem
from arclight.trainer.throughput import measure_flops as measure_flops
from arclight.fabric.batches import move_batch as move_data_to_device
from arclight.fabric.rank_zero import rank_zero_deprecation as rank_zero_deprecation
from arclight.fabric.rank_zero import rank_zero_info as rank_zero_info
from arclight.fabric.rank_zero import rank_zero_only as rank_zero_only
from arclight.fabric.rank_zero import rank_zero_warn as rank_zero_warn
from arclight.fabric.modules import set_shared_parameters as set_shared_parameters
from arclight.compat.lightning.utilities import suggested_max_num_workers as suggested_max_num_workers
from . import combined_loader as combined_loader
from . import compile as compile
from . import data as data
from . import enums as enums
from . import exceptions as exceptions
from . import grads as grads
from . import memory as memory
from . import model_helpers as model_helpers
from . import model_summary as model_summary
from . import parameter_tying as parameter_tying
from . import parsing as parsing
from . import rank_zero as rank_zero
from . import seed as seed
from . import signature_utils as signature_utils
from . import types as types
from . import warnings as warnings

__all__ = [
    "AttributeDict",
    "CombinedLoader",
    "GradClipAlgorithmType",
    "LightningEnum",
    "disable_possible_user_warnings",
    "find_shared_parameters",
    "grad_norm",
    "is_picklable",
    "is_shared_filesystem",
    "measure_flops",
    "move_data_to_device",
    "rank_zero_deprecation",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
    "set_shared_parameters",
    "suggested_max_num_workers",
]
