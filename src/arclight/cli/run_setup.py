"""Build a run from its settings: task, plan, trainer, callbacks and checkpoint.

A recipe, or the settings of a user's own module, comes in. Verbs that run a trainer make it by `make_trainer`: `train`, `evaluate`, `demo`,
`user_run`, `tune.trial`, and `federated_run` and `sites` of ``federate``; for a recipe they call `build_task` first. A setting with a callback
belongs in `callbacks`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight.cli.arguments import UsageError

if TYPE_CHECKING:
    from arclight.cli.schema import Recipe, TrainingRun
    from arclight.parallel import Plan
    from arclight.trainer import Callback, Checkpoint, DataModule, Module, RunFolder, Trainer
    from arclight.trainer.callbacks.settings import Diloco
    from arclight.trainer.loggers.logger import Logger
    from arclight.trainer.settings import TrainerSettings


def report_paths(folder: RunFolder | None, checkpoints: Sequence[Checkpoint]) -> None:
    """Print the paths of a run, its report and its best (or newest) checkpoint.

    ``folder``: None for a development run.
    """
    if folder is None:
        print("\nThe development run came to its end. It wrote nothing")
        return
    print(f"\nThe run is in {folder.path}")
    ranked = [callback for callback in checkpoints if getattr(callback, "best_model_score", None) is not None]
    paths = [
        getattr(callback, f"{which}_model_path", "") for callback in ranked or checkpoints for which in ("best", "last")
    ]
    if kept := next(filter(None, paths), "") if ranked else _newest(paths):
        near = Path(kept).relative_to(Path.cwd()) if Path(kept).is_relative_to(Path.cwd()) else kept
        print(f"The {'best' if ranked else 'newest'} checkpoint is {near}")
    print(f"The report is {folder.report}")


def _newest(paths: Iterable[str]) -> str:
    """Return the checkpoint of the highest step, the first of equal ones; "" for none."""
    from arclight.cli.runs import step_of

    return max(filter(None, paths), key=lambda path: step_of(path) or 0, default="")


def build_task(recipe: Recipe) -> tuple[Module, DataModule | None]:
    """Build the module and its data, on seeded generators; UsageError if settings do not fit."""
    from arclight import Module, seed_everything

    seed_everything(recipe.seed, workers=True)
    try:
        built = recipe.task.build()
    except ValueError as error:
        raise UsageError(f"task: {error}") from error
    module, data = built if isinstance(built, tuple) else (built, None)
    if not isinstance(module, Module):
        made = type(module).__name__
        raise UsageError(f"task: build() must give an arclight.Module, or one and a DataModule; it gave {made}")
    return module, data


def make_trainer(recipe: TrainingRun, **objects: Any) -> Trainer:
    """Build the trainer that the recipe describes; UsageError if its settings do not fit."""
    from arclight import Trainer
    from arclight.trainer.loggers import CSVLogger

    if recipe.loggers and "logger" not in objects:
        objects["logger"] = [CSVLogger(), *build_loggers(recipe)]
    try:
        if recipe.plan is not None:
            objects |= strategy_of_plan(with_replicas(recipe.plan, recipe.diloco), recipe.trainer)
        return Trainer.from_settings(recipe.trainer, default_root_dir=recipe.root, run_name=recipe.name, **objects)
    except ValueError as error:
        raise UsageError(f"trainer: {error}") from error


def build_loggers(recipe: TrainingRun) -> list[Logger]:
    """Build the loggers of a recipe's ``[[loggers]]``.

    Raises UsageError if a class is none, or its package is missing.
    """
    from arclight.trainer.loggers import Logger
    from arclight.trainer.loggers.settings import LoggerSettings

    made = []
    for number, part in enumerate(recipe.loggers):
        try:
            logger = part.build(recipe.name or "run", recipe.root) if isinstance(part, LoggerSettings) else part.build()
        except (ValueError, ImportError) as error:
            raise UsageError(f"loggers[{number}]: {error}") from error
        if not isinstance(logger, Logger):
            raise UsageError(f"loggers[{number}]: need an arclight.trainer.loggers.Logger, got {type(logger).__name__}")
        made.append(logger)
    return made


def check_there_is_a_run(runs: Path, flag: str) -> None:
    """Raise UsageError if ``flag last`` would find nothing, before any run folder is made.

    Only the first process looks.
    """
    from arclight.checkpoint import find_last
    from arclight.fabric.rank_zero import rank_zero_only
    from arclight.trainer import RunFolder

    if rank_zero_only.rank != 0:
        return
    run = RunFolder.newest(runs.parent, runs.name)
    if run is None:
        raise UsageError(f"{flag} last: there is no run in {runs}: leave {flag} out to start one")
    if find_last(run.path / "checkpoints") is None:
        raise UsageError(
            f"{flag} last: {run.path}, the newest run, was stopped before its first checkpoint: leave {flag} out to start "
            f"a new one, or name a run before it"
        )


def with_replicas(plan: Plan, diloco: Diloco | None) -> Plan:
    """Make replicas independent if a recipe has ``diloco``; UsageError if its plan disagrees."""
    if plan.independent_replicas and diloco is None:
        raise UsageError(
            'plan.replicas = "independent" never synchronises replicas: add a table [diloco], which averages them'
        )
    if diloco is not None and plan.dp_replicate == 1 and not plan.independent_replicas:
        raise UsageError("diloco needs several replicas, and the plan has one: set plan.dp_replicate to their number")
    return plan if diloco is None else replace(plan, replicas="independent")


def strategy_of_plan(plan: Plan, settings: TrainerSettings) -> dict[str, Any]:
    """Return the strategy and devices of a recipe's plan.

    Raises UsageError if trainer.strategy is set too.
    """
    if settings.strategy != "auto":
        raise UsageError(
            f"a [plan] is a strategy of its own: leave out trainer.strategy = {settings.strategy!r}, or the plan"
        )
    from arclight.parallel import PlanStrategy

    of_node, rest = divmod(plan.world_size, settings.num_nodes)
    if rest:
        raise UsageError(
            f"the plan needs {plan.world_size} processes, which do not divide among {settings.num_nodes} nodes"
        )
    return {"strategy": PlanStrategy(plan), "devices": of_node if settings.devices == "auto" else settings.devices}


def check_plan(plan: Plan, module: Module) -> None:
    """Raise UsageError, with the fix, if the plan does not fit the module's sizes."""
    from arclight.parallel import PlanError
    from arclight.parallel.model.parallelize import check_sizes

    try:
        check_sizes(module, plan, getattr(module, "sequence_length", None))
    except PlanError as error:
        raise UsageError(f"plan: {error}") from error


