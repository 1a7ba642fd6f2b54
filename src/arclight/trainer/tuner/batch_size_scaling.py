"""Find the largest batch size that fits in memory, and the callback that does it before a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from arclight._intervals import PositiveInt, check
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.memory import free_memory, is_out_of_memory
from arclight.trainer.callback import Callback
from arclight.trainer.hparams import find_attribute_owners, get_setting, has_setting, set_setting
from arclight.trainer.loop.progress import StopRun, TrainerFn
from arclight.trainer.module import Module
from arclight.trainer.tuner.trial import Run, trials

if TYPE_CHECKING:
    from arclight.trainer.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Search:
    """Settings of a search: the arguments of :class:`arclight.trainer.callbacks.BatchSizeFinder`."""

    mode: str
    steps_per_trial: int
    init_val: int
    max_trials: int
    batch_arg_name: str
    margin: float
    max_val: int


def scale_batch_size(trainer: Trainer, module: Module, search: Search) -> int | None:
    """The batch size found, which module and data then have; None in a development run, which tries nothing.

    Raises MisconfigurationError where not even one sample fits, and any error of a trial that is not about memory.
    """
    if trainer.fast_dev_run:
        trainer.warn("Skipping batch size scaler since `fast_dev_run` is enabled.")
        return None
    stages = ["train", "validate"] if trainer.stage == "train" else [trainer.stage]
    before = get_setting(module, search.batch_arg_name)
    try:
        with trials(trainer, module) as run:
            size = _Finder(trainer, module, search, run, stages).find()
    except BaseException:
        set_setting(module, search.batch_arg_name, before)
        raise
    finally:
        free_memory()
    set_setting(module, search.batch_arg_name, size)
    _reload(trainer, stages)
    trainer.say(f"Finished batch size finder, will continue with full run using batch size {size}")
    return size


class _Finder:
    """One search under way."""

    def __init__(self, trainer: Trainer, module: Module, search: Search, run: Run, stages: list[str]) -> None:
        self.trainer, self.module, self.search, self.run, self.stages = trainer, module, search, run, stages

    def find(self) -> int:
        strategy: dict[str, Callable[[int], int]] = {"power": self._doubled, "binsearch": self._bisected}
        return strategy[self.search.mode](min(self.search.init_val, self.search.max_val))

    def _doubled(self, size: int) -> int:
        """Twice as much as long as it fits; half as much until it does."""
        fitting = 0
        for trial in range(self.search.max_trials):
            last = trial + 1 == self.search.max_trials
            if self._fits(size):
                fitting = size
                larger = size if last else self._larger(size)
                if larger == size:
                    break
                size = self._announced(size, larger, "succeeded")
            elif fitting:
                break
            else:
                size = self._announced(size, self._smaller(size, size // 2), "failed")
        return fitting or size

    def _bisected(self, size: int) -> int:
        """As above up to the first size too large; then halve what lies between that and the last that fitted."""
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
            self.trainer.say(
                f"Applying margin of {self.search.margin:.1%}, reducing batch size from {size} to {reduced}"
            )
        return reduced

    def _announced(self, size: int, following: int, verdict: str) -> int:
        self.trainer.say(f"Batch size {size} {verdict}, trying batch size {following}")
        return following

    def _larger(self, size: int) -> int:
        """The next size up: no larger than the data or the limit; ``size`` itself where it is there already."""
        length = self._samples()
        if length is not None and size >= length:
            self.trainer.say(f"The batch size {size} is greater or equal than the length of your dataset: {length}.")
            return size
        if size >= self.search.max_val:
            self.trainer.say(f"Reached the maximum batch size limit of {self.search.max_val}. Stopping search.")
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
        """Samples of the largest data set read; None where that is not known."""
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
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            fits = False  # by the next trial the error is gone, with all that its frames held
        else:
            fits = True
        return fits


def _reload(trainer: Trainer, stages: list[str]) -> None:
    for stage in stages:
        trainer.data.stages[stage].loaded = False
        if trainer.data.stages[stage].defined:
            trainer.data.load(stage)


class BatchSizeFinder(Callback):
    """Try larger and larger batches until memory runs out, then run with the largest that fitted.

    * ``mode``: ``power`` doubles the size; ``binsearch`` then also looks between the last that fitted and the first that did not.
    * ``steps_per_trial``: optimizer steps (in an evaluation: batches) of each trial, of at most ``max_trials``.
    * ``init_val``, ``max_val``: the first size tried, and the largest.
    * ``batch_arg_name``: the attribute or hyper-parameter of module or data module that their loaders go by.
    * ``margin``: the share by which a ``binsearch`` result is reduced, in [0, 1).

    ``optimal_batch_size`` is the size found. To search at other moments override the hooks and call
    :meth:`scale_batch_size`. A trial leaves no trace; the module's hooks run in it, those of callbacks do not.
    Raises ValueError for arguments out of range, MisconfigurationError for several processes, for loaders that were passed
    ready made, for several evaluation loaders, and where nothing has the setting.
    """

    SUPPORTED_MODES = ("power", "binsearch")

    def __init__(
        self,
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> None:
        if mode.lower() not in self.SUPPORTED_MODES:
            raise ValueError(f"`mode` should be either of {self.SUPPORTED_MODES}, got {mode!r}")
        check("max_trials", max_trials, PositiveInt)
        if not 0 <= margin < 1:
            raise ValueError(f"`margin` should be between 0 and 1, got {margin}")
        if min(steps_per_trial, init_val, max_val) < 1:
            raise ValueError(f"{steps_per_trial=}, {init_val=} and {max_val=} must be at least 1")
        self.optimal_batch_size: int | None = init_val
        self._search = Search(
            mode=mode.lower(),
            steps_per_trial=steps_per_trial,
            init_val=init_val,
            max_trials=max_trials,
            batch_arg_name=batch_arg_name,
            margin=margin,
            max_val=max_val,
        )
        self._early_exit = False

    def setup(self, trainer: Trainer, pl_module: Module, stage: str | None = None) -> None:
        if trainer.num_devices * trainer.num_nodes > 1:
            raise MisconfigurationError(
                "The Batch size finder is not supported with distributed strategies. Search on one device, and give what it "
                "finds to each"
            )

    def scale_batch_size(self, trainer: Trainer, pl_module: Module) -> None:
        """Search now, for the entry point under way."""
        self._check(trainer, pl_module)
        self.optimal_batch_size = scale_batch_size(trainer, pl_module, self._search)
        if self._early_exit:
            raise StopRun

    def _check(self, trainer: Trainer, module: Module) -> None:
        name, data = self._search.batch_arg_name, trainer.data.stages[trainer.stage]
        if data.given is not None:
            raise MisconfigurationError(
                f"The Batch size finder cannot be used with dataloaders passed directly to `.{data.function}()`, as it could not "
                "change their batch size. Move them to the dataloader hooks of the module or of a data module"
            )
        if len(data.user_loaders) > 1 and data.function != TrainerFn.FITTING:
            prefix = {"validate": "val"}.get(data.stage, data.stage)
            raise MisconfigurationError(f"The Batch size finder cannot be used with multiple {prefix} dataloaders.")
        if not has_setting(module, name):
            raise MisconfigurationError(
                f"Field {name} not found in `model`, `datamodule`, nor their `hparams` attributes."
            )
        if {id(module), id(module.hparams)} <= {id(holder) for holder in find_attribute_owners(module, name)}:
            trainer.warn(
                f"Field `model.{name}` and `model.hparams.{name}` are mutually exclusive! Loaders may go by either, and both are "
                "set; please remove one of them."
            )

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        self.scale_batch_size(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: Module) -> None:
        if trainer.state.fn == TrainerFn.VALIDATING:
            self.scale_batch_size(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: Module) -> None:
        self.scale_batch_size(trainer, pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: Module) -> None:
        self.scale_batch_size(trainer, pl_module)
