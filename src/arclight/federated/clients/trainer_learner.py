"""Train clients with a Trainer: each round is a fit that resumes where the last one ended.

`Client` and recipes' sites make a `TrainerLearner`; `executor` calls `fit` and `evaluate`. In: weights and a number of steps; out: trained
weights and metrics. Between rounds the state stays in memory; ordinary checkpoints in ``states/`` of the client's folder are what a restarted
node resumes from. Tests compare a client's rounds with one fit, bit for bit: load, freeze and save in the same order.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight import checkpoint as checkpoints
from arclight.fabric import atomic_replace
from arclight.fabric.seeding import MAX_SEED, generators_lock, isolate_rng, seed_generators
from arclight.federated.clients.learner import Outcome
from arclight.federated.clients.local_policy import LocalPolicy, load_mixed, weights_to_measure
from arclight.federated.clients.round_callback import ENTRY, EvaluationCallback, ModuleTensors, Position, RoundCallback
from arclight.federated.errors import FederatedError
from arclight.federated.masks.transfer_mask import MODEL
from arclight.trainer.checkpoint.named_state import check_trained_alike
from arclight.trainer.datamodule import DataModule
from arclight.trainer.trainer import Trainer

if TYPE_CHECKING:
    from arclight.federated.clients.learner import Progress, Tensors
    from arclight.federated.protocol import Evaluate, Fit
    from arclight.trainer.callback import Callback
    from arclight.trainer.module import Module


log = logging.getLogger(__name__)

_QUIET = {
    "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    "max_epochs": -1, "num_sanity_val_steps": 0,
}  # fmt: skip


def trainer_factory(**arguments: Any) -> Callable[[list[Callback], Path], Trainer]:
    """Return a function that makes a client's Trainer from ``arguments``.

    It is quiet, writes nothing and has no limit, unless they say otherwise.
    """
    given = arguments.pop("callbacks", None) or []
    own = list(given) if isinstance(given, (list, tuple)) else [given]

    def make(callbacks: list[Callback], folder: Path) -> Trainer:
        return Trainer(**{"default_root_dir": folder, **_QUIET, **arguments}, callbacks=[*own, *callbacks])

    return make


class TrainerLearner:
    """Implement `Learner` with a Trainer.

    The client's state (optimizers, place in the data, random numbers, schedules, callbacks) stays in memory. Of several in one process
    one trains or measures at a time, as they share the process's random generators.

    seed: of what the client draws and of the order of its data; by default it follows from the run's. All processes of a
    client that is trained by several make one each, with the same folder.
    """

    def __init__(
        self,
        module: Module,
        datamodule: Any,
        make_trainer: Callable[[list[Callback], Path], Trainer] | None = None,
        folder: str | Path = "client",
        *,
        seed: int | None = None,
    ) -> None:
        own = datamodule is None or isinstance(datamodule, DataModule)
        self.module, self.datamodule, self._seed = module, datamodule if own else LoaderDataModule(datamodule), seed
        self._checkpoints = TrainingCheckpoints(Path(folder) / "states")
        self._callback = RoundCallback()
        self._make_trainer, self._runs = make_trainer or trainer_factory(), Path(folder) / "runs"
        self.trainer = self._new_trainer()
        self._begun = False
        self._memory: dict[str, Any] | None = None
        """The state between two rounds; None before the first, and after a fit that failed half-way."""

    def fit(self, order: Fit, weights: Tensors, progress: Progress) -> Outcome:
        state, at = self._newest()
        inside = at if at is not None and at.is_of(order) else None
        callback, self._memory = self._callback, None
        with generators_lock.current, isolate_rng():
            if state is None:
                if self._begun:  # an earlier fit failed before its first save: its trainer is somewhere in the data
                    self.trainer = self._new_trainer()
                self._begun = True
                self._seed_all(order)
                self._load_first(order, weights)
            callback.begin(order, weights, inside, at, progress, self._save)
            try:
                self.trainer.fit(self.module, datamodule=self.datamodule, ckpt_path=state)
                if callback.cancelled is not None:
                    raise callback.cancelled
                outcome = self._outcome(order)
                untouched = state if isinstance(state, dict) else None  # if nothing was left to train
                self._memory = untouched if callback.state is None else callback.state
                return outcome
            finally:
                callback.end()

    def evaluate(self, order: Evaluate, weights: Tensors) -> Outcome:
        given = weights_to_measure(self.module, weights, LocalPolicy.of(order))
        state, _ = self._newest()
        if isinstance(state, Path):  # the module does not have what is the client's own yet, or not any more
            given = {**checkpoints.load_weights(state), **given}
        measuring = EvaluationCallback(given)
        trainer = self.trainer
        with generators_lock.current, isolate_rng(), trainer.temporarily(callbacks=[measuring]):
            try:
                results = trainer.validate(self.module, datamodule=self.datamodule, verbose=False)
            finally:
                measuring.restore(self.module)
        if not results:
            raise FederatedError(
                f"{type(self.module).__name__} was asked to measure round {order.round}, and has no validation_step or no "
                'validation data: give the client some, or set evaluate_on="server"'
            )
        each = (
            trainer.strategy.all_gather_object(measuring.samples)
            if trainer.strategy.contributes_logs
            else [measuring.samples]
        )
        values = {name: value for loader in results for name, value in loader.items()}
        return Outcome(samples=sum(each), metrics=_finite(values))

    def close(self) -> None:
        self._memory = self._callback.state = None
        for logger in self.trainer.loggers if self.trainer.global_step else []:
            logger.finalize("success")

    # -- state -----------------------------------------------------------------------------------------------------

    def _newest(self) -> tuple[dict[str, Any] | Path | None, Position | None]:
        """Return the state that the next fit resumes from, and its position."""
        moved_on = self._checkpoints.moved_on()
        if self._memory is not None and not moved_on:
            return self._memory, Position.read(self._memory[ENTRY])
        path = self._checkpoints.newest()
        return path, Position.read(checkpoints.load(path, only=ENTRY)[ENTRY]) if path is not None else None

    def _new_trainer(self) -> Trainer:
        trainer = self._make_trainer([self._callback], self._runs)
        if self._callback not in trainer.callbacks:
            raise FederatedError(
                "the function that makes a client's Trainer must hand it the callbacks that it is given"
            )
        return trainer

    def _save(self, at: Position) -> None:
        """Save a checkpoint; called in the fit, by all processes."""
        self.trainer.save_checkpoint(self._checkpoints.next(f"round-{at.round}-step-{at.steps}"))
        self.trainer.checkpoint_io.teardown()
        if self.trainer.is_global_zero:
            self._checkpoints.prune()

    def _seed_all(self, order: Fit) -> None:
        seed = self._seed
        if seed is None:
            digest = hashlib.sha256(f"{order.seed}/{order.client}".encode()).digest()
            seed = int.from_bytes(digest[:8], "little") % (MAX_SEED + 1)
        seed_generators(seed)

    def _load_first(self, order: Fit, weights: Tensors) -> None:
        """Load the run's weights before a first fit.

        Callbacks that copy the module when a fit starts, as averages do, then see these and not initial ones.
        """
        parameters = list(self.module.parameters())  # none yet if they are made in `configure_model`
        if parameters and not any(parameter.is_meta for parameter in parameters):
            check_trained_alike(self.module, weights, MODEL)
            transfer_mask = LocalPolicy.of(order).transfer_mask
            first = [key for key in transfer_mask.down(weights, order.round, None) if key.startswith(MODEL)]
            load_mixed(self.module, weights, first, transfer_mask, 0.0)

    def _outcome(self, order: Fit) -> Outcome:
        trainer, done = self.trainer, self._callback.position().steps
        if done < order.steps:
            limits = f"max_epochs={trainer.max_epochs}, max_steps={trainer.max_steps}"
            raise FederatedError(
                f"the client's Trainer came to its end after {done} of {order.steps} steps of round {order.round} ({limits}): raise its "
                "limits, or leave them to the federation"
            )
        counts = self._callback.counts(trainer.progress, trainer.strategy)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if trainer.last_loss is not None:
            metrics.setdefault("train/loss", float(trainer.last_loss.detach()))
        keys = self._callback.keys(trainer.lightning_module, trainer.optimizers, order)
        try:
            tensors = ModuleTensors(trainer, keys, LocalPolicy.of(order).transfer_mask.numbers)
        except KeyError as error:
            raise FederatedError(str(error.args[0])) from error
        return Outcome(tensors=tensors, steps=order.steps, metrics=_finite(metrics), **counts)


class LoaderDataModule(DataModule):
    """Wrap a loader, or a pair of training and validation loaders, as a data module."""

    def __init__(self, loaders: Any) -> None:
        super().__init__()
        self._train, self._val = loaders if isinstance(loaders, tuple) else (loaders, [])

    def train_dataloader(self) -> Any:
        return self._train

    def val_dataloader(self) -> Any:
        return self._val


def _finite(metrics: dict[str, float]) -> dict[str, float]:
    if strange := [name for name, value in metrics.items() if not math.isfinite(value)]:
        log.warning("metrics that are NaN or infinite are not reported: %s", ", ".join(strange))
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


_NAME = re.compile(r"(?P<number>\d{6,})-.+")
_KEPT = 2
"""The newest, and the one before it in case that the newest turns out to be damaged."""


class TrainingCheckpoints:
    """Keep a client's checkpoints ``<number>-<what>`` in ``folder``.

    The newest intact one counts.

    Numbers count saves. (Steps would not do: a client that is set back to the run's clock has fewer later than before.)
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._damaged: set[Path] = set()
        self._next = max((number for number, _ in self._all()), default=0) + 1

    def newest(self) -> Path | None:
        """Return the newest whose files are all intact; None if there never was one.

        Warns of newer ones that are damaged. Raises FederatedError if there are some and all are damaged.
        """
        found = self._all()
        for _, path in reversed(found):
            problems = checkpoints.verify(path)
            if not problems:
                return path
            self._damaged.add(path)
            log.warning("a saved state is damaged, an older one is looked for: %s", problems[0])
        if found:
            raise FederatedError(
                f"none of the {len(found)} saved states in {self.folder} is sound: put one back from a backup, or remove that folder "
                "to let the client begin again"
            )
        return None

    def next(self, what: str) -> Path:
        """Return the path of the next one. Every process of a client asks equally often."""
        path = self.folder / f"{self._next:06d}-{what}"
        self._next += 1
        return path

    def moved_on(self) -> bool:
        """Return True if another process has saved one since this one last saved or looked."""
        newest = max((number for number, _ in self._all()), default=0)
        moved, self._next = newest >= self._next, max(self._next, newest + 1)
        return moved

    def prune(self) -> None:
        """Remove all but the newest complete ones, and what killed processes left."""
        if self.folder.is_dir():
            atomic_replace.sweep(self.folder)
        sound = [path for _, path in self._all() if path not in self._damaged]
        for path in (*sound[:-_KEPT], *self._damaged):
            atomic_replace.retire(path)
        self._damaged.clear()

    def _all(self) -> list[tuple[int, Path]]:
        entries = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted((int(match["number"]), path) for path in entries if (match := _NAME.fullmatch(path.name)))
