"""Small files that are replaced in one step and survive a power failure."""

from __future__ import annotations

import os
from pathlib import Path

from arclight.fabric import replacing


def replace_durably(path: Path, text: str) -> None:
    """Put ``text`` at ``path``, on the disk when this returns; what was there stays whole until then."""
    temporary = replacing.temporary(path)
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        replacing.sync_folder(path.parent)
    finally:
        replacing.discard(temporary)
