"""Resolve ``ckpt_path`` ("last", "best", "hpc", a path) to a checkpoint and its run folder.

`session` asks the trainer's `CheckpointSelector` at each entry point. The words and their order of search are public. For "last" and
"hpc" a damaged checkpoint is passed over with a warning; "best" and a path are taken as they are, and reading them raises.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight.checkpoint import find_last, verify
from arclight.checkpoint.remote import to_path
from arclight.fabric.environments import SLURMEnvironment
from arclight.trainer.callback import KeepsLast
from arclight.trainer.callbacks.checkpoint.file_ops import written_at
from arclight.trainer.loop.progress import TrainerFn

if TYPE_CHECKING:
    from arclight.fabric.strategies import Strategy
    from arclight.trainer.loop.signals import RequeueCheckpoints
    from arclight.trainer.run.paths import RunPaths


@dataclass(frozen=True)
class ResumeSources:
    """Hold what ``ckpt_path`` may mean besides a path, for one entry point."""

    function: TrainerFn | None
    callbacks: Sequence[Any]
    """Callbacks that save checkpoints, the first of which has the best."""
    requeue: RequeueCheckpoints
    evaluate_best: bool
    """True if an evaluation without a module, after a fit, takes the best checkpoint."""
    dry: bool
    """True for a ``fast_dev_run``, which writes no checkpoint."""

    @property
    def entry_point(self) -> str:
        return self.function.value if self.function is not None else "fit"

    @property
    def may_be_requeued(self) -> bool:
        return self.function == TrainerFn.FITTING and SLURMEnvironment.detect()

    def newest_of_callbacks(self) -> Path | None:
        """Return the newest of the callbacks' last checkpoints."""
        paths: set[Path] = set()
        for callback in self.callbacks:
            if isinstance(callback, KeepsLast):
                paths |= {to_path(path) for path in callback.last_checkpoints()}
            elif path := getattr(callback, "last_model_path", ""):
                paths.add(to_path(path))
        return max((p for p in paths if p.exists()), key=written_at, default=None)


