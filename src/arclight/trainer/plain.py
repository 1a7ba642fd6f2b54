"""Encode objects as plain data, which any checkpoint can hold without pickling a class, and decode them."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any

import numpy as np
import torch

from arclight.checkpoint import CheckpointError
from arclight.fabric.rank_zero import rank_zero_warn

TAG = "__arclight__"
"""The one key that marks a dict as an encoded object; its value says of which kind. A user's dict with this key is escaped."""

_LEAVES = (bool, int, float, str, bytes, type(None), torch.Tensor, torch.device, torch.dtype, torch.Size)


class NotPlainError(TypeError):
    """A value that is no plain data and cannot be made into such."""


def is_omegaconf(value: object) -> bool:
    return type(value).__module__.startswith("omegaconf.")


def encode(value: Any) -> Any:
    """Encode a tree of plain values, dataclasses, enumerations, paths and OmegaConf containers as plain data.

    A path is a text (so other projects' readers understand it), a path in a field of a dataclass comes back as a path.
    Raises NotPlainError naming the class of anything else.
    """
    if isinstance(value, Enum):
        return {TAG: "enum", "class": _place(type(value)), "name": value.name}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        given = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        fields = {n: {TAG: "path", "path": str(v)} if isinstance(v, PurePath) else encode(v) for n, v in given.items()}
        return {TAG: "dataclass", "class": _place(type(value)), "fields": fields}
    if is_omegaconf(value):
        from omegaconf import OmegaConf

        return {TAG: "omegaconf", "content": encode(OmegaConf.to_container(value))}
    if isinstance(value, dict):
        items = {key: encode(item) for key, item in value.items()}
        return {TAG: "dict", "items": items} if TAG in value or _old_kind(value) else items
    if type(value) is torch.Size or isinstance(value, _LEAVES):
        return value
    if isinstance(value, (list, tuple)):
        parts = [encode(item) for item in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    if isinstance(value, Namespace):
        return encode(vars(value))
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    raise NotPlainError(f"it is a {type(value).__module__}.{type(value).__qualname__}, not plain data")


def decode(value: Any, owner: type) -> Any:
    """Decode what :func:`encode` gave, for the arguments of ``owner``.

    A file does not choose what runs: a class is looked up in modules that are imported already or belong to the room of ``owner``,
    and a dataclass is built only if it is of ``owner``'s packages or visible where ``owner`` is defined.
    Raises CheckpointError for any other class.
    """
    if type(value) in (list, tuple):
        return type(value)(decode(item, owner) for item in value)
    if not isinstance(value, dict):
        return value
    match value.get(TAG):
        case None:
            kind = _old_kind(value)
            return {k: decode(v, owner) for k, v in value.items()} if kind is None else _decode_old(kind, value, owner)
        case "dict":
            return {key: decode(item, owner) for key, item in value["items"].items()}
        case "path":
            return Path(value["path"])
        case "enum":
            return _find(value["class"], owner, _is_enum)[value["name"]]
        case "dataclass":
            return _build(value["class"], {n: decode(field, owner) for n, field in value["fields"].items()}, owner)
        case "omegaconf":
            return as_omegaconf(decode(value["content"], owner))
        case other:
            raise CheckpointError(
                f"the checkpoint has a hyper-parameter of kind {other!r}, which this version cannot read"
            )


def _old_kind(value: dict[Any, Any]) -> str | None:
    """The kind of object that a dict stood for before there was :data:`TAG`; None for a dict that is one."""
    if value.keys() == {"dataclass", "fields"} and _is_place(value["dataclass"]) and isinstance(value["fields"], dict):
        return "dataclass"
    if value.keys() == {"enum", "name"} and _is_place(value["enum"]) and isinstance(value["name"], str):
        return "enum"
    return "omegaconf" if value.keys() == {"omegaconf"} else None


def _decode_old(kind: str, value: dict[Any, Any], owner: type) -> Any:
    if kind == "enum":
        return _find(value["enum"], owner, _is_enum)[value["name"]]
    if kind == "omegaconf":
        return as_omegaconf(decode(value["omegaconf"], owner))
    fields = {
        name: Path(field["path"])
        if isinstance(field, dict) and field.keys() == {"path"} and isinstance(field["path"], str)
        else decode(field, owner)
        for name, field in value["fields"].items()
    }
    return _build(value["dataclass"], fields, owner)


def as_omegaconf(content: Any) -> Any:
    """Make an OmegaConf container of plain data."""
    from arclight.fabric.extras import require

    return require("omegaconf", extra="cli").OmegaConf.create(content)


def _build(place: str, values: dict[str, Any], owner: type) -> Any:
    """Build the dataclass at ``place``; fields that it no longer has are left out, new ones take their defaults."""
    cls = _find(place, owner, dataclasses.is_dataclass)
    if not _is_visible(cls, owner):
        raise CheckpointError(
            f"the checkpoint names the dataclass {place}, which {owner.__module__} neither defines nor imports: it is not built for a "
            f"file's sake; import it there, or give that argument of {owner.__name__} yourself"
        )
    known = {field.name: field.init for field in dataclasses.fields(cls)}
    built = cls(**{name: value for name, value in values.items() if known.get(name)})
    for name, value in values.items():
        if known.get(name) is False:
            object.__setattr__(built, name, value)  # a frozen one too
    return built


def known_fields(cls: Any, saved: dict[str, Any], what: str) -> dict[str, Any]:
    """Return the items of ``saved`` that are fields of the dataclass ``cls``; a warning names the rest, which a later version wrote.

    Raises CheckpointError, naming it, where a field without a default is missing.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}
    if unknown := [name for name in saved if name not in fields]:
        rank_zero_warn(
            f"the checkpoint's {what} has fields that this version does not know: {', '.join(unknown)}; they are left out"
        )
    needed = [n for n, f in fields.items() if f.default is f.default_factory is dataclasses.MISSING]
    if missing := [name for name in needed if name not in saved]:
        raise CheckpointError(
            f"the checkpoint's {what} lacks {', '.join(missing)}: it is damaged, resume from another one"
        )
    return {name: value for name, value in saved.items() if name in fields}


def _place(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _is_place(value: object) -> bool:
    return isinstance(value, str) and all(value.partition(":"))


def _is_enum(cls: type) -> bool:
    return issubclass(cls, Enum)


def _find(place: str, owner: type, fits: Callable[[type], bool]) -> Any:
    name, _, qualified = place.partition(":")
    if name not in sys.modules:
        if not any(name.startswith(f"{room}.") for room in _rooms(owner)) or name.endswith("__main__"):
            raise CheckpointError(f"the checkpoint was made with {place}; import {name} before loading it")
        importlib.import_module(name)
    cls: Any = sys.modules[name]
    for part in qualified.split("."):
        cls = getattr(cls, part, None)
    if not (isinstance(cls, type) and fits(cls)):
        raise CheckpointError(f"the checkpoint was made with {place}, which is no longer what it was there")
    return cls


def _rooms(owner: type) -> Iterator[str]:
    """Sub-packages of this package that ``owner`` and its bases are defined in."""
    for base in owner.__mro__:
        package, _, rest = base.__module__.partition(".")
        if package == __name__.partition(".")[0] and rest:
            yield f"{package}.{rest.partition('.')[0]}"


def _is_visible(cls: type, owner: type) -> bool:
    """Return True for a class of the packages of ``owner`` and its bases, or that one of their modules or the program names.

    What the module of such a dataclass names is visible too: the types of its fields may be dataclasses themselves.
    """
    bases = {base.__module__ for base in owner.__mro__}
    packages = {module.partition(".")[0] for module in bases} - sys.stdlib_module_names - {"torch"}
    if cls.__module__.partition(".")[0] in packages:
        return True
    waiting = [*({*bases, "__main__"} & sys.modules.keys())]
    known = {*waiting}
    while waiting:
        for value in list(vars(sys.modules[waiting.pop()]).values()):
            if value is cls or (
                isinstance(value, ModuleType) and f"{cls.__module__}.".startswith(f"{value.__name__}.")
            ):
                return True
            module = value.__module__ if isinstance(value, type) and dataclasses.is_dataclass(value) else None
            if module in sys.modules and module not in known:
                known.add(module)
                waiting.append(module)
    return False
