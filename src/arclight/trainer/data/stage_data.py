"""Where the loaders of a stage come from, and how they reach its loop."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence, Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import DataLoader, SequentialSampler

from arclight.data.combined import (
    CombinedLoader,
    Count,
    Mode,
    ResumableCombination,
    combined_length,
    holds_loaders,
    is_loader,
)
from arclight.data.loader import ResumableLoader
from arclight.data.sampling import LoaderSeeds, resampled
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.rank_zero import rank_zero_warn
from arclight.trainer.data import checks, limits
from arclight.trainer.datamodule import DataModule
from arclight.trainer.loop.hooks import logging_as, overridden
from arclight.trainer.module import Module
from arclight.trainer.profilers.profiling import profile_action

if TYPE_CHECKING:
    from arclight.trainer.trainer import Trainer

HOOKS = {"train": "train_dataloader", "validate": "val_dataloader", "test": "test_dataloader", "predict": "predict_dataloader"}  # fmt: skip
"""The hook that gives a stage's data."""

STEPS = {"train": "training_step", "validate": "validation_step", "test": "test_step", "predict": "predict_step"}


@dataclass
class StageData:
    """The data of one stage: where they come from and, once they were asked for, the loaders."""

    stage: str
    function: str
    """The entry point: fit, validate, test or predict."""
    owner: DataModule | Module | None = None
    """Who has the hook; None where loaders were given, or nobody has."""
    given: Any = None
    structure: Any = None
    """The user's loaders, in the shape they were given."""
    loaders: Sequence[ResumableLoader | ResumableCombination] = ()
    """What the loop reads one after another."""
    counts: list[Count] = field(default_factory=list)
    """Batches of each of the user's loaders, within the limits."""
    total: Count = 0
    user_loaders: list[Any] = field(default_factory=list)
    """The user's loaders one by one."""
    runs: bool = False
    """Whether a process has batches: then all of them run the stage, some perhaps without a batch."""
    loaded: bool = False
    loaded_at: float = -math.inf
    """The epoch under way when they were asked for."""

    @property
    def defined(self) -> bool:
        return self.given is not None or self.owner is not None

    @property
    def limits(self) -> list[Count]:
        """Batches of each of `loaders`."""
        return self.counts if len(self.counts) == len(self.loaders) else [self.total]

    def _ask(self, owner: DataModule | Module, hook: str) -> Any:
        function = getattr(owner, hook)
        return logging_as(owner.trainer.lightning_module, hook, function)() if owner.trainer is not None else function()

    def request(self) -> Any:
        """The user's loaders. Raises TypeError where there are none or something else was given."""
        source = self.given if self.owner is None else self._ask(self.owner, HOOKS[self.stage])
        wrong = _invalid_dataloader_reason(source)
        if wrong is None:
            return source
        if self.owner is not None:
            raise MisconfigurationError(
                f"An invalid dataloader was returned from `{type(self.owner).__name__}.{HOOKS[self.stage]}()`. Found "
                f"{source!r}: {wrong}"
            )
        argument = {"train": "train_dataloaders", "validate": "val_dataloaders"}.get(self.stage, "dataloaders")
        argument = argument if self.function == "fit" else "dataloaders"
        raise MisconfigurationError(
            f"An invalid dataloader was passed to `Trainer.{self.function}({argument}=...)`. Found {source!r}: {wrong}. Either "
            f"pass the data to `.{self.function}()` OR implement `def {HOOKS[self.stage]}(self):` in your module or data module"
        )


