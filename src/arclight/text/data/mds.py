"""Read folders of Mosaic data shards (MDS, version 2) without the package ``streaming``.

`sources` reads text or token ids with `shards_of` and `read_column`. The format is MosaicML's; files are untrusted, so every offset is
checked, and pickled columns are refused.

``index.json`` lists the shards with the name, the encoding and the size of each column. A shard is the number of its samples
(uint32), their places and the end of the last (uint32 each, from the start of the file), a copy of its settings (JSON), and the samples;
a sample is the size of each column that has none of its own (uint32), then the columns. All numbers are little-endian.
Facts: https://docs.mosaicml.com/projects/streaming, "Dataset Format".
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

INDEX = "index.json"
_INDEX_BYTES = 2**28
_UNPICKLED = "pkl"
_NUMBERS = {f"{kind}{bits}" for kind, sizes in {"int": (8, 16, 32, 64), "uint": (8, 16, 32, 64), "float": (16, 32, 64)}.items() for bits in sizes}  # fmt: skip
_DTYPES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32",
           64: "uint64", 65: "int64", 66: "float64"}  # fmt: skip
"""Data types by the code that is written before each array."""


class MDSError(ValueError):
    """Error of a folder of MDS shards that cannot be read, naming the file and the fault."""


@dataclass(frozen=True)
class Column:
    """One column of a shard."""

    name: str
    encoding: str
    size: int | None
    """Bytes of a value; None if each sample stores its own size."""


@dataclass(frozen=True)
class Shard:
    """One shard, as the index lists it."""

    path: Path
    columns: tuple[Column, ...]
    samples: int


def is_mds(folder: Path) -> bool:
    """Return True if ``folder`` has an index that lists MDS shards."""
    path = folder / INDEX
    if not path.is_file() or path.stat().st_size > _INDEX_BYTES:
        return False
    try:
        index = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return False
    shards = index.get("shards") if isinstance(index, dict) else None
    return isinstance(shards, list) and any(isinstance(one, dict) and one.get("format") == "mds" for one in shards)


def shards_of(folder: Path) -> list[Shard]:
    """Read the index of a folder of MDS shards.

    Raises MDSError for another version or format, compressed shards and names of files elsewhere.
    """
    path = folder / INDEX
    try:
        index = json.loads(path.read_bytes())
        if index["version"] != 2:
            raise MDSError(f"{path} is of version {index['version']!r}; version 2 is read")
        return [_shard(folder, path, number, entry) for number, entry in enumerate(index["shards"])]
    except MDSError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MDSError(f"{path} is not an index of MDS shards: {error!r}") from error


def _shard(folder: Path, path: Path, number: int, entry: dict[str, Any]) -> Shard:
    place = f"{path}, shard {number}"
    if entry["format"] != "mds" or entry["version"] != 2:
        raise MDSError(f"{place} is {entry['format']!r} of version {entry['version']!r}; 'mds' of version 2 is read")
    name = entry["raw_data"]["basename"]
    if not isinstance(name, str) or name in ("", ".", "..") or set(name) & set("/\\") or not name.isprintable():
        raise MDSError(f"{place}: {name!r} is not the name of a file beside the index")
    if entry.get("compression") and not (folder / name).is_file():
        raise MDSError(
            f"{place} is compressed ({entry['compression']}), which is not read: decompress {entry['zip_data']['basename']} to {name} "
            "beside it, as zstd -d does"
        )
    columns = []
    for column, encoding, size in zip(
        entry["column_names"], entry["column_encodings"], entry["column_sizes"], strict=True
    ):
        if not isinstance(column, str) or not isinstance(encoding, str):
            raise MDSError(f"{place}: a column is called {column!r}, of encoding {encoding!r}")
        if size is not None and (type(size) is not int or not 0 < size < 2**32):
            raise MDSError(f"{place}: column {column!r} has size {size!r}, need 1 to 4,294,967,295 bytes, or null")
        columns.append(Column(column, encoding, size))
    if len({column.name for column in columns}) != len(columns):
        raise MDSError(f"{place}: two columns have one name")
    samples = entry["samples"]
    if type(samples) is not int or not 0 <= samples < 2**32:
        raise MDSError(f"{place} has {samples!r} samples")
    return Shard(folder / name, tuple(columns), samples)


def read_column(shard: Shard, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the values of one column of a shard, each with its place.

    The other columns are passed over undecoded. Raises MDSError for a column that is not there or whose encoding is not read,
    ``pkl`` among them, and for places that do not lie in the file, before anything is read there.
    """
    known = {column.name: number for number, column in enumerate(shard.columns)}
    if name not in known:
        raise MDSError(f"{shard.path} has no field {name!r}; it has {', '.join(map(repr, known)) or 'none'}")
    decode = _decoder(shard.columns[known[name]].encoding, f"{shard.path}: column {name!r}")
    try:
        file = shard.path.open("rb")
    except FileNotFoundError as error:
        raise MDSError(f"{shard.path} is missing, though {INDEX} lists it") from error
    with file:
        ends = _places(file, shard)
        for number in range(shard.samples):
            place = f"{shard.path}, sample {number}"
            data = _cell(file, int(ends[number]), int(ends[number + 1]), shard.columns, known[name], place)
            try:
                yield place, decode(data)
            except (ValueError, KeyError, IndexError, RecursionError) as error:
                raise MDSError(
                    f"{place}: column {name!r} is not of type {shard.columns[known[name]].encoding}: {error}"
                ) from error


