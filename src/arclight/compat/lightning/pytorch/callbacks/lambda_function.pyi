# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.callbacks.lambda_callback import LambdaCallback as LambdaCallback

__all__ = [
    "LambdaCallback",
]
