"""Constructor arguments as plain data, which any checkpoint can hold without pickling a class, and back."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from argparse import Namespace
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from arclight.checkpoint import CheckpointError

_LEAVES = (bool, int, float, str, bytes, type(None), torch.Tensor, torch.device, torch.dtype, torch.Size)


class NotPlainError(TypeError):
    """A value that is no plain data and cannot be made into such."""


def is_omegaconf(value: object) -> bool:
    return type(value).__module__.startswith("omegaconf.")


def encode(value: Any) -> Any:
    """Plain data for a tree of plain values, dataclasses, enumerations, paths and OmegaConf containers.

    Raises NotPlainError naming the class of anything else.
    """
    if isinstance(value, Enum):
        return {"enum": _place(type(value)), "name": value.name}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        given = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        fields = {n: {"path": str(v)} if isinstance(v, PurePath) else encode(v) for n, v in given.items()}
        return {"dataclass": _place(type(value)), "fields": fields}
    if is_omegaconf(value):
        from omegaconf import OmegaConf

        return {"omegaconf": encode(OmegaConf.to_container(value))}
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    if type(value) is torch.Size or isinstance(value, _LEAVES):
        return value
    if isinstance(value, (list, tuple)):
        items = [encode(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, Namespace):
        return encode(vars(value))
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    raise NotPlainError(f"it is a {type(value).__module__}.{type(value).__qualname__}, not plain data")


def decode(value: Any) -> Any:
    """The inverse of :func:`encode`. A class is looked up only in modules of this package and in ones already imported."""
    if isinstance(value, dict):
        if value.keys() == {"dataclass", "fields"}:
            cls = _find(value["dataclass"], dataclasses.is_dataclass)
            known = {f.name for f in dataclasses.fields(cls)}
            return cls(**{key: decode(item) for key, item in value["fields"].items() if key in known})
        if value.keys() == {"enum", "name"}:
            return _find(value["enum"], lambda cls: issubclass(cls, Enum))[value["name"]]
        if value.keys() == {"path"} and isinstance(value["path"], str):
            return Path(value["path"])
        if value.keys() == {"omegaconf"}:
            from arclight.fabric.extras import require

            return require("omegaconf", extra="cli").OmegaConf.create(decode(value["omegaconf"]))
        return {key: decode(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(decode(item) for item in value)
    return value


def _place(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _find(place: str, fits: Any) -> Any:
    name, _, qualified = place.partition(":")
    if name not in sys.modules and not name.startswith("arclight."):
        raise CheckpointError(f"the checkpoint was made with {place}; import {name} before loading it")
    cls = getattr(importlib.import_module(name), qualified, None)
    if not (isinstance(cls, type) and fits(cls)):
        raise CheckpointError(f"the checkpoint was made with {place}, which is no longer what it was there")
    return cls
