"""Order and augmentation of several shuffled loaders, and of loaders whose generators the user has seeded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

import arclight as al
from arclight.data import CombinedLoader, ResumableLoader
from arclight.data.sampling import LoaderSeeds

SAMPLES = 16


class Noisy(Dataset[Any]):
    """Each sample is its index and a random number: the augmentation."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.rand(())


def shuffled(seed: int | None = None, generator: torch.Generator | None = None) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed) if seed is not None else generator
    return DataLoader(Noisy(), batch_size=4, shuffle=True, generator=generator)


class Recorder(al.Module):
    """Keeps what each step read: by loader, the indices and the augmentation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.read: list[list[tuple[list[int], list[float]]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        parts = list(batch.values()) if isinstance(batch, dict) else batch if isinstance(batch[0], list) else [batch]
        self.read.append([(index.tolist(), noise.tolist()) for index, noise in parts])
        return self.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def order(self, loader: int) -> list[int]:
        return [index for row in self.read for index in row[loader][0]]

    def noise(self, loader: int) -> list[float]:
        return [number for row in self.read for number in row[loader][1]]


def fit(
    tmp_path: Path, loaders: Any, seed: int = 7, ckpt_path: Any = None, **settings: Any
) -> tuple[Recorder, al.Trainer]:
    al.seed_everything(seed)
    model = Recorder()
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "enable_checkpointing": False,
    }
    trainer = al.Trainer(accelerator="cpu", default_root_dir=tmp_path, **quiet, **{"max_epochs": 2, **settings})
    trainer.fit(model, loaders, ckpt_path=ckpt_path)
    return model, trainer


@pytest.mark.parametrize("combined", [list, lambda pair: CombinedLoader(dict(enumerate(pair)), "min_size")])
def test_shuffled_loaders_of_a_stage_differ_and_the_first_stays(tmp_path: Path, combined: Any) -> None:
    alone, _ = fit(tmp_path, shuffled())
    model, _ = fit(tmp_path, combined([shuffled(), shuffled()]))
    assert (model.order(0), model.noise(0)) == (alone.order(0), alone.noise(0))
    assert sorted(model.order(1)) == sorted(model.order(0)) != model.order(0)
    paired = [a == b for a, b in zip(model.order(0), model.order(1), strict=True)]
    assert sum(paired) < SAMPLES
    assert not set(model.noise(0)) & set(model.noise(1))


def test_a_short_loader_read_again_has_not_the_order_of_the_next_loader(tmp_path: Path) -> None:
    model, trainer = fit(tmp_path, [shuffled(), shuffled()], max_epochs=1)
    parts = trainer.data.train_loader.parts  # type: ignore[union-attr]
    again = [i for batch in parts[0].batches(0, cycle=1) for i in batch[0].tolist()]
    assert again not in (model.order(0), model.order(1))


def test_seeds_of_users_decide_the_order_in_every_run(tmp_path: Path) -> None:
    def orders(*seeds: int, seed: int = 7) -> list[list[int]]:
        model, _ = fit(tmp_path, [shuffled(number) for number in seeds], seed=seed)
        return [model.order(loader) for loader in range(len(seeds))]

    five, six = orders(5, 6)
    assert five != six
    assert orders(6, 5, seed=8) == [six, five]
    assert orders(5, 5, seed=9) == [five, five]  # pictures and their labels from two loaders, for one


def test_generators_that_nobody_seeded_go_by_the_seed_of_the_run(tmp_path: Path) -> None:
    def orders(seed: int) -> list[list[int]]:
        model, _ = fit(tmp_path, [shuffled(generator=torch.Generator()) for _ in range(2)], seed=seed)
        return [model.order(0), model.order(1)]

    first = orders(7)
    assert first[0] != first[1]
    assert orders(7) == first
    assert not any(order in first for order in orders(8))


def test_a_generator_that_two_loaders_share_gives_two_orders(tmp_path: Path) -> None:
    shared = torch.Generator().manual_seed(5)
    model, _ = fit(tmp_path, [shuffled(generator=shared), shuffled(generator=shared)])
    alone, _ = fit(tmp_path, shuffled(5))
    assert model.order(0) == alone.order(0) != model.order(1)
    assert shared.initial_seed() == 5


def test_a_seeded_generator_of_a_sampler_counts_too(tmp_path: Path) -> None:
    def order(seed: int) -> list[int]:
        sampler = RandomSampler(range(SAMPLES), generator=torch.Generator().manual_seed(seed))
        return fit(tmp_path, DataLoader(Noisy(), batch_size=4, sampler=sampler))[0].order(0)

    assert order(1) == order(1) != order(2)


@pytest.mark.parametrize("seeds", [(None, None), (5, 6)])
def test_several_loaders_resume_exactly_whatever_seed_the_program_has_now(
    tmp_path: Path, seeds: tuple[Any, Any]
) -> None:
    whole, _ = fit(tmp_path, [shuffled(seed) for seed in seeds])
    begun, trainer = fit(tmp_path, [shuffled(seed) for seed in seeds], max_steps=6)
    trainer.save_checkpoint(tmp_path / "saved")
    later = [None if seed is None else seed + 10 for seed in seeds]  # a program whose seeds are those of the clock
    rest, _ = fit(tmp_path, [shuffled(seed) for seed in later], seed=99, ckpt_path=tmp_path / "saved")
    assert begun.read + rest.read == whole.read
    assert len(begun.read) == 6


def test_an_epoch_under_way_goes_on_from_checkpoints_that_have_one_seed_for_all(tmp_path: Path) -> None:
    """Such as they were before each loader had a seed of its own, whatever a user's generator said."""
    with mock.patch.object(LoaderSeeds, "next", lambda self, loader, run_seed: run_seed):
        whole, _ = fit(tmp_path, [shuffled(), shuffled(5)], max_epochs=1)
        begun, trainer = fit(tmp_path, [shuffled(), shuffled(5)], max_steps=2)
    saved = trainer.capture()
    del saved["loops"]["data"]["seeds"]
    rest, _ = fit(tmp_path, [shuffled(), shuffled(5)], ckpt_path=saved, max_epochs=1)
    assert begun.read + rest.read == whole.read
    assert (len(begun.read), len(rest.read)) == (2, 2)


