"""ResumableLoader over map-style DataLoaders: order, resuming, randomness, ranks."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import signal
from collections import Counter
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from arclight.data import ResumableLoader, derive_seed
from arclight.data.sampling import EpochSampler, LoaderSeeds

torch.set_num_threads(1)
N = 23


class Augmented(Dataset):
    """Each sample: its index, the epoch, and a draw from each of four generators."""

    def __init__(self, size: int = N, fail_at: int | None = None, kill_at: int | None = None) -> None:
        self.size = size
        self.fail_at, self.kill_at = fail_at, kill_at
        self.epoch = -1
        self.own = np.random.default_rng(5)
        self.tag = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.fail_at:
            raise KeyError("sample is broken")
        if index == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        draws = [random.random(), np.random.rand(), torch.rand(()).item(), self.own.random()]
        return torch.tensor([index, self.epoch, self.tag, *draws], dtype=torch.float64)


class AugmentedMany(Augmented):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


def noisy_collate(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples) + torch.rand(1, dtype=torch.float64) * 1e-3


def loader(dataset=None, *, workers: int = 0, batch_size: int | None = 4, shuffle: bool = True, **kwargs) -> DataLoader:
    return DataLoader(dataset or Augmented(), batch_size=batch_size, shuffle=shuffle, num_workers=workers, **kwargs)


def read(loader, epoch: int = 0, start: int = 0, **kwargs) -> list[torch.Tensor]:
    resumable = ResumableLoader(loader, **kwargs)
    try:
        return list(resumable.batches(epoch, start))
    finally:
        resumable.close()


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def indices(batches: list[torch.Tensor]) -> list[int]:
    return [int(row[0]) for batch in batches for row in batch]


@pytest.mark.parametrize("dataset", [Augmented, AugmentedMany])
def test_batches_do_not_depend_on_the_number_of_workers(dataset) -> None:
    expected = read(loader(dataset(), collate_fn=noisy_collate), epoch=1, seed=3)
    assert sorted(map(round, chain.from_iterable(b[:, 0].tolist() for b in expected))) == list(range(N))
    for workers in (1, 2):
        assert same(read(loader(dataset(), workers=workers, collate_fn=noisy_collate), epoch=1, seed=3), expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_at_every_batch_gives_the_uninterrupted_tail(workers: int) -> None:
    whole = read(loader(), epoch=2, seed=9)
    resumable = ResumableLoader(loader(workers=workers), seed=9)
    for start in range(len(whole) + 2):
        torch.manual_seed(start)  # the state of the process at the time of resuming must not matter
        random.seed(start)
        assert same(list(resumable.batches(2, start)), whole[start:]), start


def test_epochs_and_seeds_differ_and_repeat() -> None:
    first, second = read(loader(), 0), read(loader(), 1)
    assert indices(first) != indices(second)
    assert indices(first) != indices(read(loader(), 0, seed=1))
    assert same(first, read(loader(), 0))
    draws = torch.cat(first)[:, 3:]
    assert len(draws.unique()) == draws.numel()  # no two samples share a draw


def test_global_and_user_generators_are_left_alone() -> None:
    generator = torch.Generator().manual_seed(77)
    data = Augmented()
    resumable = ResumableLoader(loader(data, generator=generator))

    def states():
        return (
            random.getstate(),
            torch.get_rng_state(),
            generator.get_state(),
            np.random.get_state()[1].tolist(),
            np.random.get_state()[2],
            data.own.bit_generator.state,
        )

    random.seed(1), torch.manual_seed(1), np.random.seed(1)
    before = states()
    for epoch in range(2):
        for _ in resumable.batches(epoch):
            pass
    after = states()
    assert before[0] == after[0]
    assert torch.equal(before[1], after[1])
    assert torch.equal(before[2], after[2])
    assert before[3:] == after[3:]


class Noise:
    """A transform with a generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __call__(self, x: float) -> float:
        return x + self.rng.random()


class Chain:
    def __init__(self, *steps: Any) -> None:
        self.transforms = list(steps)

    def __call__(self, x: float) -> float:
        for step in self.transforms:
            x = step(x)
        return x


