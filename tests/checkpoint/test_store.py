"""Saved values come back bit for bit; unsupported values and damage are refused by name."""

from __future__ import annotations

import enum
import json
import math
import shutil
import socket
from collections import Counter, OrderedDict, namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import arclight
from arclight.checkpoint import CheckpointError, load, save, verify
from arclight.checkpoint.manifest import read_manifest

torch.set_num_threads(1)


def equal(a, b) -> bool:
    """Equality of value, type and, for floats, bits."""
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and a.contiguous().reshape(-1).view(torch.uint8).equal(b.contiguous().reshape(-1).view(torch.uint8))
        )
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(type(k) is type(m) and equal(a[k], b[m]) for k, m in zip(a, b, strict=True))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, float) and math.isnan(a):
        return math.isnan(b)
    return a == b and (not isinstance(a, float) or math.copysign(1, a) == math.copysign(1, b))


def round_trip(folder: Path, state):
    return load(save(folder / "checkpoint", state))


class Colour(enum.Enum):
    RED = "r"


class Level(enum.IntEnum):
    LOW = 1


Point = namedtuple("Point", "x y")


def test_every_kind_of_value_comes_back(tmp_path) -> None:
    state = {
        "plain": [None, True, False, 0, -1, 2**80, 1.5, -0.0, 1e-300, "", "text", "\u00e9\u4e2d\n", "\ud800"],
        "floats": [math.nan, math.inf, -math.inf, 0.1 + 0.2, 5e-324],
        "tuples": (1, (2, [3, ()]), ({"a": (4,)},)),
        "keys": {1: "int", "1": "text", (2, "x"): "tuple", False: "b", None: 0, 2.5: 1, b"k": 2, "$": 3},
        "tagged": {"$": "tuple", "items": [1]},
        "bytes": [b"", b"\x00\xff", bytearray(b"ab")],
        "path": Path("a/b"),
        "sets": [{1, 2, "x"}, frozenset({(1, 2)})],
        "complex": [1 + 2j, complex(math.inf, -0.0)],
        "scalars": [
            np.float32(0.1),
            np.int8(-3),
            np.bool_(True),
            np.float64(math.nan),
            np.complex64(1j),
            np.uint64(2**63),
        ],
        "arrays": {
            "f": np.arange(6.0).reshape(2, 3),
            "transposed": np.arange(6).reshape(2, 3).T.copy(),
            "zero_d": np.array(3.5, dtype=np.float16),
            "empty": np.zeros((0, 3), dtype=np.uint16),
            "bool": np.array([True, False]),
            "big_endian": np.arange(3, dtype=">i4"),
            "complex": np.array([1 + 1j]),
            "reversed": np.arange(4)[::-1].copy(),
        },
        "torch": [torch.float32, torch.device("cuda", 1), torch.bfloat16],
        "empty": {},
        "nested": {"a": {"b": {0: {"c": torch.arange(3)}}}},
    }
    assert equal(round_trip(tmp_path, state), state)


def test_containers_and_enums_come_back_as_their_plain_kind(tmp_path) -> None:
    state = {"o": OrderedDict(b=1, a=2), "c": Counter("aab"), "p": Point(1, 2), "e": Colour.RED, "l": Level.LOW}
    expected = {"o": {"b": 1, "a": 2}, "c": {"a": 2, "b": 1}, "p": (1, 2), "e": "r", "l": 1}
    assert equal(round_trip(tmp_path, state), expected)


ALL_DTYPES = sorted(
    {
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype)
        and not str(dtype).startswith(("torch.q", "torch.bits", "torch.int1", "torch.uint1"))
        and str(dtype).removeprefix("torch.") not in {f"{sign}int{n}" for sign in ("", "u") for n in range(1, 8)}
    },
    key=str,
) + [torch.int16, torch.uint16]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_dtype(dtype, tmp_path) -> None:
    raw = torch.arange(64, dtype=torch.uint8)
    values = (raw % 2).bool() if dtype == torch.bool else raw.view(dtype)
    state = {
        "model": {"w": values, "m": values.reshape(2, -1)},
        "s": [values[0], values[:0], values.reshape(2, -1).t()],
    }
    assert equal(round_trip(tmp_path, state), state)
    assert verify(tmp_path / "checkpoint") == []


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.uint64, torch.bool, torch.complex64], ids=str
)
def test_weights_open_with_the_safetensors_library(dtype, tmp_path) -> None:
    ones = torch.ones(3, 4).to(dtype)
    weights = {
        "long.name.weight": ones,
        "a": torch.tensor(2.0),
        "e": torch.zeros(0, 2),
        "t": torch.arange(6).view(2, 3).t(),
    }
    save(tmp_path / "c", {"model": weights})
    theirs = load_file(tmp_path / "c" / "model.safetensors")
    assert set(theirs) == set(weights)
    assert all(equal(theirs[name], weights[name].contiguous()) for name in weights)


