"""ResumableLoader over IterableDatasets and plain iterables of batches."""

from __future__ import annotations

import multiprocessing
import random
import sys
import threading
import time
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from arclight.data import ResumableLoader, derive_seed, isolated_rng

torch.set_num_threads(1)


class Stream(IterableDataset):
    """Shuffles with the global generators and draws with each sample; every worker and rank takes its share."""

    def __init__(self, size: int = 17, rank: int = 0, world_size: int = 1) -> None:
        self.size, self.rank, self.world_size = size, rank, world_size
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        order = torch.randperm(self.size).tolist()[self.rank :: self.world_size]
        for index in order if workers == 1 else range(worker, self.size, workers):
            yield torch.tensor([index, self.epoch, random.random(), np.random.rand(), torch.rand(())])


class Stateful(IterableDataset):
    """Keeps its position, and goes on from it, as streaming datasets do."""

    def __init__(self, size: int = 17) -> None:
        self.size, self.position, self.reads = size, 0, 0

    def __iter__(self):
        while self.position < self.size:
            self.position += 1
            self.reads += 1
            yield torch.tensor([self.position - 1, torch.rand(())])
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class StaysAtItsEnd(Stateful):
    """A loaded state counts for one pass only, and the state after a pass is its end (as Hugging Face datasets do)."""

    start = 0

    def __iter__(self):
        start, self.start = self.start, 0
        for position in range(start, self.size):
            self.position = position + 1
            self.reads += 1
            yield torch.tensor([position, torch.rand(())])

    def load_state_dict(self, state):
        self.start = state["position"]


def same(a, b) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_iterable_dataset_resumes_by_reading_with_a_warning() -> None:
    whole = [list(ResumableLoader(DataLoader(Stream(), 4), seed=1).batches(epoch)) for epoch in range(2)]
    assert not same(whole[0], whole[1])
    assert {int(row[1]) for row in torch.cat(whole[1])} == {1}
    resumable = ResumableLoader(DataLoader(Stream(), 4), seed=1)
    for start in range(1, 5):
        torch.manual_seed(start)
        with pytest.warns(UserWarning, match="reading and discarding"):
            assert same(list(resumable.batches(1, start)), whole[1][start:])


def test_iterable_dataset_with_workers_resumes_exactly_with_a_warning() -> None:
    def fresh():
        return ResumableLoader(DataLoader(Stream(), 4, num_workers=2, persistent_workers=True), seed=1)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "This DataLoader will create 2 worker processes")  # on a machine of one core
        whole = list(fresh().batches(3))
    assert {int(row[1]) for row in torch.cat(whole)} == {3}
    used = fresh()
    list(used.batches(2))
    with pytest.warns(UserWarning, match=r"discarding 2 batches.*worker processes"):
        assert same(list(used.batches(3, 2)), whole[2:])


def test_iterating_leaves_the_global_state_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    for workers in (0, 1):
        list(ResumableLoader(DataLoader(Stream(), 4, num_workers=workers)).batches(0))
    assert torch.equal(torch.rand(2), expected)


def test_streams_that_shuffle_and_shard_stay_disjoint() -> None:
    shares = [
        torch.cat(list(ResumableLoader(DataLoader(Stream(18, rank, 3), 4), rank=rank, world_size=3).batches(0)))
        for rank in range(3)
    ]
    assert sorted(torch.cat(shares)[:, 0].int().tolist()) == list(range(18))


@pytest.mark.parametrize("dataset", [Stateful, StaysAtItsEnd])
def test_state_resumes_without_reading(dataset) -> None:
    whole = ResumableLoader(DataLoader(dataset(), 4), seed=5)
    epochs = [list(whole.batches(epoch)) for epoch in range(2)]
    assert [len(epoch) for epoch in epochs] == [5, 5]
    for stop in range(1, 5):
        stopped = ResumableLoader(DataLoader(dataset(), 4), seed=5)
        batches = stopped.batches(0)
        for _ in range(stop + 1):  # one batch of look-ahead
            next(batches)
        state = stopped.state_dict(batch=stop)
        data = dataset()
        resumed = ResumableLoader(DataLoader(data, 4), seed=5)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert same(list(resumed.batches(0, stop)), epochs[0][stop:])
        assert data.reads == 17 - 4 * stop
        assert same(list(resumed.batches(1)), epochs[1])


