"""The function that performs one training step, made of only the parts that a run uses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from arclight.fabric.errors import MisconfigurationError
from arclight.trainer.callback import BuildsStep
from arclight.trainer.loop.accumulation import GradientAccumulator, weigh_across_ranks
from arclight.trainer.loop.gradients import clip, loss_of, parameters_of, warn_none_loss
from arclight.trainer.loop.hooks import Hook, logging_as, module_hooks, overridden, resolve
from arclight.trainer.loop.optimizers import ManagedOptimizer
from arclight.trainer.loop.schedulers import scheduler_steps
from arclight.trainer.module import Module
from arclight.trainer.profilers.profiling import profile_module_hook, profile_strategy

if TYPE_CHECKING:
    from arclight.trainer.trainer import Trainer

Step = Callable[[Any, int], Any]
"""Runs one batch: ``step(batch, batch_idx)`` gives the output of ``training_step``."""


def build_forward(trainer: Trainer, module: Module) -> Step:
    """``training_step`` as a function of batch and index, whatever arguments the user's version takes."""
    if module.automatic_optimization:
        step = trainer.strategy.wrap_step(module, module.training_step)
    else:  # its backward passes lie inside the step, where no wrapper around it could see them
        step = module.training_step
        trainer.strategy.copy_from_rank_zero(module.state_dict().values())
    trainer.step_module = step if isinstance(step, torch.nn.Module) else module
    forward = trainer.precision_plugin.wrap(
        step if takes_index(module.training_step) else (lambda batch, _: step(batch))
    )
    return profile_strategy(trainer, "training_step", forward)


def takes_index(step: Callable[..., Any]) -> bool:
    """Whether a step wants the batch index beside the batch."""
    parameters = list(inspect.signature(step).parameters.values())
    return len(parameters) > 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters)


def build_step(trainer: Trainer, module: Module, forward: Step) -> Step:
    """The one function that the loop calls per batch; a callback may bring its own."""
    for callback in trainer.callbacks:
        if isinstance(callback, BuildsStep):
            return callback.build_step(trainer, module, forward)
    if not module.automatic_optimization:
        return _manual_step(trainer, module, forward)
    if not trainer.optimizers:
        return _forward_only(trainer, forward)
    optimizer = trainer.optimizers[0]
    if trainer.conventions.closures or overridden(module, "optimizer_step", Module) or needs_closure(optimizer):
        return _closure_step(trainer, module, forward, optimizer)
    parts = step_parts(trainer, module, optimizer)
    if trainer.accumulate_grad_batches > 1 or trainer.window.count:
        return _accumulating_step(trainer, module, forward, optimizer, parts)
    if trainer.strategy.world_size > 1 and overridden(module, "batch_weight", Module):
        forward, backward = weigh_across_ranks(trainer, module, forward, parts.backward)
        parts = replace(parts, backward=backward)
    return _plain_step(trainer, forward, parts)


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether an optimizer evaluates the loss itself, once or several times in a step."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return isinstance(optimizer, torch.optim.LBFGS) or (closure is not None and closure.default is closure.empty)


@dataclass(frozen=True)
class StepParts:
    """What surrounds backward and the optimizer in this run."""

    zero_first: tuple[Callable[[], Any], ...]
    before_backward: tuple[Hook, ...]
    backward: Callable[[torch.Tensor], Any]
    after_backward: tuple[Hook, ...]
    before_step: tuple[Callable[[], Any], ...]
    optimizer_step: Callable[[], Any]
    after_step: tuple[Callable[[], Any], ...]


def step_parts(trainer: Trainer, module: Module, optimizer: Optimizer, zero_first: bool | None = None) -> StepParts:
    scaler = trainer.precision_plugin.scaler
    backward: Callable[[torch.Tensor], Any] = (
        logging_as(module, "backward", module.backward)
        if overridden(module, "backward", Module)
        else torch.Tensor.backward
    )
    if scaler is not None:
        backward = _scaled_backward(backward, scaler)
    before = list(_before_step(trainer, module, optimizer))
    if scaler is not None and before:
        before.insert(0, partial(trainer.precision_plugin.unscale_gradients, optimizer))
    zero = tuple(_zero_actions(trainer, module, optimizer))
    first = trainer.conventions.zero_grad_first if zero_first is None else zero_first
    return StepParts(
        zero_first=zero if first else (),
        before_backward=resolve(trainer, module, "on_before_backward"),
        backward=profile_strategy(trainer, "backward", backward),
        after_backward=resolve(trainer, module, "on_after_backward"),
        before_step=tuple(before),
        optimizer_step=profile_module_hook(
            trainer,
            module,
            "optimizer_step",
            partial(trainer.precision_plugin.optimizer_step, optimizer) if scaler is not None else optimizer.step,
        ),
        after_step=(() if first else zero) + tuple(scheduler_steps(trainer, module, "step", plateau=False)),
    )


