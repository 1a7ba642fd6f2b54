"""Average weights along a constant, high learning rate (SWA).

Users pass it to a Trainer, as in Lightning, whose arguments it has; `weight_averaging` keeps the average. Keys of its state are in
checkpoints and stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.optim.swa_utils import SWALR

from arclight._intervals import NonNegativeInt, PositiveFloat, check
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.modules import keeping_modes
from arclight.fabric.rank_zero import rank_zero_info, rank_zero_warn
from arclight.fabric.strategies.sharded import ShardedStrategy
from arclight.trainer.callbacks.weights.weight_averaging import AverageFunction, WeightAveraging, tensor_owners
from arclight.trainer.logging.results import ResultCollection
from arclight.trainer.loop.optimizers import LRSchedulerConfig

if TYPE_CHECKING:
    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer

_BatchNorm = nn.modules.batchnorm._BatchNorm
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_UNFINISHED = "swa_unfinished"
"""The entry of an average that lacks its statistics; the model is loaded without it."""


class StochasticWeightAveraging(WeightAveraging):
    """Average the weights at the end of each epoch from ``swa_epoch_start`` on.

    The learning rate is held at ``swa_lrs`` meanwhile.

    * ``swa_epoch_start``: the first such epoch, counted from 1; a float is a share of ``max_epochs``, rounded down.
    * ``swa_lrs``: the learning rate, or one for each parameter group. The rate moves there within ``annealing_epochs``
      epochs (``annealing_strategy``: cos or linear), and the module's own scheduler rests from then on.
    * ``avg_fn(average, weight, n_averaged)``: another average than the mean. ``device``: where it lives (None: with the model).

    When training ends the average becomes the model's weights, and the statistics of batch normalization are measured
    again for it in one pass over the training data. Validation before that sees the trained weights, as these statistics
    are theirs, and a checkpoint loads as them: the average so far is beside them, the entry ``swa_unfinished``. One of the end has the
    average and its statistics as the entry ``ema``, which is what it loads as.
    Izmailov et al., Averaging Weights Leads to Wider Optima and Better Generalization (2018).
    Raises MisconfigurationError for arguments out of range, several optimizers or schedulers, and sharded models.
    """

    def __init__(
        self,
        swa_lrs: float | list[float],
        swa_epoch_start: int | float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: Literal["cos", "linear"] = "cos",
        avg_fn: AverageFunction | None = None,
        device: torch.device | str | None = "cpu",
        *,
        entry: str = "ema",
    ) -> None:
        late = isinstance(swa_epoch_start, int) and swa_epoch_start >= 1
        if not late and not (isinstance(swa_epoch_start, float) and 0 <= swa_epoch_start <= 1):
            raise MisconfigurationError(
                f"swa_epoch_start should be a >0 integer or a float between 0 and 1, got {swa_epoch_start!r}"
            )
        rates = swa_lrs if isinstance(swa_lrs, list) else [swa_lrs]
        if not rates or not all(isinstance(rate, float) and rate > 0 for rate in rates):
            raise MisconfigurationError(
                f"The `swa_lrs` should be a positive float, or a list of positive floats, got {swa_lrs!r}"
            )
        for rate in rates:
            check("swa_lrs", rate, PositiveFloat)
        check("annealing_epochs", annealing_epochs, NonNegativeInt)
        if annealing_strategy not in ("cos", "linear"):
            raise MisconfigurationError(f"annealing_strategy={annealing_strategy!r}: choose 'cos' or 'linear'")
        if device is not None and not isinstance(device, (torch.device, str)):
            raise MisconfigurationError(f"device is expected to be a torch.device or a str, got {device!r}")
        super().__init__(device, use_buffers=False, avg_fn=avg_fn, entry=entry)
        self.swa_lrs, self.swa_epoch_start = swa_lrs, swa_epoch_start
        self.annealing_epochs, self.annealing_strategy = annealing_epochs, annealing_strategy
        self.unused_hooks = frozenset({"on_validation_start", "on_validation_end", "on_train_batch_end"})
        self._start = 0
        self._scheduler: SWALR | None = None
        self._scheduler_state: dict[str, Any] | None = None
        self._resting: list[LRSchedulerConfig] = []

    @property
    def swa_start(self) -> int:
        """The first epoch that is averaged, counted from 0; known once a fit began."""
        return self._start

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None and epoch_idx >= self._start

    # -- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        state = self._scheduler_state if self._scheduler is None else self._scheduler.state_dict()
        return super().state_dict() | {"scheduler_state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._scheduler_state = state_dict["scheduler_state"]

    def averages(self) -> dict[str, Any]:
        entries = super().averages()
        if self._backup is None and self.entry == "ema" and self.entry in entries:
            entries[_UNFINISHED] = entries.pop(self.entry)
        return entries

    def load_averages(self, entries: dict[str, Any]) -> None:
        """Load the averaged parameters; statistics that were measured for them are measured again."""
        names = tensor_owners(self._module, False) if self._module is not None else {}
        saved = (entries.get(_UNFINISHED) if self.entry == "ema" else None) or entries.get(self.entry) or {}
        averages = {name: tensor for name, tensor in saved.items() if name in names}
        super().load_averages({self.entry: averages})

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        """Save the module's own scheduler; that of the averaging is this callback's state."""
        if self._scheduler is not None:
            checkpoint["lr_schedulers"] = [config.scheduler.state_dict() for config in self._resting]

    # -- the learning rate -----------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            if isinstance(trainer.strategy, ShardedStrategy):
                raise MisconfigurationError("SWA does not currently support sharded models: use EMAWeightAveraging")
            self._scheduler, self._scheduler_state, self._resting = None, None, []

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        if len(trainer.optimizers) != 1:
            raise MisconfigurationError(f"SWA currently works with 1 `optimizer`, not {len(trainer.optimizers)}")
        if len(trainer.lr_scheduler_configs) > 1:
            raise MisconfigurationError("SWA currently not supported for more than 1 `lr_scheduler`")
        start = self.swa_epoch_start
        if isinstance(start, float):
            if trainer.max_epochs == -1:
                raise MisconfigurationError(
                    "SWA with `swa_epoch_start` as a float is not supported when `max_epochs=-1`: give a number of epochs"
                )
            start = int(trainer.max_epochs * start)
        self._start = max(start - 1, 0)

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        super().on_train_start(trainer, pl_module)
        if self._scheduler_state is not None:
            self._take_over(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Module) -> None:
        if self._scheduler is None and trainer.current_epoch >= self._start:
            self._take_over(trainer)

    def _take_over(self, trainer: Trainer) -> None:
        """Take the learning rate over from the schedule."""
        optimizer, self._resting = trainer.optimizers[0], list(trainer.lr_scheduler_configs)
        rates = self.swa_lrs if isinstance(self.swa_lrs, list) else [self.swa_lrs] * len(optimizer.param_groups)
        for rate, group in zip(rates, optimizer.param_groups, strict=True):
            group["initial_lr"] = rate
        scheduler = SWALR(
            optimizer,
            swa_lr=rates,  # type: ignore[arg-type]
            anneal_epochs=self.annealing_epochs,
            anneal_strategy=self.annealing_strategy,
        )
        if self._scheduler_state is not None:
            scheduler.load_state_dict(self._scheduler_state)
        for config in self._resting:
            if config.interval != "epoch" or config.frequency != 1:
                rank_zero_warn(f"SWA is currently only supported every epoch. Found {config}")
            rank_zero_info(f"Swapping scheduler `{type(config.scheduler).__name__}` for `SWALR`")
        self._scheduler = scheduler
        trainer.lr_scheduler_configs[:] = [LRSchedulerConfig(scheduler)]

    # -- the end ---------------------------------------------------------------------------------------------------

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        super().on_train_end(trainer, pl_module)
        if self._backup is not None:
            self._backup += self._measure_statistics(trainer, pl_module)

    def _measure_statistics(self, trainer: Trainer, module: Module) -> list[torch.Tensor]:
        """Measure batch normalization statistics for the averaged weights; return the former ones."""
        norms = {name: m for name, m in module.named_modules() if isinstance(m, _BatchNorm) and m.track_running_stats}
        if not norms:
            return []
        if not module.automatic_optimization:
            rank_zero_warn(
                "SWA cannot measure the statistics of batch normalization with manual optimization: its training_step would "
                "train; call torch.optim.swa_utils.update_bn after fit"
            )
            return []
        found = [(f"{name}.{key}", norm._buffers) for name, norm in norms.items() for key in _STATISTICS]
        trained = [_held(holder, name).clone() for name, holder in found]
        momenta = {name: norm.momentum for name, norm in norms.items()}
        for norm in norms.values():
            norm.reset_running_stats()
            norm.momentum = None  # the mean of all batches
        try:
            with trainer.run_state.logging_into(ResultCollection("train")):
                _pass_over(trainer, module)
        finally:
            for name, norm in norms.items():
                norm.momentum = momenta[name]
        for name, holder in found:
            value = _held(holder, name)
            if value.is_floating_point():
                value.copy_(trainer.strategy.all_reduce(value))
            self._owners[name], self._averages[name] = holder, value.clone()
        return trained


def _held(holder: dict[str, Any], name: str) -> torch.Tensor:
    tensor: torch.Tensor = holder[name.rpartition(".")[2]]
    return tensor


@torch.no_grad()
def _pass_over(trainer: Trainer, module: Module) -> None:
    """Run one epoch of forward passes through ``training_step``."""
    move, step = trainer.data.transfer(module), trainer.precision_plugin.wrap(module.training_step)
    trainer.enter("training_step")
    with keeping_modes(module):
        module.train()
        for index, batch in enumerate(trainer.data.train_batches(trainer.progress.epoch, 0)):
            moved = batch if move is None else move(batch)
            trainer.logged.batch.set(moved)
            step(moved, index)
