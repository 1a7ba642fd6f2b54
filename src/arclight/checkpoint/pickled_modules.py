"""Read whole modules that others pickled with ``torch.save``, as named tensors: no class of the file is imported, nothing in it is called.

The pickle machine runs with a table of its own: tensors are rebuilt by functions of this module, containers are plain ones, and every
other class or function is an inert :class:`Record` that keeps what it was given. Of the records, those that look like a
``torch.nn.Module`` are walked for parameters and buffers.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from arclight.checkpoint.errors import CheckpointError

MAX_PICKLE_BYTES = 64 << 20
MAX_OPCODES = 20_000_000
MAX_DEPTH = 100
"""Modules within modules."""
MAX_MODULES = 100_000
MAX_VALUES = 1_000_000
"""Plain values among a module's attributes, each counted as often as it is referred to."""
MAX_REPEATS = 4
"""All tensors together over the file's size: views that share numbers are copied."""

_STORAGES = {
    "FloatStorage": torch.float32, "DoubleStorage": torch.float64, "HalfStorage": torch.float16, "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64, "IntStorage": torch.int32, "ShortStorage": torch.int16, "CharStorage": torch.int8,
    "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
}  # fmt: skip
_REFUSED_OPCODES = {"EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER"}
"""Of classes registered in this process, and of memory outside of the file."""


class Record:
    """Stand-in for an object of a class or function that is not looked up: its name, arguments and state."""

    origin = ""
    state: Any = None

    def __new__(cls, *arguments: Any, **named: Any) -> Record:
        made = super().__new__(cls)
        made.arguments, made.named, made.items = arguments, named, []
        return made

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.arguments: tuple[Any, ...]
        self.named: dict[str, Any]
        self.items: list[Any]

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __call__(self, *arguments: Any) -> Record:
        return Record(*arguments)

    def append(self, item: Any) -> None:
        self.items.append(item)

    extend = append

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"<{self.origin}>"


class _Storage(NamedTuple):
    dtype: torch.dtype
    flat: torch.Tensor


class _Builder:
    """A function that a pickle may call, and may not change."""

    __slots__ = ("_build",)
    _build: Callable[..., Any]

    def __init__(self, build: Callable[..., Any]) -> None:
        object.__setattr__(self, "_build", build)

    def __call__(self, *arguments: Any) -> Any:
        return self._build(*arguments)

    def __setattr__(self, name: str, value: Any) -> None:
        raise CheckpointError("changes what it is read with: it is forged")

    def __setstate__(self, state: Any) -> None:
        raise CheckpointError("changes what it is read with: it is forged")


class PickledModule(NamedTuple):
    """A module as its pickle describes it."""

    tensors: dict[str, torch.Tensor]
    """Parameters and buffers by the names that its state dict would have."""
    attributes: dict[str, Any]
    """Its plain values: numbers, text, lists and dicts of these, and tensors."""


