"""Run evaluation: one loop of batches and hooks for validate, test and predict.

`session` runs it for entry points and the sanity check, `fit` for validation, ``tuner.trial`` for trials. Out: logged values by loader,
or predictions. Tests compare the order of hooks, which follows Lightning's, callbacks with ``runs_last`` after the module; every
submodule's mode is restored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from arclight.data.combined import Count
from arclight.fabric.errors import SIGTERMException
from arclight.fabric.seeding import rng_state
from arclight.trainer.callbacks.prediction_writer import BasePredictionWriter
from arclight.trainer.data.stage_data import BatchIterator, StageData
from arclight.trainer.loop.hooks import (
    Hook,
    callback_hooks,
    check_loader_index,
    logging_as,
    note_iterator,
    overridden,
    takes,
    takes_iterator,
)
from arclight.trainer.loop.predictions import Predictions
from arclight.trainer.loop.progress import TrainerFn
from arclight.trainer.module import Module
from arclight.trainer.profilers.profiling import profile_items, profile_strategy, profile_transfer

if TYPE_CHECKING:
    from arclight.trainer.trainer import Trainer

PROGRESS_INTERVAL = 0.1
"""Seconds between two ``on_progress`` calls."""

_HOOK = {"validate": "validation", "sanity_check": "validation", "test": "test", "predict": "predict"}


class Calls(NamedTuple):
    """The functions that one evaluation calls, resolved once."""

    hook: str
    step: Callable[..., Any]
    takes_index: bool
    takes_iterator: bool
    several: bool
    start: tuple[Hook, ...]
    end: tuple[Hook, ...]
    on_progress: tuple[Hook, ...]


class EvaluationLoop:
    """Loop over the batches of a validation, test or prediction, with all hooks."""

    def __init__(self, trainer: Trainer, module: Module) -> None:
        self.trainer, self.module, self.run_state = trainer, module, trainer.run_state
        self.strategy = trainer.strategy

    def validate_during_fit(self) -> None:
        """Validate within a fit: training values are set aside and restored.

        After an error the stage stays, for ``on_exception`` to see where it was.
        """
        run = self.run_state
        training_values, before, run.stage = run.logged, run.stage, "validate"
        # A run that is broken off in here validates again when it is resumed, with the random numbers of the first time.
        run.rng_before_validation = rng_state()
        try:
            data = self.trainer.data.load("validate")
            if not run.window.count:
                module = self.module
                logging_as(module, "on_validation_model_zero_grad", module.on_validation_model_zero_grad)()
            self.evaluate(data)
            run.validated_time = time.monotonic()
        finally:
            run.logged = training_values
        run.stage = before

    def evaluate(self, data: StageData) -> list[dict[str, float]]:
        """Evaluate the data once and return the results for each loader.

        Empty if no rank has a batch.

        A process without batches runs all the same, with every hook but those of batches: others wait for it there.
        """
        if not data.runs:
            return []
        trainer, run, module, reporter = self.trainer, self.run_state, self.module, self.trainer.reporter
        hook = _HOOK[run.stage]
        _check_arguments(module, hook, len(data.loaders), data.stage)
        values, run.eval_batch = reporter.begin_evaluation(), 0
        with self.without_gradients(), evaluation_mode(module, hook):
            self._begin(hook)
            counts = self._counts(data)  # now, as a hook may have had the data loaded again
            self.strategy.copy_from_rank_zero(module.buffers())  # all ranks evaluate the model that is saved
            calls = self._calls(hook, len(data.loaders))
            parts: list[dict[str, torch.Tensor]] = []
            for number in _turns(data, calls):
                values.loader = number if calls.several and not calls.takes_iterator else None
                for _ in self._outputs(data, counts, number, calls):
                    pass
                parts.append(reporter.end_batches(values))
            values.loader = None
            self.strategy.sync_module_attributes(module)
            trainer.call(f"on_{hook}_epoch_end", monitors=False)
            results = reporter.end_evaluation(values, parts)
            trainer.call(f"on_{hook}_end", monitors=False)
        run.evaluated[run.stage] += run.eval_batch
        if run.stage == "validate":  # only now: what is saved half-way validates again when it is resumed
            run.progress.validated_at = run.progress.batch
            run.rng_before_validation = None
        trainer.call_monitors(f"on_{hook}_start", f"on_{hook}_epoch_start", f"on_{hook}_epoch_end", f"on_{hook}_end")
        values.clear()
        return results

    def predict(self, data: StageData, keep: bool) -> Iterator[Any]:
        """Predict the data once and yield the outputs as they are taken; ``keep`` keeps them, too.

        The module is in evaluation mode from the first output until the last was taken or the iterator was closed;
        gradients are off only while it runs, not for the code that takes the outputs.
        """
        trainer, run, module, hook = self.trainer, self.run_state, self.module, "predict"
        _check_arguments(module, hook, len(data.loaders), hook)
        trainer.reporter.begin_evaluation()
        run.eval_batch = 0
        run.predictions = state = self._collect(data, keep)
        with evaluation_mode(module, hook):
            with self.without_gradients():
                self._begin(hook)
            if data.loaders is not state.loaders:  # a hook had them asked for again
                run.predictions = state = self._collect(data, keep)
            calls = self._calls(hook, len(data.loaders))
            for number in _turns(data, calls):
                outputs = self._outputs(data, data.limits, number, calls)
                while True:
                    with self.without_gradients():
                        output = next(outputs, state)
                    if output is state:
                        break
                    state.add(output, number)
                    yield output
            self.strategy.sync_module_attributes(module)
            with self.without_gradients():
                trainer.call(f"on_{hook}_epoch_end")
                trainer.call(f"on_{hook}_end")

    def collect(self, data: StageData, keep: bool) -> Any:
        """Predict the data once; return the outputs if ``keep``, None if no rank has a batch."""
        if not data.runs:
            return None
        for _ in self.predict(data, keep):
            pass
        return self.run_state.predictions.predictions if keep else None

    def without_gradients(self) -> AbstractContextManager[Any]:
        """Disable gradients for an evaluation.

        ``torch.inference_mode(False)`` inside it enables them again. A fit may train with tensors that its validation has made
        (prototypes, for one), which it could not if they were of inference mode.
        """
        within_fit = self.run_state.state.fn == TrainerFn.FITTING
        inference = self.trainer.inference_mode and self.strategy.evaluates_in_inference_mode and not within_fit
        return torch.inference_mode() if inference else torch.no_grad()

    def _collect(self, data: StageData, keep: bool) -> Predictions:
        writers = [c.interval for c in self.trainer.callbacks if isinstance(c, BasePredictionWriter)]
        at_end = any(interval.on_epoch for interval in writers)
        return Predictions.begin(data.loaders, keep, writes=bool(writers), at_epoch_end=at_end)

    def _begin(self, hook: str) -> None:
        self.trainer.call(f"on_{hook}_start", monitors=hook == "predict")
        self.trainer.call(f"on_{hook}_epoch_start", monitors=hook == "predict")

    def _counts(self, data: StageData) -> list[Count]:
        """Return the number of batches of each loader, reduced for the sanity check."""
        steps = self.trainer.num_sanity_val_steps
        if not self.trainer.sanity_checking or steps == -1:
            return data.limits
        return [min(steps, number) for number in data.limits]

    def _calls(self, hook: str, loaders: int) -> Calls:
        trainer, module = self.trainer, self.module
        step = getattr(module, f"{hook}_step")
        wrapped = trainer.precision_plugin.wrap(self.strategy.wrap_evaluation_step(module, step))
        return Calls(
            hook=hook,
            step=profile_strategy(trainer.profiler, self.strategy, f"{hook}_step", wrapped),
            takes_index=takes(step, "batch_idx", least=2),
            takes_iterator=takes_iterator(step),
            several=loaders > 1,
            start=trainer.resolve(f"on_{hook}_batch_start"),
            end=trainer.resolve(f"on_{hook}_batch_end"),
            on_progress=callback_hooks(trainer, module, trainer.callbacks, "on_progress"),
        )

    def _outputs(self, data: StageData, counts: list[Count], number: int, calls: Calls) -> Iterator[Any]:
        """Run the batches of one loader with all hooks, and yield their outputs.

        For a step that takes an iterator, the batches of all loaders.
        """
        run, enter, hook = self.run_state, self.trainer.enter, calls.hook
        iterator = self._iterator(data, counts) if calls.takes_iterator else None
        turns = self._batches(data, counts, number) if iterator is None else iterator.turns()
        move = (
            None
            if iterator is not None
            else profile_transfer(self.trainer.profiler, self.strategy, self.trainer.data.transfer(self.module, number))
        )
        values, reporter, show_at = run.logged, self.trainer.reporter, 0.0
        which = (number,) if calls.several else ()

        def place() -> tuple[Any, ...]:
            if iterator is None:
                return batch, index, *which
            return iterator.batch, iterator.batch_idx, *((iterator.dataloader_idx,) if calls.several else ())

        values.in_batches = True
        for index, batch in enumerate(turns):
            if iterator is None:
                if move is not None:
                    batch = move(batch)
                values.batch.set(batch)
                if hook == "predict":
                    run.predictions.next_batch(number)
            if calls.start:
                enter(f"on_{hook}_batch_start")
                for function in calls.start:
                    function(*place())
            enter(f"{hook}_step")
            if iterator is None:
                output = calls.step(batch, *((index, *which) if calls.takes_index else which))
                run.eval_batch += 1
            else:
                try:
                    output = calls.step(iterator)
                except StopIteration:  # the step asked for more than there was
                    return
                run.eval_batch = iterator.fetched
            if run.received_sigterm and run.state.fn != TrainerFn.FITTING and not run.nested:
                raise SIGTERMException  # there is nothing to save
            if calls.end:
                enter(f"on_{hook}_batch_end")
                for function in calls.end:
                    function(output, *place())
            if values.has_steps:
                reporter.evaluation_step(values)
            if calls.on_progress and (now := time.monotonic()) >= show_at:
                show_at = now + PROGRESS_INTERVAL
                for function in calls.on_progress:
                    function()
            yield output

    def _iterator(self, data: StageData, counts: list[Count]) -> BatchIterator:
        """Iterate over the batches of all loaders, for a step that takes them by itself."""
        batches = (
            (batch, index, number)
            for number in range(len(data.loaders))
            for index, batch in enumerate(self._batches(data, counts, number))
        )
        return BatchIterator(batches, sum(counts))

    def _batches(self, data: StageData, counts: list[Count], number: int) -> Iterator[Any]:
        """Yield the batches of one loader.

        Samplers and data sets get the epoch; random draws are the same in every evaluation.
        """
        batches: Iterator[Any] = data.loaders[number].batches(self.trainer.current_epoch, seed_epoch=0)
        limit, label = counts[number], self.trainer.behavior.fetch_label(data.stage)
        batches = profile_items(self.trainer.profiler, label, batches)
        return islice(batches, None if limit == float("inf") else int(limit))


@contextmanager
def evaluation_mode(module: Module, hook: str) -> Iterator[None]:
    """Set the module to evaluation mode, and restore every submodule's mode afterwards."""
    modes = {name: m.training for name, m in module.named_modules()}
    logging_as(module, f"on_{hook}_model_eval", getattr(module, f"on_{hook}_model_eval"))()
    try:
        yield
    finally:
        _restore_modes(module, modes)
        if overridden(module, f"on_{hook}_model_train", Module):
            logging_as(module, f"on_{hook}_model_train", getattr(module, f"on_{hook}_model_train"))()


def _restore_modes(module: nn.Module, modes: dict[str, bool]) -> None:
    for name, submodule in module.named_modules():
        if name in modes:
            submodule.training = modes[name]


def _check_arguments(module: Module, hook: str, loaders: int, stage: str) -> None:
    step, prefix = f"{hook}_step", {"validate": "val"}.get(stage, stage)
    if takes_iterator(getattr(module, step)):
        note_iterator(step)
    else:
        check_loader_index(module, step, 3, loaders > 1, prefix)
    check_loader_index(module, f"on_{hook}_batch_start", 3, loaders > 1, prefix)
    check_loader_index(module, f"on_{hook}_batch_end", 4, loaders > 1, prefix)


def _turns(data: StageData, calls: Calls) -> range:
    """Return the indices of the loaders to run one after another."""
    return range(1 if calls.takes_iterator else len(data.loaders))
