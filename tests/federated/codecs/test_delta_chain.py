"""Server and nodes see the same weights bit for bit, however a node came to them; and in time they are the server's own."""

import dataclasses
import logging
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.federated.fakes import TemporaryStore

from arclight.federated.blobs.folder import FolderStore
from arclight.federated.blobs.manifest_io import open_manifest, write_blobs
from arclight.federated.codecs.delta_chain import DeltaChain, WeightsReplica, extend_chain
from arclight.federated.codecs.settings import BF16, Codec, Int4, Int8, Raw, TopK
from arclight.federated.errors import BlobError, ProtocolError
from arclight.federated.protocol import Manifest

CODECS = (BF16(), Int8(), Int4(), TopK(share=0.2))


def first_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model/b.weight": torch.randn(40, 64, generator=generator),
        "model/a.weight": torch.randn(30, 70, generator=generator),
        "model/a.bias": torch.randn(30, generator=generator),
        "model/half": torch.randn(64, 64, generator=generator).bfloat16(),
        "model/wide": torch.randn(64, 64, generator=generator).double(),
        "model/count": torch.tensor(0),
    }


def moved(weights: dict[str, torch.Tensor], seed: int, size: float = 0.1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        key: (w.double() + size * torch.randn(w.shape, generator=generator)).to(w.dtype)
        if w.is_floating_point()
        else w + 1
        for key, w in weights.items()
    }


def written(weights: dict[str, torch.Tensor], store: TemporaryStore) -> Manifest:
    return write_blobs(weights, store, kind="weights")


def run(
    codec: Codec, rounds: int, longest: int = 8
) -> tuple[TemporaryStore, list[DeltaChain], list[dict[str, torch.Tensor]]]:
    store, weights = TemporaryStore(), first_weights()
    chains, own = [extend_chain(None, written(weights, store), codec, longest, store)], [weights]
    for number in range(rounds):
        own.append(moved(own[-1], number + 1))
        chains.append(extend_chain(chains[-1], written(own[-1], store), codec, longest, store))
    return store, chains, own


def seen_by(held: WeightsReplica, chain: DeltaChain) -> dict[str, torch.Tensor]:
    found = {key: encoded.parts[""].clone() for key, encoded in held.fetch(chain.weights, chain.changes).items()}
    held.tidy()
    return found


class Counting(FolderStore):
    """A server's store, and which of its blobs were asked for."""

    def __init__(self, other: TemporaryStore) -> None:
        super().__init__(other.folder, durable="none")
        self._other = other  # whose folder goes with it
        self.asked: list[str] = []

    def file(self, digest: str) -> Path:
        self.asked.append(digest)
        return super().file(digest)


@settings(max_examples=6, deadline=None)
@given(st.sampled_from(CODECS), st.sets(st.integers(0, 6), min_size=1))
def test_nodes_that_come_and_go_see_the_same_bits(codec: Codec, rounds: set[int]) -> None:
    store, chains, _ = run(codec, 6, longest=3)
    node = WeightsReplica(TemporaryStore(), store)
    for number in sorted(rounds):
        seen = seen_by(node, chains[number])
        fresh = seen_by(WeightsReplica(TemporaryStore(), store), chains[number])
        assert seen.keys() == fresh.keys()
        assert all(torch.equal(seen[key], fresh[key]) for key in fresh)


def test_only_changes_travel_to_a_node_with_the_base_and_their_bytes_are_few() -> None:
    store, weights = TemporaryStore(), {"model/w": torch.randn(512, 1024), "model/norm": torch.randn(1024)}
    chain = extend_chain(None, written(weights, store), Int8(), 4, store)
    remote = Counting(store)
    node = WeightsReplica(TemporaryStore(), remote)
    node.fetch(chain.weights, chain.changes)
    assert remote.asked == list(chain.weights.blobs)
    for number in range(3):
        weights = moved(weights, number)
        chain = extend_chain(chain, written(weights, store), Int8(), 4, store)
        remote.asked.clear()
        node.fetch(chain.weights, chain.changes)
        assert remote.asked == list(chain.changes[-1].blobs)
        said = chain.changes[-1].size + len(chain.changes[-1].to_json())
        assert said <= 0.27 * sum(w.numel() * 4 for w in weights.values())


@pytest.mark.parametrize(
    "codec", [codec if isinstance(codec, Int8) else pytest.param(codec, marks=pytest.mark.slow) for codec in CODECS]
)
def test_replicas_converge_to_constant_server_weights(codec: Codec) -> None:
    """Later changes carry the error of earlier ones: no residual is lost."""
    store, chains, own = run(codec, 3)
    chain = chains[-1]
    for _ in range(60):
        chain = extend_chain(chain, written(own[-1], store), codec, 2, store)
    for key, told in open_manifest(chain.weights, store).items():
        torch.testing.assert_close(told.parts[""], own[-1][key], rtol=0, atol=1e-5 if key != "model/half" else 0.02)
    assert torch.equal(open_manifest(chain.weights, store)["model/a.bias"].parts[""], own[-1]["model/a.bias"])


