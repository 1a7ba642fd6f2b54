"""Import public names on first use (PEP 562), and refuse removed ones with a reason.

The ``__init__`` of each room with public names calls `lazy`, so that ``import arclight`` is fast and a name costs its own module only.
Names of Lightning that are not offered (``fabric.accelerators``, ``compat.lightning``) are classes that raise the reason when they are made
or subclassed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any


def lazy(
    package: str, names: dict[str, str], refused: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make a package's ``__getattr__``, ``__dir__`` and ``__all__`` for lazy imports.

    ``names``: public names, with the module that defines each; one whose module is ``<package>.<name>`` (``{"qris":
    "arclight.vision.qris"}``) is that module itself. ``refused``: names that are not offered, with the reason (:func:`refusal`).
    """

    def getattr_(name: str) -> Any:
        if name not in names:
            if name in (refused or {}):
                return refusal(name, (refused or {})[name])
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(names[name])
        value = module if names[name] == f"{package}.{name}" else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return getattr_, lambda: sorted(names), sorted(names)


class Refused:
    """Base class of stand-ins for names that are not offered.

    Making or subclassing one raises NotImplementedError with the reason.
    """

    reason: str

    def __new__(cls, *arguments: Any, **options: Any) -> Refused:
        raise NotImplementedError(f"`{cls.__name__}` is not offered: {cls.reason}")

    @staticmethod
    def is_available() -> bool:
        """Return False: code that chooses among devices asks every accelerator."""
        return False

    def __init_subclass__(cls) -> None:
        if "reason" not in vars(cls):
            raise NotImplementedError(f"`{cls.__bases__[0].__name__}` is not offered: {cls.reason}")


@cache
def refusal(name: str, reason: str) -> type[Refused]:
    """Return the class that stands in for ``name``; the same one for the same name and reason."""
    return type(name, (Refused,), {"reason": reason, "__doc__": f"Not offered: {reason}", "__module__": __name__})
