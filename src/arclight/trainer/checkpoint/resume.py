"""Which checkpoint ``ckpt_path`` means."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight.checkpoint import find_last, verify
from arclight.checkpoint.remote import to_path
from arclight.fabric.environments import SLURMEnvironment
from arclight.trainer.callback import ListsLastCheckpoints
from arclight.trainer.callbacks.checkpoint.file_ops import written_at
from arclight.trainer.loop.progress import TrainerFn
from arclight.trainer.loop.signals import requeue_checkpoint, requeue_folder
from arclight.trainer.run.folder import RunFolder

if TYPE_CHECKING:
    from arclight.trainer.trainer import Trainer


def resolve_run_folder(trainer: Trainer, choice: str | Path | Mapping[str, Any] | None) -> None:
    """Decide where the run writes, before any hook can ask: in the folder of the run that ``ckpt_path`` continues, or one of its own.

    A collective: every rank calls this.
    """
    trainer.newest_of_run = None
    if trainer.conventions.run_folders and trainer._run_folder is None:
        asked = trainer.ckpt_path if choice is None and trainer._ckpt_path_given else choice
        if asked == "last":
            trainer.newest_of_run = _newest_of_run(trainer)
        elif (
            asked in (None, "hpc") and _may_be_requeued(trainer) and (found := requeue_checkpoint(trainer)) is not None
        ):
            trainer.run_folder = RunFolder.open(found.parent.parent)
    trainer.agree_on_places()


def _may_be_requeued(trainer: Trainer) -> bool:
    return trainer.state.fn == TrainerFn.FITTING and SLURMEnvironment.detect()


def resolve_checkpoint_path(trainer: Trainer, choice: str | Path | None, fit_before: bool = False) -> Path | None:
    """The checkpoint that ``ckpt_path`` means; None for going on with the module as it is.

    ``"best"`` and ``"last"`` are those of this trainer's checkpoint callbacks; ``"last"`` also continues the newest run of
    this name in its own folder, ``"hpc"`` one that was requeued. ``fit_before``: an evaluation without a module after a fit,
    which by Lightning's convention takes the best. Raises ValueError where there is none, FileNotFoundError for a path that
    does not exist.
    """
    entry_point = trainer.state.fn.value if trainer.state.fn is not None else "fit"
    if trainer._ckpt_path_given:
        if choice is not None:
            trainer.warn(
                f"`trainer.ckpt_path = {str(trainer.ckpt_path)!r}` was called but then you passed "
                f"`trainer.{entry_point}(ckpt_path={str(choice)!r})`. The latter will be loaded."
            )
        choice = trainer.ckpt_path if choice is None else choice
    path = _chosen(trainer, entry_point, choice, fit_before)
    trainer.ckpt_path_named = path is not None and choice not in (None, "best", "last", "hpc")
    trainer.ckpt_path, trainer._ckpt_path_given = (None if path is None else str(path)), False
    return path


def _chosen(trainer: Trainer, entry_point: str, choice: str | Path | None, fit_before: bool) -> Path | None:
    if choice is None and fit_before and trainer.conventions.evaluate_best:
        trainer.warn(
            f"`.{entry_point}(ckpt_path=None)` was called without a model. The best model of the previous `fit` call will be used. "
            f"You can pass `.{entry_point}(ckpt_path='best')` or `'last'`, or the model, to say which and silence this"
        )
        choice = "best"
    if choice is None and _may_be_requeued(trainer):
        newest = requeue_checkpoint(trainer)
        return None if newest is None else _sound(trainer, newest)
    if choice is None:
        return None
    if choice == "hpc":
        newest = requeue_checkpoint(trainer, any_job=True)
        if newest is None or (newest := _sound(trainer, newest)) is None:
            raise NoCheckpointError(
                f'`.{entry_point}(ckpt_path="hpc")` is set but no HPC checkpoint was found in {requeue_folder(trainer)}. '
                f"Please pass an exact checkpoint path to `.{entry_point}(ckpt_path=...)`"
            )
        return newest
    if choice == "best":
        return _best(trainer, entry_point)
    if choice == "last":
        return _last(trainer, entry_point)
    path = to_path(choice)
    if not path.exists():
        raise FileNotFoundError(f"ckpt_path: {path} does not exist (Checkpoint file not found)")
    return path


def _best(trainer: Trainer, entry_point: str) -> Path:
    if len(trainer.checkpoint_callbacks) > 1:
        trainer.warn(
            f'`.{entry_point}(ckpt_path="best")` is called with Trainer configured with multiple `ModelCheckpoint` callbacks. '
            "It will use the best checkpoint path from first checkpoint callback."
        )
    callback = trainer.checkpoint_callback
    if callback is None:
        raise NoCheckpointError(f'`.{entry_point}(ckpt_path="best")` is set but `ModelCheckpoint` is not configured.')
    best = getattr(callback, "best_model_path", "")
    if not best and trainer.fast_dev_run:
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


def _last(trainer: Trainer, entry_point: str) -> Path | None:
    newest = trainer.strategy.broadcast(_newest_of_callbacks(trainer))
    found = _sound(trainer, newest) if newest is not None else None
    if found is None and trainer.conventions.run_folders:
        found = trainer.newest_of_run or _newest_of_run(trainer)
    if found is None:
        message = (
            f'.{entry_point}(ckpt_path="last") is set, but there is no last checkpoint available. No checkpoint will be loaded. '
            "HINT: Set `ModelCheckpoint(..., save_last=True)`."
        )
        if entry_point != "fit" and trainer.conventions.run_folders:
            raise NoCheckpointError(f"{message} This run has no checkpoint yet: fit first, or name one")
        trainer.warn(message)
        return None
    return found


def _sound(trainer: Trainer, newest: Path) -> Path | None:
    """``newest``, or where it is damaged the newest sound checkpoint beside it. Every rank calls this."""
    if not newest.is_dir():
        return newest
    problems = verify(newest, trainer.strategy)
    if not problems:
        return newest
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the damaged ones are told of in one sentence
        found = find_last(newest.parent, trainer.strategy)
    instead = f"training continues from {found}" if found is not None else "there is no intact one beside it"
    trainer.warn(f"the last checkpoint is damaged: {problems[0].partition(';')[0]}; {instead}")
    return found


class NoCheckpointError(ValueError, FileNotFoundError):
    """A checkpoint was asked for by its role, and there is none."""


def _newest_of_callbacks(trainer: Trainer) -> Path | None:
    """The newest of what this trainer's callbacks keep as their last."""
    paths: set[Path] = set()
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ListsLastCheckpoints):
            paths |= {to_path(path) for path in callback.last_checkpoints(trainer)}
        elif path := getattr(callback, "last_model_path", ""):
            paths.add(to_path(path))
    return max((p for p in paths if p.exists()), key=written_at, default=None)


def _newest_of_run(trainer: Trainer) -> Path | None:
    folder = trainer._run_folder or RunFolder.newest(trainer.default_root_dir, trainer.folder_name)
    kept = trainer.strategy.broadcast(None if folder is None else folder.checkpoints)
    found = find_last(kept, trainer.strategy) if kept is not None else None
    if found is not None and folder is not None:
        trainer.run_folder = folder
    return found