def test_fabric_loaders_differ_and_resume(tmp_path: Path) -> None:
    al.seed_everything(3)
    fabric = al.Fabric(accelerator="cpu", devices=1)
    one, two = fabric.setup_dataloaders(shuffled(), shuffled())
    three = fabric.setup_dataloaders(shuffled())
    orders = [[i for batch in loader for i in batch[0].tolist()] for loader in (one, two, three)]
    assert len(set(map(tuple, orders))) == 3
    first = ResumableLoader(shuffled(), seed=3)
    assert orders[0] == [i for batch in first.batches(0) for i in batch[0].tolist()]
    seeded = fabric.setup_dataloaders(shuffled(5), shuffled(5))
    assert len({tuple(i for batch in loader for i in batch[0].tolist()) for loader in seeded}) == 1
    passing = iter(two)
    next(passing)
    state = two.state_dict()
    rest = [batch[0].tolist() for batch in passing]
    resumed = fabric.setup_dataloaders(shuffled())
    resumed.load_state_dict(state)
    assert [batch[0].tolist() for batch in resumed] == rest


def test_fabric_loaders_go_on_from_states_of_when_all_had_one_seed(tmp_path: Path) -> None:
    def loaders() -> Any:
        al.seed_everything(3)
        return al.Fabric(accelerator="cpu", devices=1).setup_dataloaders(shuffled(), shuffled(5))

    with mock.patch.object(LoaderSeeds, "next", lambda self, loader, run_seed: run_seed):
        former = loaders()
    for before, now in zip(former, loaders(), strict=True):
        passing = iter(before)
        next(passing)
        state = before.state_dict()
        del state["seed"]
        now.load_state_dict(state)
        assert [batch[0].tolist() for batch in now] == [batch[0].tolist() for batch in passing]


class PerRank(Recorder):
    """Each rank seeds its generator in its own way and writes down what it reads."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def train_dataloader(self) -> Any:
        return [shuffled(100 + self.trainer.global_rank), shuffled(200 + self.trainer.global_rank)]

    def on_train_end(self) -> None:
        (self.folder / str(self.trainer.global_rank)).write_text(json.dumps([self.order(0), self.order(1)]))


def test_ranks_share_one_order_even_if_they_seed_apart(tmp_path: Path) -> None:
    fit_two = {"devices": 2, "strategy": "ddp_fork", "max_epochs": 1}
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "enable_checkpointing": False,
    }
    al.Trainer(accelerator="cpu", default_root_dir=tmp_path, **quiet, **fit_two).fit(PerRank(tmp_path))
    zero, one = (json.loads((tmp_path / rank).read_text()) for rank in "01")
    for loader in range(2):
        assert sorted(zero[loader] + one[loader]) == list(range(SAMPLES)), "each sample once"
    assert zero[0] != zero[1]
