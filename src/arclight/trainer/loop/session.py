"""One run from beginning to end: processes, set-up, the loop, and a clean end whatever happens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from arclight.fabric.seeding import MAX_SEED, deterministic_kernels, isolate_rng
from arclight.trainer.callback import Callback
from arclight.trainer.checkpoint import state
from arclight.trainer.checkpoint.launch_results import collect_launch_results, restore_from_worker
from arclight.trainer.checkpoint.loading import load_weights
from arclight.trainer.checkpoint.resume import resolve_checkpoint_path, resolve_run_folder
from arclight.trainer.data import limits
from arclight.trainer.data.batches import sample_batch
from arclight.trainer.data.stage_data import StageData, attach, load, resolve_dataloaders, restore_position
from arclight.trainer.defaults import check_state_keys, checkpoints_last
from arclight.trainer.hparams import clean_namespace, hyperparameters_to_log
from arclight.trainer.loggers.logger import log_hyperparams_and_graph, open_experiments
from arclight.trainer.logging import reporting
from arclight.trainer.logging.metrics import Metrics
from arclight.trainer.logging.results import ResultCollection
from arclight.trainer.loop import signals
from arclight.trainer.loop.accumulation import AccumulationState
from arclight.trainer.loop.evaluation import predictions, run_evaluation
from arclight.trainer.loop.fit import finished, run_fit
from arclight.trainer.loop.hooks import overridden
from arclight.trainer.loop.optimizers import configured
from arclight.trainer.loop.progress import StopRun, TrainerFn, TrainerStatus
from arclight.trainer.loop.verification import as_module, check_module, check_validation, require_model
from arclight.trainer.module import Module
from arclight.trainer.profilers import profiling

if TYPE_CHECKING:
    from arclight.trainer.trainer import Trainer


def launch(trainer: Trainer, function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(trainer, *arguments)`` in every process of the strategy; the result of rank 0."""
    launcher = trainer.strategy.launcher
    if launcher.runs_in_this_process:
        return launcher.launch(_run_and_teardown, trainer, function, *arguments)
    module = next((a for a in arguments if isinstance(a, Module)), trainer._module)
    outcome = launcher.launch(_in_new_process, trainer, function, *arguments)
    return restore_from_worker(trainer, module, outcome)


def _in_new_process(trainer: Trainer, function: Callable[..., Any], *arguments: Any) -> dict[str, Any] | None:
    return collect_launch_results(trainer, _run_and_teardown(trainer, function, *arguments))


def _run_and_teardown(trainer: Trainer, function: Callable[..., Any], *arguments: Any) -> Any:
    with _handle_exceptions(trainer):
        try:
            return function(trainer, *arguments)
        except StopRun:
            _teardown(trainer, trainer.lightning_module)


@contextmanager
def _handle_exceptions(trainer: Trainer) -> Iterator[None]:
    """Run something, and tell callbacks, data and loggers when it fails."""
    trainer.strategy.setup_environment()
    trainer.state.status = TrainerStatus.RUNNING
    try:
        with _torch_flags(trainer):
            yield
        trainer.metrics.to_host()
        trainer.state.status = TrainerStatus.FINISHED
    except BaseException as error:
        _notify_exception(trainer, error)
        if isinstance(error, KeyboardInterrupt) and trainer.conventions.exit_on_interrupt:
            trainer.notice("Detected KeyboardInterrupt: the run was ended in order")
            raise SystemExit(1) from error
        raise
    finally:
        if trainer._module is not None:
            trainer._module.__dict__["_entries"] = None
        reporting.detach_log(trainer)
        trainer.drop_empty_folder()
        trainer.stage = ""


def _notify_exception(trainer: Trainer, error: BaseException) -> None:
    trainer.state.status = TrainerStatus.INTERRUPTED
    if trainer._module is not None:
        trainer.call_all("on_exception", error)
    if hasattr(trainer.datamodule, "on_exception"):
        trainer.datamodule.on_exception(error)
    trainer.strategy.on_exception(error)
    for logger in trainer._loggers or []:
        logger.finalize("failed")
    profiling.teardown_profiler(trainer)


