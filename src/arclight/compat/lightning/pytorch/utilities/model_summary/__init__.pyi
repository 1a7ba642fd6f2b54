# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.summary import LayerSummary as LayerSummary
from arclight.trainer.summary import ModelSummary as ModelSummary
from arclight.trainer.summary import get_formatted_model_size as get_formatted_model_size
from arclight.trainer.summary import get_human_readable_count as get_human_readable_count
from arclight.trainer.summary import parse_batch_shape as parse_batch_shape
from arclight.trainer.summary import summarize as summarize
from . import model_summary as model_summary

__all__ = [
    "LayerSummary",
    "ModelSummary",
    "get_formatted_model_size",
    "get_human_readable_count",
    "parse_batch_shape",
    "summarize",
]
