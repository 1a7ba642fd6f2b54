"""Write and read safetensors files in one pass that also hashes them.

A file is the length of the header (8 bytes, little-endian), the header (JSON: name -> dtype, shape, data_offsets) and
the tensors' bytes without gaps; see https://github.com/huggingface/safetensors. Any safetensors reader opens these
files. The library's own writer would need a second pass over the data for the hash, and tensors of its reader become
invalid when the file changes.

`store`, ``sharded``, `conversion`, and federated blobs and rounds write by this; the names in `DTYPES` are also in federated manifests.
The format on disk is fixed, and files are untrusted when they are read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from arclight.checkpoint.files import HashedFile

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
"""The format's names of data types; tensors of others cannot be written."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
METADATA = "__metadata__"
"""Name of the header's entry that is no tensor."""
_MAX_HEADER = 100_000_000  # the format's own limit


def write_tensors(file: HashedFile, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write dense tensors of any of `DTYPES`, from any device, aligned by width."""
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    write_header(file, {name: (tensors[name].dtype, tuple(tensors[name].shape)) for name in order})
    for name in order:
        write_values(file, tensors[name])


def write_header(file: HashedFile, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
    """Write the header of a file; the values must follow in order by `write_values`.

    Give the widest dtypes first. Raises ValueError for a tensor called as the format's own entry, which no reader would find.
    """
    if METADATA in tensors:
        raise ValueError(f"a safetensors file cannot hold a tensor called {METADATA!r}: rename it")
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)


def write_values(file: HashedFile, tensor: torch.Tensor) -> None:
    """Write the values of the next tensor after `write_header`."""
    if tensor.numel():
        file.write(memory_of(as_bytes(tensor.cpu())))


@dataclass(frozen=True)
class Slot:
    """Position, type and shape of a tensor in its file."""

    dtype: torch.dtype
    shape: list[int]
    begin: int
    """First byte of the tensor, counted from the start of the file."""
    bytes: int


def read_header(file: HashedFile, size: int) -> dict[str, Slot]:
    """Read the header of a file of `size` bytes: its tensors in order of position.

    Leaves the file at the first tensor. Raises ValueError, KeyError, TypeError, AttributeError or EOFError for a malformed file.
    """
    length = int.from_bytes(file.read(8), "little")
    if length > min(_MAX_HEADER, size):
        raise ValueError(f"its header claims {length} bytes, the file has {size}")
    header = parse_json(file.read(length))
    header.pop(METADATA, None)
    slots: dict[str, Slot] = {}
    position = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape, (begin, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        check_shape(shape)
        fits = end - begin == math.prod(shape) * dtype.itemsize
        if begin != position or not fits or 8 + length + end > size:
            raise ValueError(f"the place of tensor {name} cannot be")
        position = end
        slots[name] = Slot(dtype, shape, 8 + length + begin, end - begin)
    if 8 + length + position != size:
        raise ValueError(f"{size - 8 - length - position} bytes follow the last tensor")
    return slots


def check_shape(shape: Any) -> None:
    """Raise ValueError unless `shape` is a list of sizes of a tensor below 2^56 elements."""
    if not isinstance(shape, list) or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"{shape!r} is not a shape: need a list of sizes of 0 or more")
    if math.prod(size or 1 for size in shape) >= 1 << 56:
        raise ValueError(f"a tensor of shape {shape} is too large")


def parse_json(text: bytes) -> Any:
    """Parse JSON strictly.

    Raises ValueError for a repeated key, NaN and infinity, which Python's parser accepts.
    """

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            names = [name for name, _ in items]
            raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} comes twice")
        return found

    def constant(name: str) -> Any:
        raise ValueError(f"{name} is not valid JSON")

    return json.loads(text, object_pairs_hook=pairs, parse_constant=constant)


def read_tensors(
    file: HashedFile,
    size: int,
    device: str | torch.device = "cpu",
    wanted: Callable[[str], bool] = lambda name: True,
) -> dict[str, torch.Tensor]:
    """Read the `wanted` tensors of a file of `size` bytes; hash the others.

    Raises the errors of `read_header`.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, slot in read_header(file, size).items():
        if not wanted(name):
            file.skip(slot.bytes)
            continue
        raw = torch.empty(slot.bytes, dtype=torch.uint8)
        file.readinto(memory_of(raw))
        tensors[name] = from_bytes(raw, slot.dtype, slot.shape).to(device)
    return tensors


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor's values as flat uint8, sharing memory if it is contiguous.

    A single element counts as contiguous in any stride, and only a stride of 1 can be viewed as bytes.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def from_bytes(raw: torch.Tensor, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    """Return the tensor of bytes, sharing memory; the inverse of `as_bytes`.

    Raises ValueError for a shape of another size.
    """
    check_shape(shape)
    if math.prod(shape) * dtype.itemsize != raw.numel():
        raise ValueError(f"{raw.numel()} bytes do not hold a tensor of shape {shape} and {dtype}")
    return raw.view(dtype).reshape(shape) if raw.numel() else torch.empty(shape, dtype=dtype)


def memory_of(raw: torch.Tensor) -> memoryview:
    return memoryview(raw.numpy())  # type: ignore[arg-type]
