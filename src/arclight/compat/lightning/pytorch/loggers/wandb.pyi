# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.loggers.wandb_logger import WandbLogger as WandbLogger
from arclight.compat.lightning.utilities import _WANDB_AVAILABLE as _WANDB_AVAILABLE

__all__ = [
    "WandbLogger",
]
