"""Run one federated round within a fit: load the server's weights, save, stop, give results.

`trainer_learner` gives its Trainer one `RoundCallback`, and begins each round on it (an `EvaluationCallback` for each evaluation). In: weights by
manifest key; out: keys to send, `ModuleTensors` of them, counts. `Position` is in the client's checkpoints under `ENTRY`: its fields stay.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from arclight.fabric.batches import count_samples_and_tokens
from arclight.fabric.distributed.dtensor import local_tensor
from arclight.federated.clients.local_policy import (
    LocalPolicy,
    clamp_adam_moments,
    keys_to_load,
    load_mixed,
    moments_by_state,
    reset_randomised,
    select_for_module,
    trained_names,
)
from arclight.federated.errors import CancelledError
from arclight.federated.masks.experts import ExpertParts
from arclight.federated.masks.settings import matches
from arclight.federated.masks.transfer_mask import MODEL
from arclight.trainer.callback import Callback
from arclight.trainer.callbacks.pause import Pause
from arclight.trainer.checkpoint.named_state import (
    check_trained_alike,
    gather_optimizer_state,
    gather_parameters,
    load_optimizer_state,
    load_parameters,
    named_tensors,
    optimizer_state_names,
    training_records,
)
from arclight.trainer.loop.progress import Progress as LoopProgress
from arclight.trainer.loop.progress import StopRun
from arclight.trainer.loop.schedulers import StepSync

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from arclight.fabric.strategies.base import Strategy
    from arclight.federated.clients.learner import Progress, Tensors
    from arclight.federated.protocol import Fit
    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer

ENTRY = "federated"
"""Entry of a client's checkpoint: the `Position` at which it was saved."""
_LOSS_INTERVAL_S = 0.5


@dataclass(frozen=True)
class Position:
    """The place in a round at which a client's state was saved."""

    run: str
    round: int
    base: str
    fragment: int | None
    steps: int = 0
    """Steps of the round that are done."""
    counts: dict[str, int] = field(default_factory=dict)
    """Samples and tokens (of this process) before the round."""

    @classmethod
    def of(cls, order: Fit) -> Position:
        return cls(run=order.run, round=order.round, base=order.base, fragment=order.fragment)

    @classmethod
    def read(cls, entry: Mapping[str, Any] | None) -> Position | None:
        return None if entry is None else cls(**entry)

    def is_of(self, order: Fit) -> bool:
        """Return True if it lies within the round of the order, started from the same weights."""
        return (self.run, self.round, self.base, self.fragment) == (order.run, order.round, order.base, order.fragment)