@contextmanager
def _torch_flags(trainer: Trainer) -> Iterator[None]:
    """Settings of torch that hold for a run, and its signal handlers."""
    settings = trainer.settings
    with (
        deterministic_kernels(warn_only=settings.deterministic == "warn") if settings.deterministic else nullcontext(),
        torch.autograd.set_detect_anomaly(True) if settings.detect_anomaly else nullcontext(),
        _cudnn_benchmark(settings.benchmark),
        signals.signal_handlers(trainer),
    ):
        yield


@contextmanager
def _cudnn_benchmark(choice: bool | None) -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    if choice is not None:
        torch.backends.cudnn.benchmark = choice
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


# -- set-up --------------------------------------------------------------------------------------------------------


def _attach(trainer: Trainer, model: Any, datamodule: Any, stage: str, ckpt_path: Any, **loaders: Any) -> Module:
    """Bind module and data to the trainer and let everyone set up. The order is Lightning's."""
    name = TrainerFn("fit" if stage == "train" else stage)
    module = as_module(model if model is not None else trainer.lightning_module, name)
    trainer._module, trainer.stage, trainer.state.fn = module, stage, name
    if trainer.conventions.drop_unpicklable_hparams:
        clean_namespace(module.hparams)
    trainer.strategy.connect(module)
    module.trainer = trainer
    if stage != "train":
        rows = trainer.metrics.rows
        trainer.logged, trainer.metrics = ResultCollection(stage), Metrics(rows)
    if datamodule is not None:
        trainer.datamodule = datamodule
        datamodule.trainer = trainer
    trainer.enter("setup")
    open_experiments(trainer.own_loggers())
    resolve_run_folder(trainer, ckpt_path)
    _add_callbacks(trainer, module)
    profiling.reset_profiler(trainer)
    reporting.attach_log(trainer, module)
    check_module(trainer, module, stage)
    data = trainer.datamodule
    for owner in (data, module):
        rank = trainer.local_rank if getattr(owner, "prepare_data_per_node", True) else trainer.global_rank
        if rank == 0 and hasattr(owner, "prepare_data"):
            (profiling.profile_data_hook(trainer, owner, "prepare_data") if owner is data else owner.prepare_data)()
    trainer.strategy.barrier("data prepared")
    if data is not None and hasattr(data, "setup"):
        profiling.profile_data_hook(trainer, data, "setup")(stage=name)
    trainer.call_all("setup", stage=name)
    module.setup(stage=name)
    if overridden(module, "configure_model", Module):
        with trainer.strategy.module_init_context():
            module.configure_model()
    attach(trainer, module, name, **loaders)
    return module


def _add_callbacks(trainer: Trainer, module: Module) -> None:
    """The module's own callbacks replace those of the same type."""
    if not overridden(module, "configure_callbacks", Module):
        return
    given = module.configure_callbacks()
    own = [given] if isinstance(given, Callback) else list(given or [])
    if not own:
        return
    kinds = {type(callback) for callback in own}
    replaced = [callback for callback in trainer.callbacks if type(callback) in kinds]
    if replaced:
        trainer.say(
            "The following callbacks returned in `LightningModule.configure_callbacks` will override existing callbacks passed to "
            f"Trainer: {', '.join(sorted(type(callback).__name__ for callback in replaced))}"
        )
    trainer.callbacks = checkpoints_last([c for c in trainer.callbacks if type(c) not in kinds] + own)
    check_state_keys(trainer.callbacks)


def _place(trainer: Trainer, module: Module, stage: str) -> None:
    """Parameters to their type and device."""
    trainer.strategy.precision = trainer.precision_plugin
    trainer.strategy.example = partial(sample_batch, trainer, module, stage)
    trainer.strategy.place(trainer.precision_plugin.convert_module(module), module.automatic_optimization)


def _finish(trainer: Trainer, module: Module, stage: str) -> None:
    trainer.checkpoint_io.teardown()
    if stage == "fit":
        trainer.call("on_fit_end")
    for logger in trainer.loggers if trainer.is_global_zero else []:
        logger.finalize("success")
    _teardown(trainer, module)


