# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.loggers.mlflow_logger import MLFlowLogger as MLFlowLogger
from arclight.compat.lightning.utilities import _MLFLOW_AVAILABLE as _MLFLOW_AVAILABLE
from arclight.compat.lightning.utilities import _MLFLOW_SYNCHRONOUS_AVAILABLE as _MLFLOW_SYNCHRONOUS_AVAILABLE
from arclight.trainer.loggers.mlflow_logger import _get_resolve_tags as _get_resolve_tags

__all__ = [
    "MLFlowLogger",
]
