# Written by tests/compat/write_stubs.py from the table of names.
from arclight.compat.lightning.trainer import Trainer as Trainer
from arclight.fabric.seeding import seed_everything as seed_everything
from . import states as states
from . import trainer as trainer

__all__ = [
    "Trainer",
    "seed_everything",
]
