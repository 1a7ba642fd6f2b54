"""The Trainer: settings, the objects that carry them out, and the entry points fit, validate, test and predict."""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.precision import resolve_precision
from arclight.fabric.selection import select
from arclight.trainer import defaults, limits, session, state
from arclight.trainer.batch_iterator import BatchIterator
from arclight.trainer.callback import Callback
from arclight.trainer.data_view import DataView
from arclight.trainer.dataloading import StageData
from arclight.trainer.hooks import Hook, callback_hooks, logging_as, module_hooks, resolve
from arclight.trainer.logged import LoggedValues
from arclight.trainer.metrics import Metrics
from arclight.trainer.module import Module
from arclight.trainer.optimization import LRSchedulerConfig
from arclight.trainer.prediction import Predictions
from arclight.trainer.progress import Progress
from arclight.trainer.reporting import LoggedMetrics
from arclight.trainer.run import RunFolder
from arclight.trainer.settings import TrainerSettings
from arclight.trainer.window import Window

_LOG = logging.getLogger("arclight")


class Trainer(DataView, LoggedMetrics):
    """Runs a :class:`Module`. Keyword arguments are the fields of :class:`TrainerSettings`, and beside them

    * ``logger``: True for a CSV file in the run folder, a Logger, a list of them, or False;
    * ``callbacks``: a Callback or a list of them; ``enable_checkpointing=False`` leaves out the default ModelCheckpoint;
    * ``default_root_dir``, ``run_name``: files go to ``<default_root_dir>/<run_name>/<n>/`` (default ``runs/<module>/<n>/``).

    Nothing is written before there is something to write.
    """

    def __init__(
        self, *, logger: Any = None, callbacks: Callback | list[Callback] | None = None, enable_checkpointing: bool | None = None,
        enable_model_summary: bool | None = None, default_root_dir: str | Path | None = None, run_name: str | None = None,
        run_folder: RunFolder | None = None, fast_dev_run: int | bool = False, min_epochs: int | None = None, min_steps: int | None = None,
        limit_test_batches: int | float | None = None, limit_predict_batches: int | float | None = None, strategy: Any = "auto",
        accelerator: Any = "auto", devices: Any = "auto", precision: Any = None, overfit_batches: int | float = 0.0,
        use_distributed_sampler: bool = True, reload_dataloaders_every_n_epochs: int = 0, **settings: Any,
    ) -> None:  # fmt: skip
        self.settings = defaults.make_settings(settings, fast_dev_run)
        self.fast_dev_run = fast_dev_run
        self.strategy = select(
            accelerator=accelerator, strategy=strategy, devices=devices, num_nodes=self.settings.num_nodes, precision=precision
        )  # fmt: skip
        self.accelerator = self.strategy.accelerator
        self._precision_choice = precision
        self.precision_plugin = self.strategy.precision
        self._adopt(self.settings)
        self.max_epochs = limits.resolve_max_epochs(self.settings.max_epochs, self.settings.max_steps)
        self.min_epochs, self.min_steps = min_epochs or 0, min_steps or 0
        self.overfit_batches, self.use_distributed_sampler = overfit_batches, use_distributed_sampler
        self.reload_dataloaders_every_n_epochs = reload_dataloaders_every_n_epochs
        self.limit_train_batches, self.limit_val_batches = (
            self.settings.limit_train_batches,
            self.settings.limit_val_batches,
        )
        if overfit_batches:
            self.limit_train_batches = self.limit_val_batches = overfit_batches
        self.limit_test_batches = int(fast_dev_run) or limit_test_batches
        self.limit_predict_batches = int(fast_dev_run) or limit_predict_batches
        self.default_root_dir, self.run_name, self._run_folder = Path(default_root_dir or "runs"), run_name, run_folder
        self.callbacks = defaults.default_callbacks(self, callbacks, enable_checkpointing, enable_model_summary)
        self._logger_choice = False if fast_dev_run else logger
        self._loggers: list[Any] | None = None
        self.optimizers: list[Optimizer] = []
        self.lr_scheduler_configs: list[LRSchedulerConfig] = []
        self.datamodule: Any = None
        self._module: Module | None = None
        self._reset()

    @classmethod
    def from_settings(cls, settings: TrainerSettings, **objects: Any) -> Trainer:
        """A trainer with these settings (a recipe's ``[trainer]`` table) and ``objects``: callbacks, logger, run folder."""
        return cls(**{f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}, **objects)

    def _adopt(self, settings: TrainerSettings) -> None:
        """Settings that the loop reads, as plain attributes that callbacks may change."""
        self.max_steps, self.log_every_n_steps = (
            settings.max_steps,
            settings.log_every_n_steps or sys.maxsize,
        )  # 0: never
        self.accumulate_grad_batches = settings.accumulate_grad_batches
        self.gradient_clip_val, self.gradient_clip_algorithm = (
            settings.gradient_clip_val,
            settings.gradient_clip_algorithm,
        )
        self.check_val_every_n_epoch, self.val_check_interval = (
            settings.check_val_every_n_epoch,
            settings.val_check_interval,
        )
        self.inference_mode, self.num_sanity_val_steps = settings.inference_mode, settings.num_sanity_val_steps

    def _reset(self) -> None:
        """The state before any run."""
        self.progress, self.window = Progress(), Window()
        self.stage = ""
        self.should_stop = self.is_last_batch = False
        self.logged = self.training_values = LoggedValues("train")
        self.metrics = Metrics()
        self.last_loss: torch.Tensor | None = None
        self.pending_rng: dict[str, Any] | None = None
        self.loader_state: dict[str, Any] = {}
        self.data: dict[str, StageData] = {}
        self.num_training_batches: int | float = math.inf
        self.batch_iterator: BatchIterator | None = None
        self.rng_before_validation: dict[str, Any] | None = None
        self.data_seed, self.eval_batch = 0, 0
        self.step_module: torch.nn.Module | None = None
        self.predict_loop = Predictions()

    # -- entry points ----------------------------------------------------------------------------------------------

    def fit(
        self,
        model: Module,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: str | Path | None = None,
    ) -> None:
        """Train ``model``.

        ``ckpt_path`` resumes exactly from a checkpoint: a path, ``"last"`` for the newest of this run's name (from the
        start where there is none yet), or ``"best"``.
        Raises NonFiniteLossError when the loss is no number, CheckpointError for a checkpoint that cannot be used.
        """
        session.launch(self, session.fit, model, train_dataloaders, val_dataloaders, datamodule, ckpt_path)

    def validate(
        self,
        model: Module | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: Any = None,
    ) -> list[dict[str, float]]:
        """Run the validation data once; the logged values of each loader."""
        return self._evaluate("validate", model, dataloaders, ckpt_path, verbose, datamodule)

    def test(
        self,
        model: Module | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: Any = None,
    ) -> list[dict[str, float]]:
        """Run the test data once; the logged values of each loader."""
        return self._evaluate("test", model, dataloaders, ckpt_path, verbose, datamodule)

    def _evaluate(
        self, stage: str, model: Module | None, loaders: Any, ckpt_path: Any, verbose: bool, datamodule: Any
    ) -> list[dict[str, float]]:
        results: list[dict[str, float]] = session.launch(
            self, session.evaluate, stage, model, loaders, datamodule, ckpt_path
        )
        if verbose and self.is_global_zero and results and any(results):
            defaults.show_results(stage, results)
        return results

    def predict(
        self, model: Module | None = None, dataloaders: Any = None, datamodule: Any = None, return_predictions: bool | None = None,
        ckpt_path: str | Path | None = None,
    ) -> Any:  # fmt: skip
        """``predict_step`` of every batch: a list, or a list for each of several loaders; None with ``return_predictions=False``."""
        return session.launch(self, session.predict, model, dataloaders, datamodule, ckpt_path, return_predictions)

    def predict_iter(
        self, model: Module | None = None, dataloaders: Any = None, datamodule: Any = None, ckpt_path: str | Path | None = None
    ) -> Iterator[Any]:  # fmt: skip
        """``predict_step`` of one batch after another, as they are taken; nothing is kept.

        Raises MisconfigurationError for strategies that start processes of their own.
        """
        if not self.strategy.launcher.runs_in_this_process:
            raise MisconfigurationError("predict_iter gives outputs of this process; use a strategy that runs in it")
        return session.predict_iter(self, model, dataloaders, datamodule, ckpt_path)

    def save_checkpoint(self, filepath: str | Path, weights_only: bool = False) -> None:
        """Write a checkpoint folder; every rank must call this."""
        state.save(self, filepath, weights_only)

    def adopt_precision(self, name: str | None) -> None:
        """Go on in a checkpoint's precision where this run's was left to be measured: a second measurement may differ."""
        if name is not None and self._precision_choice == "auto":
            self.precision_plugin = self.strategy.precision = resolve_precision(name, self.strategy.root_device.type)

    # -- hooks -----------------------------------------------------------------------------------------------------

    def resolve(self, name: str) -> tuple[Hook, ...]:
        """Everything that runs at hook ``name``."""
        return resolve(self, self.lightning_module, name)

    def enter(self, hook: str) -> None:
        """From here on ``log`` belongs to ``hook``."""
        values = self.logged
        values.hook = hook
        if self._module is not None:
            self._module.__dict__["_entries"] = values.table(hook)

    def call(self, name: str, *arguments: Any, monitors: bool = True) -> None:
        """Run hook ``name``: callbacks, then the module, then (unless ``monitors`` is False) the callbacks that run last."""
        module = self.lightning_module
        self.enter(name)
        callbacks = [c for c in self.callbacks if not c.runs_last]
        for hook in callback_hooks(self, module, callbacks, name) + module_hooks(module, name):
            hook(*arguments)
        if monitors:
            self.call_monitors(name)

    def call_monitors(self, *names: str) -> None:
        """Run hooks of the callbacks that judge or save what the others did."""
        last = [c for c in self.callbacks if c.runs_last]
        for name in names:
            for hook in callback_hooks(self, self.lightning_module, last, name):
                hook()

    def call_all(self, name: str, *arguments: Any) -> None:
        """Run a hook of every callback, whatever their order of judging."""
        module = self.lightning_module
        for hook in callback_hooks(self, module, self.callbacks, name):
            logging_as(module, name, hook)(*arguments)

    # -- what callbacks and modules ask ----------------------------------------------------------------------------

    @property
    def lightning_module(self) -> Module:
        if self._module is None:
            raise RuntimeError("this trainer has no module yet; call fit, validate, test or predict with one")
        return self._module

    model = lightning_module

    @property
    def run_folder(self) -> RunFolder:
        """Where this run writes; made when first asked for, the same on every rank."""
        if self._run_folder is None:
            name = self.run_name or (type(self._module).__name__.lower() if self._module is not None else "run")
            made = str(RunFolder(self.default_root_dir, name).path) if self.is_global_zero else ""
            self._run_folder = RunFolder.open(self.strategy.broadcast(made))
        return self._run_folder

    @run_folder.setter
    def run_folder(self, folder: RunFolder) -> None:
        self._run_folder = folder

    @property
    def loggers(self) -> list[Any]:
        if self._loggers is None:
            self._loggers = defaults.make_loggers(self, self._logger_choice)
        return self._loggers

    @property
    def logger(self) -> Any:
        return self.loggers[0] if self.loggers else None

    @property
    def log_dir(self) -> str:
        return str(self.run_folder.path)

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        from arclight.trainer.callback import Checkpoint

        return [callback for callback in self.callbacks if isinstance(callback, Checkpoint)]

    @property
    def checkpoint_callback(self) -> Any:
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def current_epoch(self) -> int:
        return self.progress.epoch

    @property
    def global_step(self) -> int:
        return self.progress.global_step

    @property
    def training(self) -> bool:
        return self.stage == "train"

    @property
    def sanity_checking(self) -> bool:
        return self.stage == "sanity_check"

    @property
    def validating(self) -> bool:
        return self.stage == "validate"

    @property
    def world_size(self) -> int:
        return self.strategy.world_size

    @property
    def global_rank(self) -> int:
        return self.strategy.global_rank

    @property
    def local_rank(self) -> int:
        return self.strategy.local_rank

    @property
    def is_global_zero(self) -> bool:
        return self.strategy.is_global_zero

    @property
    def num_devices(self) -> int:
        return self.strategy.num_devices

    @property
    def num_nodes(self) -> int:
        return self.strategy.num_nodes

    @property
    def precision(self) -> str:
        return self.precision_plugin.name

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only."""
        if self.is_global_zero:
            print(*args, **kwargs)  # noqa: T201

    def notice(self, message: str) -> None:
        """Tell the user something once, on rank 0."""
        if self.is_global_zero:
            _LOG.warning(message)
