"""Handle SIGTERM and SLURM preemption: record the signal, act between two batches.

`session` installs the handlers around a run; `fit` asks between two batches whether to save and end, `evaluation` ends after a batch.
Exit status 143 and the names of requeue checkpoints, which `resume` looks for, are relied on by schedulers and by resumed jobs.
"""

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
from arclight.trainer.callbacks.checkpoint.model_checkpoint import ModelCheckpoint

if TYPE_CHECKING:
    from arclight.fabric.strategies import Strategy
    from arclight.trainer.fabric.checkpoint_io import CheckpointIO
    from arclight.trainer.run.paths import RunPaths
    from arclight.trainer.trainer import Trainer


def _job() -> str:
    """Return the SLURM job's name, the same after each requeue; empty outside of SLURM."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")


class RequeueCheckpoints:
    """Checkpoints that a requeued job resumes from.

    They lie in the folders of runs of one name and are named after the job (by Lightning's convention in ``default_root_dir``, for
    whichever job). ``io`` writes and removes them.
    """

    def __init__(self, paths: RunPaths, strategy: Strategy, io: CheckpointIO) -> None:
        self._paths, self._strategy, self._io, self._suffix = paths, strategy, io, io.suffix

    @property
    def folder(self) -> Path:
        """The folder in or below which they lie."""
        if not self._paths.run_folders:
            return Path(self._paths.root)
        if self._paths.opened is not None:
            return self._paths.opened.path.parent
        return Path(self._paths.root) / self._paths.folder_name

    def all(self, any_job: bool = False) -> list[Path]:
        """List this job's checkpoints, newest last; with ``any_job`` those of other jobs too."""
        job, run_folders = re.escape(_job()) if not any_job else r"[0-9_-]+", self._paths.run_folders
        own = rf"hpc_ckpt_{job}_(\d+)" if run_folders else r"hpc_ckpt_(\d+)"
        pattern = re.compile(own + re.escape(self._suffix))
        found = self.folder.glob("*/checkpoints/hpc_ckpt_*" if run_folders else "hpc_ckpt_*")
        kept = [(int(m[1]), path) for path in found if (m := pattern.fullmatch(path.name))]
        if any_job and run_folders:
            return [path for _, path in sorted((written_at(path), path) for _, path in kept)]
        return [path for _, path in sorted(kept)]

    def newest(self, any_job: bool = False) -> Path | None:
        """Return the newest checkpoint, the same on every rank; None if there is none."""
        kept = self.all() or (self.all(any_job=True) if any_job else [])
        found: Path | None = self._strategy.broadcast(kept[-1] if kept else None)
        return found

    def next_path(self, before: list[Path]) -> Path:
        """Return the path of the checkpoint after those ``before``, the same on every rank."""
        number = int(before[-1].name.removesuffix(self._suffix).rpartition("_")[2]) + 1 if before else 1
        if not self._paths.run_folders:
            path = Path(self._paths.root) / f"hpc_ckpt_{number}{self._suffix}"
        else:
            path = self._paths.run_folder.checkpoints / f"hpc_ckpt_{_job()}_{number}{self._suffix}"
        shared: Path = self._strategy.broadcast(path)
        return shared

    def delete(self) -> None:
        """Delete this job's requeue checkpoints after its fit is done.

        Another fit of the same job must not resume from them.
        """
        if self._strategy.is_global_zero and self._paths.run_folders and _job() and SLURMEnvironment.detect():
            for path in self.all():
                remove_checkpoint(path, self._io)


class SignalConnector:
    """Record the signals that request an end, and end the trainer's run in order."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @contextmanager
    def handlers(self) -> Iterator[None]:
        """Handle SIGTERM by saving and ending, and SLURM's requeue signal by also requeuing.

        Within the block: afterwards the former handlers are set again. One that the user has set for SIGTERM runs too; one for the
        requeue signal is left alone, with a notice.
        """
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may set handlers
            return
        before = {signal.SIGTERM: signal.getsignal(signal.SIGTERM)}

        def on_sigterm(number: int, frame: FrameType | None) -> None:
            self._trainer.run_state.request_stop(sigterm=True)
            if callable(handler := before[signal.SIGTERM]):
                handler(number, frame)

        def on_requeue(number: int, frame: FrameType | None) -> None:
            self._trainer.run_state.request_stop(requeue=True)

        signal.signal(signal.SIGTERM, on_sigterm)
        if (requeue := self._requeue_signal()) is not None:
            before[requeue] = signal.getsignal(requeue)
            if callable(before[requeue]):
                self._trainer.log_warning(
                    f"{requeue.name} has a handler already: the job will not be put back into the queue by it"
                )
            else:
                signal.signal(requeue, on_requeue)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, _settable(handler))

    def _requeue_signal(self) -> signal.Signals | None:
        """Return the signal on which this job is requeued in SLURM; None if it is not."""
        environment = self._trainer.strategy.cluster_environment
        if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
            return None
        return environment.requeue_signal

    def requeue_job(self) -> None:
        """Save on every rank, requeue the SLURM job and end, so that it resumes from here."""
        trainer, kept = self._trainer, self._trainer.requeue_checkpoints
        before = kept.all()
        path = kept.next_path(before)
        trainer.save_checkpoint(path)
        trainer.checkpoint_io.teardown()  # complete before the job is requeued
        if trainer.is_global_zero:
            job = _job() or os.environ["SLURM_JOB_ID"]
            if not re.fullmatch("[0-9_-]+", job):
                raise ValueError(
                    f"SLURM_JOB_ID={job!r} is not a job number: the job was not put back into the queue; {path} holds its state"
                )
            done = subprocess.run(["scontrol", "requeue", job], check=False)
            trainer.log_warning(f"saved {path}; scontrol requeue {job} ended with status {done.returncode}")
            if trainer.behavior.run_folders:
                for old in before:
                    remove_checkpoint(old, trainer.checkpoint_io)
        raise SIGTERMException

    def end_by_signal(self) -> None:
        """Save what a resume needs, on every rank, and end with the status of SIGTERM."""
        path = self._save()
        if path is not None:
            self._trainer.log_warning(f"SIGTERM: saved {path} and ending; resume with ckpt_path={str(path)!r}")
        raise SIGTERMException

    def _save(self) -> Path | str | None:
        """Save an interim checkpoint and return its path; None if no checkpoints are kept."""
        trainer, suffix = self._trainer, self._trainer.checkpoint_io.suffix
        keeps = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
        if not suffix and keeps:
            return keeps[0].save_interim(trainer)
        folder = self._checkpoint_folder()
        if folder is None:
            return None
        name = f"epoch={trainer.current_epoch}-step={trainer.global_step}"
        if suffix and (last := next((c for c in keeps if c.save_last), None)):
            name = last.CHECKPOINT_NAME_LAST  # one file that ckpt_path="last" finds
        trainer.save_checkpoint(folder / f"{name}{suffix}")
        return folder / f"{name}{suffix}"

    def _checkpoint_folder(self) -> Path | None:
        """Return the folder of this run's checkpoints; None if it keeps none."""
        callbacks = self._trainer.checkpoint_callbacks
        if not callbacks:
            return None
        given = next((c.dirpath for c in callbacks if getattr(c, "dirpath", None)), None)
        return to_path(given if given is not None else self._trainer.checkpoint_folder)


def _settable(handler: Any) -> Any:
    return signal.SIG_DFL if handler is None else handler  # None: set by code that is not Python's
