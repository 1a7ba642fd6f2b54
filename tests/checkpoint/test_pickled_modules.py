"""Modules that others pickled whole: read as named tensors, with nothing of the file imported, called or believed."""

from __future__ import annotations

import io
import pickle
import struct
import sys
import types
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from arclight.checkpoint import CheckpointError, convert, load, load_weights
from arclight.checkpoint.pickled_modules import read_modules


@pytest.fixture
def elsewhere() -> Iterator[types.ModuleType]:
    """A package of another project, with a module class; it is gone when its files are read."""
    there = types.ModuleType("models_elsewhere")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.SiLU())
            self.head = nn.Linear(4, 2)
            self.tied = self.head
            self.register_buffer("grid", torch.arange(6.0).view(2, 3).T)
            self.register_buffer("passing", torch.ones(2), persistent=False)
            self.names, self.yaml, self.stride = (
                {0: "a", 1: "b"},
                {"nc": 2, "rows": [[-1, 1, "Conv"]]},
                torch.tensor([8.0]),
            )
            self.hooked = print

    Net.__module__, Net.__qualname__ = there.__name__, "Net"
    there.Net = Net  # type: ignore[attr-defined]
    sys.modules[there.__name__] = there
    yield there
    sys.modules.pop(there.__name__, None)


def test_a_file_of_modules_becomes_named_tensors(elsewhere: types.ModuleType, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, averaged = elsewhere.Net().half(), elsewhere.Net().half()
    content = {
        "model": model,
        "ema": averaged,
        "epoch": 3,
        "best_fitness": np.float64(0.5),
        "opt": types.SimpleNamespace(lr=1),
    }
    torch.save(content, tmp_path / "last.pt")
    expected, averages = model.state_dict(), averaged.state_dict()
    del sys.modules[elsewhere.__name__]
    found = read_modules(tmp_path / "last.pt")
    assert found.keys() == {"model", "ema"}
    tensors = found["model"].tensors
    assert tensors.keys() == expected.keys()
    assert all(
        torch.equal(tensors[name], value) and tensors[name].dtype == value.dtype for name, value in expected.items()
    )
    attributes = found["model"].attributes
    assert (attributes["names"], attributes["yaml"]) == ({0: "a", 1: "b"}, {"nc": 2, "rows": [[-1, 1, "Conv"]]})
    assert "hooked" not in attributes
    assert elsewhere.__name__ not in sys.modules
    state = load(convert(tmp_path / "last.pt", tmp_path / "out"))
    assert state["model"].keys() == expected.keys()
    assert torch.equal(load_weights(tmp_path / "last.pt")["head.weight"], averages["head.weight"])


def test_a_module_that_was_saved_alone(elsewhere: types.ModuleType, tmp_path: Path) -> None:
    torch.save(elsewhere.Net(), tmp_path / "model.pt")
    del sys.modules[elsewhere.__name__]
    assert "head.weight" in load_weights(tmp_path / "model.pt")


# ---------------------------------------------------------------- forged files

LINEAR = {"model": nn.Linear(2, 3)}


def rewritten(path: Path, change: Callable[[dict[str, bytes]], Any]) -> Path:
    """Write a file of a linear layer with ``change`` applied to its parts, by their names behind the root."""
    buffer = io.BytesIO()
    torch.save(LINEAR, buffer)
    with zipfile.ZipFile(buffer) as archive:
        parts = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    change(parts)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in parts.items():
            archive.writestr(f"archive/{name}", data)
    return path


class Calling:
    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.given = function, arguments

    def __reduce__(self) -> Any:
        return self.given


def pickled(value: Any) -> bytes:
    return pickle.dumps(value, protocol=2)


def test_reading_modules_calls_no_pickled_function(tmp_path: Path) -> None:
    marker = tmp_path / "called"
    for name, hostile in (
        ("a.pt", Calling(Path.touch, marker)),
        ("b.pt", Calling(exec, f"open({str(marker)!r}, 'w')")),
    ):
        torch.save({"model": hostile, "ema": nn.Linear(1, 1)}, tmp_path / name)
        assert read_modules(tmp_path / name).keys() == {"ema"}
        torch.save({"model": hostile}, tmp_path / name)
        assert read_modules(tmp_path / name) == {}
    assert not marker.exists()


def deep_modules() -> bytes:
    """Forty modules, each of which has the next one twice: a trillion by name."""
    inner: nn.Module = nn.Identity()
    for _ in range(40):
        inner = nn.Sequential(inner, inner)
    return pickled({"model": inner})


def replaced(parts: dict[str, bytes], old: bytes, new: bytes) -> None:
    assert old in parts["data.pkl"]
    parts["data.pkl"] = parts["data.pkl"].replace(old, new, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda parts: parts.pop("data.pkl"), "no data.pkl"),
        (lambda parts: parts.pop("data/0"), "part 0 of its tensors is missing"),
        (lambda parts: parts.update({"data/0": b"123"}), "has 3 bytes"),
        (lambda parts: parts.update({"byteorder": b"big"}), "big-endian"),
        (lambda parts: parts.update({"data.pkl": parts["data.pkl"][:-20]}), "damaged"),
        (lambda parts: parts.update({"data.pkl": b"garbage"}), "damaged"),
        (lambda parts: replaced(parts, b"K\x03K\x02\x86", b"K\x7fK\x02\x86"), r"shape \[127, 2\] in 6 stored"),  # the size
        (lambda parts: parts.update({"data.pkl": b"\x80\x02Nr" + struct.pack("<I", 2**31) + b"."}), "counts objects"),
        (lambda parts: parts.update({"data.pkl": b"\x80\x02\x82\x01."}), "opcode EXT1"),
        (lambda parts: parts.update({"data.pkl": deep_modules()}), "within each other"),
    ],
    ids=["no pickle", "no part", "short part", "big-endian", "cut", "garbage", "past the storage", "memo", "extension",
         "modules without end"],
)  # fmt: skip
def test_a_forged_file_is_one_sentence(change: Callable[[dict[str, bytes]], Any], message: str, tmp_path: Path) -> None:
    path = rewritten(tmp_path / "forged.pt", change)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_modules(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "content", [pickled({"model": 3}), pickled([1]), b"\x80\x02" + b"(" * 100_000 + b"t" * 100_000 + b"."]
)
def test_pickles_without_modules_give_no_modules(content: bytes, tmp_path: Path) -> None:
    assert read_modules(rewritten(tmp_path / "a.pt", lambda parts: parts.update({"data.pkl": content}))) == {}


