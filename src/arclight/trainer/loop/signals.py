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

from arclight.checkpoint.remote import to_path
from arclight.fabric.environments import SLURMEnvironment
from arclight.fabric.errors import SIGTERMException
from arclight.trainer.callbacks.checkpoint.file_ops import remove_checkpoint, written_at

if TYPE_CHECKING:
    from arclight.trainer.trainer import Trainer


@contextmanager
def signal_handlers(trainer: Trainer) -> Iterator[None]:
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
    """Save on every rank, put the SLURM job back into the queue, and end: the job that starts again goes on from here."""
    from arclight.trainer.checkpoint import state

    before = requeue_checkpoints(trainer)
    path = _next_requeue_checkpoint(trainer, before)
    state.save_checkpoint(trainer, path)
    trainer.checkpoint_io.teardown()  # complete before the queue hears of it
    if trainer.is_global_zero:
        job = _job() or os.environ["SLURM_JOB_ID"]
        if not re.fullmatch("[0-9_-]+", job):
            raise ValueError(
                f"SLURM_JOB_ID={job!r} is no job number: the job was not put back into the queue; {path} holds its state"
            )
        done = subprocess.run(["scontrol", "requeue", job], check=False)
        trainer.notice(f"saved {path}; scontrol requeue {job} ended with status {done.returncode}")
        if trainer.conventions.run_folders:
            for old in before:
                remove_checkpoint(old)
    raise SIGTERMException


def _job() -> str:
    """Return the name that SLURM's queue has for this job through every requeue; empty where it is no job."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")


def requeue_folder(trainer: Trainer) -> Path:
    """Return the folder in or below which checkpoints of requeued jobs lie."""
    if not trainer.conventions.run_folders:
        return Path(trainer.default_root_dir)
    if trainer._run_folder is not None:
        return trainer._run_folder.path.parent
    return Path(trainer.default_root_dir) / trainer.folder_name


def requeue_checkpoints(trainer: Trainer, any_job: bool = False) -> list[Path]:
    """List the checkpoints from which this job goes on when the queue starts it again, the newest last.

    They lie in the folders of runs of this name and are named after the job (by Lightning's convention in ``default_root_dir``, for
    whichever job). ``any_job``: those of other jobs too.
    """
    job = re.escape(_job()) if not any_job else r"[0-9_-]+"
    own = rf"hpc_ckpt_{job}_(\d+)" if trainer.conventions.run_folders else r"hpc_ckpt_(\d+)"
    pattern = re.compile(own + re.escape(trainer.checkpoint_io.suffix))
    found = requeue_folder(trainer).glob(
        "*/checkpoints/hpc_ckpt_*" if trainer.conventions.run_folders else "hpc_ckpt_*"
    )
    kept = [(int(m[1]), path) for path in found if (m := pattern.fullmatch(path.name))]
    if any_job and trainer.conventions.run_folders:
        return [path for _, path in sorted((written_at(path), path) for _, path in kept)]
    return [path for _, path in sorted(kept)]


def requeue_checkpoint(trainer: Trainer, any_job: bool = False) -> Path | None:
    """Return the newest checkpoint of a requeued job, the same on every rank; None where there is none."""
    kept = requeue_checkpoints(trainer) or (requeue_checkpoints(trainer, any_job=True) if any_job else [])
    newest: Path | None = trainer.strategy.broadcast(kept[-1] if kept else None)
    return newest


def drop_requeue_checkpoints(trainer: Trainer) -> None:
    """Remove what this job was to go on from: its fit is done, and another fit of the job must not begin there."""
    if trainer.is_global_zero and trainer.conventions.run_folders and _job() and SLURMEnvironment.detect():
        for path in requeue_checkpoints(trainer):
            remove_checkpoint(path)


def _next_requeue_checkpoint(trainer: Trainer, before: list[Path]) -> Path:
    suffix = trainer.checkpoint_io.suffix
    number = int(before[-1].name.removesuffix(suffix).rpartition("_")[2]) + 1 if before else 1
    if not trainer.conventions.run_folders:
        path = Path(trainer.default_root_dir) / f"hpc_ckpt_{number}{suffix}"
    else:
        path = trainer.run_folder.checkpoints / f"hpc_ckpt_{_job()}_{number}{suffix}"
    shared: Path = trainer.strategy.broadcast(path)
    return shared


def end_by_signal(trainer: Trainer) -> None:
    """Save what a resume needs, on every rank, and end with the status of SIGTERM."""
    path = _save_at_signal(trainer)
    if path is not None:
        trainer.notice(f"SIGTERM: saved {path} and ending; resume with ckpt_path={str(path)!r}")
    raise SIGTERMException


def _save_at_signal(trainer: Trainer) -> Path | str | None:
    """Save by the callback that removes the checkpoint when there is a newer one; None if no checkpoints are kept."""
    from arclight.trainer.callbacks import ModelCheckpoint
    from arclight.trainer.checkpoint import state

    suffix = trainer.checkpoint_io.suffix
    keeps = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
    if not suffix and keeps:
        return keeps[0].save_interim(trainer)
    folder = checkpoint_folder(trainer)
    if folder is None:
        return None
    name = f"epoch={trainer.current_epoch}-step={trainer.global_step}"
    if suffix and (last := next((c for c in keeps if c.save_last), None)):
        name = last.CHECKPOINT_NAME_LAST  # one file that ckpt_path="last" finds
    state.save_checkpoint(trainer, folder / f"{name}{suffix}")
    return folder / f"{name}{suffix}"


def checkpoint_folder(trainer: Trainer) -> Path | None:
    """Where this run keeps its checkpoints; None where it keeps none."""
    if not trainer.checkpoint_callbacks:
        return None
    given = next((c.dirpath for c in trainer.checkpoint_callbacks if getattr(c, "dirpath", None)), None)
    return to_path(given if given is not None else trainer.checkpoint_folder)


def _settable(handler: Any) -> Any:
    return signal.SIG_DFL if handler is None else handler  # None: set by code that is not Python's