def test_views_parameters_and_conjugates(tmp_path) -> None:
    base = torch.randn(6, 4, dtype=torch.complex64)
    state = {
        "model": {
            "param": torch.nn.Parameter(torch.randn(3)),
            "rows": base[::2],
            "conj": base.conj(),
            "expanded": torch.randn(1, 3).expand(4, 3),
            "imag": base.conj().imag,
        }
    }
    loaded = round_trip(tmp_path, state)["model"]
    for name, tensor in state["model"].items():
        assert torch.equal(loaded[name], tensor.detach().resolve_conj()), name
        assert type(loaded[name]) is torch.Tensor
    assert len({t.untyped_storage().data_ptr() for t in loaded.values()}) == 5


@pytest.mark.parametrize("entry", ["model", "other"])
def test_single_elements_of_any_stride(entry, tmp_path) -> None:
    whole = torch.arange(9.0).view(3, 3)
    views = {"row": whole[:, :1][:1], "turned": whole.t()[:1, 1:2], "part": torch.tensor([1 + 2j]).conj().imag}
    assert any(view.stride() != (1,) for view in views.values())
    state = views if entry == "model" else [*views.values()]
    loaded = load(save(tmp_path / "c", {entry: state}))[entry]
    for found, view in zip(loaded.values() if entry == "model" else loaded, views.values(), strict=True):
        assert torch.equal(found, view)


def test_tied_tensors_are_stored_once_and_come_back_tied(tmp_path) -> None:
    weight = torch.randn(100, 100)
    other = weight.clone()
    state = {
        "model": {"emb": weight, "head": weight, "separate": other, "part": weight[:50]},
        "rest": {"a": [other, other], "b": other, "f4": None},
    }
    loaded = round_trip(tmp_path, state)
    assert equal(loaded, state)
    assert loaded["model"]["emb"].data_ptr() == loaded["model"]["head"].data_ptr()
    assert loaded["model"]["separate"].data_ptr() != loaded["model"]["head"].data_ptr()
    assert loaded["rest"]["a"][0].data_ptr() == loaded["rest"]["a"][1].data_ptr() == loaded["rest"]["b"].data_ptr()
    assert (tmp_path / "checkpoint" / "model.safetensors").stat().st_size < 2.6 * weight.nbytes
    assert (tmp_path / "checkpoint" / "state.safetensors").stat().st_size < 1.1 * weight.nbytes


def test_files_are_named_after_entries(tmp_path) -> None:
    tensors = {"w": torch.zeros(2)}
    names = ["model", "ema", "state", "manifest", "Model", "a/b", "..", ".hidden", "sp ace", "nested", "reserved"]
    state = {name: dict(tensors) for name in names}
    state["nested"] = {"deeper": dict(tensors)}
    state["reserved"] = {"__metadata__": torch.zeros(1)}
    path = save(tmp_path / "c", state)
    files = {file.name for file in path.iterdir()}
    assert files == {"model.safetensors", "ema.safetensors", "state.safetensors", "state.json", "manifest.json"}
    assert equal(load(path), state)


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.builds(lambda values: torch.tensor(values, dtype=torch.float64), st.lists(st.floats(), max_size=3))
)
keys = st.text(max_size=4) | st.integers() | st.tuples(st.integers(), st.text(max_size=2))
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(state=st.dictionaries(st.text(max_size=6), trees, max_size=4))
def test_any_tree_comes_back(state, tmp_path) -> None:
    assert equal(round_trip(tmp_path, state), state)


class Unrelated:
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (socket.socket, r"callbacks\.MyThing\.foo is a socket\.socket"),
        (Unrelated, r"callbacks\.MyThing\.foo is a .*Unrelated"),
        (lambda: print, r"callbacks\.MyThing\.foo is a builtin_function"),
        (lambda: [0, {"x": (1, object())}], r"callbacks\.MyThing\.foo\.1\.x\.1 is a object"),
        (lambda: np.array(["text"]), r"foo is a NumPy array of <U4"),
        (lambda: np.array([object()]), r"foo is a NumPy array of object"),
        (lambda: np.datetime64("2020-01-01"), r"foo is a numpy\.datetime64"),
        (lambda: np.longdouble(1), r"foo is a numpy\.longdouble"),
        (lambda: torch.eye(2).to_sparse(), r"foo is not a dense tensor"),
        (lambda: torch.empty(2, device="meta"), r"foo is on the meta device"),
    ],
)
def test_unsupported_values_are_named(value, message, tmp_path) -> None:
    with pytest.raises(CheckpointError, match=message):
        save(tmp_path / "c", {"callbacks": {"MyThing": {"foo": value()}}})
    assert list(tmp_path.iterdir()) == []


