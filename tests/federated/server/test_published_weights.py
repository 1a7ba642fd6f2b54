"""Weights as they are offered to clients, without what each initialises itself."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
import torch

from arclight.federated.blobs.folder import FolderStore
from arclight.federated.blobs.manifest_io import open_manifest
from arclight.federated.blobs.object_store import MirroredStore, ObjectStore
from arclight.federated.codecs.delta_chain import WeightsReplica
from arclight.federated.codecs.settings import Codec, Int8, Raw
from arclight.federated.errors import FederatedError
from arclight.federated.masks.settings import Masks
from arclight.federated.rounds.store import Rounds
from arclight.federated.server.published_weights import PublishedWeights
from arclight.federated.server.server_step import write_first_round
from arclight.federated.settings import Federation


class Run:
    """Rounds of an embedding that is each client's own, and a trunk."""

    def __init__(
        self,
        folder: Path,
        down: Codec | None = None,
        personal_from: str = "client",
        address: str | None = None,
        words: int = 50,
    ) -> None:
        self.folder, self.rounds, self.words = folder, Rounds(folder), words
        self.blobs = MirroredStore(folder / "blobs", address) if address else FolderStore(folder / "blobs")
        masks = Masks(personal=("embedding.",), personal_from=personal_from)  # type: ignore[arg-type]
        self.federation = Federation(masks=masks, down=down or Raw(), evaluate_on="clients")
        self.published = self.opened()

    def opened(self) -> PublishedWeights:
        return PublishedWeights(self.folder, self.rounds, self.blobs, self.federation)

    def write(self, number: int, trunk: float, moment: float = 0.0) -> None:
        weights = {"embedding.weight": torch.ones(self.words, 8), "trunk.weight": torch.full((80, 80), trunk)}
        trees = {"round": {"clock": number}, "federation": {}, "clients": {}, "sampler": {}, "history": []}
        write_first_round(self.rounds, number, weights, {"exp_avg/trunk.weight": torch.full((80, 80), moment)}, trees)

    @property
    def offered(self) -> set[str]:
        return {digest for weights in self.published.all() for digest in weights.chain.blobs}


@pytest.mark.parametrize("down", [Raw(), Int8()])
def test_client_initialised_tensors_are_never_offered(tmp_path: Path, down: Codec) -> None:
    run = Run(tmp_path, down)
    for number in (0, 1, 2):
        run.write(number, trunk=0.5 + number)
        found = run.published.publish(number)
        assert set(found.manifest.tensors) == {"model/trunk.weight", "exp_avg/trunk.weight"}
        assert set(found.own.tensors) == {"model/embedding.weight", *found.manifest.tensors}
        read = open_manifest(found.manifest, run.blobs)
        assert not any("embedding" in path.read_bytes().decode("latin1") for path in map(run.blobs.file, run.offered))
        assert read["model/trunk.weight"].parts[""].flatten()[0] == pytest.approx(0.5 + number, rel=1e-2)
        assert set(run.blobs) == run.offered  # no copy is left of what is not offered
    run.published.collect_garbage({found.manifest.digest}, [], [], [], run.blobs.remove)
    assert set(run.blobs) == run.offered
    assert run.opened().restore(2, found.manifest.digest) == found


class Counting(ObjectStore):
    """Notes the bytes that are fetched."""

    fetched = 0

    def file(self, digest: str) -> Path:
        self.fetched += self.size(digest) or 0
        return super().file(digest)


def test_personal_tensors_are_fetched_once_per_node(tmp_path: Path) -> None:
    """As personal tensors that begin with the server's values; the moments of the trunk lie in a file of their own."""
    embedding, trunk, moments, header = 4 * 1000 * 8, 4 * 80 * 80, 4 * 80 * 80, 300
    address = f"memory://{uuid.uuid4().hex}/blobs"
    run = Run(tmp_path, personal_from="server", address=address, words=1000)

    def fetched(node: str) -> int:
        remote = Counting(address, tmp_path / node / "cache")
        replica = WeightsReplica(FolderStore(tmp_path / node / "held"), remote)  # a process that begins again
        read = replica.fetch(newest.manifest, newest.changes)
        assert {key: float(read[key].parts[""].mean()) for key in read} == {
            "model/embedding.weight": 1.0, "model/trunk.weight": number + 1.0, "exp_avg/trunk.weight": number + 1.0,
        }  # fmt: skip
        replica.tidy()
        return remote.fetched

    for number in (0, 1, 2):
        run.write(number, trunk=number + 1.0, moment=number + 1.0)
        newest = run.published.publish(number)
        assert set(newest.manifest.tensors) == set(newest.own.tensors)
        first = 0 if number else embedding
        assert fetched("site") == pytest.approx(first + trunk + moments, abs=header)
        run.published.collect_garbage({newest.manifest.digest}, [], [], [], run.blobs.remove)
        assert set(ObjectStore(address, tmp_path / "all")) == run.offered
    assert fetched("late") == pytest.approx(embedding + trunk + moments, abs=header)
    for digest in run.offered:
        run.blobs.remove(digest)
    assert run.opened().restore(2, newest.manifest.digest) == newest
    assert fetched("later") == pytest.approx(embedding + trunk + moments, abs=header)


