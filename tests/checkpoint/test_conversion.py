"""Conversion from and to other projects' files, without unpickling."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from arclight.checkpoint import CheckpointError, convert, load, load_weights, save

torch.set_num_threads(1)
WEIGHTS = {"layer.weight": torch.randn(4, 3), "layer.bias": torch.zeros(4, dtype=torch.float16), "n": torch.tensor(3)}


def same(a: dict, b: dict) -> bool:
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("layout", [None, "state_dict", "model", "model_state_dict"])
def test_layouts_of_pickled_files(layout, legacy, tmp_path) -> None:
    content = (
        WEIGHTS
        if layout is None
        else {layout: WEIGHTS, "epoch": 3, "optimizer_states": [{"state": {0: torch.ones(2)}}]}
    )
    torch.save(content, tmp_path / "a.ckpt", _use_new_zipfile_serialization=not legacy)
    state = load(convert(tmp_path / "a.ckpt", tmp_path / "out"))
    assert same(state["model"], WEIGHTS)
    if layout is not None:
        assert state["epoch"] == 3
        assert torch.equal(state["optimizer_states"][0]["state"][0], torch.ones(2))
    assert same(load_file(tmp_path / "out" / "model.safetensors"), WEIGHTS)


def test_modules_own_state_dict(tmp_path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    torch.save(model.state_dict(), tmp_path / "a.pt")
    state = load(convert(tmp_path / "a.pt", tmp_path / "out"))
    again = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    again.load_state_dict(state["model"])
    assert same(again.state_dict(), model.state_dict())


class Dangerous:
    def __reduce__(self):
        return (Path.touch, (Path("/tmp/arclight_was_unpickled"),))


def test_pickled_classes_are_refused_with_a_way_to_convert(tmp_path) -> None:
    torch.save({"model": Dangerous()}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"class getattr.*torch\.save\(model\.state_dict"):
        convert(tmp_path / "a.pt", tmp_path / "out")
    with (tmp_path / "b.pt").open("wb") as file:
        pickle.dump(Dangerous(), file, protocol=2)
    with pytest.raises(CheckpointError):
        convert(tmp_path / "b.pt", tmp_path / "out")
    assert not Path("/tmp/arclight_was_unpickled").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"", b"not a checkpoint at all", b"PK\x03\x04 broken zip", b"\xef\x00q"])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_broken_files_are_refused(content, suffix, tmp_path) -> None:
    file = tmp_path / f"a{suffix}"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"a\.pt is damaged or not a file|a\.safetensors is not a sound"):
        convert(file, tmp_path / "out")


def test_truncated_pickled_file(tmp_path) -> None:
    torch.save(WEIGHTS, tmp_path / "a.pt")
    (tmp_path / "a.pt").write_bytes((tmp_path / "a.pt").read_bytes()[:-200])
    with pytest.raises(CheckpointError, match="damaged"):
        convert(tmp_path / "a.pt", tmp_path / "out")


def test_files_without_weights(tmp_path) -> None:
    for content, found in (({"epoch": 3}, "it holds epoch"), ([1, 2], "it holds a list"), ({}, "it holds nothing")):
        torch.save(content, tmp_path / "a.pt")
        with pytest.raises(CheckpointError, match=found):
            convert(tmp_path / "a.pt", tmp_path / "out")
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(CheckpointError, match=r"must end in one of \.pt"):
        convert(tmp_path / "a.txt", tmp_path / "out")
    with pytest.raises(CheckpointError, match="nothing has that name"):
        convert(tmp_path / "absent.pt", tmp_path / "out")


def test_safetensors_both_ways(tmp_path) -> None:
    save_file(WEIGHTS, tmp_path / "a.safetensors", metadata={"format": "pt"})
    checkpoint = convert(tmp_path / "a.safetensors", tmp_path / "c")
    assert same(load(checkpoint)["model"], WEIGHTS)
    tied = dict(WEIGHTS, head=WEIGHTS["layer.weight"])
    save(checkpoint, {"model": tied, "optimizer": [torch.ones(3)], "step": 2})
    single = convert(checkpoint, tmp_path / "new" / "b.safetensors")
    assert same(load_file(single), tied)
    torch.save(WEIGHTS, tmp_path / "a.pt")
    assert same(load_file(convert(tmp_path / "a.pt", single)), WEIGHTS)
    assert [entry.name for entry in single.parent.iterdir()] == ["b.safetensors"]


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ({"a": torch.eye(3).to_sparse()}, r"model\.a is not a dense tensor"),
        ({"a": torch.empty(3, device="meta")}, r"model\.a is on the meta device"),
        ({"__metadata__": torch.ones(1), "b": torch.ones(2)}, "has the name of the format's own entry"),
    ],
)
def test_tensors_that_a_single_file_cannot_hold_are_refused(tmp_path, weights, says) -> None:
    torch.save(weights, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=says):
        convert(tmp_path / "a.pt", tmp_path / "b.safetensors")
    assert not (tmp_path / "b.safetensors").exists()


@pytest.mark.parametrize("name", ["b.pt", "b.CKPT", "b.bin"])
def test_names_of_pickled_files_are_refused_as_targets(tmp_path, name) -> None:
    torch.save(WEIGHTS, tmp_path / "a.PT")
    with pytest.raises(CheckpointError, match=r"is not written here: end it in \.safetensors"):
        convert(tmp_path / "a.PT", tmp_path / name)
    assert not (tmp_path / name).exists()
    assert same(load_file(convert(tmp_path / "a.PT", tmp_path / "b.SafeTensors")), WEIGHTS)


def test_a_checkpoint_without_a_model_has_no_single_file(tmp_path) -> None:
    for state, message in (({"step": 1}, "no entry `model`"), ({"model": {"a": 1}}, "not a flat dict of tensors")):
        with pytest.raises(CheckpointError, match=message):
            convert(save(tmp_path / "c", state), tmp_path / "b.safetensors")


def test_load_weights_prefers_the_average_and_reads_any_file(tmp_path) -> None:
    averaged = {"layer.weight": torch.ones(4, 3)}
    path = save(tmp_path / "c", {"model": WEIGHTS, "ema": averaged, "optimizer": [torch.ones(1)]})
    assert same(load_weights(path), {**WEIGHTS, **averaged})
    assert same(load_weights(save(tmp_path / "d", {"model": WEIGHTS})), WEIGHTS)
    assert same(load_weights(convert(tmp_path / "d", tmp_path / "w.safetensors")), WEIGHTS)
    with pytest.raises(CheckpointError, match="no entry 'model'"):
        load_weights(save(tmp_path / "e", {"step": 1}))
    with pytest.raises(CheckpointError, match="nothing has that name"):
        load_weights(tmp_path / "absent")
