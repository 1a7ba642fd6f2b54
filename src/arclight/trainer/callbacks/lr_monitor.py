"""Log learning rates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from arclight.trainer.callback import Callback

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer


class LearningRateMonitor(Callback):
    """Log each optimizer's learning rate as ``lr-<Optimizer>``, with ``/pg<n>`` for each of several parameter groups.

    ``logging_interval`` is ``step`` (at the trainer's ``log_every_n_steps``), ``epoch``, or None for whatever
    each optimizer's scheduler steps by. ``log_momentum`` and ``log_weight_decay`` log these under
    ``<name>-momentum`` and ``<name>-weight_decay``. A scheduler's ``name`` replaces ``lr-<Optimizer>``;
    of two with the same name the second gets ``-1``, and so on. A value is the one used in the step at which it is
    logged.
    """

    def __init__(
        self,
        logging_interval: Literal["step", "epoch"] | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
        log_key_prefix: str | None = None,
    ) -> None:
        if logging_interval not in (None, "step", "epoch"):
            raise ValueError(
                f"LearningRateMonitor(logging_interval={logging_interval!r}): choose 'step', 'epoch' or None",
            )
        self.logging_interval, self.log_momentum, self.log_weight_decay = (
            logging_interval,
            log_momentum,
            log_weight_decay,
        )
        self.log_key_prefix = log_key_prefix or ""
        self.unused_hooks = frozenset(
            {"on_train_batch_start"}
            if logging_interval == "epoch"
            else {"on_train_epoch_start"}
            if logging_interval == "step"
            else (),
        )
        self.lrs: dict[str, list[float]] = {}
        self.last_momentum_values: dict[str, float | None] = {}
        self.last_weight_decay_values: dict[str, float | None] = {}
        self._watched: list[tuple[str, Optimizer, str]] = []
        self._logged_at = -1

    @property
    def lr_sch_names(self) -> list[str]:
        """Names of the optimizers, without their parameter groups."""
        return [name for name, _, _ in self._watched]

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        if not trainer.loggers:
            raise ValueError("LearningRateMonitor needs a logger; give the Trainer one, or leave out this callback")
        self._watched = watched_optimizers(trainer)
        names = [f"{name}{group}" for name, optimizer, _ in self._watched for group in group_names(optimizer)]
        self.lrs = {name: self.lrs.get(name, []) for name in names}
        self._logged_at = -1

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step + 1  # the step that this batch is part of
        if step % trainer.log_every_n_steps == 0 and step != self._logged_at:
            self._logged_at = step
            self._log(trainer, "step", step)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Module) -> None:
        if trainer.progress.batch == 0:  # a resume in the middle of an epoch has logged this already
            self._log(trainer, "epoch", trainer.global_step)

    def _log(self, trainer: Trainer, interval: str, step: int) -> None:
        stats: dict[str, float] = {}
        for name, optimizer, own_interval in self._watched:
            if (self.logging_interval or own_interval) == interval:
                stats.update(self._read(name, optimizer))
        if stats and trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics({"epoch": trainer.current_epoch, **stats}, step)

    def _read(self, name: str, optimizer: Optimizer) -> dict[str, float]:
        stats = {}
        for suffix, group in zip(group_names(optimizer), optimizer.param_groups, strict=True):
            key = f"{name}{suffix}"
            self.lrs[key].append(float(group["lr"]))
            stats[self.log_key_prefix + key] = self.lrs[key][-1]
            if (
                self.log_momentum
                and (momentum := group["betas"][0] if "betas" in group else group.get("momentum")) is not None
            ):
                self.last_momentum_values[f"{key}-momentum"] = stats[f"{self.log_key_prefix}{key}-momentum"] = momentum
            if self.log_weight_decay and (decay := group.get("weight_decay")) is not None:
                self.last_weight_decay_values[f"{key}-weight_decay"] = stats[
                    f"{self.log_key_prefix}{key}-weight_decay"
                ] = decay
        return stats


def watched_optimizers(trainer: Trainer) -> list[tuple[str, Optimizer, str]]:
    """Name, optimizer and interval of each scheduler, then of each optimizer without one."""
    scheduled = [
        (config.name or f"lr-{type(config.scheduler.optimizer).__name__}", config.scheduler.optimizer, config.interval)
        for config in trainer.lr_scheduler_configs
    ]
    known = {id(optimizer) for _, optimizer, _ in scheduled}
    free = [
        (f"lr-{type(optimizer).__name__}", optimizer, "step")
        for optimizer in trainer.optimizers
        if id(optimizer) not in known
    ]
    named, counts = [], dict[str, int]()
    for name, optimizer, interval in [*scheduled, *free]:
        count = counts[name] = counts.get(name, -1) + 1
        named.append((f"{name}-{count}" if count else name, optimizer, interval))
    return named


def group_names(optimizer: Optimizer) -> list[str]:
    """What tells an optimizer's parameter groups apart; nothing where there is one."""
    if len(optimizer.param_groups) == 1:
        return [""]
    return [f"/{group.get('name', f'pg{number}')}" for number, group in enumerate(optimizer.param_groups, 1)]