def _places(file: BinaryIO, shard: Shard) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the offsets of the samples in a shard, and the end of the last, checked.

    All lie in the file and ascend.
    """
    size, header = os.fstat(file.fileno()).st_size, 4 * (shard.samples + 2)
    if size < header:
        raise MDSError(
            f"{shard.path} is cut short: {size:,} bytes, its header of {shard.samples:,} samples alone has {header:,}"
        )
    numbers = np.frombuffer(file.read(header), "<u4").astype(np.int64)
    if int(numbers[0]) != shard.samples:
        raise MDSError(f"{shard.path} has {int(numbers[0]):,} samples, {INDEX} says {shard.samples:,}")
    places = numbers[1:]
    if int(places[-1]) > size:
        raise MDSError(f"{shard.path} is cut short: {size:,} bytes, its last sample ends at {int(places[-1]):,}")
    if int(places[0]) < header or (np.diff(places) < 0).any():
        raise MDSError(f"{shard.path} is damaged: places of its samples lie in its header, or before one another")
    return places


def _cell(file: BinaryIO, start: int, end: int, columns: tuple[Column, ...], wanted: int, place: str) -> bytes:
    """Read one column of a sample, which must fill its bytes to the last."""
    unsized = sum(column.size is None for column in columns)
    if end - start < 4 * unsized:
        raise MDSError(f"{place} is damaged: {end - start} bytes, the sizes of its columns alone have {4 * unsized}")
    file.seek(start)
    given = iter(np.frombuffer(file.read(4 * unsized), "<u4").tolist())
    sizes = [next(given) if column.size is None else column.size for column in columns]
    if 4 * unsized + sum(sizes) != end - start:
        raise MDSError(f"{place} is damaged: its columns have {sum(sizes):,} bytes, of {end - start - 4 * unsized:,}")
    file.seek(start + 4 * unsized + sum(sizes[:wanted]))
    return file.read(sizes[wanted])


def _decoder(encoding: str, place: str) -> Callable[[bytes], Any]:
    kind, _, settings = encoding.partition(":")
    if kind == _UNPICKLED:
        raise MDSError(f"{place} is pickled (pkl), which is never read: unpickling runs code of whoever wrote the file")
    if kind == "ndarray":
        return _array_decoder(settings, place)
    if kind == "int" or kind in _NUMBERS:
        dtype = np.dtype("int64" if kind == "int" else kind).newbyteorder("<")
        return lambda data: _number(data, dtype)
    plain: dict[str, Callable[[bytes], Any]] = {"bytes": bytes, "str": bytes.decode, "json": json.loads}
    if kind in plain:
        return plain[kind]
    raise MDSError(
        f"{place} has encoding {encoding!r}; str, bytes, json, int, int8 to uint64, float16 to float64 and ndarray are read"
    )


def _number(data: bytes, dtype: np.dtype[Any]) -> int | float:
    if len(data) != dtype.itemsize:
        raise ValueError(f"{len(data)} bytes, need {dtype.itemsize}")
    number: int | float = np.frombuffer(data, dtype)[0].item()
    return number


def _array_decoder(settings: str, place: str) -> Callable[[bytes], np.ndarray[Any, Any]]:
    """Return a decoder of arrays for settings ``dtype:shape``.

    What is missing in the settings stands before each array.
    """
    dtype_name, _, shape_text = settings.partition(":")
    if dtype_name and dtype_name not in _DTYPES.values():
        raise MDSError(f"{place} has arrays of {dtype_name!r}; {', '.join(_DTYPES.values())} are read")
    try:
        fixed = tuple(int(part) for part in shape_text.split(",")) if shape_text else None
    except ValueError as error:
        raise MDSError(f"{place} has arrays of shape {shape_text!r}: need numbers between commas") from error
    if fixed is not None and min(fixed) < 1:
        raise MDSError(f"{place} has arrays of shape {shape_text!r}: need numbers of 1 or more")

    def decode(data: bytes) -> np.ndarray[Any, Any]:
        at = 0 if dtype_name else 1
        dtype = np.dtype(dtype_name or _DTYPES[data[0]]).newbyteorder("<")
        shape = fixed
        if shape is None:
            axes, width = data[at] >> 2, 1 << (data[at] & 3)
            lengths = data[at + 1 : at + 1 + axes * width]
            if len(lengths) != axes * width or axes > 32:
                raise ValueError(f"the shape of {axes} axes is cut short or too long")
            shape = tuple(np.frombuffer(lengths, f"<u{width}").tolist())
            at += 1 + axes * width
        if math.prod(shape) * dtype.itemsize != len(data) - at:
            raise ValueError(f"{len(data) - at:,} bytes, need {math.prod(shape) * dtype.itemsize:,} for shape {shape}")
        return np.frombuffer(data, dtype, offset=at).reshape(shape)

    return decode
