"""Hold the state of a run: position, logged values, data, optimizers and requests to stop.

The Trainer owns one `RunState`, and swaps in a copy for a trial or a nested evaluation; loops, data and logging write to it. What a
resume needs of it is saved by ``checkpoint.state``. A new field that a fit must not inherit is reset in `_clear`, one that a trial must
not share in `for_trial`.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from arclight.trainer.logging.metrics import Metrics
from arclight.trainer.logging.results import ResultCollection
from arclight.trainer.loop.accumulation import AccumulationState
from arclight.trainer.loop.predictions import Predictions
from arclight.trainer.loop.progress import Progress, RunningStage, TrainerState

if TYPE_CHECKING:
    from arclight.trainer.data.stage_data import BatchIterator, Lookahead, StageData
    from arclight.trainer.loop.optimizers import LRSchedulerConfig, ManagedOptimizer


class RunState:
    """State of a run: position, logged values, data, optimizers and requests to stop.

    A trainer has one; a trial and a nested evaluation get one of their own.
    """

    def __init__(self) -> None:
        self.progress, self.window, self.state = Progress(), AccumulationState(), TrainerState()
        self.logged = self.training_values = ResultCollection("train")
        self.metrics = Metrics()
        self.predictions = Predictions()
        self.optimizers: list[Optimizer] = []
        self.managed_optimizers: list[ManagedOptimizer] = []
        self.lr_scheduler_configs: list[LRSchedulerConfig] = []
        self.step_module: torch.nn.Module | None = None
        """What runs a training step: the module, or what a strategy wraps it in."""
        self.close_window: Callable[[], None] | None = None
        """Ends an accumulation window early; None if no step builds one."""
        self.eval_batch = 0
        """Batches of the evaluation under way."""
        self.evaluated: Counter[str] = Counter()
        """Batches of all evaluations, by stage."""
        self.is_last_batch = False
        """Whether the batch is known to be its epoch's last; see `Trainer.is_last_batch`."""
        self.pending_rng: dict[str, Any] | None = None
        """Random state of a checkpoint, to go on from at the epoch's start."""
        self.warned_of_minimum = False
        self.nested = False
        """True for the state of an evaluation that a hook of another run calls."""
        self._clear(data_seed=0)

    def _clear(self, data_seed: int) -> None:
        self.should_stop = self.received_sigterm = self.requeue = self.left_within_epoch = self.warned_of_no_loss = (
            False
        )
        self.last_loss: torch.Tensor | None = None
        self.validated_time: float | None = None
        self.rng_before_validation: dict[str, Any] | None = None
        self.measured: dict[str, Any] = {}
        """What "auto" settings of this fit were measured as, here or by the run that it resumes."""
        self.data: dict[str, StageData] = {}
        self.num_training_batches: int | float = math.inf
        self.batch_iterator: BatchIterator | None = None
        self.upcoming: Lookahead | None = None
        """The rest of an epoch of unknown length."""
        self.loader_state: dict[str, Any] = {}
        self.loader_seeds: list[int] | int = []
        """Seeds of the training loaders from a checkpoint, until the loaders are made; older checkpoints have one number for all."""
        self.data_seed = data_seed

    def begin_fit(self, data_seed: int) -> None:
        """Reset the state for a new fit, except its position."""
        if not self.progress.batch:
            self.training_values, self.metrics = ResultCollection("train"), Metrics()
        self.window = AccumulationState()
        self.logged = self.training_values
        self._clear(data_seed)

    def begin_evaluation(self, stage: str) -> None:
        """Show the values of an evaluation by itself, in place of those of a run before."""
        self.logged, self.metrics = ResultCollection(stage), Metrics(self.metrics.rows)

    def for_trial(self) -> RunState:
        """Copy the state for a trial: the same data, and a position, values and requests of its own."""
        other = copy.copy(self)
        other.progress, other.window = dataclasses.replace(self.progress), AccumulationState()
        other.state, other.evaluated = dataclasses.replace(self.state), self.evaluated.copy()
        other.metrics, other.logged = Metrics(), ResultCollection(self.logged.stage)
        other.training_values = other.logged
        other.should_stop, other.pending_rng, other.loader_state = False, None, {}
        other.last_loss = other.batch_iterator = other.rng_before_validation = other.close_window = None
        return other

    @contextmanager
    def logging_into(self, values: ResultCollection) -> Iterator[None]:
        """Collect logged values in ``values`` while it runs."""
        before, self.logged = self.logged, values
        try:
            yield
        finally:
            self.logged = before

    def use_optimizers(self, optimizers: list[Optimizer], managed: list[ManagedOptimizer]) -> None:
        """Set the optimizers to train with; ``managed`` are as a module sees them."""
        self.optimizers, self.managed_optimizers = optimizers, managed

    def request_stop(self, *, sigterm: bool = False, requeue: bool = False) -> None:
        """Request the fit to end after the current batch."""
        self.should_stop = True
        self.received_sigterm, self.requeue = self.received_sigterm or sigterm, self.requeue or requeue

    def for_nested(self) -> RunState:
        """Copy the state for an evaluation that a hook calls: data, values and stage of its own."""
        other = self.for_trial()
        other.nested, other.data, other.measured = True, dict(self.data), dict(self.measured)
        other.metrics = Metrics(self.metrics.rows)
        return other

    def take_signals(self, other: RunState) -> None:
        """Take over what signals and nested hooks requested of a state that ran in between."""
        asked = other.should_stop and other.nested  # what a trial ends by is its own
        if asked or other.received_sigterm or other.requeue:
            self.request_stop(sigterm=other.received_sigterm, requeue=other.requeue)

    def rewind(self, global_step: int, plateau_step: int) -> None:
        """Set the number of updates back to ``global_step``, outside of any accumulation window."""
        self.window.clear()
        self.progress.set_step(global_step)
        self.progress.plateau_step = plateau_step

    def set_training_batches(self, count: int | float) -> None:
        """Set the number of batches that an epoch of this fit has."""
        self.num_training_batches = count

    @property
    def batch_under_way(self) -> bool:
        """True from the start of a training batch until it is counted."""
        values = self.training_values
        return values.in_batches and values.batch.index == self.progress.batch

    @property
    def stage(self) -> str:
        """Name of the running stage; empty between two."""
        return self.state.stage.value if self.state.stage is not None else ""

    @stage.setter
    def stage(self, stage: str) -> None:
        self.state.stage = RunningStage(stage) if stage else None
