"""What processes see of files."""

from __future__ import annotations

import time
from pathlib import Path

from arclight.fabric.strategies.base import Strategy


def is_shared_filesystem(strategy: Strategy, path: str | Path | None = None, timeout: float = 3) -> bool:
    """Whether all processes see the same files below ``path`` (the working directory by default).

    Rank 0 puts a file there for ``timeout`` seconds and the others look for it, so the place must be writable; every rank must
    call this. With one process, and for addresses such as ``s3://...``, the answer is yes.
    Raises FileNotFoundError where the path does not exist on every rank.
    """
    if "://" in str(path or "") and not str(path).startswith(("file://", "local://")):
        return True
    place = Path(path or Path.cwd()).resolve()
    if strategy.world_size == 1:
        return True
    if not strategy.reduce_boolean_decision(strategy.broadcast(str(place)) == str(place)):
        return False
    if not strategy.reduce_boolean_decision(place.exists()):
        raise FileNotFoundError(
            f"Unable to determine if the path belongs to a shared filesystem: {place} does not exist on every rank"
        )
    mark = (place.parent if place.is_file() else place) / ".arclight-shared-filesystem"
    strategy.barrier("before a file is put")
    if strategy.is_global_zero:
        mark.touch()
    deadline = time.monotonic() + timeout
    while not (found := mark.exists()) and time.monotonic() < deadline:
        time.sleep(0.02)
    everyone = strategy.reduce_boolean_decision(found)
    if strategy.is_global_zero:
        mark.unlink(missing_ok=True)
    strategy.barrier("after it is gone")
    return everyone
