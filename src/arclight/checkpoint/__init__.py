"""One checkpoint format: a folder of safetensors and JSON with a manifest; whole or not there, never unpickled."""

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.checkpoint.conversion import convert, load_weights, read_pickled
    from arclight.checkpoint.errors import CheckpointError
    from arclight.checkpoint.inspection import Inspection, inspect
    from arclight.checkpoint.retention import find_last, prune, remove
    from arclight.checkpoint.saver import AsyncSaver
    from arclight.checkpoint.share_loading import load_shares
    from arclight.checkpoint.shares import save_shares
    from arclight.checkpoint.store import load, save, verify

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "AsyncSaver": "arclight.checkpoint.saver",
        "CheckpointError": "arclight.checkpoint.errors",
        "Inspection": "arclight.checkpoint.inspection",
        "convert": "arclight.checkpoint.conversion",
        "find_last": "arclight.checkpoint.retention",
        "inspect": "arclight.checkpoint.inspection",
        "load_weights": "arclight.checkpoint.conversion",
        "load": "arclight.checkpoint.store",
        "load_shares": "arclight.checkpoint.share_loading",
        "read_pickled": "arclight.checkpoint.conversion",
        "prune": "arclight.checkpoint.retention",
        "remove": "arclight.checkpoint.retention",
        "save": "arclight.checkpoint.store",
        "save_shares": "arclight.checkpoint.shares",
        "verify": "arclight.checkpoint.store",
    },
)