def _before_step(trainer: Trainer, module: Module, optimizer: Optimizer) -> list[Callable[[], Any]]:
    """Hooks, then clipping: what happens to gradients before they are used."""
    actions: list[Callable[[], Any]] = [
        partial(h, optimizer) for h in resolve(trainer, module, "on_before_optimizer_step")
    ]
    value, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
    if overridden(module, "configure_gradient_clipping", Module) or overridden(module, "clip_gradients", Module):
        named = logging_as(module, "configure_gradient_clipping", module.configure_gradient_clipping)
        clipping = partial(named, optimizer, gradient_clip_val=value, gradient_clip_algorithm=algorithm)
    elif value is not None:
        clipping = partial(clip, trainer.strategy, optimizer, value, algorithm or "norm")
    else:
        return actions
    return [*actions, profile_module_hook(trainer, module, "configure_gradient_clipping", clipping)]


def _zero_actions(trainer: Trainer, module: Module, optimizer: Optimizer) -> list[Callable[[], Any]]:
    actions: list[Callable[[], Any]] = [partial(h, optimizer) for h in resolve(trainer, module, "on_before_zero_grad")]
    if module_hooks(module, "optimizer_zero_grad"):
        progress, named = trainer.progress, logging_as(module, "optimizer_zero_grad", module.optimizer_zero_grad)

        def zero() -> None:
            named(progress.epoch, progress.batch, optimizer)
    else:
        zero = optimizer.zero_grad
    return [*actions, profile_module_hook(trainer, module, "optimizer_zero_grad", zero)]


def _scaled_backward(
    backward: Callable[[torch.Tensor], Any], scaler: torch.amp.GradScaler
) -> Callable[[torch.Tensor], Any]:
    return lambda loss: backward(scaler.scale(loss))


def _plain_step(trainer: Trainer, forward: Step, parts: StepParts) -> Step:
    """Forward, backward, update: one optimizer step per batch."""
    progress = trainer.progress
    zero_first, backward, optimizer_step = parts.zero_first, parts.backward, parts.optimizer_step
    before_backward, after_backward = parts.before_backward, parts.after_backward
    before_step, after_step = parts.before_step, parts.after_step

    def step(batch: Any, index: int) -> Any:
        output = forward(batch, index)
        loss = output if output.__class__ is torch.Tensor and output.ndim == 0 else loss_of(output)
        for action in zero_first:
            action()
        if loss is None:
            warn_none_loss(trainer)
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


def _accumulating_step(trainer: Trainer, module: Module, forward: Step, optimizer: Optimizer, parts: StepParts) -> Step:
    """Several batches per optimizer step."""
    windows, progress, window = GradientAccumulator(trainer, module, optimizer), trainer.progress, trainer.window

    def update() -> None:
        if not windows.end() and windows.weigh:
            return
        for action in parts.before_step:
            action()
        parts.optimizer_step()
        for action in parts.after_step:
            action()
        progress.global_step += 1

    def step(batch: Any, index: int) -> Any:
        share, first, last = windows.take(index, batch)
        with nullcontext() if last else trainer.strategy.accumulating(trainer.step_module or module):
            output = forward(batch, index)
            loss = loss_of(output)
            if first:
                for action in parts.zero_first:
                    action()
            if loss is not None:
                window.total += windows.size
                for hook in parts.before_backward:
                    hook(loss)
                parts.backward(loss * share)
                for hook in parts.after_backward:
                    hook()
                trainer.last_loss = loss
        if last:
            update()
        return output

    trainer.close_window = update
    return step


