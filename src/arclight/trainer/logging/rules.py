"""Check the arguments of ``Module.log`` against its hook, once per name and hook.

``logging.results`` calls these for a new name or other arguments, `Module` for collections and refusals. In: hook, name and arguments;
out: `LogSettings`, or an error with Lightning's words. Checkpoints hold the settings: a new field needs a default. A new hook belongs in
one of the tuples here.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from arclight.fabric.errors import MisconfigurationError

# In a hook of a batch, each value may be shown on its own and may be part of the epoch's. Training shows each by default.
_TRAINING_BATCH = (
    "training_step",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_backward",
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "configure_gradient_clipping",
    "clip_gradients",
    "on_before_zero_grad",
    "optimizer_zero_grad",
)
_EVALUATION_BATCH = (
    "validation_step",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "test_step",
    "on_test_batch_start",
    "on_test_batch_end",
)
_ONCE_PER_EPOCH = (
    "on_train_start",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_test_start",
    "on_test_epoch_start",
    "on_test_epoch_end",
)
# What is logged before the first epoch, after the last, or outside of any would be seen by nobody.
_NOWHERE = frozenset(
    (
        *("setup", "teardown", "prepare_data", "configure_model", "configure_sharded_model", "configure_optimizers"),
        *("configure_callbacks", "train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"),
        *(
            "on_fit_start",
            "on_fit_end",
            "on_sanity_check_start",
            "on_sanity_check_end",
            "on_train_end",
            "on_validation_end",
        ),
        *("on_test_end", "on_exception", "state_dict", "load_state_dict", "on_save_checkpoint", "on_load_checkpoint"),
        *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "lr_scheduler_step"),
        *(
            "on_validation_model_zero_grad",
            "on_validation_model_eval",
            "on_validation_model_train",
            "on_test_model_eval",
        ),
        *("on_test_model_train", "on_predict_model_eval", "on_predict_model_train", "predict_step", "on_predict_start"),
        *("on_predict_end", "on_predict_epoch_start", "on_predict_epoch_end", "on_predict_batch_start"),
        "on_predict_batch_end",
    )
)

Allowed = tuple[tuple[bool, ...], tuple[bool, ...]]
_EITHER: Allowed = ((False, True), (False, True))
_ONLY_EPOCH: Allowed = ((False,), (True,))


def levels(hook: str, on_step: bool | None, on_epoch: bool | None) -> tuple[bool, bool]:
    """Return ``on_step`` and ``on_epoch`` with the hook's defaults filled in.

    Raises MisconfigurationError if the hook cannot log (so), RuntimeError for a hook that does not exist.
    """
    if hook in _NOWHERE:
        raise MisconfigurationError(
            f"You can't `self.log()` inside `{hook}`: nobody would see it. Log in a step or in a hook of an epoch, or write "
            "to the logger itself: `self.logger.log_metrics({...})`"
        )
    allowed: Allowed
    if hook in _TRAINING_BATCH:
        defaults, allowed = (True, False), _EITHER
    elif hook in _EVALUATION_BATCH:
        defaults, allowed = (False, True), _EITHER
    elif hook in _ONCE_PER_EPOCH:
        defaults, allowed = (False, True), _ONLY_EPOCH
    else:
        raise RuntimeError(f"Logging inside `{hook}` is not implemented: it is not a hook of a Module or a Callback")
    chosen = (
        defaults[0] if on_step is None else bool(on_step),
        defaults[1] if on_epoch is None else bool(on_epoch),
    )
    for option, value, choices in zip(("on_step", "on_epoch"), chosen, allowed, strict=True):
        if value not in choices:
            raise MisconfigurationError(
                f"You can't `self.log({option}={value})` inside `{hook}`: it must be one of {choices}"
            )
    if chosen == (False, False):
        raise MisconfigurationError("`self.log(on_step=False, on_epoch=False)` is not useful: set one of them")
    return chosen


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Settings of one logged name: reduction, destinations, display."""

    on_step: bool = False
    on_epoch: bool = True
    prog_bar: bool = False
    logger: bool = True
    reduce: str = "mean"
    enable_graph: bool = False
    sync_dist: bool = False
    sync_group: Any = None
    add_dataloader_idx: bool = True
    metric_attribute: str | None = None
    rank_zero_only: bool = False


