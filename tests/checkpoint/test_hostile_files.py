"""Files of a checkpoint that are cut off or hold hostile values: one sentence, and the sound checkpoint before is taken."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from arclight import checkpoint
from arclight.checkpoint import AsyncSaver, CheckpointError
from arclight.checkpoint.sharded.reader import open_state
from arclight.checkpoint.tensorfile import check_shape
from arclight.checkpoint.tree import boxes_cover, counts_of, decode

STATE = {
    "model": {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)},
    "optimizer": {"state": [{"exp_avg": torch.ones(3)}], "lr": 0.1},
    "rng": {"numpy": np.arange(4, dtype=np.uint32), "device": torch.device("cpu"), "at": (1, 2)},
}
FILES = ("manifest.json", "state.json", "model.safetensors", "state.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (1, 2):
        checkpoint.save(tmp_path / f"step={step}", {**STATE, "step": step})
    return tmp_path


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def seal(path: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest as somebody would who wants it to be believed: its own digest is right."""
    body = {key: value for key, value in manifest.items() if key != "digest"}
    (path / "manifest.json").write_text(json.dumps({**body, "digest": digest(body)}))


def rewrite(path: Path, name: str, content: bytes) -> None:
    """Replace a file, and size and hash of it in the manifest."""
    (path / name).write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    seal(path, manifest)


def assert_refused(path: Path) -> None:
    """Every way of reading it ends in one sentence of CheckpointError."""
    for read in (checkpoint.load, open_state):
        with pytest.raises(CheckpointError) as caught:
            read(path)
        assert len(str(caught.value).splitlines()) == 1, caught.value
        assert path.name in str(caught.value)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kept", ["nothing", "half", "all but a byte", "a byte more", "no file"])
