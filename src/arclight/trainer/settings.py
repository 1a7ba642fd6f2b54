"""Define settings of the Trainer, and the behaviours that ``compat`` changes, without torch.

A recipe's table ``[trainer]`` is a `TrainerSettings`, and ``Trainer(...)`` takes the same arguments; `TrainerBehavior` holds the
conventions in which ``compat.lightning.trainer`` differs from ours. `Trainer` calls `check_arguments`. Field names are public, and their
docstrings are texts of ``arclight train --help``.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from arclight._intervals import (
    Checked,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFraction,
    PositiveInt,
    describe,
    fits,
)
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.rank_zero import rank_zero_info

Precision = Literal["auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true"]


@dataclass(frozen=True, kw_only=True)
class TrainerSettings(Checked):
    """Length, precision and devices of training."""

    accelerator: str = "auto"
    """Kind of device: auto, cpu, cuda or mps."""
    devices: PositiveInt | Literal["auto", -1] = "auto"
    """Number of processes on this node, one device each."""
    num_nodes: PositiveInt = 1
    """Number of machines."""
    strategy: str = "auto"
    """Distributed strategy: auto, ddp, ddp_spawn, ddp_fork, fsdp, model_parallel, replicas."""
    precision: Precision = "32-true"
    """Arithmetic of forward and backward; auto measures whether bf16-mixed is faster here than 32-true."""
    max_epochs: NonNegativeInt | Literal[-1] | None = None
    """Epochs to train; none with max_steps and max_time unset means 1000, -1 no limit."""
    min_epochs: NonNegativeInt | None = None
    """Minimum number of epochs before a stop request is obeyed."""
    max_steps: NonNegativeInt | Literal[-1] = -1
    """Optimizer steps; -1 means no limit."""
    min_steps: NonNegativeInt | None = None
    """Minimum number of optimizer steps before a stop request is obeyed."""
    max_time: str | None = None
    """Time limit of training, as "DD:HH:MM:SS" or a duration such as "2h"."""
    fast_dev_run: NonNegativeInt | bool = False
    """Run this many batches of everything and write nothing, to find mistakes."""
    limit_train_batches: NonNegativeInt | Fraction | None = None
    """Batches per epoch: a count, or a share in [0, 1]."""
    limit_val_batches: NonNegativeInt | Fraction | None = None
    """Batches per validation run: a count, or a share in [0, 1]."""
    limit_test_batches: NonNegativeInt | Fraction | None = None
    """Batches per test run: a count, or a share in [0, 1]."""
    limit_predict_batches: NonNegativeInt | Fraction | None = None
    """Batches to predict: a count, or a share in [0, 1]."""
    overfit_batches: NonNegativeInt | Fraction = 0.0
    """Train and validate on the same few batches: a count, or a share in [0, 1]; 0 for all."""
    val_check_interval: PositiveInt | PositiveFraction | str | None = None
    """Validate after this many batches (count), this share of an epoch, or this time ("DD:HH:MM:SS")."""
    check_val_every_n_epoch: PositiveInt | None = 1
    """Validate at the end of every n-th epoch; none counts val_check_interval across epochs."""
    num_sanity_val_steps: NonNegativeInt | Literal[-1] = 0
    """Validation batches run before training, to find mistakes early; -1 means all."""
    reload_dataloaders_every_n_epochs: NonNegativeInt = 0
    """Epochs between two calls of the dataloader hooks; 0 never calls them again."""
    use_distributed_sampler: bool = True
    """Shard samples over ranks with a distributed sampler."""
    accumulate_grad_batches: PositiveInt = 1
    """Batches per optimizer step; an accumulation window may continue in the next epoch."""
    gradient_clip_val: NonNegativeFloat | None = None
    """Largest gradient norm (or value); none or 0 means no clipping."""
    gradient_clip_algorithm: Literal["norm", "value"] | None = None
    """Clip the global norm (the default) or each element."""
    log_every_n_steps: NonNegativeInt = 50
    """Steps between two rows of logged values; 0 writes rows of epochs only."""
    enable_progress_bar: bool = True
    """Show progress in the terminal."""
    profiler: str | None = None
    """Profiler: simple, advanced or pytorch."""
    detect_anomaly: bool = False
    """Find the operation whose backward gave NaN; slow."""
    deterministic: bool | Literal["warn"] = False
    """Use only deterministic kernels; warn reports others instead of refusing them."""
    benchmark: bool | None = None
    """Let cuDNN time its kernels for each shape."""
    inference_mode: bool = True
    """Evaluate under torch.inference_mode rather than no_grad; the validations of a fit are always under no_grad."""
    sync_batchnorm: bool = False
    """Synchronise batch norms over all ranks."""
    barebones: bool = False
    """Turn off everything that costs time beside the loop itself."""


@dataclass(frozen=True, kw_only=True)
class TrainerBehavior:
    """Behaviors in which our conventions and Lightning's differ, one field each.

    The defaults are ours; ``arclight.compat.lightning.trainer`` has the other set.
    """

    zero_grad_first: bool = False
    """Clear gradients between forward and backward, as a closure does, rather than right after the optimizer's step."""
    closures: bool = False
    """Each optimizer's step is given the closure that runs forward and backward; else only those that ask for one."""
    count_optimizer_steps: bool = False
    """``global_step`` counts each optimizer's steps rather than batches in which any of them stepped."""
    windows_span_epochs: bool = True
    """An accumulation window may begin in one epoch and end in the next; else the epoch's end closes it."""
    weigh_windows: bool = True
    """Batches of a window count by their samples; else each counts 1 / ``accumulate_grad_batches``."""
    stop_on_nonfinite: bool = True
    """A NaN or infinite loss ends the run with NonFiniteLossError."""
    sanity_val_steps: int = 0
    """Default of ``num_sanity_val_steps``."""
    checkpoint_suffix: str = ""
    """Ending of checkpoint names; empty for folders."""
    run_folders: bool = True
    """Files go to ``runs/<name>/<n>/`` with a report; else where loggers and callbacks put them."""
    default_logger: Callable[[str], Any] | None = None
    """Makes the logger of a run that was given none, from ``default_root_dir``; None for a CSV file in the run folder."""
    version: tuple[str, str] = ("arclight_version", "0.1.0")
    """The entry of a checkpoint that names what wrote it."""
    evaluate_best: bool = False
    """``validate``, ``test`` and ``predict`` without a module, after a fit, load the best checkpoint; else they take the module as it is."""
    exit_on_interrupt: bool = False
    """After Ctrl+C has been dealt with the process ends with status 1; else KeyboardInterrupt reaches the caller."""
    metrics_by_batch: bool = False
    """A progress bar asks for its metrics after every batch (if that does not wait for a device), not ten times a second."""
    callbacks_factory: str = "arclight.callbacks_factory"
    """Group of the entry points by which installed packages bring callbacks."""
    validate_before_stop: bool = False
    """A fit that ``should_stop`` ends within an epoch validates before it leaves, if that epoch is one that validates."""
    skip_leaves_out_validation: bool = False
    """An epoch whose rest ``on_train_batch_start`` skips is not validated."""
    frequency_counts_batches: bool = False
    """A scheduler's ``frequency`` at step interval counts the batches of its epoch, not the updates of the fit."""
    drop_unpicklable_hparams: bool = False
    """A run takes what cannot be pickled out of its module's ``hparams``; else a checkpoint alone leaves out what is no plain data."""
    zero_based_rows: bool = False
    """A logger's row of step values is numbered by the step that made it, counted from 0, not by steps completed."""
    fetch_labels: tuple[str, str, str, str] = (
        "train_dataloader_next", "val_dataloader_next", "test_dataloader_next", "predict_dataloader_next"
    )  # fmt: skip
    """Names of the wait for a batch in profilers' reports: in training, validation, test and prediction."""
    refuse_removed_hooks: bool = False
    """A module that has a hook of Lightning 1.x is refused; else a warning names what to use in its place."""

    def fetch_label(self, stage: str) -> str:
        """Return the name of the wait for a batch of ``stage`` in profilers' reports."""
        return self.fetch_labels[("train", "validate", "test", "predict").index(stage)]


