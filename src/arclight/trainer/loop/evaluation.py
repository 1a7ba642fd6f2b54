"""Evaluation and prediction: the same batches-and-hooks loop for validate, test and predict."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from arclight.data import ResumableCombination, ResumableLoader
from arclight.data.combined import Count
from arclight.fabric.batches import map_tensors
from arclight.fabric.errors import SIGTERMException
from arclight.fabric.rank_zero import rank_zero_warn
from arclight.fabric.seeding import rng_state
from arclight.trainer.callback import WritesPredictions
from arclight.trainer.data import limits, stage_data
from arclight.trainer.data.batches import BatchIterator, batch_transfer
from arclight.trainer.data.stage_data import StageData
from arclight.trainer.logging import reporting
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
from arclight.trainer.loop.progress import TrainerFn
from arclight.trainer.module import Module
from arclight.trainer.profilers.profiling import profile_items, profile_strategy, profile_transfer

if TYPE_CHECKING:
    from arclight.trainer.trainer import Trainer


@dataclass
class Predictions:
    """The state of ``trainer.predict``, for callbacks that write what it gives."""

    loaders: Sequence[ResumableLoader | ResumableCombination] = ()
    return_predictions: bool = False
    """Whether outputs are kept for the caller."""
    keeps: bool = False
    outputs: list[list[Any]] = field(default_factory=list)
    """For each loader the outputs of its batches, on the host."""
    current_batch_indices: Any = None
    """Places in the data set of the samples of the newest batch; None where the data have no such places."""
    epoch_batch_indices: list[list[Any]] = field(default_factory=list)
    """For each loader those of every batch; kept for callbacks whose ``interval`` is the epoch."""
    _epochs: bool = False

    @classmethod
    def begin(
        cls, trainer: Trainer, loaders: Sequence[ResumableLoader | ResumableCombination], keep: bool
    ) -> Predictions:
        writers = [callback.interval for callback in trainer.callbacks if isinstance(callback, WritesPredictions)]
        epochs = any(getattr(interval, "on_epoch", False) for interval in writers)
        known = [isinstance(loader, ResumableLoader) and loader.track_indices() for loader in loaders]
        if writers and not all(known):
            unknown = loaders[known.index(False)]
            kind = type(unknown.loader if isinstance(unknown, ResumableLoader) else unknown).__name__
            rank_zero_warn(f"Couldn't infer the batch indices fetched from your dataloader: `{kind}`")
        return cls(loaders, keep, keep or epochs, [[] for _ in loaders], None, [[] for _ in loaders], epochs)

    @property
    def predictions(self) -> list[Any]:
        """The outputs of the one loader, or a list of outputs for each of several."""
        return self.outputs[0] if len(self.outputs) == 1 else self.outputs

    def next_batch(self, number: int) -> None:
        """Note which samples the batch that comes now is made of."""
        loader = self.loaders[number]
        indices = loader.indices if isinstance(loader, ResumableLoader) else None
        self.current_batch_indices = indices.popleft() if indices is not None else None
        if self._epochs:
            self.epoch_batch_indices[number].append(self.current_batch_indices)

    def add(self, output: Any, number: int) -> None:
        """Keep an output, if anybody wants it later."""
        if output is None:
            rank_zero_warn("predict returned None if it was on purpose, ignore this warning...")
        if self.keeps:
            self.outputs[number].append(map_tensors(output, _to_host))


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu()


PROGRESS_INTERVAL = 0.1
"""Seconds between two ``on_progress`` calls."""

_FETCHING = {
    "validate": "[_EvaluationLoop].val_next", "test": "[_EvaluationLoop].test_next", "predict": "[_PredictionLoop].predict_next",
}  # fmt: skip
"""What profilers call the wait for a batch."""

_HOOK = {"validate": "validation", "sanity_check": "validation", "test": "test", "predict": "predict"}


def validate_during_fit(trainer: Trainer, module: Module) -> None:
    """The validation of a fit: training values are put aside and taken up again."""
    training_values, before, trainer.stage = trainer.logged, trainer.stage, "validate"
    # A run that is broken off in here validates again when it is resumed, with the random numbers of the first time.
    trainer.rng_before_validation = rng_state()
    try:
        data = stage_data.load(trainer, "validate")
        if not trainer.window.count:
            logging_as(module, "on_validation_model_zero_grad", module.on_validation_model_zero_grad)()
        run_evaluation(trainer, module, data)
        trainer.validated_time = time.monotonic()
    finally:
        trainer.logged, trainer.stage = training_values, before


def without_gradients(trainer: Trainer) -> AbstractContextManager[Any]:
    """What evaluation runs in; ``torch.inference_mode(False)`` inside it brings gradients back."""
    inference = trainer.inference_mode and trainer.strategy.evaluates_in_inference_mode
    return torch.inference_mode() if inference else torch.no_grad()


@contextmanager
def evaluation_mode(module: Module, hook: str) -> Iterator[None]:
    """The module in evaluation mode; afterwards every submodule is in the mode it was in."""
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


def run_evaluation(trainer: Trainer, module: Module, data: StageData) -> list[dict[str, float]]:
    """One pass over the data; the epoch's values for each loader, none where no process has a batch.

    A process without batches runs all the same, with every hook but those of batches: others wait for it there.
    """
    if not data.runs:
        return []
    hook = _HOOK[trainer.stage]
    _check_arguments(module, hook, len(data.loaders), data.stage)
    values, trainer.eval_batch = reporting.begin_evaluation(trainer), 0
    with without_gradients(trainer), evaluation_mode(module, hook):
        _begin(trainer, hook)
        counts = limits.evaluated(trainer, data.limits)  # now, as a hook may have had the data loaded anew
        trainer.strategy.copy_from_rank_zero(module.buffers())  # all ranks evaluate the model that is saved
        calls = Calls.resolve(trainer, module, hook, len(data.loaders))
        parts: list[dict[str, torch.Tensor]] = []
        for number in _turns(data, calls):
            values.loader = number if calls.several and not calls.takes_iterator else None
            for _ in _outputs(trainer, module, data, counts, number, calls):
                pass
            parts.append(reporting.end_batches(trainer, values))
        values.loader = None
        trainer.strategy.settle(module)
        trainer.call(f"on_{hook}_epoch_end", monitors=False)
        results = reporting.end_evaluation(trainer, values, parts)
        trainer.call(f"on_{hook}_end", monitors=False)
    trainer.evaluated[trainer.stage] += trainer.eval_batch
    if trainer.stage == "validate":  # only now: what is saved half-way validates again when it is resumed
        trainer.progress.validated_at = trainer.progress.batch
        trainer.rng_before_validation = None
    trainer.call_monitors(f"on_{hook}_start", f"on_{hook}_epoch_start", f"on_{hook}_epoch_end", f"on_{hook}_end")
    values.clear()
    return results


def predictions(trainer: Trainer, module: Module, data: StageData, keep: bool) -> Iterator[Any]:
    """The outputs of ``predict_step`` one by one; `keep` collects them in ``trainer.predict_loop`` as well.

    The module is in evaluation mode from the first output until the last was taken or the iterator was closed;
    gradients are off only while it runs, not for the code that takes the outputs.
    """
    hook = "predict"
    _check_arguments(module, hook, len(data.loaders), hook)
    reporting.begin_evaluation(trainer)
    trainer.eval_batch = 0
    trainer.predict_loop = state = Predictions.begin(trainer, data.loaders, keep)
    with evaluation_mode(module, hook):
        with without_gradients(trainer):
            _begin(trainer, hook)
        if data.loaders is not state.loaders:  # a hook had them asked for again
            trainer.predict_loop = state = Predictions.begin(trainer, data.loaders, keep)
        calls = Calls.resolve(trainer, module, hook, len(data.loaders))
        for number in _turns(data, calls):
            outputs = _outputs(trainer, module, data, data.limits, number, calls)
            while True:
                with without_gradients(trainer):
                    output = next(outputs, state)
                if output is state:
                    break
                state.add(output, number)
                yield output
        trainer.strategy.settle(module)
        with without_gradients(trainer):
            trainer.call(f"on_{hook}_epoch_end")
            trainer.call(f"on_{hook}_end")


def _begin(trainer: Trainer, hook: str) -> None:
    trainer.call(f"on_{hook}_start", monitors=hook == "predict")
    trainer.call(f"on_{hook}_epoch_start", monitors=hook == "predict")


class Calls(NamedTuple):
    """All that one evaluation calls, resolved once."""

    hook: str
    step: Callable[..., Any]
    takes_index: bool
    takes_iterator: bool
    several: bool
    start: tuple[Hook, ...]
    end: tuple[Hook, ...]
    on_progress: tuple[Hook, ...]

    @classmethod
    def resolve(cls, trainer: Trainer, module: Module, hook: str, loaders: int) -> Calls:
        step = getattr(module, f"{hook}_step")
        return cls(
            hook=hook,
            step=profile_strategy(
                trainer,
                f"{hook}_step",
                trainer.precision_plugin.wrap(trainer.strategy.wrap_evaluation_step(module, step)),
            ),
            takes_index=takes(step, "batch_idx", least=2),
            takes_iterator=takes_iterator(step),
            several=loaders > 1,
            start=trainer.resolve(f"on_{hook}_batch_start"),
            end=trainer.resolve(f"on_{hook}_batch_end"),
            on_progress=callback_hooks(trainer, module, trainer.callbacks, "on_progress"),
        )


def _check_arguments(module: Module, hook: str, loaders: int, stage: str) -> None:
    step, prefix = f"{hook}_step", {"validate": "val"}.get(stage, stage)
    if takes_iterator(getattr(module, step)):
        note_iterator(step)
    else:
        check_loader_index(module, step, 3, loaders > 1, prefix)
    check_loader_index(module, f"on_{hook}_batch_start", 3, loaders > 1, prefix)
    check_loader_index(module, f"on_{hook}_batch_end", 4, loaders > 1, prefix)


def _turns(data: StageData, calls: Calls) -> range:
    """The loaders that are run one after another; an iterator goes through all of them by itself."""
    return range(1 if calls.takes_iterator else len(data.loaders))


def _outputs(
    trainer: Trainer, module: Module, data: StageData, counts: list[Count], number: int, calls: Calls
) -> Iterator[Any]:
    """Run the batches of one loader, with all hooks around them."""
    if calls.takes_iterator:
        yield from _iterator_outputs(trainer, data, counts, calls)
        return
    move = profile_transfer(trainer, batch_transfer(trainer, module, number))
    values, hook = trainer.logged, calls.hook
    show_at = 0.0
    which = (number,) if calls.several else ()
    values.in_batches = True
    for index, batch in enumerate(_batches(trainer, data, counts, number)):
        if move is not None:
            batch = move(batch)
        values.batch.set(batch)
        if hook == "predict":
            trainer.predict_loop.next_batch(number)
        if calls.start:
            trainer.enter(f"on_{hook}_batch_start")
            for function in calls.start:
                function(batch, index, *which)
        trainer.enter(f"{hook}_step")
        output = calls.step(batch, *((index, *which) if calls.takes_index else which))
        trainer.eval_batch += 1
        if trainer.received_sigterm and trainer.state.fn != TrainerFn.FITTING:
            raise SIGTERMException  # there is nothing to save
        if calls.end:
            trainer.enter(f"on_{hook}_batch_end")
            for function in calls.end:
                function(output, batch, index, *which)
        if values.has_steps:
            reporting.evaluation_step(trainer, values)
        show_at = _show_progress(calls, show_at)
        yield output


def _iterator_outputs(trainer: Trainer, data: StageData, counts: list[Count], calls: Calls) -> Iterator[Any]:
    """As `_outputs`, for a step that takes its batches from an iterator over all loaders."""
    hook, show_at = calls.hook, 0.0
    batches = (
        (batch, index, number)
        for number in range(len(data.loaders))
        for index, batch in enumerate(_batches(trainer, data, counts, number))
    )
    iterator, values = BatchIterator(batches, sum(counts)), trainer.logged
    values.in_batches = True
    for _ in iterator.turns():
        if calls.start:
            trainer.enter(f"on_{hook}_batch_start")
            for function in calls.start:
                function(iterator.batch, iterator.batch_idx, *((iterator.dataloader_idx,) if calls.several else ()))
        trainer.enter(f"{hook}_step")
        try:
            output = calls.step(iterator)
        except StopIteration:
            return
        trainer.eval_batch = iterator.fetched
        if calls.end:
            trainer.enter(f"on_{hook}_batch_end")
            which = (iterator.dataloader_idx,) if calls.several else ()
            for function in calls.end:
                function(output, iterator.batch, iterator.batch_idx, *which)
        if values.has_steps:
            reporting.evaluation_step(trainer, values)
        show_at = _show_progress(calls, show_at)
        yield output


def _show_progress(calls: Calls, show_at: float) -> float:
    if calls.on_progress and (now := time.monotonic()) >= show_at:
        show_at = now + PROGRESS_INTERVAL
        for function in calls.on_progress:
            function()
    return show_at


def _batches(trainer: Trainer, data: StageData, counts: list[Count], number: int) -> Iterator[Any]:
    """The batches of one loader. Samplers and data sets are told the epoch; randomness is the same in every evaluation."""
    batches: Iterator[Any] = data.loaders[number].batches(trainer.current_epoch, seed_epoch=0)
    limit, batches = counts[number], profile_items(trainer, _FETCHING[data.stage], batches)
    return islice(batches, None if limit == float("inf") else int(limit))
