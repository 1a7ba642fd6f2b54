"""Register classes by name: built in, from installed packages, or by the user.

`accelerator_registry` and `strategy_registry` derive from `Registry`; ``precision.names`` and ``environments.clusters`` load entry points
by `installed`; the Trainer calls `load_external_callbacks`. Other packages and Lightning's users rely on the groups
``arclight.accelerators``, ``.strategies``, ``.precisions`` and ``.environments`` and on the keys of an entry: they stay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from typing import Any

log = logging.getLogger(__name__)


@cache
def installed(kind: str) -> dict[str, Any]:
    """Load the classes that installed packages offer in the group ``arclight.<kind>``.

    By name; ``kind`` is a plural.
    """
    return {entry.name: entry.load() for entry in entry_points(group=f"arclight.{kind}")}


@cache
def _entries(query: Callable[..., Any], group: str) -> tuple[Any, ...]:
    """Return the entry points of ``group``, cached: looking through all packages takes long."""
    return tuple(query(group=group))


def load_external_callbacks(group: str) -> list[Any]:
    """Build the callbacks that installed packages offer as entry points in ``group``.

    An entry point is a function that takes nothing and returns a callback or a list of them.
    """
    callbacks: list[Any] = []
    for entry in _entries(entry_points, group):
        made = entry.load()()
        made = made if isinstance(made, list) else [made]
        if made:
            log.info("%s brings %s", entry.name, ", ".join(type(callback).__name__ for callback in made))
        callbacks += made
    return callbacks


class Registry(dict[str, dict[str, Any]]):
    """Registry of names, each with a class, a description and its arguments.

    ``kind`` is what a name stands for: ``strategy`` or ``accelerator``. An entry is a dictionary with the keys ``<kind>``,
    ``<kind>_name``, ``description`` and ``init_params``.
    """

    def __init__(self, kind: str, plural: str) -> None:
        super().__init__()
        self.kind, self.plural = kind, plural

    def register(
        self, name: str, cls: Callable[..., Any] | None = None, description: str = "", override: bool = False, **init_params: Any
    ) -> Callable[..., Any]:  # fmt: skip
        """Register ``cls(**init_params)`` under ``name``; without ``cls`` a decorator.

        Raises TypeError for a name that is no text, ValueError for one that is taken, unless ``override``.
        """
        if not isinstance(name, str):
            raise TypeError(f"the name of a {self.kind} must be text, got {name!r}")
        if name in self and not override:
            raise ValueError(f"the {self.kind} name {name!r} is taken; pass override=True to replace it")

        def enter(cls: Callable[..., Any]) -> Callable[..., Any]:
            self[name] = {
                self.kind: cls,
                f"{self.kind}_name": name,
                "description": description,
                "init_params": init_params,
            }
            return cls

        return enter if cls is None else enter(cls)

    def get(self, name: str, default: Any = None) -> Any:
        """Build the object of ``name``, of here or an installed package; else return ``default``.

        Raises KeyError if that is None.
        """
        if name in self:
            return self[name][self.kind](**self[name]["init_params"])
        if name in installed(self.plural):
            return installed(self.plural)[name]()
        if default is not None:
            return default
        raise KeyError(f"{name!r} is not a registered {self.kind}; there are: {', '.join(self.names()) or 'none'}")

    def remove(self, name: str) -> None:
        """Remove ``name``. Raises KeyError if it is not registered."""
        self.pop(name)

    def names(self) -> list[str]:
        """Return every name, also those of installed packages."""
        return sorted({*self, *installed(self.plural)})

    def __str__(self) -> str:
        return f"registered {self.plural}: {', '.join(self.names())}"
