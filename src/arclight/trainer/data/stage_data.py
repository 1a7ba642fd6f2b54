"""Hold the dataloaders of a stage, and iterate over their batches.

`DataConnector` (``trainer.data``) makes a `StageData` for each stage and fills it; `EvaluationLoop` and the connector read it, and
`RunState` keeps it. A step with a ``dataloader_iter`` argument gets a `BatchIterator` and takes as many batches as it wants; checkpoints
hold how many.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from arclight.data.combined import Count, ResumableCombination, holds_loaders, is_loader
from arclight.data.loader import ResumableLoader
from arclight.fabric.errors import MisconfigurationError

HOOKS = {"train": "train_dataloader", "validate": "val_dataloader", "test": "test_dataloader", "predict": "predict_dataloader"}  # fmt: skip
"""The hook that gives a stage's data."""


@dataclass
class StageData:
    """Data of one stage: the source, and the loaders once they were requested."""

    stage: str
    function: str
    """The entry point: fit, validate, test or predict."""
    given: Any = None
    """The user's loaders; None to ask ``hook`` for them."""
    hook: Callable[[], Any] | None = None
    """The hook of module or data module that gives loaders; None if loaders were given, or neither has it."""
    owner: str = ""
    """The class of module or data module."""
    structure: Any = None
    """The user's loaders, in the shape they were given."""
    loaders: Sequence[ResumableLoader | ResumableCombination] = ()
    """What the loop reads one after another."""
    counts: list[Count] = field(default_factory=list)
    """Batches of each of the user's loaders, within the limits."""
    total: Count = 0
    user_loaders: list[Any] = field(default_factory=list)
    """The user's loaders one by one."""
    runs: bool = False
    """Whether a process has batches: then all of them run the stage, some perhaps without a batch."""
    loaded: bool = False
    loaded_at: float = -math.inf
    """The epoch under way when they were asked for."""

    @property
    def defined(self) -> bool:
        return self.given is not None or self.hook is not None

    def close(self, but: Container[int] = ()) -> None:
        """End the loaders' workers, ``but`` those of loaders with these ids."""
        for loader in self.loaders:
            if id(loader) not in but:
                loader.close()

    @property
    def limits(self) -> list[Count]:
        """Batches of each of `loaders`."""
        return self.counts if len(self.counts) == len(self.loaders) else [self.total]

    def request(self) -> Any:
        """Request the user's loaders.

        Raises MisconfigurationError if there are none or something else was given.
        """
        source = self.given if self.hook is None else self.hook()
        wrong = _invalid_dataloader_reason(source)
        if wrong is None:
            return source
        if self.hook is not None:
            raise MisconfigurationError(
                f"An invalid dataloader was returned from `{self.owner}.{HOOKS[self.stage]}()`. Found "
                f"{source!r}: {wrong}"
            )
        argument = {"train": "train_dataloaders", "validate": "val_dataloaders"}.get(self.stage, "dataloaders")
        argument = argument if self.function == "fit" else "dataloaders"
        raise MisconfigurationError(
            f"An invalid dataloader was passed to `Trainer.{self.function}({argument}=...)`. Found {source!r}: {wrong}. Either "
            f"pass the data to `.{self.function}()` OR implement `def {HOOKS[self.stage]}(self):` in your module or data module"
        )


def _invalid_dataloader_reason(source: Any) -> str | None:
    """Explain why `source` cannot be read as data; None if it can."""
    if source is None:
        return "nothing to read"
    if not hasattr(source, "__iter__") and not callable(source) and not dataclasses.is_dataclass(source):
        return f"{type(source).__name__} cannot be iterated"
    if not isinstance(source, (list, tuple, dict)) or holds_loaders(source):
        return None
    if isinstance(source, dict) and source:
        return "a dict is read as several loaders, and these are none"
    types = {type(part): part for part in source}
    kinds = {_loader_kind(part) for part in types.values()}  # one of each type: lists of batches can be long
    return f"it mixes {' and '.join(sorted(kinds))}" if len(kinds) > 1 else None


def _loader_kind(part: Any) -> str:
    if isinstance(part, (bool, int, float, str, bytes)):
        return "plain values"
    if isinstance(part, (torch.Tensor, list, tuple, dict)) or hasattr(part, "__array__"):
        return "batches or groups"
    return "loaders" if is_loader(part) else "other objects"


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


class Lookahead(Iterator[Any]):
    """Iterator over batches of unknown number that can tell whether another one follows."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._next: list[Any] = []

    def __next__(self) -> Any:
        return self._next.pop() if self._next else next(self._batches)

    @property
    def ended(self) -> bool:
        """True if no batch follows; the next one is read to know."""
        if not self._next:
            self._next.extend(islice(self._batches, 1))
        return not self._next
