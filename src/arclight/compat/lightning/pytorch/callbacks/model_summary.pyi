# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.callbacks.monitoring.model_summary import ModelSummary as ModelSummary

__all__ = [
    "ModelSummary",
]
