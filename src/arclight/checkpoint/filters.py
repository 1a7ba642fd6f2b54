"""Select a checkpoint's entries by name or pattern (``only=``, ``exclude=``); find NaN.

`store.load` and ``sharded.reader`` call `select_entries`; `store.load` and ``trainer.checkpoint.state`` refuse weights with NaN.
The meaning of patterns is public and stays.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from arclight.checkpoint import tree
from arclight.checkpoint.errors import CheckpointError
from arclight.fabric.distributed.dtensor import local_tensor

_WILD = set("*?[")


def select_entries(
    path: Path | str, entries: dict[str, Any], only: Iterable[str] | None, exclude: Iterable[str] | None
) -> dict[str, Any]:
    """Select the encoded entries of a checkpoint that match `only` and do not match `exclude`.

    Both are lists of patterns for dotted names, such as ``model``, ``model.head.*``, ``optimizers.*.exp_avg``; a pattern that matches a
    name selects everything below it. Raises CheckpointError for a pattern without a match, with the nearest names.
    """
    wanted = None if only is None else _listed(only)
    unwanted = _listed(exclude or ())
    if wanted is None and not unwanted:
        return entries
    if wanted is not None and not unwanted and all(name in entries and not _WILD & set(name) for name in wanted):
        return {name: node for name, node in entries.items() if name in wanted}  # whole entries: no need to look inside
    used: set[str] = set()

    def keep(name: str) -> bool:
        hits = [pattern for pattern in unwanted if _below(name, pattern)]
        found = [pattern for pattern in wanted or () if _below(name, pattern)]
        used.update(hits, found)
        return not hits and (wanted is None or bool(found))

    kept = {name: part for name, node in entries.items() if (part := _part(node, name, keep)) is not _NOTHING}
    for pattern in (*(wanted or ()), *unwanted):
        if pattern not in used:
            names = [name for name, _ in _leaves(entries)]
            near = difflib.get_close_matches(pattern, [*entries, *names], 3, 0.5)
            hint = f"; nearest are {', '.join(near)}" if near else ""
            raise CheckpointError(f"{path} has no entry {pattern!r}; it has {', '.join(entries) or 'none'}{hint}")
    return kept


def find_nan(tensors: Mapping[str, Any]) -> list[str]:
    """List the floating-point tensors with a NaN in this process's shard of them."""
    return [
        name
        for name, tensor in tensors.items()
        if isinstance(tensor, torch.Tensor)
        and tensor.is_floating_point()
        and bool(local_tensor(tree.read_stored(tensor)).isnan().any())
    ]


def refuse_nan(path: Path | str, names: list[str]) -> None:
    """Raise CheckpointError if `names`, of tensors with NaN, is not empty."""
    if names:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise CheckpointError(
            f"{path} has NaN in its weights: {', '.join(names[:5])}{more}. Training from it cannot recover: load an earlier checkpoint, "
            "or load these all the same with load(..., refuse_nan=False) or FolderCheckpointIO(refuse_nan=False)"
        )


def _listed(patterns: Iterable[str]) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns)


def _below(name: str, pattern: str) -> bool:
    """Return True if `name`, or an entry that contains it, matches."""
    if name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern):
        return True  # literally first: a name may contain wildcard characters
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:count]), pattern) for count in range(1, len(parts)))


_NOTHING = object()


def _part(node: Any, name: str, keep: Any) -> Any:
    """Keep the parts of an encoded value whose names pass `keep`; return _NOTHING if none does."""
    kind = node.get("$") if isinstance(node, dict) else None
    if kind == "tensors":
        names = [tensor for tensor in node["names"] if keep(f"{name}.{tensor}")]
        return {**node, "names": names} if names else _NOTHING
    if isinstance(node, dict) and node and kind in (None, "dict"):
        pairs = node["items"] if kind == "dict" else list(node.items())
        kept = [[key, part] for key, value in pairs if (part := _part(value, f"{name}.{key}", keep)) is not _NOTHING]
        if not kept:
            return _NOTHING
        return {"$": "dict", "items": kept} if kind == "dict" else dict(kept)
    if isinstance(node, list) and any(isinstance(item, (dict, list)) for item in node):
        parts = [_part(item, f"{name}.{number}", keep) for number, item in enumerate(node)]
        return (
            [{} if part is _NOTHING else part for part in parts] if any(p is not _NOTHING for p in parts) else _NOTHING
        )
    return node if keep(name) else _NOTHING


def _leaves(node: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict) and node.get("$") == "tensors":
        yield from ((f"{name}.{tensor}", None) for tensor in node["names"])
    elif isinstance(node, dict) and "$" not in node:
        for key, value in node.items():
            yield from _leaves(value, f"{name}.{key}" if name else key)
    else:
        yield name, node
