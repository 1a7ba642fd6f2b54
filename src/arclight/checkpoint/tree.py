"""Encode a state dict as JSON and named tensors, the format of checkpoints, and decode it.

This is the format of all checkpoints. JSON holds ``None``, booleans, integers, finite floats, text, lists and dicts with text keys as they
are. Enum members are stored as their value. Other supported types become ``{"$": kind, ...}``, with the kinds in `_KINDS`, which may only grow; all else raises
CheckpointError. (Writers use ``spread`` and ``bits`` for shards alone, see ``sharded.plan``.)

`store`, `async_saver`, ``sharded``, `dcp` and the writer of federated rounds encode by this; whatever opens a checkpoint decodes by it.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from arclight.checkpoint.errors import CheckpointError
from arclight.checkpoint.tensorfile import METADATA, NAMES, as_bytes, check_shape, from_bytes

REST = "state.safetensors"
"""File of the tensors of entries that have no file of their own."""
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_RESERVED = {"state", "manifest"}
"""Names of entries that get no file of their own, as its name would be taken."""
_LONGEST_NAME = 200
"""Most characters in the name of an entry with its own file; file systems take 255 bytes."""
_LONGEST_INT = 14_000
"""Most bits of an integer that is written in decimal; longer ones are written in hexadecimal: Python converts at most 4,300 digits."""
_STEP_NAMES, _EPOCH_NAMES = ("step", "global_step", "steps"), ("epoch", "current_epoch")


@dataclass
class Encoded:
    """Hold an encoded state: a JSON value per top-level entry, and the tensors by file and name."""

    entries: dict[str, Any] = field(default_factory=dict)
    files: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    step: int | None = None
    epoch: int | None = None
    processes: int = 1
    meshes: list[dict[str, int]] = field(default_factory=list)
    """Device meshes that tensors are sharded over: dimension -> size."""


def encode(state: Mapping[str, Any]) -> Encoded:
    """Encode `state` without copying tensors.

    Raises CheckpointError naming the entry that cannot be saved.
    """
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
        raise CheckpointError(f"a checkpoint's state is a dict with text keys, not {_kind(state)}")
    result = Encoded(**counts_of(state))
    rest, taken = Encoder(), set(_RESERVED)
    for name, value in state.items():
        fits = len(name) <= _LONGEST_NAME and _FILE_NAME.fullmatch(name) and name.lower() not in taken
        if not fits or not _is_flat(value):
            result.entries[name] = rest.value(value, (name,))
            continue
        taken.add(name.lower())
        unique, aliases = _split_aliases(value, name)
        file = f"{name}.safetensors"
        result.files[file] = unique
        result.entries[name] = {"$": "tensors", "file": file, "names": list(value), "aliases": aliases}
    if rest.tensors:
        result.files[REST] = rest.tensors
    return result


def decode(entries: Mapping[str, Any], files: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, Any]:
    """Decode entries that `encode` returned.

    Raises KeyError, ValueError or TypeError if they do not fit.
    """
    return {name: _decode(node, files) for name, node in entries.items()}


def files_of(node: Any) -> set[str]:
    """List the tensor files that an encoded value refers to."""
    return {file for file, _ in tensors_of(node)}


def tensors_of(node: Any) -> set[tuple[str, str]]:
    """List file and name of every stored tensor that an encoded value refers to."""
    if isinstance(node, list):
        return set().union(*map(tensors_of, node))
    if not isinstance(node, dict):
        return set()
    if node.get("$") == "tensors":
        return {(node["file"], node["aliases"].get(name, name)) for name in node["names"]}
    if node.get("$") == "spread":
        return {(file, name) for file, name, _ in node["shares"]}
    own = {(REST, node["name"])} if node.get("$") in ("tensor", "array") and "name" in node else set()
    return own.union(*map(tensors_of, node.values()))


class Encoder:
    """Encoder of one tree, which collects each of its tensors once."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}
        self._open: set[int] = set()

    def value(self, item: Any, path: tuple[str, ...]) -> Any:
        if type(item) is int and item.bit_length() > _LONGEST_INT:
            return {"$": "int", "hex": hex(item)}
        if item is None or type(item) in (bool, int, str):
            return item
        if isinstance(item, torch.Tensor):
            return self.tensor(item, path)
        if isinstance(item, (dict, list, tuple, set, frozenset)):
            if id(item) in self._open:
                raise CheckpointError(f"{'.'.join(path)} contains itself, which a checkpoint cannot hold")
            self._open.add(id(item))
            try:
                return self._container(item, path)
            finally:
                self._open.remove(id(item))
        return self._leaf(item, path)

    def _container(self, item: Any, path: tuple[str, ...]) -> Any:
        if isinstance(item, dict):
            if all(type(key) is str and key != "$" for key in item):
                return {key: self.value(value, (*path, key)) for key, value in item.items()}
            names = [(*path, _label(key)) for key in item]
            pairs = [[self.value(k, at), self.value(v, at)] for at, (k, v) in zip(names, item.items(), strict=True)]
            return {"$": "dict", "items": pairs}
        items = [self.value(value, (*path, str(number))) for number, value in enumerate(item)]
        if isinstance(item, list):
            return items
        kind = next(kind for kind in (tuple, set, frozenset) if isinstance(item, kind))
        return {"$": kind.__name__, "items": items}

    def _leaf(self, item: Any, path: tuple[str, ...]) -> Any:
        match item:
            case Enum():
                return self.value(item.value, path)
            case str():
                return str(item)
            case bytes() | bytearray():
                kind = "bytearray" if isinstance(item, bytearray) else "bytes"
                return {"$": kind, "base64": base64.b64encode(item).decode()}
            case np.ndarray():
                return self._array(item, path)
            case np.generic() if (
                item.dtype.kind in "biufc" and item.dtype.itemsize <= 16 and item.dtype.char not in "gG"
            ):
                return {"$": "scalar", "dtype": item.dtype.name, "value": self.value(item.item(), path)}
            case np.generic():
                raise _unfit(item, path)
            case int():
                return self.value(int(item), path)
            case float():
                return float(item) if math.isfinite(item) else {"$": "float", "value": repr(float(item))}
            case complex():
                return {"$": "complex", "parts": [self.value(item.real, path), self.value(item.imag, path)]}
            case PurePath():
                return {"$": "path", "value": str(item)}
            case torch.dtype():
                return {"$": "dtype", "value": str(item).removeprefix("torch.")}
            case torch.device():
                return {"$": "device", "value": str(item)}
        raise _unfit(item, path)

    def tensor(self, tensor: torch.Tensor, path: tuple[str, ...]) -> Any:
        """Encode a tensor as its place in a file."""
        check_tensor(tensor, path)
        key = view_of(tensor)
        if key not in self._names:
            self._names[key] = self._add(tensor if tensor.dtype in NAMES else as_bytes(tensor), path)
        node: dict[str, Any] = {"$": "tensor", "name": self._names[key]}
        if tensor.dtype not in NAMES:  # kept as bytes
            node |= {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        return node

    def _array(self, array: Any, path: tuple[str, ...]) -> Any:
        if type(array) not in (np.ndarray, np.memmap):
            raise _unfit(array, path)
        try:
            tensor = torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))
        except TypeError as error:
            raise CheckpointError(
                f"{'.'.join(path)} is a NumPy array of {array.dtype}, which a checkpoint cannot hold: keep booleans, "
                "integers, floats or complex numbers of at most 64 bits a part"
            ) from error
        node, kind = self.tensor(tensor, path), {"$": "array", "array_dtype": array.dtype.str}
        return kind | {"tensor": node} if node["$"] == "spread" else node | kind

    def _add(self, tensor: torch.Tensor, path: tuple[str, ...]) -> str:
        name = wanted = ".".join(path)
        number = 1
        while name in self.tensors or name == METADATA:
            number += 1
            name = f"{wanted}#{number}"
        self.tensors[name] = tensor
        return name


