"""Transfer batches to the device through the user's hooks, and iterate over them.

`stage_data` makes a `batch_transfer` and a `BatchIterator` for each stage; the fit and evaluation loops call them for each batch. A
step with a ``dataloader_iter`` argument gets the iterator and takes as many batches as it wants.

The order of the three transfer hooks, and whose hook is called (data module before module), are Lightning's and stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from arclight.data.combined import Count
from arclight.fabric.precision import Precision
from arclight.fabric.rank_zero import rank_zero_warn
from arclight.trainer.datamodule import DataModule
from arclight.trainer.loop.hooks import logging_as, note_iterator, overridden, takes_iterator
from arclight.trainer.module import Module

if TYPE_CHECKING:
    from arclight.fabric.strategies import Strategy


_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def batch_transfer(
    module: Module,
    datamodule: Any,
    precision: Precision,
    strategy: Strategy,
    *,
    training: bool,
    dataloader_idx: int = 0,
) -> Callable[[Any], Any] | None:
    """Compose the precision's cast and the three batch transfer hooks.

    Each hook is the data module's own or else the module's.

    None if there is nothing to do, and for training steps that take their batches from an iterator.
    """
    if training and takes_iterator(module.training_step):
        note_iterator("training_step")
        return None
    device = strategy.device
    casts = type(precision).convert_input is not Precision.convert_input
    owners = [_owner(module, datamodule, name) for name in _HOOKS]
    if all(owner is None for owner in owners):
        move = strategy.move
        if device.type == "cpu":
            return precision.convert_input if casts else None
        return (lambda batch: move(precision.convert_input(batch))) if casts else move
    before, transfer, after = (
        logging_as(module, name, getattr(owner, name)) if owner is not None else getattr(module, name)
        for owner, name in zip(owners, _HOOKS, strict=True)
    )

    def run(batch: Any) -> Any:
        if casts:
            batch = precision.convert_input(batch)
        return after(transfer(before(batch, dataloader_idx), device, dataloader_idx), dataloader_idx)

    return run


def _owner(module: Module, data: Any, name: str) -> Module | DataModule | None:
    """Return the object whose version of a hook is called; None if nobody has one."""
    of_data = data is not None and overridden(data, name, DataModule) and not _wraps_default(data, name)
    of_module = overridden(module, name, Module)
    if of_data and of_module:
        rank_zero_warn(
            f"You have overridden `{name}` in both `LightningModule` and `LightningDataModule`. It will use the implementation "
            "from `LightningDataModule` instance."
        )
    return data if of_data else module if of_module else None


def _wraps_default(data: DataModule, name: str) -> bool:
    """Return True for DataModule's own hook behind wrappers (``functools.wraps``)."""
    function = getattr(data, name)
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return getattr(function, "__func__", function) is getattr(DataModule, name)


class BatchIterator:
    """Iterator over ``(batch, batch_idx, dataloader_idx)``; the step decides how many to take.

    length: batches in all, infinity if it is not known. start: batches taken before, by the run that is resumed.
    """

    def __init__(self, batches: Iterator[tuple[Any, int, int]], length: Count, start: int = 0) -> None:
        self._batches = batches
        self.length = length
        self.fetched = start
        """Batches taken so far."""
        self.done = start >= length
        """Whether nothing is left to take, as far as is known."""
        self.batch: Any = None
        self.batch_idx = self.dataloader_idx = 0

    def __iter__(self) -> BatchIterator:
        return self

    def __next__(self) -> tuple[Any, int, int]:
        if self.done:
            raise StopIteration
        try:
            newest = next(self._batches)
        except StopIteration:
            self.done = True
            raise
        self.batch, self.batch_idx, self.dataloader_idx = newest
        self.fetched += 1
        self.done = self.fetched >= self.length
        return newest

    def turns(self) -> Iterator[BatchIterator]:
        """Yield this iterator once for every step that has batches left."""
        while not self.done:
            yield self
