"""Where Fabric's choices come from: arguments, the command line that started the script, plugins."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any

from arclight.fabric.environments import ClusterEnvironment
from arclight.fabric.precision import Precision


@dataclass
class Choices:
    """What a Fabric is made of, before it is looked up."""

    accelerator: Any
    strategy: Any
    devices: Any
    num_nodes: Any
    precision: Any


@dataclass
class Plugins:
    """A user's plugins by what they are."""

    precision: Precision | None = None
    environment: ClusterEnvironment | None = None
    checkpoint_io: Any = None


_DEFAULTS = {"accelerator": "auto", "strategy": "auto", "devices": "auto", "num_nodes": 1, "precision": None}


def started_by_command_line() -> bool:
    """Whether ``arclight run`` (or a launcher that sets the same variables) started this script's processes."""
    return os.environ.get("LT_CLI_USED") == "1"


def from_command_line(accelerator: Any, strategy: Any, devices: Any, num_nodes: Any, precision: Any) -> Choices:
    """The arguments, with the command line's choice where the script left the default.

    Raises ValueError where the script and the command line choose differently.
    """
    choices = Choices(accelerator, strategy, devices, num_nodes, precision)
    if not started_by_command_line():
        return choices
    for field in fields(Choices):
        text = os.environ.get(f"LT_{field.name.upper()}")
        given = getattr(choices, field.name)
        if text is None:
            continue
        if given != _DEFAULTS[field.name] and str(given) != text:
            raise ValueError(
                f"Your code has `Fabric({field.name}={given!r}, ...)` but it conflicts with the value "
                f"`--{field.name.replace('_', '-')}={text}` set through the CLI: remove one of them"
            )
        if given == _DEFAULTS[field.name]:
            setattr(
                choices,
                field.name,
                int(text) if field.name == "num_nodes" else _devices(text) if field.name == "devices" else text,
            )
    return choices


def _devices(text: str) -> Any:
    """``2``, ``auto``, or ``0,3`` (and ``3,``): a count, a word, or which."""
    if "," in text:
        return [int(part) for part in text.split(",") if part.strip()]
    return int(text) if text.lstrip("-").isdigit() else text


def sort_plugins(plugins: Any) -> Plugins:
    """Each plugin to its place. Raises TypeError for what is none, ValueError for two of a kind."""
    found = Plugins()
    for plugin in plugins if isinstance(plugins, (list, tuple)) else [] if plugins is None else [plugins]:
        if isinstance(plugin, (Precision, str)):
            name = "precision"
        elif isinstance(plugin, ClusterEnvironment):
            name = "environment"
        elif hasattr(plugin, "save_checkpoint") and hasattr(plugin, "load_checkpoint"):
            name = "checkpoint_io"
        else:
            raise TypeError(
                f"Found invalid type for plugin {plugin!r}. Expected one of: Precision, ClusterEnvironment, CheckpointIO"
            )
        if getattr(found, name) is not None:
            raise ValueError(
                f"Received multiple values for {name} flags in `plugins`. Expected one value of each kind at most"
            )
        setattr(found, name, plugin)
    return found
