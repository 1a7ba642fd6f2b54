# Written by tests/compat/write_stubs.py from the table of names.
from arclight.compat.lightning.utilities import convert_tensors_to_scalars as convert_tensors_to_scalars
from arclight.compat.lightning.utilities import convert_to_tensors as convert_to_tensors
from arclight.fabric.batches import move_batch as move_data_to_device

__all__ = [
    "convert_tensors_to_scalars",
    "convert_to_tensors",
    "move_data_to_device",
]
