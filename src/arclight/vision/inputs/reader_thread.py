"""Run threads that read images, and join them before the interpreter exits.

`image_source` (reading ahead) and `live` (one for each input) start them. The caller passes the work (``target``) and a function that
ends it (``end``).
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable

_EXIT_TIMEOUT_S = 15.0
"""Longer than FFmpeg may take to open an address, and a camera to give a frame."""
_POLL_S = 0.1

_running: weakref.WeakSet[ReaderThread] = weakref.WeakSet()


class ReaderThread(threading.Thread):
    """Daemon thread that decodes images, stopped and joined at interpreter exit.

    At the exit ``end`` is called, and the thread is waited for.
    A thread that returns from OpenCV while the interpreter is torn down is unwound through C++ destructors, and the process aborts.
    ``idle``: True while the thread waits in Python for what may never come; then it is not waited for.
    """

    def __init__(
        self,
        target: Callable[[], None],
        name: str,
        *,
        end: Callable[[], None],
        idle: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self.end, self.idle = end, idle

    def start(self) -> None:
        _running.add(self)
        super().start()


@atexit.register
def _end_running() -> None:
    threads = [thread for thread in _running if thread.is_alive()]
    for thread in threads:
        thread.end()
    deadline = time.monotonic() + _EXIT_TIMEOUT_S
    for thread in threads:
        while thread.is_alive() and not thread.idle() and time.monotonic() < deadline:
            thread.join(_POLL_S)
