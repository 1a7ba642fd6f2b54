"""A resumable loader costs few Python calls beside the loader it reads."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from arclight.data import ResumableLoader


class Ready(Dataset[torch.Tensor]):
    """Samples that are there already, or whole batches."""

    def __init__(self, count: int) -> None:
        self.items = torch.arange(float(count))

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.items[index]


def python_calls(batches: Iterable[Any]) -> int:
    calls = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(profile)
    try:
        for _ in batches:
            pass
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("batch_size", [None, 8])
@pytest.mark.parametrize("shuffle", [False, True])
def test_python_calls_of_a_batch(batch_size: int | None, shuffle: bool) -> None:
    def loader(batches: int) -> DataLoader[torch.Tensor]:
        return DataLoader(Ready(batches * (batch_size or 1)), batch_size=batch_size, shuffle=shuffle)

    def slope(read: Any) -> float:
        python_calls(read(loader(5)))  # what is done once is done
        return (python_calls(read(loader(150))) - python_calls(read(loader(50)))) / 100

    more = slope(lambda given: ResumableLoader(given).batches(0)) - slope(iter)
    assert more <= 19, more
