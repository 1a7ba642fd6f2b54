"""Trying again until a deadline, ever more slowly."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from arclight.federated.errors import LinkError

T = TypeVar("T")

_FIRST, _SLOWEST = 0.05, 5.0


class UnavailableError(Exception):
    """An attempt that failed for a reason that may pass.

    progress: something got across, so that waiting begins anew. after: seconds that the other side asked to be left alone.
    """

    def __init__(self, why: str, *, progress: bool = False, after: float = 0.0) -> None:
        super().__init__(why)
        self.progress, self.after = progress, after


class Patience:
    """How long one side of a link is tried. Waits double from 50 ms to 5 s, each shortened by chance by up to half."""

    def __init__(self, other: str, seconds: float) -> None:
        self._other, self._seconds = other, seconds
        self.stopping = threading.Event()
        """Set: no further attempt is made."""

    def call(self, what: str, attempt: Callable[[], T]) -> T:
        """``attempt()``'s result. Raises LinkError where it was unavailable for all of the time; other errors pass."""
        began = since = time.monotonic()
        tries, wait = 0, _FIRST
        while True:
            try:
                tries += 1
                return attempt()
            except UnavailableError as error:
                now = time.monotonic()
                if error.progress:
                    since, wait = now, _FIRST
                pause = max(error.after, wait * random.uniform(0.5, 1.0))
                wait = min(2 * wait, _SLOWEST)
                if now + pause - since > self._seconds:
                    raise LinkError(
                        f"{self._other} did not {what} within {now - since:.1f} s ({tries} attempts in {now - began:.1f} s): {error}; "
                        f"see that the server runs and can be reached"
                    ) from error
                if self.stopping.wait(pause):
                    raise LinkError(f"{self._other} did not {what}, and is tried no more: {error}") from error
