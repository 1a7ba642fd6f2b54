"""Describe one site for a user: its module, its data, its trainer.

A public class: users give clients to `Server.run` or to a `Node`; ``arclight federate`` and the Flower app make them of a recipe. It holds what
the user gave, and makes the `Learner` that `executor` or a worker process asks for (by default a `TrainerLearner`). Arguments stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight.federated.errors import FederatedError

if TYPE_CHECKING:
    from arclight.federated.clients.learner import Learner
    from arclight.trainer.callback import Callback
    from arclight.trainer.module import Module
    from arclight.trainer.trainer import Trainer

    MakeTrainer = Callable[[list[Callback], Path], Trainer]


class Client:
    """Describe one site of a federation.

    module, datamodule: the module, and its data (a data module, a loader, or a pair of loaders: to train and to validate). ``build``, in
    their place: a function that returns both, called once in the process that trains; for worker processes one that can be imported.
    trainer: arguments of the client's `Trainer`, or a function of callbacks and a folder that makes it and hands it those callbacks. By
    default it is quiet, writes no checkpoints of its own (the client keeps its state anyway) and has no limit: rounds end it. seed: of
    what the client draws and of the order of its data; by default it follows from the run's. learner: a function of a folder that gives a
    `Learner`, for clients that train without a Trainer; in the place of all others.
    """

    def __init__(
        self,
        name: str,
        module: Module | None = None,
        datamodule: Any = None,
        trainer: Mapping[str, Any] | MakeTrainer | None = None,
        *,
        build: Callable[[], tuple[Module, Any]] | None = None,
        learner: Callable[[Path], Learner] | None = None,
        seed: int | None = None,
    ) -> None:
        given = [module is not None, build is not None, learner is not None]
        if sum(given) != 1:
            raise FederatedError(
                f"client {name!r} needs one of module (with datamodule), build and learner, got {sum(given)} of them"
            )
        if not name:
            raise FederatedError("a client needs a name, by which the server knows it in every round")
        self.name, self.seed = name, seed
        self._module, self._datamodule, self._trainer = module, datamodule, trainer
        self._build, self._learner = build, learner

    def __repr__(self) -> str:
        return f"Client({self.name!r})"

    @property
    def is_made_here(self) -> bool:
        """Return True if its module is an object of this process, which no other can train."""
        return self._module is not None

    def learner(self, folder: Path) -> Learner:
        """Make the learner that trains it, with its state in ``folder``."""
        from arclight.fabric.seeding import generators_lock

        with generators_lock.current:  # the server may measure in this process meanwhile
            return self._trained_by(folder) if self._learner is None else self._learner(folder)

    def _trained_by(self, folder: Path) -> Learner:
        from arclight.federated.clients.trainer_learner import TrainerLearner, trainer_factory

        module, data = (self._module, self._datamodule) if self._build is None else self._build()
        if module is None:
            raise FederatedError(f"build() of client {self.name!r} gave no module: return (module, datamodule)")
        make = self._trainer if callable(self._trainer) else trainer_factory(**(self._trainer or {}))
        return TrainerLearner(module, data, make, folder, seed=self.seed)
