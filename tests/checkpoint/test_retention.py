"""Finding, pruning and inspecting checkpoints."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from rich.console import Console

from arclight.checkpoint import CheckpointError, find_last, inspect, prune, remove, save

torch.set_num_threads(1)


def make(folder, name: str, step: int | None):
    return save(folder / name, {"model": {"w": torch.ones(5)}, "progress": {"epoch": 2, "step": step}})


def damage(path) -> None:
    (path / "model.safetensors").write_bytes(b"\0" * (path / "model.safetensors").stat().st_size)


def test_find_last_goes_by_step_then_time(tmp_path) -> None:
    assert find_last(tmp_path) is None
    assert find_last(tmp_path / "absent") is None
    make(tmp_path, "b", 20)
    make(tmp_path, "a", 3)
    last = make(tmp_path, "c", 20)
    make(tmp_path, "unnumbered", None)
    (tmp_path / "notes").mkdir()
    (tmp_path / "d").symlink_to(tmp_path / "a")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_last(tmp_path) == last


@pytest.mark.parametrize("how", ["weights", "manifest"])
def test_find_last_falls_back_with_a_warning(how, tmp_path) -> None:
    good = make(tmp_path, "one", 1)
    bad = make(tmp_path, "two", 2)
    if how == "weights":
        damage(bad)
    else:
        (bad / "manifest.json").write_text("")
    with pytest.warns(UserWarning, match=r"skipping a damaged checkpoint: .*two"):
        assert find_last(tmp_path) == good


def test_find_last_returns_none_if_every_checkpoint_is_damaged(tmp_path) -> None:
    damage(make(tmp_path, "one", 1))
    with pytest.warns(UserWarning, match="damaged"):
        assert find_last(tmp_path) is None


def test_prune_keeps_the_newest_and_the_protected(tmp_path) -> None:
    paths = [make(tmp_path, f"c{step}", step) for step in (5, 1, 4, 2, 3)]
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "manifest.json").write_text("{}")
    removed = prune(tmp_path, keep=2, protect=[tmp_path / "c1"])
    assert [path.name for path in removed] == ["c2", "c3"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c1", "c4", "c5", "notes"]
    assert len(prune(tmp_path, keep=0)) == 3
    assert not any(path.exists() for path in paths)
    with pytest.raises(ValueError, match="keep=-1"):
        prune(tmp_path, keep=-1)


def test_prune_removes_cut_off_checkpoints_first(tmp_path) -> None:
    for step in (1, 2, 3):
        make(tmp_path, f"c{step}", step)
    for keep in (3, 4):
        assert prune(tmp_path, keep=keep) == []
    weights = tmp_path / "c3" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert [path.name for path in prune(tmp_path, keep=2)] == ["c3"]
    assert {path.name for path in tmp_path.iterdir()} == {"c1", "c2"}


def test_remove_takes_checkpoints_and_links_only(tmp_path) -> None:
    path = make(tmp_path, "one", 1)
    link = tmp_path / "last"
    link.symlink_to("one")
    remove(link)
    assert path.is_dir()
    (tmp_path / "data").mkdir()
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        remove(tmp_path / "data")
    remove(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["data"]


def test_inspect(tmp_path) -> None:
    weight = torch.zeros(4, 8, dtype=torch.bfloat16)
    optimizer = {"state": {0: {"m": torch.zeros(4, 8), "step": torch.tensor(1)}}}
    path = save(
        tmp_path / "c",
        {
            "model": {"w": weight, "tied": weight, "b": torch.zeros(8)},
            "optimizer": optimizer,
            "global_step": 9,
            "epoch": 3,
        },
    )
    found = inspect(path)
    assert (found.step, found.epoch, found.parameters) == (9, 3, 40)
    assert found.dtypes == ["bfloat16", "float32", "int64"]
    assert found.entries["model"].bytes == 4 * 8 * 2 + 8 * 4
    assert found.entries["optimizer"].tensors == 2
    assert found.entries["epoch"].tensors == 0
    assert found.bytes == sum(file.stat().st_size for file in path.iterdir() if file.name != "manifest.json")
    again = json.loads(found.to_json())
    assert again["entries"]["model"]["dtypes"] == ["bfloat16", "float32"]
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(found)
    text = console.export_text()
    for word in ("step 9", "epoch 3", "model.safetensors", "optimizer", "bfloat16"):
        assert word in text
    with pytest.raises(CheckpointError, match="nothing has that name"):
        inspect(tmp_path / "absent")
