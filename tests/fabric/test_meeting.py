"""Processes that meet at a store where those of an attempt before have been."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from arclight.fabric.meeting import fresh_name


def meet(store: dist.Store, ranks: list[int], world_size: int, timeout: float = 10) -> dict[int, object]:
    found: dict[int, object] = {}

    def join(rank: int) -> None:
        try:
            found[rank] = fresh_name(store, rank, world_size, timeout)
        except TimeoutError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("lost", [[], [0], [1, 2]])
def test_every_attempt_gets_a_name_of_its_own(lost: list[int]) -> None:
    store = dist.HashStore()
    before = meet(store, [rank for rank in range(3) if rank not in lost], 3, timeout=0.3)
    assert not lost or all("did not come" in str(found) for found in before.values() if "come" in str(found))
    if lost == [1, 2]:
        assert "rank 1, 2 did not come" in str(before[0])
    first, second = (meet(store, [2, 0, 1], 3) for _ in range(2))
    assert len(set(first.values())) == len(set(second.values())) == 1
    assert first[0] != second[0]
    assert "come" not in str(first[0])
