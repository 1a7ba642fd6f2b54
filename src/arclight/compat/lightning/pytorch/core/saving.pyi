# Written by tests/compat/write_stubs.py from the table of names.
from arclight.trainer.hparams import convert as convert
from arclight.trainer.hparams import load_hparams_from_tags_csv as load_hparams_from_tags_csv
from arclight.trainer.hparams import load_hparams_from_yaml as load_hparams_from_yaml
from arclight.trainer.hparams import save_hparams_to_tags_csv as save_hparams_to_tags_csv
from arclight.trainer.hparams import save_hparams_to_yaml as save_hparams_to_yaml
from arclight.trainer.hparams import update_hparams as update_hparams

__all__ = [
    "convert",
    "load_hparams_from_tags_csv",
    "load_hparams_from_yaml",
    "save_hparams_to_tags_csv",
    "save_hparams_to_yaml",
    "update_hparams",
]
