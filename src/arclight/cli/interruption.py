"""Handle Ctrl-C: save between two steps of training, and print the command to resume.

`train`, `user_run` and, for trials one at a time, `tune.trial` pass `Interruption` as a callback; `predict` and `scan` use `stopping`. Once
training has begun, the first ctrl-C must leave a checkpoint to resume from.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from arclight.fabric.errors import SIGTERMException
from arclight.trainer import Callback

if TYPE_CHECKING:
    from arclight.trainer import Module, RunFolder, Trainer
    from arclight.trainer.run.paths import RunPaths


class Interruption(Callback):
    """End training on ctrl-C as on SIGTERM, with a checkpoint; on a second at once.

    Before training begins there is nothing to save: then ctrl-C ends the program as usual.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may set handlers

        owner = os.getpid()

        def on_interrupt(number: int, frame: FrameType | None) -> None:
            if self.asked:
                raise KeyboardInterrupt
            self.asked = True
            trainer.run_state.request_stop(sigterm=True)
            if trainer.is_global_zero and os.getpid() == owner:  # processes that load data inherit this handler
                sys.stderr.write("\narclight: saving after this step; ctrl-C again ends at once\n")

        self._before = signal.signal(signal.SIGINT, on_interrupt)

    def teardown(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        self._restore()

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        self._restore()

    def _restore(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None

    @contextmanager
    def explained(self, run: RunPaths, command: str) -> Iterator[None]:
        """Turn an end by ctrl-C into a KeyboardInterrupt with the checkpoint and how to resume.

        ``command``: the command that resumes, with ``{run}`` for the run's folder.
        """
        try:
            yield
        except (KeyboardInterrupt, SIGTERMException) as end:
            if isinstance(end, SIGTERMException) and not self.asked:
                raise  # a SIGTERM from another process, which gets that signal's exit status
            raise KeyboardInterrupt(resume_note(run.opened, command)) from None


@contextmanager
def stopping(stop: Callable[[], None]) -> Iterator[list[int]]:
    """Call ``stop`` on the first ctrl-C, raise KeyboardInterrupt on a second.

    Yields a list that is empty until the first.
    """
    signals: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield signals  # only the main thread may set handlers
        return

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        if signals:
            raise KeyboardInterrupt
        signals.append(number)
        stop()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield signals
    finally:
        signal.signal(signal.SIGINT, before)


def resume_note(run: RunFolder | None, command: str) -> str:
    """Describe the newest checkpoint of an interrupted run and how to resume from it."""
    from arclight.checkpoint import find_last, inspect

    found = find_last(run.path / "checkpoints") if run is not None and (run.path / "checkpoints").is_dir() else None
    if run is None or found is None:
        return "there is no checkpoint yet to resume from"
    place = Path(found).relative_to(Path.cwd()) if Path(found).is_relative_to(Path.cwd()) else found
    return f"{place} holds step {inspect(found).step}; {command.format(run=run.path)} resumes from there"
