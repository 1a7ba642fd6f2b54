"""A batch to look at before anything runs: for strategies that must know what a step does before optimizers are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from arclight.fabric.errors import MisconfigurationError
from arclight.fabric.seeding import isolate_rng
from arclight.trainer.dataloading import STEPS, load
from arclight.trainer.module import Module
from arclight.trainer.signatures import takes_iterator
from arclight.trainer.transfer import batch_transfer

if TYPE_CHECKING:
    from arclight.trainer.trainer import Trainer


def example_of(trainer: Trainer, module: Module, stage: str, given: Any = None) -> tuple[Callable[..., Any], Any]:
    """The step of ``stage`` and the first batch that it will see in an epoch (or the one that is ``given``), moved as it will be then.

    The loop reads that batch again, and no random number is drawn. Raises MisconfigurationError where there is none to see without
    taking it away.
    """
    step = getattr(module, STEPS[stage])
    if takes_iterator(step):
        raise MisconfigurationError(
            f"{STEPS[stage]} takes its batches from an iterator, and this strategy cuts each batch itself: let it take (batch, batch_idx)"
        )
    with isolate_rng():
        batch = _first(trainer, stage) if given is None else given
        move = batch_transfer(trainer, module)
        return step, move(batch) if move is not None else batch


def _first(trainer: Trainer, stage: str) -> Any:
    data = load(trainer, stage)
    found, lack = None, "there are no data"
    once = next((loader for loader in data.user_loaders if hasattr(loader, "__next__")), None)
    if once is not None:
        lack = f"a {type(once).__name__} can be read once only"
    elif data.loaders:
        found = next(iter(data.loaders[0].batches(trainer.current_epoch)), None)
    if found is None:
        raise MisconfigurationError(
            f"this strategy looks at a batch before {STEPS[stage]} runs, and {lack}: give it one, as in Pipeline(example=batch)"
        )
    return found