class CheckpointSelector:
    """Choose the checkpoint that a trainer's next entry point loads."""

    def __init__(self, paths: RunPaths, strategy: Strategy) -> None:
        self._paths, self._strategy = paths, strategy
        self.path: str | Path | None = None
        """The checkpoint that the newest entry point loaded, or one that the user has set for the next."""
        self.named = False
        """True if the newest entry point loaded a checkpoint by its path, not by its role."""
        self._is_set = False
        self._newest_of_run: Path | None = None
        """The checkpoint that ``ckpt_path="last"`` found in the run's own folder, before any hook ran."""

    def set_ckpt_path(self, path: str | Path | None) -> None:
        """Set the checkpoint that the next entry point loads."""
        self.path, self._is_set = path, path is not None

    def resolve_run_folder(self, choice: str | Path | Mapping[str, Any] | None, sources: ResumeSources) -> None:
        """Choose the run folder before any hook can ask: the resumed run's, or a new one.

        A collective: every rank calls this.
        """
        paths = self._paths
        self._newest_of_run = None
        if paths.run_folders and paths.opened is None:
            wanted = self.path if choice is None and self._is_set else choice
            if wanted == "last":
                self._newest_of_run = self._find_newest_of_run()
            elif (
                wanted in (None, "hpc") and sources.may_be_requeued and (found := sources.requeue.newest()) is not None
            ):
                paths.open_run_folder(found.parent.parent)
        paths.agree()

    def resolve(self, choice: str | Path | None, sources: ResumeSources, fit_before: bool = False) -> Path | None:
        """Resolve ``ckpt_path`` to a checkpoint; None to start from the module as it is.

        ``"best"`` and ``"last"`` are those of this trainer's checkpoint callbacks; ``"last"`` also continues the newest run of
        this name in its own folder, ``"hpc"`` one that was requeued. ``fit_before``: an evaluation without a module after a fit,
        which by Lightning's convention takes the best. Raises ValueError if there is none, FileNotFoundError for a path that
        does not exist.
        """
        if self._is_set:
            if choice is not None:
                self._warn(
                    f"`trainer.ckpt_path = {str(self.path)!r}` was called but then you passed "
                    f"`trainer.{sources.entry_point}(ckpt_path={str(choice)!r})`. The latter will be loaded."
                )
            choice = self.path if choice is None else choice
        path = self._chosen(sources, choice, fit_before)
        self.named = path is not None and choice not in (None, "best", "last", "hpc")
        self.path, self._is_set = (None if path is None else str(path)), False
        return path

    def _chosen(self, sources: ResumeSources, choice: str | Path | None, fit_before: bool) -> Path | None:
        entry_point = sources.entry_point
        if choice is None and fit_before and sources.evaluate_best:
            self._warn(
                f"`.{entry_point}(ckpt_path=None)` was called without a model. The best model of the previous `fit` call will be used. "
                f"You can pass `.{entry_point}(ckpt_path='best')` or `'last'`, or the model, to say which and silence this"
            )
            choice = "best"
        if choice is None and sources.may_be_requeued:
            newest = sources.requeue.newest()
            return None if newest is None else self._sound(newest)
        if choice is None:
            return None
        if choice == "hpc":
            newest = sources.requeue.newest(any_job=True)
            if newest is None or (newest := self._sound(newest)) is None:
                raise NoCheckpointError(
                    f'`.{entry_point}(ckpt_path="hpc")` is set but no HPC checkpoint was found in '
                    f"{sources.requeue.folder}. Please pass an exact checkpoint path to `.{entry_point}(ckpt_path=...)`"
                )
            return newest
        if choice == "best":
            return self._best(sources)
        if choice == "last":
            return self._last(sources)
        path = to_path(choice)
        if not path.exists():
            raise FileNotFoundError(f"ckpt_path: {path} does not exist (Checkpoint file not found)")
        return path

    def _best(self, sources: ResumeSources) -> Path:
        entry_point = sources.entry_point
        if len(sources.callbacks) > 1:
            self._warn(
                f'`.{entry_point}(ckpt_path="best")` is called with Trainer configured with multiple `ModelCheckpoint` callbacks. '
                "It will use the best checkpoint path from first checkpoint callback."
            )
        if not sources.callbacks:
            raise NoCheckpointError(
                f'`.{entry_point}(ckpt_path="best")` is set but `ModelCheckpoint` is not configured.'
            )
        best = getattr(sources.callbacks[0], "best_model_path", "")
        if not best and sources.dry:
            raise NoCheckpointError(
                f'You cannot execute `.{entry_point}(ckpt_path="best")` with `fast_dev_run=True`, which writes none. Please pass an '
                f"exact checkpoint path to `.{entry_point}(ckpt_path=...)`"
            )
        if not best:
            raise NoCheckpointError(
                f'`.{entry_point}(ckpt_path="best")` is set but `ModelCheckpoint` is not configured to save the best model, or no '
                "fit has saved one yet"
            )
        return to_path(best)

    def _last(self, sources: ResumeSources) -> Path | None:
        entry_point, run_folders = sources.entry_point, self._paths.run_folders
        newest = self._strategy.broadcast(sources.newest_of_callbacks())
        found = self._sound(newest) if newest is not None else None
        if found is None and run_folders:
            found = self._newest_of_run or self._find_newest_of_run()
        if found is None:
            message = (
                f'.{entry_point}(ckpt_path="last") is set, but there is no last checkpoint available. No checkpoint will be loaded. '
                "HINT: Set `ModelCheckpoint(..., save_last=True)`."
            )
            if entry_point != "fit" and run_folders:
                raise NoCheckpointError(f"{message} This run has no checkpoint yet: fit first, or name one")
            self._warn(message)
            return None
        return found

    def _sound(self, newest: Path) -> Path | None:
        """Return ``newest``, or the newest intact checkpoint beside it if it is damaged.

        Every rank calls this.
        """
        strategy = self._strategy
        if not newest.is_dir():
            return newest
        problems = verify(newest, strategy)
        if not problems:
            return newest
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # damaged ones are reported in one sentence
            found = find_last(newest.parent, strategy)
        instead = f"training continues from {found}" if found is not None else "there is no intact one beside it"
        self._warn(f"the last checkpoint is damaged: {problems[0].partition(';')[0]}; {instead}")
        return found

    def _find_newest_of_run(self) -> Path | None:
        paths, strategy = self._paths, self._strategy
        folder = paths.newest_run()
        kept = strategy.broadcast(None if folder is None else folder.checkpoints)
        found = find_last(kept, strategy) if kept is not None else None
        if found is not None and folder is not None:
            paths.run_folder = folder
        return found

    def _warn(self, message: str) -> None:
        if self._strategy.is_global_zero:
            warnings.warn(message, stacklevel=3)


class NoCheckpointError(ValueError, FileNotFoundError):
    """A checkpoint was asked for by its role, and there is none."""
