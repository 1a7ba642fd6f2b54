"""TOML text of plain tables, which the standard library reads but does not write."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any


def toml_text(table: Mapping[str, Any]) -> str:
    """``table`` of text, numbers, lists and tables as TOML that reads back as it is; tables within lists lie in their line."""
    return "\n".join(_lines(table)).lstrip("\n") + "\n"


def _lines(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> list[str]:
    lines = [f"{_key(name)} = {_literal(value)}" for name, value in table.items() if not isinstance(value, Mapping)]
    for name, value in table.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{'.'.join(map(_key, (*path, name)))}]", *_lines(value, (*path, name))]
    return lines


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _literal(name)


def _literal(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(name)} = {_literal(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
