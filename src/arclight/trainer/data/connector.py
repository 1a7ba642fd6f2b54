"""Request the dataloaders of each stage, prepare them, and move their batches to the device.

`DataConnector` (``trainer.data``) asks the data module's hook, else the module's, and fills the `StageData` that the loops read;
`batch_transfer` composes what moves a batch. Checkpoints hold what `position` gives: its keys stay. The order of the three transfer hooks
is Lightning's, and so is that a data module's hook goes before the module's.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sized
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, cast

from torch.utils.data import DataLoader, SequentialSampler

from arclight.data.combined import (
    CombinedLoader,
    Count,
    Mode,
    ResumableCombination,
    combined_length,
    holds_loaders,
)
from arclight.data.loader import ResumableLoader
from arclight.data.sampling import LoaderSeeds, resampled
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.precision import Precision
from arclight.fabric.rank_zero import rank_zero_warn
from arclight.fabric.seeding import isolate_rng
from arclight.trainer.data import checks, limits
from arclight.trainer.data.stage_data import HOOKS, BatchIterator, Lookahead, StageData
from arclight.trainer.datamodule import DataModule
from arclight.trainer.loop.hooks import logging_as, note_iterator, overridden, takes_iterator
from arclight.trainer.module import Module
from arclight.trainer.profilers.profiling import profile_action, profile_items

if TYPE_CHECKING:
    from arclight.fabric.strategies import Strategy
    from arclight.trainer.trainer import Trainer

STEPS = {"train": "training_step", "validate": "validation_step", "test": "test_step", "predict": "predict_step"}
_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def resolve_dataloaders(function: str, loaders: Any, others: Any, datamodule: Any) -> tuple[Any, Any]:
    """Resolve loaders and data module; a data module may be given in place of loaders.

    Raises MisconfigurationError for both at once.
    """
    if isinstance(loaders, DataModule):
        if datamodule is not None:
            raise MisconfigurationError("two data modules were given: one as dataloaders, one as datamodule; give one")
        loaders, datamodule = None, loaders
    if datamodule is not None and (loaders is not None or others is not None):
        if function == "fit":
            what = "`train_dataloader` or `val_dataloaders` to `trainer.fit(datamodule=...)`"
        else:
            what = f"both `trainer.{function}(dataloaders=..., datamodule=...)`"
        raise MisconfigurationError(f"You cannot pass {what}: give one of them")
    return loaders, datamodule


class DataConnector:
    """Load a trainer's data: request loaders, count batches and pass them to the loops."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @property
    def stages(self) -> dict[str, StageData]:
        """The data of the stages of the newest entry point."""
        return self._trainer.run_state.data

    def attach(self, module: Module, function: str, **given: Any) -> None:
        """Record the source of each stage's data; no loader is requested yet.

        ``given``: loaders by stage.
        """
        for stage, loaders in given.items():
            data = self.stages[stage] = StageData(stage, function, loaders)
            owner = None if loaders is not None else self._owner(module, HOOKS[stage])
            if owner is not None:
                data.hook, data.owner = partial(_call_hook, owner, HOOKS[stage]), type(owner).__name__

    def _owner(self, module: Module, name: str) -> DataModule | Module | None:
        for owner, base in ((self._trainer.datamodule, DataModule), (module, Module)):
            if owner is not None and overridden(owner, name, base):
                return owner
        return None

    def limit(self, stage: str) -> Count:
        """Return the ``limit_*_batches`` of a stage."""
        limit: Count | None = getattr(self._trainer, f"limit_{limits.limit_name(stage)}_batches")
        return 1.0 if limit is None else limit

    def has_step(self, stage: str) -> bool:
        """Return True if the module has a step for the stage (prediction has one by default)."""
        return stage == "predict" or overridden(self._trainer.lightning_module, STEPS[stage], Module)

    @property
    def validates(self) -> bool:
        """Return True if the fit has anything to validate with."""
        data = self.stages.get("validate")
        return data is not None and data.defined and self.limit("validate") > 0 and self.has_step("validate")

    def counts(self, stage: str) -> list[Count]:
        """Count the batches of each loader of a stage, within the limits."""
        return self.stages[stage].counts if stage in self.stages else []

    def structure(self, stage: str) -> Any:
        """Return the user's loaders of a stage, as they were given; None before they were asked for."""
        return self.stages[stage].structure if stage in self.stages else None

    @property
    def train_loader(self) -> ResumableLoader | ResumableCombination | None:
        """The training data, by epoch and position."""
        loaders = self.stages["train"].loaders if "train" in self.stages else ()
        return loaders[0] if loaders else None

    def load(self, stage: str) -> StageData:
        """Load the data of a stage, on first use and for ``reload_dataloaders_every_n_epochs``."""
        trainer, run, data = self._trainer, self._trainer.run_state, self.stages[stage]
        every, epoch = trainer.reload_dataloaders_every_n_epochs, trainer.current_epoch
        if data.loaded and not (data.function == "fit" and every and epoch - data.loaded_at >= every):
            return data
        if self.limit(stage) == 0 or not self.has_step(stage):
            data.loaded, data.runs = True, False
            if stage == "train":
                run.set_training_batches(0)
            return data
        source = profile_action(trainer.profiler, f"setup_{HOOKS[stage]}", data.request)()
        trainer.strategy.barrier(f"{HOOKS[stage]}()")
        mode: Mode = "max_size_cycle" if stage == "train" else "sequential"
        combined = copy.copy(source) if isinstance(source, CombinedLoader) else None
        if combined is None and (holds_loaders(source) or (isinstance(source, (list, tuple, dict)) and not source)):
            combined = CombinedLoader(source, mode)
        if not trainer.sanity_checking or trainer.validation_schedule.includes(epoch):
            data.loaded_at = epoch
        data.close()
        self._take(data, combined, [source] if combined is None else combined.flattened)
        self._check(data)
        data.loaded = True
        if stage == "train":
            run.set_training_batches(data.total)
            if run.loader_state:
                self.restore_position()
        return data

    def _take(self, data: StageData, combined: CombinedLoader | None, given: list[Any]) -> None:
        """Make the loaders of ``data`` from the user's, one alone or several combined."""
        stage, trainer = data.stage, self._trainer
        if trainer.overfit_batches and data.function == "fit":
            given = in_order(given, stage)
        parts = [self._wrap(loader, stage, seed) for loader, seed in zip(given, self._seeds(given, stage), strict=True)]
        data.user_loaders = given
        data.counts = [limits.count_batches(part, self.limit(stage), limits.limit_name(stage)) for part in parts]
        if combined is None:
            data.structure, data.loaders, data.total = given[0], parts, data.counts[0]
            return
        combined.flattened = given
        data.structure, data.total = combined.iterables, combined_length(combined.mode, data.counts)
        if combined.mode == "sequential" and stage != "train":
            data.loaders = parts
            return
        if stage == "train":
            trainer.run_state.set_training_batches(data.total)
        if stage == "predict":
            raise MisconfigurationError(
                '`trainer.predict()` only supports the `CombinedLoader(mode="sequential")` mode.'
            )
        together = ResumableCombination(combined, parts)
        together.limits = data.counts
        data.loaders = [together]

    def _seeds(self, loaders: list[Any], stage: str) -> list[int]:
        """Return a seed for each loader of a stage, the same on every rank.

        For training they are those of the checkpoint that is resumed.
        """
        run = self._trainer.run_state
        saved: list[int] | int = run.loader_seeds if stage == "train" else []
        saved = [saved] * len(loaders) if isinstance(saved, int) else saved
        seeds = LoaderSeeds()
        own = [seeds.next(loader, run.data_seed) for loader in loaders]
        shared: list[int] = self._trainer.strategy.broadcast(own)
        if stage == "train":
            run.loader_seeds = []
        if len(saved) == len(loaders):
            return list(saved)
        # ranks with other numbers of loaders are refused once all have theirs
        return shared if len(shared) == len(own) else own

    def _wrap(self, loader: Any, stage: str, seed: int) -> ResumableLoader:
        if isinstance(loader, ResumableLoader):
            return loader
        share = self._trainer.strategy.distributed_sampler_kwargs
        return ResumableLoader(
            loader,
            seed=seed,
            rank=share["rank"],
            world_size=share["num_replicas"],
            train=stage == "train",
            complete=stage == "predict",
            shard=self._trainer.use_distributed_sampler,
        )

    def _check(self, data: StageData) -> None:
        trainer, total = self._trainer, data.total
        owners = trainer.lightning_module, trainer.datamodule
        data.runs = checks.check_stage(
            data.stage,
            data.user_loaders,
            data.counts,
            total,
            trainer.strategy,
            owners,
            workers_share=trainer.num_devices,
        )
        if data.stage != "train":
            return
        few = 0 < total < trainer.log_interval(total) < math.inf
        log_every = trainer.log_every_n_steps if few and trainer.loggers and not trainer.fast_dev_run else 0
        checks.check_training(total, len(data.user_loaders), log_every)

    # -- where the training data stand ---------------------------------------------------------------------------------

    def position(self) -> dict[str, Any]:
        """Return the training data's position, for a checkpoint.

        In samples if all ranks share an order; and states of loaders.
        """
        run, loader = self._trainer.run_state, self.train_loader
        progress, iterator = run.progress, run.batch_iterator
        if loader is None:
            return {}
        if iterator is None or not progress.batch:
            ranks = self._trainer.strategy.distributed_sampler_kwargs["num_replicas"]
            window = progress.batch - run.window.count  # where its gradients could be summed again
            place = {
                "epoch": progress.epoch,
                "ranks": ranks,
                "done": loader.samples_before(progress.epoch, progress.batch),
                "window": loader.samples_before(progress.epoch, window) if window >= 0 else None,
            }
            return {"place": place, **loader.state_dict(progress.batch, epoch=progress.epoch)}
        taken = loader.state_dict(
            iterator.fetched, epoch=progress.epoch
        )  # steps may take more or fewer batches than one
        return {"fetched": iterator.fetched, "taken": taken}

    def restore_position(self) -> None:
        """Restore the training data's position from a checkpoint, once both are there."""
        run, loader = self._trainer.run_state, self.train_loader
        state = run.loader_state
        if loader is not None and state:
            self._restore_place(loader, state.get("place"))
            taken = state.get("taken", state)
            loader.load_state_dict({key: value for key, value in taken.items() if key != "place"})
            run.loader_state = {"fetched": state["fetched"]} if "fetched" in state else {}

    def _restore_place(self, loader: ResumableLoader | ResumableCombination, place: dict[str, Any] | None) -> None:
        """Convert the position if batch sizes or ranks have changed."""
        progress = self._trainer.run_state.progress
        ranks = self._trainer.strategy.distributed_sampler_kwargs["num_replicas"]
        if place is None or place["epoch"] != progress.epoch:
            return
        batch = None if place["done"] is None else loader.seek(progress.epoch, place["done"])
        if batch is not None:
            progress.validated_at = (
                batch if progress.validated_at == progress.batch else min(progress.validated_at, batch)
            )
            progress.batch = batch
        elif ranks != place["ranks"] and progress.batch:
            self._trainer.log_warning(
                f"the checkpoint was made with {place['ranks']} ranks that read data, this run has {ranks}, and the order of this "
                f"data is not one that all ranks share: training continues from batch {progress.batch}, which repeats samples or skips "
                "some"
            )

    # -- batches -------------------------------------------------------------------------------------------------------

    def train_batches(self, epoch: int, start: int) -> Iterator[Any]:
        """Yield an epoch's batches from ``start`` on.

        For a step that takes the iterator, that iterator in every turn.
        """
        run, loader = self._trainer.run_state, self.train_loader
        total = run.num_training_batches
        if loader is None:
            raise RuntimeError("no training data: fit has not begun")
        if takes_iterator(self._trainer.lightning_module.training_step):
            start = run.loader_state.pop("fetched", start)
            triples = ((batch, index, 0) for index, batch in enumerate(self._fetched(loader, epoch, start), start))
            run.batch_iterator = BatchIterator(triples, total, start)
            return run.batch_iterator.turns()
        batches = self._fetched(loader, epoch, start)
        if total != math.inf:
            return islice(batches, int(total) - start)
        run.upcoming = Lookahead(batches)
        return run.upcoming

    def _fetched(self, loader: ResumableLoader | ResumableCombination, epoch: int, start: int) -> Iterator[Any]:
        """Profile the wait for batches; of unknown length, check that all ranks have a first one.

        Then it is a collective of each epoch. Raises MisconfigurationError on all of them if only some have.
        """
        trainer = self._trainer
        batches = profile_items(trainer.profiler, trainer.behavior.fetch_label("train"), loader.batches(epoch, start))
        if trainer.run_state.num_training_batches != math.inf or trainer.world_size == 1:
            return batches
        first = list(islice(batches, 1))
        having = trainer.strategy.all_gather_object(bool(first))
        if any(having) and not all(having):
            raise checks.nothing_to_train([rank for rank, has in enumerate(having) if not has])
        return chain(first, batches)

    def transfer(self, module: Module, dataloader_idx: int = 0) -> Callable[[Any], Any] | None:
        """Return what brings a batch to the device; None if there is nothing to do."""
        trainer = self._trainer
        return batch_transfer(
            module,
            trainer.datamodule,
            trainer.precision_plugin,
            trainer.strategy,
            training=trainer.training,
            dataloader_idx=dataloader_idx,
        )

    def sample_batch(self, module: Module, stage: str, given: Any = None) -> tuple[Callable[..., Any], Any]:
        """Return the step of ``stage`` and its first batch (or ``given``), on the device.

        For strategies that must know what a step does before optimizers are made. The loop reads that batch again, and no random
        number is drawn. Raises MisconfigurationError if there is none to see without taking it away.
        """
        step = getattr(module, STEPS[stage])
        if takes_iterator(step):
            raise MisconfigurationError(
                f"{STEPS[stage]} takes its batches from an iterator, and this strategy cuts each batch itself: let it take "
                "(batch, batch_idx)"
            )
        with isolate_rng():
            batch = self._first(stage) if given is None else given
            move = self.transfer(module)
            return step, move(batch) if move is not None else batch

    def _first(self, stage: str) -> Any:
        data = self.load(stage)
        found, lack = None, "there are no data"
        once = next((loader for loader in data.user_loaders if hasattr(loader, "__next__")), None)
        if once is not None:
            lack = f"a {type(once).__name__} can be read once only"
        elif data.loaders:
            found = next(iter(data.loaders[0].batches(self._trainer.current_epoch)), None)
        if found is None:
            raise MisconfigurationError(
                f"this strategy looks at a batch before {STEPS[stage]} runs, and {lack}: give it one, as in Pipeline(example=batch)"
            )
        return found


