"""Compare two states bit for bit."""

from __future__ import annotations

from typing import Any

import torch


def assert_same(left: Any, right: Any, where: str = "") -> None:
    """Types, keys, lengths and values; two NaNs are the same."""
    assert type(left) is type(right), where
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype, where
        assert torch.equal(left, right), where
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for key in left:
            assert_same(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), where
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            assert_same(a, b, f"{where}[{index}]")
    else:
        assert left == right or (left != left and right != right), where