def _closure_step(trainer: Trainer, module: Module, forward: Step, optimizer: Optimizer) -> Step:
    """For optimizers that evaluate the loss themselves, and modules that override ``optimizer_step``."""
    parts = step_parts(trainer, module, optimizer, zero_first=True)
    windows, managed = GradientAccumulator(trainer, module, optimizer), trainer.managed_optimizers[0]
    managed.actions = (windows.end, *_before_step(trainer, module, optimizer))
    stepped: list[ManagedOptimizer] = []
    managed.count = partial(stepped.append, managed)
    repeats = isinstance(optimizer, torch.optim.LBFGS)
    optimizer_step = profile_module_hook(trainer, module, "optimizer_step", module.optimizer_step)

    def step(batch: Any, index: int) -> Any:
        output, ran = None, False
        share, first, last = windows.take(index, batch)
        total = trainer.window.total
        grown = parameters_of(optimizer) if repeats and not first else []
        before = [(p, p.grad.clone()) for p in grown if p.grad is not None]

        @torch.enable_grad()
        def closure() -> torch.Tensor | None:
            nonlocal output, ran
            ran = True
            output = forward(batch, index)
            loss = loss_of(output)
            if first:
                for action in parts.zero_first:
                    action()
            for parameter, gradient in before:
                parameter.grad = gradient.clone()  # of the window's other batches, at each evaluation of this one
            if loss is None:
                if repeats:
                    raise MisconfigurationError("LBFGS needs a loss for every batch: training_step returned None")
                warn_none_loss(trainer)
                return None
            trainer.window.total = windows.size + (0 if first else total)
            for hook in parts.before_backward:
                hook(loss)
            parts.backward(loss if share == 1 else loss * share)
            for hook in parts.after_backward:
                hook()
            trainer.last_loss = loss
            return loss

        if not last:
            with trainer.strategy.accumulating(trainer.step_module or module):
                closure()
            return output
        optimizer_step(trainer.progress.epoch, index, managed, closure)
        trainer.window.count = 0
        _after_closure(trainer, parts, stepped, ran)
        return output

    def close() -> None:
        optimizer_step(trainer.progress.epoch, trainer.progress.batch - 1, managed, lambda: None)
        trainer.window.count = 0
        _after_closure(trainer, parts, stepped, True)

    trainer.close_window = close
    return step


def _after_closure(trainer: Trainer, parts: Any, stepped: list[ManagedOptimizer], ran: bool) -> None:
    """What follows an update; it counts only now, so that hooks and schedules see the number of the one before."""
    if not stepped:
        return
    if not ran:
        raise MisconfigurationError(
            "The closure hasn't been executed. HINT: did you call `optimizer_closure()` in your `optimizer_step` hook? It could "
            "also happen because the optimizer's `step(closure)` does not run it: then call it before"
        )
    for action in parts.after_step:
        action()
    trainer.progress.global_step += len(stepped) if trainer.conventions.count_optimizer_steps else 1
    stepped.clear()


def _count(progress: Any) -> None:
    progress.global_step += 1


def _forward_only(trainer: Trainer, forward: Step) -> Step:
    """Without an optimizer a step is a forward."""
    progress = trainer.progress

    def step(batch: Any, index: int) -> Any:
        output = forward(batch, index)
        progress.global_step += 1
        return output

    return step


def _manual_output(output: Any) -> Any:
    if output is None or isinstance(output, (torch.Tensor, Mapping)):
        return output
    raise MisconfigurationError(
        "In manual optimization, `training_step` must either return a Tensor or have no return (or a dict, which hooks get); got "
        f"{type(output).__name__}"
    )


def _manual_step(trainer: Trainer, module: Module, forward: Step) -> Step:
    """``training_step`` runs its optimizers; a batch in which any of them stepped is one update."""
    progress = trainer.progress
    for managed in trainer.managed_optimizers:
        managed.actions = tuple(
            partial(h, managed.optimizer) for h in resolve(trainer, module, "on_before_optimizer_step")
        )
    if trainer.conventions.count_optimizer_steps:
        for managed in trainer.managed_optimizers:
            managed.count = partial(_count, progress)
        return lambda batch, index: _manual_output(forward(batch, index))
    stepped: list[ManagedOptimizer] = []
    for managed in trainer.managed_optimizers:
        managed.count = partial(stepped.append, managed)

    def step(batch: Any, index: int) -> Any:
        output = _manual_output(forward(batch, index))
        if stepped:
            stepped.clear()
            progress.global_step += 1
        return output

    return step
