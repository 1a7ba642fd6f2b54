"""Small files that are replaced in one step, and what tells whether the machine was restarted since they were."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from arclight.fabric import replacing

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def replace_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Put ``text`` at ``path``; what was there stays whole until the new one is there.

    durable: whether it is on the disk when this returns. Where a power failure may undo it nobody waits.
    """
    temporary = replacing.temporary(path)
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if durable:
            replacing.sync_folder(path.parent)
    finally:
        replacing.discard(temporary)


def running_since() -> str:
    """A name of the time since this machine was started, in which no power failure was; "" where the system has none."""
    with suppress(OSError):
        return _BOOT.read_text(encoding="ascii").strip()
    return ""
