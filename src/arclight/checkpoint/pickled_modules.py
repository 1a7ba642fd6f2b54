"""Read modules that others pickled with ``torch.save``, without running their code.

The unpickler runs with a table of its own: tensors are rebuilt by functions of this module, containers are plain ones, and every other
class or function is an inert :class:`Record` that keeps its arguments. Records that look like a ``torch.nn.Module`` are walked for
parameters and buffers, by the names of a state dict.

`conversion` calls `read_modules` for files that hold a module instead of a state dict, such as YOLOv5's. Files are untrusted: the
limits may be raised, but no class or function that a file names may ever be imported or called.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from arclight.checkpoint.errors import CheckpointError

MAX_PICKLE_BYTES = 64 << 20
MAX_OPCODES = 5_000_000
MAX_CLASSES = 10_000
MAX_DEPTH = 100
"""Greatest depth of nested modules."""
MAX_PARTS = 200_000
"""Most modules and tensors, each counted once for each reference."""
MAX_NAME = 2_000
"""Most characters in a tensor's name."""
MAX_VALUES = 1_000_000
"""Most plain values and characters in a module's attributes, each counted once for each reference."""
MAX_REPEATS = 4
"""Most bytes of all tensors together, as a multiple of the file's size: views that share memory are copied."""

_STORAGES = {
    "FloatStorage": torch.float32, "DoubleStorage": torch.float64, "HalfStorage": torch.float16, "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64, "IntStorage": torch.int32, "ShortStorage": torch.int16, "CharStorage": torch.int8,
    "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
}  # fmt: skip
_REFUSED_OPCODES = {"EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER"}
"""Opcodes that refer to classes registered in this process, or to memory outside of the file."""


class Record:
    """Stand-in for an object whose class is not looked up: its name, arguments and state."""

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


class _Sealed:
    """Holder of a value that a pickle may refer to but not change.

    Tensors have a ``__setstate__`` that reaches any memory.
    """

    __slots__ = ("value",)
    value: Any

    def __init__(self, value: Any) -> None:
        object.__setattr__(self, "value", value)

    def __setattr__(self, name: str, value: Any) -> None:
        raise CheckpointError("changes what it is read with: it is forged")

    def __setstate__(self, state: Any) -> None:
        raise CheckpointError("changes what it is read with: it is forged")


class _Storage(_Sealed):
    __slots__ = ()
    value: torch.Tensor


class _Tensor(_Sealed):
    __slots__ = ()
    value: torch.Tensor


class _Builder(_Sealed):
    """A function that a pickle may call."""

    __slots__ = ()
    value: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        return self.value(*arguments)


class _OrderedDict(dict[Any, Any]):
    """Stand-in for an OrderedDict, whose attributes (the metadata of state dicts) are not kept."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        pass


class PickledModule(NamedTuple):
    """A module as its pickle describes it."""

    tensors: dict[str, torch.Tensor]
    """Parameters and buffers by the names that its state dict would have."""
    attributes: dict[str, Any]
    """Plain values of the module: numbers, text, lists and dicts of these, and tensors."""


def read_modules(path: Path) -> dict[str, PickledModule]:
    """Read the modules in a file of ``torch.save``, by their keys in its dict.

    The key is ``model`` if the file is a module itself. Returns an empty dict if there is none. Raises CheckpointError for a file that
    is damaged, beyond the limits, or describes tensors that are not in it.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            content = _unpickle(archive, path.stat().st_size)
        found = content if isinstance(content, Mapping) else {"model": content}
        return {str(key): _as_module(value) for key, value in found.items() if _is_module(value)}
    except (zipfile.BadZipFile, OSError) as error:
        raise CheckpointError(f"{path} is not an archive of torch.save ({error}): fetch or write it again") from error
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except (
        pickle.UnpicklingError, ValueError, TypeError, AttributeError, IndexError, KeyError, EOFError, RecursionError,
        OverflowError, MemoryError, RuntimeError, NotImplementedError,
    ) as error:  # fmt: skip
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise CheckpointError(f"{path} is damaged ({reason}): fetch or write it again") from error


