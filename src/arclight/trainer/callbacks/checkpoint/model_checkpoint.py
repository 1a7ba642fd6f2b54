"""Save checkpoints on a schedule while training, and keep the best.

Users pass it, a recipe's ``[checkpoint]`` makes it, and the Trainer adds one if no callback saves (``enable_checkpointing``). `history`
ranks and writes, ``trainer.fabric.checkpoint_io`` is the format. Arguments (but ``every`` and ``asynchronous``), attributes and file
names are Lightning's and stay; keys of its state are in checkpoints.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from arclight.checkpoint import CheckpointError
from arclight.checkpoint.remote import to_path
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.rank_zero import rank_zero_warn
from arclight.trainer.callback import Checkpoint
from arclight.trainer.callbacks.checkpoint import file_ops
from arclight.trainer.callbacks.checkpoint.history import (
    CheckpointHistory,
    CheckpointWriter,
    SavePlan,
    TopK,
    apply_plan,
    check_retention,
)
from arclight.trainer.callbacks.monitored import (
    MissingMetricError,
    warn_of_no_validation,
)
from arclight.trainer.loggers.params import yaml_text
from arclight.trainer.run.durations import Duration, Unit
from arclight.trainer.settings import TrainerSettings

if TYPE_CHECKING:
    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer


@dataclass(frozen=True)
class SaveSchedule:
    """Rhythm of saves: every n steps, epochs, seconds or units of a :class:`Duration`."""

    steps: int = 0
    epochs: int = 0
    interval: timedelta | None = None
    count: Duration | None = None

    @classmethod
    def of(
        cls, steps: int | None, epochs: int | None, interval: timedelta | None, every: str | Duration | None
    ) -> SaveSchedule:
        """Build a schedule from ModelCheckpoint's arguments; by default every epoch.

        Raises MisconfigurationError for negative numbers and for two rhythms at once.
        """
        for name, value in (("every_n_train_steps", steps), ("every_n_epochs", epochs)):
            if (value or 0) < 0:
                raise MisconfigurationError(f"Invalid value for {name}={value}: it is 0 (never) or more. Must be >= 0")
        if bool(steps) + bool(epochs) + (interval is not None) + (every is not None) > 1:
            raise MisconfigurationError(
                f"Combination of parameters every_n_train_steps={steps}, every_n_epochs={epochs}, "
                f"train_time_interval={interval} and every={every} should be mutually exclusive: choose one of them, or "
                "use two ModelCheckpoints for two rhythms"
            )
        if every is not None:
            duration = Duration.parse(every)
            if duration.value <= 0:
                raise MisconfigurationError(f"ModelCheckpoint(every={str(every)!r}): must be more than nothing")
            if duration.unit is Unit.EPOCHS:
                return cls(epochs=int(duration.value))
            if duration.unit is Unit.SECONDS:
                return cls(interval=timedelta(seconds=duration.value))
            return cls(count=duration)
        return cls(steps or 0, 1 if steps is None and epochs is None and interval is None else epochs or 0, interval)

    @property
    def within_epochs(self) -> bool:
        """Return True if a save may be due between the ends of epochs."""
        return bool(self.steps) or self.interval is not None or self.count is not None

    def resolved(self, trainer: Trainer) -> SaveSchedule:
        """Convert a fraction of the training to a number of steps.

        Raises MisconfigurationError if the length of the training is unknown.
        """
        if self.count is None or self.count.unit is not Unit.FRACTION:
            return self
        total = trainer.estimated_stepping_batches
        if total == math.inf:
            raise MisconfigurationError(
                f"ModelCheckpoint(every='{self.count}'): how long training will be is not known; give the Trainer "
                "max_steps, or give a number of batches"
            )
        return replace(self, steps=max(1, math.ceil(self.count.value * total)), count=None)


class SaveTrigger:
    """Position of a fit in a schedule between the ends of epochs."""

    def __init__(self, rhythm: SaveSchedule, trainer: Trainer, clock: Callable[[], float]) -> None:
        self.rhythm, self._clock = rhythm.resolved(trainer), clock
        self._time, self._seen = clock(), self._look(trainer)
        """Seconds of the clock and progress when a save was last due, or asked for."""
        self._begun, self._ask_at = trainer.progress.batches, 0

    def due(self, trainer: Trainer) -> bool:
        """Return True if a save is due after this batch."""
        rhythm = self.rhythm
        if rhythm.interval is not None:
            return self._time_is_over(trainer, rhythm.interval.total_seconds())
        if rhythm.count is None:
            return rhythm.steps > 0 and trainer.global_step % rhythm.steps == 0
        if trainer.world_size > 1 and rhythm.count.unit is not Unit.BATCHES:
            return self._rank_zero_is_due(trainer, rhythm.count.value)
        (_, before), self._seen = self._seen, self._look(trainer)
        return self._seen[1] // rhythm.count.value > before // rhythm.count.value

    def _rank_zero_is_due(self, trainer: Trainer, value: float) -> bool:
        """Return True on all ranks if a save is due by the samples or tokens of rank 0.

        Other ranks may have seen more or fewer. Asked again after half of the batches that rank 0 expects until then by their size since the
        last question, but at most after as many as there were since training began: most batches cost no exchange.
        """
        if trainer.progress.batches < self._ask_at:
            return False
        (asked_at, before), self._seen = self._seen, self._look(trainer)
        batches, seen = self._seen
        expected = (value - seen % value) * (batches - asked_at) // max(1, seen - before)
        wait = max(1, min(int(expected) // 2, batches - self._begun))
        due, wait = trainer.strategy.broadcast((seen // value > before // value, wait))
        self._ask_at = batches + wait
        return bool(due)

    def _time_is_over(self, trainer: Trainer, seconds: float) -> bool:
        every = trainer.log_every_n_steps or TrainerSettings.log_every_n_steps  # 0: no rows, but saves
        if trainer.world_size > 1 and trainer.global_step % every:
            return False  # agreeing on the time costs an exchange: not in every step
        now = self._clock()
        over: bool = trainer.strategy.broadcast(now - self._time >= seconds)
        if over:
            self._time = now
        return over

    def _look(self, trainer: Trainer) -> tuple[int, int]:
        """Return the batches so far, and what the schedule counts; 0 if it counts nothing."""
        progress, count = trainer.progress, self.rhythm.count
        return progress.batches, 0 if count is None else getattr(progress, _COUNTED[count.unit])


_COUNTED = {Unit.BATCHES: "batches", Unit.SAMPLES: "samples", Unit.TOKENS: "tokens"}
"""The field of `Progress` that a unit counts."""


log = logging.getLogger(__name__)


class ModelCheckpoint(Checkpoint):
    """Save checkpoints periodically and keep the best by a monitored value.

    By default at epoch ends; or every ``every_n_train_steps`` steps, or every ``train_time_interval``.

    * ``every`` is a rhythm in any unit: ``"2ep"``, ``"500ba"``, ``"1_000_000tok"``, ``"0.1dur"``, ``"30min"``.
    * ``monitor`` names the logged value that ranks checkpoints by ``mode``; None keeps the newest. ``save_top_k``
      of them stay (-1: all, 0: none). NaN never ranks as best. A save that is due before the value was ever logged
      waits for the validation (or the epoch's end) that logs it.
    * ``filename`` may hold fields: ``"{epoch}-{step}-{val/loss:.3f}"``. If the name is taken, ``-v1``, ``-v2``
      and so on follow, unless ``enable_version_counter=False``.
    * ``save_last``: also keep the newest as ``last`` (hard links, no extra space), or as a symbolic link with
      ``"link"``. It is brought up to date at every save, whatever that save's rank, and at the end of training.
    * ``save_on_train_epoch_end``: at the end of training epochs rather than after validation. By default it is so
      where validation runs once per epoch.
    * ``asynchronous``: write from a copy in host memory while training goes on; by default if several processes write
      their shards. Errors are raised at the next save, validation or epoch's end; training ends when all is written.
    * ``dirpath`` defaults to ``checkpoints/`` in the run folder; it may be a URL such as ``s3://bucket/name``.

    ``best_model_path`` and its siblings change only when the checkpoint they name is complete, and a checkpoint is
    pruned only after its successor is complete, never the one that the run was resumed from (one that a signal or an
    error made: only if the user named its path). When a resumed run finds
    its folder moved, the record moves with it; a run that is resumed into another folder begins a new record there.
    Raises MissingMetricError when ``monitor`` is not logged although everything that could log it has run.
    """

    CHECKPOINT_JOIN_CHAR = "-"
    CHECKPOINT_EQUALS_CHAR = "="
    CHECKPOINT_NAME_LAST = "last"
    FILE_EXTENSION = ".ckpt"
    STARTING_VERSION = 1

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | Literal["link"] | None = None,
        save_top_k: int = 1,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
        every: str | Duration | None = None,
        asynchronous: bool | None = None,
    ) -> None:
        self.dirpath = file_ops.full_path(dirpath) if dirpath else None
        self.filename, self.monitor, self.verbose, self.mode = filename, monitor, verbose, mode
        self.save_last, self.save_top_k, self.save_weights_only = save_last, save_top_k, save_weights_only
        self.save_on_exception, self.auto_insert_metric_name = save_on_exception, auto_insert_metric_name
        self.save_on_train_epoch_end, self.enable_version_counter = save_on_train_epoch_end, enable_version_counter
        self._rhythm = SaveSchedule.of(every_n_train_steps, every_n_epochs, train_time_interval, every)
        check_retention(mode, monitor, save_top_k, save_last)
        if not self._rhythm.within_epochs:
            self.unused_hooks = frozenset({"on_train_batch_end", "on_train_epoch_start"})
        self.best_k_models: dict[str, torch.Tensor] = {}
        self.best_model_path = self.kth_best_model_path = self.last_model_path = ""
        self.best_model_score: torch.Tensor | None = None
        self.kth_value: torch.Tensor | None = None
        self.current_score: torch.Tensor | None = None
        self._publish(CheckpointHistory())
        self._pending: CheckpointHistory | None = None
        self._writer = CheckpointWriter(asynchronous)
        self._fitting = self._validated = self._deferred = False
        self._next_validation: int | float = float("inf")
        self._beat: SaveTrigger | None = None
        self._resumed_from, self._began = float("inf"), 0
        self._started_at = 0
        self._trainer: Trainer | None = None

    @property
    def every_n_epochs(self) -> int:
        """Epochs between saves at their ends; 0 for none."""
        return self._rhythm.epochs

    @property
    def every_n_train_steps(self) -> int:
        """Optimizer steps between saves; 0 for none."""
        return self._rhythm.steps

    @property
    def train_time_interval(self) -> timedelta | None:
        """Time between saves."""
        return self._rhythm.interval

    # -- state -------------------------------------------------------------------------------------------------

    @property
    def _ranking(self) -> TopK:
        return TopK(self.mode, self.save_top_k)

    @property
    def _ranks(self) -> bool:
        """Return True if checkpoints are ranked by a logged value."""
        return self.monitor is not None and self.save_top_k != 0

    @property
    def _record(self) -> CheckpointHistory:
        """Return the history that the public attributes hold, which a user may change."""
        return replace(
            self._published,
            scores={path: float(score) for path, score in self.best_k_models.items()},
            best=self.best_model_path,
            last=self.last_model_path,
        )

    @property
    def _latest(self) -> CheckpointHistory:
        """The record that holds when what is being written is complete."""
        return self._published if self._writer.plan is None else self._writer.plan.record

    def _publish(self, record: CheckpointHistory) -> None:
        """Update the public attributes to ``record``."""
        self._published = record
        for name, value in record.attributes(self._ranking).items():
            setattr(self, name, value)

    @property
    def state_key(self) -> str:
        rhythm = self._rhythm
        counted = {} if rhythm.count is None else {"every": str(rhythm.count)}
        return self._generate_state_key(
            monitor=self.monitor, mode=self.mode, every_n_train_steps=rhythm.steps, every_n_epochs=rhythm.epochs,
            train_time_interval=rhythm.interval, **counted,
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        state = (self._pending or self._record).state_dict(self._ranking)
        if self._pending is None:
            state |= {name: getattr(self, name) for name in self._published.attributes(self._ranking)}
        return {"monitor": self.monitor, "dirpath": self.dirpath, **state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        before, chosen = state_dict.get("dirpath") or "", self.dirpath is not None
        if self.dirpath is None and self._trainer is not None:
            self._adopt_folder(self._trainer)
        folder = self.dirpath or before
        record = CheckpointHistory.load(state_dict, self._ranking, before, folder)
        if folder != before and not any(file_ops.is_within(path, folder) for path in record.paths()):
            if chosen and state_dict["best_model_path"] + state_dict["last_model_path"]:
                rank_zero_warn(
                    f"The dirpath has changed from {before!r} to {folder!r}, where none of the checkpoints of before are: "
                    "what is kept there is ranked again, only best_model_path still names one of before"
                )
            record = CheckpointHistory(best=state_dict["best_model_path"])
        self._publish(record)
        resumed = self._trainer.ckpt_path if self._trainer is not None else None
        points = [record.newest, file_ops.full_path(resumed) if resumed else ""]
        here = [path for path in points if path and os.path.dirname(path) == folder]
        self._resumed_from = max(map(file_ops.written_at, here), default=float("inf"))

    # -- when --------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        self._trainer, self._fitting = trainer, stage == "fit" and not trainer.fast_dev_run
        self._validated = self._deferred = False
        if stage != "fit":
            return
        self._resumed_from, self._began = float("inf"), time.time_ns()
        trainer.use_checkpoint_io(self._writer.begin(trainer.strategy, trainer.checkpoint_io))
        if not trainer.behavior.run_folders:
            self._adopt_folder(trainer)
        if self.dirpath is not None:
            strategy, io = trainer.strategy, trainer.checkpoint_io
            file_ops.check_folder(strategy, io, self.dirpath, self.save_last, warn=self.save_top_k != 0)

    def teardown(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        self._stop_writing(trainer)
        self._trainer, self._beat, self._fitting = None, None, False

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._started_at = trainer.global_step
        self._beat = SaveTrigger(self._rhythm, trainer, time.monotonic)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._next_validation = trainer.next_validation()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        due = self._beat is not None and self._beat.due(trainer)
        if not due or not self._fitting or trainer.global_step == self._latest.judged:
            return
        known = not self._ranks or self.monitor in self._values(trainer)
        # A validation that follows at once brings the value that this save is to be judged by.
        self._deferred = self._ranks and (not known or self._validation_follows(trainer))
        if not self._deferred or not known:
            self._save(trainer, rank=known)

    def _validation_follows(self, trainer: Trainer) -> bool:
        batch = trainer.progress.batch
        at_end = batch == trainer.num_training_batches and trainer.validates_at_epoch_end
        return batch == self._next_validation or at_end

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None:
        if not self._fitting or trainer.sanity_checking:
            return
        self._validated, self._next_validation = True, trainer.next_validation()
        self._finish_save(trainer, wait=False)
        if self._deferred or (self._epoch_is_due(trainer) and not self._saves_on_train_epoch_end(trainer)):
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._finish_save(trainer, wait=False)
        due = self._epoch_is_due(trainer) and self._saves_on_train_epoch_end(trainer)
        if self._fitting and (due or (self._deferred and self.monitor in self._values(trainer))):
            self._save(trainer)

    def _epoch_is_due(self, trainer: Trainer) -> bool:
        epochs = self._rhythm.epochs
        rhythm = epochs > 0 and (trainer.current_epoch + 1) % epochs == 0
        return rhythm and trainer.global_step != self._latest.judged

    def _saves_on_train_epoch_end(self, trainer: Trainer) -> bool:
        chosen = self.save_on_train_epoch_end
        return trainer.validation_schedule.once_per_epoch if chosen is None else chosen

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        if not self._fitting:
            return
        if self.save_last and (trainer.global_step != self._latest.judged or not self._latest.last):
            self._save(trainer, rank=False)
        self._finish_save(trainer)
        trained = trainer.global_step > self._started_at
        if self.save_top_k != 0 and not self._validated and trained and trainer.enable_validation:
            by_epoch = self.every_n_epochs > 0 and not self._saves_on_train_epoch_end(trainer)
            warn_of_no_validation(trainer.validation_schedule, self.monitor, self._values(trainer), by_epoch)

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        # Saving is a collective, and other ranks may not be here; and a NaN or infinite loss leaves useless weights.
        possible = trainer.world_size == 1 and not isinstance(exception, FloatingPointError)
        saved = trainer.global_step == self._latest.saved and self._latest.newest
        unsaved = not saved and trainer.progress.batches > 0 and not trainer.sanity_checking
        try:
            try:
                if self._fitting and self.save_on_exception and possible and unsaved:
                    self._save(trainer, rank=False, keep=True)
                if trainer.world_size == 1:
                    self._finish_save(trainer)
            finally:
                self._stop_writing(trainer, failed=trainer.world_size > 1)
        except Exception as error:  # whatever it is, the error that ends the run is the one to raise
            exception.add_note(str(error))
        self._fitting = False

    def _stop_writing(self, trainer: Trainer, failed: bool = False) -> None:
        """Restore the checkpoint IO that the trainer had before the fit."""
        used = trainer.checkpoint_io
        trainer.use_checkpoint_io(self._writer.end(used, failed))
        if trainer.checkpoint_io is not used:
            used.teardown()

    def saved_paths(self) -> set[str]:
        return self._record.paths()

    def forget_later_steps(self, trainer: Trainer) -> None:
        self._finish_save(trainer)
        if trainer.global_step < self._record.judged:
            self._publish(replace(self._record, judged=trainer.global_step, saved=0))

    # -- saving ------------------------------------------------------------------------------------------------

    def _adopt_folder(self, trainer: Trainer) -> str:
        """Return the folder to save in, settled when there is something to save."""
        if self.dirpath is None:
            self.dirpath = trainer.checkpoint_folder
        return self.dirpath

    def _values(self, trainer: Trainer) -> dict[str, Any]:
        """Return the values that rank and name checkpoints; logged ``epoch`` and ``step`` win."""
        values: dict[str, Any] = {
            "epoch": trainer.current_epoch,
            "step": trainer.global_step,
            **trainer.callback_metrics,
        }
        return values | {name: int(values[name]) for name in ("epoch", "step")}

    def save_interim(self, trainer: Trainer) -> str | None:
        """Save everything that resuming an interrupted run needs. A collective.

        Returns the path, or None outside of a fit.

        The checkpoint is removed when there is a newer one to resume from (unless the run was resumed from it by its name).
        """
        if not self._fitting:
            return None
        self._save(trainer, rank=False, keep=True, weights_only=False)
        self._finish_save(trainer)
        return self._latest.newest

    def _save(self, trainer: Trainer, rank: bool = True, keep: bool = False, weights_only: bool | None = None) -> None:
        """Plan on rank 0 and write; then update the record and delete what it replaced.

        ``rank``: it may enter the best k; ``keep``: it is written whatever its rank, until there is a newer one.
        """
        self._finish_save(trainer)
        self._adopt_folder(trainer)
        values = self._values(trainer)
        if rank and self._ranks and self.monitor not in values:
            if self._validated or not trainer.enable_validation:
                raise MissingMetricError("ModelCheckpoint", str(self.monitor), trainer.callback_metrics)
            rank, self._deferred = False, True  # validation, which may log it, has not run yet
        elif rank:
            self._deferred = False
        own = self._plan(trainer, values, rank, keep) if trainer.is_global_zero else None
        plan: SavePlan = trainer.strategy.broadcast(own)
        self._pending = plan.record
        try:
            only = self.save_weights_only if weights_only is None else weights_only
            self._writer.write(plan, lambda path: trainer.save_checkpoint(path, only), trainer.checkpoint_io)
        except CheckpointError as error:
            raise self._add_recovery_hint(error) from error
        finally:
            self._pending = None
        self._finish_save(trainer, wait=False)

    def _finish_save(self, trainer: Trainer, wait: bool = True) -> None:
        """Publish the pending save once it is complete; wait for it unless ``wait`` is False."""
        try:
            plan = self._writer.take(trainer.strategy, trainer.checkpoint_io, wait)
        except CheckpointError as error:
            raise self._add_recovery_hint(error) from error
        if plan is None:
            return
        if trainer.is_global_zero:
            link, keep = self.save_last == "link", self._siblings_paths()
            apply_plan(plan, str(self.dirpath), trainer.ckpt_path, trainer.checkpoint_io, link, keep)
        self._publish(plan.record)
        if trainer.is_global_zero and (plan.path or plan.last):
            for logger in trainer.loggers:
                logger.after_save_checkpoint(self)
            if self.verbose:
                log.info("step %d: saved %s", plan.record.saved, plan.path or plan.last)

    def _add_recovery_hint(self, error: CheckpointError) -> CheckpointError:
        before = self._published.newest
        intact = f"the newest complete checkpoint is {before}" if before else "no checkpoint was saved before"
        return CheckpointError(f"{error}; {intact}")

    def _plan(self, trainer: Trainer, values: Mapping[str, Any], rank: bool, keep: bool) -> SavePlan:
        """Plan what this save writes and drops."""
        named = file_ops.full_path(trainer.ckpt_path) if trainer.ckpt_path and trainer.selector.named else ""
        return SavePlan.after(
            self._record,
            self._ranking,
            trainer.global_step,
            lambda name, replaces: self._free_path(values, name, replaces),
            rank=rank,
            score=self._ranking.score(values[str(self.monitor)]) if rank and self._ranks else None,
            keep=keep,
            last=self.CHECKPOINT_NAME_LAST if self.save_last else None,
            needed=None if self.save_weights_only else named,
        )

    def _free_path(self, values: Mapping[str, Any], template: str | None = None, replaces: str = "") -> str:
        """Return a checkpoint path that is not in use; that of ``replaces`` counts as free."""
        path, version = self.format_checkpoint_name(values, template), self.STARTING_VERSION
        while self.enable_version_counter and path != replaces and self._is_in_use(path):
            path, version = self.format_checkpoint_name(values, template, ver=version), version + 1
        return path

    def _is_in_use(self, path: str) -> bool:
        """Return True if ``path`` is in use by this run or another one.

        A file is free if the resumed run saved it after the checkpoint that it resumes from, as its steps are done again: it is newer
        than that checkpoint, older than this fit and in no record.
        """
        if not file_ops.is_taken(path):
            return False
        if path in self._record.paths() | self._siblings_paths():
            return True
        return not self._resumed_from <= file_ops.written_at(path, follow=False) < self._began

    def _siblings_paths(self) -> set[str]:
        """List what the other ModelCheckpoints of the trainer keep or are writing."""
        callbacks = self._trainer.callbacks if self._trainer is not None else ()
        siblings = [other for other in callbacks if isinstance(other, ModelCheckpoint) and other is not self]
        return {path for other in siblings for path in other._record.paths() | other._latest.paths()}

    def check_monitor_top_k(self, trainer: Trainer, current: torch.Tensor | None = None) -> bool:
        """Return True if a checkpoint with the value ``current`` would be kept."""
        return current is not None and self._ranking.qualifies(self._record.scores, self._ranking.score(current))

    # -- names -------------------------------------------------------------------------------------------------

    def format_checkpoint_name(
        self,
        metrics: Mapping[str, Any],
        filename: str | None = None,
        ver: int | None = None,
        prefix: str | None = None,
    ) -> str:
        """Return the path of a checkpoint with these values, with version ``ver`` if given."""
        template = filename or self.filename or "{epoch}" + self.CHECKPOINT_JOIN_CHAR + "{step}"
        name = file_ops.format_name(template, metrics, self.auto_insert_metric_name, self.CHECKPOINT_EQUALS_CHAR)
        parts = [part for part in (prefix, name, None if ver is None else f"v{ver}") if part]
        return os.path.join(self.dirpath or "", self.CHECKPOINT_JOIN_CHAR.join(parts) + self.FILE_EXTENSION)

    def file_exists(self, filepath: str | Path, trainer: Trainer) -> bool:
        """Return True if rank 0 sees ``filepath``; the same answer on every rank."""
        return bool(trainer.strategy.broadcast(to_path(filepath).exists()))

    def last_checkpoints(self) -> set[str]:
        """List what is kept as ``last`` in the folder, whichever run it is from."""
        known = {self.last_model_path} - {""}
        return known | file_ops.find_checkpoints(self.dirpath, self.CHECKPOINT_NAME_LAST, self.FILE_EXTENSION)

    def to_yaml(self, filepath: str | Path | None = None) -> None:
        """Write the kept checkpoints and their scores (default: ``best_k_models.yaml`` beside them)."""
        target = to_path(filepath) if filepath is not None else to_path(self.dirpath or "") / "best_k_models.yaml"
        target.write_bytes(yaml_text(self._record.scores).encode())
