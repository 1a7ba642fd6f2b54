"""Find the largest batch size that fits in memory before a run, which then goes on with it.

Users pass it as a callback; `Tuner.scale_batch_size` runs it too. The search itself is ``tuner.batch_size_scaling``. Name and arguments
are Lightning's; the size that a fit found is in checkpoints (``batch_size``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from arclight._intervals import PositiveInt, check
from arclight.fabric.errors import MisconfigurationError
from arclight.trainer.callback import Callback
from arclight.trainer.hparams import find_attribute_owners, has_setting
from arclight.trainer.loop.progress import StopRun, TrainerFn
from arclight.trainer.tuner.batch_size_scaling import Search, scale_batch_size, stages_of, use_batch_size

if TYPE_CHECKING:
    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer


class BatchSizeFinder(Callback):
    """Search for the largest batch size that fits in memory, and train with it.

    * ``mode``: ``power`` doubles the size; ``binsearch`` then also looks between the last that fitted and the first that did not.
    * ``steps_per_trial``: optimizer steps (in an evaluation: batches) of each trial, of at most ``max_trials`` that fit.
    * ``init_val``, ``max_val``: the first size tried, and the largest.
    * ``batch_arg_name``: the attribute or hyper-parameter of module or data module that their loaders go by.
    * ``margin``: the share by which a ``binsearch`` result is reduced, in [0, 1).

    ``optimal_batch_size`` is the size found. A resumed fit keeps the size of its run, without a search. To search at other moments
    override the hooks and call :meth:`scale_batch_size`. A trial leaves no trace; the module's hooks run in it, those of callbacks do not.
    Raises ValueError for arguments out of range, MisconfigurationError for several processes, for loaders that were passed
    ready made, for several evaluation loaders, and if nothing has the setting.
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
        self._found: int | None = None
        """Batch size that a fit has found, which a resumed one keeps."""
        self._resumed = False

    @property
    def state_key(self) -> str:
        name = self._search.batch_arg_name
        return type(self).__qualname__ if name == "batch_size" else self._generate_state_key(batch_arg_name=name)

    def state_dict(self) -> dict[str, Any]:
        return {} if self._found is None else {"batch_size": self._found}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._found, self._resumed = state_dict.get("batch_size"), True

    def setup(self, trainer: Trainer, pl_module: Module, stage: str | None = None) -> None:
        self._resumed = False
        if trainer.num_devices * trainer.num_nodes > 1:
            raise MisconfigurationError(
                "The Batch size finder is not supported with distributed strategies. Search on one device, and give what it "
                "finds to each"
            )

    def scale_batch_size(self, trainer: Trainer, pl_module: Module) -> None:
        """Run the search now, for the current entry point."""
        self._check(trainer, pl_module)
        self.optimal_batch_size = scale_batch_size(trainer, pl_module, self._search)
        if trainer.state.fn == TrainerFn.FITTING:
            self._found = self.optimal_batch_size
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
        resumed, self._resumed = self._resumed, False
        if not resumed or self._found is None or self._early_exit:
            self.scale_batch_size(trainer, pl_module)
            return
        self._check(trainer, pl_module)
        use_batch_size(trainer.data, stages_of(trainer.stage), pl_module, self._search.batch_arg_name, self._found)
        self.optimal_batch_size = self._found
        trainer.log_info(f"the resumed run keeps the batch size that it had found: {self._found}")

    def on_validation_start(self, trainer: Trainer, pl_module: Module) -> None:
        if trainer.state.fn == TrainerFn.VALIDATING:
            self.scale_batch_size(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: Module) -> None:
        self.scale_batch_size(trainer, pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: Module) -> None:
        self.scale_batch_size(trainer, pl_module)
