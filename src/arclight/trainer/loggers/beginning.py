"""What loggers are told when a run begins."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from arclight.trainer.loggers.params import is_tensor

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


def run_hyperparams(module: Module, datamodule: Any) -> dict[str, Any] | None:
    """Hyper-parameters of both, as they were when saved; None where neither wants them logged.

    Raises RuntimeError where both have a name with different values.
    """
    owners = [owner for owner in (module, datamodule) if getattr(owner, "_log_hyperparams", False)]
    if not owners:
        return None
    merged: dict[str, Any] = {}
    for owner in owners:
        given = {name: value for name, value in owner.hparams_initial.items() if name != "_class_path"}
        clashing = [name for name in given if name in merged and not _same(given[name], merged[name])]
        if clashing:
            raise RuntimeError(
                f"Error while merging hparams: the module and the data module both have {clashing}, with different values; "
                "rename one, leave it out with save_hyperparameters(ignore=...), or pass logger=False to one of them"
            )
        merged |= given
    return merged


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or is_tensor(one):
        return False
    return bool(np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other)


def log_beginning(loggers: Iterable[Any], module: Module, hyperparams: dict[str, Any] | None) -> None:
    """Give each logger the hyper-parameters and the module's graph, and let it write them."""
    for logger in loggers:
        if hyperparams is not None:
            logger.log_hyperparams(dict(hyperparams))
        logger.log_graph(module)
        logger.save()
