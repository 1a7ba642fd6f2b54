"""Batch sizes of nested batches of any structure."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from arclight.fabric.batches import count_samples_and_tokens

IDS = torch.zeros(3, 5, dtype=torch.int64)


@pytest.mark.parametrize(
    ("batch", "samples", "tokens"),
    [
        (IDS, 3, 15),
        ([IDS, IDS], 3, 15),
        ({"tokens": IDS, "labels": IDS, "bytes": torch.zeros(3)}, 3, 15),
        ({"other": torch.zeros(2), "input_ids": IDS}, 3, 15),
        ({"images": torch.zeros(4, 3, 8, 8)}, 4, 0),
        ({"tokens": torch.zeros(3, 5)}, 3, 0),
        (torch.zeros(6, 2), 6, 0),
    ],
)
def test_samples_and_tokens(batch: Any, samples: int, tokens: int) -> None:
    assert count_samples_and_tokens(batch) == (samples, tokens)