def callbacks(recipe: TrainingRun) -> list[Callback]:
    """Build the callbacks that the recipe has settings for."""
    from arclight import LearningRateMonitor

    # the guard first: others must see only what it lets pass
    parts = [
        recipe.guard,
        recipe.qat,
        recipe.diloco,
        recipe.ema,
        recipe.stopping,
        recipe.timeline,
        *recipe.monitors,
        recipe.checkpoint,
    ]
    stepwise = recipe.checkpoint.build_stepwise()
    made: list[Callback] = [LearningRateMonitor(), *(part.build() for part in parts if part is not None)]
    return made if stepwise is None else [*made, stepwise]


def evaluating_callbacks(recipe: TrainingRun, checkpoint: str | Path | None) -> list[Callback]:
    """Build the callbacks that evaluate weights as they are deployed.

    They round if ``checkpoint`` was trained with rounding, or else if the recipe has ``qat``.
    """
    from arclight.checkpoint.remote import to_path
    from arclight.deploy.quantizing.trained import trained_by

    trained: list[Callback] = []
    # a checkpoint that is missing is left to the trainer's error
    if checkpoint is not None and checkpoint != "last" and to_path(checkpoint).exists():
        trained = [*trained_by(checkpoint)]
    return trained or ([] if recipe.qat is None else [recipe.qat.build()])


def resume_from(
    place: str | None, flag: str = "--resume", among: Path | None = None
) -> tuple[RunFolder | None, str | Path | None]:
    """Return the run folder to resume in and the checkpoint to load.

    ``place`` is the value of ``flag``. For None both are None: a new run. For ``last`` they are None and "last", by which the trainer finds the
    newest run; ``among``, if given, must hold one. For an address, and a checkpoint outside of a run, the folder is None: a new one. Raises
    UsageError if there is nothing to resume from.
    """
    from arclight.checkpoint import find_last, remote
    from arclight.checkpoint.manifest import is_checkpoint
    from arclight.trainer import RunFolder

    if place is None or place == "last":
        if place is not None and among is not None:
            check_there_is_a_run(among, flag)
        return None, place
    if remote.is_remote(address := remote.to_path(place)):
        kept = address if is_checkpoint(address) else find_last(address)
        if kept is None:
            raise UsageError(f"{flag}: {place} has no checkpoint to resume from")
        return None, str(kept)
    path = address
    if (path / "checkpoints").is_dir():
        found = find_last(path / "checkpoints")
        if found is None:
            raise UsageError(f"{flag}: {path} has no checkpoint to resume from")
        return RunFolder.open(path), found
    if not path.is_dir():
        raise UsageError(f"{flag}: {path} is neither a run folder nor a checkpoint")
    inside_a_run = path.parent.name == "checkpoints"
    return (RunFolder.open(path.parent.parent) if inside_a_run else None), path
