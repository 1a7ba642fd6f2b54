"""What callbacks and modules may ask a trainer: where it runs, how far it is, what it was given."""

from __future__ import annotations

import logging
import math
import warnings
from typing import TYPE_CHECKING, Any, cast

from arclight.trainer.loop.progress import RunningStage, TrainerState, TrainerStatus

if TYPE_CHECKING:
    import torch

    from arclight.fabric.accelerators import Accelerator
    from arclight.fabric.precision import Precision
    from arclight.fabric.strategies import Strategy
    from arclight.trainer.callback import Callback
    from arclight.trainer.loop.progress import Progress
    from arclight.trainer.module import Module

_LOG = logging.getLogger("arclight")


class TrainerView:
    """Questions only; nothing here changes a run."""

    accelerator: Accelerator
    strategy: Strategy
    precision_plugin: Precision
    callbacks: list[Callback]
    progress: Progress
    state: TrainerState
    step_module: torch.nn.Module | None
    received_sigterm: bool
    _module: Module | None

    # settings that callbacks and modules may change while a run lasts
    fast_dev_run: int | bool
    max_epochs: int  # None until the first fit where the user did not say
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

    # -- the module --------------------------------------------------------------------------------------------

    @property
    def lightning_module(self) -> Module:
        """The module of the newest entry point. Raises RuntimeError before the first."""
        module = self._module or self.strategy.lightning_module
        if module is None:
            raise RuntimeError("this trainer has no module yet; call fit, validate, test or predict with one")
        return cast("Module", module)

    @property
    def model(self) -> torch.nn.Module | None:
        """The module as it is run: wrapped where several processes train it."""
        whole = self._module or self.strategy.lightning_module
        return self.step_module if self.training and self.step_module is not None else whole

    # -- what it is doing ----------------------------------------------------------------------------------------

    @property
    def stage(self) -> str:
        """Name of the running stage; empty between two."""
        return self.state.stage.value if self.state.stage is not None else ""

    @stage.setter
    def stage(self, stage: str) -> None:
        self.state.stage = RunningStage(stage) if stage else None

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
    def limits(self) -> dict[str, int | float]:
        """Limit on the batches of each stage."""
        return {
            "validate": self.limit_val_batches,
            "test": self.limit_test_batches,
            "predict": self.limit_predict_batches,
        }

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

    # -- what it was given -------------------------------------------------------------------------------------------

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        from arclight.trainer.callback import Checkpoint

        return [callback for callback in self.callbacks if isinstance(callback, Checkpoint)]

    @property
    def checkpoint_callback(self) -> Any:
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        from arclight.trainer.callbacks import EarlyStopping

        return [callback for callback in self.callbacks if isinstance(callback, EarlyStopping)]

    @property
    def early_stopping_callback(self) -> Any:
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def progress_bar_callback(self) -> Any:
        from arclight.trainer.callbacks import ProgressBar

        return next((callback for callback in self.callbacks if isinstance(callback, ProgressBar)), None)

    # -- telling people ----------------------------------------------------------------------------------------------

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only."""
        if self.is_global_zero:
            print(*args, **kwargs)  # noqa: T201

    def notice(self, message: str) -> None:
        """Tell the user something once, on rank 0."""
        if self.is_global_zero:
            _LOG.warning(message)

    def say(self, message: str) -> None:
        """Tell the user something that is no cause for concern, on rank 0."""
        if self.is_global_zero:
            _LOG.info(message)

    def warn(self, message: str, category: type[Warning] = UserWarning) -> None:
        """Warn of something that the user can change, on rank 0."""
        if self.is_global_zero:
            warnings.warn(message, category, stacklevel=3)
