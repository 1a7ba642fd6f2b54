"""Define Lightning's distributed samplers, for user code that imports them.

Nothing in Arclight calls them: `names` lists the classes for users' imports. Names, arguments and error texts are Lightning's and stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, Sampler


class UnrepeatedDistributedSampler(DistributedSampler[int]):
    """Give each index to exactly one rank, without padding: the first ranks may have one more."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(self.dataset, Sized):
            raise TypeError("The given dataset must implement the `__len__` method.")
        self.total_size = len(self.dataset)
        self.num_samples = len(range(self.rank, self.total_size, self.num_replicas))

    def __iter__(self) -> Iterator[int]:
        own = slice(self.rank, self.total_size, self.num_replicas)
        if not self.shuffle:
            return iter(range(self.total_size)[own])
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return iter(torch.randperm(self.total_size, generator=generator)[own].tolist())


class _Indices(Dataset[int]):
    """A sampler's indices as a data set, drawn at first use and again after :meth:`reset`."""

    def __init__(self, sampler: Sampler[Any] | BatchSampler) -> None:
        if not isinstance(sampler, Sized):
            raise TypeError(
                "You seem to have configured a sampler in your DataLoader which does not provide `__len__` method. The "
                "sampler was about to be replaced by `DistributedSamplerWrapper` since `use_distributed_sampler` is True."
                " Either provide `__len__` or set `use_distributed_sampler=False`"
            )
        if len(sampler) == float("inf"):
            raise TypeError(
                "A sampler of infinite length cannot be divided among ranks: set `use_distributed_sampler=False`"
            )
        self.sampler = sampler
        self._drawn: list[Any] | None = None

    def __getitem__(self, index: int) -> Any:
        if self._drawn is None:
            self._drawn = list(self.sampler)
        return self._drawn[index]

    def __len__(self) -> int:
        return len(self.sampler)

    def reset(self) -> None:
        self._drawn = None


class DistributedSamplerWrapper(DistributedSampler[int]):
    """Divide any sampler of known length among ranks: each gets every ``num_replicas``-th index."""

    def __init__(self, sampler: Sampler[Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(_Indices(sampler), *args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        self.dataset.reset()  # type: ignore[attr-defined]
        return (self.dataset[index] for index in super().__iter__())

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        inner = self.dataset.sampler  # type: ignore[attr-defined]
        if callable(getattr(inner, "set_epoch", None)):
            inner.set_epoch(epoch)


class UnrepeatedDistributedSamplerWrapper(UnrepeatedDistributedSampler):
    """Divide any sampler of known length among ranks without padding.

    The first ranks may have one index more.
    """

    def __init__(self, sampler: Sampler[Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(_Indices(sampler), *args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        self.dataset.reset()  # type: ignore[attr-defined]
        return (self.dataset[index] for index in super().__iter__())
