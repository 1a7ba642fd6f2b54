"""Hyper-parameters: the arguments a module was built with, kept so that a checkpoint can rebuild it."""

from __future__ import annotations

import dataclasses
import inspect
from types import FrameType
from typing import Any


class Hyperparameters(dict[str, Any]):
    """A dict whose items are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no hyper-parameter {name!r}; there are: {', '.join(self) or 'none'}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


def collect_arguments(
    cls: type, frame: FrameType, chosen: tuple[Any, ...], ignore: str | list[str] | tuple[str, ...] | None
) -> Hyperparameters:
    """Arguments of the constructor that runs in ``frame``: all, or the ``chosen`` names, less the ignored ones.

    One dict or dataclass in ``chosen`` stands for its items. Raises ValueError for a name that is no argument.
    """
    if len(chosen) == 1 and isinstance(chosen[0], dict):
        return Hyperparameters(chosen[0])
    if len(chosen) == 1 and dataclasses.is_dataclass(chosen[0]):
        return Hyperparameters({f.name: getattr(chosen[0], f.name) for f in dataclasses.fields(chosen[0])})
    values = inspect.getargvalues(frame)
    arguments = {
        name: values.locals[name]
        for name in [*values.args, *(inspect.signature(cls).parameters)]
        if name in values.locals
    }
    if values.keywords is not None:
        arguments |= values.locals[values.keywords]
        arguments.pop(values.keywords, None)
    arguments = {
        name: value for name, value in arguments.items() if name not in ("self", "__class__") and name != values.varargs
    }
    unknown = [name for name in chosen if name not in arguments]
    if unknown:
        raise ValueError(
            f"save_hyperparameters: {unknown[0]!r} is no argument of {cls.__name__}; it has {', '.join(arguments) or 'none'}"
        )
    ignored = {ignore} if isinstance(ignore, str) else set(ignore or ())
    return Hyperparameters(
        {name: value for name, value in arguments.items() if (not chosen or name in chosen) and name not in ignored}
    )
