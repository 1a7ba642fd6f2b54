"""What loggers are told when a run begins."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arclight.trainer.module import Module


def open_experiments(loggers: Iterable[Any]) -> None:
    """Make each logger's experiment now, so that set-up hooks find its name and place.

    One that patches others (Weights & Biases watches TensorBoard's writer) comes first; one that waits for the run
    folder is left alone, as nothing is written before there is something to write.
    """
    for logger in sorted(loggers, key=lambda logger: type(logger).__name__ != "WandbLogger"):
        if hasattr(logger, "experiment") and not getattr(logger, "needs_folder", False):
            _ = logger.experiment


def log_beginning(loggers: Iterable[Any], module: Module, hyperparams: dict[str, Any] | None) -> None:
    """Give each logger the hyper-parameters and the module's graph, and let it write them."""
    for logger in loggers:
        if hyperparams is not None:
            logger.log_hyperparams(dict(hyperparams))
        logger.log_graph(module)
        logger.save()