class Transformed(Augmented):
    """Its draws come from an object that it keeps, or one further down."""

    def __init__(self, transform: Any) -> None:
        super().__init__(6)
        self.transform = transform

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, self.epoch, self.transform(0.0)], dtype=torch.float64)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ConcatDataset([Augmented(5), Augmented(4)]),
        lambda: Subset(ConcatDataset([Augmented(5), Subset(Augmented(6), range(4))]), range(9)),
        lambda: StackDataset(Augmented(8), Augmented(8)),
        lambda: StackDataset(one=Augmented(8), other=Augmented(8)),
        lambda: Transformed(Noise()),
        lambda: ConcatDataset([Transformed(Chain(Noise(), Noise()))]),
    ],
)
def test_parts_and_transforms_of_a_dataset_get_seed_and_epoch(make: Any) -> None:
    """Whatever draws inside: the same epoch is the same again, from any batch, and others differ."""

    def numbers(epoch: int, start: int = 0) -> list[list[float]]:
        rows = ResumableLoader(DataLoader(make(), 2), seed=1).batches(epoch, start)
        return [torch.cat([part.flatten() for part in _parts(row)]).tolist() for row in rows]

    resumable = ResumableLoader(DataLoader(make(), 2), seed=1)
    first = [[part.clone() for part in _parts(row)] for row in resumable.batches(3)]
    again = [_parts(row) for row in resumable.batches(3)]
    assert all(torch.equal(a, b) for one, two in zip(first, again, strict=True) for a, b in zip(one, two, strict=True))
    assert numbers(3) == [torch.cat([part.flatten() for part in row]).tolist() for row in first]
    assert numbers(3, 2) == numbers(3)[2:]
    assert numbers(4) != numbers(3)
    assert all((part[:, 1] == 3).all() for row in first for part in row), "set_epoch reaches every part"


def _parts(row: Any) -> list[torch.Tensor]:
    return list(row.values()) if isinstance(row, dict) else row if isinstance(row, list) else [row]


