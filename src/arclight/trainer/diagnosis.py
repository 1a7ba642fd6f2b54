"""Find the step at which a loss became NaN or infinite, by replaying the last steps.

`Trainer.check_finite` calls `diagnose` before it raises NonFiniteLossError. It restores the last (else the best) checkpoint of the first
callback that has one and trains on, so it relies on exact resuming; with several processes or manual optimization it does nothing. The
sentence may change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from arclight.checkpoint.remote import to_path
from arclight.data import ResumableLoader
from arclight.fabric.batches import map_tensors
from arclight.fabric.seeding import set_rng_state
from arclight.trainer.callback import BuildsStep, Callback
from arclight.trainer.checkpoint.loading import load_weights
from arclight.trainer.loop.gradients import loss_of
from arclight.trainer.loop.step import Step, StepBuilder

if TYPE_CHECKING:
    from arclight.trainer.data.connector import DataConnector
    from arclight.trainer.trainer import Trainer

MOST = 1000
"""Most batches to run again; after more, the sentence says how to do so instead."""


def diagnose(trainer: Trainer) -> str:
    """Find the first step with a NaN or infinite loss, and describe it in one sentence.

    It names the step, its samples, and the first module that gave such an output.

    Resume being exact, running on from a kept checkpoint meets the same batches with the same random draws. Hooks of callbacks do not
    run again, and the trainer's position and metrics stay as they are; the module, its optimizers and the data do not, as the run is
    over. Only for one process and a module that the trainer optimizes; an empty text otherwise.
    """
    module, checkpoint = trainer.lightning_module, _newest(trainer.checkpoint_callbacks)
    if trainer.world_size > 1 or not module.automatic_optimization or checkpoint is None:
        return ""
    run, last = trainer.run_state, trainer.run_state.progress.batches
    saved = trainer.checkpoint_io.load_checkpoint(checkpoint)
    if "optimizer_states" not in saved:
        return ""
    if last - saved["loops"]["progress"]["batches"] > MOST:
        return f"run from {checkpoint} with log_every_n_steps=1 to find the first such step"
    position, metrics = dict(vars(run.progress)), run.metrics
    # those that make the step are the only callbacks that run again
    with trainer.temporarily(
        callbacks=[callback for callback in trainer.callbacks if isinstance(callback, BuildsStep)]
    ):
        try:
            run.metrics = metrics.copy()
            load_weights(module, saved["state_dict"])
            trainer.checkpoints.restore_training(saved)
            trainer.data.restore_position()
            found = _Replay(StepBuilder(trainer, module), trainer.data, trainer.enter).until(last)
        except Exception as error:  # whatever it is, the user is to hear of the loss first
            return f"running on from {checkpoint} to find where it began ended with {type(error).__name__}: {error}"
        finally:
            run.metrics = metrics
            vars(run.progress).update(position)
    return (
        f"{found}; {checkpoint} is from before" if found else f"running on from {checkpoint}, it did not happen again"
    )


def _newest(callbacks: Iterable[Callback]) -> Path | None:
    kept = (
        getattr(callback, "last_model_path", "") or getattr(callback, "best_model_path", "") for callback in callbacks
    )
    return next((to_path(path) for path in kept if path and to_path(path).exists()), None)


class _Replay:
    """Train on from a restored checkpoint and check every loss."""

    def __init__(self, builder: StepBuilder, data: DataConnector, enter: Callable[[str], None]) -> None:
        self._builder, self._data, self._enter = builder, data, enter
        self._module, self._run = builder.module, builder.run
        self._seen: list[tuple[int, str]] = []

    def until(self, last: int) -> str:
        """Train until a loss is NaN or infinite, or batch ``last``; describe that step, or ""."""
        builder, data, run, progress = self._builder, self._data, self._run, self._run.progress
        if run.pending_rng is not None:
            set_rng_state(run.pending_rng)
            run.pending_rng = None
        step, move = builder.step(self._watched(builder.forward())), data.transfer(self._module)
        while progress.batches < last:
            start, before = progress.batch, progress.batches
            for index, batch in enumerate(data.train_batches(progress.epoch, start), start):
                batch = move(batch) if move is not None else batch
                run.logged.batch.set(batch)
                run.is_last_batch = index + 1 == run.num_training_batches
                self._enter("training_step")
                step(batch, index)
                progress.batch, progress.batches = index + 1, progress.batches + 1
                if self._seen:
                    return self._sentence(*self._seen[0])
                if progress.batches >= last:
                    break
            if progress.batches == before:
                return ""  # data that can be read only once
            progress.next_epoch()
        return ""

    def _watched(self, forward: Step) -> Step:
        def watched(batch: Any, index: int) -> Any:
            with _first_bad_module(self._module) as names:
                output = forward(batch, index)
            loss = loss_of(output)
            if loss is not None and not math.isfinite(float(loss.detach())):
                self._seen.append((index, names[0] if names else ""))
            return output

        return watched

    def _sentence(self, index: int, name: str) -> str:
        progress, module = self._run.progress, self._module
        where = (
            f"first in module {name!r} ({type(module.get_submodule(name)).__name__})"
            if name
            else "outside of its modules"
        )
        samples = _samples(self._data.train_loader, progress.epoch, index)
        of = f", samples {samples}" if samples else ""
        return f"it was first so at step {progress.global_step} (epoch {progress.epoch}, batch {index}{of}), {where}"


def _samples(loader: object, epoch: int, index: int) -> str:
    """Format a batch's data set indices; empty if the data has none."""
    if not isinstance(loader, ResumableLoader) or not loader.track_indices():
        return ""
    next(iter(loader.batches(epoch, index)), None)
    indices = list(loader.indices[0]) if loader.indices else []
    shown = ", ".join(map(str, indices[:16]))
    return f"[{shown}{', ...' if len(indices) > 16 else ''}]"


@contextmanager
def _first_bad_module(module: nn.Module) -> Iterator[list[str]]:
    """Record the names of modules whose output holds NaN or infinity, first one first."""
    names: list[str] = []

    def look(name: str, output: Any) -> None:
        def check(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                names.append(name)
            return tensor

        if not names:
            map_tensors(output, check)

    hooks = [
        part.register_forward_hook(lambda _part, _inputs, output, name=name: look(name, output))
        for name, part in module.named_modules()
        if name
    ]
    try:
        yield names
    finally:
        for hook in hooks:
            hook.remove()
