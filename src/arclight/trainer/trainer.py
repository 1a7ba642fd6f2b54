"""Define the Trainer: its settings and parts, and fit, validate, test and predict.

Users make one, recipes do in ``cli.run_setup``, federated clients in ``federated.clients.trainer_learner``. Each entry point runs a
`Session`; data, logging, checkpoints and run folder are objects of their own folders. Arguments, attributes and names of hooks are
Lightning 2.x's and stay; a convention that differs from Lightning's is a field of `TrainerBehavior`, an argument that recipes may set
also one of `TrainerSettings`.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.optim import Optimizer

from arclight.data.combined import Count
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.registry import load_external_callbacks
from arclight.fabric.selection import agree_on_precision
from arclight.trainer.callback import Callback, Checkpoint
from arclight.trainer.checkpoint.resume import CheckpointSelector, ResumeSources
from arclight.trainer.checkpoint.state import CheckpointConnector
from arclight.trainer.data.connector import DataConnector
from arclight.trainer.data.limits import ValidationSchedule, estimated_steps, log_interval
from arclight.trainer.diagnosis import diagnose
from arclight.trainer.fabric.checkpoint_io import AsyncCheckpointIO, CheckpointIO, FolderCheckpointIO, TorchCheckpointIO
from arclight.trainer.fabric.strategies import select
from arclight.trainer.logging.reporting import NonFiniteLossError, Reporter, nonfinite_loss
from arclight.trainer.loop import gradients
from arclight.trainer.loop.accumulation import AccumulationState
from arclight.trainer.loop.hooks import (
    Hook,
    attach_log,
    callback_hooks,
    check_state_keys,
    checkpoints_last,
    logging_as,
    module_hooks,
    overridden,
    within_a_step,
)
from arclight.trainer.loop.optimizers import LRSchedulerConfig, ManagedOptimizer
from arclight.trainer.loop.progress import Progress, RunningStage, TrainerState, TrainerStatus
from arclight.trainer.loop.run_state import RunState
from arclight.trainer.loop.session import NestedEvaluation, Session
from arclight.trainer.loop.signals import RequeueCheckpoints
from arclight.trainer.module import Module
from arclight.trainer.profilers.profiler import resolve_profiler
from arclight.trainer.run.folder import RunFolder
from arclight.trainer.run.paths import RunPaths, local_root
from arclight.trainer.settings import TrainerBehavior, TrainerSettings, check_arguments

if TYPE_CHECKING:
    from arclight.fabric.accelerators import Accelerator
    from arclight.fabric.environments import ClusterEnvironment
    from arclight.fabric.precision import Precision
    from arclight.fabric.strategies import Strategy
    from arclight.fabric.strategies.layer_sync import LayerSync
    from arclight.trainer.loggers.logger import Logger
    from arclight.trainer.logging.results import ResultCollection
    from arclight.trainer.profilers.profiler import Profiler

    Plugin = Precision | ClusterEnvironment | CheckpointIO | LayerSync | str

_LOG = logging.getLogger("arclight")


class Trainer:
    """Run a :class:`Module`: fit, validate, test and predict.

    The arguments that are fields of :class:`TrainerSettings` are described there. Beside them

    * ``logger``: True for a CSV file in the run folder, a Logger, a list of them, or False;
    * ``callbacks``: a Callback or a list of them; ``enable_checkpointing=False`` leaves out the default ModelCheckpoint,
      ``enable_model_summary=False`` the summary;
    * ``strategy``, ``accelerator``, ``precision``, ``profiler`` take a name or an object; ``plugins`` holds further objects:
      a Precision, a ClusterEnvironment, a CheckpointIO, a LayerSync;
    * ``default_root_dir``, ``run_name``: files go to ``<default_root_dir>/<run_name>/<n>/`` (default ``runs/<module>/<n>/``).

    Nothing is written before there is something to write. Raises MisconfigurationError for arguments that do not go together.
    """

    behavior: TrainerBehavior = TrainerBehavior()
    callbacks: list[Callback]

    # settings that are plain attributes, which callbacks and modules may change while a run lasts
    fast_dev_run: int | bool
    max_epochs: int  # None until the first fit if the user did not say
    min_epochs: int | None
    max_steps: int
    min_steps: int | None
    limit_train_batches: int | float
    limit_val_batches: int | float
    limit_test_batches: int | float
    limit_predict_batches: int | float
    overfit_batches: int | float
    val_check_interval: Any
    check_val_every_n_epoch: int | None
    num_sanity_val_steps: int | float
    log_every_n_steps: int
    accumulate_grad_batches: int
    gradient_clip_val: int | float | None
    gradient_clip_algorithm: str | None
    inference_mode: bool
    use_distributed_sampler: bool
    detect_anomaly: bool
    barebones: bool
    reload_dataloaders_every_n_epochs: int

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
        given = {name: value for name, value in locals().items() if name not in ("self", "unknown", "__class__")}
        self.settings = check_arguments(given, unknown, self.behavior)
        for field in dataclasses.fields(TrainerSettings):
            if field.name in Trainer.__annotations__:
                setattr(self, field.name, getattr(self.settings, field.name))
        self.given = given
        self.strategy = select(
            accelerator=accelerator, strategy=strategy, devices=devices, num_nodes=num_nodes, precision=precision,
            plugins=plugins, sync_batchnorm=sync_batchnorm,
        )  # fmt: skip
        self.accelerator = self.strategy.accelerator
        self._precision_choice = precision
        self.precision_plugin = self.strategy.precision
        own_files = TorchCheckpointIO if self.behavior.checkpoint_suffix else FolderCheckpointIO
        self.checkpoint_io: CheckpointIO = self.strategy.checkpoint_io or own_files()
        if isinstance(self.checkpoint_io, AsyncCheckpointIO):
            self.checkpoint_io.wrap(own_files)
        root = default_root_dir or ("runs" if self.behavior.run_folders else Path.cwd())
        self.paths = RunPaths(
            self.strategy, root=local_root(root), name=run_name, folder=run_folder, logger=logger,
            run_folders=self.behavior.run_folders, default_logger=self.behavior.default_logger, dry=bool(self.fast_dev_run),
        )  # fmt: skip
        self.run_state = RunState()
        self.data, self.checkpoints = DataConnector(self), CheckpointConnector(self)
        self.selector = CheckpointSelector(self.paths, self.strategy)
        self.callbacks = self._default_callbacks(callbacks)
        self.profiler = resolve_profiler(profiler)
        self.datamodule: Any = None
        self._module: Module | None = None

    @classmethod
    def from_settings(cls, settings: TrainerSettings, **objects: Any) -> Trainer:
        """Build a trainer from settings (a recipe's ``[trainer]`` table) and ``objects``.

        The objects win: callbacks, logger, run folder.
        """
        return cls(**{f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)} | objects)

    def _default_callbacks(self, given: Callback | list[Callback] | None) -> list[Callback]:
        """Return the user's callbacks with the default ones, unless those are turned off."""
        from arclight.trainer.callbacks.checkpoint.model_checkpoint import ModelCheckpoint
        from arclight.trainer.callbacks.monitoring.model_summary import ModelSummary, RichModelSummary
        from arclight.trainer.callbacks.progress.progress_bar import ProgressBar
        from arclight.trainer.callbacks.timer import Timer

        chosen, settings = self.given, self.settings
        callbacks = [given] if isinstance(given, Callback) else list(given or [])
        bars = [c for c in callbacks if isinstance(c, ProgressBar)]
        _check_callbacks(callbacks, bars, chosen)
        if settings.max_time is not None:
            if any(isinstance(c, Timer) for c in callbacks):
                self.log_info("Ignoring `Trainer(max_time=...)`, callbacks list already contains a Timer.")
            else:
                callbacks.append(Timer(duration=settings.max_time, interval="step"))
        saves = chosen["enable_checkpointing"] is not False and not self.fast_dev_run
        if saves and not any(isinstance(c, Checkpoint) for c in callbacks):
            callbacks.append(ModelCheckpoint())
        if settings.enable_progress_bar and not bars:
            from arclight.trainer.callbacks.progress.rich_progress import RichProgressBar

            callbacks.append(RichProgressBar())
        summary = chosen["enable_model_summary"]
        summary = settings.enable_progress_bar if summary is None else summary
        if summary and not any(isinstance(c, ModelSummary) for c in callbacks):
            callbacks.append(ModelSummary() if any(bar.plain_text for bar in bars) else RichModelSummary())
        callbacks += load_external_callbacks(self.behavior.callbacks_factory)
        check_state_keys(callbacks)
        return checkpoints_last(callbacks)

    # -- entry points ----------------------------------------------------------------------------------------------

    @property
    def _session(self) -> Session | NestedEvaluation:
        """The session that runs the next entry point, which a hook of a run under way may call."""
        return (NestedEvaluation if self.state.status == TrainerStatus.RUNNING else Session)(self)

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
        start if there is none yet), ``"best"``, or what :meth:`capture` gave.
        Nothing is unpickled, whatever ``weights_only`` says.
        Raises NonFiniteLossError when the loss is NaN or infinite, CheckpointError for a checkpoint that cannot be used.
        """
        self._session.fit(model, train_dataloaders, val_dataloaders, datamodule, ckpt_path)

    def validate(
        self,
        model: Module | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Run the validation data once; return the logged values of each loader."""
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
        """Run the test data once; return the logged values of each loader."""
        return self._evaluate("test", model, dataloaders, ckpt_path, verbose, datamodule)

    def _evaluate(
        self, stage: str, model: Module | None, loaders: Any, ckpt_path: Any, verbose: bool, datamodule: Any
    ) -> list[dict[str, float]]:
        results = self._session.evaluate(stage, model, loaders, datamodule, ckpt_path)
        if verbose and self.is_global_zero and results and any(results):
            show_results(stage, results)
        return results

    def predict(
        self, model: Module | None = None, dataloaders: Any = None, datamodule: Any = None, return_predictions: bool | None = None,
        ckpt_path: str | Path | None = None, weights_only: bool | None = None,
    ) -> Any:  # fmt: skip
        """Return the outputs of ``predict_step`` for every batch.

        A list, or a list for each of several loaders; None with ``return_predictions=False``.
        """
        return self._session.predict(model, dataloaders, datamodule, ckpt_path, return_predictions)

    def predict_iter(
        self, model: Module | None = None, dataloaders: Any = None, datamodule: Any = None, ckpt_path: str | Path | None = None
    ) -> Iterator[Any]:  # fmt: skip
        """Yield ``predict_step`` of one batch after another, as they are taken; nothing is kept.

        Raises MisconfigurationError for strategies that start processes of their own, and within a hook of a run: outputs that
        are not taken would leave that run in evaluation.
        """
        if not self.strategy.launcher.runs_in_this_process:
            raise MisconfigurationError("predict_iter gives outputs of this process; use a strategy that runs in it")
        return self._session.predict_iter(model, dataloaders, datamodule, ckpt_path)

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Create a model directly on its device and in its type.

        ``empty_init`` leaves out initial values, if weights are loaded anyway.
        """
        return self.strategy.module_init_context(empty_init=empty_init)

    def save_checkpoint(
        self, filepath: str | Path, weights_only: bool | None = None, storage_options: Any = None
    ) -> None:
        """Save a checkpoint; every rank must call this.

        One with ``weights_only`` cannot resume.
        """
        if self.model is None:
            raise AttributeError(
                "Saving a checkpoint is only possible if a model is attached to the Trainer. Did you call "
                "`Trainer.save_checkpoint()` before calling `Trainer.{fit,validate,test,predict}`?"
            )
        self.checkpoints.save(filepath, bool(weights_only), storage_options)

    def capture(self) -> dict[str, Any]:
        """Capture the whole state in memory, for ``ckpt_path`` of a later fit in this process.

        Every rank must call this, and keeps its own.

        Weights, moments and gradients are those of the module and its optimizers, not copies: the next fit takes them up where
        they lie, and whoever changes them in between changes what it resumes.
        """
        return self.checkpoints.dump()

    # -- the module and its optimization -------------------------------------------------------------------------------

    @property
    def attached_module(self) -> Module | None:
        """The module of the newest entry point; None before the first."""
        return self._module

    @property
    def lightning_module(self) -> Module:
        """The module of the newest entry point. Raises RuntimeError before the first."""
        module = self._module or self.strategy.lightning_module
        if module is None:
            raise RuntimeError("this trainer has no module yet; call fit, validate, test or predict with one")
        return cast("Module", module)

    @property
    def model(self) -> torch.nn.Module | None:
        """Module as it is run: wrapped if several processes train it."""
        step_module = self.run_state.step_module
        if self.training and step_module is not None:
            return step_module
        return self._module or self.strategy.lightning_module

    def attach(self, module: Module) -> None:
        """Set ``module`` as the one to run."""
        self._module = module
        self.paths.name_after(module)

    def attach_data(self, datamodule: Any) -> None:
        """Set ``datamodule`` as the source of data; None for no data module."""
        self.datamodule = datamodule
        if datamodule is not None:
            datamodule.trainer = self

    @property
    def optimizers(self) -> list[Optimizer]:
        return self.run_state.optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer] | None) -> None:
        given = list(optimizers or [])
        run = self.run_state
        run.use_optimizers(given, [ManagedOptimizer(optimizer, self.strategy, self._toggled) for optimizer in given])

    @contextmanager
    def _toggled(self, optimizer: ManagedOptimizer, sync_grad: bool) -> Iterator[None]:
        """Require gradients of this optimizer's parameters only, all-reduced if ``sync_grad``."""
        module = self.lightning_module
        synced = (
            nullcontext() if sync_grad else self.strategy.no_backward_sync(self.run_state.step_module or module, True)
        )
        with synced, module.toggled_optimizer(optimizer):
            yield

    @property
    def managed_optimizers(self) -> list[ManagedOptimizer]:
        """The optimizers as a module sees them."""
        return self.run_state.managed_optimizers

    @property
    def lr_scheduler_configs(self) -> list[LRSchedulerConfig]:
        return self.run_state.lr_scheduler_configs

    def use_optimizers(self, optimizers: list[Optimizer], schedulers: list[LRSchedulerConfig]) -> None:
        """Set the optimizers and schedulers to train with."""
        self.optimizers, self.run_state.lr_scheduler_configs = optimizers, schedulers

    def use_accumulation(self, batches: int) -> None:
        """Accumulate gradients over ``batches`` batches from the next window on.

        Raises ValueError below 1.
        """
        if batches < 1:
            raise ValueError(f"accumulate_grad_batches = {batches}: accumulate at least 1 batch")
        self.accumulate_grad_batches = batches

    def use_checkpoint_io(self, checkpoint_io: CheckpointIO) -> None:
        """Save and load checkpoints with ``checkpoint_io`` from here on."""
        self.checkpoint_io = checkpoint_io

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward with its hooks, in manual optimization."""
        self.run_state.last_loss = loss
        for hook in self.resolve("on_before_backward"):
            hook(loss)
        module = self.lightning_module
        own = module.backward if overridden(module, "backward", Module) else None
        gradients.manual_backward(module, own, loss, self.strategy, self.precision_plugin, *args, **kwargs)
        for hook in self.resolve("on_after_backward"):
            hook()

    def clip_gradients(self, optimizer: Any, value: float | None = None, algorithm: str | None = None) -> None:
        """Clip the gradients of ``optimizer``'s parameters, within the trainer's own settings.

        Raises MisconfigurationError if it contradicts them.
        """
        own = (self.gradient_clip_val, self.gradient_clip_algorithm)
        value, algorithm = gradients.clip_settings(own, (value, algorithm))
        if value is None or value <= 0:
            return
        if not self.lightning_module.automatic_optimization:
            for managed in self.managed_optimizers:
                if optimizer is managed or optimizer is managed.optimizer:
                    managed.unscale()
        gradients.clip(self.strategy, optimizer, value, algorithm)

    def adopt_precision(self, name: str | None) -> None:
        """Adopt a checkpoint's precision, else rank 0's, if this run's is "auto". A collective.

        Each process has measured its own, and another measurement may differ.
        """
        if self._precision_choice != "auto":
            return
        self.precision_plugin = agree_on_precision(self.strategy, name)
        self.record_measured("precision", self.precision)

    @property
    def measured(self) -> dict[str, Any]:
        """Values of "auto" settings in the newest fit, by setting, as measured or as resumed."""
        return self.run_state.measured

    def record_measured(self, setting: str, value: Any) -> None:
        """Record what an "auto" setting that changes numbers was measured as.

        Loggers, ``log.txt`` and ``environment.json`` show it. ``setting``: its name among those of the module's task.
        """
        self.run_state.measured[setting] = value

    # -- hooks -----------------------------------------------------------------------------------------------------

    def resolve(self, name: str) -> tuple[Hook, ...]:
        """Return the functions of hook ``name``: callbacks in order, then the module."""
        module = self.lightning_module
        hooks = callback_hooks(self, module, self.callbacks, name) + module_hooks(module, name)
        return within_a_step(module, name, hooks)

    def enter(self, hook: str) -> None:
        """Attribute calls of ``log`` to ``hook`` from here on."""
        values = self.run_state.logged
        values.hook = hook
        if self._module is not None and not self.barebones:
            self._module.__dict__["_entries"] = values.table(hook)

    def call(self, name: str, *arguments: Any, monitors: bool = True) -> None:
        """Run hook ``name``: callbacks, then the module, then the callbacks that run last.

        The last ones only if ``monitors``.
        """
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

    # -- runs within a run ---------------------------------------------------------------------------------------------

    @contextmanager
    def temporarily(self, **attributes: Any) -> Iterator[None]:
        """Replace callbacks or settings inside the block, and restore them afterwards."""
        before = {name: getattr(self, name) for name in attributes}
        try:
            for name, value in attributes.items():
                setattr(self, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Run a trial with a state of its own, then restore this one. A SIGTERM is not lost."""
        before = self.run_state
        self.run_state = tried = before.for_trial()
        self.optimizers = before.optimizers  # managed again: a fit under way has hooks in the present ones
        try:
            yield
        finally:
            self.run_state = before
            before.take_signals(tried)
            if "train" in before.data and before.data["train"].loaded:
                before.num_training_batches = before.data["train"].total

    @contextmanager
    def nested(self) -> Iterator[None]:
        """Run an evaluation that a hook calls with a state, data and module of its own.

        Those of the run are restored afterwards. Callbacks that judge or save what the run does are left out of it.
        """
        before, running = self.run_state, {id(part) for data in self.data.stages.values() for part in data.loaders}
        self.run_state = own = before.for_nested()
        kept = (self._module, self.datamodule, self.callbacks, self.selector.path)
        entries = None if self._module is None else self._module.__dict__.get("_entries")
        self.callbacks = [callback for callback in self.callbacks if not callback.runs_last]
        try:
            yield
        finally:
            for data in own.data.values():
                data.close(but=running)
            self.run_state = before
            before.take_signals(own)
            self._module, self.datamodule, self.callbacks, self.selector.path = kept
            if self._module is not None:
                self.strategy.connect(self._module)
                self._module.__dict__["_entries"] = entries
                attach_log(self.callbacks, self._module)

    def use_callbacks(self, callbacks: list[Callback]) -> None:
        """Set the callbacks to call from here on."""
        self.callbacks = callbacks

    def limit_epochs(self, epochs: int) -> None:
        """End a fit after so many epochs; -1 for no limit."""
        self.max_epochs = epochs

    # -- logged values -------------------------------------------------------------------------------------------------

    @property
    def logged(self) -> ResultCollection:
        """The values of the stage under way."""
        return self.run_state.logged

    @property
    def reporter(self) -> Reporter:
        """The writer of this run's rows and metrics."""
        return Reporter(
            self.run_state,
            self.strategy,
            self.lightning_module,
            lambda: self.loggers,
            zero_based=self.behavior.zero_based_rows,
            automatic=self.lightning_module.automatic_optimization,
        )

    def row_of_step(self, step: int) -> int:
        """Return the number of the loggers' row of the ``step``-th step, counted from 1."""
        return step - self.behavior.zero_based_rows

    def log_step(self) -> None:
        """Check the newest loss, and send the newest step values to the loggers."""
        self.check_finite()
        self.reporter.log_step()

    def check_finite(self) -> None:
        """Raise NonFiniteLossError if the newest loss is NaN or infinite.

        It names the batch and the module where that began.
        """
        if not self.behavior.stop_on_nonfinite:
            return
        problem = nonfinite_loss(self.run_state, self.log_every_n_steps)
        if problem is not None:
            found = diagnose(self)
            raise NonFiniteLossError(f"{problem}. {found[0].upper()}{found[1:]}" if found else problem)

    def report_loss(self, loss: torch.Tensor | None) -> None:
        """Report ``loss`` as the newest, in place of the step's; None to check none."""
        self.run_state.last_loss = loss

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """Newest value of every logged name.

        In training it is the step's, from the epoch's end on the epoch's.
        """
        return self.run_state.metrics.update(self.run_state.logged).callback

    @property
    def logged_metrics(self) -> dict[str, torch.Tensor]:
        """Newest values for loggers: ``x_step`` and ``x_epoch`` if both are logged."""
        return self.run_state.metrics.update(self.run_state.logged).logged

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """Newest values logged with ``prog_bar=True``, read from the device."""
        return self.run_state.metrics.update(self.run_state.logged).bar_values()

    # -- where it writes -----------------------------------------------------------------------------------------------

    @property
    def default_root_dir(self) -> str:
        return self.paths.root

    @property
    def run_name(self) -> str | None:
        return self.paths.name

    @property
    def run_folder(self) -> RunFolder:
        """Folder of this run, the same on every rank; in one process made when first asked for."""
        return self.paths.run_folder

    @run_folder.setter
    def run_folder(self, folder: RunFolder) -> None:
        self.paths.run_folder = folder

    @property
    def loggers(self) -> list[Any]:
        return self.paths.loggers

    @loggers.setter
    def loggers(self, loggers: Iterable[Any] | None) -> None:
        self.paths.loggers = loggers

    @property
    def logger(self) -> Any:
        """First logger, None if there is none; setting one makes it the only one."""
        return self.loggers[0] if self.loggers else None

    @logger.setter
    def logger(self, logger: Any) -> None:
        self.loggers = [logger] if logger else []

    @property
    def log_dir(self) -> str | None:
        """Folder of the run, or of the first logger if there are no run folders.

        Without loggers it is ``default_root_dir``.
        """
        return self.paths.log_dir

    @property
    def checkpoint_folder(self) -> str:
        """Folder of checkpoints that were given no path, the same on every rank."""
        return self.paths.checkpoint_folder

    @property
    def ckpt_path(self) -> str | Path | None:
        """Checkpoint that the newest entry point loaded; one set here is loaded by the next."""
        return self.selector.path

    @ckpt_path.setter
    def ckpt_path(self, path: str | Path | None) -> None:
        self.selector.set_ckpt_path(path)

    @property
    def requeue_checkpoints(self) -> RequeueCheckpoints:
        """The checkpoints from which a SLURM job goes on when it is queued again."""
        return RequeueCheckpoints(self.paths, self.strategy, self.checkpoint_io)

    @property
    def resume_sources(self) -> ResumeSources:
        """The checkpoints that ``ckpt_path`` may mean without a path, for the entry point under way."""
        return ResumeSources(
            self.run_state.state.fn,
            self.checkpoint_callbacks,
            self.requeue_checkpoints,
            evaluate_best=self.behavior.evaluate_best,
            dry=bool(self.fast_dev_run),
        )

    # -- its data ------------------------------------------------------------------------------------------------------

    @property
    def train_dataloader(self) -> Any:
        """The training data of the newest fit, as it was given; None before it was asked for."""
        return self.data.structure("train")

    @property
    def val_dataloaders(self) -> Any:
        return self.data.structure("validate")

    @property
    def test_dataloaders(self) -> Any:
        return self.data.structure("test")

    @property
    def predict_dataloaders(self) -> Any:
        return self.data.structure("predict")

    @property
    def num_training_batches(self) -> Count:
        return self.run_state.num_training_batches

    @property
    def num_val_batches(self) -> list[Count]:
        """Batches of each validation loader, within the limits; empty before they were asked for."""
        return self.data.counts("validate")

    @property
    def num_sanity_val_batches(self) -> list[Count]:
        """Batches of each validation loader that the check before training runs."""
        steps, stages = self.num_sanity_val_steps, self.data.stages
        if "validate" in stages and stages["validate"].function != "fit":
            return []
        return [count if steps == -1 else min(steps, count) for count in self.num_val_batches]

    @property
    def num_test_batches(self) -> list[Count]:
        return self.data.counts("test")

    @property
    def num_predict_batches(self) -> list[Count]:
        return self.data.counts("predict")

    @property
    def num_eval_batches(self) -> list[Count]:
        """Batches of each loader in the evaluation under way."""
        stage = {"sanity_check": "validate", "train": "validate"}.get(self.stage, self.stage)
        counts = self.data.stages[stage].limits if stage in self.data.stages else []
        steps = self.num_sanity_val_steps
        return [min(steps, count) for count in counts] if self.sanity_checking and steps != -1 else counts

    @property
    def enable_validation(self) -> bool:
        """True if a fit validates: there are data and a step for it, and no limit forbids it."""
        return self.data.validates

    @property
    def validation_schedule(self) -> ValidationSchedule:
        """Schedule of validation during a fit, by the present settings."""
        return ValidationSchedule(
            self.val_check_interval, self.check_val_every_n_epoch, self.num_training_batches, self.enable_validation
        )

    @property
    def validates_at_epoch_end(self) -> bool:
        """True if the epoch's validation is still due after its last batch."""
        if self.behavior.skip_leaves_out_validation and self.run_state.batch_under_way:
            return False
        return self.validation_schedule.is_due_at_epoch_end(self.progress)

    @property
    def val_check_batch(self) -> Count:
        """Number of training batches from one validation to the next."""
        return self.validation_schedule.batches

    def next_validation(self) -> Count:
        """Return the batch of this epoch to validate after next; infinity for none."""
        return self.validation_schedule.next_batch(self.progress)

    @property
    def estimated_stepping_batches(self) -> Count:
        """Number of optimizer steps of the whole fit, for schedules; infinity if unknown."""
        if "train" in self.data.stages:
            self.data.load("train")
        return self._steps_of_fit(self.num_training_batches)

    def _steps_of_fit(self, batches: Count) -> Count:
        return estimated_steps(
            batches,
            self.max_epochs,
            self.max_steps,
            self.accumulate_grad_batches,
            windows_span_epochs=self.behavior.windows_span_epochs,
        )

    def log_interval(self, batches: Count) -> int:
        """Return the steps between two logged rows, fewer in a short fit of ``batches``.

        ``batches``: of an epoch. Even the shortest report then has curves.
        """
        every = self.log_every_n_steps
        shorter = log_interval(every, self._steps_of_fit(batches))
        if shorter == every or not self.behavior.run_folders or self.fast_dev_run or not self.loggers:
            return every
        return shorter

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Arguments for a user's ``DistributedSampler``: the ranks that read different data."""
        return self.strategy.distributed_sampler_kwargs

    @property
    def predict_loop(self) -> Any:
        """The outputs of the newest prediction."""
        return self.run_state.predictions

    # -- state of the run ----------------------------------------------------------------------------------------

    @property
    def state(self) -> TrainerState:
        """Status, entry point and stage."""
        return self.run_state.state

    @property
    def stage(self) -> str:
        """Name of the running stage; empty between two."""
        return self.run_state.stage

    @property
    def training(self) -> bool:
        return self.state.stage == RunningStage.TRAINING

    @property
    def sanity_checking(self) -> bool:
        return self.state.stage == RunningStage.SANITY_CHECKING

    @property
    def validating(self) -> bool:
        return self.state.stage == RunningStage.VALIDATING

    @property
    def testing(self) -> bool:
        return self.state.stage == RunningStage.TESTING

    @property
    def predicting(self) -> bool:
        return self.state.stage == RunningStage.PREDICTING

    @property
    def evaluating(self) -> bool:
        return self.state.stage is not None and self.state.stage.evaluating

    @property
    def interrupted(self) -> bool:
        return self.state.status == TrainerStatus.INTERRUPTED

    @property
    def should_stop(self) -> bool:
        """True if the fit was asked to end; a callback sets it to ask for that."""
        return self.run_state.should_stop

    @should_stop.setter
    def should_stop(self, stop: bool) -> None:
        self.run_state.should_stop = stop

    def request_stop(self) -> None:
        """Request the fit to end after the current batch, but not below its minimum."""
        self.run_state.request_stop()

    @property
    def received_sigterm(self) -> bool:
        return self.run_state.received_sigterm

    # -- how far it is ---------------------------------------------------------------------------------------------

    @property
    def current_epoch(self) -> int:
        """Epochs completed, which is the number of the one under way."""
        return self.progress.epoch

    @property
    def global_step(self) -> int:
        """Optimizer updates completed."""
        return self.progress.global_step

    @property
    def progress(self) -> Progress:
        """Position of the fit."""
        return self.run_state.progress

    @property
    def window(self) -> AccumulationState:
        """The accumulation window under way."""
        return self.run_state.window

    @property
    def window_ends_with_epoch(self) -> bool:
        """True if the last batch of the epoch under way closes the accumulation window."""
        return not self.behavior.windows_span_epochs or self.current_epoch + 1 == self.max_epochs

    @property
    def is_last_batch(self) -> bool:
        """True within the last batch of a training epoch.

        If their number is not known, the next one is read to tell.
        """
        run = self.run_state
        return run.is_last_batch or (run.upcoming is not None and run.upcoming.ended)

    @property
    def last_loss(self) -> torch.Tensor | None:
        """The newest training loss, on its device."""
        return self.run_state.last_loss

    @property
    def fit_is_over(self) -> bool:
        """True if a limit has been reached, or a stop was asked for after the minimum."""
        progress = self.progress
        if self.max_epochs != -1 and progress.epoch >= self.max_epochs:
            return True
        if self.max_steps != -1 and progress.global_step >= self.max_steps:
            return True
        return self.should_stop and self.may_stop()

    def may_stop(self) -> bool:
        """Return True if the minimum of epochs and steps is reached.

        Else log, once, that training continues.
        """
        run, progress = self.run_state, self.progress
        enough = (not self.min_epochs or progress.epoch >= self.min_epochs) and (
            not self.min_steps or progress.global_step >= self.min_steps
        )
        if not enough and not run.warned_of_minimum:
            run.warned_of_minimum = True
            self.log_info(
                f"Trainer was signaled to stop but the required `min_epochs={self.min_epochs}` or `min_steps={self.min_steps}` has "
                "not been met. Training will continue..."
            )
        return enough

    @property
    def step_limit(self) -> float:
        return math.inf if self.max_steps == -1 else self.max_steps

    # -- where it runs -----------------------------------------------------------------------------------------------

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
    def node_rank(self) -> int:
        return self.strategy.node_rank

    @property
    def is_global_zero(self) -> bool:
        return self.strategy.is_global_zero

    @property
    def num_devices(self) -> int:
        return self.strategy.num_devices

    @property
    def device_ids(self) -> list[int]:
        """Index of each device that this node uses."""
        return list(self.strategy.device_ids)

    @property
    def num_nodes(self) -> int:
        return self.strategy.num_nodes

    @property
    def precision(self) -> str:
        return self.precision_plugin.name

    @property
    def scaler(self) -> Any:
        return self.precision_plugin.scaler

    # -- settings ----------------------------------------------------------------------------------------------------

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        return [callback for callback in self.callbacks if isinstance(callback, Checkpoint)]

    @property
    def checkpoint_callback(self) -> Any:
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        from arclight.trainer.callbacks.early_stopping import EarlyStopping

        return [callback for callback in self.callbacks if isinstance(callback, EarlyStopping)]

    @property
    def early_stopping_callback(self) -> Any:
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def progress_bar_callback(self) -> Any:
        from arclight.trainer.callbacks.progress.progress_bar import ProgressBar

        return next((callback for callback in self.callbacks if isinstance(callback, ProgressBar)), None)

    # -- messages ----------------------------------------------------------------------------------------------------

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only."""
        if self.is_global_zero:
            print(*args, **kwargs)  # noqa: T201

    def log_warning(self, message: str) -> None:
        """Log a warning on rank 0."""
        if self.is_global_zero:
            _LOG.warning(message)

    def log_info(self, message: str) -> None:
        """Log an info message on rank 0."""
        if self.is_global_zero:
            _LOG.info(message)

    def warn(self, message: str, category: type[Warning] = UserWarning) -> None:
        """Warn of something that the user can change, on rank 0."""
        if self.is_global_zero:
            warnings.warn(message, category, stacklevel=3)


def _check_callbacks(callbacks: list[Callback], bars: list[Any], chosen: dict[str, Any]) -> None:
    if chosen["enable_checkpointing"] is False and any(isinstance(c, Checkpoint) for c in callbacks):
        raise MisconfigurationError(
            "Trainer was configured with `enable_checkpointing=False` but found `ModelCheckpoint` in callbacks list: leave out one of them"
        )
    if len(bars) > 1:
        raise MisconfigurationError(
            "You added multiple progress bar callbacks to the Trainer, but currently only one progress bar is supported: "
            + ", ".join(type(c).__name__ for c in bars)
        )
    if bars and chosen["enable_progress_bar"] is False:
        raise MisconfigurationError(
            f"Trainer was configured with `enable_progress_bar=False` but found `{type(bars[0]).__name__}` in callbacks list: "
            "leave out one of them"
        )


def show_results(stage: str, results: list[dict[str, float]]) -> None:
    """Print a table of an evaluation's values."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=stage, title_justify="left")
    table.add_column("metric")
    for number in range(len(results)):
        table.add_column(f"loader {number}" if len(results) > 1 else "value", justify="right")
    for name in dict.fromkeys(key for result in results for key in result):
        table.add_row(name, *(f"{result[name]:.5g}" if name in result else "" for result in results))
    Console().print(table)
