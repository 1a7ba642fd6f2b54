"""Define the base of loggers, and open them and log parameters and graph to them.

The Trainer, callbacks and Fabric call a `Logger`'s methods; ``trainer.loggers`` implement it, and users subclass it. Method names are
Lightning's. ``loop.session`` calls the two functions at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arclight.fabric.rank_zero import rank_zero_only
from arclight.trainer.loggers.params import add_prefix

if TYPE_CHECKING:
    from torch import nn

    from arclight.trainer.callbacks.checkpoint.model_checkpoint import ModelCheckpoint


class Logger:
    """Base class of loggers; override the methods that your destination supports.

    The trainer calls :meth:`log_metrics`, :meth:`save` and, after an error, :meth:`finalize` on every rank, the others on rank 0;
    with :func:`arclight.fabric.rank_zero.rank_zero_only` before them they too run on rank 0 alone.

    A logger that was given no folder of its own (:attr:`needs_folder`) writes into the run folder: the trainer
    calls :meth:`use_folder` before anything is logged.
    """

    LOGGER_JOIN_CHAR = "-"
    """Stands between :attr:`prefix` and a metric's name."""

    prefix: str | None = ""
    """Put before every metric's name."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record ``metrics`` at ``step``, the number of optimizer updates completed."""
        raise NotImplementedError(f"{type(self).__name__} has no log_metrics(metrics, step)")

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Record hyper-parameters: a mapping or a namespace."""

    def log_graph(self, model: nn.Module, input_array: Any = None) -> None:
        """Record the model's graph."""

    def save(self) -> None:
        """Flush everything logged so far to the operating system or the service."""

    def finalize(self, status: str) -> None:
        """Close the log of a run that ended with ``status``: success, failed or aborted."""
        self.save()

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        """Handle a complete checkpoint, in loggers that upload it."""

    def resume(self, step: int) -> None:
        """Delete what a run that was killed logged at steps later than ``step``, to resume there."""

    def rewind(self, step: int) -> None:
        """Delete what this fit has logged at steps later than ``step``, after a rollback."""
        self.resume(step)

    @property
    def needs_folder(self) -> bool:
        """Return True if this logger was given no folder, and writes into the run folder."""
        return False

    def use_folder(self, folder: Path) -> None:
        """Write into ``folder``, the run folder."""

    @property
    def name(self) -> str | None:
        return None

    @property
    def version(self) -> int | str | None:
        return None

    @property
    def save_dir(self) -> str | None:
        """Parent of :attr:`root_dir`."""
        return None

    @property
    def root_dir(self) -> str | None:
        """Parent of all versions."""
        return self.save_dir

    @property
    def log_dir(self) -> str | None:
        """Folder of this version's files."""
        return self.root_dir

    @property
    def group_separator(self) -> str:
        """Stands in metrics' names between a group and its member, such as in ``train/loss``."""
        return "/"

    def _prefixed(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        return add_prefix(metrics, self.prefix, self.LOGGER_JOIN_CHAR)


class DummyExperiment:
    """Stand-in for an experiment, which takes every call, item and attribute."""

    def nop(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)  # copying and pickling ask for what is not there
        return self.nop

    def __getitem__(self, index: Any) -> DummyExperiment:
        return self

    def __setitem__(self, index: Any, value: Any) -> None:
        pass


def rank_zero_experiment(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Make a logger's ``experiment`` the real object on rank 0, and a dummy on other ranks."""

    @wraps(function)
    def experiment(self: Any) -> Any:
        return function(self) if rank_zero_only.rank == 0 else DummyExperiment()

    return experiment


class DummyLogger(Logger):
    """Logger that records nothing."""

    def __init__(self) -> None:
        self._experiment = DummyExperiment()

    @property
    def experiment(self) -> DummyExperiment:
        return self._experiment

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getitem__(self, index: int) -> DummyLogger:
        return self

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return DummyExperiment().nop


def open_experiments(loggers: Iterable[Any]) -> None:
    """Make each logger's experiment now, so that set-up hooks find its name and place.

    One that patches others (Weights & Biases watches TensorBoard's writer) comes first; one that waits for the run
    folder is left alone, as nothing is written before there is something to write.
    """
    for logger in sorted(loggers, key=lambda logger: type(logger).__name__ != "WandbLogger"):
        if hasattr(logger, "experiment") and not getattr(logger, "needs_folder", False):
            _ = logger.experiment


def log_hyperparams_and_graph(loggers: Iterable[Any], module: nn.Module, hyperparams: dict[str, Any] | None) -> None:
    """Log the hyper-parameters and the module's graph to each logger, and save them."""
    for logger in loggers:
        if hyperparams is not None:
            logger.log_hyperparams(dict(hyperparams))
        logger.log_graph(module)
        logger.save()
