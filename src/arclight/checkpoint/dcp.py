"""Read and write folders of torch.distributed.checkpoint (DCP), in one process.

DCP describes a checkpoint in a pickle, ``.metadata``. It is read here as data: opcodes are walked with `pickletools`, the classes that it
names become `Record`, and nothing is imported or called. Chunks of tensors and other values are read as any file of ``torch.save`` is,
with ``weights_only``. The only caller is `conversion`. The entry ``.arclight`` of folders written here must stay readable.
"""

from __future__ import annotations

import io
import json
import pickletools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from arclight.checkpoint import files, tree
from arclight.checkpoint.errors import CheckpointError

METADATA = ".metadata"
DCP_SUFFIX = ".dcp"
"""Suffix of folders that are written in this format."""

_OWN = ".arclight"
"""Entry of a folder that was written here: the encoded state that refers to the tensors, as in a ``state.json``."""


def is_dcp(path: Path) -> bool:
    """Return True for a folder of torch.distributed.checkpoint."""
    return (path / METADATA).is_file()


# -- writing -------------------------------------------------------------------------------------------------------


def write_dcp(path: Path, state: Mapping[str, Any]) -> Path:
    """Write `state` as a DCP folder; what was at `path` stays complete until the new one is.

    A flat dict of tensors, such as the entry `model`, is there under its names (``model.layer.weight``); all other tensors are below
    ``state``, and the text ``.arclight.state`` says how to put them together, which `read_dcp` does bit for bit.
    Raises CheckpointError if something else is at `path`, and for what cannot be written.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    encoded = tree.encode(state)
    flat: dict[str, Any] = {
        file.removesuffix(".safetensors"): {name: tensor.detach() for name, tensor in tensors.items()}
        for file, tensors in encoded.files.items()
    }
    flat[_OWN] = {"state": json.dumps(encoded.entries, allow_nan=False)}
    if files.is_there(path) and not is_dcp(path) and not files.is_empty(path):
        raise CheckpointError(f"{path} exists and is not a folder of torch.distributed.checkpoint: choose another name")
    staging = None
    try:
        staging = files.make_staging(path)
        with warnings.catch_warnings(action="ignore"):  # it says that one process writes, which is what we ask for
            save(flat, storage_writer=FileSystemWriter(staging), no_dist=True)
        files.publish(staging, path)
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error.strerror or error}") from error
    except CheckpointException as error:  # in which DCP wraps whatever went wrong, a full disk among it
        reason = next((failure for failure, _ in error.failures.values()), error)
        raise CheckpointError(f"{path} could not be written: {reason}") from error
    finally:
        if staging is not None:
            files.discard(staging)
    return path


# -- reading -------------------------------------------------------------------------------------------------------


def read_dcp(path: Path, load: Callable[[io.BytesIO], Any]) -> tuple[dict[str, Any], bool]:
    """Read a DCP folder of any number of ranks: its state, and if `write_dcp` wrote it.

    Tensors are on the CPU. Items of another project's folder are nested if the folder says how (DCP's planner data).
    load: reads the bytes of a ``torch.save`` without unpickling. Raises CheckpointError for a folder that is damaged, or holds classes
    that only unpickling could restore.
    """
    try:
        metadata = _PickleReader().read((path / METADATA).read_bytes())
        found = _read_items(path, metadata, load)
        nested = _nested(found, metadata.state.get("planner_data") or {})
        if _OWN in nested:
            return _decoded(nested), True
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{path} is damaged ({type(error).__name__}: {error}): write or fetch it again"
        ) from error
    return nested, False


def _decoded(nested: dict[str, Any]) -> dict[str, Any]:
    entries = json.loads(nested.pop(_OWN)["state"])
    return tree.decode(entries, {f"{file}.safetensors": tensors for file, tensors in nested.items()})


def _read_items(path: Path, metadata: Record, load: Callable[[io.BytesIO], Any]) -> dict[str, Any]:
    """Read every item of the folder, under its flat name."""
    places = {
        (index.state["fqn"], _size(index.state.get("offset"))): info.state
        for index, info in metadata.state["storage_data"].items()
    }
    found: dict[str, Any] = {}
    for name, about in metadata.state["state_dict_metadata"].items():
        if about.kind.endswith(".BytesStorageMetadata"):
            found[name] = load(_bytes_of(path, places[name, None]))
        else:
            found[name] = _read_tensor(path, name, about, places, load)
    return found


def _read_tensor(
    path: Path, name: str, about: Record, places: Mapping[Any, Any], load: Callable[[io.BytesIO], Any]
) -> torch.Tensor:
    """Read a tensor from its chunks, which must make it up exactly."""
    dtype = _dtype(about.state["properties"].state[0])
    tensor = torch.empty(_size(about.state["size"]) or (), dtype=dtype)
    boxes: list[tuple[list[int], Sequence[int]]] = []
    for chunk in about.state["chunks"]:
        offset, size = _size(chunk.state["offsets"]) or (), _size(chunk.state["sizes"]) or ()
        part = load(_bytes_of(path, places[name, offset]))
        if not isinstance(part, torch.Tensor) or tuple(part.shape) != size or part.dtype != dtype:
            raise CheckpointError(f"the chunk of {name} at {offset} is not a {dtype} tensor of shape {size}")
        tensor[tuple(slice(start, start + count) for start, count in zip(offset, size, strict=True))] = part
        boxes.append((list(offset), size))
    if not tree.boxes_cover(boxes, list(tensor.shape)):
        raise CheckpointError(f"the chunks of {name} do not make up its shape {tuple(tensor.shape)}")
    return tensor


def _bytes_of(path: Path, info: Mapping[str, Any]) -> io.BytesIO:
    """Read the bytes of one item.

    Raises CheckpointError for a file outside the folder, and for compressed ones.
    """
    name = PurePosixPath(info["relative_path"])
    if name.name != str(name) or name.name in ("", ".."):
        raise CheckpointError(f"it names a file outside of the folder, {str(name)!r}: it is not read")
    if info.get("transform_descriptors"):
        raise CheckpointError(
            f"{name} was written through {', '.join(info['transform_descriptors'])}: write it without extensions"
        )
    with (path / name).open("rb") as file:
        file.seek(info["offset"])
        content = file.read(info["length"])
    if len(content) != info["length"]:
        raise CheckpointError(f"{name} is cut off: {info['length']} bytes at {info['offset']} are not there")
    return io.BytesIO(content)


def _size(value: Any) -> tuple[int, ...] | None:
    """Return the numbers of a ``torch.Size``; None for None."""
    return tuple(value.arguments[0]) if isinstance(value, Record) else value


def _dtype(value: Any) -> torch.dtype:
    found = getattr(torch, value.kind.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"{value.kind} is not a dtype of this torch")
    return found


def _nested(flat: Mapping[str, Any], paths: Mapping[str, tuple[str | int, ...]]) -> dict[str, Any]:
    """Restore nested dicts and lists; an item without a path keeps its flat name."""
    root: dict[Any, Any] = {}
    for name, value in flat.items():
        *parents, last = paths.get(name) or (name,)
        node = root
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
    return {key: _with_lists(value) for key, value in root.items()}


def _with_lists(node: Any) -> Any:
    """Convert dicts with integer keys, by which DCP's paths mean lists, back to lists."""
    if type(node) is not dict:
        return node
    parts = {key: _with_lists(value) for key, value in node.items()}
    if parts and all(isinstance(key, int) for key in parts):
        return [parts[key] for key in sorted(parts)]
    return parts


