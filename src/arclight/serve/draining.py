"""Drain before the end: fall unready first, close the listener later."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType

import uvicorn


class DrainingServer(uvicorn.Server):
    """Uvicorn server that drains after SIGTERM: it takes requests until load balancers notice.

    SIGINT, a second SIGTERM, and SIGTERM before the start has ended close the listener at once.
    """

    def __init__(self, config: uvicorn.Config, *, on_drain: Callable[[], None], drain_s: float) -> None:
        super().__init__(config)
        self._on_drain = on_drain
        self._drain_s = drain_s
        self._closes_at: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start to drain, or to shut down."""
        if sig != signal.SIGTERM or self._closes_at is not None or not self.started:
            super().handle_exit(sig, frame)
            return
        self._on_drain()
        self._closes_at = time.monotonic() + self._drain_s

    async def on_tick(self, counter: int) -> bool:
        """Shut down once draining has lasted long enough."""
        if self._closes_at is not None and not self.should_exit and time.monotonic() >= self._closes_at:
            super().handle_exit(signal.SIGTERM, None)
        return await super().on_tick(counter)
