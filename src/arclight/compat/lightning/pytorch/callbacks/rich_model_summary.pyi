# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.callbacks.monitoring.model_summary import RichModelSummary as RichModelSummary

__all__ = [
    "RichModelSummary",
]