def _label(key: Any) -> str:
    """Return a key as the error about its value names it."""
    long = isinstance(key, int) and key.bit_length() > _LONGEST_INT
    return f"integer of {key.bit_length()} bits" if long else str(key)


def check_tensor(tensor: torch.Tensor, path: Iterable[str]) -> None:
    """Raise CheckpointError for a tensor that is not dense, plain and in this process."""
    where = ".".join(path)
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise CheckpointError(
            f"{where} is a {_kind(tensor)}: only plain tensors are kept; gather a distributed one with .full_tensor()"
        )
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        raise CheckpointError(f"{where} is not a dense tensor ({tensor.layout}): make it dense with .to_dense() first")
    if tensor.is_meta:
        raise CheckpointError(f"{where} is on the meta device and has no values: initialise it before saving")


def _is_flat(value: Any) -> bool:
    """Return True for a non-empty dict of names to tensors, as a safetensors file has them."""
    return (
        isinstance(value, dict)
        and bool(value)
        and all(type(key) is str and key != METADATA for key in value)
        and all(isinstance(item, torch.Tensor) and item.dtype in NAMES for item in value.values())
    )


def _split_aliases(tensors: Mapping[str, torch.Tensor], entry: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the distinct tensors, and the kept name of each alias."""
    unique: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    names: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        check_tensor(tensor, (entry, name))
        first = names.setdefault(view_of(tensor), name)
        if first == name:
            unique[name] = tensor
        else:
            aliases[name] = first
    return unique, aliases


def view_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for two tensors that are the same view of the same memory."""
    if not tensor.numel():
        return (id(tensor),)
    place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
    return (*place, tensor.is_conj(), tensor.is_neg())


def _decode(node: Any, files: Mapping[str, Mapping[str, torch.Tensor]]) -> Any:
    if isinstance(node, list):
        return [_decode(item, files) for item in node]
    if not isinstance(node, dict):
        return node
    if "$" not in node:
        return {key: _decode(value, files) for key, value in node.items()}
    return _KINDS[node["$"]](node, lambda inner: _decode(inner, files), files)


def _decode_tensor(node: dict[str, Any], files: Mapping[str, Mapping[str, torch.Tensor]]) -> torch.Tensor:
    tensor = files[REST][node["name"]]
    return from_bytes(read_stored(tensor), _dtype(node["dtype"]), node["shape"]) if "dtype" in node else tensor


def _decode_tensors(node: dict[str, Any], files: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    tensors, aliases = files[node["file"]], node["aliases"]
    return {name: tensors[aliases.get(name, name)] for name in node["names"]}


def _decode_sharded(node: dict[str, Any], files: Mapping[str, Mapping[str, torch.Tensor]]) -> torch.Tensor:
    """Decode a full tensor. Raises ValueError if its shards do not cover it."""
    parts = [(files[file][name], offset) for file, name, offset in node["shares"]]
    check_shape(node["shape"])
    if not boxes_cover([(offset, part.shape) for part, offset in parts], node["shape"]):
        raise ValueError(f"the shards of a tensor of shape {node['shape']} do not cover it once")
    dtype = _dtype(node["dtype"])
    if any(part.dtype != dtype for part, _ in parts):
        raise ValueError(f"the shards of a tensor of {dtype} have other types")
    if parts and hasattr(parts[0][0], "joined"):  # of tensors that are still in their files
        joined: torch.Tensor = parts[0][0].joined(parts, node["shape"])
        return joined
    if len(parts) == 1 and list(parts[0][0].shape) == node["shape"]:
        return parts[0][0]
    device = parts[0][0].device if parts else None
    whole = torch.empty(node["shape"], dtype=dtype, device=device)
    for part, offset in parts:
        whole[tuple(slice(start, start + size) for start, size in zip(offset, part.shape, strict=True))] = part
    return whole


def boxes_cover(boxes: list[tuple[list[int], Sequence[int]]], shape: list[int]) -> bool:
    """Return whether boxes (offset, shape) make up a whole without gap or overlap."""
    if any(len(offset) != len(shape) or any(type(start) is not int for start in offset) for offset, _ in boxes):
        return False
    if sum(math.prod(size) for _, size in boxes) != math.prod(shape):
        return False
    if len(boxes) < 2 or not shape:
        return all(not any(offset) and list(size) == shape for offset, size in boxes)
    low = np.array([offset for offset, _ in boxes])
    high = low + np.array([tuple(size) for _, size in boxes])
    if (low < 0).any() or (high > np.array(shape)).any():
        return False
    shared = (np.minimum(high[:, None], high) > np.maximum(low[:, None], low)).all(-1)
    return int(shared.sum()) == int(((high > low).all(-1)).sum())  # each box meets itself alone, an empty one nothing


def _decode_array(node: dict[str, Any], inner: Callable[[Any], Any], files: Any) -> np.ndarray[Any, Any]:
    tensor = inner(node["tensor"]) if "tensor" in node else _decode_tensor(node, files)
    values: np.ndarray[Any, Any] = read_stored(tensor).cpu().numpy().astype(_numeric(node["array_dtype"]))
    return values


def _numeric(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.kind not in "biufc":
        raise ValueError(f"{name} is not a numeric type")
    return dtype


def read_stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor that may still be in its file."""
    read: torch.Tensor = tensor.read() if hasattr(tensor, "read") else tensor
    return read


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is not a dtype of this torch")
    return dtype


def _complex(real: float, imaginary: float) -> complex:
    return complex(real, imaginary)


def _device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"{name} is not a device of this torch") from error


_Kind = Callable[[dict[str, Any], Callable[[Any], Any], Mapping[str, Mapping[str, torch.Tensor]]], Any]
_KINDS: dict[str, _Kind] = {
    "tensors": lambda node, inner, files: _decode_tensors(node, files),
    "tensor": lambda node, inner, files: _decode_tensor(node, files),
    "array": _decode_array,
    "spread": lambda node, inner, files: _decode_sharded(node, files),
    "bits": lambda node, inner, files: from_bytes(read_stored(inner(node["of"])), _dtype(node["dtype"]), node["shape"]),
    "scalar": lambda node, inner, files: _numeric(node["dtype"]).type(inner(node["value"])),
    "tuple": lambda node, inner, files: tuple(inner(node["items"])),
    "set": lambda node, inner, files: set(inner(node["items"])),
    "frozenset": lambda node, inner, files: frozenset(inner(node["items"])),
    "dict": lambda node, inner, files: {inner(key): inner(value) for key, value in node["items"]},
    "float": lambda node, inner, files: float(node["value"]),
    "int": lambda node, inner, files: int(node["hex"], 16),
    "complex": lambda node, inner, files: _complex(*map(inner, node["parts"])),
    "bytes": lambda node, inner, files: base64.b64decode(node["base64"], validate=True),
    "bytearray": lambda node, inner, files: bytearray(base64.b64decode(node["base64"], validate=True)),
    "path": lambda node, inner, files: Path(node["value"]),
    "dtype": lambda node, inner, files: _dtype(node["value"]),
    "device": lambda node, inner, files: _device(node["value"]),
}


def counts_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return step and epoch of a state, as `Encoded` has them."""
    return {"step": _count(state, _STEP_NAMES), "epoch": _count(state, _EPOCH_NAMES)}


def _count(state: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """Return a count under its usual names, at the top or in the entry `progress`."""
    progress = state.get("progress")
    for place in (state, progress if isinstance(progress, Mapping) else {}):
        for name in names:
            if (count := _whole(place.get(name))) is not None:
                return count
    return None


def _whole(value: Any) -> int | None:
    """Return the integer in a number of Python or NumPy, or in a one-element tensor."""
    if (type(value) is torch.Tensor and value.numel() == 1 and not value.is_meta) or (
        isinstance(value, np.generic | np.ndarray) and value.size == 1
    ):
        value = value.item()
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else None


def _kind(item: object) -> str:
    kind = type(item)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _unfit(item: object, path: tuple[str, ...]) -> CheckpointError:
    return CheckpointError(
        f"{'.'.join(path)} is a {_kind(item)}, which a checkpoint cannot hold: keep numbers, text, bytes, paths, "
        "tensors, arrays, and lists, tuples, sets and dicts of them"
    )
