# Written by tests/compat/write_stubs.py from the table of names.
from arclight.compat.lightning.utilities import GradClipAlgorithmType as GradClipAlgorithmType
from arclight.compat.lightning.utilities import LightningEnum as LightningEnum

__all__ = [
    "GradClipAlgorithmType",
    "LightningEnum",
]
