"""Run a trainer on trial and restore everything after, for the searches of this folder.

`batch_size_scaling` and `lr_finder` run their trials in it. After a trial the trainer, the module and random numbers must be as before,
whatever happened.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
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
from arclight.trainer.loop.evaluation import EvaluationLoop
from arclight.trainer.loop.fit import FitLoop
from arclight.trainer.loop.progress import TrainerFn
from arclight.trainer.module import Module

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from arclight.fabric.precision.base import Precision
    from arclight.trainer.trainer import Trainer

Run = Callable[..., None]
"""``run(callback, **settings)``: one trial, with these settings of the trainer and no callback but this one."""


@contextmanager
def trials(trainer: Trainer, module: Module) -> Iterator[Run]:
    """Run the trainer's current stage any number of times on trial, without a trace.

    A trial has none of the trainer's callbacks, loggers, limits on its length or learning-rate schedules, but the module's own
    hooks. Afterwards, whatever happened, weights, buffers, gradients, optimizers, schedules, random generators and all
    that the trainer says of itself are what they were. They are kept in the memory of the host meanwhile.
    Raises MisconfigurationError for strategies whose processes are started again for every run.
    """
    if not trainer.strategy.launcher.runs_in_this_process:
        raise MisconfigurationError(
            f"{type(trainer.strategy).__name__} runs in processes of its own, from which the outcome of a search would not come "
            "back; tune with a strategy that runs in this one, such as 'ddp'"
        )
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    put_back = _keep(module, trainer.optimizers, schedulers, trainer.precision_plugin)

    def run(callback: Callback | None = None, **settings: Any) -> None:
        unlimited = {"max_epochs": -1, "min_epochs": None, "min_steps": None, "val_check_interval": None}
        unlogged = {"log_every_n_steps": 0, "reload_dataloaders_every_n_epochs": 0}
        given = {"callbacks": [callback or TrialCallback()], **unlimited, **unlogged, **settings}
        with _gradients_aside(module), trainer.trial(), trainer.paths.silent(), trainer.temporarily(**given):
            if module.automatic_optimization:  # else steps may ask for their schedules
                trainer.use_optimizers(trainer.optimizers, [])
            try:
                data = trainer.data.load(trainer.stage)
                if trainer.stage == "train":
                    if not trainer.num_training_batches:
                        raise MisconfigurationError("there are no training batches to try")
                    FitLoop(trainer, module).run()
                elif trainer.stage == "predict":
                    EvaluationLoop(trainer, module).collect(data, keep=False)
                else:
                    EvaluationLoop(trainer, module).evaluate(data)
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
    """Callback of a trial, in which a NaN or infinite loss ends nothing."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.report_loss(None)  # a NaN or infinite one is an outcome like others here, and ends nothing


@contextmanager
def _gradients_aside(module: Module) -> Iterator[None]:
    """Set gradients and logged entries aside for a trial, and restore both afterwards."""
    entries = module.__dict__["_entries"]
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    module.zero_grad(set_to_none=True)
    try:
        yield
    finally:
        module.__dict__["_entries"] = entries
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _keep(
    module: Module, optimizers: Sequence[Optimizer], schedulers: Sequence[Any], precision: Precision
) -> Callable[[], None]:
    """Save the state of module, optimizers, schedules and precision; return a restorer."""
    tensors = _kept_tensors(module)
    modes = [(part, part.training) for part in module.modules()]
    trained = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    of_optimizers = [map_tensors(optimizer.state_dict(), _copied) for optimizer in optimizers]
    of_schedulers = [copy.deepcopy(scheduler.state_dict()) for scheduler in schedulers]
    of_precision = copy.deepcopy(precision.state_dict())

    def put_back() -> None:
        with torch.no_grad():
            for table, name, tensor, kept in tensors:
                table[name] = tensor
                local_tensor(tensor.detach()).copy_(kept)
        for part, training in modes:
            part.training = training
        for parameter, requires_grad in trained:
            parameter.requires_grad_(requires_grad)
        for optimizer, state in zip(optimizers, of_optimizers, strict=True):
            restore_optimizer(optimizer, state)
        for scheduler, state in zip(schedulers, of_schedulers, strict=True):
            scheduler.load_state_dict(state)
        precision.load_state_dict(of_precision)

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
