"""Small files that are replaced in one step and survive a power failure."""

from __future__ import annotations

import os
from pathlib import Path

from arclight.fabric import replacing


def replace_durably(path: Path, text: str, *, synced: bool = True) -> None:
    """Put ``text`` at ``path``, on the disk when this returns; what was there stays whole until then.

    synced: whether a power failure may not lose it; what is made anew from other files need not wait for the disk.
    """
    temporary = replacing.temporary(path)
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            if synced:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if synced:
            replacing.sync_folder(path.parent)
    finally:
        replacing.discard(temporary)