@pytest.mark.parametrize("dataset", [Stateful, StaysAtItsEnd])
def test_state_at_the_end_of_an_epoch_does_not_lose_the_next_one(dataset) -> None:
    first = ResumableLoader(DataLoader(dataset(), 4), seed=5)
    list(first.batches(0))
    expected = list(first.batches(1))
    stopped = ResumableLoader(DataLoader(dataset(), 4), seed=5)
    list(stopped.batches(0))
    resumed = ResumableLoader(DataLoader(dataset(), 4), seed=5)
    resumed.load_state_dict(stopped.state_dict())
    assert same(list(resumed.batches(1)), expected)
    assert len(expected) == 5


def test_a_state_from_too_far_back_is_refused() -> None:
    loader = ResumableLoader(DataLoader(Stateful(40), 4))
    list(loader.batches(0))
    with pytest.raises(ValueError, match="after batch 2 is no longer known"):
        loader.state_dict(batch=2)


def test_the_state_at_an_epochs_start_is_that_of_the_epoch_before() -> None:
    loader = ResumableLoader(DataLoader(Stateful(), 4))
    assert loader.state_dict(0, epoch=0) == {}
    list(loader.batches(0))
    end = loader.state_dict(5, epoch=0)
    assert loader.state_dict(0, epoch=1) == loader.state_dict(0) == end
    next(loader.batches(1))  # looked ahead
    assert loader.state_dict(0, epoch=1) == end
    assert loader.state_dict(1, epoch=1)["state"] == {"position": 4}
    assert loader.state_dict(0, epoch=0) == {}
    resumed = ResumableLoader(DataLoader(Stateful(), 4))
    resumed.load_state_dict(end)
    resumed.batches(1)  # nothing drawn yet
    assert resumed.state_dict(0, epoch=1) == end


def test_stateful_iterable_of_batches() -> None:
    class Batches:
        def __init__(self):
            self.position = 0

        def __iter__(self):
            while self.position < 6:
                self.position += 1
                yield self.position
            self.position = 0

        def state_dict(self):
            return {"position": self.position}

        def load_state_dict(self, state):
            self.position = state["position"]

    stopped = ResumableLoader(Batches())
    batches = stopped.batches(0)
    assert [next(batches), next(batches)] == [1, 2]
    resumed = ResumableLoader(Batches())
    resumed.load_state_dict(stopped.state_dict())
    assert list(resumed.batches(0, 2)) == [3, 4, 5, 6]


def test_lengths() -> None:
    class Sized(Stream):
        def __len__(self):
            return 17

    assert len(ResumableLoader(DataLoader(Sized(), 4))) == 5
    assert len(ResumableLoader(DataLoader(Sized(), 4, drop_last=True))) == 4
    assert len(ResumableLoader(DataLoader(Sized(), None))) == 17
    assert len(ResumableLoader([1, 2])) == 2
    for unsized in (DataLoader(Stream(), 4), (x for x in range(3)), lambda: iter([1])):
        assert not ResumableLoader(unsized).sized
        with pytest.raises(TypeError):
            len(ResumableLoader(unsized))


def test_a_list_costs_no_python_call_per_batch() -> None:
    resumable = ResumableLoader(list(range(100)))
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    for start in (0, 50):
        iterator = resumable.batches(0, start)
        sys.setprofile(count)
        for _ in iterator:
            pass
        sys.setprofile(None)
    assert calls == 0


def shuffled_batches():
    for value in torch.randperm(8).tolist():
        yield value, torch.rand(()).item()


class ShuffledBatches:
    def __iter__(self):
        return shuffled_batches()


