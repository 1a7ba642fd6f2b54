"""The Trainer: settings, the objects that carry them out, and the entry points fit, validate, test and predict."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.precision import resolve_precision
from arclight.trainer import defaults
from arclight.trainer import settings as arguments
from arclight.trainer.callback import Callback
from arclight.trainer.checkpoint import state
from arclight.trainer.checkpoint.checkpoint_io import CheckpointIO, FolderCheckpointIO, TorchCheckpointIO
from arclight.trainer.data.batches import BatchIterator
from arclight.trainer.data.stage_data import StageData
from arclight.trainer.data_view import DataView
from arclight.trainer.logging.metrics import Metrics
from arclight.trainer.logging.reporting import LoggedMetrics
from arclight.trainer.logging.results import ResultCollection
from arclight.trainer.loop import session
from arclight.trainer.loop.accumulation import AccumulationState
from arclight.trainer.loop.evaluation import Predictions
from arclight.trainer.loop.hooks import Hook, callback_hooks, logging_as, module_hooks, resolve
from arclight.trainer.loop.optimizers import LRSchedulerConfig, ManagedOptimizer
from arclight.trainer.loop.progress import Progress, TrainerState
from arclight.trainer.module import Module
from arclight.trainer.profilers.profiler import resolve_profiler
from arclight.trainer.run.folder import RunFolder
from arclight.trainer.run.paths import RunPlaces, local_root
from arclight.trainer.settings import NATIVE, TrainerBehavior, TrainerSettings
from arclight.trainer.strategies import select
from arclight.trainer.view import TrainerView

if TYPE_CHECKING:
    from arclight.fabric.accelerators import Accelerator
    from arclight.fabric.environments import ClusterEnvironment
    from arclight.fabric.precision import Precision
    from arclight.fabric.strategies import Strategy
    from arclight.fabric.strategies.layer_sync import LayerSync
    from arclight.trainer.loggers import Logger
    from arclight.trainer.profilers import Profiler

    Plugin = Precision | ClusterEnvironment | CheckpointIO | LayerSync | str


class Trainer(DataView, LoggedMetrics, RunPlaces, TrainerView):
    """Runs a :class:`Module`: everything between its steps.

    The arguments that are fields of :class:`TrainerSettings` are described there. Beside them

    * ``logger``: True for a CSV file in the run folder, a Logger, a list of them, or False;
    * ``callbacks``: a Callback or a list of them; ``enable_checkpointing=False`` leaves out the default ModelCheckpoint,
      ``enable_model_summary=False`` the summary;
    * ``strategy``, ``accelerator``, ``precision``, ``profiler`` take a name or an object; ``plugins`` holds further objects:
      a Precision, a ClusterEnvironment, a CheckpointIO, a LayerSync;
    * ``default_root_dir``, ``run_name``: files go to ``<default_root_dir>/<run_name>/<n>/`` (default ``runs/<module>/<n>/``).

    Nothing is written before there is something to write. Raises MisconfigurationError for arguments that do not go together.
    """

    conventions: TrainerBehavior = NATIVE

    def __init__(
        self, *, accelerator: str | Accelerator = "auto", strategy: str | Strategy = "auto", devices: list[int] | str | int = "auto",
        num_nodes: int = 1, precision: int | str | Precision | None = None, logger: Logger | Iterable[Logger] | bool | None = None,
        callbacks: Callback | list[Callback] | None = None, fast_dev_run: int | bool = False,
        max_epochs: int | None = None, min_epochs: int | None = None, max_steps: int = -1, min_steps: int | None = None,
        max_time: str | timedelta | dict[str, int] | None = None, limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None, limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None, overfit_batches: int | float = 0.0,
        val_check_interval: int | float | str | timedelta | dict[str, int] | None = None, check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = None, log_every_n_steps: int | None = None, enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None, enable_model_summary: bool | None = None, accumulate_grad_batches: int = 1,
        gradient_clip_val: int | float | None = None, gradient_clip_algorithm: str | None = None, deterministic: bool | str | None = None,
        benchmark: bool | None = None, inference_mode: bool = True, use_distributed_sampler: bool = True, profiler: Profiler | str | None = None,
        detect_anomaly: bool = False, barebones: bool = False, plugins: Plugin | list[Plugin] | None = None, sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0, default_root_dir: str | Path | None = None, enable_autolog_hparams: bool = True,
        run_name: str | None = None, run_folder: RunFolder | None = None, **unknown: Any,
    ) -> None:  # fmt: skip
        given = {
            name: value for name, value in locals().items() if name not in ("self", "unknown", "__class__")
        } | unknown
        self.settings = arguments.check_arguments(given, self.conventions)
        for name in arguments.ATTRIBUTES:
            setattr(self, name, getattr(self.settings, name))
        self.given = given
        self.strategy = select(
            accelerator=accelerator, strategy=strategy, devices=devices, num_nodes=num_nodes, precision=precision,
            plugins=plugins, sync_batchnorm=sync_batchnorm,
        )  # fmt: skip
        self.accelerator = self.strategy.accelerator
        self._precision_choice = precision
        self.precision_plugin = self.strategy.precision
        own_files = TorchCheckpointIO if self.conventions.checkpoint_suffix else FolderCheckpointIO
        self.checkpoint_io: CheckpointIO = self.strategy.checkpoint_io or own_files()
        self.default_root_dir = local_root(default_root_dir or ("runs" if self.conventions.run_folders else Path.cwd()))
        self.run_name, self._run_folder = run_name, run_folder
        self._ckpt_path: str | Path | None = None
        self._ckpt_path_given = self.ckpt_path_named = self._folder_made_early = False
        self._agreed: dict[str, str | None] = {}
        self.newest_of_run: Path | None = None
        """The checkpoint that ``ckpt_path="last"`` found in the run's own folder, before any hook ran."""
        self.callbacks = defaults.default_callbacks(self, callbacks)
        self.profiler = resolve_profiler(profiler)
        self._logger_choice, self._loggers = logger, None
        self.datamodule: Any = None
        self._module: Module | None = None
        self._reset()

    @classmethod
    def from_settings(cls, settings: TrainerSettings, **objects: Any) -> Trainer:
        """A trainer with these settings (a recipe's ``[trainer]`` table) and ``objects``, which win: callbacks, logger, run folder."""
        return cls(**{f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)} | objects)

    @property
    def ckpt_path(self) -> str | Path | None:
        """The checkpoint that the newest entry point loaded; one that is set here is loaded by the next."""
        return self._ckpt_path

    @ckpt_path.setter
    def ckpt_path(self, path: str | Path | None) -> None:
        self._ckpt_path, self._ckpt_path_given = path, path is not None

    def _reset(self) -> None:
        """The state before any run."""
        self.progress, self.window, self.state = Progress(), AccumulationState(), TrainerState()
        self.should_stop = self.is_last_batch = self.received_sigterm = self.requeue = self.told_of_minimum = (
            self.told_of_no_loss
        ) = False
        self.left_within_epoch = False
        self.optimizers = []
        self.lr_scheduler_configs: list[LRSchedulerConfig] = []
        self.logged = self.training_values = ResultCollection("train")
        self.metrics = Metrics()
        self.last_loss: torch.Tensor | None = None
        self.validated_time: float | None = None
        self.pending_rng: dict[str, Any] | None = None
        self.loader_state: dict[str, Any] = {}
        self.loader_seeds: list[int] | int = []
        """Seeds of the training loaders from a checkpoint, until those are asked for; one number for all from versions without more."""
        self.data: dict[str, StageData] = {}
        self.num_training_batches: int | float = math.inf
        self.batch_iterator: BatchIterator | None = None
        self.rng_before_validation: dict[str, Any] | None = None
        self.data_seed, self.eval_batch = 0, 0
        self.evaluated: Counter[str] = Counter()
        self.step_module: torch.nn.Module | None = None
        self.predict_loop = Predictions()
        self.close_window: Callable[[], None] | None = None

    @property
    def optimizers(self) -> list[Optimizer]:
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer] | None) -> None:
        self._optimizers = list(optimizers or [])
        self.managed_optimizers = [ManagedOptimizer(optimizer, self) for optimizer in self._optimizers]

    # -- entry points ----------------------------------------------------------------------------------------------

    def fit(
        self,
        model: Module,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: str | Path | Mapping[str, Any] | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Train ``model``.

        ``ckpt_path`` resumes exactly from a checkpoint: a path, ``"last"`` for the newest of this run's name (from the
        start where there is none yet), ``"best"``, or what :meth:`capture` gave.
        Nothing is unpickled, whatever ``weights_only`` says.
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
        weights_only: bool | None = None,
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
        weights_only: bool | None = None,
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
        ckpt_path: str | Path | None = None, weights_only: bool | None = None,
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

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Create a model directly on its device and in its type; ``empty_init`` leaves out first values, to be loaded."""
        return self.strategy.module_init_context(empty_init=empty_init)

    def save_checkpoint(
        self, filepath: str | Path, weights_only: bool | None = None, storage_options: Any = None
    ) -> None:
        """Write a checkpoint, with ``weights_only`` one that cannot resume; every rank must call this."""
        if self.model is None:
            raise AttributeError(
                "Saving a checkpoint is only possible if a model is attached to the Trainer. Did you call "
                "`Trainer.save_checkpoint()` before calling `Trainer.{fit,validate,test,predict}`?"
            )
        state.save_checkpoint(self, filepath, bool(weights_only), storage_options)

    def capture(self) -> dict[str, Any]:
        """The whole state in memory, for ``ckpt_path`` of a later fit in this process; every rank must call this, and keeps its own.

        Weights, moments and gradients are those of the module and its optimizers, not copies: the next fit takes them up where
        they lie, and whoever changes them in between changes what it takes up.
        """
        return state.dump_checkpoint(self)

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
        if self._module is not None and not self.barebones:
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

    def call_all(self, name: str, *arguments: Any, **options: Any) -> None:
        """Run a hook of every callback, whatever their order of judging."""
        module = self.lightning_module
        for hook in callback_hooks(self, module, self.callbacks, name):
            logging_as(module, name, hook)(*arguments, **options)
