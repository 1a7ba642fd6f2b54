# Written by tests/compat/write_stubs.py from the table of names.
from arclight.compat.lightning.sequences import Dictionary as Dictionary
from arclight.compat.lightning.sequences import LightningTransformer as LightningTransformer
from arclight.compat.lightning.sequences import PositionalEncoding as PositionalEncoding
from arclight.compat.lightning.sequences import Transformer as Transformer
from arclight.compat.lightning.sequences import WikiText2 as WikiText2
from arclight.compat.lightning.sequences import tokenize as tokenize

__all__ = [
    "Dictionary",
    "LightningTransformer",
    "PositionalEncoding",
    "Transformer",
    "WikiText2",
    "tokenize",
]