def test_other_impossible_states(tmp_path) -> None:
    loop: list = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match=r"a\.0 contains itself"):
        save(tmp_path / "c", {"a": loop})
    for state in ([1], {1: 2}, None):
        with pytest.raises(CheckpointError, match="dict with text keys"):
            save(tmp_path / "c", state)
    with pytest.raises(CheckpointError, match=r"model\.w is on the meta device"):
        save(tmp_path / "c", {"model": {"w": torch.empty(2, device="meta")}})


def test_the_manifest_names_the_release_that_saved(tmp_path) -> None:
    save(tmp_path / "c", {"a": 1})
    assert read_manifest(tmp_path / "c").arclight == arclight.__version__


def test_only_some_entries(tmp_path) -> None:
    path = save(tmp_path / "c", {"model": {"w": torch.ones(2)}, "optimizer": {0: torch.zeros(1)}, "step": 4})
    assert equal(load(path, only=["model", "step"]), {"model": {"w": torch.ones(2)}, "step": 4})
    (path / "state.safetensors").unlink()  # not needed for these
    assert load(path, only=["step"]) == {"step": 4}
    with pytest.raises(CheckpointError, match="no entry 'weights'; it has model, optimizer, step"):
        load(path, only=["weights"])


def test_map_location(tmp_path) -> None:
    path = save(tmp_path / "c", {"model": {"w": torch.ones(2)}, "a": np.ones(2), "t": [torch.ones(1)]})
    loaded = load(path, map_location="meta", only=["model", "t"])
    assert loaded["model"]["w"].is_meta
    assert loaded["t"][0].is_meta


def test_loaded_tensors_do_not_depend_on_the_files(tmp_path) -> None:
    path = save(tmp_path / "c", {"model": {"w": torch.ones(1000)}})
    weights = load(path)["model"]["w"]
    (path / "model.safetensors").write_bytes(bytes(10))
    shutil.rmtree(path)
    assert torch.equal(weights, torch.ones(1000))


# Damage


@pytest.fixture
def good(tmp_path) -> Path:
    return save(tmp_path / "good", {"model": {"w": torch.ones(50)}, "opt": [torch.zeros(3)], "step": 7})


@pytest.mark.parametrize("name", ["model.safetensors", "state.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped", "longer", "empty"])
def test_damage_names_the_file_and_what_to_do(good, name, damage) -> None:
    file = good / name
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(content[:-1])
    elif damage == "flipped":
        middle = len(content) // 2
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    elif damage == "longer":
        file.write_bytes(content + b"x")
    else:
        file.write_bytes(b"")
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")) as caught:
        load(good)
    if not (name == "manifest.json" and damage == "missing"):
        assert "find_last" in str(caught.value)
    assert len(verify(good)) == 1
    assert name in verify(good)[0]


def test_a_flipped_bit_anywhere_is_noticed(good) -> None:
    for file in good.iterdir():
        content = file.read_bytes()
        for position in range(0, len(content), max(1, len(content) // 40)):
            file.write_bytes(content[:position] + bytes([content[position] ^ 4]) + content[position + 1 :])
            with pytest.raises(CheckpointError):
                load(good)
        file.write_bytes(content)
    assert load(good)["step"] == 7


def test_without_verification_the_hash_is_not_compared(good) -> None:
    file = good / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-4] + np.float32(3).tobytes())
    assert load(good, verify=False)["model"]["w"][-1] == 3


def test_load_refuses_paths_without_a_checkpoint(tmp_path, good) -> None:
    with pytest.raises(CheckpointError, match="nothing has that name"):
        load(tmp_path / "absent")
    file = tmp_path / "weights.pt"
    file.write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"is a file.*convert"):
        load(file)
    with pytest.raises(CheckpointError, match=r"no manifest\.json.*did you mean .*good"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "message"), [("version", 99, "format version 99"), ("format", "x", "format 'x'")]
)
def test_other_formats_and_versions(good, key, value, message) -> None:
    body = json.loads((good / "manifest.json").read_text())
    (good / "manifest.json").write_text(json.dumps(body | {key: value}))
    with pytest.raises(CheckpointError, match=message):
        load(good)


def test_hostile_headers_are_refused_without_large_allocations(good) -> None:
    import hashlib

    from arclight.checkpoint.manifest import FileRecord, read_manifest

    headers = [
        {"w": {"dtype": "F32", "shape": [2**60], "data_offsets": [0, 2**62]}},
        {"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}},
        {"w": {"dtype": "nonsense", "shape": [1], "data_offsets": [0, 4]}},
        {"w": {"dtype": "F32", "shape": [1]}},
        ["w"],
    ]
    for header in headers:
        text = json.dumps(header).encode()
        content = len(text).to_bytes(8, "little") + text + bytes(4)
        (good / "model.safetensors").write_bytes(content)
        manifest = read_manifest(good)
        manifest.files["model.safetensors"] = FileRecord(sha256=hashlib.sha256(content).hexdigest(), bytes=len(content))
        (good / "manifest.json").write_text(manifest.to_json())
        with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
            load(good)
