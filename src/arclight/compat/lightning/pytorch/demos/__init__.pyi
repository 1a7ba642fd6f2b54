# Written by tests/compat/write_stubs.py from the table of names.
from arclight.compat.lightning.boring import BoringDataModule as BoringDataModule
from arclight.compat.lightning.boring import BoringModel as BoringModel
from arclight.compat.lightning.boring import DemoModel as DemoModel
from arclight.compat.lightning.sequences import LightningLSTM as LightningLSTM
from arclight.compat.lightning.sequences import LightningTransformer as LightningTransformer
from arclight.compat.lightning.sequences import SequenceSampler as SequenceSampler
from arclight.compat.lightning.sequences import SimpleLSTM as SimpleLSTM
from arclight.compat.lightning.sequences import Transformer as Transformer
from arclight.compat.lightning.sequences import WikiText2 as WikiText2
from . import boring_classes as boring_classes
from . import lstm as lstm
from . import mnist_datamodule as mnist_datamodule
from . import transformer as transformer

__all__ = [
    "BoringDataModule",
    "BoringModel",
    "DemoModel",
    "LightningLSTM",
    "LightningTransformer",
    "SequenceSampler",
    "SimpleLSTM",
    "Transformer",
    "WikiText2",
]
