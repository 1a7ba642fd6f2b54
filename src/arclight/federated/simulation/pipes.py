"""Things of which there are few and that many want: lines and cores, first come first served."""

from __future__ import annotations

import heapq


class Pipe:
    """A line that transfers share: each begins when the ones before it are through, and goes no faster than its own end."""

    def __init__(self, rate: float) -> None:
        """rate: bits per second."""
        self._rate, self._free = rate, 0.0

    def send(self, now: float, bytes: int, rate: float) -> float:
        """When a transfer that begins now is through, with a client's ``rate`` in bits per second."""
        self._free = max(self._free, now) + 8 * bytes / self._rate
        return max(self._free, now + 8 * bytes / rate)


class Cores:
    """Threads that work off what comes."""

    def __init__(self, count: int) -> None:
        self._free = [0.0] * count
        self.busy = 0.0

    def work(self, now: float, seconds: float) -> float:
        """When work that comes now is done."""
        done = max(heapq.heappop(self._free), now) + seconds
        heapq.heappush(self._free, done)
        self.busy += seconds
        return done
