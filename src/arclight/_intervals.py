"""Annotate numbers with intervals for checks, help and schemas; accept former names.

``lr: NonNegativeFloat = 0.1`` in a dataclass that inherits `Checked` is refused if it is negative, NaN or infinite, by a
recipe and by Python alike, and reads ``number >= 0`` in the help. pydantic understands the same annotation.

Settings of every room, and constructors by `check`, use this; `recipe` and ``cli`` read the types by `describe` and `kind_of`. A field or
value that is renamed is accepted for one release by `former_names` or `former_values`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import operator
import types
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, TypeVar


@dataclasses.dataclass(frozen=True)
class Interval:
    """Bounds of a number: ``ge`` and ``le`` are included, ``gt`` and ``lt`` are not.

    NaN is in no interval. An excluded infinite bound (``lt=math.inf``) asks for finite numbers.
    """

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    __is_annotated_types_grouped_metadata__: typing.ClassVar = True  # pydantic then reads the bounds by iterating

    def __iter__(self) -> Iterator[Any]:
        import annotated_types

        for name, bound in self._bounds():
            yield getattr(annotated_types, name.capitalize())(bound)

    def __contains__(self, value: Any) -> bool:
        return not math.isnan(value) and all(getattr(operator, name)(value, bound) for name, bound in self._bounds())

    def __str__(self) -> str:
        """Format as ``in [0, 1)`` or ``>= 0``; empty if any finite number is allowed."""
        found = {name: bound for name, bound in self._bounds() if math.isfinite(bound)}
        signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
        if len(found) < 2:
            return "".join(f"{signs[name]} {_plain(bound)}" for name, bound in found.items())
        (lower, low), (upper, high) = found.items()
        return f"in {'[' if lower == 'ge' else '('}{_plain(low)}, {_plain(high)}{']' if upper == 'le' else ')'}"

    def _bounds(self) -> Iterator[tuple[str, float]]:
        for name in ("ge", "gt", "le", "lt"):
            if (bound := getattr(self, name)) is not None:
                yield name, bound


def _plain(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


PositiveInt = Annotated[int, Interval(ge=1)]
NonNegativeInt = Annotated[int, Interval(ge=0)]
PositiveFloat = Annotated[float, Interval(gt=0, lt=math.inf)]
NonNegativeFloat = Annotated[float, Interval(ge=0, lt=math.inf)]
FiniteFloat = Annotated[float, Interval(gt=-math.inf, lt=math.inf)]
Fraction = Annotated[float, Interval(ge=0, le=1)]
"""A share or a probability, from 0 to 1."""
PositiveFraction = Annotated[float, Interval(gt=0, le=1)]
ProperFraction = Annotated[float, Interval(ge=0, lt=1)]
"""A share below 1, such as a momentum."""


class Checked:
    """Base class of dataclasses whose fields' intervals are checked.

    Raises ValueError for the first field whose value is outside its interval.
    """

    def __post_init__(self) -> None:
        check_fields(self)


T = TypeVar("T")


def former_names(**renamed: str) -> Callable[[type[T]], type[T]]:
    """Accept a class's arguments under their former names too, with a warning.

    So are fields in its pickles.

    renamed: former name to the present one.
    """

    def accept(cls: type[T]) -> type[T]:
        init = cls.__init__

        @functools.wraps(init)
        def taking(self: T, *args: Any, **given: Any) -> None:
            for former in renamed.keys() & given.keys():
                warnings.warn(renaming_message(cls, former), FutureWarning, stacklevel=2)
                if renamed[former] in given:
                    raise TypeError(f"{cls.__name__} got both {former} and {renamed[former]}, which are one field")
                given[renamed[former]] = given.pop(former)
            init(self, *args, **given)

        def translated(state: dict[str, Any]) -> dict[str, Any]:
            for former in renamed.keys() & state.keys():
                warnings.warn(renaming_message(cls, former), FutureWarning, stacklevel=3)
            return {renamed.get(name, name): value for name, value in state.items()}

        cls.__init__ = taking  # type: ignore[method-assign, assignment]
        cls._former_names = renamed  # type: ignore[attr-defined]
        _restore_by(cls, translated)
        return cls

    def renaming_message(cls: type[T], former: str) -> str:
        return f"{cls.__name__}.{former} is called {renamed[former]} now; the former name is read for one more release"

    return accept


def todays_name(cls: type, name: str) -> str:
    """Return the present name of a field that may be given under its former one."""
    renamed: dict[str, str] = getattr(cls, "_former_names", {})
    return renamed.get(name, name)


def former_table(settings: Any) -> dict[str, Any]:
    """Return a dataclass's fields, renamed ones under their former names.

    Federated messages and digests keep these names, so that other releases read the same.
    """
    former = {today: name for name, today in getattr(type(settings), "_former_names", {}).items()}
    return {former.get(name, name): value for name, value in dataclasses.asdict(settings).items()}


def former_values(**renamed: Mapping[str, str]) -> Callable[[type[T]], type[T]]:
    """Accept former values of a dataclass's fields, also from a pickle, with a warning.

    renamed: by field, the former value to the present one.
    """

    def accept(cls: type[T]) -> type[T]:
        init = cls.__init__

        @functools.wraps(init)
        def taking(self: T, *args: Any, **given: Any) -> None:
            for name in renamed.keys() & given.keys():
                if (today := todays_value(cls, name, given[name])) != given[name]:
                    warnings.warn(renamed_value(f"{cls.__name__}.{name}", given[name], today), FutureWarning, 2)
                    given[name] = today
            init(self, *args, **given)

        def translated(state: dict[str, Any]) -> dict[str, Any]:
            for name in renamed.keys() & state.keys():
                if (today := todays_value(cls, name, state[name])) != state[name]:
                    warnings.warn(renamed_value(f"{cls.__name__}.{name}", state[name], today), FutureWarning, 3)
                    state = {**state, name: today}
            return state

        cls.__init__ = taking  # type: ignore[method-assign, assignment]
        cls._former_values = renamed  # type: ignore[attr-defined]
        _restore_by(cls, translated)
        return cls

    return accept


def _restore_by(cls: type, translated: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Translate the states of pickles that versions with former names or values wrote."""
    known: Callable[[Any, dict[str, Any]], None] | None = getattr(cls, "__setstate__", None)

    def restore(self: Any, state: dict[str, Any]) -> None:
        state = translated(state)
        if known is None:
            self.__dict__.update(state)
        else:
            known(self, state)

    cls.__setstate__ = restore  # type: ignore[attr-defined]


