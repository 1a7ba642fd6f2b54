"""Digest the order of samples: shuffles, workers, ranks, combined loaders and packed tokens.

`digests` runs `values`. Shuffled loaders are read from the start and from the middle of an epoch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from arclight.data import CombinedLoader, ResumableLoader, derive_seed
from arclight.text import Text, TextDataModule


def loader(count: int, batch: int, workers: int = 0) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(count)), batch, shuffle=True, num_workers=workers)


def batches(found: Any) -> list[Any]:
    return [[part.tolist() for part in batch] for batch in found]


def tokens(**settings: Any) -> list[Any]:
    data = TextDataModule(
        Text(
            data="texts",
            sequence_length=24,
            batch_size=3,
            cache=Path("cache"),
            tokenizer=settings.pop("tokenizer"),
            **settings,
        )
    )
    data.prepare_data()
    data.setup("fit")
    found = [
        {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
        for batch in data.train_dataloader()
    ]
    return found + [
        {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
        for batch in data.val_dataloader()
    ]


def values(folder: Path) -> dict[str, Any]:
    from arclight.text.data.data_settings import BPE, Bytes

    Path("texts").mkdir()
    for number in range(30):
        Path(f"texts/{number}.txt").write_text(
            f"the {number} cats sat on the mat and saw {number} birds\n" * (1 + number % 4)
        )
    found: dict[str, Any] = {"seeds": [derive_seed(7, index) for index in range(5)]}
    for workers in (0, 2):
        found[f"shuffled-{workers}"] = {
            f"{epoch}-{start}": batches(ResumableLoader(loader(23, 4, workers), seed=3).batches(epoch, start))
            for epoch, start in ((0, 0), (1, 0), (1, 3))
        }
        found[f"shared-{workers}"] = [
            batches(ResumableLoader(loader(23, 4, workers), seed=3, rank=rank, world_size=2).batches(0))
            for rank in (0, 1)
        ]
    for mode in ("min_size", "max_size", "max_size_cycle"):
        both = CombinedLoader({"a": loader(9, 2), "b": loader(5, 2)}, mode)
        torch.manual_seed(3)
        found[f"combined-{mode}"] = [
            {key: None if part is None else part[0] for key, part in batch.items()} for batch, _, _ in both
        ]
    found["bytes"] = tokens(tokenizer=Bytes())
    found["bpe"] = tokens(tokenizer=BPE(vocab_size=300))
    return found
