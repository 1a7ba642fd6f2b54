# Written by tests/compat/write_stubs.py from the table of names.
from arclight.fabric.rank_zero import LightningDeprecationWarning as LightningDeprecationWarning
from arclight.fabric.warnings import WarningCache as WarningCache
from arclight.fabric.rank_zero import rank_zero_debug as rank_zero_debug
from arclight.fabric.rank_zero import rank_zero_deprecation as rank_zero_deprecation
from arclight.fabric.rank_zero import rank_zero_info as rank_zero_info
from arclight.fabric.rank_zero import rank_zero_only as rank_zero_only
from arclight.fabric.rank_zero import rank_zero_warn as rank_zero_warn

__all__ = [
    "LightningDeprecationWarning",
    "WarningCache",
    "rank_zero_debug",
    "rank_zero_deprecation",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
]
