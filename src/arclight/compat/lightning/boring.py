"""Define Lightning's ``BoringModel`` and its like: minimal models and data for bug reports.

User code imports these as ``pytorch.demos.boring_classes``, by the table in `names`; nothing in Arclight calls them. Names, shapes and
hooks are Lightning's and stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from arclight.trainer.datamodule import DataModule
from arclight.trainer.module import Module

_WIDTH, _LENGTH = 32, 64


class RandomDataset(Dataset[Tensor]):
    """``length`` vectors of ``size`` normal numbers, drawn once."""

    def __init__(self, size: int, length: int) -> None:
        self.len = length
        self.data = torch.randn(length, size)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]

    def __len__(self) -> int:
        return self.len


class RandomDictDataset(Dataset[dict[str, Tensor]]):
    """Random vectors under ``"a"``, and the same plus 2 under ``"b"``."""

    def __init__(self, size: int, length: int) -> None:
        self.len = length
        self.data = torch.randn(length, size)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"a": self.data[index], "b": self.data[index] + 2}

    def __len__(self) -> int:
        return self.len


class RandomIterableDataset(IterableDataset[Tensor]):
    """A stream of ``count`` vectors, drawn as it is read; its length is not known."""

    def __init__(self, size: int, count: int) -> None:
        self.size, self.count = size, count

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.randn(self.size) for _ in range(self.count))


class RandomIterableDatasetWithLen(RandomIterableDataset):
    """Stream of random vectors with a length."""

    def __len__(self) -> int:
        return self.count


def _random_loader() -> DataLoader[Tensor]:
    return DataLoader(RandomDataset(_WIDTH, _LENGTH))


class BoringModel(Module):
    """Linear layer from 32 to 2 whose loss pulls its output to 1; override what a test needs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(_WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]

    def loss(self, preds: Tensor, labels: Tensor | None = None) -> Tensor:
        return F.mse_loss(preds, torch.ones_like(preds) if labels is None else labels)

    def step(self, batch: Any) -> Tensor:
        return self.loss(self(batch))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.step(batch)}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"x": self.step(batch)}

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return {"y": self.step(batch)}

    def configure_optimizers(self) -> tuple[list[Optimizer], list[LRScheduler]]:
        optimizer = SGD(self.parameters(), lr=0.1)
        return [optimizer], [StepLR(optimizer, step_size=1)]

    def train_dataloader(self) -> Any:
        return _random_loader()

    def val_dataloader(self) -> Any:
        return _random_loader()

    def test_dataloader(self) -> Any:
        return _random_loader()

    def predict_dataloader(self) -> Any:
        return _random_loader()


class ManualOptimBoringModel(BoringModel):
    """BoringModel that steps its optimizer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = self.step(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


_PARTS = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}
"""What each stage reads."""


class BoringDataModule(DataModule):
    """Data module of 256 random vectors, 64 each for train, val, test and predict."""

    random_train: Any
    random_val: Any
    random_test: Any
    random_predict: Any

    def __init__(self) -> None:
        super().__init__()
        self.random_full = RandomDataset(_WIDTH, _LENGTH * 4)

    def setup(self, stage: str) -> None:
        for part in _PARTS[stage]:
            start = ("train", "val", "test", "predict").index(part) * _LENGTH
            setattr(self, f"random_{part}", Subset(self.random_full, indices=range(start, start + _LENGTH)))

    def train_dataloader(self) -> Any:
        return DataLoader(self.random_train)

    def val_dataloader(self) -> Any:
        return DataLoader(self.random_val)

    def test_dataloader(self) -> Any:
        return DataLoader(self.random_test)

    def predict_dataloader(self) -> Any:
        return DataLoader(self.random_predict)


class BoringDataModuleNoLen(BoringDataModule):
    """Streams of unknown length."""

    lengths = {"train": 512, "val": 128, "test": 256, "predict": 64}

    def __init__(self) -> None:
        DataModule.__init__(self)

    def setup(self, stage: str) -> None:
        for part in _PARTS[stage]:
            setattr(self, f"random_{part}", RandomIterableDataset(_WIDTH, self.lengths[part]))


class IterableBoringDataModule(DataModule):
    """Data module with two loaders per stage, over a dataset and a stream."""

    lengths = {"train": 16, "val": 32, "test": 64, "predict": 128}
    train_datasets: list[Dataset[Tensor]]
    val_datasets: list[Dataset[Tensor]]
    test_datasets: list[Dataset[Tensor]]
    predict_datasets: list[Dataset[Tensor]]

    def setup(self, stage: str) -> None:
        for part in _PARTS[stage]:
            length = self.lengths[part]
            setattr(self, f"{part}_datasets", [RandomDataset(4, length), RandomIterableDataset(4, length)])

    def train_dataloader(self) -> Any:
        return [DataLoader(dataset) for dataset in self.train_datasets]

    def val_dataloader(self) -> Any:
        return [DataLoader(dataset) for dataset in self.val_datasets]

    def test_dataloader(self) -> Any:
        return [DataLoader(dataset) for dataset in self.test_datasets]

    def predict_dataloader(self) -> Any:
        return [DataLoader(dataset) for dataset in self.predict_datasets]


class Net(nn.Module):
    """A small image classifier: (N, 1, 28, 28) to log probabilities (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = F.relu(self.fc1(torch.flatten(self.dropout1(x), 1)))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)


class DemoModel(Module):
    """Linear layer from 32 to ``out_dim`` with ReLU, and a learning rate as argument."""

    def __init__(self, out_dim: int = 10, learning_rate: float = 0.02) -> None:
        super().__init__()
        self.l1 = nn.Linear(32, out_dim)
        self.learning_rate = learning_rate

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.l1(x.view(x.size(0), -1)))

    def training_step(self, batch: Any, batch_nb: int) -> Tensor:
        return self(batch).sum()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)
