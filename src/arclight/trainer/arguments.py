"""The trainer's arguments: checked one by one and against each other, before anything else happens."""

from __future__ import annotations

import dataclasses
import difflib
import math
from typing import Any

from arclight._intervals import NonNegativeFloat, NonNegativeInt, PositiveInt, describe, fits
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.rank_zero import rank_zero_info
from arclight.trainer.conventions import Conventions
from arclight.trainer.settings import TrainerSettings

_FIELDS = {f.name: f.default for f in dataclasses.fields(TrainerSettings)}

ATTRIBUTES = (
    "fast_dev_run", "max_epochs", "min_epochs", "max_steps", "min_steps", "limit_train_batches", "limit_val_batches",
    "limit_test_batches", "limit_predict_batches", "overfit_batches", "val_check_interval", "check_val_every_n_epoch",
    "num_sanity_val_steps", "log_every_n_steps", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm",
    "inference_mode", "use_distributed_sampler", "detect_anomaly", "barebones", "reload_dataloaders_every_n_epochs",
)  # fmt: skip
"""Settings that are plain attributes of a trainer, which callbacks may change."""

_LIMITS = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches")
_BAREBONES = {
    "enable_checkpointing": "Checkpointing", "logger": "Logging", "enable_progress_bar": "The progress bar",
    "log_every_n_steps": "Logging", "enable_model_summary": "Model summary", "num_sanity_val_steps": "Sanity checking",
    "fast_dev_run": "A development run", "detect_anomaly": "Anomaly detection", "profiler": "Profiling",
}  # fmt: skip
"""What a bare run goes without, and its name."""


class _Given(TrainerSettings):
    """Settings as a trainer takes them: with times as objects and infinity too, so that ranges are checked here, in other words."""

    def __post_init__(self) -> None:
        """Leave the check to `_check_ranges`."""


def check(given: dict[str, Any], conventions: Conventions) -> TrainerSettings:
    """Settings from a trainer's arguments, which are changed where one decides on another.

    Raises TypeError naming the nearest argument for an unknown one, MisconfigurationError for a value out of its range.
    """
    _check_names(given)
    if given["barebones"]:
        _go_bare(given)
    values = {name: given[name] for name in _FIELDS if given.get(name) is not None}
    values["num_sanity_val_steps"] = values.get("num_sanity_val_steps", conventions.sanity_val_steps)
    values["check_val_every_n_epoch"] = given["check_val_every_n_epoch"]
    for name in ("accelerator", "strategy", "devices", "precision", "profiler"):
        if not isinstance(values.get(name), (str, int)):
            values.pop(name, None)  # an object, or a list of devices: not a setting
    settings = _Given(**values)
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


def _check_names(given: dict[str, Any]) -> None:
    import inspect

    from arclight.trainer.trainer import Trainer

    names = [n for n, p in inspect.signature(Trainer.__init__).parameters.items() if p.kind is p.KEYWORD_ONLY]
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(
                f"Trainer has no argument {name!r}: __init__() got an unexpected keyword argument {name!r}{hint}"
            )


def _go_bare(given: dict[str, Any]) -> None:
    """Turn off everything that costs time beside the loop. Raises ValueError for what was asked for all the same."""
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
"""What a 1 means, which as a count and as a share are far apart."""


def _batches(value: int | float, name: str, asked: bool = True) -> int | float:
    """A share in [0, 1] or a count of batches."""
    if value == 1 and asked:
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
