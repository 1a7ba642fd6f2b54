"""The smallest models run through every entry point under Lightning's import paths."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import arclight.compat.lightning.pytorch as pl
from arclight.compat.lightning.pytorch.demos.boring_classes import (
    BoringDataModule,
    BoringDataModuleNoLen,
    BoringModel,
    DemoModel,
    ManualOptimBoringModel,
    Net,
    RandomDictDataset,
    RandomIterableDatasetWithLen,
)


def trainer(folder: Path, **settings: Any) -> pl.Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    return pl.Trainer(default_root_dir=folder, max_epochs=1, **quiet | settings)


@pytest.mark.parametrize("kind", [BoringModel, ManualOptimBoringModel])
def test_a_boring_model_learns_as_by_hand_and_runs_every_entry_point(tmp_path: Path, kind: type[BoringModel]) -> None:
    model, data, run = kind(), BoringDataModule(), trainer(tmp_path, limit_train_batches=5)
    by_hand = copy.deepcopy(model.layer)
    run.fit(model, datamodule=data)
    assert run.global_step == 5
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    for vector in data.random_full.data[:5]:
        optimizer.zero_grad()
        (by_hand(vector) - 1).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(model.layer.weight, by_hand.weight)
    run.validate(model)
    run.test(model)
    predictions = run.predict(model)
    assert len(predictions) == 64
    assert predictions[0].shape == (1, 2)


@pytest.mark.parametrize(("kind", "batches"), [(BoringDataModule, 64), (BoringDataModuleNoLen, 512)])
def test_data_modules_feed_it(tmp_path: Path, kind: type[pl.LightningDataModule], batches: int) -> None:
    run = trainer(tmp_path)
    run.fit(BoringModel(), datamodule=kind())
    assert run.global_step == batches
    assert len(run.predict(BoringModel(), datamodule=kind())) == 64


def test_shapes_of_the_other_parts() -> None:
    sample = RandomDictDataset(4, 3)[1]
    assert torch.equal(sample["b"], sample["a"] + 2)
    stream = RandomIterableDatasetWithLen(4, 5)
    assert len(stream) == len(list(stream)) == 5
    assert Net()(torch.zeros(2, 1, 28, 28)).exp().sum(1).tolist() == pytest.approx([1.0, 1.0])
    assert DemoModel(out_dim=3)(torch.zeros(2, 32)).shape == (2, 3)
