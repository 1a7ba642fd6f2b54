"""Estimate speed and time left from a counter that is read now and then.

The rich bar estimates by `ProgressClock`; the run's report and the display of federated runs write times by `clock_text`. Nothing is
stored: the look may change freely.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

SMOOTHING = 3.0
"""Seconds over which the speed is averaged."""


class ProgressClock:
    """Clock of a progress bar: units per second without pauses, and the time left with them."""

    def __init__(self, done: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first_done = self._done = done
        self._start = self._time = clock()
        self._paused = False
        self.rate: float | None = None
        """Units per second, smoothed; None before the first update."""

    def update(self, done: int) -> None:
        now = self._clock()
        if self._paused or done <= self._done or now <= self._time:
            return
        current, share = (done - self._done) / (now - self._time), 1 - math.exp(-(now - self._time) / SMOOTHING)
        self.rate = current if self.rate is None else self.rate + share * (current - self.rate)
        self._done, self._time = done, now

    def pause(self) -> None:
        """Pause the clock: other work (validation) does not count against the speed."""
        self._paused = True

    def resume(self, done: int) -> None:
        self._paused, self._done, self._time = False, done, self._clock()

    @property
    def elapsed(self) -> float:
        return self._clock() - self._start

    def left(self, total: float) -> float | None:
        """Estimate the seconds until ``total`` units are done; None while that is a guess."""
        done = self._done - self._first_done
        if not done or not math.isfinite(total) or self.elapsed < 1:
            return None
        return max(0.0, (total - self._done) * self.elapsed / done)


def clock_text(seconds: float | None) -> str:
    """Return ``seconds`` as 0:07, 12:34, 1:02:03 or 3d 04:05."""
    if seconds is None:
        return "-:--"
    whole = max(0, round(seconds))
    days, hours, minutes = whole // 86400, whole // 3600, whole // 60 % 60
    if days:
        return f"{days}d {hours % 24:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def rate_text(rate: float | None) -> str:
    """Return ``rate`` as 41.2 it/s, or 3.5 s/it for slow work."""
    if rate is None:
        return ""
    if rate < 1:
        return f"{1 / rate:.1f} s/it"
    return f"{rate:.1f} it/s" if rate < 100 else f"{rate:,.0f} it/s"