def test_a_file_that_is_cut_off_leaves_the_checkpoint_before(folder: Path, name: str, kept: str) -> None:
    newest = folder / "step=2"
    content = (newest / name).read_bytes()
    cut = {
        "nothing": b"",
        "half": content[: len(content) // 2],
        "all but a byte": content[:-1],
        "a byte more": content + b" ",
    }
    if kept == "no file":
        (newest / name).unlink()
    else:
        (newest / name).write_bytes(cut[kept])
    if (name, kept) == ("manifest.json", "a byte more"):
        return assert_sound(folder, "step=2")  # JSON may end in a space
    assert checkpoint.verify(newest)
    assert_refused(newest)
    return assert_sound(folder, "step=1")


def assert_sound(folder: Path, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = checkpoint.find_last(folder)
    assert found == folder / name
    assert torch.equal(checkpoint.load(found)["model"]["w"], STATE["model"]["w"])


def field(*keys: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        place: Any = manifest
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = to

    return change


def move(name: str) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        manifest["files"][name] = manifest["files"].pop("model.safetensors")

    return change


MANIFESTS = {
    "another folder": move("../step=1/model.safetensors"), "absolute": move("/etc/hostname"), "dots": move(".."),
    "backslash": move("..\\step=1"), "nul": move("a\0b"), "no name": move(""),
    "elsewhere": field("data", to="../step=1"),
    "negative size": field("files", "state.json", "bytes", to=-1),
    "size as text": field("files", "state.json", "bytes", to="5"),
    "size NaN": field("files", "state.json", "bytes", to=float("nan")),
    "huge size": field("files", "state.json", "bytes", to=2**70),
    "hash a number": field("files", "state.json", "sha256", to=5), "files a list": field("files", to=[]),
    "no files": field("files", to={}),
    "step a text": field("step", to="latest"), "step NaN": field("step", to=float("nan")),
    "created a number": field("created", to=1),
    "processes none": field("processes", to=None), "entries a text": field("entries", to="model"),
    "tensors a list": field("tensors", to=[1]),
    "future": field("version", to=99), "another format": field("format", to="zip"),
    "version a list": field("version", to=[1]),
}  # fmt: skip


@pytest.mark.parametrize("hostile", MANIFESTS)
def test_hostile_manifests_are_refused(folder: Path, hostile: str) -> None:
    newest = folder / "step=2"
    manifest = json.loads((newest / "manifest.json").read_text())
    MANIFESTS[hostile](manifest)
    seal(newest, manifest)
    assert checkpoint.verify(newest)
    assert_refused(newest)
    assert_sound(folder, "step=1")
    with pytest.raises(CheckpointError) if hostile != "huge size" else warnings.catch_warnings():
        checkpoint.inspect(newest)
    assert checkpoint.prune(folder, keep=1) == [newest]


@pytest.mark.parametrize(
    "text", ["[]", "null", "5", '"model"', "{" * 5000, "[" * 100_000, "", "\xff", '{"digest": "x", "digest": "y"}']
)
def test_manifests_that_are_no_manifest_are_refused(folder: Path, text: str) -> None:
    (folder / "step=2" / "manifest.json").write_bytes(text.encode("latin-1"))
    assert_refused(folder / "step=2")
    assert_sound(folder, "step=1")


def tensors(file: str, *names: str) -> dict[str, Any]:
    return {"$": "tensors", "file": file, "names": list(names), "aliases": {}}


def spread(shape: Any, *shares: Any) -> dict[str, Any]:
    return {"$": "spread", "dtype": "float32", "shape": shape, "shares": list(shares)}


W = ["model.safetensors", "w"]
STATES: dict[str, Any] = {
    "a list": [1], "a text": "model", "null": None, "unknown kind": {"model": {"$": "pickle", "value": "x"}},
    "kind a list": {"model": {"$": []}}, "kind without fields": {"model": {"$": "tensors"}},
    "another file": {"model": tensors("../step=1/model.safetensors", "w")},
    "absolute file": {"model": tensors("/etc/hostname", "w")}, "file a list": {"model": tensors([], "w")},
    "unknown tensor": {"model": tensors("model.safetensors", "x")},
    "names a number": {"model": {**tensors("model.safetensors"), "names": 5}},
    "no dtype": {"a": {"$": "dtype", "value": "nn"}}, "no device": {"a": {"$": "device", "value": "zzz"}},
    "huge whole": {"a": spread([2**62, 2**62], [*W, [0, 0]])},
    "negative whole": {"a": spread([-2, -3], [*W, [0, 0]])}, "outside": {"a": spread([2, 3], [*W, [7, 0]])},
    "overlapping": {"a": spread([4, 3], [*W, [0, 0]], [*W, [0, 0]])},
    "uncovered": {"a": spread([5, 3], [*W, [0, 0]])}, "empty and huge": {"a": spread([0, 2**62, 2**62])},
    "shape a text": {"a": spread("23", [*W, [0, 0]])}, "offset a text": {"a": spread([2, 3], [*W, "00"])},
    "flat offset": {"a": spread([2, 3], [*W, [0]])}, "broken offset": {"a": spread([4, 3], [*W, [0.0, 0]], [*W, [2, 0]])},
    "another shape": {"a": spread([3, 2], [*W, [0, 0]])}, "another width": {"a": spread([6, 1], [*W, [0, 0]])},
    "another type": {"a": spread([2], ["model.safetensors", "b", [0]])},
    "bits of nothing": {"a": {"$": "bits", "of": 5, "dtype": "float32", "shape": [1]}},
    "complex of one": {"a": {"$": "complex", "parts": [1]}},
    "unhashable set": {"a": {"$": "set", "items": [[1]]}}, "bytes of no base64": {"a": {"$": "bytes", "base64": "*"}},
    "scalar of no dtype": {"a": {"$": "scalar", "dtype": "V8", "value": 5}},
    "object scalar": {"a": {"$": "array", "array_dtype": "O", "name": "rng.numpy"}},
    "huge integer": {"a": {"$": "int", "hex": "zz"}},
}  # fmt: skip


@pytest.mark.parametrize("hostile", STATES)
def test_hostile_states_are_refused(folder: Path, hostile: str) -> None:
    rewrite(folder / "step=2", "state.json", json.dumps(STATES[hostile]).encode())
    assert_refused(folder / "step=2")


@pytest.mark.parametrize(
    "text",
    [
        '{"model": 1, "model": 2}', '{"a": NaN}', '{"a": Infinity}', '{"a": ' + "[" * 700 + "]" * 700 + "}", '{"a": ' + '{"b":' * 700 + "1" + "}" * 700 + "}",
        "[" * 100_000, '{"a": ' + "9" * 5000 + "}", "{", "\xff",
    ],
    ids=["same key", "NaN", "infinity", "deep lists", "deep tables", "too deep", "long number", "cut", "no text"],
)  # fmt: skip
def test_states_that_python_reads_or_cannot_are_refused(folder: Path, text: str) -> None:
    rewrite(folder / "step=2", "state.json", text.encode("latin-1"))
    assert_refused(folder / "step=2")


def header(**entries: Any) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def tensor(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape if not isinstance(shape, tuple) else list(shape), "data_offsets": offsets}


ONCE = '"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
HEADERS = {
    "negative": header(w=tensor(shape=(-2, -1))), "huge": header(w=tensor(shape=(2**62, 2**62))),
    "empty and huge": header(w=tensor(shape=(0, 2**62, 2**62), offsets=(0, 0))),
    "unknown dtype": header(w=tensor(dtype="F128")), "dtype a list": header(w=tensor(dtype=[])),
    "shape a text": header(w=tensor(shape="2")), "a broken size": header(w=tensor(shape=(2.0,))),
    "beyond the end": header(w=tensor(shape=(200,), offsets=(0, 800))), "backwards": header(w=tensor(offsets=(8, 0))),
    "three offsets": header(w=tensor(offsets=(0, 8, 8))),
    "a gap": header(w=tensor(offsets=(4, 12))), "no table": header(w=5),
    "a list": (2).to_bytes(8, "little") + b"[]", "length": (2**63).to_bytes(8, "little"),
    "twice": (lambda t: len(t).to_bytes(8, "little") + t)(f"{{{ONCE},{ONCE}}}".encode()),
    "deep": (lambda t: len(t).to_bytes(8, "little") + t)(b"[" * 50_000),
    "a truth value": header(w=tensor(shape=[True, 2])),
}  # fmt: skip


@pytest.mark.parametrize("hostile", HEADERS)
def test_hostile_tensor_files_are_refused(folder: Path, hostile: str) -> None:
    rewrite(folder / "step=2", "model.safetensors", HEADERS[hostile] + bytes(8))
    assert_refused(folder / "step=2")


def test_shapes_are_bound_by_their_elements() -> None:
    for shape in ([], [0], [2**28, 2**28 - 1], [0, 2**56 - 1]):
        check_shape(shape)
    for shape in ([2**28, 2**28], [2**56], [0, 2**56]):
        with pytest.raises(ValueError, match="is too large"):
            check_shape(shape)


def test_dtypes_that_do_not_fit_the_values_are_refused(folder: Path) -> None:
    newest = folder / "step=2"
    content = (newest / "model.safetensors").read_bytes()
    rewrite(newest, "model.safetensors", content.replace(b'"F32"', b'"F16"'))
    assert_refused(newest)


@pytest.mark.parametrize(
    ("boxes", "covered"),
    [
        ([([0, 0], [2, 3]), ([2, 0], [2, 3])], True),
        ([([0, 0], [2, 3]), ([2, 0], [2, 3]), ([1, 0], [0, 3])], True),
        ([([0, 0], [4, 3])], True),
        ([([1, 0], [4, 3])], False),
        ([([0, 0], [3, 4])], False),
        ([([0, 0], [2, 3]), ([2.0, 0], [2, 3])], False),
        ([([0, 0], [2, 3]), ([1, 0], [2, 3])], False),
        ([([0, 0], [2, 3]), ([3, 0], [2, 3])], False),
        ([([-1, 0], [2, 3]), ([2, 0], [2, 3])], False),
        ([([0, 0], [2, 3])], False),
        ([([0], [2]), ([2], [2])], False),
    ],
)  # fmt: skip
def test_boxes_cover_a_whole_without_gap_or_overlap(boxes: list[Any], covered: bool) -> None:
    assert boxes_cover(boxes, [4, 3]) is covered


def test_counts_are_whole_numbers_at_the_top_or_in_the_progress() -> None:
    assert counts_of({"step": np.int64(3), "progress": {"epoch": torch.tensor(2)}}) == {"step": 3, "epoch": 2}
    assert counts_of({"step": 3, "progress": {"step": 5}})["step"] == 3
    for none in (True, "3", 2.5, torch.ones(2), None):
        assert counts_of({"step": none}) == {"step": None, "epoch": None}


def test_shares_may_lie_side_by_side() -> None:
    node = spread([4, 3], [*W, [0, 0]], [*W, [2, 0]])
    whole = decode({"a": node}, {"model.safetensors": {"w": STATE["model"]["w"]}})["a"]
    assert torch.equal(whole, torch.cat([STATE["model"]["w"]] * 2))
    empty = spread([0, 3], ["f", "e", [0, 0]], ["f", "e", [0, 0]])
    assert decode({"a": empty}, {"f": {"e": torch.empty(0, 3)}})["a"].shape == (0, 3)


# ------------------------------------------------------------------------------------------------- replaced while read


def alternate(path: Path, monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """Have others replace a checkpoint each time that its manifest has been read, so often."""
    from arclight.checkpoint import store

    read, count = store.read_manifest, [0]

    def and_replace(place: Path) -> Any:
        manifest = read(place)
        if count[0] < times:
            count[0] += 1
            checkpoint.save(path, {"step": count[0], "model": {"w": torch.full((10 + count[0],), float(count[0]))}})
        return manifest

    monkeypatch.setattr(store, "read_manifest", and_replace)
    return count


@pytest.mark.parametrize("verify", [True, False])
def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: bool
) -> None:
    checkpoint.save(tmp_path / "last", {"step": 0, "model": {"w": torch.zeros(10)}})
    count = alternate(tmp_path / "last", monkeypatch, 3)
    state = checkpoint.load(tmp_path / "last", verify=verify)
    assert count == [3]
    assert state["step"] == 3
    assert torch.equal(state["model"]["w"], torch.full((13,), 3.0))
    assert checkpoint.verify(tmp_path / "last") == []


def test_a_checkpoint_that_is_replaced_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last"
    checkpoint.save(path, {"step": 0, "model": {"w": torch.zeros(10)}})
    alternate(path, monkeypatch, 3)
    assert checkpoint.verify(path) == []
    monkeypatch.undo()
    alternate(path, monkeypatch, 3)
    assert torch.equal(open_state(path)["model"]["w"].read(), torch.full((13,), 3.0))
    monkeypatch.undo()
    alternate(path, monkeypatch, 1000)
    with pytest.raises(CheckpointError, match="replaced faster than it can be read"):
        checkpoint.load(path)


def test_readers_and_writers_of_one_path_meet(tmp_path: Path) -> None:
    path, stop = tmp_path / "last", threading.Event()
    checkpoint.save(path, {"step": 0, "model": {"w": torch.zeros(1000)}})

    def write() -> None:
        step = 0
        while not stop.is_set():
            step += 1
            checkpoint.save(path, {"step": step, "model": {"w": torch.full((1000,), float(step))}})

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(60):
            state = checkpoint.load(path)
            assert bool((state["model"]["w"] == state["step"]).all())
    finally:
        stop.set()
        writer.join()


# --------------------------------------------------------------------------------------------------- what is kept


@pytest.mark.parametrize(
    "newest", [np.int64(10), torch.tensor(10), torch.tensor([10]), 10.0, np.float32(10), np.array(10)]
)
def test_steps_of_every_sort_are_steps(tmp_path: Path, newest: Any) -> None:
    checkpoint.save(tmp_path / "b", {"step": newest, "model": {"w": torch.ones(1)}})
    checkpoint.save(tmp_path / "a", {"step": 5, "model": {"w": torch.ones(1)}})
    assert checkpoint.inspect(tmp_path / "b").step == 10
    assert checkpoint.find_last(tmp_path) == tmp_path / "b"
    assert checkpoint.prune(tmp_path, keep=1) == [tmp_path / "a"]


@pytest.mark.parametrize("wrong", [True, 5.5, float("nan"), "5", [5], torch.ones(2), None])
def test_inspect_ignores_invalid_steps(tmp_path: Path, wrong: Any) -> None:
    checkpoint.save(tmp_path / "a", {"step": wrong})
    assert checkpoint.inspect(tmp_path / "a").step is None


@pytest.mark.parametrize("name", ["model.safetensors", "state.json"])
def test_pruning_keeps_a_sound_checkpoint_rather_than_a_cut_one(folder: Path, name: str) -> None:
    os.truncate(folder / "step=2" / name, 10)
    assert checkpoint.prune(folder, keep=1) == [folder / "step=2"]
    assert checkpoint.find_last(folder) == folder / "step=1"


def test_pruning_without_enough_sound_ones_keeps_what_there_is(folder: Path) -> None:
    os.truncate(folder / "step=2" / "model.safetensors", 10)
    os.truncate(folder / "step=1" / "model.safetensors", 10)
    assert len(checkpoint.prune(folder, keep=1)) == 1
    assert checkpoint.prune(folder, keep=5) == []


# ------------------------------------------------------------------------------------------------- background saves


def test_a_background_save_goes_where_the_path_was_when_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with AsyncSaver() as saver:
        held = threading.Event()
        saver._thread.submit(held.wait)
        future = saver.save("ck", STATE)
        monkeypatch.chdir(tmp_path / "there")
        held.set()
        assert future.result() == tmp_path / "here" / "ck"
    assert os.listdir(tmp_path / "there") == []
    assert checkpoint.verify(tmp_path / "here" / "ck") == []


def test_a_closed_saver_refuses_to_save(tmp_path: Path) -> None:
    saver = AsyncSaver()
    saver.close()
    for use in (lambda: saver.save(tmp_path / "a", STATE), lambda: saver.prepare(STATE)):
        with pytest.raises(CheckpointError, match=r"this saver is closed .* make another"):
            use()


# ----------------------------------------------------------------------------------------------------- odd content


def test_long_names_and_long_integers_come_back(tmp_path: Path) -> None:
    long, number = "n" * 1000, -(10**5000)
    checkpoint.save(tmp_path / "a", {long: {"w": torch.ones(2)}, "number": number, "key": {number: 1}})
    state = checkpoint.load(tmp_path / "a")
    assert torch.equal(state[long]["w"], torch.ones(2))
    assert state["number"] == number
    assert state["key"] == {number: 1}
    assert checkpoint.load(tmp_path / "a", only=long).keys() == {long}


def test_a_name_with_brackets_can_be_chosen(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", {"model": {"a[0]": torch.ones(1), "a0": torch.zeros(1), "b*": torch.ones(2)}})
    assert checkpoint.load(tmp_path / "a", only="model.a[0]")["model"].keys() >= {"a[0]"}
    assert checkpoint.load(tmp_path / "a", only="model.b*")["model"].keys() == {"b*"}
    assert checkpoint.load(tmp_path / "a", exclude="model.a[0]")["model"].keys() == {"b*"}


def test_files_of_stored_tensors_close_with_them(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", STATE)

    def opened() -> list[str]:
        places = Path("/proc/self/fd")
        return [str(link.resolve()) for link in places.iterdir() if str(tmp_path) in str(link.resolve())]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = open_state(tmp_path / "a")
        assert len(opened()) == 2
        shutil.rmtree(tmp_path / "a")
        assert torch.equal(state["model"]["w"].read(), STATE["model"]["w"])
        del state
        assert opened() == []


def test_averages_count_in_every_format(tmp_path: Path) -> None:
    model, ema = {"w": torch.ones(2), "n": torch.full((1,), 2.0)}, {"w": torch.full((2,), 5.0)}
    for name, averages in (("plain", ema), ("averaged", {"module.w": ema["w"], "n_averaged": torch.tensor(3)})):
        torch.save({"model": model, "ema": averages}, tmp_path / f"{name}.pt")
        checkpoint.convert(tmp_path / f"{name}.pt", tmp_path / name)
        for place in (tmp_path / f"{name}.pt", tmp_path / name):
            weights = checkpoint.load_weights(place)
            assert weights.keys() == model.keys()
            assert torch.equal(weights["w"], ema["w"])
            assert torch.equal(weights["n"], model["n"])


def test_averages_of_another_model_are_refused(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", {"model": {"w": torch.ones(2)}, "ema": {"v": torch.ones(2)}})
    with pytest.raises(CheckpointError, match="averaged weights for v, which its model does not have"):
        checkpoint.load_weights(tmp_path / "a")


def test_keys_that_become_one_are_refused(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, 1: "one", "1": "text"}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"cannot tell apart, \[1, '1'\]"):
        checkpoint.convert(tmp_path / "a.pt", tmp_path / "a")