class RoundCallback(Pause):
    """Run one client's rounds as a callback.

    `begin` sets the round of the next fit, `end` releases it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._order: Fit | None = None
        self.cancelled: CancelledError | None = None
        """Why the round was ended early, if it was."""

    def begin(
        self,
        order: Fit,
        weights: Tensors,
        at: Position | None,
        last: Position | None,
        progress: Progress,
        save: Callable[[Position], None],
    ) -> None:
        """Set the round that the next fit trains.

        at: where in the round the state lies that the fit resumes from; None if it is older, or there is none.

        ``last``: where its newest state was made, None before the client's first round. ``save`` writes the client's state.
        """
        self._order, self._weights, self._last, self._progress, self._save = order, weights, last, progress, save
        self._at, self._policy = at, LocalPolicy.of(order)
        self._done, self._frozen = (at.steps if at is not None else 0), list[torch.nn.Parameter]()
        self.cancelled = None
        self.steps = max(order.steps - self._done, 1)

    def end(self) -> None:
        """Release the round."""
        for parameter in self._frozen:
            parameter.requires_grad = True
        self._order, self._weights, self._frozen = None, {}, []

    # -- hooks -----------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._clock = StepSync(trainer.run_state)

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        order = self._order
        if order is None:
            raise RuntimeError(
                "this trainer belongs to a federation's client: its fits are begun by RoundCallback.begin"
            )
        if self._at is None:
            counts = {"samples": trainer.progress.samples, "tokens": trainer.progress.tokens}
            self._at = Position(**{**asdict(Position.of(order)), "counts": counts})
            self._load_round_weights(pl_module, trainer.optimizers, order)
        self._freeze(pl_module)
        if self._done >= order.steps:
            self.state = None  # random states are not restored yet: the file has what this would be
            raise StopRun
        self._loss_at, self._seen = 0.0, trainer.global_step
        self._start = trainer.global_step - self._done
        super().on_train_start(trainer, pl_module)

    def _load_round_weights(self, module: Module, optimizers: Sequence[Optimizer], order: Fit) -> None:
        last, transfer_mask = self._last, self._policy.transfer_mask
        before = None if last is None else last.round if last.run == order.run else order.round
        check_trained_alike(module, self._weights, MODEL)
        taken = keys_to_load(self._weights, self._policy, order.round, before)
        mix = transfer_mask.streaming.mix if transfer_mask.streaming is not None and before is not None else 0.0
        load_mixed(module, self._weights, [key for key in taken if key.startswith(MODEL)], transfer_mask, mix)
        if transfer_mask.masks.randomised and order.round % transfer_mask.masks.randomise_every == 0:
            load_parameters(module, reset_randomised(module, self._policy, order.seed))
        if self._policy.reset_optimizer:
            for optimizer in optimizers:
                optimizer.state.clear()
        moment_keys = [key for key in taken if not key.startswith(MODEL)]
        came = moments_by_state(select_for_module(module, self._weights, moment_keys, transfer_mask))
        for state, moments in came.items():
            load_optimizer_state(module, optimizers, state, moments, order.clock)
        if came:
            clamp_adam_moments(optimizers)
        self._clock.set(order.clock)

    def _freeze(self, module: Module) -> None:
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and matches(name, self._policy.masks.frozen):
                parameter.requires_grad = False
                self._frozen.append(parameter)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._stepped(trainer)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._stepped(trainer)
        super().on_train_epoch_end(trainer, pl_module)

    def _stepped(self, trainer: Trainer) -> None:
        if trainer.global_step == self._seen or self._order is None:
            return
        before, self._seen = self._done, trainer.global_step
        self._done, every = self._seen - self._start, self._order.checkpoint_every_steps
        if every and (self._done >= self._order.steps or self._done // every > before // every):
            self._save(self.position())
        if self._done < self._order.steps:
            self._report(trainer.last_loss, trainer.strategy)

    def _report(self, last_loss: torch.Tensor | None, strategy: Strategy) -> None:
        loss, now = None, time.monotonic()
        if now >= self._loss_at and last_loss is not None:
            loss, self._loss_at = float(last_loss.detach()), now + _LOSS_INTERVAL_S
        try:
            self._progress(self._done, loss)
        except CancelledError as error:
            self.cancelled = error
            strategy.request_stop("cancelled")  # all processes of the client at one step

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        if self._order is not None:
            checkpoint[ENTRY] = asdict(self.position())

    def position(self) -> Position:
        assert self._at is not None
        return Position(**{**asdict(self._at), "steps": self._done})

    # -- results -----------------------------------------------------------------------------------------------------

    def keys(self, module: Module, optimizers: Sequence[Optimizer], order: Fit) -> list[str]:
        """List the keys to send, in an order that all processes have alike."""
        transfer_mask = self._policy.transfer_mask
        absent = {name for name in training_records(module) if MODEL + name not in order.weights.tensors}
        names = [name for name in trained_names(module) if name not in absent]  # begun before there was such a record
        moments = [
            f"{s}/{n}"
            for s in transfer_mask.moments
            for n in optimizer_state_names(module, optimizers, s)
            if n in set(names)
        ]
        return transfer_mask.up([*(MODEL + name for name in names), *moments], order.round)

    def counts(self, progress: LoopProgress, strategy: Strategy) -> dict[str, int]:
        """Count samples and tokens of the round, of all processes. A collective."""
        assert self._at is not None
        done = {"samples": progress.samples, "tokens": progress.tokens}
        mine = {name: done[name] - self._at.counts.get(name, 0) for name in done}
        if not strategy.contributes_logs:
            return mine
        return {name: sum(each[name] for each in strategy.all_gather_object(mine)) for name in mine}


class ModuleTensors(Mapping[str, torch.Tensor]):
    """Read weights and moments of a trainer by key, each gathered when it is asked for.

    All processes ask alike.
    """

    def __init__(
        self, trainer: Trainer, keys: list[str], numbers: Callable[[str], Sequence[int] | None] | None = None
    ) -> None:
        """Initialise the view of the trainer's tensors ``keys``.

        ``numbers``: the experts of a stack that a client has, of which a smaller model may hold only these.
        """
        full = _FullTensors(trainer.lightning_module, trainer.strategy, trainer.optimizers)
        self._keys, self._parts = keys, ExpertParts(full, numbers)
        for key in keys:
            if key not in self._parts:
                raise KeyError(f"{key} was asked for, and this client's model and optimizer have no such tensor")

    def __getitem__(self, key: str) -> torch.Tensor:
        return self._parts[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


class _FullTensors(Mapping[str, torch.Tensor]):
    """Gather weights and moments of a module by key.

    Of sharded ones only rank 0 gets the values.
    """

    def __init__(self, module: Module, strategy: Strategy, optimizers: Sequence[Optimizer]) -> None:
        self._module, self._strategy, self._optimizers = module, strategy, optimizers
        self._weights = named_tensors(module)

    def __getitem__(self, key: str) -> torch.Tensor:
        state, _, name = key.partition("/")
        found = (
            gather_parameters(self._module, self._strategy, [name])
            if state == "model"
            else gather_optimizer_state(self._module, self._strategy, self._optimizers, state, [name])
        )
        value, shape = next(found)[1], self._weights[name].shape
        return value if value.shape == shape else value.new_zeros(()).expand(shape)

    def __contains__(self, key: object) -> bool:
        state, _, name = str(key).partition("/")
        return name in self._weights and (
            state == "model" or name in optimizer_state_names(self._module, self._optimizers, state)
        )

    def __iter__(self) -> Iterator[str]:
        return (MODEL + name for name in self._weights)

    def __len__(self) -> int:
        return len(self._weights)


class EvaluationCallback(Callback):
    """Validate with given weights; `restore` puts the module's own back."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._weights, self._own = weights, dict[str, torch.Tensor]()
        self.samples = 0

    def on_validation_start(self, trainer: Trainer, pl_module: Module) -> None:
        own = dict(pl_module.named_parameters(remove_duplicate=False)) | named_tensors(pl_module)
        self._own = {name: local_tensor(own[name]).detach().clone() for name in self._weights if name in own}
        load_parameters(pl_module, self._weights)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.samples += count_samples_and_tokens(batch)[0]

    @torch.no_grad()
    def restore(self, module: Module) -> None:
        own = dict(module.named_parameters(remove_duplicate=False)) | named_tensors(module)
        for name, value in self._own.items():
            local_tensor(own[name]).copy_(value)
        self._own = {}
