"""Sizes of weight files."""

from __future__ import annotations

import pytest

from arclight.fabric.weight_files import byte_count


@pytest.mark.parametrize(
    ("size", "count"),
    [
        (7, 7), ("7B", 7), ("3KB", 3_000), ("3 kib", 3 * 2**10), ("500MB", 500_000_000), ("5MiB", 5 * 2**20), ("5GB", 5_000_000_000),
        ("5GiB", 5 * 2**30),
    ],
)  # fmt: skip
def test_a_size_has_the_bytes_of_its_unit(size: int | str, count: int) -> None:
    assert byte_count(size) == count


@pytest.mark.parametrize("size", [0, "0GiB", "5 apples", "-1MB", ""])
def test_sizes_of_no_bytes_are_refused_by_the_setting(size: int | str) -> None:
    with pytest.raises(ValueError, match=r"shard .* is not a size"):
        byte_count(size, "shard")
