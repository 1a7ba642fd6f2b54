"""Patterns on names, and what to say of one that matches nothing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from arclight.federated.errors import FederatedError


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern matches: ``*`` is any part, one that ends with a dot is all below it. Brackets mean themselves."""
    return any(fnmatchcase(name, _glob(pattern)) for pattern in patterns)


def check_patterns(what: str, patterns: Iterable[str], names: Sequence[str]) -> None:
    """Raises FederatedError for a pattern that matches none of ``names``; it tells the nearest one. ``what``: the setting."""
    for pattern in patterns:
        if any(matches(name, (pattern,)) for name in names):
            continue
        near = _nearest(pattern, names)
        raise FederatedError(
            f"{what} has {pattern!r}, which matches no parameter" + (f"; did you mean {near}?" if near else "")
        )


def _nearest(pattern: str, names: Sequence[str]) -> str | None:
    """A name like the pattern: or, for one that is meant for all below a module, a module like it."""
    modules = {name[: place + 1] for name in names for place, letter in enumerate(name) if letter == "."}
    among = sorted(modules) if pattern.endswith(".") else list(names)
    found = difflib.get_close_matches(pattern.replace("*", ""), among, n=1, cutoff=0.0)
    return found[0] if found else None


def _glob(pattern: str) -> str:
    return pattern.replace("[", "[[]") + ("*" if pattern.endswith(".") else "")
