"""Import optional dependencies, with an error that names the missing extra.

Code that needs an optional package calls `require`: in the function that uses it, or on import in modules that are of no use without it.
``extra`` is one of the optional dependencies in pyproject.toml.

`MissingExtraError` is public (``arclight.fabric``) and must stay a ModuleNotFoundError, which users' fallbacks catch.
"""

from __future__ import annotations

import importlib
from typing import Any

from arclight._installed import pip_install


class MissingExtraError(ModuleNotFoundError):
    """A package that an optional feature needs is not installed."""


def require(module: str, *, extra: str) -> Any:
    """Import ``module``; raise MissingExtraError naming the ``extra`` if it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise  # the module is there, something inside it is not: that is another fault
        raise MissingExtraError(
            f"{error.name} is not installed; this feature needs it: {pip_install(extra)}"
        ) from error