def test_builders_cannot_be_changed_by_a_file(tmp_path: Path) -> None:
    for state in (b"}U\x01aK\x01s", b"N}U\x08_build\x00\x00K\x01s\x86"):  # as a dict, and as slots
        forged = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n" + state + b"b."
        path = rewritten(tmp_path / "forged.pt", lambda parts, forged=forged: parts.update({"data.pkl": forged}))
        with pytest.raises(CheckpointError, match=r"forged|damaged"):
            read_modules(path)
    assert read_modules(rewritten(tmp_path / "sound.pt", lambda parts: None))["model"].tensors["weight"].shape == (3, 2)


def test_many_views_of_one_storage_do_not_fill_memory(tmp_path: Path) -> None:
    large = torch.zeros(1 << 20)
    torch.save({"model": nn.Linear(1, 1), "views": [large[:] for _ in range(64)]}, tmp_path / "views.pt")
    with pytest.raises(CheckpointError, match="times its size"):
        read_modules(tmp_path / "views.pt")


def test_compressed_parts_are_refused(tmp_path: Path) -> None:
    rewritten(tmp_path / "a.pt", lambda parts: None)
    with (
        zipfile.ZipFile(tmp_path / "a.pt") as archive,
        zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in archive.namelist():
            packed.writestr(name, archive.read(name))
    with pytest.raises(CheckpointError, match="compressed"):
        read_modules(tmp_path / "b.pt")


TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n((U\x07storagectorch\nFloatStorage\nU\x011U\x03cpuK\x03tQK\x00K\x03\x85K\x01\x85\x89}tR"
"""The bias of the linear layer."""


def module(parameters: bytes = b"}", **more: bytes) -> bytes:
    """Pickle a module of a class elsewhere, under ``model``, with what builds its attributes."""
    state = {"_modules": b"}", "_buffers": b"}", "_parameters": parameters, **more}
    items = b"".join(b"U" + bytes([len(name)]) + name.encode() + value for name, value in state.items())
    return b"\x80\x02}U\x05modelcelsewhere\nNet\n)\x81}(" + items + b"ubs."


def test_a_tensor_is_what_is_stored_whatever_is_done_to_it_later(tmp_path: Path) -> None:
    sound = rewritten(tmp_path / "a.pt", lambda parts: parts.update({"data.pkl": module(b"}U\x01w" + TENSOR + b"s")}))
    assert read_modules(sound)["model"].tensors["w"].shape == (3,)
    larger = b"q\x05(h\x05K\x00J\x00\x00\x00\x10\x85K\x01\x85tb"  # Tensor.__setstate__ of four values sets another size
    items = b"(K\x00K\x00u"
    for change, message in ((larger, "changes what it is read with"), (items, "damaged")):
        text = module(b"}U\x01w" + TENSOR + change + b"s")
        path = rewritten(tmp_path / "b.pt", lambda parts, text=text: parts.update({"data.pkl": text}))
        with pytest.raises(CheckpointError, match=message):
            read_modules(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"\x80\x02" + b"".join(b"cc%d\nb\n0" % number for number in range(10_001)) + b"N.", "10,000 classes"),
        (
            b"\x80\x02ccollections\nOrderedDict\nq\x00](" + b"".join(b"K%cK\x01\x86" % n for n in range(100)) + b"e\x85q\x01"
            + b"h\x00h\x01R" * 200 + b".", "copies more values",
        ),
        (b"\x80\x02c_codecs\nencode\nq\x00U\xff" + b"a" * 255 + b"U\x06latin1\x86q\x01" + b"h\x00h\x01R" * 99 + b".", "copies more"),
        (b"\x80\x02" + TENSOR.replace(b"K\x03\x85", b"\x8a\xff" + b"\x01" * 255 + b"\x85") + b".", "in a way that torch.save"),
        (module(b"}K\x01" + TENSOR + b"s"), "has no name"),
        (module(b"}X\x03\x00\x00\x00\xed\xa0\x80" + TENSOR + b"s"), "has no name"),
        (module(b"}U\x01wctorch._utils\n_rebuild_qtensor\n)Rs"), "w is a tensor of a kind that is not read"),
    ],
    ids=["classes", "copied dicts", "copied bytes", "huge sizes", "number as a name", "half a character", "kind of tensor"],
)  # fmt: skip
def test_oversized_pickles_and_unnamed_tensors_are_refused(text: bytes, message: str, tmp_path: Path) -> None:
    path = rewritten(tmp_path / "a.pt", lambda parts: parts.update({"data.pkl": text}))
    with pytest.raises(CheckpointError, match=message) as caught:
        read_modules(path)
    assert str(path) in str(caught.value)


