"""SIGTERM and the signals of a queue that wants its machine back: noted at once, acted on between two batches."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from arclight.checkpoint.remote import place
from arclight.fabric.environments import SLURMEnvironment
from arclight.fabric.errors import SIGTERMException

if TYPE_CHECKING:
    from arclight.trainer.trainer import Trainer


@contextmanager
def handled(trainer: Trainer) -> Iterator[None]:
    """Within, SIGTERM asks ``trainer`` to save and end; in a SLURM job, the requeue signal asks it to do so and to queue again.

    A handler that the user has set for SIGTERM runs too; one for the requeue signal is left alone, with a notice. Afterwards all is
    as before.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    before = {signal.SIGTERM: signal.getsignal(signal.SIGTERM)}

    def on_sigterm(number: int, frame: FrameType | None) -> None:
        trainer.received_sigterm = trainer.should_stop = True
        if callable(handler := before[signal.SIGTERM]):
            handler(number, frame)

    def on_requeue(number: int, frame: FrameType | None) -> None:
        trainer.requeue = trainer.should_stop = True

    signal.signal(signal.SIGTERM, on_sigterm)
    if (requeue := _requeue_signal(trainer)) is not None:
        before[requeue] = signal.getsignal(requeue)
        if callable(before[requeue]):
            trainer.notice(f"{requeue.name} has a handler already: the job will not be put back into the queue by it")
        else:
            signal.signal(requeue, on_requeue)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, _settable(handler))


def _requeue_signal(trainer: Trainer) -> signal.Signals | None:
    """The signal on which this job goes back into SLURM's queue; None where it does not."""
    environment = trainer.strategy.cluster_environment
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return None
    return environment.requeue_signal


def requeue_job(trainer: Trainer) -> None:
    """Save on every rank, put the SLURM job back into the queue, and end: the job that starts anew goes on from here."""
    from arclight.trainer import state

    path = next_requeue_checkpoint(trainer)
    state.save(trainer, path)
    if trainer.is_global_zero:
        array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
        job = f"{array}_{task}" if array and task else os.environ["SLURM_JOB_ID"]
        if not re.fullmatch("[0-9_-]+", job):
            raise ValueError(
                f"SLURM_JOB_ID={job!r} is no job number: the job was not put back into the queue; {path} holds its state"
            )
        done = subprocess.run(["scontrol", "requeue", job], check=False)
        trainer.notice(f"saved {path}; scontrol requeue {job} ended with status {done.returncode}")
    raise SIGTERMException


def requeue_checkpoint(trainer: Trainer) -> Path | None:
    """The newest checkpoint of a job that was put back into the queue; None where there is none."""
    kept = [
        (int(m[1]), p)
        for p in Path(trainer.default_root_dir).glob("hpc_ckpt_*")
        if (m := re.match(r"hpc_ckpt_(\d+)", p.name))
    ]
    return max(kept)[1] if kept else None


def next_requeue_checkpoint(trainer: Trainer) -> Path:
    newest = requeue_checkpoint(trainer)
    number = int(newest.name.partition(".")[0].rpartition("_")[2]) + 1 if newest is not None else 1
    return Path(trainer.default_root_dir) / f"hpc_ckpt_{number}{trainer.checkpoint_io.suffix}"


def end_by_signal(trainer: Trainer) -> None:
    """Save what a resume needs, on every rank, and end with the status of SIGTERM."""
    from arclight.trainer import state

    path = checkpoint_folder(trainer)
    if path is not None:
        suffix = trainer.checkpoint_io.suffix
        name = f"epoch={trainer.current_epoch}-step={trainer.global_step}"
        if suffix and (keeps := next((c for c in trainer.checkpoint_callbacks if getattr(c, "save_last", None)), None)):
            name = keeps.CHECKPOINT_NAME_LAST  # one file that ckpt_path="last" finds
        path = path / f"{name}{suffix}"
        state.save(trainer, path)
        trainer.notice(f"SIGTERM: saved {path} and ending; ckpt_path={str(path)!r} goes on from there")
    raise SIGTERMException


def checkpoint_folder(trainer: Trainer) -> Path | None:
    """Where this run keeps its checkpoints; None where it keeps none."""
    if not trainer.checkpoint_callbacks:
        return None
    given = next((c.dirpath for c in trainer.checkpoint_callbacks if getattr(c, "dirpath", None)), None)
    return place(given if given is not None else trainer.checkpoint_folder)


def _settable(handler: Any) -> Any:
    return signal.SIG_DFL if handler is None else handler  # None: set by code that is not Python's
