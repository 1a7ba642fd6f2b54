"""Waiting for what happens elsewhere: as long as a busy machine may need, and not a moment longer than it takes."""

from __future__ import annotations

import time
from collections.abc import Callable

LIMIT = 120.0
"""Seconds after which something is taken never to happen; what is waited for takes a second or so on an idle machine."""


def wait_until(condition: Callable[[], object], what: str, seconds: float = LIMIT) -> None:
    """Return once ``condition`` is true. Fails with ``what`` in its words."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"{what}: not within {seconds:g} s"
        time.sleep(0.02)
