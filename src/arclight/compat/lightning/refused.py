"""Names of Lightning that are not offered: they can be imported and asked about, and say why when they are used."""

from __future__ import annotations

from functools import cache
from typing import Any


class Refused:
    """Base of the stand-ins. Nothing is an instance of one; making or subclassing one raises NotImplementedError."""

    reason: str

    def __new__(cls, *arguments: Any, **options: Any) -> Refused:
        raise NotImplementedError(f"`{cls.__name__}` is not offered: {cls.reason}")

    @staticmethod
    def is_available() -> bool:
        """Whether such a device can be used: asked of every accelerator by code that chooses one."""
        return False

    def __init_subclass__(cls) -> None:
        if "reason" not in vars(cls):
            raise NotImplementedError(f"`{cls.__bases__[0].__name__}` is not offered: {cls.reason}")


@cache
def refusal(name: str, reason: str) -> type[Refused]:
    """The stand-in for ``name``; always the same class for the same words."""
    return type(name, (Refused,), {"reason": reason, "__doc__": f"Not offered: {reason}", "__module__": __name__})