_FIELDS = {f.name: f.default for f in dataclasses.fields(TrainerSettings)}

_LIMITS = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches")
_BAREBONES = {
    "enable_checkpointing": "Checkpointing", "logger": "Logging", "enable_progress_bar": "The progress bar",
    "log_every_n_steps": "Logging", "enable_model_summary": "Model summary", "num_sanity_val_steps": "Sanity checking",
    "fast_dev_run": "A development run", "detect_anomaly": "Anomaly detection", "profiler": "Profiling",
}  # fmt: skip
"""Arguments that ``barebones`` turns off, and how messages call them."""


class _CheckedSettings(TrainerSettings):
    """Settings of a Trainer call, which may hold time objects and infinity."""

    def __post_init__(self) -> None:
        """Leave the check to `_check_ranges`."""


def check_arguments(given: dict[str, Any], unknown: dict[str, Any], behavior: TrainerBehavior) -> TrainerSettings:
    """Check a trainer's arguments and return them as settings.

    An argument that another one determines is changed. Raises TypeError naming the nearest argument for an unknown one,
    MisconfigurationError for a value out of its range.
    """
    _check_names(given, unknown)
    if given["barebones"]:
        _apply_barebones(given)
    values = {name: given[name] for name in _FIELDS if given.get(name) is not None}
    values["num_sanity_val_steps"] = values.get("num_sanity_val_steps", behavior.sanity_val_steps)
    values["check_val_every_n_epoch"] = given["check_val_every_n_epoch"]
    for name in ("accelerator", "strategy", "devices", "precision", "profiler"):
        if not isinstance(values.get(name), (str, int)):
            values.pop(name, None)  # an object, or a list of devices: not a setting
    settings = _CheckedSettings(**values)
    _check_ranges(settings)
    limits = {name: 1.0 if getattr(settings, name) is None else getattr(settings, name) for name in _LIMITS}
    changes: dict[str, Any] = {n: _batches(limits[n], n, getattr(settings, n) is not None) for n in limits}
    if not isinstance(settings.val_check_interval, (int, float, type(None))):
        pass  # a time
    elif settings.val_check_interval is not None:
        changes["val_check_interval"] = _batches(settings.val_check_interval, "val_check_interval")
    if settings.num_sanity_val_steps == -1:
        changes["num_sanity_val_steps"] = math.inf
    if settings.overfit_batches:
        changes["overfit_batches"] = _batches(settings.overfit_batches, "overfit_batches")
        changes["limit_train_batches"] = changes["limit_val_batches"] = changes["overfit_batches"]
    if settings.fast_dev_run:
        changes |= _development(int(settings.fast_dev_run), bool(settings.overfit_batches))
    return dataclasses.replace(settings, **changes)


