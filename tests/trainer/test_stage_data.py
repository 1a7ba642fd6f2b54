"""The data of a fit: which loaders, how many batches, when they are asked for, and that a resume continues in them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, TensorDataset

import arclight as al
from arclight.data import CombinedLoader

Make = Callable[..., al.Trainer]


def numbers(count: int, first: int = 0, **options: Any) -> DataLoader[Any]:
    rows = torch.arange(float(first), float(first + count)).reshape(-1, 1)
    return DataLoader(TensorDataset(rows), **({"batch_size": 2} | options))


class Stream(IterableDataset[torch.Tensor]):
    """Goes on from its state, and says how much it has read."""

    def __init__(self, count: int) -> None:
        self.count, self.at, self.read = count, 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        start, self.at = self.at, 0
        for number in range(start, self.count):
            self.at, self.read = number + 1, self.read + 1
            yield torch.tensor([float(number)])
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def plain(batch: Any) -> Any:
    """A batch as nested lists."""
    if isinstance(batch, dict):
        return {key: plain(part) for key, part in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [plain(part) for part in batch]
    return batch.flatten().tolist() if isinstance(batch, torch.Tensor) else batch


class Seeing(al.Module):
    """Learns something from whatever arrives, and keeps what did."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[Any] = []
        self.validated: list[Any] = []

    def loss(self, batch: Any) -> torch.Tensor:
        return (self.weight - 1e-3 * plain_sum(batch) - torch.rand(())).square()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append(plain(batch))
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validated.append(plain(batch))
        self.log("val/noise", torch.rand(()), batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def plain_sum(part: Any) -> float:
    """The sum of all numbers in nested containers of tensors."""
    if isinstance(part, torch.Tensor):
        return float(part.sum())
    parts = part.values() if isinstance(part, dict) else part if isinstance(part, (list, tuple)) else ()
    return sum(plain_sum(item) for item in parts)


# -- several loaders ---------------------------------------------------------------------------------------------------


def test_a_tree_of_loaders_trains_until_the_longest_ends(make_trainer: Make) -> None:
    module, trainer = Seeing(), make_trainer(max_epochs=1)
    tree = {"a": numbers(4), "b": [numbers(6, 100), numbers(2, 200)]}
    trainer.fit(module, tree)
    assert trainer.num_training_batches == 3
    assert trainer.train_dataloader == tree
    assert module.seen[0] == {"a": [[0, 1]], "b": [[[100, 101]], [[200, 201]]]}
    assert [batch["a"] for batch in module.seen] == [[[0, 1]], [[2, 3]], [[0, 1]]]


@pytest.mark.parametrize(("mode", "batches"), [("min_size", 2), ("max_size", 3), ("max_size_cycle", 3)])
def test_modes_set_the_length_of_an_epoch(make_trainer: Make, mode: Any, batches: int) -> None:
    module, trainer = Seeing(), make_trainer(max_epochs=2)
    trainer.fit(module, CombinedLoader([numbers(4), numbers(6, 100)], mode))
    assert trainer.num_training_batches == batches
    assert len(module.seen) == 2 * batches


def test_limits_count_for_each_loader(make_trainer: Make) -> None:
    module, trainer = Seeing(), make_trainer(max_epochs=1, limit_train_batches=0.5)
    trainer.fit(module, [numbers(20), numbers(8)])
    assert trainer.num_training_batches == 5
    with pytest.raises(ValueError, match="does not support"):
        make_trainer(max_epochs=1).fit(Seeing(), CombinedLoader([numbers(4), numbers(4)], "sequential"))


def test_a_list_of_ready_batches_is_one_loader(make_trainer: Make) -> None:
    module = Seeing()
    make_trainer(max_epochs=1).fit(module, [torch.ones(2), torch.zeros(2)])
    assert module.seen == [[1, 1], [0, 0]]


@pytest.mark.parametrize("wrong", [object(), 3, [numbers(2), torch.ones(1)]])
def test_invalid_dataloaders_are_named(make_trainer: Make, wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"invalid dataloader was passed to `Trainer.fit\(train_dataloaders=...\)`"):
        make_trainer(max_epochs=1).fit(Seeing(), wrong)

    class Giving(Seeing):
        def train_dataloader(self) -> Any:
            return wrong

    with pytest.raises(TypeError, match=r"invalid dataloader was returned from `Giving.train_dataloader\(\)`"):
        make_trainer(max_epochs=1).fit(Giving())
    with pytest.raises(TypeError, match=r"passed to `Trainer.validate\(dataloaders=...\)`. Found None"):
        make_trainer().validate(Seeing())


# -- how many batches, and when ----------------------------------------------------------------------------------------


def test_limits_that_leave_nothing_or_have_no_meaning(make_trainer: Make) -> None:
    with pytest.raises(ValueError, match=r"0.1 \* 5 < 1. Please increase the `limit_train_batches`"):
        make_trainer(max_epochs=1, limit_train_batches=0.1).fit(Seeing(), numbers(10))
    with pytest.raises(ValueError, match=r"`Trainer\(limit_val_batches\)` must be `1.0` or an int"):
        make_trainer(limit_val_batches=0.5).validate(Seeing(), DataLoader(Stream(4)))
    module, trainer = Seeing(), make_trainer(max_epochs=1, limit_train_batches=0)
    trainer.fit(module, numbers(10), numbers(2))
    assert module.seen == []
    assert trainer.num_training_batches == 0


def test_each_evaluation_loader_has_its_own_number_of_batches(make_trainer: Make) -> None:
    trainer = make_trainer(max_epochs=1, limit_val_batches=0.5, num_sanity_val_steps=2)
    trainer.fit(Seeing(), numbers(4), [numbers(12), DataLoader(TensorDataset(torch.ones(4)), batch_size=1)])
    assert trainer.num_val_batches == [3, 2]
    assert trainer.num_sanity_val_batches == [2, 2]
    assert len(trainer.val_dataloaders) == 2
    assert trainer.test_dataloaders is None


def test_loaders_are_requested_when_their_stage_begins_and_on_reload(make_trainer: Make) -> None:
    asked: list[Any] = []

    class Asking(Seeing):
        def train_dataloader(self) -> Any:
            asked.append(("train", self.current_epoch))
            return numbers(2)

        def val_dataloader(self) -> Any:
            asked.append(("val", self.current_epoch))
            return numbers(2)

    make_trainer(max_epochs=3).fit(Asking())
    assert asked == [("train", 0), ("val", 0)]
    asked.clear()
    make_trainer(max_epochs=2, num_sanity_val_steps=1).fit(Asking())
    assert asked == [("val", 0), ("train", 0)]
    asked.clear()
    make_trainer(max_epochs=4, reload_dataloaders_every_n_epochs=2).fit(Asking())
    assert asked == [("train", 0), ("val", 0), ("train", 2), ("val", 2)]


def test_a_fit_without_a_validation_step_never_asks_for_validation_data(make_trainer: Make) -> None:
    class Never(Seeing):
        validation_step = None  # type: ignore[assignment]

        def val_dataloader(self) -> Any:
            raise AssertionError("nobody needs these")

    trainer = make_trainer(max_epochs=1)
    trainer.fit(Never(), numbers(4))
    assert trainer.num_val_batches == []
    assert not trainer.enable_validation


@pytest.mark.parametrize("overfit", [2, 0.5])
def test_overfitting_repeats_the_first_batches_in_order(make_trainer: Make, overfit: float) -> None:
    module, trainer = Seeing(), make_trainer(max_epochs=2, overfit_batches=overfit)
    shuffled = numbers(8, shuffle=True)
    with pytest.warns(UserWarning, match="requested to overfit but enabled train dataloader shuffling"):
        trainer.fit(module, shuffled, numbers(8))
    assert module.seen == [[[0, 1]], [[2, 3]]] * 2
    assert len(module.validated) == 4
    assert isinstance(trainer.train_dataloader.sampler, SequentialSampler)
    assert isinstance(shuffled.sampler, RandomSampler)  # the user's own is as it was


def test_a_loader_class_of_ones_own_survives_overfitting(make_trainer: Make) -> None:
    class Coloured(DataLoader[Any]):
        def __init__(self, colour: str, data: Any, **options: Any) -> None:
            super().__init__(data, **options)
            self.colour = colour

    trainer = make_trainer(max_epochs=1, overfit_batches=1)
    data = TensorDataset(torch.arange(4.0).reshape(-1, 1))
    with pytest.warns(UserWarning, match="overfit"):
        trainer.fit(Seeing(), Coloured("red", data, batch_size=2, shuffle=True))
    assert trainer.train_dataloader.colour == "red"


def test_questionable_dataloaders_warn(make_trainer: Make) -> None:
    class Counted(Stream):
        def __len__(self) -> int:
            return self.count

    with pytest.warns(UserWarning, match="shuffling enabled, it is strongly recommended"):
        make_trainer().validate(Seeing(), numbers(4, shuffle=True))
    with pytest.warns(UserWarning, match="Your `IterableDataset` has `__len__` defined"):
        make_trainer().validate(Seeing(), DataLoader(Counted(4)))
    with pytest.warns(UserWarning, match="Total length of `DataLoader` across ranks is zero"):
        assert make_trainer().validate(Seeing(), numbers(0)) == []


# -- the iterator itself ---------------------------------------------------------------------------------------------------


def test_a_step_may_take_the_iterator(make_trainer: Make) -> None:
    class Taking(Seeing):
        def training_step(self, dataloader_iter: Any) -> torch.Tensor:
            taken = [next(dataloader_iter) for _ in range(2)]
            self.seen.append([(plain(batch), index, number) for batch, index, number in taken])
            return self.loss([batch for batch, _, _ in taken])

        def validation_step(self, dataloader_iter: Any) -> None:
            batch, index, number = next(dataloader_iter)
            self.validated.append((plain(batch), index, number))

    module, trainer = Taking(), make_trainer(max_epochs=2)
    with pytest.warns(UserWarning, match="Found `dataloader_iter` argument in the `training_step`"):
        trainer.fit(module, numbers(8, batch_size=1), [numbers(4), numbers(2, 50)])
    assert len(module.seen) == 8
    assert module.seen[1] == [([[2]], 2, 0), ([[3]], 3, 0)]
    assert module.validated[:3] == [([[0, 1]], 0, 0), ([[2, 3]], 1, 0), ([[50, 51]], 0, 1)]
    odd = Taking()
    make_trainer(max_epochs=1, limit_val_batches=0).fit(odd, numbers(5, batch_size=1))
    assert len(odd.seen) == 2  # the third asked for more than there was


# -- resuming ------------------------------------------------------------------------------------------------------------


class Broken(Exception):
    pass


class BreakOff(al.Callback):
    """Saves a checkpoint and breaks the run off, at the n-th batch of training or validation."""

    def __init__(self, path: Path, *, train: int = -1, validation: int = -1) -> None:
        self.path, self.at = path, {"train": train, "validation": validation}

    def _count(self, trainer: al.Trainer, what: str) -> None:
        self.at[what] -= 1
        if self.at[what] == 0:
            trainer.save_checkpoint(self.path)
            raise Broken

    def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
        self._count(trainer, "train")

    def on_validation_batch_end(self, trainer: Any, *arguments: Any) -> None:
        self._count(trainer, "validation")


def result(module: Seeing, trainer: al.Trainer) -> Any:
    return module.weight.item(), {name: value.item() for name, value in trainer.callback_metrics.items()}


def whole_and_resumed(
    make_trainer: Make, tmp_path: Path, data: Callable[[], dict[str, Any]], kind: type[Seeing] = Seeing, **at: int
) -> tuple[Seeing, Seeing, Seeing]:
    """Modules of an uninterrupted run, of one broken off `at` a batch, and of its continuation; the ends must agree."""
    settings: dict[str, Any] = {"max_epochs": 3, "enable_checkpointing": False, "val_check_interval": 3}
    al.seed_everything(4)
    whole, trainer = kind(), make_trainer(**settings)
    trainer.fit(whole, **data())
    al.seed_everything(4)
    broken = kind()
    with pytest.raises(Broken):
        make_trainer(BreakOff(tmp_path / "broken", **at), **settings).fit(broken, **data())
    al.seed_everything(99)
    resumed, continued = kind(), make_trainer(**settings)
    continued.fit(resumed, ckpt_path=tmp_path / "broken", **data())
    assert result(resumed, continued) == result(whole, trainer)
    return whole, broken, resumed


@pytest.mark.parametrize(
    ("mode", "at"),
    [
        pytest.param(mode, at, marks=() if (at // 2 + number) % 3 == 0 else pytest.mark.slow)
        for number, mode in enumerate(("max_size_cycle", "min_size", "max_size"))
        for at in range(1, 12, 2)
    ],
)
def test_combined_loaders_go_on_where_they_were(make_trainer: Make, tmp_path: Path, mode: Any, at: int) -> None:
    def data() -> dict[str, Any]:
        parts = {"a": numbers(6, shuffle=True, batch_size=1), "b": numbers(9, 100, shuffle=True)}
        return {"train_dataloaders": CombinedLoader(parts, mode), "val_dataloaders": numbers(4)}

    whole, broken, resumed = whole_and_resumed(make_trainer, tmp_path, data, train=at)
    assert broken.seen + resumed.seen == whole.seen


@pytest.mark.parametrize("at", [2, 5, *(pytest.param(at, marks=pytest.mark.slow) for at in (4, 8))])
def test_a_combined_stream_goes_on_from_its_state(make_trainer: Make, tmp_path: Path, at: int) -> None:
    streams: list[Stream] = []

    def data() -> dict[str, Any]:
        streams.append(Stream(3))
        return {"train_dataloaders": [DataLoader(streams[-1]), numbers(10, shuffle=True)]}

    whole, broken, resumed = whole_and_resumed(make_trainer, tmp_path, data, train=at)
    assert broken.seen + resumed.seen == whole.seen
    assert streams[2].read <= streams[0].read - at + 1  # nothing was read to be thrown away


@pytest.mark.parametrize("at", [2, 4, *(pytest.param(at, marks=pytest.mark.slow) for at in (1, 3, 7))])
def test_a_run_broken_off_in_validation_validates_again_alike(make_trainer: Make, tmp_path: Path, at: int) -> None:
    def data() -> dict[str, Any]:
        return {"train_dataloaders": numbers(10, shuffle=True), "val_dataloaders": [numbers(2), numbers(4)]}

    whole, broken, resumed = whole_and_resumed(make_trainer, tmp_path, data, validation=at)
    assert broken.seen + resumed.seen == whole.seen
    assert broken.validated[: (at - 1) // 3 * 3] + resumed.validated == whole.validated


def test_a_step_that_takes_several_batches_resumes_behind_them(make_trainer: Make, tmp_path: Path) -> None:
    class Pairs(Seeing):
        def training_step(self, dataloader_iter: Any) -> torch.Tensor:
            taken = [next(dataloader_iter)[0] for _ in range(2)]
            self.seen.append(plain(taken))
            return self.loss(taken)

    def data() -> dict[str, Any]:
        return {"train_dataloaders": numbers(12, shuffle=True)}

    whole, broken, resumed = whole_and_resumed(make_trainer, tmp_path, data, Pairs, train=2)
    assert broken.seen + resumed.seen == whole.seen


class Corrupt(TensorDataset):
    """Fails at its fourth sample."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        if index == 3:
            raise KeyError("sample is broken")
        return super().__getitem__(index)


def test_a_fit_that_failed_in_a_worker_leaves_none(make_trainer: Make) -> None:
    before = set(multiprocessing.active_children())
    loader = DataLoader(Corrupt(torch.zeros(8, 1)), num_workers=2)
    with pytest.raises(KeyError, match="broken") as caught:
        make_trainer(max_epochs=1).fit(Seeing(), loader)
    assert caught.value.__traceback__ is not None, "it holds the frames that hold the iterator"
    assert set(multiprocessing.active_children()) <= before
