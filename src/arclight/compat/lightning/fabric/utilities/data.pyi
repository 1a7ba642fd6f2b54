# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.hparams import Hyperparameters as AttributeDict
from arclight.compat.lightning.utilities import reads_a_stream as has_iterable_dataset
from arclight.compat.lightning.utilities import has_len as has_len
from arclight.compat.lightning.utilities import sized_len as sized_len
from arclight.compat.lightning.utilities import suggested_max_num_workers as suggested_max_num_workers

__all__ = [
    "AttributeDict",
    "has_iterable_dataset",
    "has_len",
    "sized_len",
    "suggested_max_num_workers",
]
