import itertools
import tomllib
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arclight.checkpoint.files import PlacedFile
from arclight.checkpoint.stored_tensor import Piece, StoredTensor
from arclight.checkpoint.tensorfile import as_bytes, memory_of
from arclight.federated.aggregation.fixed_point import Contribution
from arclight.federated.aggregation.fold import Fold
from arclight.federated.aggregation.strategy_step import SteppedTensor
from arclight.federated.errors import FederatedError
from arclight.federated.masks.experts import ExpertParts, assign_experts, expert_key, expert_of, select_experts
from arclight.federated.masks.settings import Experts, HeadExperts, Masks
from arclight.federated.masks.transfer_mask import ServerMasks, TransferMask
from arclight.federated.protocol import Entry, Manifest
from arclight.federated.server.server_step import ExpertStacks
from arclight.federated.settings import Federation
from arclight.parallel import initialize
from arclight.recipe import read
from arclight.text import build_model


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
    parts = ExpertParts({"model/e.w": local}, lambda key: numbers if key == "model/e.w" else None)
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
    transfer_mask = TransferMask(masks=Masks(experts=Experts(tensors=("e.w",), per_client=2)), names=("e.w", "router"))
    keys = ["model/e.w", "model/router"]
    contributions = []
    for client, numbers, value, samples in (("a", (0, 1), 2.0, 10), ("b", (1, 2), 6.0, 30)):
        model = {"model/e.w": torch.full((4, 2), value), "model/router": torch.full((4,), value)}
        sent = TransferMask(masks=transfer_mask.masks, names=transfer_mask.names, experts=numbers).up(keys, 1)
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


def test_experts_of_deptoe_are_split_and_merged_bit_for_bit() -> None:
    """Two clients hold half of the experts each, weights and moments alike; what they send is put together again."""
    model: Any = build_model("deptoe-debug", layers=2, dim=32, heads=2, head_dim=8, vocab_size=64)
    initialize(model, 0)
    names = [name for name, _ in model.named_parameters()]
    tensors = {
        f"{state}/{name}": torch.randn_like(p) for state in ("model", "exp_avg") for name, p in model.named_parameters()
    }
    manifest = Manifest(
        kind="weights", blobs={"0" * 64: 0},
        tensors={key: Entry(blob="0" * 64, dtype="F32", shape=tuple(t.shape)) for key, t in tensors.items()},
    )  # fmt: skip
    masks = Masks(experts=Experts(per_client=8), head_experts=HeadExperts(heads=2, per_client=2))
    federation = Federation(clients=2, masks=masks, moments=("exp_avg",))
    server = ServerMasks(federation, 0, {"a": 0, "b": 1}.get)
    stacks = ExpertStacks.find(
        {key: (t.dtype, tuple(t.shape)) for key, t in tensors.items()}, server.whole(manifest).is_stack
    )
    assert len(stacks.counts) == 2 * 2 * (2 + 2)  # weights and moments of two blocks: two stacks of each kind
    parts, sizes = ExpertParts(tensors), []
    sent: dict[str, torch.Tensor] = {}
    for client in ("a", "b"):
        transfer_mask = server.of(client, 1, manifest)
        own = {
            key: parts[key] for key in transfer_mask.up([f"{s}/{n}" for s in ("model", "exp_avg") for n in names], 1)
        }
        assert not {key for key in own if expert_of(key)} & sent.keys()
        sizes.append(sum(value.nbytes for value in own.values()))
        sent |= own
    stepped = (SteppedTensor(key, sent[key], {}, 0) for key in sorted(sent, key=lambda key: (stacks.whole(key), key)))
    merged = {key: value for key, value, _ in stacks.stack(stepped)}
    assert merged.keys() == tensors.keys()
    assert all(torch.equal(merged[key], tensors[key]) for key in tensors)
    whole = sum(t.nbytes for t in tensors.values())
    experts = sum(t.nbytes for key, t in tensors.items() if key in stacks.counts)
    assert sizes == [whole - experts // 2] * 2


def test_weights_that_lack_an_expert_are_refused_by_name() -> None:
    stacks = ExpertStacks({"model/a.w": 4, "exp_avg/a.w": 4})
    one = [SteppedTensor(f"exp_avg/a.w[{n}]", torch.ones(2), {}, 0) for n in (0, 2)]
    ((_, moments, _),) = stacks.stack(one)  # of experts that nobody has trained yet there are none
    assert moments.tolist() == [[1, 1], [0, 0], [1, 1], [0, 0]]
    parts = [SteppedTensor(f"model/a.w[{n}]", torch.ones(2), {}, 0) for n in (0, 2)]
    with pytest.raises(FederatedError, match=r"model/a\.w lacks 2 of 4 experts: 1, 3"):
        list(stacks.stack(parts))


def test_a_site_of_the_recipe_sends_three_fifths_of_the_bytes() -> None:
    recipe = tomllib.loads((Path(__file__).parents[3] / "recipes/fed-moe.toml").read_text(encoding="utf-8"))
    federation = read(Federation, recipe["federation"])
    task = recipe["task"]
    with torch.device("meta"):
        model = build_model(
            task["model"], **task["overrides"], vocab_size=4096
        )  # as many tokens as its tokenizer learns
    shapes = {
        f"{state}/{n}": tuple(p.shape) for state in ("model", *federation.moments) for n, p in model.named_parameters()
    }
    manifest = Manifest(
        kind="weights", tensors={key: Entry(blob="0" * 64, dtype="F32", shape=s) for key, s in shapes.items()}, blobs={"0" * 64: 0}
    )  # fmt: skip
    server = ServerMasks(federation, 0, {"a": 0, "b": 1, "c": 2, "d": 3}.get)
    sizes = {key: torch.Size(shape).numel() for key, shape in shapes.items()}
    share = sum(size for key, size in sizes.items() if server.whole(manifest).is_stack(key)) / sum(sizes.values())
    assert 0.78 < share < 0.82
    held: dict[str, int] = {}
    for client in "abcd":
        sent = server.of(client, 1, manifest).up(shapes, 1)
        found = [expert_of(key) or (key, -1) for key in sent]
        up = sum(sizes[key] // (shapes[key][0] if number >= 0 else 1) for key, number in found)
        assert up / sum(sizes.values()) <= 0.62
        for key in sent:
            held[key] = held.get(key, 0) + 1
    assert {held[key] for key in held if expert_of(key)} == {2}