def read_modules(path: Path) -> dict[str, PickledModule]:
    """Read the modules in a file of ``torch.save``: by their keys in its dict, or under ``model`` if it is a module itself.

    Returns an empty dict where there is none. Raises CheckpointError for a file that is damaged or describes tensors that are
    not in it.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            content = _unpickle(archive)
    except (zipfile.BadZipFile, OSError) as error:
        raise CheckpointError(f"{path} is no archive of torch.save ({error}): fetch or write it again") from error
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except (
        pickle.UnpicklingError, ValueError, TypeError, AttributeError, IndexError, KeyError, EOFError, RecursionError,
        OverflowError, MemoryError, RuntimeError, NotImplementedError,
    ) as error:  # fmt: skip
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path} is damaged ({reason}): fetch or write it again") from error
    found = content if isinstance(content, Mapping) else {"model": content}
    modules = {str(key): value for key, value in found.items() if _is_module(value)}
    return {key: _as_module(record, path) for key, record in modules.items()}


def _unpickle(archive: zipfile.ZipFile) -> Any:
    infos = {info.filename: info for info in archive.infolist()}
    named = [name for name in infos if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(named) != 1:
        raise CheckpointError("has no data.pkl, or several: it was not written by torch.save")
    root = named[0].removesuffix("data.pkl")
    if infos[named[0]].file_size > MAX_PICKLE_BYTES:
        raise CheckpointError(f"its description of objects is larger than {MAX_PICKLE_BYTES >> 20} MiB")
    if any(info.compress_type != zipfile.ZIP_STORED for info in infos.values()):
        raise CheckpointError("its parts are compressed, which torch.save never does")
    order = archive.read(f"{root}byteorder") if f"{root}byteorder" in infos else b"little"
    if order != b"little":
        raise CheckpointError("its tensors are written big-endian: convert it on the machine that wrote it")
    text = archive.read(named[0])
    _check_opcodes(text)
    storages: dict[str, _Storage] = {}

    def storage(dtype: torch.dtype, key: str, count: int) -> _Storage:
        if key not in storages:
            name = f"{root}data/{key}"
            if name not in infos:
                raise CheckpointError(f"part {key} of its tensors is missing")
            if infos[name].file_size != count * dtype.itemsize:
                raise CheckpointError(
                    f"part {key} of its tensors has {infos[name].file_size} bytes, {count} numbers of {dtype} are announced"
                )
            flat = (
                torch.frombuffer(bytearray(archive.read(name)), dtype=dtype) if count else torch.empty(0, dtype=dtype)
            )
            storages[key] = _Storage(dtype, flat)
        if storages[key].dtype != dtype:
            raise CheckpointError(f"part {key} of its tensors is announced as {dtype} and as {storages[key].dtype}")
        return storages[key]

    most = MAX_REPEATS * sum(info.file_size for info in infos.values())
    return _InertUnpickler(io.BytesIO(text), storage, most).load()


def _check_opcodes(text: bytes) -> None:
    """Refuse what costs more than the file's size: the machine makes room for the largest number of its memo."""
    count = 0
    for opcode, argument, _ in pickletools.genops(text):
        count += 1
        if opcode.name in _REFUSED_OPCODES:
            raise CheckpointError(
                f"its description of objects has the opcode {opcode.name}, which torch.save never writes"
            )
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > count:
            raise CheckpointError("its description of objects counts objects that are not there")
    if count > MAX_OPCODES:
        raise CheckpointError(f"its description of objects has {count:,} steps, at most {MAX_OPCODES:,} are run")


class _InertUnpickler(pickle.Unpickler):
    """The pickle machine with a table of what may be built; all else becomes records."""

    def __init__(self, file: IO[bytes], storage: Callable[[torch.dtype, str, int], _Storage], most_bytes: int) -> None:
        super().__init__(file, encoding="utf-8")
        self._storage, self._bytes_left = storage, most_bytes
        self._builders = {name: _Builder(build) for name, build in _BUILDERS.items()}
        self._builders["torch._utils", "_rebuild_tensor_v2"] = _Builder(self._tensor)
        self._records: dict[tuple[str, str], type[Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if found := self._builders.get((module, name)):
            return found
        key = (module, name)
        if key not in self._records:
            self._records[key] = type("Record", (Record,), {"origin": f"{module}.{name}"})
        return self._records[key]

    def persistent_load(self, given: Any) -> _Storage:
        if not (isinstance(given, tuple) and len(given) == 5 and given[0] == "storage"):
            raise CheckpointError("refers to something outside that is no tensor")
        _, dtype, key, _, count = given
        if not (isinstance(dtype, torch.dtype) and isinstance(key, str) and isinstance(count, int) and count >= 0):
            raise CheckpointError("describes a tensor's numbers in a way that torch.save does not")
        return self._storage(dtype, key, count)

    def _tensor(self, storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> torch.Tensor:
        """Rebuild a tensor in memory of its own; CheckpointError for one that reaches past what was stored."""
        numbers = [offset, *size, *stride] if isinstance(size, tuple) and isinstance(stride, tuple) else [None]
        whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers)
        if not (isinstance(storage, _Storage) and whole and len(size) == len(stride) and len(size) <= 16):
            raise CheckpointError("describes a tensor in a way that torch.save does not")
        stored, elements = len(storage.flat), math.prod(size)
        last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True)) if elements else 0
        if last >= max(stored, 1) or elements > stored:
            raise CheckpointError(
                f"has a tensor of shape {list(size)} in {stored} stored numbers: it is damaged or forged"
            )
        self._bytes_left -= elements * storage.dtype.itemsize
        if self._bytes_left < 0:
            raise CheckpointError(f"describes tensors of more than {MAX_REPEATS} times its size: it is forged")
        if not elements:
            return torch.empty(size, dtype=storage.dtype)
        return storage.flat.as_strided(size, stride, offset).clone(memory_format=torch.contiguous_format)