def test_one_module_under_many_names_is_counted_with_its_tensors(tmp_path: Path) -> None:
    leaf, top = nn.Module(), nn.Module()
    leaf._buffers.update({str(number): torch.zeros(0) for number in range(500)})
    top._modules.update({str(number): leaf for number in range(500)})
    torch.save({"model": top}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="200,000 modules and tensors"):
        read_modules(tmp_path / "a.pt")


def test_memory_is_bounded_by_the_file_and_not_by_what_its_table_announces(tmp_path: Path) -> None:
    large, buffer = torch.zeros(1 << 20), io.BytesIO()
    torch.save({"model": nn.Linear(1, 1), "views": [large[:] for _ in range(64)]}, buffer)
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr("archive/more", b"")
        archive.getinfo("archive/more").file_size = 1 << 40
    (tmp_path / "a.pt").write_bytes(buffer.getvalue())
    with pytest.raises(CheckpointError, match="times its size"):
        read_modules(tmp_path / "a.pt")


def test_expanded_buffers_and_metadata_of_state_dicts_are_read(tmp_path: Path) -> None:
    layer = nn.Linear(2, 3)
    layer.register_buffer("mask", torch.ones(1).expand(4))
    torch.save({"model": layer, "state": nn.Linear(1, 1).state_dict()}, tmp_path / "a.pt")
    assert read_modules(tmp_path / "a.pt")["model"].tensors["mask"].tolist() == [1, 1, 1, 1]


def test_values_that_cannot_be_written_are_left_out(tmp_path: Path) -> None:
    layer: Any = nn.Linear(2, 3)
    layer.names, layer.huge, layer.half, layer.stride = ["a"], 1 << 70, "\ud800", {"of": [torch.tensor([8.0])]}
    torch.save({"model": layer}, tmp_path / "a.pt")
    attributes = read_modules(tmp_path / "a.pt")["model"].attributes
    assert attributes["names"] == ["a"]
    assert torch.equal(attributes["stride"]["of"][0], torch.tensor([8.0]))
    assert not {"huge", "half"} & attributes.keys()


@pytest.mark.parametrize(
    "text",
    [
        b"\x80\x02.",
        b"\x80\x02t.",
        b"\x80\x02}}K\x01s.",
        b"\x80\x02J\x00",
        b"\x80\x02K\x01Q.",
        b"\x80\x02ctorch\nFloatStorage\n)R.",
    ],
    ids=["empty", "no mark", "key without a hash", "cut number", "persistent number", "called type"],
)
def test_a_damaged_file_of_any_kind_is_one_sentence(text: bytes, tmp_path: Path) -> None:
    path = rewritten(tmp_path / "a.pt", lambda parts: parts.update({"data.pkl": text}))
    with pytest.raises(CheckpointError, match="damaged") as caught:
        load_weights(path)
    assert str(path) in str(caught.value)
