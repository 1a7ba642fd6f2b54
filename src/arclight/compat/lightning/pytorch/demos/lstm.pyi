# Written by tests/compat/write_stubs.py from the table of names.
from arclight.compat.lightning.sequences import LightningLSTM as LightningLSTM
from arclight.compat.lightning.sequences import SequenceSampler as SequenceSampler
from arclight.compat.lightning.sequences import SimpleLSTM as SimpleLSTM

__all__ = [
    "LightningLSTM",
    "SequenceSampler",
    "SimpleLSTM",
]
