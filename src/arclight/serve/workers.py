"""A few threads for the work, a short queue before them, and an answer at once when both are full."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from arclight.serve.refusals import Refusal, busy

T = TypeVar("T")


class Workers:
    """Runs blocking functions in at most ``count`` threads with at most ``queue`` callers waiting."""

    def __init__(self, count: int, queue: int) -> None:
        self.queue = queue
        self.waiting = 0
        self._free = asyncio.Semaphore(count)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="arclight-serve")

    async def run(self, work: Callable[[], T], *, abandoned: Callable[[], Awaitable[bool]]) -> T:
        """The result of ``work()``; raises Refusal 429 when the queue is full.

        ``abandoned`` is asked when a worker becomes free: work whose client has left is not done.
        """
        if self._free.locked() and self.waiting >= self.queue:
            raise busy("All workers are busy and the queue is full; send the photo again in a moment.")
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        try:
            if await abandoned():
                raise Refusal(400, "The connection closed before the photo's turn came.")
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._free.release()

    def close(self) -> None:
        """Wait for running work; drop what has not begun."""
        self._threads.shutdown(wait=True, cancel_futures=True)
