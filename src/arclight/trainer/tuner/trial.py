"""Runs of a trainer for what they show, after which everything is as it was."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from arclight.fabric.batches import map_tensors
from arclight.fabric.distributed.dtensor import is_dtensor, local_tensor
from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.seeding import isolate_rng
from arclight.optim import restore_optimizer
from arclight.trainer.callback import Callback
from arclight.trainer.data import stage_data
from arclight.trainer.loggers import DummyLogger
from arclight.trainer.logging.metrics import Metrics
from arclight.trainer.logging.results import ResultCollection
from arclight.trainer.loop.accumulation import AccumulationState
from arclight.trainer.loop.evaluation import predictions, run_evaluation
from arclight.trainer.loop.fit import run_fit
from arclight.trainer.loop.progress import TrainerFn
from arclight.trainer.module import Module

if TYPE_CHECKING:
    from arclight.trainer.trainer import Trainer

Run = Callable[..., None]
"""``run(callback, **settings)``: one trial, with these settings of the trainer and no callback but this one."""


@contextmanager
def trials(trainer: Trainer, module: Module) -> Iterator[Run]:
    """Run the trainer's current stage any number of times on trial, without a trace.

    A trial has none of the trainer's callbacks, loggers, limits on its length or learning-rate schedules, but the module's own
    hooks. Afterwards, whatever happened, weights, buffers, gradients, optimizers, schedules, random generators and all
    that the trainer says of itself are what they were. They are kept in the memory of the host meanwhile.
    Raises MisconfigurationError for strategies whose processes are started anew for every run.
    """
    if not trainer.strategy.launcher.runs_in_this_process:
        raise MisconfigurationError(
            f"{type(trainer.strategy).__name__} runs in processes of its own, from which the outcome of a search would not come "
            "back; tune with a strategy that runs in this one, such as 'ddp'"
        )
    put_back = _keep(trainer, module)

    def run(callback: Callback | None = None, **settings: Any) -> None:
        with _aside(trainer, module):
            _begin(trainer, module, callback or TrialCallback(), settings)
            try:
                _run(trainer, module)
            finally:
                trainer.logged.clear()  # metrics have seen the trial's batches
                module.zero_grad(set_to_none=True)
                if trainer.state.fn == TrainerFn.FITTING:
                    trainer.strategy.stop.begin()

    try:
        with isolate_rng():
            yield run
    finally:
        put_back()


class TrialCallback(Callback):
    """Goes along with a trial."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.last_loss = None  # a loss that is no number is an outcome like others here, and ends nothing


def _begin(trainer: Trainer, module: Module, callback: Callback, settings: dict[str, Any]) -> None:
    trainer.callbacks = [callback]
    trainer._loggers = [] if trainer._loggers == [] or trainer._logger_choice is False else [DummyLogger()]
    trainer.log_every_n_steps = trainer.reload_dataloaders_every_n_epochs = 0
    trainer.max_epochs, trainer.min_epochs, trainer.min_steps = -1, None, None
    trainer.val_check_interval = None
    if module.automatic_optimization:  # else steps may ask for their schedules
        trainer.lr_scheduler_configs = []
    for name, value in settings.items():
        setattr(trainer, name, value)


def _run(trainer: Trainer, module: Module) -> None:
    data = stage_data.load(trainer, trainer.stage)
    if trainer.stage == "train":
        if not trainer.num_training_batches:
            raise MisconfigurationError("there are no training batches to try anything with")
        run_fit(trainer, module)
    elif trainer.stage == "predict":
        for _ in predictions(trainer, module, data, keep=False):
            pass
    else:
        run_evaluation(trainer, module, data)


@contextmanager
def _aside(trainer: Trainer, module: Module) -> Iterator[None]:
    """Give the trainer other objects for all that a run changes, and then its own again."""
    before, entries = dict(vars(trainer)), module.__dict__["_entries"]
    trainer.progress, trainer.window = dataclasses.replace(trainer.progress), AccumulationState()
    trainer.state, trainer.evaluated = dataclasses.replace(trainer.state), trainer.evaluated.copy()
    trainer.metrics, trainer.logged = Metrics(), ResultCollection(trainer.logged.stage)
    trainer.training_values = trainer.logged
    trainer.optimizers = trainer.optimizers  # wrapped anew: a fit under way has hooks in the present wrappers
    trainer.should_stop, trainer.pending_rng, trainer.loader_state = False, None, {}
    trainer.last_loss = trainer.batch_iterator = trainer.rng_before_validation = trainer.close_window = None
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    module.zero_grad(set_to_none=True)
    try:
        yield
    finally:
        if trainer.received_sigterm:
            before |= {"received_sigterm": True, "should_stop": True}
        for name in set(vars(trainer)) - set(before):
            delattr(trainer, name)
        vars(trainer).update(before)
        module.__dict__["_entries"] = entries
        for parameter, gradient in gradients:
            parameter.grad = gradient
        if "train" in trainer.data and trainer.data["train"].loaded:
            trainer.num_training_batches = trainer.data["train"].total


def _keep(trainer: Trainer, module: Module) -> Callable[[], None]:
    """The state of module, optimizers, schedules and precision, and a function that puts it back."""
    tensors = _kept_tensors(module)
    modes = [(part, part.training) for part in module.modules()]
    trained = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    optimizers = [map_tensors(optimizer.state_dict(), _copied) for optimizer in trainer.optimizers]
    schedules = [copy.deepcopy(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs]
    precision = copy.deepcopy(trainer.precision_plugin.state_dict())

    def put_back() -> None:
        with torch.no_grad():
            for table, name, tensor, kept in tensors:
                table[name] = tensor
                local_tensor(tensor.detach()).copy_(kept)
        for part, training in modes:
            part.training = training
        for parameter, requires_grad in trained:
            parameter.requires_grad_(requires_grad)
        for optimizer, state in zip(trainer.optimizers, optimizers, strict=True):
            restore_optimizer(optimizer, state)
        for config, state in zip(trainer.lr_scheduler_configs, schedules, strict=True):
            config.scheduler.load_state_dict(state)
        trainer.precision_plugin.load_state_dict(precision)

    return put_back


def _kept_tensors(module: nn.Module) -> list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]]:
    """List the holder, name, tensor and a copy of each parameter and buffer."""
    return [
        (table, name, tensor, local_tensor(tensor.detach()).to("cpu", copy=True))
        for part in module.modules()
        for table in (part._parameters, part._buffers)
        for name, tensor in table.items()
        if tensor is not None
    ]


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone() if is_dtensor(tensor) else tensor.detach().to("cpu", copy=True)