def reduction(reduce_fx: Any) -> str:
    """Return the name of a reduction: ``mean``, ``sum``, ``min`` or ``max``.

    ``reduce_fx``: the name, or the function of that name. Raises MisconfigurationError for another one.
    """
    if isinstance(reduce_fx, str):
        name = {"avg": "mean"}.get(reduce_fx.lower(), reduce_fx.lower())
        if name in ("mean", "sum", "min", "max"):
            return name
    for function, name in _REDUCTIONS:
        if reduce_fx is function:
            return name
    raise MisconfigurationError(
        f"Only `self.log(..., reduce_fx={{min,max,mean,sum}})` are supported, got {reduce_fx!r}: they can be merged from "
        "the parts of an epoch and of several processes; for another reduction log a metric with compute() and reset()"
    )


_REDUCTIONS: tuple[tuple[Callable[..., Any], str], ...] = (
    (torch.mean, "mean"), (torch.sum, "sum"), (sum, "sum"), (torch.min, "min"), (min, "min"), (torch.max, "max"), (max, "max"),
)  # fmt: skip


def check_name(name: str, add_dataloader_idx: bool) -> None:
    """Refuse a name that ends as those of several loaders do."""
    if add_dataloader_idx and "/dataloader_idx_" in name:
        raise MisconfigurationError(
            f"You called `self.log` with the key `{name}`, but the trainer adds `/dataloader_idx_<n>` itself where there are "
            "several loaders; leave it out, or pass add_dataloader_idx=False"
        )


def refuse_value(name: str, value: Any) -> ValueError:
    """Return the error for a value that is not a number."""
    call = f"`self.log({name}, {value})` was called, but "
    if isinstance(value, torch.Tensor):
        return ValueError(f"{call}the tensor must have a single element; reduce it first, as in `{name}.mean()`")
    if isinstance(value, Mapping) and any(isinstance(inner, Mapping) for inner in value.values()):
        return ValueError(f"{call}nested dictionaries cannot be logged")
    hint = "; log_dict takes several at once" if hasattr(value, "items") else ""
    return ValueError(
        f"{call}`{type(value).__name__}` values cannot be logged: need a number, a one-element tensor or a metric with "
        f"compute() and reset(){hint}"
    )


# -- metrics: objects that gather an epoch themselves, such as torchmetrics' ---------------------------------------------


def is_metric(value: Any) -> bool:
    """Return True for a metric object, which gathers values by itself.

    A collection of metrics is none; ``log_dict`` takes it.
    """
    return (
        callable(getattr(value, "compute", None))
        and callable(getattr(value, "reset", None))
        and not isinstance(value, (torch.Tensor, numbers.Number))
        and not hasattr(value, "items")
    )


def metric_items(collection: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and metrics of a torchmetrics collection, without copies of shared states."""
    options: dict[str, bool] = {"keep_base": False}
    if getattr(collection, "_enable_compute_groups", False):
        options["copy_state"] = False
    yield from collection.items(**options)


def metric_attribute(module: nn.Module, name: str, metric: Any) -> str:
    """Return the attribute of ``module`` that holds ``metric``.

    A checkpoint saves and restores it by that name.

    Raises MisconfigurationError if no attribute holds it.
    """
    held: dict[str, Any] = {path: part for path, part in module.named_modules() if is_metric(part)}
    held |= {path: part for path, part in vars(module).items() if is_metric(part)}
    for path, part in held.items():
        if part is metric:
            return path
    problem = f"Could not find the attribute of {type(module).__name__} that holds the metric logged as {name!r}."
    if not held:
        raise MisconfigurationError(
            f"{problem} You can fix this by setting an attribute for the metric in your module: self.accuracy = ..."
        )
    raise MisconfigurationError(
        f"{problem} You can fix this by calling `self.log({name}, ..., metric_attribute=name)` where `name` is one of {list(held)}"
    )
