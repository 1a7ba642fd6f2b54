"""Compose the function of one training step: forward, backward, clipping, optimizer step.

`fit` calls what ``StepBuilder.step`` returns for each batch, `diagnosis` replays with it; callbacks such as `MicroBatching` bring their
own (`BuildsStep`). `StepParts` holds the hooks and functions around backward, resolved before the first batch, so that absent ones cost
nothing. Tests compare the order of hooks. It is Lightning's under ``compat``; by default gradients are cleared after the step
(``zero_grad_first``).
"""

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
from arclight.trainer.loop.gradients import clip, loss_of, parameters_of
from arclight.trainer.loop.hooks import Hook, logging_as, module_hooks, overridden
from arclight.trainer.loop.optimizers import ManagedOptimizer
from arclight.trainer.loop.progress import Progress
from arclight.trainer.loop.schedulers import SchedulerSteps
from arclight.trainer.module import Module
from arclight.trainer.profilers.profiling import profile_module_hook, profile_strategy

if TYPE_CHECKING:
    from arclight.trainer.trainer import Trainer

Step = Callable[[Any, int], Any]
"""Runs one batch: ``step(batch, batch_idx)`` gives the output of ``training_step``."""


def takes_index(step: Callable[..., Any]) -> bool:
    """Return True if a step wants the batch index beside the batch."""
    parameters = list(inspect.signature(step).parameters.values())
    return len(parameters) > 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters)


