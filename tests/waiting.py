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


def patiently(check: Callable[[float], None], *seconds: float) -> None:
    """``check`` of something that lasts as long as it is given: so few seconds, and more of them on a machine that is too busy for it.

    What is wrong by itself is wrong each time.
    """
    *few, most = seconds
    for given in few:
        try:
            return check(given)
        except AssertionError:
            pass
    return check(most)
