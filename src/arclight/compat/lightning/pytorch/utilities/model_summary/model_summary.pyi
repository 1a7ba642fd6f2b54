# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.summary import LEFTOVER_PARAMS_NAME as LEFTOVER_PARAMS_NAME
from arclight.trainer.summary import LayerSummary as LayerSummary
from arclight.trainer.summary import ModelSummary as ModelSummary
from arclight.trainer.summary import NOT_APPLICABLE as NOT_APPLICABLE
from arclight.trainer.summary import PARAMETER_NUM_UNITS as PARAMETER_NUM_UNITS
from arclight.trainer.summary import UNKNOWN_SIZE as UNKNOWN_SIZE
from arclight.trainer.summary import get_formatted_model_size as get_formatted_model_size
from arclight.trainer.summary import get_human_readable_count as get_human_readable_count
from arclight.trainer.summary import parse_batch_shape as parse_batch_shape
from arclight.trainer.summary import summarize as summarize

__all__ = [
    "LEFTOVER_PARAMS_NAME",
    "LayerSummary",
    "ModelSummary",
    "NOT_APPLICABLE",
    "PARAMETER_NUM_UNITS",
    "UNKNOWN_SIZE",
    "get_formatted_model_size",
    "get_human_readable_count",
    "parse_batch_shape",
    "summarize",
]
