"""From ``configure_optimizers`` to the function that performs one training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from arclight.fabric.strategies import Strategy
from arclight.trainer.hooks import Hook, module_hooks, overridden, resolve
from arclight.trainer.module import Module

if TYPE_CHECKING:
    from arclight.trainer.trainer import Trainer

Step = Callable[[Any, int], Any]
"""Runs one batch: ``step(batch, batch_idx)`` gives the output of ``training_step``."""


@dataclass
class LRSchedulerConfig:
    """A learning-rate scheduler and when to step it."""

    scheduler: Any
    name: str | None = None
    interval: str = "epoch"
    frequency: int = 1
    reduce_on_plateau: bool = False
    monitor: str | None = None
    strict: bool = True

    def __post_init__(self) -> None:
        if self.interval not in ("step", "epoch"):
            raise ValueError(f"lr_scheduler interval is {self.interval!r}; choose 'step' or 'epoch'")
        if not hasattr(self.scheduler, "step"):
            raise TypeError(f"lr_scheduler: {type(self.scheduler).__name__} has no step(); give a torch scheduler")
        self.reduce_on_plateau = self.reduce_on_plateau or isinstance(self.scheduler, ReduceLROnPlateau)


def parse_optimizers(given: Any) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """Optimizers and schedulers from anything ``configure_optimizers`` may return.

    That is: an optimizer, a list of them, ``(optimizers, schedulers)``, a dict or dicts with ``optimizer``
    and ``lr_scheduler`` (a scheduler, or a dict of :class:`LRSchedulerConfig`'s fields) and
    ``monitor`` for a scheduler that watches a value, or None.
    """
    if given is None:
        return [], []
    if isinstance(given, Mapping):
        given = [given]
    if isinstance(given, (list, tuple)) and len(given) == 2 and all(isinstance(part, (list, tuple)) for part in given):
        return [_optimizer(o) for o in given[0]], [_scheduler(s) for s in given[1]]
    if isinstance(given, (list, tuple)) and given and all(isinstance(part, Mapping) for part in given):
        optimizers = [_optimizer(part.get("optimizer")) for part in given]
        with_schedule = [part for part in given if part.get("lr_scheduler") is not None]
        return optimizers, [_scheduler(part["lr_scheduler"], part.get("monitor")) for part in with_schedule]
    return [_optimizer(o) for o in (given if isinstance(given, (list, tuple)) else [given])], []


def _optimizer(value: Any) -> Optimizer:
    if not isinstance(value, Optimizer):
        raise TypeError(f"configure_optimizers: expected a torch Optimizer, got {type(value).__name__}")
    return value


def _scheduler(value: Any, monitor: str | None = None) -> LRSchedulerConfig:
    if not isinstance(value, Mapping):
        return LRSchedulerConfig(value, monitor=monitor)
    unknown = set(value) - set(LRSchedulerConfig.__dataclass_fields__)
    if unknown or "scheduler" not in value:
        what = f"{sorted(unknown)[0]!r} is not a field" if unknown else "'scheduler' is missing"
        raise ValueError(
            f"configure_optimizers: lr_scheduler: {what}; fields are {', '.join(LRSchedulerConfig.__dataclass_fields__)}"
        )
    return LRSchedulerConfig(**{"monitor": monitor, **value})


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def clip(strategy: Strategy, optimizer: Optimizer, value: float, algorithm: str = "norm") -> None:
    """Clip gradients by their global 2-norm (``norm``) or by element (``value``)."""
    if algorithm == "value":
        strategy.clip_value(parameters_of(optimizer), value)
    elif algorithm == "norm":
        strategy.clip_norm(parameters_of(optimizer), value)
    else:
        raise ValueError(f"gradient_clip_algorithm={algorithm!r} is not known; choose norm or value")


def loss_of(output: Any) -> torch.Tensor | None:
    """The loss in what ``training_step`` returned; None means: skip this batch."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if loss is None and not isinstance(output, Mapping):
        return None
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shown = (
            f"a tensor of shape {tuple(loss.shape)}"
            if isinstance(loss, torch.Tensor)
            else type(loss if loss is not None else output).__name__
        )
        raise TypeError(f"training_step must return a scalar tensor, a dict with 'loss', or None; got {shown}")
    return loss


# -- the step ------------------------------------------------------------------------------------------------------


def build_step(trainer: Trainer, module: Module) -> Step:
    """The one function that the loop calls per batch, made of only the parts that this run uses."""
    forward = trainer.precision_plugin.wrap(_forward(trainer, module))
    if not module.automatic_optimization:
        if trainer.gradient_clip_val is not None or trainer.accumulate_grad_batches > 1:
            raise ValueError(
                "gradient_clip_val and accumulate_grad_batches do nothing in manual optimization: in training_step call "
                "self.clip_gradients(optimizer, ...), and step and clear the optimizer only in every n-th batch"
            )
        return _manual_step(trainer, forward)
    if len(trainer.optimizers) > 1:
        raise ValueError(
            f"configure_optimizers returned {len(trainer.optimizers)} optimizers; with several, set self.automatic_optimization = False "
            "and run them in training_step"
        )
    if not trainer.optimizers:
        return forward
    optimizer = trainer.optimizers[0]
    needs_closure = overridden(module, "optimizer_step", Module) or isinstance(optimizer, torch.optim.LBFGS)
    if needs_closure:
        return _closure_step(trainer, module, forward, optimizer)
    if trainer.accumulate_grad_batches > 1:
        return _accumulating_step(trainer, module, forward, optimizer)
    return _plain_step(trainer, module, forward, optimizer)


def _forward(trainer: Trainer, module: Module) -> Callable[[Any, int], Any]:
    """``training_step`` as a function of batch and index, whatever arguments the user's version takes."""
    if module.automatic_optimization:
        step = trainer.strategy.wrap_step(module, module.training_step)
    else:  # its backward passes lie inside the step, where no wrapper around it could see them
        step = module.training_step
        trainer.strategy.copy_weights(module)
    trainer.step_module = step if isinstance(step, torch.nn.Module) else module
    return step if takes_index(module.training_step) else (lambda batch, _: step(batch))


def takes_index(step: Callable[..., Any]) -> bool:
    """Whether a step wants the batch index beside the batch."""
    import inspect

    parameters = list(inspect.signature(step).parameters.values())
    return len(parameters) > 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters)


