"""Data modules: whose hooks hold, what is made from data sets, what is shown of them."""

from __future__ import annotations

import os
import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

import arclight as al


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(float(count)).reshape(-1, 1))


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        yield 1


def test_loaders_are_made_from_data_sets() -> None:
    data = al.DataModule.from_datasets(
        numbers(10), [numbers(4), Endless()], predict_dataset={"x": numbers(6)}, batch_size=3, num_workers=0
    )
    assert isinstance(data.train_dataloader().sampler, RandomSampler)
    assert [type(loader.dataset) for loader in data.val_dataloader()] == [TensorDataset, Endless]
    assert data.predict_dataloader()["x"].batch_size == 3
    with pytest.raises(ValueError, match="`test_dataloader` must be implemented"):
        data.test_dataloader()
    again = pickle.loads(pickle.dumps(data))
    assert len(again.train_dataloader()) == 4


def test_arguments_reach_a_constructor_that_takes_them() -> None:
    class Sized(al.DataModule):
        def __init__(self, batch_size: int, colour: str) -> None:
            super().__init__()
            self.batch_size, self.colour = batch_size, colour

    made = Sized.from_datasets(numbers(2), batch_size=7, colour="red")
    assert (made.batch_size, made.colour) == (7, "red")
    with pytest.raises(TypeError, match="colour"):
        Sized.from_datasets(numbers(2), batch_size=7)


def test_it_shows_the_sizes_of_what_is_set_up() -> None:
    class Two(al.DataModule):
        def setup(self, stage: str) -> None:
            self.train = numbers(16)

        def train_dataloader(self) -> Any:
            return [DataLoader(self.train), DataLoader(Endless())]

        def val_dataloader(self) -> Any:
            return DataLoader(self.train)

    data = Two()
    nothing = "{Test dataloader: None}" + os.linesep + "{Predict dataloader: None}"
    assert str(data).splitlines()[:2] == ["{Train dataloader: None}", "{Validation dataloader: None}"]
    data.setup("fit")
    assert str(data) == os.linesep.join(
        ["{Train dataloader: 1. size=16 ; 2. size=NA}", "{Validation dataloader: size=16}", nothing]
    )


class Summing(al.Module):
    """Keeps what reached its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append(batch[0].sum().item())
        return self.layer(batch[0]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_the_data_modules_transfer_hooks_hold(make_trainer: Any) -> None:
    class Doubling(al.DataModule):
        def train_dataloader(self) -> Any:
            return DataLoader(numbers(4), batch_size=4)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [2 * batch[0]]

    class Tripling(Summing):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [3 * batch[0]]

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [1 + batch[0]]

    plain, both = Summing(), Tripling()
    make_trainer(max_epochs=1).fit(plain, datamodule=Doubling())
    assert plain.seen == [12.0]
    with pytest.warns(UserWarning, match="in both `LightningModule` and `LightningDataModule`"):
        make_trainer(max_epochs=1).fit(both, datamodule=Doubling())
    assert both.seen == [20.0]  # the module's own where the data module has none


def test_a_data_module_may_stand_in_the_place_of_loaders(make_trainer: Any) -> None:
    data = al.DataModule.from_datasets(numbers(4), batch_size=2)
    module = Summing()
    trainer = make_trainer(max_epochs=1)
    trainer.fit(module, data)
    assert len(module.seen) == 2
    assert trainer.datamodule is data
    assert data.trainer is trainer
    with pytest.raises(ValueError, match="two data modules"):
        trainer.fit(module, data, datamodule=data)
    with pytest.raises(ValueError, match="You cannot pass"):
        trainer.fit(module, DataLoader(numbers(2)), datamodule=data)
    with pytest.raises(ValueError, match="You cannot pass"):
        trainer.predict(module, DataLoader(numbers(2)), datamodule=data)


def test_every_stage_and_error_reaches_the_datamodule(make_trainer: Any) -> None:
    told: list[Any] = []

    class Told(al.DataModule):
        def prepare_data(self) -> None:
            told.append("prepare")

        def setup(self, stage: str) -> None:
            told.append(("setup", stage))

        def teardown(self, stage: str) -> None:
            told.append(("teardown", stage))

        def on_exception(self, exception: BaseException) -> None:
            told.append(str(exception))

        def train_dataloader(self) -> Any:
            return DataLoader(numbers(2))

    class Failing(Summing):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            raise RuntimeError("no luck")

    make_trainer(max_epochs=1).fit(Summing(), datamodule=Told())
    assert told == ["prepare", ("setup", "fit"), ("teardown", "fit")]
    told.clear()
    with pytest.raises(RuntimeError, match="no luck"):
        make_trainer(max_epochs=1).fit(Failing(), datamodule=Told())
    assert "no luck" in told
