"""Parse durations with units: ``"10ep"``, ``"500ba"``, ``"1_000_000tok"``, ``"2h30min"``.

`Timer`, `ModelCheckpoint` and ``trainer.data.limits`` use it. A text comes in, a `Duration` (a unit and a number) goes out. Recipes hold
these texts: forms that are read today must be read later.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Self

from arclight.fabric.errors import MisconfigurationError


class Unit(StrEnum):
    """Unit that a duration counts."""

    EPOCHS = "ep"
    BATCHES = "ba"
    SAMPLES = "sp"
    TOKENS = "tok"
    FRACTION = "dur"
    """Part of the whole training."""
    SECONDS = "s"


_SECONDS = {"s": 1, "sec": 1, "min": 60, "h": 3600, "d": 86400}
_PART = re.compile(r"(?P<number>\d[\d_]*(?:\.\d+)?(?:[eE]\+?\d+)?)(?P<unit>[a-z]+)")
_CLOCK = re.compile(r"(\d+):(\d\d):(\d\d):(\d\d)")

FORMS = (
    "give it as text of the format DD:HH:MM:SS (00:12:00:00 is twelve hours) or with a unit: 10ep (epochs), 500ba "
    "(batches), 10000sp (samples), 1_000_000tok (tokens), 0.5dur (half of the training), 90s, 30min, 2h, 1d"
)


@dataclass(frozen=True)
class Duration:
    """Length of training: epochs, batches, samples, tokens, seconds, or a fraction of it all."""

    value: float
    unit: Unit

    @classmethod
    def parse(cls, given: str | timedelta | dict[str, float] | Duration) -> Self:
        """Parse a duration from text (:data:`FORMS`), a timedelta or a dict of its arguments.

        Raises MisconfigurationError for anything else, for a part of an epoch or batch, and for a fraction above 1.
        """
        if isinstance(given, Duration):
            return cls(given.value, given.unit)
        if isinstance(given, dict):
            given = timedelta(**given)
        if isinstance(given, timedelta):
            if given < timedelta():
                raise MisconfigurationError(f"the duration {given} is negative; {FORMS}")
            return cls(given.total_seconds(), Unit.SECONDS)
        if not isinstance(given, str):
            raise MisconfigurationError(f"the duration {given!r} is of type {type(given).__name__}; {FORMS}")
        text = given.strip()
        if clock := _CLOCK.fullmatch(text):
            days, hours, minutes, seconds = map(int, clock.groups())
            return cls.parse(timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds))
        parts = [(float(part["number"].replace("_", "")), part["unit"]) for part in _PART.finditer(text)]
        if not parts or _PART.sub("", text):
            raise MisconfigurationError(f"the duration {given!r} is not understood; {FORMS}")
        if all(unit in _SECONDS for _, unit in parts):
            return cls(sum(number * _SECONDS[unit] for number, unit in parts), Unit.SECONDS)
        if len(parts) > 1 or parts[0][1] not in set(Unit):
            raise MisconfigurationError(f"the duration {given!r} is not understood; {FORMS}")
        return cls._counted(given, *parts[0])

    @classmethod
    def _counted(cls, given: str, number: float, name: str) -> Self:
        unit = Unit(name)
        if unit is Unit.FRACTION and not 0 <= number <= 1:
            raise MisconfigurationError(f"the duration {given!r} is more than the whole training: 1dur is all of it")
        if unit is not Unit.FRACTION and number != int(number):
            raise MisconfigurationError(f"the duration {given!r} is not a whole number of {unit.name.lower()}")
        return cls(number if unit is Unit.FRACTION else int(number), unit)

    @property
    def seconds(self) -> float | None:
        """Seconds, if that is the unit."""
        return self.value if self.unit is Unit.SECONDS else None

    def of(self, whole: Duration) -> Duration:
        """Convert a fraction to that part of ``whole``; return other units as they are.

        It is rounded up to a whole number if the unit counts.
        """
        if self.unit is not Unit.FRACTION:
            return self
        if whole.unit is Unit.FRACTION:
            raise MisconfigurationError(f"{self} of {whole} says nothing about how long training is; {FORMS}")
        part = self.value * whole.value
        return Duration(part if whole.unit is Unit.SECONDS else math.ceil(part), whole.unit)

    def __str__(self) -> str:
        return f"{self.value:g}{self.unit.value}" if self.value < 1e6 else f"{self.value:_}{self.unit.value}"
