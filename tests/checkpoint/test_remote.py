"""Checkpoints at addresses: the same calls, whole or not there, wherever fsspec can put a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import arclight as al
from arclight import checkpoint
from arclight.checkpoint import (
    AsyncSaver,
    CheckpointError,
    find_last,
    inspect,
    load,
    prune,
    remote,
    remove,
    save,
    verify,
)
from arclight.fabric.strategies import FSDPStrategy

torch.set_num_threads(1)


class Elsewhere(LocalFileSystem):
    """A file system that several processes see and that is not known to be local."""

    protocol = "elsewhere"


fsspec.register_implementation("elsewhere", Elsewhere, clobber=True)


@pytest.fixture(params=["memory", "elsewhere", "file"])
def folder(request: Any, tmp_path: Path) -> str:
    if request.param == "memory":
        fsspec.filesystem("memory").store.clear()
    return f"{request.param}://{tmp_path}/runs"


def state(step: int) -> dict[str, Any]:
    weight = torch.full((10,), float(step))
    return {"model": {"w": weight, "tied": weight, "e": torch.zeros(0)}, "list": [torch.eye(2) * step], "step": step}


def test_saved_replaced_listed_pruned_and_removed(folder: str) -> None:
    for step in (1, 2, 3):
        save(f"{folder}/{step}", state(step))
    save(f"{folder}/2", state(5))
    found = load(f"{folder}/2")
    assert (found["model"]["w"] == 5).all()
    assert found["model"]["tied"].data_ptr() == found["model"]["w"].data_ptr()
    assert torch.equal(found["list"][0], torch.eye(2) * 5)
    assert verify(f"{folder}/2") == []
    assert (inspect(f"{folder}/2").step, inspect(f"{folder}/2").parameters) == (5, 10)
    assert str(find_last(folder)).endswith("/2")
    assert [str(path).rpartition("/")[2] for path in prune(folder, keep=1, protect=[f"{folder}/1"])] == ["3"]
    assert sorted(path.name for path in remote.to_path(folder).iterdir()) == ["1", "2"]
    remove(f"{folder}/1")
    with pytest.raises(CheckpointError, match="nothing has that name"):
        load(f"{folder}/1")
    with AsyncSaver() as saver:
        saver.save(f"{folder}/9", state(9))
    assert load(f"{folder}/9", only="step") == {"step": 9}
    listed = [str(name) for name in fsspec.filesystem(folder.partition(":")[0]).find(folder.partition("://")[2])]
    assert sum("/2/" in name for name in listed) == 4, "what a save replaced is gone"


@pytest.mark.parametrize("kind", ["memory", "elsewhere"])
def test_a_save_that_is_cut_short_leaves_what_was_there(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"{kind}://{tmp_path}/a"
    save(address, state(1))

    def cut(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(remote, "publish", cut)
        with pytest.raises(CheckpointError, match="that was there before is intact"):
            save(address, state(2))
        with pytest.raises(CheckpointError, match="nothing was left there"):
            save(f"{address}-new", state(2))
    assert load(address)["step"] == 1
    assert verify(address) == []
    place = remote.to_path(address)
    assert sum(entry.name.startswith(remote.PREFIX) for entry in place.iterdir()) == 1
    (place / f"{remote.PREFIX}killed" / "model.safetensors").write_bytes(b"half")  # by a process that was killed
    assert load(address)["step"] == 1
    save(address, state(3))
    assert load(address)["step"] == 3
    assert sum(entry.name.startswith(remote.PREFIX) for entry in place.iterdir()) == 1


def test_damaged_and_foreign_objects_are_reported(tmp_path: Path) -> None:
    folder = f"memory://{tmp_path}/runs"
    for step in (1, 2):
        save(f"{folder}/{step}", state(step))
    place = remote.to_path(f"{folder}/2")
    (data,) = [entry for entry in place.iterdir() if entry.name.startswith(remote.PREFIX)]
    (data / "model.safetensors").write_bytes((data / "model.safetensors").read_bytes()[:-1])
    with pytest.warns(UserWarning, match="damaged"):
        assert str(find_last(folder)).endswith("/1")
    (remote.to_path(f"{folder}/other") / "notes.txt").write_bytes(b"precious")
    with pytest.raises(CheckpointError, match="exists and is not a checkpoint"):
        save(f"{folder}/other", state(1))
    with pytest.raises(CheckpointError, match="nosuch"):
        save("nosuch://bucket/a", state(1))


def _shares(fabric: al.Fabric, address: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    table = distribute_tensor(torch.arange(70.0).reshape(10, 7), mesh, [Shard(0)])
    for step in (1, 2):
        checkpoint.save_shards(address, {"model": {"w": table}, "step": step}, fabric.strategy)
    found = checkpoint.load_shards(address, fabric.strategy)
    columns = found["model"]["w"].read((0, 2), (10, 3))
    assert torch.equal(columns, torch.arange(70.0).reshape(10, 7)[:, 2:5])


def test_shards_at_an_address(tmp_path: Path) -> None:
    address = f"elsewhere://{tmp_path}/c"
    strategy = FSDPStrategy(start_method="fork")
    al.Fabric(accelerator="cpu", devices=2, strategy=strategy).launch(_shares, address)
    assert verify(address) == []
    assert load(address)["step"] == 2
    assert inspect(address).ranks == 2
    assert inspect(address).meshes == [{"dimension 0": 2}]