def test_raw_sends_whole_weights_or_only_what_has_changed() -> None:
    store, chains, own = run(Raw(), 2)
    assert all(chain.changes == () for chain in chains)
    assert chains[2].weights == written(own[2], store)
    part = {**own[2], "model/a.weight": own[2]["model/a.weight"] + 1}
    chain = extend_chain(chains[2], written(part, store), Raw(), 8, store)
    assert [set(one.tensors) for one in chain.changes] == [{"model/a.weight"}]
    node = WeightsReplica(TemporaryStore(), store)
    seen_by(node, chains[2])
    seen = seen_by(node, chain)
    assert all(torch.equal(seen[key], part[key]) for key in part)


def test_a_node_too_far_behind_or_new_fetches_the_weights_whole() -> None:
    store, chains, _ = run(Int8(), 5, longest=2)
    assert [len(chain.changes) for chain in chains] == [0, 1, 2, 2, 2, 2]
    remote = Counting(store)
    node = WeightsReplica(TemporaryStore(), remote)
    seen_by(node, chains[0])
    seen_by(node, chains[5])
    assert set(remote.asked[-len(chains[5].weights.blobs) :]) == set(chains[5].weights.blobs)
    assert not set(remote.asked) & {blob for one in chains[5].changes for blob in one.blobs}


def test_weights_are_fetched_whole_if_the_chain_of_deltas_is_larger() -> None:
    store, chains, _ = run(BF16(), 6, longest=6)
    remote = Counting(store)
    node = WeightsReplica(TemporaryStore(), remote)
    seen_by(node, chains[0])
    remote.asked.clear()
    seen_by(node, chains[6])
    assert set(remote.asked) == set(chains[6].weights.blobs)


def test_a_restarted_node_goes_on_with_what_it_has(tmp_path: Path) -> None:
    store, chains, _ = run(Int8(), 2)
    seen_by(WeightsReplica(FolderStore(tmp_path), store), chains[1])
    remote = Counting(store)
    again = WeightsReplica(FolderStore(tmp_path), remote)
    seen = seen_by(again, chains[2])
    assert remote.asked == list(chains[2].changes[-1].blobs)
    fresh = seen_by(WeightsReplica(TemporaryStore(), store), chains[2])
    assert all(torch.equal(seen[key], fresh[key]) for key in fresh)
    left = set(FolderStore(tmp_path))
    assert left == {chains[2].weights.digest, *chains[2].weights.blobs}


def test_a_restarted_server_sends_the_same_changes() -> None:
    store, chains, own = run(Int4(), 3)
    restored = DeltaChain.from_json(chains[2].to_json())
    assert restored == chains[2]
    assert extend_chain(restored, written(own[3], store), Int4(), 8, store) == chains[3]


def test_a_change_that_leads_elsewhere_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    store, chains, _ = run(Int8(), 2)
    node = WeightsReplica(TemporaryStore(), store)
    seen_by(node, chains[1])
    wrong = dataclasses.replace(chains[2].changes[0], base=chains[1].weights.digest)
    with caplog.at_level(logging.WARNING):
        seen = seen_by(node, dataclasses.replace(chains[2], changes=(wrong,)))
    assert "fetched whole" in caplog.text
    fresh = seen_by(WeightsReplica(TemporaryStore(), store), chains[2])
    assert all(torch.equal(seen[key], fresh[key]) for key in fresh)


def test_changes_of_other_tensors_are_refused() -> None:
    store, chains, _ = run(Int8(), 1)
    node = WeightsReplica(TemporaryStore(), store)
    seen_by(node, chains[0])
    strange = write_blobs({"model/other": torch.randn(3)}, store, kind="delta", base=chains[0].weights.digest)
    with pytest.raises(BlobError, match="model/other"):
        node.fetch(chains[1].weights, (strange,))
    shape = write_blobs({"model/a.bias": torch.randn(3)}, store, kind="delta", base=chains[0].weights.digest)
    with pytest.raises(BlobError, match=r"model/a\.bias"):
        node.fetch(chains[1].weights, (shape,))


def test_unchanged_weights_add_no_delta_and_new_shapes_start_a_new_chain() -> None:
    store, chains, own = run(Raw(), 1)
    assert extend_chain(chains[1], written(own[1], store), Raw(), 8, store) == chains[1]
    other = {**own[1], "model/a.bias": torch.randn(31)}
    assert extend_chain(chains[1], written(other, store), Int8(), 8, store) == DeltaChain(weights=written(other, store))


def test_text_that_is_no_chain_is_refused() -> None:
    for text in ("", "{}", "[]", '{"weights": {}, "changes": []}'):
        with pytest.raises(ProtocolError):
            DeltaChain.from_json(text)
