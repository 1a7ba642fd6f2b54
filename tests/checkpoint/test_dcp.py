"""Folders of torch.distributed.checkpoint: read and written, checked against torch itself."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.optim.processes import run
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from arclight import checkpoint
from arclight.checkpoint import CheckpointError, convert, save
from arclight.cli import main


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    weight = torch.randn(6, 4)
    return {
        "model": {"layer.weight": weight, "tied.weight": weight, "half": torch.randn(3).bfloat16(), "count": torch.tensor(3)},
        "optimizers": [{"state": {0: {"exp_avg": torch.randn(6, 4), "step": torch.tensor(2.0)}}, "param_groups": [{"lr": 0.1}]}],
        "progress": {"global_step": 7, "name": "run", "ratio": float("inf"), "none": None, "pair": (1, 2)},
    }  # fmt: skip


def same(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key, value in wanted.items():
            same(found[key], value)
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            same(one, other)
    else:
        assert found == wanted


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", state())
    assert main(["checkpoint", "convert", str(tmp_path / "a"), str(tmp_path / "b.dcp")]) == 0
    assert main(["checkpoint", "convert", str(tmp_path / "b.dcp"), str(tmp_path / "c")]) == 0
    same(checkpoint.load(tmp_path / "c"), state())
    found = checkpoint.load(tmp_path / "c")["model"]
    assert found["layer.weight"].data_ptr() == found["tied.weight"].data_ptr()
    same(checkpoint.load_weights(tmp_path / "b.dcp"), state()["model"])


def test_torch_reads_what_is_written(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", state())
    checkpoint.convert(tmp_path / "a", tmp_path / "b.dcp")
    weights = {name: torch.zeros_like(tensor) for name, tensor in state()["model"].items() if name != "tied.weight"}
    dcp.load({"model": weights}, checkpoint_id=tmp_path / "b.dcp", no_dist=True)
    same(weights, {name: state()["model"][name] for name in weights})


def test_checkpoints_written_by_torch_dcp_are_read(tmp_path: Path) -> None:
    dcp.save(
        {"model": state()["model"], "lists": [{"x": torch.ones(2)}, 5], "text": "hi"},
        checkpoint_id=tmp_path / "a.dcp",
        no_dist=True,
    )
    found = checkpoint.load(checkpoint.convert(tmp_path / "a.dcp", tmp_path / "b"))
    same(found["model"], state()["model"])
    assert torch.equal(found["lists"][0]["x"], torch.ones(2))
    assert (found["lists"][1], found["text"]) == (5, "hi")
    dcp.save(dict(state()["model"]), checkpoint_id=tmp_path / "flat", no_dist=True)
    same(checkpoint.load_weights(tmp_path / "flat"), state()["model"])


def save_shards(rank: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    sharded = {
        name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in state()["model"].items() if value.ndim
    }
    dcp.save({"model": sharded}, checkpoint_id=f"{folder}/sharded")


def test_shards_of_two_ranks_are_put_together(tmp_path: Path) -> None:
    run(2, tmp_path / "ranks", save_shards, str(tmp_path))
    found = checkpoint.load_weights(tmp_path / "sharded")
    same(found, {name: state()["model"][name] for name in found})
    assert set(found) == {"layer.weight", "tied.weight", "half"}


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch evil",)


def test_dcp_checkpoints_are_never_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dcp.save({"model": state()["model"], "x": 5}, checkpoint_id=tmp_path / "a", no_dist=True)
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match="a is damaged"):
        checkpoint.load_weights(tmp_path / "a")
    dcp.save({"model": state()["model"], "x": Evil()}, checkpoint_id=tmp_path / "b", no_dist=True)
    with pytest.raises(CheckpointError, match=r"only unpickling could restore"):
        checkpoint.load_weights(tmp_path / "b")
    assert not (tmp_path / "evil").exists()


def test_damage_is_named(tmp_path: Path) -> None:
    folder = checkpoint.convert(checkpoint.save(tmp_path / "a", state()), tmp_path / "b.dcp")
    (data,) = folder.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cut off"):
        checkpoint.load_weights(folder)
    metadata = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(metadata.replace(b"__0_0.distcp", b"../../x.dist"))
    with pytest.raises(CheckpointError, match="outside of the folder"):
        checkpoint.load_weights(folder)
    (folder / ".metadata").write_bytes(metadata[:-5])
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.load_weights(folder)


def test_other_folders_are_not_replaced(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", state())
    (tmp_path / "b.dcp").mkdir()
    (tmp_path / "b.dcp" / "mine.txt").write_text("x")
    with pytest.raises(CheckpointError, match="choose another name"):
        checkpoint.convert(tmp_path / "a", tmp_path / "b.dcp")
    assert (tmp_path / "b.dcp" / "mine.txt").is_file()


def test_torch_loads_a_flipped_bit_and_ours_is_refused(tmp_path: Path) -> None:
    """The decision about the sharded format rests on this: if it fails, read that page again."""
    weights = {"a": torch.zeros(1000)}
    dcp.save({"model": weights}, checkpoint_id=tmp_path / "a", no_dist=True)
    checkpoint.save(tmp_path / "b", {"model": weights})
    for file in (tmp_path / "a" / "__0_0.distcp", tmp_path / "b" / "model.safetensors"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 0x40
        file.write_bytes(content)
    found = {"a": torch.ones(1000)}
    dcp.load({"model": found}, checkpoint_id=tmp_path / "a", no_dist=True)
    assert int((found["a"] != 0).sum()) == 1
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        checkpoint.load(tmp_path / "b")


def test_failures_inside_dcp_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twice = save(tmp_path / "twice", {"model": {"a.b": torch.ones(1)}, "model.a": {"b": torch.zeros(2)}})
    with pytest.raises(CheckpointError, match=r"out\.dcp could not be written: .*model\.a\.b"):
        convert(twice, tmp_path / "out.dcp")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(FileSystemWriter, "write_data", full)
    one = save(tmp_path / "one", {"model": {"a": torch.ones(1)}})
    with pytest.raises(CheckpointError, match=r"out\.dcp could not be written: .*No space left on device"):
        convert(one, tmp_path / "out.dcp")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["one", "twice"]
