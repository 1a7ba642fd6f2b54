"""Where Fabric's choices come from: arguments, or the command line that started the script."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any


@dataclass
class Choices:
    """What a Fabric is made of, before it is looked up."""

    accelerator: Any
    strategy: Any
    devices: Any
    num_nodes: Any
    precision: Any


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
