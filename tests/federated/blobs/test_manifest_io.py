"""Tensors through blobs and back."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save
from tests.federated.fakes import TemporaryStore

from arclight import checkpoint
from arclight.checkpoint.tensorfile import NAMES, as_bytes
from arclight.federated.blobs.folder import FolderStore
from arclight.federated.blobs.manifest_io import Encoded, open_manifest, write_blobs
from arclight.federated.errors import BlobError, FederatedError
from arclight.federated.protocol import Entry, Manifest, digest_of


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "blobs")


def some() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "model/weight": torch.randn(31, 17),
        "model/half": torch.randn(5).bfloat16(),
        "model/eighth": torch.randn(3).to(torch.float8_e4m3fn),
        "model/wide": torch.randn(2, 2, dtype=torch.float64),
        "model/scalar": torch.tensor(3.5),
        "model/count": torch.tensor([1, 2, 3]),
        "model/none": torch.empty(0, 4),
        "model/flags": torch.tensor([True, False]),
        "exp_avg/weight": torch.randn(17, 31).T,
    }


def test_tensors_come_back_bit_for_bit(store: FolderStore) -> None:
    tensors = some()
    manifest = write_blobs(tensors, store, kind="weights")
    assert len(manifest.blobs) == 1
    opened = open_manifest(Manifest.from_json(manifest.to_json()), store)
    assert set(opened) == set(tensors)
    for key, tensor in tensors.items():
        for found in (opened[key], opened.read(key)):
            assert (found.codec, found.dtype, found.shape) == ("raw", NAMES[tensor.dtype], tuple(tensor.shape))
            back = found.parts[""]
            assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
            assert back.reshape(-1).view(torch.uint8).equal(tensor.contiguous().reshape(-1).view(torch.uint8))


def test_a_blob_is_a_file_of_any_safetensors_reader(store: FolderStore) -> None:
    manifest = write_blobs(some(), store, kind="update")
    (digest,) = manifest.blobs
    assert manifest.blobs[digest] == store.size(digest)
    found = load_file(store.file(digest))
    assert found["model/weight"].equal(some()["model/weight"])


def test_same_tensors_same_digest(tmp_path: Path) -> None:
    first = write_blobs(some(), FolderStore(tmp_path / "a"), kind="weights")
    assert write_blobs(iter(some().items()), TemporaryStore(), kind="weights") == first


def test_large_sets_become_several_blobs_without_being_held(store: FolderStore) -> None:
    alive: list[int] = []

    class Counted(torch.Tensor):
        pass

    def made() -> Iterator[tuple[str, torch.Tensor]]:
        import weakref

        for number in range(10):
            tensor = torch.full((1000,), float(number)).as_subclass(Counted)
            alive.append(number)
            weakref.finalize(tensor, alive.remove, number)
            assert len(alive) <= 4, alive
            yield f"model/{number}", tensor
            del tensor

    manifest = write_blobs(made(), store, kind="weights", largest=9000)
    assert len(manifest.blobs) == 5
    opened = open_manifest(manifest, store)
    assert [opened[f"model/{number}"].parts[""][0].item() for number in range(10)] == list(range(10))


def test_a_tensor_larger_than_a_blob_has_one_of_its_own(store: FolderStore) -> None:
    tensors = {"a": torch.zeros(10), "b": torch.zeros(1000), "c": torch.zeros(10), "d": torch.ones(10)}
    manifest = write_blobs(tensors, store, kind="weights", largest=100)
    assert [len({manifest.tensors[key].blob for key in keys}) for keys in ("ab", "bc", "cd")] == [2, 2, 1]


def test_encoded_tensors_keep_their_parts(store: FolderStore) -> None:
    encoded = Encoded(
        parts={"": torch.tensor([1, -2, 3], dtype=torch.int8), "scale": torch.tensor([0.5])},
        dtype="BF16",
        shape=(3,),
        codec="int8",
        settings={"block": 256},
    )
    manifest = write_blobs({"model/w": encoded, "model/b": torch.ones(2)}, store, kind="update", base="ab" * 32)
    assert manifest.base == "ab" * 32
    found = open_manifest(manifest, store)["model/w"]
    assert (found.codec, found.settings, found.dtype, found.shape) == ("int8", {"block": 256}, "BF16", (3,))
    assert found.parts[""].tolist() == [1, -2, 3]
    assert found.parts["scale"].tolist() == [0.5]


def test_mapped_tensors_share_nothing_with_the_file(store: FolderStore) -> None:
    manifest = write_blobs({"w": torch.ones(4)}, store, kind="weights")
    opened = open_manifest(manifest, store)
    opened["w"].parts[""].fill_(7)
    (digest,) = manifest.blobs
    store.check(digest)
    assert open_manifest(manifest, store)["w"].parts[""].tolist() == [1, 1, 1, 1]


def test_raw_tensors_can_stay_in_their_file_until_they_are_read(store: FolderStore) -> None:
    tensors = some()
    manifest = write_blobs(tensors, store, kind="weights")
    opened = open_manifest(manifest, store)
    for key, tensor in tensors.items():
        assert opened.stored(key).shape == tensor.shape
        assert torch.equal(as_bytes(opened.stored(key).read()), as_bytes(tensor))
    lying = opened.stored("model/weight")
    (blob,) = manifest.blobs
    store.file(blob).chmod(0o644)
    with store.file(blob).open("r+b") as file:
        file.truncate(100)
    with pytest.raises(BlobError, match="cannot be read any more: the file ends"):
        lying.read()


def test_tensors_outlive_their_blob(store: FolderStore) -> None:
    manifest = write_blobs({"w": torch.ones(4)}, store, kind="weights")
    mapped = open_manifest(manifest, store)["w"].parts[""]
    store.remove(next(iter(manifest.blobs)))
    assert mapped.tolist() == [1, 1, 1, 1]


def test_a_checkpoints_file_can_be_the_blob(store: FolderStore, tmp_path: Path) -> None:
    weight = torch.randn(3, 2)
    checkpoint.save(tmp_path / "round", {"model": {"layer.weight": weight}})
    path = tmp_path / "round" / "model.safetensors"
    digest = digest_of(path.read_bytes())
    store.adopt(digest, path)
    entry = Entry(blob=digest, dtype="F32", shape=(3, 2), name="layer.weight")
    manifest = Manifest(kind="weights", tensors={"model/layer.weight": entry}, blobs={digest: path.stat().st_size})
    assert open_manifest(manifest, store)["model/layer.weight"].parts[""].equal(weight)


@pytest.mark.parametrize("key", ["", "a#b", "__metadata__"])
def test_names_that_cannot_travel_are_refused(store: FolderStore, key: str) -> None:
    with pytest.raises(FederatedError, match="cannot travel"):
        write_blobs({key: torch.ones(1)}, store, kind="weights")


def test_one_name_travels_once(store: FolderStore) -> None:
    with pytest.raises(FederatedError, match="two tensors"):
        write_blobs([("a", torch.ones(1)), ("a", torch.ones(1))], store, kind="weights")
    with pytest.raises(FederatedError, match="safetensors files cannot hold"):
        write_blobs({"a": torch.empty(1, dtype=torch.complex128)}, store, kind="weights")


def lying(manifest: Manifest, **changes: object) -> Manifest:
    return replace(manifest, tensors={"w": replace(manifest.tensors["w"], **changes)})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"dtype": "F64"}, "its manifest says F64"),
        ({"shape": (2, 2)}, "its manifest says F32"),
        ({"shape": (-4,)}, "cannot be"),
        ({"dtype": "F31"}, "cannot be"),
        ({"parts": ()}, "cannot be"),
        ({"parts": ("", "scale")}, "no tensor 'w#scale'"),
        ({"parts": ("",), "name": "v"}, "no tensor 'v'"),
        ({"blob": "0" * 64}, "does not list"),
    ],
)
def test_a_manifest_that_lies_is_found_out(store: FolderStore, changes: dict[str, object], told: str) -> None:
    manifest = write_blobs({"w": torch.ones(4)}, store, kind="weights")
    with pytest.raises(BlobError, match=told):
        open_manifest(lying(manifest, **changes), store)


def test_a_wrong_size_is_found_out(store: FolderStore) -> None:
    manifest = write_blobs({"w": torch.ones(4)}, store, kind="weights")
    ((digest, size),) = manifest.blobs.items()
    with pytest.raises(BlobError, match=f"{size} bytes, its manifest says {size + 1}"):
        open_manifest(replace(manifest, blobs={digest: size + 1}), store)
    with pytest.raises(BlobError, match="never put there"):
        open_manifest(replace(manifest, blobs={digest: size, "0" * 64: 3}), store)


def header(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        b"\xff" * 64,
        header(b"[]"),
        header(b"{" * 100),
        header(b"[" * 100_000),
        header(json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()),
        header(json.dumps({"w": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4.0]}}).encode()) + b"1234",
        header(json.dumps({"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}).encode()),
        header(json.dumps({"w": {"dtype": "F32", "shape": "4", "data_offsets": [0, 16]}}).encode()) + b"x" * 16,
        header(json.dumps({"w": 4}).encode()),
        save({"w": torch.ones(4)}) + b"more",
        save({"w": torch.ones(4)})[:-1],
    ],
)
def test_invalid_safetensors_files_are_refused(store: FolderStore, content: bytes) -> None:
    digest = digest_of(content)
    store.put(digest, content)
    entry = Entry(blob=digest, dtype="F32", shape=(4,))
    with pytest.raises(BlobError, match="is not a safetensors file"):
        open_manifest(Manifest(kind="update", tensors={"w": entry}, blobs={digest: len(content)}), store)