def test_global_generators_survive_a_failing_dataset() -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    with pytest.raises(KeyError):
        read(loader(Augmented(fail_at=0)))
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("size", [1, 5, 23, 24])
def test_ranks_share_the_global_order(world_size: int, size: int) -> None:
    order = indices(read(loader(Augmented(size)), seed=4))
    for train in (True, False):
        shares = [
            read(loader(Augmented(size)), seed=4, rank=rank, world_size=world_size, train=train)
            for rank in range(world_size)
        ]
        if train:
            padded = order + (order * world_size)[: -size % world_size]
            assert len({len(share) for share in shares}) == 1
        else:
            padded = order
        assert Counter(chain.from_iterable(map(indices, shares))) == Counter(padded)
        width = 4 * world_size
        for batch in range(-(-len(padded) // width)):
            piece = padded[batch * width : (batch + 1) * width]
            for rank in range(world_size):
                mine = indices(shares[rank][batch : batch + 1])
                assert mine == piece[rank::world_size]


def test_evaluation_repeats_nothing_and_training_equalises() -> None:
    lengths = {}
    for train in (True, False):
        parts = [ResumableLoader(loader(Augmented(9)), rank=r, world_size=4, train=train) for r in range(4)]
        for part in parts:
            assert len(list(part.batches(0))) == len(part)
        lengths[train] = [sum(map(len, part.batches(0))) for part in parts]
    assert lengths == {True: [3, 3, 3, 3], False: [3, 2, 2, 2]}


@pytest.mark.parametrize("world_size", [1, 2])
def test_drop_last_gives_whole_batches_only(world_size: int) -> None:
    for rank in range(world_size):
        part = ResumableLoader(loader(drop_last=True), rank=rank, world_size=world_size)
        batches = list(part.batches(0))
        assert [len(batch) for batch in batches] == [4] * (N // (4 * world_size))
        assert len(part) == len(batches)


class Buckets(Sampler):
    """A user's batch sampler: batches of growing size, shuffled with a generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.epoch = 0

    def __len__(self) -> int:
        return 6

    def __iter__(self):
        order = self.rng.permutation(21).tolist()
        for size in range(1, 7):
            yield [order.pop() for _ in range(size)]


class GrowingBatches(BatchSampler):
    def __iter__(self):
        yield from ([i] * (i + 1) for i in self.sampler)


class Endless(Sampler):
    def __iter__(self):
        while True:
            yield from torch.randperm(7).tolist()


SAMPLERS = {
    "weighted": lambda: {"sampler": WeightedRandomSampler([0.1, 1.0, 3.0] * 5, 20), "batch_size": 3},
    "subset": lambda: {"sampler": SubsetRandomSampler([1, 4, 9, 16, 20]), "batch_size": 2},
    "random with generator": lambda: {
        "sampler": RandomSampler(range(N), generator=torch.Generator().manual_seed(3)),
        "batch_size": 5,
    },
    "list": lambda: {"sampler": [3, 1, 2, 2, 0], "batch_size": 2},
    "batch sampler": lambda: {"batch_sampler": Buckets()},
    "batch sampler subclass": lambda: {"batch_sampler": GrowingBatches(RandomSampler(range(6)), 1, False)},
    "no batching": lambda: {"sampler": BatchSampler(RandomSampler(range(9)), 2, False), "batch_size": None},
}


class Rows(Dataset):
    """Also indexable by a list, as datasets read with ``batch_size=None`` are."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index):
        return torch.as_tensor(index).double().reshape(-1, 1) + torch.rand(1)


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_of_the_user(name: str) -> None:
    def fresh(workers: int = 0) -> ResumableLoader:
        return ResumableLoader(DataLoader(Rows(), num_workers=workers, **SAMPLERS[name]()), seed=2)

    whole = [list(fresh().batches(epoch)) for epoch in range(3)]
    assert len(whole[0]) == len(fresh())
    if name != "list":
        assert not same(whole[0], whole[1])
    torch.manual_seed(12)
    used = fresh()
    for epoch in (2, 0):  # epochs can be visited in any order
        assert same(list(used.batches(epoch)), whole[epoch])
        assert same(list(used.batches(epoch, 1)), whole[epoch][1:])
    assert same(list(fresh(workers=2).batches(1, 2)), whole[1][2:])
    # Two ranks together load exactly these batches (custom batches) or these samples (grouped ones).
    shares = [ResumableLoader(used.loader, seed=2, rank=rank, world_size=2, train=False) for rank in range(2)]
    together = Counter(int(x) for part in shares for batch in part.batches(1) for x in batch.flatten())
    assert together == Counter(int(x) for batch in whole[1] for x in batch.flatten())


def test_sampler_without_length_or_end() -> None:
    resumable = ResumableLoader(loader(shuffle=False, sampler=Endless()), seed=1)
    assert not resumable.sized
    with pytest.raises(TypeError):
        len(resumable)
    stream = resumable.batches(0)
    whole = [next(stream) for _ in range(9)]
    again = resumable.batches(0, 5)
    assert same([next(again) for _ in range(4)], whole[5:])
    assert sorted(indices(whole)[:7]) == list(range(7))
    parts = [
        ResumableLoader(loader(shuffle=False, sampler=Endless()), seed=1, rank=rank, world_size=2) for rank in range(2)
    ]
    both = [part.batches(0) for part in parts]
    order = [x for _ in range(3) for pair in zip(*(indices([next(part)]) for part in both), strict=True) for x in pair]
    wide = ResumableLoader(loader(shuffle=False, sampler=Endless(), batch_size=8), seed=1).batches(0)
    assert order == indices([next(wide) for _ in range(3)])  # two ranks of 4 go through the order of one rank of 8


def test_a_sampler_that_shards_is_not_sharded_again() -> None:
    data = Augmented(10)
    parts = []
    for rank in range(2):
        sampler = DistributedSampler(data, num_replicas=2, rank=rank, seed=8)
        resumable = ResumableLoader(loader(data, shuffle=False, sampler=sampler), rank=rank, world_size=2)
        sampler.set_epoch(3)
        expected = list(sampler)
        sampler.set_epoch(0)
        assert indices(list(resumable.batches(3))) == expected
        parts += expected
    assert sorted(parts) == list(range(10))


def test_persistent_workers_live_on_and_follow_the_epoch() -> None:
    resumable = ResumableLoader(loader(PidDataset(), workers=2, persistent_workers=True))
    seen = []
    for epoch in range(3):
        batches = list(resumable.batches(epoch))
        seen.append({int(pid) for batch in batches for pid in batch[:, 1]})
        assert {int(e) for batch in batches for e in batch[:, 2]} == {epoch}
    assert seen[0] == seen[1] == seen[2]
    assert os.getpid() not in seen[0]
    stopped = resumable.batches(3)
    next(stopped)  # leave an epoch in the middle
    expected = read(loader(PidDataset()), 4, start=2)
    got = list(resumable.batches(4, 2))
    assert [b[:, 0].tolist() for b in got] == [b[:, 0].tolist() for b in expected]
    resumable.close()


class PidDataset(Augmented):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, os.getpid(), self.epoch], dtype=torch.float64)


def tag_dataset(worker_id: int) -> None:
    info = get_worker_info()
    assert isinstance(info.dataset, Augmented)
    info.dataset.tag = worker_id + 1
    np.random.seed(0)  # the widespread recipe must not make the workers' draws alike


def test_worker_init_fn_sees_the_users_dataset() -> None:
    batches = read(loader(workers=2, worker_init_fn=tag_dataset, prefetch_factor=1))
    assert {int(tag) for batch in batches for tag in batch[:, 2]} == {1, 2}
    plain = read(loader())
    assert same([batch[:, 3:] for batch in batches], [batch[:, 3:] for batch in plain])


@pytest.mark.parametrize("anew", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_spawned_workers_load_the_same_batches(anew, tmp_path, monkeypatch, request) -> None:
    if not anew:
        request.getfixturevalue("fork_spawned")
    (tmp_path / "spawned_dataset.py").write_text(
        "import random, torch\n"
        "class Noise(torch.utils.data.Dataset):\n"
        "    def __init__(self): self.own = random.Random(3)\n"
        "    def __len__(self): return 6\n"
        "    def __getitem__(self, i): return torch.tensor([i, random.random(), self.own.random()])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    from spawned_dataset import Noise

    expected = read(loader(Noise()))
    assert same(read(loader(Noise(), workers=1, multiprocessing_context="spawn")), expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_names_the_samples_and_keeps_the_workers_traceback(workers: int) -> None:
    with pytest.raises(KeyError) as caught:
        read(loader(Augmented(fail_at=6), workers=workers, shuffle=False), epoch=1)
    text = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert "sample is broken" in text
    assert "batch 1 of epoch 1, samples [4, 5, 6, 7]" in text
    if workers:
        assert "in __getitem__" in text
        assert "DataLoader worker process 1" in text


def test_a_closed_loader_has_no_workers_and_can_be_read_again() -> None:
    resumable = ResumableLoader(loader(PidDataset(), workers=2, persistent_workers=True))
    resumable.close()  # nothing to end yet
    first = {int(pid) for batch in resumable.batches(0) for pid in batch[:, 1]}
    resumable.close()
    assert not first & {process.pid for process in multiprocessing.active_children()}
    batches = list(resumable.batches(1, 1))
    assert {int(epoch) for batch in batches for epoch in batch[:, 2]} == {1}
    assert not first & {int(pid) for batch in batches for pid in batch[:, 1]}
    resumable.close()


class Rising(IterableDataset):
    """Fails at its third sample."""

    def __iter__(self):
        yield from (torch.ones(1), torch.ones(1))
        raise KeyError("sample is broken")


@pytest.mark.parametrize("data", [Augmented(fail_at=2), Rising()])
def test_close_ends_the_workers_of_a_failed_pass(data) -> None:
    before = set(multiprocessing.active_children())
    resumable = ResumableLoader(DataLoader(data, 1, num_workers=2))
    with pytest.raises(KeyError, match="broken") as caught:
        list(resumable.batches(0))
    assert caught.value.__traceback__ is not None, "it holds the frames that hold the pass"
    assert len(set(multiprocessing.active_children()) - before) == 2
    resumable.close()
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.parametrize("persistent", [False, True])
def test_batches_of_a_closed_loader_are_an_error_not_an_early_end(persistent: bool) -> None:
    resumable = ResumableLoader(loader(workers=2, persistent_workers=persistent))
    read_up = resumable.batches(0)
    assert len(list(read_up)) == len(resumable)
    left = resumable.batches(1)
    next(left)
    resumable.close()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed before they ended"):
            next(left)
    assert next(read_up, None) is None, "it had ended"
    assert len(list(resumable.batches(1, 1))) == len(resumable) - 1
    resumable.close()


def test_a_pickled_copy_leaves_the_workers_alone() -> None:
    resumable = ResumableLoader(DataLoader(Rising(), 1, num_workers=1))
    batches = resumable.batches(0)
    next(batches)
    pickle.loads(pickle.dumps(resumable)).close()
    assert next(batches).tolist() == [[1.0]]
    resumable.close()


def _close_and_read(resumable: ResumableLoader, answer: Any) -> None:
    resumable.close()
    rows = [batch[:, 0].tolist() for batch in resumable.batches(0)]
    resumable.close()
    answer.put(rows)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_forked_process_leaves_the_workers_of_its_parent_alone(persistent: bool) -> None:
    resumable = ResumableLoader(loader(workers=2, persistent_workers=persistent))
    expected = [batch[:, 0].tolist() for batch in resumable.batches(0)]
    running = resumable.batches(0)
    assert next(running)[:, 0].tolist() == expected[0]
    fork = multiprocessing.get_context("fork")
    answer = fork.SimpleQueue()
    child = fork.Process(target=_close_and_read, args=(resumable, answer))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert answer.get() == expected
    assert [batch[:, 0].tolist() for batch in running] == expected[1:]
    resumable.close()


def test_a_killed_worker_is_an_error_not_a_wait() -> None:
    with pytest.raises(RuntimeError, match=r"worker .*(killed|exited unexpectedly)"):
        read(loader(Augmented(kill_at=2), workers=1, shuffle=False))


def test_the_users_loader_is_not_changed() -> None:
    made = loader(workers=1, persistent_workers=True)
    before = dict(vars(made))
    read(made)
    assert vars(made) == before
    assert made._iterator is None


def test_subset_and_its_dataset_learn_the_epoch() -> None:
    batches = read(loader(Subset(Augmented(), range(6))), epoch=5)
    assert {int(e) for batch in batches for e in batch[:, 1]} == {5}


@pytest.mark.parametrize("thing", [5, None])
def test_objects_that_are_not_loaders_are_refused(thing) -> None:
    with pytest.raises(TypeError, match="is not a loader"):
        ResumableLoader(thing)


def test_impossible_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="rank 2 of 2"):
        ResumableLoader(loader(), rank=2, world_size=2)
    with pytest.raises(ValueError, match="negative"):
        ResumableLoader(loader()).batches(0, -1)


def test_a_sampler_that_shards_for_one_rank_has_a_place_to_go_on_from() -> None:
    own = DataLoader(Augmented(8), 2, sampler=DistributedSampler(Augmented(8), 1, 0))
    alone = ResumableLoader(own, rank=0, world_size=1)
    assert alone.samples_before(0, 1) == 2
    assert alone.seek(0, 2) == 1
    assert ResumableLoader(own, rank=0, world_size=2).samples_before(0, 1) is None


class Five(Sampler):
    """No length."""

    def __iter__(self):
        yield from (3, 1, 4, 0, 2)


def test_a_sampler_without_length_is_filled_up_from_its_start() -> None:
    shares = [read(DataLoader(Augmented(5), 2, sampler=Five()), rank=rank, world_size=2) for rank in range(2)]
    assert [indices(share) for share in shares] == [[3, 4, 2], [1, 0, 3]]


def test_loaders_that_are_read_beside_each_other_have_seeds_of_their_own() -> None:
    plain = [loader(Augmented(8)) for _ in range(3)]
    seeds = LoaderSeeds()
    drawn = [seeds.next(one, 7) for one in plain]
    assert drawn == [7, derive_seed(7, -1, 1), derive_seed(7, -1, 2)]  # orders stay what they were in earlier versions
    assert len(set(drawn)) == 3
    unseeded = loader(Augmented(8), generator=torch.Generator())
    assert LoaderSeeds().next(unseeded, 7) == 7


def test_a_generator_that_its_user_seeded_counts_in_place_of_the_run() -> None:
    def seeded(number: int) -> DataLoader:
        return loader(Augmented(8), generator=torch.Generator().manual_seed(number))

    first, other = LoaderSeeds(), LoaderSeeds()
    assert first.next(seeded(5), 7) == other.next(seeded(5), 8) == derive_seed(-1, 5)
    assert first.next(seeded(5), 7) == derive_seed(-1, 5)  # another generator, though seeded alike
    assert first.next(seeded(6), 7) != derive_seed(-1, 5)
    shared = torch.Generator().manual_seed(5)
    pair = [first.next(loader(Augmented(8), generator=shared), 7) for _ in range(2)]
    assert pair == [derive_seed(-1, 5), derive_seed(derive_seed(-1, 5), -1, 1)]


def test_an_epoch_goes_by_the_seed_of_its_sampler_or_by_the_one_given() -> None:
    def order(own: int, **given) -> list[int]:
        sampler = EpochSampler(loader(Augmented(8)), seed=own, rank=0, world_size=1, train=True)
        return list(chain.from_iterable(sampler.batches(2, **given)))

    assert order(5) != order(6)
    assert order(5) == order(6, seed=lambda *_: derive_seed(5, 2))
