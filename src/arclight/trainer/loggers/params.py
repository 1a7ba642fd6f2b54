"""Convert hyper-parameters and metrics to the forms that loggers accept. No torch here.

All loggers convert by it; files of hyper-parameters and of the kept checkpoints are written with `yaml_text`. Mappings, namespaces and
dataclasses come in; plain dictionaries and text go out. Readers of old logs rely on names joined by ``/``.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re
from argparse import Namespace
from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np

Params = Mapping[Any, Any] | Namespace | None


def convert_params(params: Params) -> dict[Any, Any]:
    """Return ``params`` (a mapping, a namespace, a dataclass or None) as a dict of its own."""
    if params is None:
        return {}
    if dataclasses.is_dataclass(params) and not isinstance(params, type):
        return {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    return dict(params if isinstance(params, Mapping) else vars(params))


def flatten_dict(params: Mapping[Any, Any], delimiter: str = "/", parent_key: str = "") -> dict[str, Any]:
    """Flatten mappings, namespaces, dataclasses and lists of mappings to one level.

    Nested names are joined by ``delimiter``.
    """
    flat: dict[str, Any] = {}
    for key, value in params.items():
        name = f"{parent_key}{delimiter}{key}" if parent_key else str(key)
        if _has_names(value):
            flat |= flatten_dict(convert_params(value), delimiter, name)
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            for number, item in enumerate(value):
                flat |= flatten_dict(item, delimiter, f"{name}/{number}")
        else:
            flat[name] = value
    return flat


def _has_names(value: Any) -> bool:
    is_instance = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return isinstance(value, (Mapping, Namespace)) or is_instance


def sanitize_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values to numbers, truth values, texts and tensors; others become text.

    NumPy's scalars become Python's.
    """

    def sanitized(value: Any) -> Any:
        if isinstance(value, (np.bool_, np.integer, np.floating)):
            value = value.item()
        return value if type(value) in (bool, int, float, str) or is_tensor(value) else str(value)

    return {name: sanitized(value) for name, value in params.items()}


def sanitize_callable_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Replace classes and functions by their names.

    A function that needs no argument is replaced by its result, unless that is a function too.
    """

    def sanitized(value: Any) -> Any:
        if inspect.isclass(value) or not callable(value):
            return value.__name__ if inspect.isclass(value) else value
        try:
            result = value()
        except Exception:  # a user's function, called on the chance that it takes no argument
            result = value
        return getattr(value, "__name__", None) if callable(result) else result

    return {name: sanitized(value) for name, value in params.items()}


def convert_json_serializable(params: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values that JSON cannot hold to text."""
    return {name: value if _fits_json(value) else str(value) for name, value in params.items()}


def _fits_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return False
    return True


def add_prefix(metrics: Mapping[str, Any], prefix: str | None, separator: str) -> dict[str, Any]:
    """Prefix every name with ``prefix`` and ``separator``."""
    return {f"{prefix}{separator}{name}": value for name, value in metrics.items()} if prefix else dict(metrics)


def plain_params(params: Params) -> dict[str, Any]:
    """Flatten ``params`` to one level of numbers, truth values and texts.

    Nested names are joined by ``/``.
    """
    flat = sanitize_params(flatten_dict(convert_params(params)))
    return {
        name: (value.item() if value.numel() == 1 else str(value)) if is_tensor(value) else value
        for name, value in flat.items()
    }


def is_tensor(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "numel")


# -- YAML ----------------------------------------------------------------------------------------------------------

_AMBIGUOUS = re.compile(r"(?i:y|n|yes|no|on|off|true|false|null|nan|inf)$")
"""Bare words that some readers of YAML take for something other than text."""
_UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")


def yaml_text(values: Mapping[Any, Any]) -> str:
    """Return a mapping as YAML: a line for each name, nested values in braces and brackets.

    Every reader of YAML 1.1 or 1.2 takes it the same way: texts are quoted, floats have a point. What YAML has no word
    for is written as text.
    """
    lines = [f"{_key(name)}: {_yaml(value)}\n" for name, value in values.items()]
    return "".join(lines) or "{}\n"


def _key(name: Any) -> str:
    if isinstance(name, str):
        return name if name.isascii() and name.isidentifier() and not _AMBIGUOUS.match(name) else _quoted(name)
    return _yaml(name) if isinstance(name, (bool, int, float)) else _quoted(str(name))


def _yaml(value: Any) -> str:
    if isinstance(value, Enum):
        return _quoted(value.name)
    if isinstance(value, (np.bool_, np.integer, np.floating)):
        value = value.item()
    if value is None or isinstance(value, (bool, int)):
        return json.dumps(value)
    if isinstance(value, float):
        return _float(value)
    if _has_names(value):
        return "{" + ", ".join(f"{_key(k)}: {_yaml(v)}" for k, v in convert_params(value).items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_yaml(item) for item in value) + "]"
    return _quoted(str(value))


def _float(value: float) -> str:
    if not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    mantissa, e, exponent = repr(value).partition("e")
    return mantissa + (".0" if "." not in mantissa else "") + e + exponent


def _quoted(text: str) -> str:
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(text, ensure_ascii=False))
