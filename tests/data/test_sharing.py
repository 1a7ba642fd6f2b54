"""Loaders of other kinds are shared out among ranks too; predictions leave nothing out."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader

from arclight.data import ResumableLoader


@pytest.mark.parametrize("batched", [True, False])
def test_a_loader_that_iterates_in_its_own_way_is_shared_out_too(batched: bool) -> None:
    class Doubling(DataLoader[Any]):
        def __iter__(self) -> Any:
            return ([2 * item, item] for item in super().__iter__())

    def batches(rank: int, epoch: int, start: int = 0) -> list[Any]:
        loader = Doubling(list(range(8)), batch_size=2 if batched else None, shuffle=True)
        made = ResumableLoader(loader, seed=3, rank=rank, world_size=2)
        return [item.tolist() if batched else item for _, item in made.batches(epoch, start)]

    both = [batches(rank, 0) for rank in range(2)]
    assert len(both[0]) == len(both[1]) == (2 if batched else 4)
    assert sorted(n for part in both for item in part for n in (item if batched else [item])) == list(range(8))
    assert batches(0, 0) != batches(0, 1)
    assert batches(1, 1, 1) == batches(1, 1)[1:]


def test_samples_are_not_shared_out_where_that_is_not_wanted() -> None:
    loader = DataLoader(list(range(6)), batch_size=2, shuffle=True)
    whole = [batch.tolist() for batch in ResumableLoader(loader, seed=3).batches(0)]
    for rank in range(2):
        alone = ResumableLoader(loader, seed=3, rank=rank, world_size=2, shard=False)
        assert [batch.tolist() for batch in alone.batches(0)] == whole


def test_predictions_leave_nothing_out() -> None:
    loader = DataLoader(list(range(5)), batch_size=2, drop_last=True)
    assert len(ResumableLoader(loader)) == 2
    complete = ResumableLoader(loader, complete=True)
    assert [batch.tolist() for batch in complete.batches(0)] == [[0, 1], [2, 3], [4]]

    class Odd:
        def __iter__(self) -> Any:
            return iter([[0], [1, 2]])

        def __len__(self) -> int:
            return 2

    with pytest.warns(UserWarning, match="custom batch sampler Odd"):
        ResumableLoader(DataLoader(list(range(5)), batch_sampler=Odd()), complete=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("batch_size", [2, 5])
@pytest.mark.parametrize("count", range(4, 42))
def test_in_evaluation_all_ranks_have_equally_many_batches_and_nothing_twice(count: int, batch_size: int) -> None:
    """A forward pass that exchanges with other ranks would wait for one that has no batch left."""
    loader = DataLoader(list(range(count)), batch_size)  # type: ignore[arg-type]
    shares = [ResumableLoader(loader, rank=rank, world_size=4, train=False) for rank in range(4)]
    batches = [[batch.tolist() for batch in share.batches(0)] for share in shares]
    assert {len(mine) for mine in batches} == {len(share) for share in shares} == {-(-count // (4 * batch_size))}
    assert sorted(sample for mine in batches for batch in mine for sample in batch) == list(range(count))