@pytest.mark.parametrize("down", [Raw(), Int8()])
def test_a_file_of_a_round_that_nodes_are_not_offered_is_no_blob(tmp_path: Path, down: Codec) -> None:
    """Its link would keep the whole model on the disk for an hour after its round was removed."""
    run = Run(tmp_path, down, personal_from="server", words=1000)
    for number in (0, 1, 2):
        run.write(number, trunk=0.5 + number, moment=0.5 + number)
        newest = run.published.publish(number)
        assert number == 0 or newest.manifest != newest.own
        assert set(run.blobs) == run.offered
    run.published.collect_garbage({newest.manifest.digest}, [], [], [], run.blobs.remove)
    assert set(run.blobs) == run.offered
    assert run.opened().restore(2, newest.manifest.digest) == newest


def test_a_small_part_that_clients_keep_is_left_in_its_file(tmp_path: Path) -> None:
    """It would cost the server more to write all weights twice than nodes to fetch it again."""
    run = Run(tmp_path, personal_from="server")
    run.write(0, trunk=1.0)
    newest = run.published.publish(0)
    assert newest.manifest == newest.own


@pytest.mark.parametrize("personal_from", ["server", "client"])
@pytest.mark.parametrize("down", [Raw(), Int8()])
def test_an_address_gets_what_nodes_are_offered_and_no_more(tmp_path: Path, down: Codec, personal_from: str) -> None:
    address = f"memory://{uuid.uuid4().hex}/blobs"
    run = Run(tmp_path, down, personal_from, address)
    for number in (0, 1, 2):
        run.write(number, trunk=0.5 + number)
        newest = run.published.publish(number)
        there = ObjectStore(address, tmp_path / f"node-{number}")
        assert set(there) == run.offered
        assert open_manifest(newest.manifest, there)["model/trunk.weight"].parts[""].shape == (80, 80)
    for digest in list(there):
        there.remove(digest)
    for digest in list(run.blobs):
        run.blobs.here.remove(digest)
    run.write(3, trunk=4.0)
    newest = run.opened().publish(3)  # knows no round before
    for digest in newest.chain.blobs:
        there.remove(digest)
    assert run.opened().restore(3, newest.manifest.digest) == newest
    assert set(there) >= newest.chain.blobs


def test_blobs_that_are_lost_are_made_again_at_a_restart(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.write(0, trunk=0.5)
    found = run.published.publish(0)
    for digest in list(run.blobs):
        run.blobs.remove(digest)
    assert run.opened().restore(0, found.manifest.digest) == found
    assert set(run.blobs) >= run.offered
    with pytest.raises(FederatedError, match="is not what the journal says"):
        run.opened().restore(0, "0" * 64)


def test_a_run_whose_weights_were_offered_whole_goes_on(tmp_path: Path) -> None:
    """As of an older version, which had offered them before it was stopped."""
    before = Run(tmp_path, personal_from="server")
    before.write(0, trunk=0.5)
    base = before.published.publish(0).manifest.digest
    run = Run(tmp_path)
    assert "model/embedding.weight" in run.published.restore(0, base).manifest.tensors
    run.write(1, trunk=0.5)  # a round that was skipped: the same file
    assert "model/embedding.weight" not in run.published.publish(1).manifest.tensors
    assert all(run.blobs.size(digest) is not None for digest in run.offered)
    run.write(2, trunk=0.7)
    newest = run.published.publish(2)
    run.published.collect_garbage({newest.manifest.digest}, [], [], [], run.blobs.remove)
    assert set(run.blobs) == run.offered


def test_a_round_that_is_published_again_is_restored_as_it_was_last(tmp_path: Path) -> None:
    """As where the journal was lost, or after a crash before it was written: there is a chain of the first time."""
    run = Run(tmp_path)
    for number in (0, 1):
        run.write(number, trunk=0.5 + number)
        found = run.published.publish(number)
    assert found.changes
    newest = run.opened().publish(1)  # which knows no round before
    assert not newest.changes
    assert newest.manifest != found.manifest
    assert run.opened().restore(1, newest.manifest.digest) == newest


def test_a_restart_writes_no_blobs_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    run.write(0, trunk=0.5)
    found = run.published.publish(0)
    monkeypatch.setattr(FolderStore, "create", None)  # another version might write other bytes
    assert run.opened().restore(0, found.manifest.digest) == found
