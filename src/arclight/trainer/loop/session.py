"""Run fit, validate, test or predict for a Trainer: launch, set up, loop, tear down.

Each entry point of `Trainer` makes one `Session`. It launches ranks, sets strategy and data up, runs `FitLoop` or `EvaluationLoop`, and
calls the teardown hooks; after an error it calls ``on_exception`` in their place, and closes the loaders' workers in any case. An entry
point that a hook of a run calls makes a `NestedEvaluation`: ranks, strategy and callbacks are the run's, and what the evaluation changes
is restored. Both set module and data up by `StageSetup`, in Lightning's order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.seeding import MAX_SEED, deterministic_kernels, isolate_rng
from arclight.fabric.warnings import PossibleUserWarning
from arclight.trainer.callback import Callback
from arclight.trainer.callbacks.timer import Timer
from arclight.trainer.checkpoint.launch_results import collect_launch_results, restore_module, restore_state
from arclight.trainer.checkpoint.loading import ReplacesLayers, load_weights
from arclight.trainer.data.connector import resolve_dataloaders
from arclight.trainer.hparams import clean_namespace, hyperparameters_to_log
from arclight.trainer.loggers.logger import log_hyperparams_and_graph, open_experiments
from arclight.trainer.loop.evaluation import EvaluationLoop
from arclight.trainer.loop.fit import FitLoop
from arclight.trainer.loop.hooks import attach_log, check_state_keys, checkpoints_last, detach_log, overridden
from arclight.trainer.loop.optimizers import configured
from arclight.trainer.loop.progress import StopRun, TrainerFn, TrainerStatus
from arclight.trainer.loop.signals import SignalConnector
from arclight.trainer.loop.verification import (
    as_module,
    check_module,
    check_validation,
    refuse_removed_hooks,
    require_model,
    warn_of_removed_hooks,
)
from arclight.trainer.module import Module
from arclight.trainer.profilers import profiling
from arclight.trainer.run.folder import assignments

if TYPE_CHECKING:
    from arclight.trainer.trainer import Trainer


class StageSetup:
    """Bind a module and its data for one stage, and let both set up, in Lightning's order.

    ``stage``: train, validate, test or predict.
    """

    def __init__(self, trainer: Trainer, stage: str) -> None:
        self._trainer, self._run, self._stage = trainer, trainer.run_state, stage
        self.function = TrainerFn("fit" if stage == "train" else stage)

    def bind(self, model: Any, datamodule: Any, ckpt_path: Any) -> Module:
        """Bind module and data, and choose the run folder of ``ckpt_path``.

        Raises TypeError for what is no module.
        """
        trainer, run = self._trainer, self._run
        module = as_module(model if model is not None else trainer.lightning_module, self.function)
        trainer.attach(module)
        run.stage, run.state.fn = self._stage, self.function
        if trainer.behavior.drop_unpicklable_hparams:
            clean_namespace(module.hparams)
        trainer.strategy.connect(module)
        module.trainer = trainer
        if self._stage != "train":
            run.begin_evaluation(self._stage)
        if datamodule is not None:
            trainer.attach_data(datamodule)
        trainer.enter("setup")
        open_experiments(trainer.paths.own_loggers())
        trainer.selector.resolve_run_folder(ckpt_path, trainer.resume_sources)
        return module

    def check(self, module: Module) -> None:
        """Check that the module has what the stage calls, and let the callbacks log."""
        trainer = self._trainer
        attach_log(trainer.callbacks, module)
        check_module(module, self._stage, trainer.gradient_clip_val, trainer.accumulate_grad_batches)
        if trainer.behavior.refuse_removed_hooks:
            refuse_removed_hooks(module, self._stage)
        warn_of_removed_hooks(module, trainer.callbacks, trainer.warn)

    def set_up_data(self, module: Module) -> None:
        """Let data module and module prepare the data, and the data module set up."""
        trainer, data = self._trainer, self._trainer.datamodule
        for owner in (data, module):
            rank = trainer.local_rank if getattr(owner, "prepare_data_per_node", True) else trainer.global_rank
            if rank == 0 and hasattr(owner, "prepare_data"):
                (
                    profiling.profile_data_hook(trainer.profiler, owner, "prepare_data")
                    if owner is data
                    else owner.prepare_data
                )()
        trainer.strategy.barrier("data prepared")
        if data is not None and hasattr(data, "setup"):
            profiling.profile_data_hook(trainer.profiler, data, "setup")(stage=self.function)

    def set_up_module(self, module: Module, **loaders: Any) -> None:
        """Let the module set up and make its layers; ``loaders``: those given, by stage."""
        trainer = self._trainer
        module.setup(stage=self.function)
        if overridden(module, "configure_model", Module):
            with trainer.strategy.module_init_context():
                module.configure_model()
            _replace_layers(module, trainer.callbacks)
        trainer.data.attach(module, self.function, **loaders)

    def load(self, ckpt_path: str | Path | None, fit_before: bool = False) -> dict[str, Any] | None:
        """Read the checkpoint that ``ckpt_path`` means; None for none."""
        trainer = self._trainer
        path = trainer.selector.resolve(ckpt_path, trainer.resume_sources, fit_before)
        return trainer.checkpoints.load(path) if path is not None else None

    def place(self, module: Module) -> None:
        """Move parameters to their device and type."""
        strategy, precision = self._trainer.strategy, self._trainer.precision_plugin
        strategy.precision = precision
        strategy.example = partial(self._trainer.data.sample_batch, module, self._stage)
        strategy.place(precision.convert_module(module), module.automatic_optimization)


class Session:
    """Run one entry point of a trainer, in every process of its strategy."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._run = trainer, trainer.run_state

    def fit(
        self, model: Module, train: Any, val: Any, datamodule: Any, ckpt_path: str | Path | Mapping[str, Any] | None
    ) -> None:
        """Train."""
        self._launch(Session._fit, model, train, val, datamodule, ckpt_path)

    def evaluate(
        self, stage: str, model: Module | None, loaders: Any, datamodule: Any, ckpt_path: str | Path | None
    ) -> list[dict[str, float]]:
        """Validate or test; return the logged values of each loader."""
        results: list[dict[str, float]] = self._launch(Session._evaluate, stage, model, loaders, datamodule, ckpt_path)
        return results

    def predict(
        self, model: Module | None, loaders: Any, datamodule: Any, ckpt_path: str | Path | None, keep: bool | None
    ) -> Any:
        """Collect the outputs of ``predict_step``."""
        return self._launch(Session._predict, model, loaders, datamodule, ckpt_path, keep)

    def predict_iter(
        self, model: Module | None, loaders: Any, datamodule: Any, ckpt_path: str | Path | None
    ) -> Iterator[Any]:
        """Yield the outputs of ``predict_step`` as they come, keeping none."""
        with self._handle_exceptions():
            module = self._begin_evaluation("predict", model, loaders, datamodule, ckpt_path)
            data = self._trainer.data.load("predict")
            if data.runs:
                with suppress(GeneratorExit):  # the caller has seen enough
                    yield from EvaluationLoop(self._trainer, module).predict(data, keep=False)
            self._finish(module, "predict")

    # -- launch and teardown -------------------------------------------------------------------------------------------

    def _launch(self, entry_point: Callable[..., Any], *arguments: Any) -> Any:
        """Call ``entry_point(session, *arguments)`` on every rank, and return rank 0's result."""
        trainer = self._trainer
        launcher = trainer.strategy.launcher
        if launcher.runs_in_this_process:
            return launcher.launch(self._run_and_teardown, entry_point, *arguments)
        module = next((a for a in arguments if isinstance(a, Module)), trainer.attached_module)
        outcome = launcher.launch(self._in_new_process, entry_point, *arguments)
        if module is not None:
            if overridden(module, "configure_model", Module):
                module.configure_model()  # the new processes made layers that this one has not
            _replace_layers(module, trainer.callbacks)
            restore_module(module, outcome)
            trainer.attach(module)
        restore_state(self._run, outcome)
        for callback in trainer.callbacks:
            if callback.state_key in outcome["callbacks"]:
                callback.load_state_dict(outcome["callbacks"][callback.state_key])
        if outcome["folder"] is not None:
            trainer.paths.open_run_folder(outcome["folder"])
        return outcome["result"]

    def _in_new_process(self, entry_point: Callable[..., Any], *arguments: Any) -> dict[str, Any] | None:
        trainer, result = self._trainer, self._run_and_teardown(entry_point, *arguments)
        states = {callback.state_key: callback.state_dict() for callback in trainer.callbacks}
        return collect_launch_results(
            trainer.lightning_module, trainer.strategy, self._run, states, trainer.paths.opened, result
        )

    def _run_and_teardown(self, entry_point: Callable[..., Any], *arguments: Any) -> Any:
        with self._handle_exceptions():
            try:
                return entry_point(self, *arguments)
            except StopRun:
                self._teardown(self._trainer.lightning_module)

    @contextmanager
    def _handle_exceptions(self) -> Iterator[None]:
        """Run the block, and notify callbacks, data and loggers of an exception."""
        trainer, run = self._trainer, self._run
        trainer.strategy.setup_environment()
        run.state.status = TrainerStatus.RUNNING
        try:
            with self._torch_flags(), SignalConnector(trainer).handlers():
                yield
            run.metrics.to_host()
            run.state.status = TrainerStatus.FINISHED
        except BaseException as error:
            self._notify_exception(error)
            if isinstance(error, KeyboardInterrupt) and trainer.behavior.exit_on_interrupt:
                trainer.log_warning("Detected KeyboardInterrupt: the run was ended in order")
                raise SystemExit(1) from error
            raise
        finally:
            if trainer.attached_module is not None:
                trainer.attached_module.__dict__["_entries"] = None
            detach_log(trainer.callbacks)
            for data in trainer.data.stages.values():
                data.close()
            run.upcoming = None
            trainer.paths.drop_empty_folder()
            run.stage = ""

    def _notify_exception(self, error: BaseException) -> None:
        trainer = self._trainer
        self._run.state.status = TrainerStatus.INTERRUPTED
        if trainer.attached_module is not None:
            trainer.call_all("on_exception", error)
        if hasattr(trainer.datamodule, "on_exception"):
            trainer.datamodule.on_exception(error)
        trainer.strategy.on_exception(error)
        for logger in trainer.paths.made_loggers:
            logger.finalize("failed")
        profiling.teardown_profiler(trainer.profiler, None if self._run.state.fn is None else self._run.state.fn.value)

    @contextmanager
    def _torch_flags(self) -> Iterator[None]:
        """Set torch's flags for the duration of a run."""
        settings = self._trainer.settings
        with (
            deterministic_kernels(warn_only=settings.deterministic == "warn")
            if settings.deterministic
            else nullcontext(),
            torch.autograd.set_detect_anomaly(True) if settings.detect_anomaly else nullcontext(),
            _cudnn_benchmark(settings.benchmark),
        ):
            yield

    # -- set-up --------------------------------------------------------------------------------------------------------

    def _attach(self, setup: StageSetup, model: Any, datamodule: Any, ckpt_path: Any, **loaders: Any) -> Module:
        """Bind module and data to the trainer and let everyone set up."""
        trainer = self._trainer
        module = setup.bind(model, datamodule, ckpt_path)
        self._add_callbacks(module)
        profiling.reset_profiler(trainer.profiler)
        setup.check(module)
        setup.set_up_data(module)
        trainer.call_all("setup", stage=setup.function)
        setup.set_up_module(module, **loaders)
        return module

    def _add_callbacks(self, module: Module) -> None:
        """Take the module's own callbacks in place of those of the same type."""
        trainer = self._trainer
        if not overridden(module, "configure_callbacks", Module):
            return
        given = module.configure_callbacks()
        own = [given] if isinstance(given, Callback) else list(given or [])
        if not own:
            return
        kinds = {type(callback) for callback in own}
        replaced = [callback for callback in trainer.callbacks if type(callback) in kinds]
        if replaced:
            trainer.log_info(
                "The following callbacks returned in `LightningModule.configure_callbacks` will override existing callbacks passed "
                f"to Trainer: {', '.join(sorted(type(callback).__name__ for callback in replaced))}"
            )
        trainer.use_callbacks(checkpoints_last([c for c in trainer.callbacks if type(c) not in kinds] + own))
        check_state_keys(trainer.callbacks)

    def _set_up_profiler(self, module: Module, stage: str) -> None:
        trainer = self._trainer
        local_rank = trainer.local_rank if trainer.world_size > 1 else None
        profiling.setup_profiler(trainer.profiler, module, stage, local_rank, lambda: trainer.log_dir)

    def _finish(self, module: Module, stage: str) -> None:
        trainer = self._trainer
        trainer.checkpoint_io.teardown()
        if stage == "fit":
            trainer.call("on_fit_end")
        self._teardown(module)

    def _teardown(self, module: Module) -> None:
        trainer, function = self._trainer, self._run.state.fn
        trainer.call_all("teardown", stage=function)
        if trainer.datamodule is not None and hasattr(trainer.datamodule, "teardown"):
            profiling.profile_data_hook(trainer.profiler, trainer.datamodule, "teardown")(stage=function)
        module.teardown(stage=function)  # type: ignore[arg-type]
        for logger in trainer.loggers if trainer.is_global_zero else []:
            logger.finalize("success")  # only now: the hooks may have logged
        profiling.describe_profile(trainer.profiler)

    # -- fit -----------------------------------------------------------------------------------------------------------

    def _fit(
        self, model: Module, train: Any, val: Any, datamodule: Any, ckpt_path: str | Path | Mapping[str, Any] | None
    ) -> None:
        """Set up, resume if asked, check, train, finish."""
        trainer, run, strategy = self._trainer, self._run, self._trainer.strategy
        train, datamodule = resolve_dataloaders("fit", train, val, datamodule)
        if datamodule is None and train is not None:
            trainer.attach_data(None)  # that of an earlier fit has no part in this one
        self._resolve_length()
        run.begin_fit(strategy.broadcast(torch.initial_seed() % (MAX_SEED + 1)))
        setup = StageSetup(trainer, "train")
        module = self._attach(setup, model, datamodule, ckpt_path, train=train, validate=val)
        check_validation(module, run.data["validate"].defined, trainer.warn)
        if (saved := self._checkpoint(setup, ckpt_path)) is not None:
            loops = saved.get("loops", {})
            data = loops.get("data", {})
            run.data_seed = data.get("seed", run.data_seed)
            run.loader_seeds = data.get("seeds", data.get("seed", []))
        trainer.adopt_precision((saved or {}).get("loops", {}).get("precision", {}).get("name"))
        setup.place(module)  # before the weights come: some are nowhere yet, some will be shares
        if saved is not None:
            trainer.checkpoints.restore_model(saved)
        optimization = configured(
            _configured_by(module),
            module.training_step,
            automatic=module.automatic_optimization,
            steps_schedulers=overridden(module, "lr_scheduler_step", Module),
        )
        trainer.use_optimizers(*optimization)
        for optimizer in run.optimizers:
            strategy.setup_optimizer(optimizer)
        trainer.call("on_fit_start")
        if trainer.measured:
            trainer.log_info(f"measured: {assignments(trainer.measured)}")
        module.zero_grad()  # what a run that was broken off, or anyone else, left there
        loggers = trainer.loggers  # made on every rank, used on rank 0
        loggers = loggers if trainer.is_global_zero else []
        if trainer.given["enable_autolog_hparams"]:
            hyperparameters = hyperparameters_to_log(module, trainer.datamodule)
            if trainer.measured:
                hyperparameters = {**(hyperparameters or {}), "measured": dict(trainer.measured)}
            log_hyperparams_and_graph(loggers, module, hyperparameters)
        if saved is not None:
            trainer.checkpoints.restore_training(saved)
            trainer.data.restore_position()
            for logger in loggers:
                logger.resume(trainer.reporter.newest_row)
        self._train(module, resumed=saved is not None)
        trainer.requeue_checkpoints.delete()
        self._finish(module, "fit")

    def _resolve_length(self) -> None:
        """Set the default length of a fit: 1000 epochs, or no limit if steps or time limit it."""
        trainer = self._trainer
        if trainer.max_epochs is not None:
            return
        limited = trainer.max_steps != -1 or any(isinstance(callback, Timer) for callback in trainer.callbacks)
        if not limited:
            trainer.warn(
                "`max_epochs` was not set. Setting it to 1000 epochs. To train without an epoch limit, set `max_epochs=-1`.",
                PossibleUserWarning,
            )
        trainer.limit_epochs(-1 if limited else 1000)

    def _checkpoint(self, setup: StageSetup, choice: str | Path | Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Return the checkpoint that a fit goes on from: read, or in memory already."""
        trainer = self._trainer
        if isinstance(choice, Mapping):
            trainer.selector.set_ckpt_path(None)
            return trainer.checkpoints.accept(choice)
        return setup.load(choice)

    def _train(self, module: Module, resumed: bool) -> None:
        trainer, run, loop = self._trainer, self._run, FitLoop(self._trainer, module)
        if trainer.fit_is_over and not run.should_stop and run.progress.batches:
            trainer.log_warning(
                f"nothing is left to train: {run.progress.epoch} epochs and {trainer.global_step} steps are done, the limits "
                f"are max_epochs={trainer.max_epochs} and max_steps={trainer.max_steps}; raise them, or use a new Trainer"
            )
        self._set_up_profiler(module, "fit")
        if not resumed:
            self._sanity_check(module)
        trainer.data.load("train")
        if run.num_training_batches:
            every = trainer.log_interval(run.num_training_batches)
            if every == trainer.log_every_n_steps:
                loop.run()
            else:
                trainer.log_info(
                    f"The fit ends before its first row at log_every_n_steps={trainer.log_every_n_steps}: it writes one every "
                    f"{every} step{'s' * (every > 1)}"
                )
                with trainer.temporarily(log_every_n_steps=every):
                    loop.run()
        else:
            trainer.log_warning("`Trainer.fit` stopped: No training batches.")

    def _sanity_check(self, module: Module) -> None:
        """Run a few validation batches before training, to find mistakes there early."""
        trainer, run = self._trainer, self._run
        if not trainer.num_sanity_val_steps or not trainer.enable_validation:
            return
        run.stage = "sanity_check"
        trainer.call("on_sanity_check_start")
        training_values, metrics, run.metrics = run.logged, run.metrics, run.metrics.copy()
        try:
            with isolate_rng():  # whether one looks first must not change what is drawn later
                EvaluationLoop(trainer, module).evaluate(trainer.data.load("validate"))
            trainer.call("on_sanity_check_end")  # which sees the check's values
        finally:
            run.logged, run.metrics = training_values, metrics
        run.stage = "train"

    # -- validate, test, predict ---------------------------------------------------------------------------------------

    def _evaluate(
        self, stage: str, model: Module | None, loaders: Any, datamodule: Any, ckpt_path: str | Path | None
    ) -> list[dict[str, float]]:
        module = self._begin_evaluation(stage, model, loaders, datamodule, ckpt_path)
        results = EvaluationLoop(self._trainer, module).evaluate(self._trainer.data.load(stage))
        self._finish(module, stage)
        return results

    def _predict(
        self, model: Module | None, loaders: Any, datamodule: Any, ckpt_path: str | Path | None, keep: bool | None
    ) -> Any:
        module = self._begin_evaluation("predict", model, loaders, datamodule, ckpt_path)
        outputs = EvaluationLoop(self._trainer, module).collect(self._trainer.data.load("predict"), keep is not False)
        self._finish(module, "predict")
        return outputs

    def _begin_evaluation(
        self, stage: str, model: Any, loaders: Any, datamodule: Any, ckpt_path: str | Path | None
    ) -> Module:
        """Set up an evaluation, with the weights of a checkpoint if one is given."""
        trainer = self._trainer
        require_model(model, stage, trainer.attached_module)
        loaders, datamodule = resolve_dataloaders(stage, loaders, None, datamodule)
        self._run.state.fn = TrainerFn(stage)
        fit_before = model is None and trainer.attached_module is not None
        setup = StageSetup(trainer, stage)
        module = self._attach(setup, model, datamodule, ckpt_path, **{stage: loaders})
        saved = setup.load(ckpt_path, fit_before)
        trainer.adopt_precision(None)
        setup.place(module)
        if saved is not None:
            _load_evaluated(module, saved)
        module.zero_grad()
        self._set_up_profiler(module, stage)
        return module


class NestedEvaluation:
    """Run an entry point that a hook of a run under way calls, and leave the run as it was.

    The ranks run already and the callbacks are set up; gradients may be accumulating. Weights that a checkpoint brings into the
    module of the run are there for the evaluation only.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def fit(self, *arguments: Any) -> None:
        """Raise MisconfigurationError."""
        raise MisconfigurationError(
            "trainer.fit was called by a hook of a run of the same trainer, whose optimizers and position it would replace: call it "
            "after that run, or on a Trainer of its own"
        )

    def evaluate(
        self, stage: str, model: Module | None, loaders: Any, datamodule: Any, ckpt_path: str | Path | None
    ) -> list[dict[str, float]]:
        """Validate or test; return the logged values of each loader."""
        with self._begun(stage, model, loaders, datamodule, ckpt_path) as module:
            return EvaluationLoop(self._trainer, module).evaluate(self._trainer.data.load(stage))

    def predict(
        self, model: Module | None, loaders: Any, datamodule: Any, ckpt_path: str | Path | None, keep: bool | None
    ) -> Any:
        """Collect the outputs of ``predict_step``."""
        with self._begun("predict", model, loaders, datamodule, ckpt_path) as module:
            return EvaluationLoop(self._trainer, module).collect(self._trainer.data.load("predict"), keep is not False)

    def predict_iter(self, *arguments: Any) -> Iterator[Any]:
        """Raise MisconfigurationError."""
        raise MisconfigurationError(
            "trainer.predict_iter was called by a hook of a run of the same trainer, which would go on with the module in evaluation mode "
            "wherever outputs are left to be taken: call predict there, or predict_iter after that run"
        )

    @contextmanager
    def _begun(
        self, stage: str, model: Any, loaders: Any, datamodule: Any, ckpt_path: str | Path | None
    ) -> Iterator[Module]:
        """Set up an evaluation, with weights of a checkpoint if given; restore the run after it."""
        trainer = self._trainer
        with trainer.nested(), ExitStack() as restored:
            of_run = trainer.attached_module
            require_model(model, stage, of_run)
            loaders, datamodule = resolve_dataloaders(stage, loaders, None, datamodule)
            setup = StageSetup(trainer, stage)
            module = setup.bind(model, datamodule, ckpt_path)
            setup.check(module)
            setup.set_up_data(module)
            setup.set_up_module(module, **{stage: loaders})
            saved = setup.load(ckpt_path)
            trainer.adopt_precision(None)
            if module is not of_run:
                setup.place(module)
            elif saved is not None:
                restored.callback(_restore_tensors, _copied_tensors(module))
            if saved is not None:
                _load_evaluated(module, saved)
            yield module


def _load_evaluated(module: Module, saved: dict[str, Any]) -> None:
    """Load a checkpoint's weights, averaged ones if it has them."""
    load_weights(module, {**saved["state_dict"], **saved.get("ema", {})}, strict=module.strict_loading)


def _copied_tensors(module: Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pair each parameter and buffer of ``module`` with a copy of it."""
    return [(tensor, tensor.detach().clone()) for tensor in (*module.parameters(), *module.buffers())]


@torch.no_grad()
def _restore_tensors(copied: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write the copies of `_copied_tensors` back."""
    for tensor, copy in copied:
        tensor.copy_(copy)


def _replace_layers(module: Module, callbacks: Iterable[Callback]) -> None:
    """Replace layers as callbacks say, before weights are loaded into them."""
    for callback in callbacks:
        if isinstance(callback, ReplacesLayers):
            callback.replace_layers(module)


@contextmanager
def _cudnn_benchmark(choice: bool | None) -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    if choice is not None:
        torch.backends.cudnn.benchmark = choice
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _configured_by(module: Module) -> Any:
    try:
        return module.configure_optimizers()
    except ValueError as error:
        if "empty parameter list" in str(error):
            error.add_note(
                "Nothing that this process has is to be trained (all of a pipeline's stage may be frozen, for one): give optimizers groups, which "
                "may be empty - AdamW([{'params': parameters}]) - or all parameters, of which frozen ones stay as they are"
            )
        raise
