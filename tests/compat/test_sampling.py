"""Samplers that share data out among ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from arclight.compat.lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from arclight.compat.lightning.pytorch.overrides.distributed import (
    UnrepeatedDistributedSampler,
    UnrepeatedDistributedSamplerWrapper,
)
from arclight.compat.lightning.pytorch.utilities.data import extract_batch_size, has_len_all_ranks, warning_cache
from arclight.compat.lightning.pytorch.utilities.exceptions import MisconfigurationException
from arclight.fabric.strategies import SingleDeviceStrategy


def shares(kind: Any, data: Any, **options: Any) -> list[list[int]]:
    return [list(kind(data, rank=rank, num_replicas=4, **options)) for rank in range(4)]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("count", [103, 100, 3])
def test_each_index_goes_to_one_rank(shuffle: bool, count: int) -> None:
    parts = shares(UnrepeatedDistributedSampler, range(count), shuffle=shuffle)
    assert sorted(index for part in parts for index in part) == list(range(count))
    assert [len(part) for part in parts] == [(count + 3 - rank) // 4 for rank in range(4)]
    first = UnrepeatedDistributedSampler(range(count), rank=0, num_replicas=4, shuffle=shuffle)  # type: ignore[arg-type]
    assert len(first) == len(parts[0])
    padded = list(DistributedSampler(range(count), rank=0, num_replicas=4, shuffle=shuffle))  # type: ignore[arg-type]
    assert parts[0] == padded[: len(parts[0])]


def test_any_sampler_is_sharded_and_drawn_again_each_epoch() -> None:
    torch.manual_seed(0)
    sampler = RandomSampler(range(8), generator=torch.Generator().manual_seed(3))
    wrapped = DistributedSamplerWrapper(sampler, rank=0, num_replicas=1, shuffle=False)
    first, second = list(wrapped), list(wrapped)
    assert sorted(first) == sorted(second) == list(range(8))
    assert first != second
    assert shares(UnrepeatedDistributedSamplerWrapper, SequentialSampler(range(5)), shuffle=False) == [
        [0, 4],
        [1],
        [2],
        [3],
    ]
    with pytest.raises(TypeError, match="does not provide `__len__`"):
        DistributedSamplerWrapper(iter([1]), rank=0, num_replicas=1)  # type: ignore[arg-type]


def test_an_epoch_reaches_the_sampler_inside() -> None:
    inner = DistributedSampler(range(4), rank=0, num_replicas=1)  # type: ignore[arg-type]
    DistributedSamplerWrapper(inner, rank=0, num_replicas=1).set_epoch(5)
    assert inner.epoch == 5


def test_sizes_of_batches() -> None:
    assert extract_batch_size({"a": [torch.zeros(11, 2)], "text": "t"}) == 11
    warning_cache.clear()
    with pytest.warns(UserWarning, match="Trying to infer the `batch_size` .* we found is 3"):
        assert extract_batch_size([torch.zeros(3), torch.zeros(4)]) == 3
    with pytest.raises(MisconfigurationException, match="We could not infer the batch_size"):
        extract_batch_size("a text")


def test_lengths_over_all_ranks() -> None:
    strategy = SingleDeviceStrategy()
    assert has_len_all_ranks([1], strategy)
    assert not has_len_all_ranks(iter([1]), strategy)
    with pytest.warns(UserWarning, match="Total length of `list` across ranks is zero"):
        assert has_len_all_ranks([], strategy)