def _teardown(trainer: Trainer, module: Module) -> None:
    function = trainer.state.fn
    trainer.call_all("teardown", stage=function)
    if trainer.datamodule is not None and hasattr(trainer.datamodule, "teardown"):
        profiling.profile_data_hook(trainer, trainer.datamodule, "teardown")(stage=function)
    module.teardown(stage=function)  # type: ignore[arg-type]
    profiling.describe_profile(trainer)


# -- entry points --------------------------------------------------------------------------------------------------


def fit(
    trainer: Trainer, model: Module, train: Any, val: Any, datamodule: Any,
    ckpt_path: str | Path | Mapping[str, Any] | None,
) -> None:  # fmt: skip
    """Set up, resume if asked, check, train, finish."""
    train, datamodule = resolve_dataloaders("fit", train, val, datamodule)
    if datamodule is None and train is not None:
        trainer.datamodule = None  # that of an earlier fit has no part in this one
    if not trainer.progress.batch:  # nothing of a run before is part of this one's metrics
        trainer.training_values, trainer.metrics = ResultCollection("train"), Metrics()
    limits.resolve_length(trainer)
    trainer.should_stop, trainer.last_loss, trainer.window = False, None, AccumulationState()
    trainer.told_of_no_loss, trainer.validated_time = False, None
    trainer.received_sigterm = trainer.requeue = trainer.left_within_epoch = False
    trainer.data, trainer.num_training_batches = {}, math.inf
    trainer.loader_state, trainer.loader_seeds = {}, []
    trainer.batch_iterator, trainer.rng_before_validation = None, None
    trainer.logged = trainer.training_values
    trainer.data_seed = trainer.strategy.broadcast(torch.initial_seed() % (MAX_SEED + 1))
    module = _attach(trainer, model, datamodule, "train", ckpt_path, train=train, validate=val)
    check_validation(trainer, module)
    if (saved := _checkpoint(trainer, ckpt_path)) is not None:
        loops = saved.get("loops", {})
        data = loops.get("data", {})
        trainer.data_seed = data.get("seed", trainer.data_seed)
        trainer.loader_seeds = data.get("seeds", data.get("seed", []))
        trainer.adopt_precision(loops.get("precision", {}).get("name"))
    _place(trainer, module, "train")  # before the weights come: some are nowhere yet, some will be shares
    if saved is not None:
        state.restore_model(trainer, saved)
    trainer.optimizers, trainer.lr_scheduler_configs = configured(module, _configured_by(module))
    for optimizer in trainer.optimizers:
        trainer.strategy.setup_optimizer(optimizer)
    trainer.call("on_fit_start")
    module.zero_grad()  # what a run that was broken off, or anyone else, left there
    loggers = trainer.loggers  # made on every rank, used on rank 0
    loggers = loggers if trainer.is_global_zero else []
    if trainer.given["enable_autolog_hparams"]:
        log_hyperparams_and_graph(loggers, module, hyperparameters_to_log(module, trainer.datamodule))
    if saved is not None:
        state.restore_training_state(trainer, saved)
        restore_position(trainer)
        for logger in loggers:
            logger.resume(trainer.progress.global_step)
    _train(trainer, module, resumed=saved is not None)
    signals.drop_requeue_checkpoints(trainer)
    _finish(trainer, module, "fit")


