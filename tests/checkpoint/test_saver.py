"""Saving in the background."""

from __future__ import annotations

import threading

import pytest
import torch

from arclight.checkpoint import AsyncSaver, CheckpointError, async_saver, files, load

torch.set_num_threads(1)


def state(value: float) -> dict:
    weight = torch.full((1000,), value)
    return {
        "model": {"w": weight, "tied": weight, "t": torch.eye(3).t() * value},
        "list": [value],
        "scalar": [torch.tensor(value)],
    }


def test_changes_after_save_returns_are_not_saved(tmp_path, monkeypatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(async_saver, "write", lambda *a, write=async_saver.write: release.wait(60) and write(*a))
    current = state(1.0)
    with AsyncSaver() as background:
        future = background.save(tmp_path / "a", current)
        current["model"]["w"].fill_(7)
        current["scalar"][0].fill_(7)
        current["list"][0] = 7
        assert not future.done()
        assert not (tmp_path / "a").exists()
        release.set()
        assert future.result(60) == tmp_path / "a"
    loaded = load(tmp_path / "a")
    assert (loaded["model"]["w"] == 1).all()
    assert loaded["scalar"][0] == 1
    assert loaded["list"] == [1.0]
    assert torch.equal(loaded["model"]["t"], torch.eye(3))
    assert loaded["model"]["w"].data_ptr() == loaded["model"]["tied"].data_ptr()


def test_buffers_are_used_again_and_follow_the_state(tmp_path) -> None:
    with AsyncSaver() as background:
        background.prepare(state(0.0))
        background.wait()
        places = {key: buffer.data_ptr() for key, buffer in background._buffers.items()}
        for step in range(3):
            background.save(tmp_path / str(step), state(float(step)))
        background.wait()
        assert {key: buffer.data_ptr() for key, buffer in background._buffers.items()} == places
        background.save(tmp_path / "other", {"model": {"w": torch.zeros(2, dtype=torch.bfloat16)}})
        background.save(
            tmp_path / "float8", {"model": {"w": torch.ones(2).to(torch.float8_e5m2)}, "x": [torch.zeros(0)]}
        )
        background.wait()
        assert len(background._buffers) == 2
    for step in range(3):
        assert (load(tmp_path / str(step))["model"]["w"] == step).all()
    assert load(tmp_path / "other")["model"]["w"].dtype == torch.bfloat16
    assert load(tmp_path / "float8")["model"]["w"].float().tolist() == [1, 1]


def test_one_save_at_a_time_in_order(tmp_path) -> None:
    with AsyncSaver() as background:
        for step in range(5):
            background.save(tmp_path / "last", state(float(step)))
    assert (load(tmp_path / "last")["model"]["w"] == 4).all()
    assert [entry.name for entry in tmp_path.iterdir()] == ["last"]


def test_errors_of_the_background_surface_once_with_the_path(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    background = AsyncSaver()
    background.save(tmp_path / "file" / "a", state(1.0))
    with pytest.raises(CheckpointError, match=r"file/a could not be written"):
        background.save(tmp_path / "b", state(1.0))
    assert not (tmp_path / "b").exists()
    background.save(tmp_path / "b", state(2.0))
    background.wait()
    background.save(tmp_path / "file" / "c", state(1.0))
    with pytest.raises(CheckpointError, match="file/c"):
        background.close()
    assert (load(tmp_path / "b")["model"]["w"] == 2).all()

    def broken(*_):
        raise MemoryError("no more")

    with AsyncSaver() as another:
        monkeypatch.setattr(files, "make_staging", broken)
        another.save(tmp_path / "d", state(1.0))
        with pytest.raises(CheckpointError, match=r"/d could not be written in the background: MemoryError"):
            another.wait()


def test_unsupported_values_are_refused_before_writing(tmp_path) -> None:
    with AsyncSaver() as background, pytest.raises(CheckpointError, match="a is a object"):
        background.save(tmp_path / "a", {"a": object()})
    assert list(tmp_path.iterdir()) == []
