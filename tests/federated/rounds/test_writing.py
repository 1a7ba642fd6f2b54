"""Rounds are ordinary checkpoints that are written tensor by tensor, and whose files are blobs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from arclight import checkpoint
from arclight.checkpoint.files import HashedFile
from arclight.federated.errors import FederatedError
from arclight.federated.protocol import Manifest
from arclight.federated.rounds.store import Rounds, layout_of
from arclight.federated.rounds.writer import BackgroundWriter, BufferPool, in_order, weights_manifest

TREES = {
    "round": {"number": 3, "clock": 150},
    "federation": {"seed": 7},
    "clients": {"a": {"steps": 150}},
    "sampler": {},
    "history": [{"round": 1, "norm": 0.5}],
}


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "head.weight": torch.randn(3, 4),
        "body.bias": torch.randn(5).to(torch.bfloat16),
        "count": torch.tensor(7, dtype=torch.int64),
        "wide": torch.randn(2, dtype=torch.float64),
        "none": torch.empty(0, 4),
    }


def written(run: Path, number: int = 3, trees: dict | None = None) -> Rounds:
    rounds = Rounds(run)
    model, server = tensors(), {"velocity/head.weight": torch.full((3, 4), 2.0)}
    layout = {"model": in_order(model), "server": in_order(server)}
    with rounds.write(number, layout) as round_:
        for entry, content in (("model", model), ("server", server)):
            for name in layout[entry]:
                round_.add(entry, name, content[name])
        round_.publish(TREES if trees is None else trees)
    return rounds


def test_a_round_opens_as_any_checkpoint_and_in_any_reader_of_safetensors(tmp_path: Path) -> None:
    rounds = written(tmp_path)
    path = rounds.path(3)
    assert checkpoint.verify(path) == []
    loaded = checkpoint.load(path)
    expected = tensors()
    assert loaded["model"].keys() == expected.keys()
    for name, tensor in expected.items():
        assert loaded["model"][name].dtype == tensor.dtype
        assert torch.equal(loaded["model"][name], tensor)
    assert torch.equal(loaded["server"]["velocity/head.weight"], torch.full((3, 4), 2.0))
    assert loaded["moments"] == {}
    assert {key: loaded[key] for key in TREES} == TREES
    assert torch.equal(checkpoint.load_weights(path)["body.bias"], expected["body.bias"])
    assert torch.equal(load_file(path / "model.safetensors")["wide"], expected["wide"])
    seen = checkpoint.inspect(path)
    assert (seen.step, seen.parameters) == (150, 3 * 4 + 5 + 1 + 2)


def test_the_file_of_weights_is_the_blob_that_the_manifest_names(tmp_path: Path) -> None:
    rounds = written(tmp_path)
    manifest = rounds.weights(3)
    file = rounds.path(3) / "model.safetensors"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert manifest.blobs == {digest: file.stat().st_size}
    assert set(manifest.tensors) == {f"model/{name}" for name in tensors()}
    assert manifest.tensors["model/body.bias"].dtype == "BF16"
    assert manifest.tensors["model/body.bias"].name == "body.bias"
    assert Manifest.from_json(manifest.to_json()).digest == manifest.digest
    described = rounds.open(3)
    assert weights_manifest(layout_of(described), described.files).digest == manifest.digest


def test_unpublished_rounds_leave_no_files(tmp_path: Path) -> None:
    rounds = Rounds(tmp_path)
    model = tensors()
    with pytest.raises(RuntimeError, match="power"), rounds.write(0, {"model": in_order(model)}) as round_:
        round_.add("model", "count", model["count"])
        raise RuntimeError("power")
    assert list(rounds.folder.iterdir()) == []
    with rounds.write(0, {"model": in_order(model)}) as round_, pytest.raises(FederatedError, match=r"model\.count"):
        round_.publish(TREES)
    assert list(rounds.folder.iterdir()) == []
    assert rounds.newest() is None


def test_tensors_come_as_they_were_announced(tmp_path: Path) -> None:
    model = tensors()
    with Rounds(tmp_path).write(0, {"model": in_order(model)}) as round_:
        with pytest.raises(FederatedError, match=r"count of .* is to be written, got wide"):
            round_.add("model", "wide", model["wide"])
        with pytest.raises(FederatedError, match="got count"):
            round_.add("model", "count", model["count"].float())
        with pytest.raises(FederatedError, match="nothing more"):
            round_.add("server", "velocity/wide", model["wide"])


def test_a_round_is_complete_only_with_all_its_keys_and_files(tmp_path: Path) -> None:
    rounds = written(tmp_path, 1)
    written(tmp_path, 2)
    assert rounds.numbers() == [1, 2]
    assert rounds.newest() == 2
    content = checkpoint.load(rounds.path(2))
    del content["sampler"]
    checkpoint.save(rounds.path(2), content)
    assert rounds.check_round(2).problems == (f"{rounds.path(2)} lacks 'sampler'",)
    assert rounds.newest() == 1
    with pytest.raises(FederatedError, match=r"round 2 of .* is not complete: .*sampler.*; complete are: 1"):
        rounds.weights(2)
    (rounds.folder / "000007").mkdir()
    assert rounds.check_round(7).manifest is None
    assert rounds.newest() == 1


def test_damaged_content_is_found_when_asked(tmp_path: Path) -> None:
    rounds = written(tmp_path, 1)
    written(tmp_path, 2)
    file = rounds.path(2) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert rounds.newest() == 2
    assert rounds.newest(verify=True) == 1


def test_rounds_lie_at_addresses_too(tmp_path: Path) -> None:
    import fsspec

    run = f"memory://runs/{tmp_path.name}"
    rounds = written(run)  # type: ignore[arg-type]
    try:
        assert rounds.newest(verify=True) == 3
        assert rounds.trees(3) == json.loads(json.dumps(TREES))
        assert torch.equal(rounds.tensors(3, "model")["wide"], tensors()["wide"])
        assert rounds.tensors(3, "moments") == {}
        rounds.remove(3)
        assert rounds.numbers() == []
    finally:
        fsspec.filesystem("memory").store.clear()


def test_a_full_disk_is_raised_at_the_next_tensor_and_at_the_end() -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        for calls in (1, 5):
            behind, file = BackgroundWriter(), HashedFile(full)
            try:
                with pytest.raises(OSError, match="No space left"):
                    for _ in range(calls):
                        behind.write(file, torch.ones(3), None)
                    assert calls == 1, "no more tensors wait than fit into memory"
                    behind.finish()
            finally:
                behind.close()


def test_memory_is_used_again_only_once_what_lay_in_it_is_written(tmp_path: Path) -> None:
    memory, layout = BufferPool(), {"model": {f"w{k:02d}": (torch.float32, (300, 1 + k % 3)) for k in range(30)}}
    rounds, lent = Rounds(tmp_path), set()
    with rounds.write(1, layout) as round_:
        for k, (name, (dtype, shape)) in enumerate(layout["model"].items()):
            value = memory.empty(300 * shape[1], dtype)
            lent.add(value.data_ptr())
            round_.add("model", name, value.fill_(k).view(shape), memory.release)
        round_.publish(TREES)
    assert len(lent) < 8, "the memory of tensors that are written is used again"
    for k, tensor in enumerate(load_file(rounds.path(1) / "model.safetensors").values()):
        assert torch.equal(tensor, torch.full_like(tensor, k))


def test_the_buffer_pool_reuses_only_its_own_memory() -> None:
    memory, own = BufferPool(), torch.zeros(4)
    memory.release(own)
    lent = memory.empty(4, torch.float32)
    assert lent.data_ptr() != own.data_ptr()
    memory.release(lent.view(2, 2))
    assert memory.empty(2, torch.float64).data_ptr() == lent.data_ptr(), "of any type that fits"
    assert memory.empty(2, torch.float64).data_ptr() != lent.data_ptr(), "once"
    assert memory.empty(0, torch.float64).shape == (0,)