@dataclass(frozen=True)
class _Parts:
    """What surrounds backward and the optimizer in this run."""

    backward: Callable[[torch.Tensor], Any]
    before_backward: tuple[Hook, ...]
    after_backward: tuple[Hook, ...]
    before_step: tuple[Callable[[], Any], ...]
    optimizer_step: Callable[[], Any]
    after_step: tuple[Callable[[], Any], ...]


def _parts(trainer: Trainer, module: Module, optimizer: Optimizer) -> _Parts:
    scaler, progress = trainer.precision_plugin.scaler, trainer.progress
    backward: Callable[[torch.Tensor], Any] = (
        module.backward if overridden(module, "backward", Module) else torch.Tensor.backward
    )
    if scaler is not None:
        backward = _scaled_backward(backward, scaler)
    before: list[Callable[[], Any]] = [
        partial(h, optimizer) for h in resolve(trainer, module, "on_before_optimizer_step")
    ]
    value, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
    if overridden(module, "configure_gradient_clipping", Module):
        before.append(lambda: module.configure_gradient_clipping(optimizer, value, algorithm))
    elif value is not None:
        before.append(lambda: clip(trainer.strategy, optimizer, value, algorithm))
    if scaler is not None and before:
        before.insert(0, lambda: scaler.unscale_(optimizer))
    after: list[Callable[[], Any]] = [partial(h, optimizer) for h in resolve(trainer, module, "on_before_zero_grad")]
    if module_hooks(module, "optimizer_zero_grad"):
        after.append(lambda: module.optimizer_zero_grad(trainer.current_epoch, progress.batch, optimizer))
    else:
        after.append(optimizer.zero_grad)
    after += _scheduler_steps(trainer, module, "step")
    return _Parts(
        backward,
        resolve(trainer, module, "on_before_backward"),
        resolve(trainer, module, "on_after_backward"),
        tuple(before),
        _scaled_step(optimizer, scaler) if scaler is not None else optimizer.step,
        tuple(after),
    )


def _scaled_backward(
    backward: Callable[[torch.Tensor], Any], scaler: torch.amp.GradScaler
) -> Callable[[torch.Tensor], Any]:
    return lambda loss: backward(scaler.scale(loss))


def _scaled_step(optimizer: Optimizer, scaler: torch.amp.GradScaler) -> Callable[[], Any]:
    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    return step


def _scheduler_steps(trainer: Trainer, module: Module, interval: str) -> list[Callable[[], Any]]:
    """One function per scheduler of this interval."""

    def stepper(config: LRSchedulerConfig) -> Callable[[], Any]:
        own = overridden(module, "lr_scheduler_step", Module)
        if not own and not config.reduce_on_plateau and config.frequency == 1:
            return config.scheduler.step  # type: ignore[no-any-return]

        def step() -> None:
            count = trainer.progress.global_step + 1 if interval == "step" else trainer.progress.epoch + 1
            if count % config.frequency == 0:
                module.lr_scheduler_step(config.scheduler, monitored(trainer, config))

        return step

    return [stepper(config) for config in trainer.lr_scheduler_configs if config.interval == interval]


def monitored(trainer: Trainer, config: LRSchedulerConfig) -> Any:
    """The value that a plateau scheduler watches; None for schedulers that watch nothing."""
    if not config.reduce_on_plateau:
        return None
    if config.monitor is None:
        raise ValueError("ReduceLROnPlateau needs lr_scheduler={'scheduler': ..., 'monitor': 'a logged name'}")
    metrics = trainer.callback_metrics
    if config.monitor not in metrics and config.strict:
        raise ValueError(
            f"ReduceLROnPlateau monitors {config.monitor!r}, which was not logged; logged: {', '.join(metrics) or 'nothing'}"
        )
    return metrics.get(config.monitor)


