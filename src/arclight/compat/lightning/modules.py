"""Hook Lightning's import paths into Python's import, and look their names up on use.

``arclight.compat.lightning`` calls `install` on import, which adds a finder to ``sys.meta_path``: a path of the table in `names` becomes a
module when it is imported, and a name is looked up at each use in our module that defines it. Setting a name in one of these modules
(``unittest.mock.patch``) changes that module only: to replace what Arclight uses, patch the module that defines it. A module without
submodules also gives access to the other names of our modules that it maps to.

Paths and names are Lightning's and stay. Look-ups must stay lazy, since eager ones would import most of Arclight; our finder must stay
before Python's finder of files, which would find the folders of the stubs.

Type checkers read the stubs beside this file, which ``tests/compat/write_stubs.py`` writes from the same table.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from arclight._lazy import refusal
from arclight.compat.lightning.names import NAMES, REFUSED

ROOT = "arclight.compat.lightning"


def children(path: str) -> list[str]:
    """List the modules directly below ``path`` (``"pytorch.callbacks"``; ``""`` is the root)."""
    prefix = f"{path}." if path else ""
    return sorted({p[len(prefix) :].split(".")[0] for p in (*NAMES, *REFUSED) if p.startswith(prefix) and p != path})


def origins(path: str) -> list[str]:
    """List our modules that this module's names come from."""
    return list(dict.fromkeys(origin.partition(":")[0] for origin in NAMES.get(path, {}).values()))


def exists(path: str) -> bool:
    """Return True if the table has this module or one below it."""
    return path in NAMES or path in REFUSED or bool(children(path))


class NamesModule(ModuleType):
    """A module whose names are defined in other modules."""

    @property
    def _path(self) -> str:
        return self.__name__[len(ROOT) + 1 :]

    @property
    def __all__(self) -> list[str]:
        return sorted(name for name in NAMES.get(self._path, {}) if not name.startswith("_") or name == "__version__")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.__all__, *children(self._path)})

    def __getattr__(self, name: str) -> Any:
        path = self._path
        for home, own in self._places(name):
            if hasattr(home, own):
                return getattr(home, own)
        reason = REFUSED.get(path, {}).get(name)
        if reason is not None:
            return refusal(name, reason)
        if name in children(path):
            return importlib.import_module(f"{self.__name__}.{name}")
        known = [] if name.startswith("_") else [*NAMES.get(path, {}), *children(path)]
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}{hint}")

    def _places(self, name: str) -> list[tuple[ModuleType, str]]:
        """List where ``name`` may be defined: our modules, and its name there."""
        if name.startswith("__") and name != "__version__":
            return []  # attributes of the module itself, such as __path__
        origin, _, own = NAMES.get(self._path, {}).get(name, "").partition(":")
        if origin:
            return [(importlib.import_module(origin), own)]
        homes = [] if children(self._path) else origins(self._path)
        return [(importlib.import_module(home), name) for home in homes]


class _NamesLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return NamesModule(spec.name, f"Names of ``lightning{spec.name[len(ROOT) :]}`` over our modules.")

    def exec_module(self, module: ModuleType) -> None:
        """Execute nothing: names are looked up when they are used."""


class _NamesFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        inner = fullname[len(ROOT) + 1 :]
        if not fullname.startswith(f"{ROOT}.") or not exists(inner):
            return None
        return ModuleSpec(fullname, _NamesLoader(), origin="table of names", is_package=bool(children(inner)))


def install(package: str) -> None:
    """Make ``package`` a `NamesModule`, and every module of the table importable below it."""
    sys.modules[package].__class__ = NamesModule
    sys.meta_path.insert(0, _NamesFinder())  # before the finder of folders, which would find those of the stubs
