"""SIGTERM and the signals of a queue that wants its machine back: noted at once, acted on between two batches."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from arclight.fabric.errors import SIGTERMException

if TYPE_CHECKING:
    from arclight.trainer.trainer import Trainer


@contextmanager
def handled(trainer: Trainer) -> Iterator[None]:
    """Within, SIGTERM asks ``trainer`` to save and end. A handler that the user has set runs too; afterwards all is as before."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    before = signal.getsignal(signal.SIGTERM)

    def on_sigterm(number: int, frame: FrameType | None) -> None:
        trainer.received_sigterm = trainer.should_stop = True
        if callable(before):
            before(number, frame)

    signal.signal(signal.SIGTERM, on_sigterm)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, _settable(before))


def end_by_signal(trainer: Trainer) -> None:
    """Save what a resume needs, on every rank, and end with the status of SIGTERM."""
    from arclight.trainer import state

    path = checkpoint_folder(trainer)
    if path is not None:
        path = path / f"epoch={trainer.current_epoch}-step={trainer.global_step}{trainer.checkpoint_io.suffix}"
        state.save(trainer, path)
        trainer.notice(f"SIGTERM: saved {path} and ending; ckpt_path={str(path)!r} goes on from there")
    raise SIGTERMException


def checkpoint_folder(trainer: Trainer) -> Path | None:
    """Where this run keeps its checkpoints; None where it keeps none."""
    if not trainer.checkpoint_callbacks:
        return None
    given = next((c.dirpath for c in trainer.checkpoint_callbacks if getattr(c, "dirpath", None)), None)
    return Path(given) if given is not None else Path(trainer.checkpoint_folder)


def _settable(handler: Any) -> Any:
    return signal.SIG_DFL if handler is None else handler  # None: set by code that is not Python's