def _plain_step(trainer: Trainer, module: Module, forward: Step, optimizer: Optimizer) -> Step:
    """Forward, backward, update, clear: one optimizer step per batch."""
    parts, progress = _parts(trainer, module, optimizer), trainer.progress
    backward, optimizer_step = parts.backward, parts.optimizer_step
    before_backward, after_backward, before_step, after_step = (
        parts.before_backward,
        parts.after_backward,
        parts.before_step,
        parts.after_step,
    )

    def step(batch: Any, index: int) -> Any:
        output = forward(batch, index)
        loss = output if output.__class__ is torch.Tensor else loss_of(output)
        if loss is None:
            return None
        for hook in before_backward:
            hook(loss)
        backward(loss)
        for hook in after_backward:
            hook()
        for action in before_step:
            action()
        optimizer_step()
        for action in after_step:
            action()
        progress.global_step += 1
        trainer.last_loss = loss
        return output

    return step


def _accumulating_step(trainer: Trainer, module: Module, forward: Step, optimizer: Optimizer) -> Step:
    """Several batches per optimizer step. The gradient is the mean over the window's samples, not a mean of means:
    each loss counts with its batch's size, so a smaller last batch and a shorter last window come out right.
    Batches of other ranks may differ in size too, so several processes agree on a window's samples, once for each.
    """
    several = trainer.strategy.world_size > 1
    parts, progress, length = _parts(trainer, module, optimizer), trainer.progress, trainer.accumulate_grad_batches
    window = trainer.window

    def step(batch: Any, index: int) -> Any:
        size = trainer.logged.batch.size()
        if window.count == 0:
            window.first_size, window.total = 1 if several else max(1, size), 0
        window.count += 1
        last = window.count == length or index + 1 == trainer.num_training_batches
        with nullcontext() if last else trainer.strategy.accumulating(trainer.step_module or module):
            output = forward(batch, index)
            loss = loss_of(output)
            if loss is not None:
                window.total += size
                share = size / window.first_size / length
                for hook in parts.before_backward:
                    hook(loss)
                parts.backward(loss * share)
                for hook in parts.after_backward:
                    hook()
        if not last:
            return output
        window.count, samples = 0, window.total
        gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
        if not gradients:
            return output  # every batch of the window was skipped
        if several:
            samples = trainer.strategy.all_reduce(torch.tensor(float(samples), device=gradients[0].device))  # type: ignore[assignment]
        if several or samples != window.first_size * length:  # the window was shorter or its batches uneven
            torch._foreach_mul_(gradients, window.first_size * length / samples)
        for action in parts.before_step:
            action()
        parts.optimizer_step()
        for action in parts.after_step:
            action()
        progress.global_step += 1
        trainer.last_loss = loss
        return output

    return step


def _closure_step(trainer: Trainer, module: Module, forward: Step, optimizer: Optimizer) -> Step:
    """For optimizers that evaluate the loss themselves, and modules that override ``optimizer_step``."""
    if trainer.accumulate_grad_batches > 1 or trainer.precision_plugin.scaler is not None:
        raise ValueError(
            "an optimizer that runs the closure itself works neither with accumulate_grad_batches > 1 nor with 16-mixed precision"
        )
    parts, progress = _parts(trainer, module, optimizer), trainer.progress

    def step(batch: Any, index: int) -> Any:
        output: Any = None

        def closure() -> torch.Tensor | None:
            nonlocal output
            output = forward(batch, index)
            loss = loss_of(output)
            if loss is None:
                return None
            optimizer.zero_grad()
            for hook in parts.before_backward:
                hook(loss)
            parts.backward(loss)
            for hook in parts.after_backward:
                hook()
            for action in parts.before_step:
                action()
            trainer.last_loss = loss
            return loss

        module.optimizer_step(trainer.current_epoch, index, optimizer, closure)
        for action in parts.after_step:
            action()
        progress.global_step += 1
        return output

    return step


def _manual_step(trainer: Trainer, forward: Step) -> Step:
    """``training_step`` runs its optimizers; a batch in which any of them stepped is one update."""
    stepped = [False]

    def note(*_: Any) -> None:
        stepped[0] = True

    for optimizer in trainer.optimizers:
        optimizer.register_step_post_hook(note)
    progress = trainer.progress

    def step(batch: Any, index: int) -> Any:
        output = forward(batch, index)
        if stepped[0]:
            stepped[0] = False
            progress.global_step += 1
        return output

    return step


def epoch_scheduler_steps(trainer: Trainer, module: Module) -> list[Callable[[], Any]]:
    """What steps the schedulers at the end of an epoch (none in manual optimization)."""
    return _scheduler_steps(trainer, module, "epoch") if module.automatic_optimization else []
