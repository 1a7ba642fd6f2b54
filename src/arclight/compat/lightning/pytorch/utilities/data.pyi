# Written by tests/compat/write_stubs.py from the table of names.
from arclight.compat.lightning.utilities import extract_batch_size as extract_batch_size
from arclight.compat.lightning.utilities import reads_a_stream as has_iterable_dataset
from arclight.compat.lightning.utilities import has_len_all_ranks as has_len_all_ranks
from arclight.compat.lightning.utilities import sized_len as sized_len
from arclight.compat.lightning.utilities import warning_cache as warning_cache

__all__ = [
    "extract_batch_size",
    "has_iterable_dataset",
    "has_len_all_ranks",
    "sized_len",
    "warning_cache",
]
