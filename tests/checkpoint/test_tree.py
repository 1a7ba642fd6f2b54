"""A state taken apart into JSON and tensors, and put together again, without files."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from arclight.checkpoint.tree import decode, encode, files_of, tensors_of


def back(state: dict[str, Any]) -> dict[str, Any]:
    encoded = encode(state)
    return decode(encoded.entries, encoded.files)


def test_a_dict_with_a_name_refers_to_no_tensor() -> None:
    state = {"layer": {"name": "conv"}, "list": [{"name": "a"}], "bytes": {"name": b"x"}}
    entries = encode(state).entries
    assert tensors_of(entries) == set()
    assert back(state) == state
    assert files_of(encode({"a": [torch.zeros(1)]}).entries) == {"state.safetensors"}


def test_tensors_whose_dotted_names_are_equal_are_kept_apart() -> None:
    state = {"a": [{"b.c": torch.tensor(1.0), "b": {"c": torch.tensor(2.0)}}], "a.0.b.c": [torch.tensor(3.0)]}
    (found,) = back(state)["a"]
    assert (float(found["b.c"]), float(found["b"]["c"])) == (1, 2)
    assert float(back(state)["a.0.b.c"][0]) == 3
    names = set(encode(state).files["state.safetensors"])
    assert names == {"a.0.b.c", "a.0.b.c#2", "a.0.b.c.0"}


def test_a_tensor_may_be_called_as_the_files_own_entry() -> None:
    encoded = encode({"__metadata__": torch.tensor(1.0)})
    assert "__metadata__" not in encoded.files["state.safetensors"]
    assert float(decode(encoded.entries, encoded.files)["__metadata__"]) == 1


def spread(shape: list[int], *shares: tuple[list[int], Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """A node for a tensor in shares (offset, values), and their files."""
    files = {f"f{k}": {"w": share} for k, (_, share) in enumerate(shares)}
    node = {"$": "spread", "shape": shape, "dtype": "float32", "shares": []}
    node["shares"] = [[f"f{k}", "w", offset] for k, (offset, _) in enumerate(shares)]
    return {"w": node}, files


def test_a_share_that_is_the_whole_is_not_copied() -> None:
    whole = torch.arange(6.0).view(2, 3)
    assert decode(*spread([2, 3], ([0, 0], whole)))["w"] is whole


def test_shards_come_to_their_places() -> None:
    whole = torch.arange(12.0).view(3, 4)
    corners = [([0, 0], whole[:2, :3]), ([0, 3], whole[:2, 3:]), ([2, 0], whole[2:, :1]), ([2, 1], whole[2:, 1:])]
    assert torch.equal(decode(*spread([3, 4], *corners))["w"], whole)
    assert torch.equal(decode(*spread([3, 4], ([2, 0], whole[2:]), ([0, 0], whole[:2])))["w"], whole)
    assert torch.equal(decode(*spread([], ([], torch.tensor(5.0))))["w"], torch.tensor(5.0))
    assert decode(*spread([0, 3]))["w"].shape == (0, 3)


class Lazy:
    """A share that is still in its file."""

    dtype = torch.float32

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def joined(self, parts: Any, shape: Any) -> Any:
        return [part for part, _ in parts], shape


def test_shards_that_are_still_in_their_files_stay_there() -> None:
    one, left, right = Lazy(2, 3), Lazy(2, 2), Lazy(2, 1)
    assert decode(*spread([2, 3], ([0, 0], one)))["w"] == ([one], [2, 3])
    assert decode(*spread([2, 3], ([0, 0], left), ([0, 2], right)))["w"] == ([left, right], [2, 3])


@pytest.mark.parametrize(
    "shares",
    [
        [([0, 0], (2, 2))],  # a gap
        [([0, 0], (2, 2)), ([0, 1], (2, 1))],  # one column twice, one not at all
        [([0, 0], (2, 2)), ([0, 3], (2, 1))],  # beyond the right side
        [([0, -1], (2, 1)), ([0, 0], (2, 2))],
        [([1, 0], (2, 3))],
        [([0], (2,)), ([0, 2], (2, 2))],
    ],
)
def test_shares_that_do_not_cover_the_tensor_once_are_refused(shares: list[tuple[list[int], tuple[int, ...]]]) -> None:
    parts = [(offset, torch.zeros(shape)) for offset, shape in shares]
    with pytest.raises(ValueError, match=r"shape \[2, 3\] do not cover it once"):
        decode(*spread([2, 3], *parts))


def test_names_of_files_are_not_too_long_for_file_systems() -> None:
    longest = "n" * 200
    files = encode({longest: {"w": torch.zeros(1)}, longest + "n": {"w": torch.ones(1)}}).files
    assert set(files) == {f"{longest}.safetensors", "state.safetensors"}
