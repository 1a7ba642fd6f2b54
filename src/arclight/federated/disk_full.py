"""Wait for room on a full disk, at the server and at its nodes.

``server`` waits for its journal, its rounds and their beginning, ``clients`` for the record of updates that the server has; figures may be tuned.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from arclight.fabric.atomic_replace import DISK_FULL

log = logging.getLogger(__name__)

DISK_RETRY_INTERVAL_S = 0.25
"""Seconds between attempts on a full disk."""
DISK_FULL_TIMEOUT_S = 3600.0
"""Seconds for which a full disk is waited for before the run ends."""
T = TypeVar("T")


def retry_while_disk_full(
    do: Callable[[], T], what: str, pause: Callable[[], bool], seconds: float = DISK_FULL_TIMEOUT_S
) -> T:
    """Return the result of ``do``, trying again while the disk is full.

    pause: waits a moment; True to try no more. Raises the OSError once the disk was full for so many ``seconds``.
    """
    until, warned = time.monotonic() + seconds, False
    while True:
        try:
            return do()
        except OSError as error:
            if error.errno not in DISK_FULL or time.monotonic() > until:
                raise
            if not warned:
                log.error("%s waits, and continues when there is space: %s", what, error)
            warned = True
            if pause():
                raise
