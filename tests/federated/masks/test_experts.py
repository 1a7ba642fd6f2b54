import itertools
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arclight.checkpoint.files import PlacedFile
from arclight.checkpoint.stored_tensor import Piece, StoredTensor
from arclight.checkpoint.tensorfile import as_bytes, memory_of
from arclight.federated.aggregation.fixed_point import Contribution
from arclight.federated.aggregation.fold import Fold
from arclight.federated.errors import FederatedError
from arclight.federated.masks.experts import ExpertParts, assign_experts, expert_key, expert_of, select_experts
from arclight.federated.masks.settings import Experts, Masks
from arclight.federated.masks.transfer_mask import TransferMask


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 7),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64]),
    st.lists(st.integers(0, 4), max_size=3),
)
def test_each_expert_is_a_view_of_its_stack(count: int, dtype: torch.dtype, rest: list[int]) -> None:
    w, m = (torch.randn(count, *rest).mul(100).to(dtype) for _ in range(2))
    tensors = {"model/b.experts.w1": w, "exp_avg/b.experts.w1": m, "model/norm": torch.randn(3)}
    parts = ExpertParts(tensors)
    assert list(parts) == list(tensors)
    for key in ("model/b.experts.w1", "exp_avg/b.experts.w1"):
        for number in range(count):
            assert expert_key(key, number) in parts
            assert torch.equal(parts[expert_key(key, number)], tensors[key][number])
        with pytest.raises(KeyError):
            parts[expert_key(key, count)]


def test_a_smaller_models_experts_keep_their_numbers() -> None:
    whole = torch.randn(6, 2, 3)
    numbers = (1, 4, 5)
    local = select_experts(whole, numbers)
    assert all(torch.equal(local[i], whole[n]) for i, n in enumerate(numbers))
    parts = ExpertParts({"model/e.w": local}, numbers)
    assert all(torch.equal(parts[f"model/e.w[{n}]"], whole[n]) for n in numbers)
    with pytest.raises(KeyError):
        parts["model/e.w[0]"]


def test_keys_of_experts() -> None:
    assert expert_of(expert_key("model/a.b", 12)) == ("model/a.b", 12)
    assert [expert_of(key) for key in ("model/a", "model/a[x]", "model/a[01]", "[3]")] == [None] * 4


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 12), st.integers(1, 12), st.integers(0, 5), st.sampled_from(["fixed", "random"]), st.integers(0, 40)
)
def test_assignments(count: int, per_client: int, overlap: int, assign, round_: int) -> None:
    per_client = min(per_client, count)
    experts = Experts(per_client=per_client, overlap=min(overlap, per_client - 1), assign=assign, every=3)
    given = [assign_experts(experts, count, 7, client, round_) for client in range(2 * count)]
    assert all(
        len(set(one)) == per_client and list(one) == sorted(one) and set(one) <= set(range(count)) for one in given
    )
    assert given[1] == assign_experts(experts, count, 7, 1, round_ // 3 * 3)
    if assign == "fixed":
        assert set().union(*given) == set(range(count))
        if 2 * per_client - experts.overlap <= count:
            assert all(len(set(one) & set(next_)) == experts.overlap for one, next_ in itertools.pairwise(given))


def test_random_assignments_differ_by_client_round_and_seed_and_reach_all() -> None:
    experts = Experts(per_client=2, assign="random")
    draws = {
        assign_experts(experts, 8, seed, client, number)
        for seed in (1, 2)
        for client in range(4)
        for number in range(20)
    }
    assert len(draws) > 20
    counts = torch.zeros(8)
    for client in range(50):
        for number in range(20):
            counts[list(assign_experts(experts, 8, 1, client, number))] += 1
    assert counts.min() > 0.8 * counts.mean()


def test_too_many_experts_are_refused() -> None:
    with pytest.raises(FederatedError, match="has 4 experts"):
        assign_experts(Experts(per_client=5), 4, 0, 0, 0)
    with pytest.raises(ValueError, match="overlap"):
        Experts(per_client=2, overlap=2)


def test_each_experts_mean_is_over_the_samples_of_those_that_have_it() -> None:
    """Two clients share expert 1: by hand, (10 * 2 + 30 * 6) / 40 = 5; nobody has expert 3, which stays."""
    travel = TransferMask(masks=Masks(experts=Experts(tensors=("e.w",), per_client=2)), names=("e.w", "router"))
    keys = ["model/e.w", "model/router"]
    contributions = []
    for client, numbers, value, samples in (("a", (0, 1), 2.0, 10), ("b", (1, 2), 6.0, 30)):
        model = {"model/e.w": torch.full((4, 2), value), "model/router": torch.full((4,), value)}
        sent = TransferMask(masks=travel.masks, names=travel.names, experts=numbers).up(keys, 1)
        assert sent == [*(f"model/e.w[{n}]" for n in numbers), "model/router"]
        parts = ExpertParts(model)
        contributions.append(Contribution(client=client, weight=samples, tensors={key: parts[key] for key in sent}))
    means = dict(Fold(contributions, "weights"))
    before = {"model/e.w": torch.full((4, 2), -1.0)}
    after = before | {key: value for key, value in means.items() if expert_of(key) is None}
    for key, value in means.items():
        if (found := expert_of(key)) is not None:
            after[found[0]][found[1]] = value
    assert after["model/e.w"].tolist() == [[2.0, 2.0], [5.0, 5.0], [6.0, 6.0], [-1.0, -1.0]]
    assert after["model/router"].tolist() == [5.0] * 4


def test_one_entry_of_a_stored_tensor_is_read_alone(tmp_path: Path) -> None:
    whole = torch.arange(24, dtype=torch.float32).view(4, 2, 3)
    (tmp_path / "one").write_bytes(b"head" + memory_of(as_bytes(whole)).tobytes())

    class Noting(PlacedFile):
        read: ClassVar[list[int]] = []

        def read_at(self, position: int, target: memoryview) -> None:
            self.read.append(len(target))
            super().read_at(position, target)

    source = Noting(tmp_path / "one")
    stored = StoredTensor((4, 2, 3), torch.float32, [Piece(source, 4, (0, 0, 0), (4, 2, 3))])
    for number in range(4):
        row = stored.row(number)
        assert isinstance(row, StoredTensor)
        assert not Noting.read
        assert torch.equal(row.read(), whole[number])
        assert Noting.read == [24]
        Noting.read.clear()
    halves = [Piece(source, 4, (0, 0, 0), (2, 2, 3)), Piece(source, 4 + 48, (2, 0, 0), (2, 2, 3))]
    split_up = StoredTensor((4, 2, 3), torch.float32, halves)
    assert all(torch.equal(split_up.row(number), whole[number]) for number in range(4))
    with pytest.raises(IndexError):
        stored.row(4)