# -- the pickle, read as data --------------------------------------------------------------------------------------


@dataclass(eq=False)
class Record:
    """Object of a pickle: the dotted name of its class or function, arguments and state."""

    kind: str
    arguments: tuple[Any, ...] = ()
    state: Any = field(default_factory=dict)


_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_CONTAINERS: dict[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "EMPTY_SET": set,
}  # fmt: skip
_PUSHES = frozenset(
    {
        "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT",
        "SHORT_BINBYTES", "BINBYTES", "BINBYTES8",
    }
)  # fmt: skip


class _PickleReader:
    """Stack machine for a pickle's opcodes that describe data.

    Classes stay names: nothing is imported, nothing is called.
    """

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def read(self, content: bytes) -> Any:
        """Return the object that a pickle describes.

        Raises CheckpointError for opcodes that plain data does not need.
        """
        for opcode, argument, _ in pickletools.genops(content):
            name = opcode.name
            if name == "STOP":
                return self.stack.pop()
            if name in _PUSHES:
                self.stack.append(argument)
            elif name in _CONSTANTS:
                self.stack.append(_CONSTANTS[name])
            elif name in _CONTAINERS:
                self.stack.append(_CONTAINERS[name]())
            elif name == "MARK":
                self.stack.append(_MARK)
            elif name == "MEMOIZE" or name.endswith("PUT"):
                self.memo[len(self.memo) if argument is None else int(argument)] = self.stack[-1]
            elif name.endswith("GET"):
                self.stack.append(self.memo[int(argument or 0)])
            elif name not in ("PROTO", "FRAME"):
                self._apply(name, argument)
        raise CheckpointError("the pickle ends before its object does")

    def _apply(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name == "GLOBAL":
            stack.append(Record(argument.replace(" ", ".")))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(Record(f"{module}.{attribute}"))
        elif name in ("NEWOBJ", "REDUCE"):
            arguments, kind = stack.pop(), stack.pop()
            stack.append(Record(kind.kind, arguments))
        elif name == "BUILD":
            state = stack.pop()
            stack[-1].state = state
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            stack[-count:] = [tuple(stack[-count:])]
        elif name == "TUPLE":
            stack.append(tuple(self._since_mark()))
        elif name == "APPEND":
            item = stack.pop()
            stack[-1].append(item)
        elif name == "APPENDS":
            items = self._since_mark()
            stack[-1].extend(items)
        elif name == "SETITEM":
            value, key = stack.pop(), stack.pop()
            _items_of(stack[-1])[key] = value
        elif name == "SETITEMS":
            items = self._since_mark()
            _items_of(stack[-1]).update(zip(items[::2], items[1::2], strict=True))
        else:
            raise CheckpointError(f"the pickle has the opcode {name}, which plain data does not need: it is not read")

    def _since_mark(self) -> list[Any]:
        place = len(self.stack) - 1
        while self.stack[place] is not _MARK:
            place -= 1
        found = self.stack[place + 1 :]
        del self.stack[place:]
        return found


def _items_of(target: Any) -> dict[Any, Any]:
    """Return the dict that items go to: itself, or the items of another mapping class."""
    items: dict[Any, Any] = target.state if isinstance(target, Record) else target
    return items
