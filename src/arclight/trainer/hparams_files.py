"""Hyper-parameters in files of their own, ``hparams.yaml`` and ``meta_tags.csv``: written and read as plain values."""

from __future__ import annotations

import csv
import json
from argparse import Namespace
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from arclight.fabric.extras import require
from arclight.fabric.rank_zero import rank_zero_warn
from arclight.trainer.loggers.params import yaml_text

_PLAIN = (str, bool, int, float, type(None), Enum)


def save_hparams_to_yaml(config_yaml: str | Path, hparams: Any, use_omegaconf: bool = True) -> None:
    """Write a mapping or Namespace as YAML; what is no plain value is left out with a warning.

    An OmegaConf container is written with its references resolved. Raises RuntimeError where the folder is missing.
    """
    _need_folder(config_yaml)
    values = _plain_containers(vars(hparams) if isinstance(hparams, Namespace) else hparams)
    if not isinstance(values, Mapping):
        raise TypeError(f"hparams must be dictionary, got {type(hparams).__name__}")
    kept = {}
    for name, value in values.items():
        if _is_plain(value):
            kept[name] = value
        else:
            rank_zero_warn(f"Skipping '{name}' parameter because it is not possible to safely dump to YAML.")
    Path(config_yaml).write_text(yaml_text(kept), encoding="utf-8")


def load_hparams_from_yaml(config_yaml: str | Path, use_omegaconf: bool = True) -> Any:
    """What such a file holds; nothing but plain values is made from it. An empty dict, with a warning, where it is missing.

    ``use_omegaconf`` gives an OmegaConf container where that package is installed.
    """
    if not _found(config_yaml):
        return {}
    values = require("yaml", extra="cli").safe_load(Path(config_yaml).read_text(encoding="utf-8"))
    if use_omegaconf:
        try:
            from omegaconf import OmegaConf
        except ModuleNotFoundError:
            return values
        return OmegaConf.create(values)
    return values


def save_hparams_to_tags_csv(tags_csv: str | Path, hparams: Any) -> None:
    """Write a line ``key,value`` for each. Raises RuntimeError where the folder is missing."""
    _need_folder(tags_csv)
    with Path(tags_csv).open("w", newline="", encoding="utf-8") as file:
        rows = (vars(hparams) if isinstance(hparams, Namespace) else hparams).items()
        csv.writer(file).writerows([("key", "value"), *((key, str(value)) for key, value in rows)])


def load_hparams_from_tags_csv(tags_csv: str | Path) -> dict[str, Any]:
    """What such a file holds, numbers and truth values as such. An empty dict, with a warning, where it is missing."""
    if not _found(tags_csv):
        return {}
    with Path(tags_csv).open(newline="", encoding="utf-8") as file:
        return {key: convert(value) for key, value in list(csv.reader(file))[1:]}


def convert(val: str) -> Any:
    """The number, truth value, None or list that ``val`` spells; else the text itself."""
    spelled = {"True": "true", "False": "false", "None": "null"}.get(val, val)
    try:
        return json.loads(spelled)
    except ValueError:
        return val


def update_hparams(hparams: dict[str, Any], updates: Mapping[str, Any]) -> None:
    """Put ``updates`` into ``hparams``; dicts are merged, all else is replaced."""
    for key, value in updates.items():
        if isinstance(value, Mapping) and isinstance(hparams.get(key), dict):
            update_hparams(hparams[key], value)
        else:
            hparams[key] = value


def _need_folder(path: str | Path) -> None:
    if not Path(path).parent.is_dir():
        raise RuntimeError(f"Missing folder: {Path(path).parent}.")


def _found(path: str | Path) -> bool:
    if not Path(path).exists():
        rank_zero_warn(f"Missing Tags: {path}.", category=RuntimeWarning)
        return False
    return True


def _plain_containers(value: Any) -> Any:
    """Mappings and sequences of other packages as dicts and lists."""
    if type(value).__module__.startswith("omegaconf."):
        from omegaconf import OmegaConf

        return OmegaConf.to_container(value, resolve=True)
    if isinstance(value, Mapping):
        return {key: _plain_containers(item) for key, item in value.items()}
    return [_plain_containers(item) for item in value] if isinstance(value, (list, tuple)) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(item) for item in (*value, *value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)
