"""Evaluation and prediction: the same batches-and-hooks loop for validate, test and predict."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from arclight.trainer import reporting
from arclight.trainer.hooks import callback_hooks, overridden
from arclight.trainer.module import Module
from arclight.trainer.transfer import batch_transfer

if TYPE_CHECKING:
    from arclight.trainer.trainer import Trainer

PROGRESS_INTERVAL = 0.1
"""Seconds between two ``on_progress`` calls."""

_HOOK = {"validate": "validation", "sanity_check": "validation", "test": "test", "predict": "predict"}


def validate_during_fit(trainer: Trainer, module: Module) -> None:
    """The validation of a fit: training values are put aside and taken up again."""
    training_values, before, trainer.stage = trainer.logged, trainer.stage, "validate"
    try:
        run_evaluation(trainer, module, trainer.val_loaders)
    finally:
        trainer.logged, trainer.stage = training_values, before


@contextmanager
def evaluating(trainer: Trainer, module: Module, hook: str) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every submodule is in the mode it was in."""
    modes = {name: m.training for name, m in module.named_modules()}
    own_eval = getattr(module, f"on_{hook}_model_eval", None)
    if own_eval is not None and overridden(module, f"on_{hook}_model_eval", Module):
        own_eval()
    else:
        module.eval()
    try:
        with torch.inference_mode() if trainer.inference_mode else torch.no_grad():
            yield
    finally:
        _restore_modes(module, modes)
        if overridden(module, f"on_{hook}_model_train", Module):
            getattr(module, f"on_{hook}_model_train")()


def _restore_modes(module: nn.Module, modes: dict[str, bool]) -> None:
    for name, submodule in module.named_modules():
        if name in modes:
            submodule.training = modes[name]


def run_evaluation(trainer: Trainer, module: Module, loaders: list[Any]) -> list[dict[str, float]]:
    """One pass over ``loaders``; the epoch's values for each of them."""
    hook = _HOOK[trainer.stage]
    values = reporting.begin_evaluation(trainer)
    trainer.eval_loaders, trainer.eval_batch = loaders, 0
    with evaluating(trainer, module, hook):
        trainer.call(f"on_{hook}_start", monitors=False)
        trainer.call(f"on_{hook}_epoch_start", monitors=False)
        step = trainer.precision_plugin.wrap(getattr(module, f"{hook}_step"))
        parts: list[dict[str, torch.Tensor]] = []
        for number, loader in enumerate(loaders):
            values.loader = number if len(loaders) > 1 else None
            _run_loader(trainer, module, loader, number, len(loaders), step, hook)
            parts.append(reporting.end_batches(trainer, values))
        values.loader = None
        trainer.call(f"on_{hook}_epoch_end", monitors=False)
        results = reporting.end_evaluation(trainer, values, parts)
        trainer.call(f"on_{hook}_end", monitors=False)
    if trainer.stage == "validate":  # only now: what is saved half-way validates again when it is resumed
        trainer.progress.validated_at = trainer.progress.batch
    trainer.call_monitors(f"on_{hook}_start", f"on_{hook}_epoch_start", f"on_{hook}_epoch_end", f"on_{hook}_end")
    values.clear()
    return results


def _run_loader(trainer: Trainer, module: Module, loader: Any, number: int, count: int, step: Any, hook: str) -> None:
    values, limit = trainer.logged, trainer.eval_limit(trainer.stage, loader)
    move = batch_transfer(trainer, module, number)
    start, end = trainer.resolve(f"on_{hook}_batch_start"), trainer.resolve(f"on_{hook}_batch_end")
    on_progress = callback_hooks(trainer, module, trainer.callbacks, "on_progress")
    arguments = _step_arguments(getattr(module, f"{hook}_step"), count)
    suffix, show_at = f"/{number}" if count > 1 else "", 0.0
    values.in_batches = True
    for index, batch in enumerate(islice(loader.batches(0), limit)):
        if move is not None:
            batch = move(batch)
        values.batch.set(batch)
        extra = (number,) if arguments > 2 else ()
        if start:
            trainer.enter(f"on_{hook}_batch_start", suffix)
            for function in start:
                function(batch, index, number)
        trainer.enter(f"{hook}_step", suffix)
        output = step(batch, *((index, *extra) if arguments > 1 else ()))
        trainer.eval_batch += 1
        if trainer.stage == "predict":
            trainer.collect_prediction(output, number)
        if end:
            trainer.enter(f"on_{hook}_batch_end", suffix)
            for function in end:
                function(output, batch, index, number)
        if values.has_steps:
            reporting.evaluation_step(trainer, values)
        if on_progress and (now := time.monotonic()) >= show_at:
            show_at = now + PROGRESS_INTERVAL
            for function in on_progress:
                function()


def _step_arguments(step: Any, loaders: int) -> int:
    """How many of ``(batch, batch_idx, dataloader_idx)`` the step takes."""
    parameters = list(inspect.signature(step).parameters.values())
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return 3 if loaders > 1 or any(p.name == "dataloader_idx" for p in parameters) else 2
    return min(3, len(parameters))
