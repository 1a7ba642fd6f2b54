"""Log learning rates, under the name, arguments and keys of Lightning's callback.

Users pass it as a callback. Loggers and plots of existing projects rely on the keys: they stay.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

import torch

from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.rank_zero import rank_zero_warn
from arclight.optim.optimizer import MixedOptimizer
from arclight.trainer.callback import Callback

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer


class LearningRateMonitor(Callback):
    """Log each optimizer's learning rate as ``lr-<Optimizer>``.

    ``/pg<n>`` follows for each of several parameter groups.

    A recipe's optimizer is called by the rules of its groups: ``lr-adamw``, ``lr-muon+adamw``.

    ``logging_interval`` is ``step`` (at the trainer's ``log_every_n_steps``), ``epoch``, or None for whatever
    each optimizer's scheduler steps by (both, if it has none). ``log_momentum`` and ``log_weight_decay`` log these
    as ``<name>-momentum`` and ``<name>-weight_decay``. A scheduler's ``name`` replaces ``lr-<Optimizer>``;
    of two with the same name the second gets ``-1``, and so on; a parameter group's ``name`` replaces ``pg<n>``.
    Groups that are added during training, as by finetuning, are logged from then on. ``log_key_prefix`` goes before
    every name. The logged value is the one that its step uses; callbacks can monitor it.
    Raises MisconfigurationError without a logger, and for groups of one optimizer with the same name.
    """

    def __init__(
        self,
        logging_interval: Literal["step", "epoch"] | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
        log_key_prefix: str | None = None,
    ) -> None:
        if logging_interval not in (None, "step", "epoch"):
            raise MisconfigurationError(
                f"LearningRateMonitor(logging_interval={logging_interval!r}): logging_interval should be `step` or `epoch` "
                "or `None`",
            )
        self.logging_interval = logging_interval
        self.log_momentum, self.log_weight_decay = log_momentum, log_weight_decay
        self.log_key_prefix = log_key_prefix or ""
        unused = {"epoch": "on_train_batch_start", "step": "on_train_epoch_start"}
        self.unused_hooks = frozenset({unused[logging_interval]} if logging_interval else ())
        self.lrs: dict[str, list[float]] = {}
        self.last_momentum_values: dict[str, float | None] = {}
        self.last_weight_decay_values: dict[str, float | None] = {}
        self._logged_at = -1

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        if not trainer.loggers:
            raise MisconfigurationError(
                "Cannot use `LearningRateMonitor` callback with `Trainer` that has no logger: give it one, or leave out "
                "this callback"
            )
        watched = watched_optimizers(trainer, self.log_key_prefix)
        if self.log_momentum and any(momentum(group) is None for _, o, _ in watched for group in o.param_groups):
            rank_zero_warn(
                "LearningRateMonitor(log_momentum=True), but some optimizers do not have momentum. Theirs is logged as 0.",
                category=RuntimeWarning,
            )
        names = [name for names, _, _ in watched for name in names]
        self.lrs = {name: [] for name in names}
        self.last_momentum_values = {f"{name}-momentum": None for name in names}
        self.last_weight_decay_values = {f"{name}-weight_decay": None for name in names}
        self._logged_at = -1

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        step = trainer.reporter.steps + 1  # the step that this batch is part of
        every = trainer.log_every_n_steps or sys.maxsize
        if _steps(trainer) and step % every == 0 and step != self._logged_at:
            self._logged_at = step
            self._log(trainer, "step", step - trainer.behavior.zero_based_rows)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Module) -> None:
        if trainer.progress.batch == 0:  # a resume in the middle of an epoch has logged this already
            self._log(trainer, "epoch", trainer.reporter.steps)

    def _log(self, trainer: Trainer, interval: str, step: int) -> None:
        stats: dict[str, float] = {}
        for names, optimizer, own_interval in watched_optimizers(trainer, self.log_key_prefix):
            self._add_groups(names)
            if self.logging_interval is not None or own_interval in (interval, None):
                stats.update(self._read(names, optimizer))
        trainer.run_state.metrics.callback.update({name: torch.tensor(value) for name, value in stats.items()})
        if stats and trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics({"epoch": trainer.current_epoch, **stats}, step)

    def _add_groups(self, names: list[str]) -> None:
        """Add lists for new groups; a group that was the only one continues as the first of several."""
        for name in names:
            only = name.removesuffix("/pg1")
            if only != name and only in self.lrs:
                self.lrs[name] = self.lrs.pop(only)
            self.lrs.setdefault(name, [])

    def _read(self, names: list[str], optimizer: Optimizer) -> dict[str, float]:
        stats: dict[str, float] = {}
        for name, group in zip(names, optimizer.param_groups, strict=True):
            stats[name] = float(group["lr"])
            self.lrs[name].append(stats[name])
            if self.log_momentum:
                stats[f"{name}-momentum"] = self.last_momentum_values[f"{name}-momentum"] = momentum(group) or 0.0
            if self.log_weight_decay and (decay := group.get("weight_decay")) is not None:
                stats[f"{name}-weight_decay"] = self.last_weight_decay_values[f"{name}-weight_decay"] = float(decay)
        return stats


def _steps(trainer: Trainer) -> bool:
    """Return True for a batch that closes its accumulation window: its step uses the rates."""
    full = trainer.window.count + 1 >= trainer.accumulate_grad_batches
    return full or (trainer.window_ends_with_epoch and trainer.is_last_batch)


def momentum(group: dict[str, Any]) -> float | None:
    """Return a parameter group's momentum (Adam's first beta), or None."""
    value = group["betas"][0] if "betas" in group else group.get("momentum")
    return None if value is None else float(value)


def watched_optimizers(trainer: Trainer, prefix: str) -> list[tuple[list[str], Optimizer, str | None]]:
    """List group names, optimizer and interval of each scheduler and unscheduled optimizer.

    The interval of an optimizer without a scheduler is None.
    """
    watched: list[tuple[str, Optimizer, str | None]] = [
        (config.name or f"lr-{_display_name(config.scheduler.optimizer)}", config.scheduler.optimizer, config.interval)
        for config in trainer.lr_scheduler_configs
    ]
    known = {id(optimizer) for _, optimizer, _ in watched}
    watched += [(f"lr-{_display_name(o)}", o, None) for o in trainer.optimizers if id(o) not in known]
    named, counts = [], Counter[str]()
    for name, optimizer, interval in watched:
        unique = f"{name}-{counts[name]}" if counts[name] else name
        counts[name] += 1
        named.append((group_names(prefix + unique, optimizer), optimizer, interval))
    return named


def _display_name(optimizer: Optimizer) -> str:
    """Return an optimizer's class name, or the rules of a `MixedOptimizer`'s groups."""
    kinds = dict.fromkeys(str(group["kind"]) for group in optimizer.param_groups if "kind" in group)
    return "+".join(kinds) if isinstance(optimizer, MixedOptimizer) else type(optimizer).__name__


def group_names(name: str, optimizer: Optimizer) -> list[str]:
    """Return one name for each of an optimizer's parameter groups.

    Raises MisconfigurationError if two would be the same.
    """
    groups = optimizer.param_groups
    if len(groups) == 1:
        return [f"{name}/{groups[0]['name']}" if groups[0].get("name") else name]
    own = [str(group.get("name", f"pg{number}")) for number, group in enumerate(groups, 1)]
    if twice := [group for group, count in Counter(own).items() if count > 1]:
        raise MisconfigurationError(
            "A single `Optimizer` cannot have multiple parameter groups with identical `name` values: "
            f"{name} has {', '.join(twice)} more than once"
        )
    return [f"{name}/{group}" for group in own]