def _parameter(tensor: Any, *_: Any) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError("has a parameter that is no tensor")
    return tensor


def _plain(container: type) -> Callable[..., Any]:
    """Return a builder of ``container`` from at most one list, tuple or dict: from nothing that runs."""

    def build(*given: Any) -> Any:
        if len(given) > 1 or not all(isinstance(part, list | tuple | dict | set) for part in given):
            raise CheckpointError(f"builds a {container.__name__} of something else than values")
        return container(*given)

    return build


def _encoded(text: Any, encoding: Any = "latin1", *_: Any) -> bytes:
    """Rebuild bytes, which protocol 2 writes as a call of ``codecs.encode``."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise CheckpointError("encodes something else than bytes")
    return text.encode("latin-1")


_BUILDERS: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch", "Size"): _plain(tuple),
    ("_codecs", "encode"): _encoded,
    ("builtins", "set"): _plain(set),
    ("__builtin__", "set"): _plain(set),
    ("builtins", "frozenset"): _plain(frozenset),
    ("builtins", "list"): _plain(list),
    ("builtins", "dict"): _plain(dict),
}


# ---------------------------------------------------------------- from records to names


_PARTS = ("_modules", "_parameters", "_buffers")


def _is_module(value: Any) -> bool:
    return isinstance(value, Record) and isinstance(value.state, Mapping) and all(
        isinstance(value.state.get(part), Mapping) for part in _PARTS
    )  # fmt: skip


def _as_module(record: Record, path: Path) -> PickledModule:
    tensors = dict(_tensors_of(record, path))
    state: Mapping[Any, Any] = record.state
    budget = [MAX_VALUES]
    attributes = {str(k): v for k, v in state.items() if not str(k).startswith("_") and _is_plain(v, budget)}
    return PickledModule(tensors, attributes)


def _tensors_of(record: Record, path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers by the names that a state dict has, in its order."""
    seen = 0
    stack: list[tuple[Record, str, int]] = [(record, "", 0)]
    while stack:
        module, prefix, depth = stack.pop()
        seen += 1
        if depth > MAX_DEPTH or seen > MAX_MODULES:
            raise CheckpointError(
                f"{path} has more than {MAX_MODULES:,} modules, or more than {MAX_DEPTH} within each other"
            )
        state: Mapping[Any, Any] = module.state
        passing = state.get("_non_persistent_buffers_set")
        left_out = passing if isinstance(passing, set | frozenset | list) else ()
        for part in ("_parameters", "_buffers"):
            for name, value in state[part].items():
                if isinstance(value, torch.Tensor) and not (part == "_buffers" and name in left_out):
                    yield f"{prefix}{name}", value
        for name, child in reversed(state["_modules"].items()):
            if child is not None and not _is_module(child):
                raise CheckpointError(f"{path}: {prefix}{name} is no module")
            if child is not None:
                stack.append((child, f"{prefix}{name}.", depth + 1))


def _is_plain(value: Any, budget: list[int], depth: int = 0) -> bool:
    """Return True for numbers, text, tensors, and lists and dicts of these, as many as ``budget`` allows."""
    budget[0] -= 1
    if value is None or isinstance(value, bool | int | float | str | torch.Tensor):
        return True
    if depth > 10 or budget[0] < 0:
        return False
    if isinstance(value, dict):
        return all(isinstance(k, str | int) and _is_plain(v, budget, depth + 1) for k, v in value.items())
    return isinstance(value, list | tuple) and all(_is_plain(item, budget, depth + 1) for item in value)
