"""Predictions go to a writer, batch by batch or all at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import arclight as al
from arclight.trainer.callbacks import BasePredictionWriter


class Twice(al.Module):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        return batch[0] * 2


class Keep(BasePredictionWriter):
    def __init__(self, interval: Any) -> None:
        super().__init__(interval)
        self.batches: list[Any] = []
        self.epochs: list[Any] = []

    def write_on_batch_end(
        self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, batch: Any, batch_idx: int, loader: int
    ) -> None:
        self.batches.append((loader, batch_idx, batch_indices, prediction.tolist()))

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self.epochs.append(([part.tolist() for part in predictions], batch_indices))


def numbers(count: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(count)), batch_size=2, **options)


@pytest.mark.parametrize("interval", ["batch", "epoch", "batch_and_epoch"])
@pytest.mark.parametrize("returned", [True, False])
def test_interval_selects_batch_or_epoch_writes(make_trainer: Any, interval: str, returned: bool) -> None:
    writer = Keep(interval)
    predictions = make_trainer(writer).predict(Twice(), numbers(5), return_predictions=returned)
    assert (predictions is not None) == returned
    by_batch = [(0, 0, [0, 1], [0, 2]), (0, 1, [2, 3], [4, 6]), (0, 2, [4], [8])]
    assert writer.batches == (by_batch if "batch" in interval else [])
    assert writer.epochs == ([([[0, 2], [4, 6], [8]], [[[0, 1], [2, 3], [4]]])] if "epoch" in interval else [])


def test_the_places_of_shuffled_samples_are_right(make_trainer: Any) -> None:
    writer = Keep("batch")
    make_trainer(writer).predict(Twice(), numbers(8, shuffle=True, num_workers=1))
    for _, _, indices, prediction in writer.batches:
        assert prediction == [2 * index for index in indices]
    assert sorted(index for _, _, indices, _ in writer.batches for index in indices) == list(range(8))


def test_an_unknown_interval_and_a_step_without_batches() -> None:
    with pytest.raises(ValueError, match=r"`write_interval` should be one of \['batch', 'epoch', 'batch_and_epoch'\]"):
        Keep("hourly")

    class Iterator(al.Module):
        def predict_step(self, dataloader_iter: Any) -> None: ...

    with pytest.raises(NotImplementedError, match="dataloader_iter"):
        Keep("batch").setup(None, Iterator(), "predict")  # type: ignore[arg-type]