def resolve_dataloaders(function: str, loaders: Any, others: Any, datamodule: Any) -> tuple[Any, Any]:
    """Loaders and data module; a data module may be given in the place of loaders.

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


def attach(trainer: Trainer, module: Module, function: str, **given: Any) -> None:
    """Note where the data of an entry point come from; `given`: loaders by stage. Nothing is asked for yet."""
    for stage, loaders in given.items():
        owner = None if loaders is not None else _owner(trainer, module, HOOKS[stage])
        trainer.data[stage] = StageData(stage, function, owner, loaders)


def _owner(trainer: Trainer, module: Module, name: str) -> DataModule | Module | None:
    for owner, base in ((trainer.datamodule, DataModule), (module, Module)):
        if owner is not None and overridden(owner, name, base):
            return owner
    return None


def has_step(trainer: Trainer, stage: str) -> bool:
    """Whether the module has a step for the stage (prediction has one by default)."""
    return stage == "predict" or overridden(trainer.lightning_module, STEPS[stage], Module)


def validates(trainer: Trainer) -> bool:
    """Whether the fit has anything to validate with."""
    data = trainer.data.get("validate")
    return (
        data is not None and data.defined and limits.setting(trainer, "validate") > 0 and has_step(trainer, "validate")
    )


def load(trainer: Trainer, stage: str) -> StageData:
    """The data of a stage: asked for the first time, and again where ``reload_dataloaders_every_n_epochs`` says so."""
    data = trainer.data[stage]
    every, epoch = trainer.reload_dataloaders_every_n_epochs, trainer.current_epoch
    if data.loaded and not (data.function == "fit" and every and epoch - data.loaded_at >= every):
        return data
    if limits.setting(trainer, stage) == 0 or not has_step(trainer, stage):
        data.loaded, data.runs = True, False
        if stage == "train":
            trainer.num_training_batches = 0
        return data
    source = profile_action(trainer, f"setup_{HOOKS[stage]}", data.request)()
    trainer.strategy.barrier(f"{HOOKS[stage]}()")
    mode: Mode = "max_size_cycle" if stage == "train" else "sequential"
    combined = copy.copy(source) if isinstance(source, CombinedLoader) else None
    if combined is None and (holds_loaders(source) or (isinstance(source, (list, tuple, dict)) and not source)):
        combined = CombinedLoader(source, mode)
    if not trainer.sanity_checking or limits.validates_in(trainer, epoch):
        data.loaded_at = epoch
    _take(trainer, data, combined, [source] if combined is None else combined.flattened)
    checks.check_stage(trainer, data)
    data.loaded = True
    if stage == "train":
        trainer.num_training_batches = data.total
        if trainer.loader_state:
            restore_position(trainer)
    return data


def position(trainer: Trainer) -> dict[str, Any]:
    """Where the training data stand, for a checkpoint: in samples where all ranks share an order, and states of loaders."""
    loader, progress, iterator = trainer.train_loader, trainer.progress, trainer.batch_iterator
    if loader is None:
        return {}
    if iterator is None or not progress.batch:
        ranks = trainer.strategy.distributed_sampler_kwargs["num_replicas"]
        window = progress.batch - trainer.window.count  # where its gradients could be summed anew
        place = {
            "epoch": progress.epoch,
            "ranks": ranks,
            "done": loader.place_of(progress.epoch, progress.batch),
            "window": loader.place_of(progress.epoch, window) if window >= 0 else None,
        }
        return {"place": place, **loader.state_dict(progress.batch, epoch=progress.epoch)}
    taken = loader.state_dict(iterator.fetched, epoch=progress.epoch)  # steps may take more or fewer batches than one
    return {"fetched": iterator.fetched, "taken": taken}


def restore_position(trainer: Trainer) -> None:
    """Hand the training data what a checkpoint says of them, as soon as both are there."""
    loader, state = trainer.train_loader, trainer.loader_state
    if loader is not None and state:
        _restore_place(trainer, loader, state.get("place"))
        taken = state.get("taken", state)
        loader.load_state_dict({key: value for key, value in taken.items() if key != "place"})
        trainer.loader_state = {"fetched": state["fetched"]} if "fetched" in state else {}


def _restore_place(
    trainer: Trainer, loader: ResumableLoader | ResumableCombination, place: dict[str, Any] | None
) -> None:
    """Count the batches that are done anew where batches are of another size now, or shared by other ranks."""
    progress, ranks = trainer.progress, trainer.strategy.distributed_sampler_kwargs["num_replicas"]
    if place is None or place["epoch"] != progress.epoch:
        return
    batch = None if place["done"] is None else loader.go_to(progress.epoch, place["done"])
    if batch is not None:
        progress.validated_at = batch if progress.validated_at == progress.batch else min(progress.validated_at, batch)
        progress.batch = batch
    elif ranks != place["ranks"] and progress.batch:
        trainer.notice(
            f"the checkpoint was made with {place['ranks']} ranks that read data, this run has {ranks}, and the order of this data "
            f"is not one that all ranks share: training continues from batch {progress.batch}, which repeats samples or skips some"
        )


def _take(trainer: Trainer, data: StageData, combined: CombinedLoader | None, given: list[Any]) -> None:
    """Make the loaders of `data` from the user's, one alone or several combined."""
    stage = data.stage
    if trainer.overfit_batches and data.function == "fit":
        given = in_order(given, stage)
    parts = [
        _wrap(trainer, loader, stage, seed) for loader, seed in zip(given, _seeds(trainer, given, stage), strict=True)
    ]
    data.user_loaders = given
    data.counts = [limits.count(trainer, stage, part) for part in parts]
    if combined is None:
        data.structure, data.loaders, data.total = given[0], parts, data.counts[0]
        return
    combined.flattened = given
    data.structure, data.total = combined.iterables, combined_length(combined.mode, data.counts)
    if combined.mode == "sequential" and stage != "train":
        data.loaders = parts
        return
    if stage == "train":
        trainer.num_training_batches = data.total
    if stage == "predict":
        raise MisconfigurationError('`trainer.predict()` only supports the `CombinedLoader(mode="sequential")` mode.')
    together = ResumableCombination(combined, parts)
    together.limits = data.counts
    data.loaders = [together]


