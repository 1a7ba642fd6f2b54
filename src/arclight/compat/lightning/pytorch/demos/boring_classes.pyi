# Written by tests/compat/write_stubs.py from the table of names.
from arclight.compat.lightning.boring import BoringDataModule as BoringDataModule
from arclight.compat.lightning.boring import BoringDataModuleNoLen as BoringDataModuleNoLen
from arclight.compat.lightning.boring import BoringModel as BoringModel
from arclight.compat.lightning.boring import DemoModel as DemoModel
from arclight.compat.lightning.boring import IterableBoringDataModule as IterableBoringDataModule
from arclight.compat.lightning.boring import ManualOptimBoringModel as ManualOptimBoringModel
from arclight.compat.lightning.boring import Net as Net
from arclight.compat.lightning.boring import RandomDataset as RandomDataset
from arclight.compat.lightning.boring import RandomDictDataset as RandomDictDataset
from arclight.compat.lightning.boring import RandomIterableDataset as RandomIterableDataset
from arclight.compat.lightning.boring import RandomIterableDatasetWithLen as RandomIterableDatasetWithLen

__all__ = [
    "BoringDataModule",
    "BoringDataModuleNoLen",
    "BoringModel",
    "DemoModel",
    "IterableBoringDataModule",
    "ManualOptimBoringModel",
    "Net",
    "RandomDataset",
    "RandomDictDataset",
    "RandomIterableDataset",
    "RandomIterableDatasetWithLen",
]