@pytest.mark.parametrize("source", [shuffled_batches, ShuffledBatches()])
def test_plain_iterables_shuffle_by_epoch(source) -> None:
    resumable = ResumableLoader(source, seed=2)
    orders = [[value for value, _ in resumable.batches(epoch)] for epoch in range(2)]
    assert orders[0] != orders[1]
    again = ResumableLoader(source, seed=2)
    torch.manual_seed(99)
    assert [value for value, _ in again.batches(1, 3)] == orders[1][3:]
    # What is drawn later comes from the consumer's state, so restoring that state continues bit for bit.
    stopped = resumable.batches(0)
    next(stopped), next(stopped)
    state = torch.get_rng_state()
    rest = list(stopped)
    resumed = again.batches(0, 2)
    torch.set_rng_state(state)
    assert list(resumed) == rest


def test_an_iterator_that_is_used_up_is_pointed_out() -> None:
    resumable = ResumableLoader(iter([1, 2, 3]))
    assert list(resumable.batches(0)) == [1, 2, 3]
    with pytest.warns(UserWarning, match="can be read once"):
        assert list(resumable.batches(1)) == []


def test_unsharded_streams_are_pointed_out() -> None:
    with pytest.warns(UserWarning, match="all 2 ranks will read the same samples"):
        ResumableLoader(DataLoader(Stateful(), 4), rank=1, world_size=2)
    with pytest.warns(UserWarning, match="all 2 ranks will read the same samples"):
        ResumableLoader([1, 2], rank=1, world_size=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ResumableLoader(DataLoader(Stream(rank=1, world_size=2), 4), rank=1, world_size=2)


def test_a_loader_with_its_own_iteration_keeps_it() -> None:
    class Doubled(DataLoader):
        def __iter__(self):
            for batch in super().__iter__():
                yield batch
                yield -batch

    resumable = ResumableLoader(Doubled(torch.arange(1, 9), batch_size=2, shuffle=True))
    whole = list(resumable.batches(0))
    assert len(whole) == 8
    assert all(torch.equal(a, -b) for a, b in zip(whole[::2], whole[1::2], strict=True))
    assert same(list(resumable.batches(0, 3)), whole[3:])


def test_seeds_depend_on_each_part() -> None:
    seeds = {derive_seed(*parts) for parts in [(0,), (1,), (0, 0), (0, 1), (1, 0), (10, 1), (1, 1), (1, 10), (-1,)]}
    assert len(seeds) == 9
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_isolated_rng_restores_after_an_error_and_nests() -> None:
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    expected = (torch.rand(1).item(), random.random(), np.random.rand())
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    with pytest.raises(RuntimeError), isolated_rng(1):
        first = torch.rand(1)
        with isolated_rng(1):
            assert torch.equal(torch.rand(1), first)
        raise RuntimeError
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == expected


def test_isolated_rng_of_threads_follow_each_other_and_leave_the_generators_as_they_were() -> None:
    np.random.seed(0)
    expected = np.random.rand(2)
    np.random.seed(0)
    begun, drawn = threading.Event(), {}

    def draw(seed: int, pause: float) -> None:
        with isolated_rng(seed):
            begun.set()
            first = np.random.rand()
            time.sleep(pause)
            drawn[seed] = (first, np.random.rand())

    early, late = (threading.Thread(target=draw, args=given) for given in ((0, 0.05), (1, 0.15)))
    early.start()
    begun.wait(60)
    late.start()
    for thread in (early, late):
        thread.join()
    assert drawn[0] == tuple(expected)
    with isolated_rng(2):
        pass
    assert np.array_equal(np.random.rand(2), expected)


def test_a_fork_while_another_thread_isolates_its_rng_can_do_so_too() -> None:
    held, free = threading.Event(), threading.Event()

    def hold() -> None:
        with isolated_rng(1):
            held.set()
            free.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    child = multiprocessing.get_context("fork").Process(target=_isolate)
    child.start()
    child.join(30)
    ended = not child.is_alive()
    child.kill()
    free.set()
    thread.join()
    assert ended


def _isolate() -> None:
    with isolated_rng(2):
        pass