def _unpickle(archive: zipfile.ZipFile, size_bytes: int) -> Any:
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
                raise CheckpointError(f"part {key[:40]} of its tensors is missing")
            if infos[name].file_size != count * dtype.itemsize:
                raise CheckpointError(
                    f"part {key} of its tensors has {infos[name].file_size} bytes, {count} numbers of {dtype} are announced"
                )
            flat = (
                torch.frombuffer(bytearray(archive.read(name)), dtype=dtype) if count else torch.empty(0, dtype=dtype)
            )
            storages[key] = _Storage(flat)
        if (known := storages[key].value.dtype) != dtype:
            raise CheckpointError(f"part {key} of its tensors is announced as {dtype} and as {known}")
        return storages[key]

    return _InertUnpickler(text, storage, MAX_REPEATS * size_bytes).load()


def _check_opcodes(text: bytes) -> None:
    """Refuse opcodes that cost more than the file's size, such as large memo numbers."""
    for count, (opcode, argument, _) in enumerate(pickletools.genops(text), start=1):
        if count > MAX_OPCODES:
            raise CheckpointError(f"its description of objects has more than {MAX_OPCODES:,} steps")
        if opcode.name in _REFUSED_OPCODES:
            raise CheckpointError(
                f"its description of objects has the opcode {opcode.name}, which torch.save never writes"
            )
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > count:
            raise CheckpointError("its description of objects counts objects that are missing")


class _InertUnpickler(pickle.Unpickler):
    """The pickle machine with a table of what may be built; all else becomes records."""

    def __init__(self, text: bytes, storage: Callable[[torch.dtype, str, int], _Storage], most_bytes: int) -> None:
        super().__init__(io.BytesIO(text), encoding="utf-8")
        self._storage, self._bytes_left, self._values_left = storage, most_bytes, len(text)
        self._builders = {name: _Builder(partial(self._build, build)) for name, build in _BUILDERS.items()}
        self._builders["torch._utils", "_rebuild_tensor_v2"] = _Builder(self._tensor)
        self._records: dict[tuple[str, str], type[Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if found := self._builders.get((module, name)):
            return found
        key = (module, name)
        if key not in self._records:
            if len(self._records) == MAX_CLASSES:
                raise CheckpointError(f"names more than {MAX_CLASSES:,} classes: it is forged")
            self._records[key] = type("Record", (Record,), {"origin": f"{module}.{name}"})
        return self._records[key]

    def _build(self, build: Callable[..., Any], *given: Any) -> Any:
        """Run a builder, within a budget of values: each takes a byte of the file at least."""
        self._values_left -= sum(len(part) for part in given if isinstance(part, str | list | tuple | dict | set))
        if self._values_left < 0:
            raise CheckpointError("copies more values than it has: it is forged")
        return build(*given)

    def persistent_load(self, given: Any) -> _Storage:
        if not (isinstance(given, tuple) and len(given) == 5 and given[0] == "storage"):
            raise CheckpointError("refers to an outside object that is not a tensor")
        _, dtype, key, _, count = given
        if not (isinstance(dtype, torch.dtype) and isinstance(key, str) and isinstance(count, int) and count >= 0):
            raise CheckpointError("has tensors of a type that is not read here, or damaged ones")
        return self._storage(dtype, key, count)

    def _tensor(self, storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> _Tensor:
        """Rebuild a tensor in memory of its own.

        Raises CheckpointError for one that reaches past what was stored.
        """
        numbers = [offset, *size, *stride] if isinstance(size, tuple) and isinstance(stride, tuple) else [None]
        whole = all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 63 for n in numbers)
        if not (isinstance(storage, _Storage) and whole and len(size) == len(stride) and len(size) <= 16):
            raise CheckpointError("describes a tensor in a way that torch.save does not")
        flat = storage.value
        stored, elements = len(flat), math.prod(size)
        last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True)) if elements else 0
        if elements and last >= stored:
            raise CheckpointError(
                f"has a tensor of shape {list(size)} in {stored} stored numbers: it is damaged or forged"
            )
        self._bytes_left -= elements * flat.dtype.itemsize
        if self._bytes_left < 0:
            raise CheckpointError(f"describes tensors of more than {MAX_REPEATS} times its size: it is forged")
        if not elements:
            return _Tensor(torch.empty(size, dtype=flat.dtype))
        return _Tensor(flat.as_strided(size, stride, offset).clone(memory_format=torch.contiguous_format))


