"""Save checkpoints while training, and keep the best."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from arclight.checkpoint import remove
from arclight.trainer.callback import Checkpoint
from arclight.trainer.callbacks.checkpoint_files import copy_checkpoint, format_name, link_checkpoint
from arclight.trainer.callbacks.checkpoint_record import Ranking, Record
from arclight.trainer.callbacks.monitored import MissingMetricError, check_mode, validates_once_per_epoch
from arclight.trainer.loggers.logger import yaml_lines

if TYPE_CHECKING:
    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """One save: what to write, what to drop once that is complete, and the record that then holds."""

    record: Record
    path: str = ""
    last: str = ""
    drop: tuple[str, ...] = ()


class ModelCheckpoint(Checkpoint):
    """Save at epoch ends, every ``every_n_train_steps`` steps or every ``train_time_interval``; keep the best.

    * ``monitor`` names the logged value that ranks checkpoints by ``mode``; None keeps the newest. ``save_top_k``
      of them stay (-1: all, 0: none). NaN never ranks as best.
    * ``filename`` may hold fields: ``"{epoch}-{step}-{val/loss:.3f}"``. Where the name is taken, ``-v1``, ``-v2``
      and so on follow, unless ``enable_version_counter=False``.
    * ``save_last``: also keep the newest as ``last.ckpt`` (hard links, no extra space), or as a symbolic link with
      ``"link"``. It is brought up to date at every save, whatever that save's rank, and at the end of training.
    * ``save_on_train_epoch_end``: at the end of training epochs rather than after validation. By default it is so
      where validation runs once per epoch.
    * ``dirpath`` defaults to ``checkpoints/`` in the run folder.

    ``best_model_path`` and its siblings change only when the checkpoint they name is complete, and a checkpoint is
    pruned only after its successor is complete. When a resumed run finds its folder moved, the record moves with it.
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
    ) -> None:
        self.dirpath = os.path.realpath(os.path.expanduser(dirpath)) if dirpath else None
        self.filename, self.monitor, self.verbose, self.mode = filename, monitor, verbose, mode
        self.save_last, self.save_top_k, self.save_weights_only = save_last, save_top_k, save_weights_only
        self.save_on_exception, self.auto_insert_metric_name = save_on_exception, auto_insert_metric_name
        self.save_on_train_epoch_end, self.enable_version_counter = save_on_train_epoch_end, enable_version_counter
        self._set_triggers(every_n_train_steps, every_n_epochs, train_time_interval)
        self._check()
        self._ranking = Ranking(mode, save_top_k)
        self._record = Record()
        self._pending: Record | None = None
        self._fitting = self._validated = self._deferred = False
        self._next_validation: int | float = math.inf
        self._last_time = 0.0
        self._resumed_from = math.inf
        self._trainer: Trainer | None = None

    def _set_triggers(self, steps: int | None, epochs: int | None, interval: timedelta | None) -> None:
        if (steps or 0) < 0 or (epochs or 0) < 0:
            raise ValueError(
                f"ModelCheckpoint(every_n_train_steps={steps}, every_n_epochs={epochs}): must be 0 (never) or more",
            )
        if bool(steps) + bool(epochs) + bool(interval) > 1:
            raise ValueError(
                f"ModelCheckpoint(every_n_train_steps={steps}, every_n_epochs={epochs}, "
                f"train_time_interval={interval}): choose one of them; use two ModelCheckpoints for two rhythms",
            )
        self.every_n_train_steps, self.train_time_interval = steps or 0, interval
        self.every_n_epochs = 1 if steps is None and epochs is None and interval is None else epochs or 0
        if not steps and interval is None:
            self.unused_hooks = frozenset({"on_train_batch_end", "on_train_epoch_start"})

    def _check(self) -> None:
        check_mode(self.mode)
        if self.save_top_k < -1:
            raise ValueError(f"ModelCheckpoint(save_top_k={self.save_top_k}): -1 keeps all, 0 none, k the best k")
        if self.monitor is None and self.save_top_k not in (-1, 0, 1):
            raise ValueError(
                f"ModelCheckpoint(save_top_k={self.save_top_k}, monitor=None): say which logged value ranks "
                "checkpoints, or keep 1, all (-1) or none (0)",
            )
        if self.save_last not in (None, True, False, "link"):
            raise ValueError(f"ModelCheckpoint(save_last={self.save_last!r}): choose True, False or 'link'")

    # -- what is known -----------------------------------------------------------------------------------------

    @property
    def best_model_path(self) -> str:
        """The best checkpoint (with ``monitor=None``: the newest); empty before the first is complete."""
        return self._record.best

    @property
    def best_model_score(self) -> torch.Tensor | None:
        scores = self._record.scores.values()
        return torch.tensor((min if self.mode == "min" else max)(scores)) if scores else None

    @property
    def best_k_models(self) -> dict[str, torch.Tensor]:
        """Path and score of the kept checkpoints."""
        return {path: torch.tensor(score) for path, score in self._record.scores.items()}

    @property
    def kth_best_model_path(self) -> str:
        """The worst of the kept checkpoints, which the next better one replaces."""
        return self._ranking.worst(self._record.scores)

    @property
    def kth_value(self) -> torch.Tensor | None:
        return torch.tensor(self._record.scores[worst]) if (worst := self.kth_best_model_path) else None

    @property
    def last_model_path(self) -> str:
        return self._record.last

    @property
    def current_score(self) -> torch.Tensor | None:
        """The monitored value at the last save; the worst possible one for NaN."""
        return None if self._record.current_score is None else torch.tensor(self._record.current_score)

    @property
    def state_key(self) -> str:
        return self._generate_state_key(
            monitor=self.monitor,
            mode=self.mode,
            every_n_train_steps=self.every_n_train_steps,
            every_n_epochs=self.every_n_epochs,
            train_time_interval=self.train_time_interval,
        )

    def state_dict(self) -> dict[str, Any]:
        return (self._pending or self._record).state_dict(self.dirpath or "")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        folder = self.dirpath or state_dict["dirpath"]
        if self.dirpath is None and self._trainer is not None:
            folder = os.path.realpath(self._trainer.run_folder.path / "checkpoints")
        self._record = record = Record.load(state_dict, folder, self._ranking.best)
        here = record.newest and os.path.dirname(record.newest) == folder
        self._resumed_from = os.path.getmtime(record.newest) if here else math.inf

    # -- when --------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        self._trainer = trainer

    def teardown(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        self._trainer, self._fitting = None, False

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._fitting, self._validated, self._deferred = not trainer.fast_dev_run, False, False
        self._last_time = time.monotonic()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._next_validation = trainer.next_validation()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: Module,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if trainer.global_step == self._record.step or not (self._due_by_step(trainer) or self._due_by_time(trainer)):
            return
        # A validation that follows at once brings the value that this save is to be judged by.
        self._deferred = self.monitor is not None and self._validation_follows(trainer)
        if self._fitting and not self._deferred:
            self._save(trainer)

    def _due_by_step(self, trainer: Trainer) -> bool:
        return self.every_n_train_steps > 0 and trainer.global_step % self.every_n_train_steps == 0

    def _due_by_time(self, trainer: Trainer) -> bool:
        if self.train_time_interval is None:
            return False
        if trainer.world_size > 1 and trainer.global_step % trainer.log_every_n_steps:
            return False  # agreeing on the time costs an exchange: not in every step
        over = time.monotonic() - self._last_time >= self.train_time_interval.total_seconds()
        due: bool = trainer.strategy.broadcast(over)
        if due:
            self._last_time = time.monotonic()
        return due

    def _validation_follows(self, trainer: Trainer) -> bool:
        batch = trainer.progress.batch
        at_end = batch == trainer.num_training_batches and trainer.validates_when_epoch_is_over()
        return batch == self._next_validation or at_end

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None:
        if not self._fitting or trainer.sanity_checking:
            return
        self._validated, self._next_validation = True, trainer.next_validation()
        if self._deferred or (self._epoch_is_due(trainer) and not self._saves_on_train_epoch_end(trainer)):
            self._deferred = False
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        if self._fitting and self._epoch_is_due(trainer) and self._saves_on_train_epoch_end(trainer):
            self._save(trainer)

    def _epoch_is_due(self, trainer: Trainer) -> bool:
        rhythm = self.every_n_epochs > 0 and (trainer.current_epoch + 1) % self.every_n_epochs == 0
        return rhythm and trainer.global_step != self._record.step

    def _saves_on_train_epoch_end(self, trainer: Trainer) -> bool:
        chosen = self.save_on_train_epoch_end
        return validates_once_per_epoch(trainer) if chosen is None else chosen

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        if self._fitting and self.save_last and trainer.global_step != self._record.step:
            self._save(trainer, rank=False)
        self._fitting = False

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        # Saving is a collective, and other ranks may not be here; and a loss that is no number has spoiled the model.
        possible = trainer.world_size == 1 and not isinstance(exception, FloatingPointError)
        if self._fitting and self.save_on_exception and possible:
            self._save(trainer, rank=False, keep=True)
        self._fitting = False

    # -- saving ------------------------------------------------------------------------------------------------

    def _save(self, trainer: Trainer, rank: bool = True, keep: bool = False) -> None:
        """Plan on rank 0, write, and only then let the record speak of it and drop what it replaced.

        ``rank``: it may enter the best k; ``keep``: it is written whatever its rank.
        """
        if self.dirpath is None:
            self.dirpath = os.path.realpath(trainer.run_folder.checkpoints)
        metrics = trainer.callback_metrics
        if rank and self.save_top_k != 0 and self.monitor is not None and self.monitor not in metrics:
            if self._validated or not trainer.num_val_batches:
                raise MissingMetricError("ModelCheckpoint", self.monitor, metrics)
            rank = False  # validation, which may log it, has not run yet
        own = self._plan(trainer, metrics, rank, keep) if trainer.is_global_zero else None
        plan: Plan = trainer.strategy.broadcast(own)
        self._pending = plan.record
        try:
            self._write(trainer, plan)
        finally:
            self._pending = None
        self._record = plan.record
        if trainer.is_global_zero:
            self._after_save(trainer, plan)

    def _write(self, trainer: Trainer, plan: Plan) -> None:
        if plan.path:
            trainer.save_checkpoint(plan.path, self.save_weights_only)
        if plan.last and not plan.path:
            trainer.save_checkpoint(plan.last, self.save_weights_only)
        elif plan.last and trainer.is_global_zero:
            duplicate = link_checkpoint if self.save_last == "link" else copy_checkpoint
            duplicate(Path(plan.path), Path(plan.last))

    def _after_save(self, trainer: Trainer, plan: Plan) -> None:
        for path in plan.drop:
            if os.path.dirname(path) == self.dirpath and os.path.lexists(path):  # never reach into another run's folder
                remove(path)
        if plan.path or plan.last:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(self)
            if self.verbose:
                log.info("step %d: saved %s", trainer.global_step, plan.path or plan.last)

    def _plan(self, trainer: Trainer, metrics: Mapping[str, torch.Tensor], rank: bool, keep: bool) -> Plan:
        """What this save writes and drops."""
        values = {**metrics, "epoch": trainer.current_epoch, "step": trainer.global_step}
        old, path, drop = self._record, "", ""
        record = replace(old, step=trainer.global_step)
        if keep:
            path = self._free_path(values)
        elif rank and self.save_top_k != 0 and self.monitor is None:
            drop = old.best if self.save_top_k == 1 else ""
            path = self._free_path(values, replaces=drop)
            record = replace(record, best=path)
        elif rank and self.save_top_k != 0 and self.monitor is not None:
            score, scores = self._ranking.score(metrics[self.monitor]), dict(old.scores)
            if self._ranking.qualifies(scores, score):
                if len(scores) == self.save_top_k:
                    scores.pop(drop := self._ranking.worst(scores))
                path = self._free_path(values, replaces=drop)
                scores[path] = score
            record = replace(record, scores=scores, best=self._ranking.best(scores), current_score=score)
        last = self._free_path(values, self.CHECKPOINT_NAME_LAST, replaces=old.last) if self.save_last else ""
        record = replace(record, last=last or old.last, newest=path or last or old.newest)
        gone = (drop, old.last) if last else (drop,)
        return Plan(record, path, last, tuple(name for name in gone if name and name not in (path, last)))

    def _free_path(self, values: Mapping[str, Any], template: str | None = None, replaces: str = "") -> str:
        """A path that is not taken; that of the checkpoint which this one ``replaces`` is free."""
        path, version = self.format_checkpoint_name(values, template), self.STARTING_VERSION
        while self.enable_version_counter and path != replaces and os.path.lexists(path) and not self._is_stale(path):
            path, version = self.format_checkpoint_name(values, template, ver=version), version + 1
        return path

    def _is_stale(self, path: str) -> bool:
        """Whether a killed run left this behind after the point from which it was resumed."""
        return path not in self._record.paths() and os.lstat(path).st_mtime >= self._resumed_from

    def check_monitor_top_k(self, trainer: Trainer, current: torch.Tensor | None = None) -> bool:
        """Whether a checkpoint with the value ``current`` would be kept."""
        return current is not None and self._ranking.qualifies(self._record.scores, self._ranking.score(current))

    # -- names -------------------------------------------------------------------------------------------------

    def format_checkpoint_name(
        self,
        metrics: Mapping[str, Any],
        filename: str | None = None,
        ver: int | None = None,
        prefix: str | None = None,
    ) -> str:
        """The path of a checkpoint with these values, with version ``ver`` if given."""
        template = filename or self.filename or "{epoch}" + self.CHECKPOINT_JOIN_CHAR + "{step}"
        name = format_name(template, metrics, self.auto_insert_metric_name, self.CHECKPOINT_EQUALS_CHAR)
        parts = [part for part in (prefix, name, None if ver is None else f"v{ver}") if part]
        return os.path.join(self.dirpath or "", self.CHECKPOINT_JOIN_CHAR.join(parts) + self.FILE_EXTENSION)

    def file_exists(self, filepath: str | Path, trainer: Trainer) -> bool:
        """Whether rank 0 sees ``filepath``; the same answer on every rank."""
        return bool(trainer.strategy.broadcast(os.path.exists(filepath)))

    def to_yaml(self, filepath: str | Path | None = None) -> None:
        """Write the kept checkpoints and their scores (default: ``best_k_models.yaml`` beside them)."""
        target = Path(filepath) if filepath is not None else Path(self.dirpath or "") / "best_k_models.yaml"
        target.write_text(yaml_lines(self._record.scores), encoding="utf-8")
