"""Save and load checkpoints: a folder of safetensors and JSON, atomic, never unpickled.

In: a tree of tensors and plain values; out: a folder, and the same tree back, bit for bit. Open ``store`` first: save, load, verify.
``tree`` encodes values as JSON, ``tensorfile`` writes safetensors, ``stored_tensor`` reads tensors when they are used, ``manifest`` names
files and hashes, ``files`` and ``remote`` call the file system. ``sharded`` saves and loads on several ranks, ``async_saver`` saves in
the background, ``conversion`` (with ``dcp`` and ``pickled_modules``) reads and writes other formats. ``filters`` selects entries,
``retention`` finds and removes checkpoints, ``inspection`` summarises a manifest. What is on disk must stay readable.
"""

from typing import TYPE_CHECKING

from arclight._lazy import lazy

if TYPE_CHECKING:
    from arclight.checkpoint.async_saver import AsyncSaver as AsyncSaver
    from arclight.checkpoint.conversion import convert as convert
    from arclight.checkpoint.conversion import load_weights as load_weights
    from arclight.checkpoint.conversion import read_pickled as read_pickled
    from arclight.checkpoint.errors import CheckpointError as CheckpointError
    from arclight.checkpoint.inspection import Inspection as Inspection
    from arclight.checkpoint.inspection import inspect as inspect
    from arclight.checkpoint.retention import find_last as find_last
    from arclight.checkpoint.retention import prune as prune
    from arclight.checkpoint.retention import remove as remove
    from arclight.checkpoint.sharded.reader import load_shards as load_shards
    from arclight.checkpoint.sharded.writer import save_shards as save_shards
    from arclight.checkpoint.store import load as load
    from arclight.checkpoint.store import save as save
    from arclight.checkpoint.store import verify as verify

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "AsyncSaver": "arclight.checkpoint.async_saver",
        "CheckpointError": "arclight.checkpoint.errors",
        "Inspection": "arclight.checkpoint.inspection",
        "convert": "arclight.checkpoint.conversion",
        "find_last": "arclight.checkpoint.retention",
        "inspect": "arclight.checkpoint.inspection",
        "load_weights": "arclight.checkpoint.conversion",
        "load": "arclight.checkpoint.store",
        "load_shards": "arclight.checkpoint.sharded.reader",
        "read_pickled": "arclight.checkpoint.conversion",
        "prune": "arclight.checkpoint.retention",
        "remove": "arclight.checkpoint.retention",
        "save": "arclight.checkpoint.store",
        "save_shards": "arclight.checkpoint.sharded.writer",
        "verify": "arclight.checkpoint.store",
    },
)