def needs_closure(optimizer: Optimizer) -> bool:
    """Return True if an optimizer evaluates the loss itself, once or several times in a step."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return isinstance(optimizer, torch.optim.LBFGS) or (closure is not None and closure.default is closure.empty)


@dataclass(frozen=True)
class StepParts:
    """The calls that surround backward and the optimizer in this run."""

    zero_first: tuple[Callable[[], Any], ...]
    before_backward: tuple[Hook, ...]
    backward: Callable[[torch.Tensor], Any]
    after_backward: tuple[Hook, ...]
    before_step: tuple[Callable[[], Any], ...]
    optimizer_step: Callable[[], Any]
    after_step: tuple[Callable[[], Any], ...]

    def run_backward(self, loss: torch.Tensor, weighted: torch.Tensor) -> None:
        """Run the backward pass of ``weighted``, with the hooks around that of ``loss``."""
        for hook in self.before_backward:
            hook(loss)
        self.backward(weighted)
        for hook in self.after_backward:
            hook()

    def update(self) -> None:
        """Step the optimizer, with all that comes before and after it."""
        for action in (*self.before_step, self.optimizer_step, *self.after_step):
            action()


class StepBuilder:
    """Build the function that the loop calls for a batch, of only the parts that this run uses."""

    def __init__(self, trainer: Trainer, module: Module) -> None:
        self.trainer, self.module, self.run = trainer, module, trainer.run_state
        self.strategy, self.precision, self.behavior = trainer.strategy, trainer.precision_plugin, trainer.behavior
        self.batch_weight = module.batch_weight if overridden(module, "batch_weight", Module) else None
        own, step = overridden(module, "lr_scheduler_step", Module), module.lr_scheduler_step
        self.schedules = SchedulerSteps(
            self.run,
            logging_as(module, "lr_scheduler_step", step) if own else step,
            partial(profile_module_hook, trainer.profiler, module, "lr_scheduler_step"),
            own=own,
            automatic=module.automatic_optimization,
            count_batches=self.behavior.frequency_counts_batches,
        )

    def forward(self) -> Step:
        """Return ``training_step`` as a function of batch and index, whatever arguments it takes."""
        module, strategy = self.module, self.strategy
        if module.automatic_optimization:
            step = strategy.wrap_step(module, module.training_step)
        else:  # its backward passes lie inside the step, where no wrapper around it could see them
            step = module.training_step
            strategy.copy_from_rank_zero(module.state_dict().values())
        self.run.step_module = step if isinstance(step, torch.nn.Module) else module
        forward = self.precision.wrap(step if takes_index(module.training_step) else (lambda batch, _: step(batch)))
        return profile_strategy(self.trainer.profiler, self.strategy, "training_step", forward)

    def step(self, forward: Step) -> Step:
        """Return the one function that the loop calls per batch; a callback may bring its own."""
        trainer, module = self.trainer, self.module
        for callback in trainer.callbacks:
            if isinstance(callback, BuildsStep):
                return callback.build_step(trainer, module, forward)
        if not module.automatic_optimization:
            return self._manual(forward)
        if not self.run.optimizers:
            return self._forward_only(forward)
        optimizer = self.run.optimizers[0]
        if self.behavior.closures or overridden(module, "optimizer_step", Module) or needs_closure(optimizer):
            return self._closure(forward, optimizer)
        parts = self.parts(optimizer)
        if trainer.accumulate_grad_batches > 1 or self.run.window.count:
            return self._accumulating(forward, optimizer, parts)
        if self.strategy.world_size > 1 and self.batch_weight is not None:
            forward, backward = weigh_across_ranks(
                self.strategy, self.batch_weight, module.parameters(), forward, parts.backward
            )
            parts = replace(parts, backward=backward)
        return self._plain(forward, parts)

    def parts(self, optimizer: Optimizer, zero_first: bool | None = None) -> StepParts:
        """Resolve the hooks and functions around backward and the step of ``optimizer``.

        ``zero_first`` overrides when gradients are cleared.
        """
        trainer, module, scaler = self.trainer, self.module, self.precision.scaler
        backward: Callable[[torch.Tensor], Any] = (
            logging_as(module, "backward", module.backward)
            if overridden(module, "backward", Module)
            else torch.Tensor.backward
        )
        if scaler is not None:
            backward = _scaled_backward(backward, self.precision.scale)
        before = list(self._before_step(optimizer))
        if scaler is not None and before:
            before.insert(0, partial(self.precision.unscale_gradients, optimizer))
        zero = tuple(self._zero_actions(optimizer))
        first = self.behavior.zero_grad_first if zero_first is None else zero_first
        step = partial(self.precision.optimizer_step, optimizer) if scaler is not None else optimizer.step
        return StepParts(
            zero_first=zero if first else (),
            before_backward=trainer.resolve("on_before_backward"),
            backward=profile_strategy(trainer.profiler, self.strategy, "backward", backward),
            after_backward=trainer.resolve("on_after_backward"),
            before_step=tuple(before),
            optimizer_step=profile_module_hook(trainer.profiler, module, "optimizer_step", step),
            after_step=(() if first else zero) + tuple(self.schedules.of("step", plateau=False)),
        )

    def _before_step(self, optimizer: Optimizer) -> list[Callable[[], Any]]:
        """List the actions between backward and update: hooks, then clipping."""
        trainer, module = self.trainer, self.module
        actions: list[Callable[[], Any]] = [partial(h, optimizer) for h in trainer.resolve("on_before_optimizer_step")]
        value, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
        if overridden(module, "configure_gradient_clipping", Module) or overridden(module, "clip_gradients", Module):
            named = logging_as(module, "configure_gradient_clipping", module.configure_gradient_clipping)
            clipping = partial(named, optimizer, gradient_clip_val=value, gradient_clip_algorithm=algorithm)
        elif value:  # 0 clips nothing, as None
            clipping = partial(clip, self.strategy, optimizer, value, algorithm or "norm")
        else:
            return actions
        return [*actions, profile_module_hook(trainer.profiler, module, "configure_gradient_clipping", clipping)]

    def _zero_actions(self, optimizer: Optimizer) -> list[Callable[[], Any]]:
        module = self.module
        actions: list[Callable[[], Any]] = [partial(h, optimizer) for h in self.trainer.resolve("on_before_zero_grad")]
        if module_hooks(module, "optimizer_zero_grad"):
            progress, named = self.run.progress, logging_as(module, "optimizer_zero_grad", module.optimizer_zero_grad)

            def zero() -> None:
                named(progress.epoch, progress.batch, optimizer)
        else:
            zero = optimizer.zero_grad
        return [*actions, profile_module_hook(self.trainer.profiler, module, "optimizer_zero_grad", zero)]

    def _accumulator(self, optimizer: Optimizer) -> GradientAccumulator:
        trainer, run = self.trainer, self.run

        def batch_size() -> int:
            return run.logged.batch.size()

        def ends() -> bool:
            return trainer.window_ends_with_epoch and trainer.is_last_batch

        return GradientAccumulator(
            run.window,
            self.strategy,
            optimizer,
            self.batch_weight,
            length=lambda: trainer.accumulate_grad_batches,
            batch_size=batch_size,
            ends=ends,
            weigh_windows=self.behavior.weigh_windows,
        )

    def _skip(self, ends_window: bool = False) -> None:
        """Warn once in a fit that ``training_step`` gave no loss.

        ``ends_window``: the batches before it wait for the backward that averages their gradients.
        """
        if ends_window:
            self.strategy.average_accumulated(self.module)
        if not self.run.warned_of_no_loss:
            self.run.warned_of_no_loss = True
            self.trainer.warn(
                "`training_step` returned `None`. If this was on purpose, ignore this warning: the batch trains nothing. Otherwise "
                "return the loss"
            )

    def _plain(self, forward: Step, parts: StepParts) -> Step:
        """Build the step for one update per batch: forward, backward, update."""
        run, progress, skip = self.run, self.run.progress, self._skip
        zero_first, backward, optimizer_step = parts.zero_first, parts.backward, parts.optimizer_step
        before_backward, after_backward = parts.before_backward, parts.after_backward
        before_step, after_step = parts.before_step, parts.after_step

        def step(batch: Any, index: int) -> Any:
            output = forward(batch, index)
            loss = output if output.__class__ is torch.Tensor and output.ndim == 0 else loss_of(output)
            for action in zero_first:
                action()
            if loss is None:
                skip()
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
            run.last_loss = loss
            return output

        return step

    def _accumulating(self, forward: Step, optimizer: Optimizer, parts: StepParts) -> Step:
        """Build the step for gradient accumulation: several batches per update."""
        run, strategy, module = self.run, self.strategy, self.module
        windows, progress, window = self._accumulator(optimizer), run.progress, run.window

        def update() -> None:
            if not windows.end() and windows.weigh:
                return
            parts.update()
            progress.global_step += 1

        def step(batch: Any, index: int) -> Any:
            share, first, last = windows.take(batch)
            with nullcontext() if last else strategy.accumulating(run.step_module or module):
                output = forward(batch, index)
                loss = loss_of(output)
                if first:
                    for action in parts.zero_first:
                        action()
                if loss is None:
                    self._skip(ends_window=last and not first)
                else:
                    window.total += windows.size
                    parts.run_backward(loss, loss * share)
                    run.last_loss = loss
            if last:
                update()
            return output

        def close() -> None:
            strategy.average_accumulated(module)
            update()

        run.close_window = close
        return step

    def _closure(self, forward: Step, optimizer: Optimizer) -> Step:
        """Build the step with a closure.

        For optimizers that evaluate the loss themselves and modules that override ``optimizer_step``.
        """
        run, module, skip = self.run, self.module, self._skip
        parts, windows = self.parts(optimizer, zero_first=True), self._accumulator(optimizer)
        managed = run.managed_optimizers[0]
        stepped: list[ManagedOptimizer] = []
        before_step = (windows.end, *self._before_step(optimizer))
        managed.manage(before_step, partial(stepped.append, managed), run.window.has_loss)
        repeats = isinstance(optimizer, torch.optim.LBFGS)
        optimizer_step = profile_module_hook(self.trainer.profiler, module, "optimizer_step", module.optimizer_step)

        def step(batch: Any, index: int) -> Any:
            output, ran = None, False
            share, first, last = windows.take(batch)
            total = run.window.total
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
                    skip(ends_window=last and not first)
                    return None
                run.window.total = windows.size + (0 if first else total)
                parts.run_backward(loss, loss if share == 1 else loss * share)
                run.last_loss = loss
                return loss

            if not last:
                with self.strategy.accumulating(run.step_module or module):
                    closure()
                return output
            optimizer_step(run.progress.epoch, index, managed, closure)
            run.window.clear()
            self._after_closure(parts, stepped, ran)
            return output

        def close() -> None:
            self.strategy.average_accumulated(module)
            optimizer_step(run.progress.epoch, run.progress.batch - 1, managed, lambda: None)
            run.window.clear()
            self._after_closure(parts, stepped, True)

        run.close_window = close
        return step

    def _after_closure(self, parts: StepParts, stepped: list[ManagedOptimizer], ran: bool) -> None:
        """Run the actions after an update and count it.

        In Lightning the call of ``optimizer_step`` is what counts, once, whether and how often it steps the optimizer.
        """
        if not stepped and not self.behavior.count_optimizer_steps:
            return
        if not ran:
            raise MisconfigurationError(
                "The closure hasn't been executed. HINT: did you call `optimizer_closure()` in your `optimizer_step` hook? It could "
                "also happen because the optimizer's `step(closure)` does not run it: then call it before"
            )
        for action in parts.after_step:
            action()
        self.run.progress.global_step += 1
        stepped.clear()

    def _forward_only(self, forward: Step) -> Step:
        """Build the step of a module without an optimizer: forward only."""
        progress = self.run.progress

        def step(batch: Any, index: int) -> Any:
            output = forward(batch, index)
            progress.global_step += 1
            return output

        return step

    def _manual(self, forward: Step) -> Step:
        """Build the step of manual optimization, in which ``training_step`` runs the optimizers."""
        progress, optimizers = self.run.progress, self.run.managed_optimizers
        stepped: list[ManagedOptimizer] = []
        every = self.behavior.count_optimizer_steps
        for managed in optimizers:
            before = tuple(partial(h, managed.optimizer) for h in self.trainer.resolve("on_before_optimizer_step"))
            count = partial(_count, progress) if every else partial(stepped.append, managed)
            managed.manage(before, count)
        if every:
            return lambda batch, index: _manual_output(forward(batch, index))

        def step(batch: Any, index: int) -> Any:
            output = _manual_output(forward(batch, index))
            if stepped:
                stepped.clear()
                progress.global_step += 1
            return output

        return step


def _scaled_backward(
    backward: Callable[[torch.Tensor], Any], scale: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], Any]:
    return lambda loss: backward(scale(loss))


def _count(progress: Progress) -> None:
    progress.global_step += 1


def _manual_output(output: Any) -> Any:
    if output is None or isinstance(output, (torch.Tensor, Mapping)):
        return output
    raise MisconfigurationError(
        "In manual optimization, `training_step` must either return a Tensor or have no return (or a dict, which hooks get); got "
        f"{type(output).__name__}"
    )