def in_order(loaders: list[Any], stage: str) -> list[Any]:
    """Return the loaders without shuffling, to overfit the same few batches."""
    if all(isinstance(loader.sampler, SequentialSampler) for loader in loaders if hasattr(loader, "sampler")):
        return loaders
    name = HOOKS[stage].removesuffix("_dataloader")
    rank_zero_warn(
        f"You requested to overfit but enabled {name} dataloader shuffling. We are turning off the {name} dataloader "
        "shuffling for you."
    )
    return [_sequential(loader) if isinstance(loader, DataLoader) else loader for loader in loaders]


def _sequential(loader: DataLoader[Any]) -> DataLoader[Any]:
    return resampled(loader, SequentialSampler(cast("Sized", loader.dataset)))


def _call_hook(owner: DataModule | Module, hook: str) -> Any:
    """Call a hook that gives loaders; what it logs is attributed to it."""
    function = getattr(owner, hook)
    return logging_as(owner.trainer.lightning_module, hook, function)() if owner.trainer is not None else function()


def batch_transfer(
    module: Module,
    datamodule: Any,
    precision: Precision,
    strategy: Strategy,
    *,
    training: bool,
    dataloader_idx: int = 0,
) -> Callable[[Any], Any] | None:
    """Compose the precision's cast and the three batch transfer hooks.

    Each hook is the data module's own or else the module's.

    None if there is nothing to do, and for training steps that take their batches from an iterator.
    """
    if training and takes_iterator(module.training_step):
        note_iterator("training_step")
        return None
    device = strategy.device
    casts = type(precision).convert_input is not Precision.convert_input
    owners = [_transfer_owner(module, datamodule, name) for name in _TRANSFER_HOOKS]
    if all(owner is None for owner in owners):
        move = strategy.move
        if device.type == "cpu":
            return precision.convert_input if casts else None
        return (lambda batch: move(precision.convert_input(batch))) if casts else move
    before, transfer, after = (
        logging_as(module, name, getattr(owner, name)) if owner is not None else getattr(module, name)
        for owner, name in zip(owners, _TRANSFER_HOOKS, strict=True)
    )

    def run(batch: Any) -> Any:
        if casts:
            batch = precision.convert_input(batch)
        return after(transfer(before(batch, dataloader_idx), device, dataloader_idx), dataloader_idx)

    return run


def _transfer_owner(module: Module, data: Any, name: str) -> Module | DataModule | None:
    """Return the object whose version of a hook is called; None if nobody has one."""
    of_data = data is not None and overridden(data, name, DataModule) and not _wraps_default(data, name)
    of_module = overridden(module, name, Module)
    if of_data and of_module:
        rank_zero_warn(
            f"You have overridden `{name}` in both `LightningModule` and `LightningDataModule`. It will use the implementation "
            "from `LightningDataModule` instance."
        )
    return data if of_data else module if of_module else None


def _wraps_default(data: DataModule, name: str) -> bool:
    """Return True for DataModule's own hook behind wrappers (``functools.wraps``)."""
    function = getattr(data, name)
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return getattr(function, "__func__", function) is getattr(DataModule, name)