def todays_value(cls: type, name: str, value: Any) -> Any:
    """Return the present form of a field's value that may be given in its former one."""
    renamed: Mapping[str, Mapping[str, str]] = getattr(cls, "_former_values", {})
    return renamed.get(name, {}).get(value, value) if isinstance(value, str) else value


def renamed_value(place: str, former: str, today: str) -> str:
    """Return the message for a former value of the field at ``place``."""
    return f"{place} = {former!r} is called {today!r} now; the former value is read for one more release"


def check_fields(settings: Any) -> None:
    """Raise ValueError for the first field of a dataclass that is beyond its interval."""
    for name, hint in _bounded(type(settings)):  # type: ignore[arg-type]
        check(name, getattr(settings, name), hint)


@functools.cache
def _bounded(cls: type) -> list[tuple[str, Any]]:
    """List the fields with an interval in their types."""
    hints: dict[str, Any] = {}
    for owner in reversed(cls.__mro__):
        with contextlib.suppress(NameError):  # a class of a user's may name types that only its type checker imports
            hints |= typing.get_type_hints(owner, include_extras=True)
    fields = [field.name for field in dataclasses.fields(cls)]
    return [(name, hints[name]) for name in fields if any(intervals(hints.get(name)))]


def intervals(hint: Any) -> Iterator[Interval]:
    """Yield all intervals in a type."""
    if isinstance(hint, Interval):
        yield hint
    for inner in typing.get_args(hint):
        yield from intervals(inner)


def check(name: str, value: Any, hint: Any) -> None:
    """Raise ValueError if a number in ``value`` is not in the intervals of ``hint``."""
    if not fits(hint, value):
        raise ValueError(f"{name}: need {describe(hint)}, got {value!r}")


def fits(hint: Any, value: Any) -> bool:
    """Return True if the numbers in ``value`` have the types and intervals of ``hint``.

    Containers are looked into; objects of other types are not checked.
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        bounds = [bound for bound in inner[1:] if isinstance(bound, Interval)]
        return fits(inner[0], value) and all(value in bound for bound in bounds)
    if origin in (typing.Union, types.UnionType):
        return any(fits(member, value) for member in inner)
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    if origin is typing.Literal:
        return value in inner
    if isinstance(value, Real) or hint in (str, bool, types.NoneType):
        return hint is Any or (isinstance(hint, type) and isinstance(value, hint))
    if origin is tuple:
        each = inner[:1] * len(value) if inner[-1] is ... and isinstance(value, tuple | list) else inner
        return isinstance(value, tuple | list) and len(each) == len(value) and all(map(fits, each, value))
    if origin is dict:
        return isinstance(value, Mapping) and all(fits(inner[1], item) for item in value.values())
    return True


def kind_of(cls: type) -> str:
    """Return the recipe's word for a class: ``recipe_kind``, or its name in lower case."""
    return str(vars(cls).get("recipe_kind", cls.__name__.lower()))


def refused_kinds(classes: Iterable[type]) -> dict[str, str]:
    """Map kinds that one of ``classes`` replaces to the reason (``in_place_of``)."""
    return {kind: why for cls in classes for kind, why in vars(cls).get("in_place_of", {}).items()}


def describe(hint: Any) -> str:
    """Describe a type in words."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Literal, typing.Union, types.UnionType):
        return " | ".join(str(member) if origin is typing.Literal else describe(member) for member in inner)
    if origin is Annotated:
        bounds = [
            str(x) for m in inner[1:] for x in (getattr(m, "metadata", [m]) if not isinstance(m, Interval) else [m])
        ]
        if any(intervals(hint)):
            return " ".join(filter(None, (describe(inner[0]), *bounds)))
        return f"{describe(inner[0])} ({', '.join(bounds)})"
    if origin in (list, tuple, set, frozenset):
        fixed = origin is tuple and inner[-1] is not ...
        return f"[{', '.join(map(describe, inner))}]" if fixed else f"list of {describe(inner[0])}"
    if origin is dict:
        return f"table of {describe(inner[1])}"
    names = {type(None): "none", str: "text", float: "number", bool: "true | false", Path: "path", Any: "any value"}
    name = str(names.get(hint) or getattr(hint, "__name__", hint))
    return kind_of(hint) if dataclasses.is_dataclass(hint) and isinstance(hint, type) else name