def _check_names(given: dict[str, Any], unknown: dict[str, Any]) -> None:
    for name in unknown:
        near = difflib.get_close_matches(name, given, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise TypeError(
            f"Trainer has no argument {name!r}: __init__() got an unexpected keyword argument {name!r}{hint}"
        )


def _apply_barebones(given: dict[str, Any]) -> None:
    """Disable everything that costs time beside the loop, for ``barebones``."""
    for name, what in _BAREBONES.items():
        if given[name] not in (None, False, 0):
            raise MisconfigurationError(
                f"`Trainer(barebones=True, {name}={given[name]!r})` was passed. {what} can impact raw speed so it is disabled "
                "in barebones mode: leave one of the two out"
            )
    given |= dict.fromkeys(("enable_checkpointing", "logger", "enable_progress_bar", "enable_model_summary"), False)
    given |= {"log_every_n_steps": 0, "num_sanity_val_steps": 0}
    off = "".join(f"\n - {what}: `Trainer({name}=...)`" for name, what in _BAREBONES.items())
    rank_zero_info(
        "You are running in `Trainer(barebones=True)` mode: all that may impact raw speed is off, to look at the cost of the loop "
        f"itself:{off}"
    )


def _check_ranges(settings: TrainerSettings) -> None:
    every = settings.check_val_every_n_epoch
    if every is not None and not isinstance(every, int):
        raise MisconfigurationError(
            f"`check_val_every_n_epoch` should be an integer, found {every!r}: the number of epochs from one validation to the next"
        )
    for name, least in {"check_val_every_n_epoch": 1, "log_every_n_steps": 0, "num_sanity_val_steps": -1}.items():
        value = getattr(settings, name)
        if value is not None and value < least:
            raise MisconfigurationError(f"`{name}` must be at least {least}, got {value}")
    reload = settings.reload_dataloaders_every_n_epochs
    if not isinstance(reload, int) or reload < 0:
        raise MisconfigurationError(f"`reload_dataloaders_every_n_epochs` should be an int >= 0, got {reload}.")
    if not isinstance(settings.accumulate_grad_batches, int) or settings.accumulate_grad_batches < 1:
        raise MisconfigurationError(
            f"`accumulate_grad_batches` should be an int of at least 1, got {settings.accumulate_grad_batches!r}; for a number that "
            "changes, use the GradientAccumulationScheduler callback"
        )
    clip = settings.gradient_clip_val
    if clip is not None and (isinstance(clip, bool) or not isinstance(clip, (int, float))):
        raise TypeError(f"`gradient_clip_val` should be an int or a float. Got {clip}.")
    bounds = {
        "gradient_clip_val": NonNegativeFloat,
        "min_epochs": NonNegativeInt,
        "min_steps": NonNegativeInt,
        "num_nodes": PositiveInt,
    }
    for name, hint in bounds.items():
        if (value := getattr(settings, name)) is not None and not fits(hint, value):
            raise MisconfigurationError(f"`{name}` must be {describe(hint)}, got {value}")
    if settings.gradient_clip_algorithm not in (None, "norm", "value"):
        raise MisconfigurationError(
            f"`gradient_clip_algorithm` {settings.gradient_clip_algorithm} is invalid. Allowed algorithms: ['value', 'norm']."
        )
    if isinstance(settings.fast_dev_run, int) and settings.fast_dev_run < 0:
        raise MisconfigurationError(
            f"fast_dev_run={settings.fast_dev_run!r} is not a valid configuration. It should be >= 0."
        )
    interval = settings.val_check_interval
    if interval is not None and isinstance(interval, int) and not isinstance(interval, bool) and interval == 0:
        raise MisconfigurationError(
            "`val_check_interval` must be above 0: leave it out to validate when an epoch is over"
        )
    if interval is not None and isinstance(interval, float) and settings.check_val_every_n_epoch is None:
        raise MisconfigurationError(
            "`val_check_interval` should be an integer or a time-based duration (str 'DD:HH:MM:SS', datetime.timedelta, or dict "
            f"kwargs for timedelta) when `check_val_every_n_epoch=None`. It is the share {interval} of an epoch."
        )
    if settings.max_steps < -1:
        raise MisconfigurationError(
            f"`max_steps` must be a non-negative integer or -1 (infinite steps). You passed in {settings.max_steps}."
        )
    if settings.max_epochs is not None and settings.max_epochs < -1:
        raise MisconfigurationError(
            f"`max_epochs` must be a non-negative integer or -1. You passed in {settings.max_epochs}."
        )


_ONE = {
    ("limit_train_batches", int): "1 batch per epoch will be used",
    ("limit_train_batches", float): "100% of the batches per epoch will be used",
    ("val_check_interval", int): "validation will run after every batch",
    ("val_check_interval", float): "validation will run at the end of the training epoch",
}
for _limit in (*_LIMITS[1:], "overfit_batches"):
    _ONE[_limit, int], _ONE[_limit, float] = "1 batch will be used", "100% of the batches will be used"
"""Notes on an argument of 1, by its type: a count of 1 and a share of 1 are far apart."""


def _batches(value: int | float, name: str, limited: bool = True) -> int | float:
    """Return a share in [0, 1] or a count of batches."""
    if value == 1 and limited:
        rank_zero_info(f"`Trainer({name}={value!r})` was configured so {_ONE[name, type(value)]}.")
    if 0 <= value <= 1:
        return value
    if value > 1 and value % 1.0 == 0:
        return int(value)
    raise MisconfigurationError(
        f"You have passed invalid value {value} for {name}, it has to be in [0.0, 1.0] or an int."
    )


def _development(count: int, overfit: bool) -> dict[str, Any]:
    changes = {
        "fast_dev_run": True if count == 1 else count, "max_epochs": 1, "max_steps": count, "num_sanity_val_steps": 0,
        "val_check_interval": 1.0, "check_val_every_n_epoch": 1, "limit_test_batches": count, "limit_predict_batches": count,
    }  # fmt: skip
    return changes if overfit else changes | {"limit_train_batches": count, "limit_val_batches": count}
