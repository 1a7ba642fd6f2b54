# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.hparams import Hyperparameters as AttributeDict
from arclight.trainer.hparams import clean_namespace as clean_namespace
from arclight.compat.lightning.utilities import collect_init_args as collect_init_args
from arclight.compat.lightning.utilities import get_init_args as get_init_args
from arclight.trainer.hparams import is_picklable as is_picklable
from arclight.trainer.hparams import get_setting as lightning_getattr
from arclight.trainer.hparams import has_setting as lightning_hasattr
from arclight.trainer.hparams import set_setting as lightning_setattr
from arclight.compat.lightning.utilities import parse_class_init_keys as parse_class_init_keys

__all__ = [
    "AttributeDict",
    "clean_namespace",
    "collect_init_args",
    "get_init_args",
    "is_picklable",
    "lightning_getattr",
    "lightning_hasattr",
    "lightning_setattr",
    "parse_class_init_keys",
]