def _seeds(trainer: Trainer, loaders: list[Any], stage: str) -> list[int]:
    """Return a seed for each loader of a stage, the same on every rank; for training those of the checkpoint that is resumed."""
    saved: list[int] | int = trainer.loader_seeds if stage == "train" else []
    saved = [saved] * len(loaders) if isinstance(saved, int) else saved
    seeds = LoaderSeeds()
    own = [seeds.next(loader, trainer.data_seed) for loader in loaders]
    shared: list[int] = trainer.strategy.broadcast(own)
    if stage == "train":
        trainer.loader_seeds = []
    if len(saved) == len(loaders):
        return list(saved)
    return (
        shared if len(shared) == len(own) else own
    )  # ranks with other numbers of loaders are refused once all have theirs


def _wrap(trainer: Trainer, loader: Any, stage: str, seed: int) -> ResumableLoader:
    if isinstance(loader, ResumableLoader):
        return loader
    share = trainer.strategy.distributed_sampler_kwargs
    return ResumableLoader(
        loader,
        seed=seed,
        rank=share["rank"],
        world_size=share["num_replicas"],
        train=stage == "train",
        complete=stage == "predict",
        shard=trainer.use_distributed_sampler,
    )


def in_order(loaders: list[Any], stage: str) -> list[Any]:
    """The loaders with every epoch in the order of the data set, to fit the same few batches again and again."""
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


def _invalid_dataloader_reason(source: Any) -> str | None:
    """Why `source` cannot be read as data; None where it can."""
    if source is None:
        return "nothing to read"
    if not hasattr(source, "__iter__") and not callable(source) and not dataclasses.is_dataclass(source):
        return f"{type(source).__name__} cannot be iterated"
    if not isinstance(source, (list, tuple, dict)) or holds_loaders(source):
        return None
    if isinstance(source, dict) and source:
        return "a dict is read as several loaders, and these are none"
    types = {type(part): part for part in source}
    kinds = {_loader_kind(part) for part in types.values()}  # one of each type: lists of batches can be long
    return f"it mixes {' and '.join(sorted(kinds))}" if len(kinds) > 1 else None


def _loader_kind(part: Any) -> str:
    if isinstance(part, (bool, int, float, str, bytes)):
        return "plain values"
    if isinstance(part, (torch.Tensor, list, tuple, dict)) or hasattr(part, "__array__"):
        return "batches or groups"
    return "loaders" if is_loader(part) else "other objects"
