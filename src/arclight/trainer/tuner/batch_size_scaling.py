"""Find the largest batch size that fits in memory.

The callback `BatchSizeFinder`, which `Tuner` runs too, calls `scale_batch_size`; model and progress are restored afterwards. Arguments
are Lightning's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.memory import free_memory, is_out_of_memory
from arclight.trainer.hparams import get_setting, set_setting
from arclight.trainer.module import Module
from arclight.trainer.tuner.trial import Run, trials

if TYPE_CHECKING:
    from arclight.trainer.data.connector import DataConnector
    from arclight.trainer.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Search:
    """Settings of a search, as :class:`arclight.trainer.callbacks.BatchSizeFinder` takes them."""

    mode: str
    steps_per_trial: int
    init_val: int
    max_trials: int
    batch_arg_name: str
    margin: float
    max_val: int


def scale_batch_size(trainer: Trainer, module: Module, search: Search) -> int | None:
    """Search for the largest batch size, set it and return it.

    None in a development run, which tries nothing.

    Raises MisconfigurationError if not even one sample fits, and any error of a trial that is not about memory.
    """
    if trainer.fast_dev_run:
        trainer.warn("Skipping batch size scaler since `fast_dev_run` is enabled.")
        return None
    stages = stages_of(trainer.stage)
    before = get_setting(module, search.batch_arg_name)
    try:
        with trials(trainer, module) as run:
            size = _Finder(trainer, module, search, run, stages).find()
    except BaseException:
        set_setting(module, search.batch_arg_name, before)
        raise
    finally:
        free_memory()
    use_batch_size(trainer.data, stages, module, search.batch_arg_name, size)
    trainer.log_info(f"Finished batch size finder, will continue with full run using batch size {size}")
    return size


def use_batch_size(data: DataConnector, stages: Sequence[str], module: Module, name: str, size: int) -> None:
    """Set the batch size ``name`` of module and data, and recreate the loaders of ``stages``."""
    set_setting(module, name, size)
    for stage in stages:
        data.stages[stage].loaded = False
        if data.stages[stage].defined:
            data.load(stage)


def stages_of(stage: str) -> list[str]:
    """List the stages whose data the entry point that runs ``stage`` reads."""
    return ["train", "validate"] if stage == "train" else [stage]


class _Finder:
    """One search under way."""

    def __init__(self, trainer: Trainer, module: Module, search: Search, run: Run, stages: list[str]) -> None:
        self.trainer, self.module, self.search, self.run, self.stages = trainer, module, search, run, stages

    def find(self) -> int:
        strategy: dict[str, Callable[[int], int]] = {"power": self._doubled, "binsearch": self._bisected}
        return strategy[self.search.mode](min(self.search.init_val, self.search.max_val))

    def _doubled(self, size: int) -> int:
        """Double the size as long as it fits; halve it until it does."""
        fitting = successes = 0
        while successes < self.search.max_trials:
            if self._fits(size):
                fitting, successes = size, successes + 1
                larger = size if successes == self.search.max_trials else self._larger(size)
                if larger == size:
                    break
                size = self._announced(size, larger, "succeeded")
            elif fitting:
                break
            else:
                size = self._announced(size, self._smaller(size, size // 2), "failed")
        return fitting

    def _bisected(self, size: int) -> int:
        """Double the size until it is too large, then bisect between that and the last that fit."""
        fitting, too_large, successes = 0, 0, 0
        while successes < self.search.max_trials:
            if self._fits(size):
                fitting, successes = size, successes + 1
                following = (fitting + too_large) // 2 if too_large else self._larger(size)
                verdict = "succeeded"
            else:
                too_large = size
                following, verdict = self._smaller(size, (fitting + too_large) // 2), "failed"
            if following == fitting or successes == self.search.max_trials:
                break
            size = self._announced(size, following, verdict)
        size = fitting or size
        reduced = max(1, int(size * (1 - self.search.margin)))
        if reduced != size:
            self.trainer.log_info(
                f"Applying margin of {self.search.margin:.1%}, reducing batch size from {size} to {reduced}"
            )
        return reduced

    def _announced(self, size: int, following: int, verdict: str) -> int:
        self.trainer.log_info(f"Batch size {size} {verdict}, trying batch size {following}")
        return following

    def _larger(self, size: int) -> int:
        """Return the next size up, at most the data's length and the limit; or ``size`` itself."""
        length = self._samples()
        if length is not None and size >= length:
            self.trainer.log_info(
                f"The batch size {size} is greater or equal than the length of your dataset: {length}."
            )
            return size
        if size >= self.search.max_val:
            self.trainer.log_info(f"Reached the maximum batch size limit of {self.search.max_val}. Stopping search.")
            return size
        return min(2 * size, self.search.max_val, length or 2 * size)

    @staticmethod
    def _smaller(size: int, following: int) -> int:
        if size <= 1:
            raise MisconfigurationError(
                "a batch of one sample runs out of memory: use a smaller model or input, lower precision, activation "
                "checkpointing, or a strategy that shards the model"
            )
        return following

    def _samples(self) -> int | None:
        """Return the length of the largest data set, or None if unknown."""
        loaders = self.trainer.data.stages[self.stages[0]].user_loaders
        sets: list[Any] = [getattr(loader, "dataset", None) for loader in loaders]
        lengths = [len(d) for d in sets if hasattr(d, "__len__") and not isinstance(d, IterableDataset)]
        return max(lengths, default=None)

    def _fits(self, size: int) -> bool:
        """Return True if a few steps with batches of ``size`` run without an error about memory."""
        set_setting(self.module, self.search.batch_arg_name, size)
        steps, trainer = self.search.steps_per_trial, self.trainer
        if self.stages[0] == "train":
            settings: dict[str, Any] = {"max_steps": trainer.global_step + steps, "limit_train_batches": 1.0}
            if trainer.data.limit("validate") != 0:
                settings["limit_val_batches"] = steps
        else:
            prefix = {"validate": "val"}.get(self.stages[0], self.stages[0])
            settings = {f"limit_{prefix}_batches": steps}
        if trainer.strategy.root_device.type != "cpu":
            free_memory()  # what earlier trials left in cycles and caches would count against this one
        for stage in self.stages:
            trainer.data.stages[stage].loaded = False
        try:
            self.run(**settings)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            fits = False  # by the next trial the error is gone, with all that its frames held
        else:
            fits = True
        return fits