def _checkpoint(trainer: Trainer, choice: str | Path | Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What a fit goes on from: read, or in memory already."""
    if isinstance(choice, Mapping):
        trainer.ckpt_path = None
        return state.accept_checkpoint(trainer, choice)
    path = resolve_checkpoint_path(trainer, choice)
    return state.load_checkpoint(trainer, path) if path is not None else None


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


def _train(trainer: Trainer, module: Module, resumed: bool) -> None:
    if finished(trainer) and not trainer.should_stop and trainer.progress.batches:
        trainer.notice(
            f"nothing is left to train: {trainer.progress.epoch} epochs and {trainer.global_step} steps are done, the limits "
            f"are max_epochs={trainer.max_epochs} and max_steps={trainer.max_steps}; raise them, or use a new Trainer"
        )
    profiling.setup_profiler(trainer, module, "fit")
    if not resumed:
        _sanity_check(trainer, module)
    load(trainer, "train")
    if trainer.num_training_batches:
        run_fit(trainer, module)
    else:
        trainer.notice("`Trainer.fit` stopped: No training batches.")


def _sanity_check(trainer: Trainer, module: Module) -> None:
    """A few validation batches before training, so that a mistake there shows now and not after an epoch."""
    if not trainer.num_sanity_val_steps or not trainer.enable_validation:
        return
    trainer.stage = "sanity_check"
    trainer.call("on_sanity_check_start")
    training_values, metrics, trainer.metrics = trainer.logged, trainer.metrics, trainer.metrics.copy()
    try:
        with isolate_rng():  # whether one looks first must not change what is drawn later
            run_evaluation(trainer, module, load(trainer, "validate"))
    finally:
        trainer.logged, trainer.metrics, trainer.stage = training_values, metrics, "train"
    trainer.call("on_sanity_check_end")


def evaluate(
    trainer: Trainer, stage: str, model: Module | None, loaders: Any, datamodule: Any, ckpt_path: str | Path | None
) -> list[dict[str, float]]:
    """Validate or test."""
    module = _begin_evaluation(trainer, stage, model, loaders, datamodule, ckpt_path)
    results = run_evaluation(trainer, module, load(trainer, stage))
    _finish(trainer, module, stage)
    return results


def predict(
    trainer: Trainer,
    model: Module | None,
    loaders: Any,
    datamodule: Any,
    ckpt_path: str | Path | None,
    keep: bool | None,
) -> Any:
    """Collect ``predict_step``'s outputs."""
    module, data = _begin_prediction(trainer, model, loaders, datamodule, ckpt_path)
    if not data.runs:
        _finish(trainer, module, "predict")
        return None
    for _ in predictions(trainer, module, data, keep is not False):
        pass
    outputs = trainer.predict_loop.predictions if keep is not False else None
    _finish(trainer, module, "predict")
    return outputs


def predict_iter(
    trainer: Trainer, model: Module | None, loaders: Any, datamodule: Any, ckpt_path: str | Path | None
) -> Iterator[Any]:
    """Give ``predict_step``'s outputs as they come, keeping none."""
    with _handle_exceptions(trainer):
        module, data = _begin_prediction(trainer, model, loaders, datamodule, ckpt_path)
        if data.runs:
            try:
                yield from predictions(trainer, module, data, keep=False)
            except GeneratorExit:  # the caller has seen enough
                _finish(trainer, module, "predict")
                return
        _finish(trainer, module, "predict")


def _begin_prediction(
    trainer: Trainer, model: Module | None, loaders: Any, datamodule: Any, ckpt_path: str | Path | None
) -> tuple[Module, StageData]:
    module = _begin_evaluation(trainer, "predict", model, loaders, datamodule, ckpt_path)
    return module, load(trainer, "predict")


def _begin_evaluation(
    trainer: Trainer, stage: str, model: Any, loaders: Any, datamodule: Any, ckpt_path: str | Path | None
) -> Module:
    """Set up; the weights of a checkpoint, the averaged ones where it has them: those are what a fit evaluated."""
    require_model(model, stage, trainer._module)
    loaders, datamodule = resolve_dataloaders(stage, loaders, None, datamodule)
    trainer.state.fn = TrainerFn(stage)
    fit_before = model is None and trainer._module is not None
    module = _attach(trainer, model, datamodule, stage, ckpt_path, **{stage: loaders})
    path = resolve_checkpoint_path(trainer, ckpt_path, fit_before)
    saved = state.load_checkpoint(trainer, path) if path is not None else None
    _place(trainer, module, stage)
    if saved is not None:
        weights = {**saved["state_dict"], **saved.get("ema", {})}
        load_weights(module, weights, strict=module.strict_loading)
    module.zero_grad()
    profiling.setup_profiler(trainer, module, stage)
    return module