def _parameter(tensor: Any, *_: Any) -> _Tensor:
    if not isinstance(tensor, _Tensor):
        raise CheckpointError("has a parameter of a kind that is not read here")
    return tensor


def _plain(container: type) -> Callable[..., Any]:
    """Return a builder of ``container`` from at most one list, tuple, dict or set."""

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
    ("collections", "OrderedDict"): _plain(_OrderedDict),
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


def _as_module(record: Record) -> PickledModule:
    tensors = dict(_tensors_of(record))
    state: Mapping[Any, Any] = record.state
    budget = [MAX_VALUES]
    named = {key: value for key, value in state.items() if isinstance(key, str) and not key.startswith("_")}
    attributes = {
        key: _opened(value) for key, value in named.items() if _is_plain(key, budget) and _is_plain(value, budget)
    }
    return PickledModule(tensors, attributes)


def _tensors_of(record: Record) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers by the names that a state dict has, in its order."""
    seen = 0
    stack: list[tuple[Record, str, int]] = [(record, "", 0)]
    while stack:
        module, prefix, depth = stack.pop()
        state: Mapping[Any, Any] = module.state
        seen += 1 + sum(len(state[part]) for part in _PARTS)
        if depth > MAX_DEPTH or seen > MAX_PARTS:
            raise CheckpointError(
                f"has more than {MAX_PARTS:,} modules and tensors, or more than {MAX_DEPTH} modules within each other"
            )
        passing = state.get("_non_persistent_buffers_set")
        left_out = passing if isinstance(passing, set | frozenset) else ()
        for part in ("_parameters", "_buffers"):
            for name, value in state[part].items():
                if value is None or (part == "_buffers" and name in left_out):
                    continue
                if not isinstance(value, _Tensor):
                    raise CheckpointError(
                        f"{_named(prefix, name)} is a tensor of a kind that is not read here: {value!r:.80}"
                    )
                yield _named(prefix, name), value.value
        for name, child in reversed(state["_modules"].items()):
            if child is not None and not _is_module(child):
                raise CheckpointError(f"{_named(prefix, name)} is not a module")
            if child is not None:
                stack.append((child, f"{_named(prefix, name)}.", depth + 1))


def _named(prefix: str, name: Any) -> str:
    if not (isinstance(name, str) and _is_text(name) and len(prefix) + len(name) <= MAX_NAME):
        raise CheckpointError(
            f"a part of {prefix[:80] or 'its module'} has no name, or one that cannot be written: save its "
            "state_dict in the project that wrote it, and convert that"
        )
    return prefix + name


def _is_text(value: str) -> bool:
    """Return True unless ``value`` has surrogates, which a text file cannot hold."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _is_plain(value: Any, budget: list[int], depth: int = 0) -> bool:
    """Return True for plain values: numbers, text, tensors, and lists and dicts of these."""
    budget[0] -= 1 + (len(value) if isinstance(value, str) else 0)
    if depth > 10 or budget[0] < 0:
        return False
    if isinstance(value, dict):
        return all(
            isinstance(k, str | int) and _is_plain(k, budget) and _is_plain(v, budget, depth + 1)
            for k, v in value.items()
        )
    if isinstance(value, list | tuple):
        return all(_is_plain(item, budget, depth + 1) for item in value)
    if isinstance(value, int):
        return value.bit_length() <= 64
    return value is None or isinstance(value, float | _Tensor) or (isinstance(value, str) and _is_text(value))


def _opened(value: Any) -> Any:
    """Return a plain value with tensors in the place of their holders."""
    if isinstance(value, dict):
        return {key: _opened(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_opened(item) for item in value)
    return value.value if isinstance(value, _Tensor) else value
