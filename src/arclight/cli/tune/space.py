"""Read the search space: ranges or choices for fields of a recipe, checked at once.

`search` calls `parameters` before the first trial and `trial` turns drawn values into flags by `flags_of`; `study` and `search_report` read
`Range` and `Choice`. The notation of ranges is public, in recipes and in the folders of stopped searches: it stays.
"""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

from arclight.cli.arguments import UsageError, check_short_flags
from arclight.cli.schema import Recipe, TrainingRun, UserRun
from arclight.fabric.extras import require
from arclight.recipe import Imported, RecipeError, arguments_of, imported, read

FORMS = "low:high, low:high:log, low:high:STEP, or choices a,b,c"
OF_THE_RUN = ("name", "root", "search", "trainer.devices", "trainer.num_nodes")
"""Fields that a search sets itself: each trial is a run in the folder of the search, in one process."""
MAX_WHOLE = 2**53
"""Largest bound of a range of integers: up to it, float64 has each integer."""
NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, both included."""

    field: str
    low: float
    high: float
    log: bool = False
    step: float | None = None
    integer: bool = False

    @property
    def last(self) -> float:
        """The highest value that is reached by steps from ``low``."""
        if not self.step:
            return self.high
        low, high, step = (Decimal(str(one)) for one in (self.low, self.high, self.step))
        return float(low + (high - low) // step * step)

    def distribution(self) -> Any:
        """Return the range as Optuna's distribution."""
        made = require("optuna", extra="tune").distributions
        if self.integer:
            return made.IntDistribution(int(self.low), int(self.last), log=self.log, step=int(self.step or 1))
        return made.FloatDistribution(self.low, self.last, log=self.log, step=self.step)

    def suggest(self, trial: Any) -> float | int:
        """Return the value that ``trial`` draws in the range."""
        if self.integer:
            drawn: int = trial.suggest_int(
                self.field, int(self.low), int(self.last), log=self.log, step=int(self.step or 1)
            )
            return drawn
        return float(trial.suggest_float(self.field, self.low, self.last, log=self.log, step=self.step))

    def extremes(self) -> tuple[str, ...]:
        return self.text(self.low), self.text(self.high)

    def text(self, value: Any) -> str:
        return str(int(value)) if self.integer else repr(float(value))

    def value_of(self, at: Any) -> float | None:
        """Return ``at``, a recipe's own value, if it is a number of the range; else None."""
        known = isinstance(at, int | float) and not isinstance(at, bool)
        return at if known and self.low <= at <= self.high and (not self.log or at > 0) and self._on_grid(at) else None

    def _on_grid(self, at: float) -> bool:
        steps = (at - self.low) / self.step if self.step else 0.0
        return math.isclose(steps, round(steps), abs_tol=1e-9)


@dataclass(frozen=True)
class Choice:
    """One of several values, as they would be typed."""

    field: str
    options: tuple[str, ...]

    def distribution(self) -> Any:
        return require("optuna", extra="tune").distributions.CategoricalDistribution(self.options)

    def suggest(self, trial: Any) -> str:
        return str(trial.suggest_categorical(self.field, self.options))

    def extremes(self) -> tuple[str, ...]:
        return self.options

    def text(self, value: Any) -> str:
        return str(value)

    def value_of(self, at: Any) -> str | None:
        shown = str(at).lower() if isinstance(at, bool) else "none" if at is None else str(at)
        return shown if shown in self.options else None


Parameter = Range | Choice


@dataclass(frozen=True)
class TunedRun:
    """Run that is tuned: a recipe, or a run of a user's own module, as TOML."""

    text: str
    target: str | None = None
    """package.module:Class of a user's own module; None for a recipe."""

    @property
    def schema(self) -> type[TrainingRun]:
        return Recipe if self.target is None else UserRun

    def read(self, flags: Sequence[str] = ()) -> Any:
        """Return the run with ``flags`` laid over it; raises RecipeError with every problem."""
        return dataclasses.replace(read(self.schema, tomllib.loads(self.text), flags), search=None)

    def command(self, path: object) -> str:
        """Return the command that trains what the file at ``path`` describes."""
        return f"arclight train {path}" if self.target is None else f"arclight train {self.target} --config {path}"

    def write(self, run: Any) -> str:
        from arclight.cli.user_module import config_text
        from arclight.recipe import write

        return write(run) if self.target is None else config_text(run)


def parameters(subject: TunedRun, table: Mapping[str, Any] | None) -> list[Parameter]:
    """Return the parameters of a run's table ``search``.

    Raises UsageError with every problem.
    """
    if not table:
        raise UsageError(
            "there is nothing to search: give --search.FIELD low:high, as in --search.task.optimizer.lr 1e-4:1e-2:log, "
            "or a table [search] in the recipe"
        )
    problems: list[str] = []
    problems += [
        f"--search.{field}: a search sets {of_run} itself; leave it out"
        for field, _ in leaves(table)
        for of_run in OF_THE_RUN
        if f"{field}.".startswith(f"{of_run}.")
    ]
    fields = [field for field, _ in leaves(table)]
    problems += [f"--search.{field}: a field's name has no = in it" for field in fields if "=" in field]
    problems += [
        f"--search.{field}: has two ranges; leave out one" for field in sorted(set(fields)) if fields.count(field) > 1
    ]
    _raise(problems)
    given = {field: _parts(field, value, problems) for field, value in leaves(table)}
    try:
        check_short_flags([f"--{field}" for field in given], subject.schema)
    except UsageError as error:
        raise UsageError(_of_search(str(error))) from error
    sound = {field: split for field, split in given.items() if split is not None}
    run = _built(subject, {field: split.parts[0] for field, split in sound.items()}, problems)
    _raise(problems)
    found = [_parameter(field, split, _hint(run, field.split(".")), problems) for field, split in sound.items()]
    _raise(problems)
    made = [parameter for parameter in found if parameter is not None]
    first = {parameter.field: parameter.extremes()[0] for parameter in made}
    for parameter in made:
        for extreme in parameter.extremes()[1:]:
            _built(subject, {**first, parameter.field: extreme}, problems)
    _raise(problems)
    return made


def flags_of(parameters: Sequence[Parameter], values: Mapping[str, Any]) -> list[str]:
    """Return the flags that set ``values``, one for each parameter."""
    return [f"--{parameter.field}={parameter.text(values[parameter.field])}" for parameter in parameters]


def start(parameters: Sequence[Parameter], run: Any) -> dict[str, Any] | None:
    """Return the values that ``run`` has itself; None if one of them is not in its range."""
    own = {parameter.field: parameter.value_of(_value(run, parameter.field.split("."))) for parameter in parameters}
    return None if None in own.values() else own


def leaves(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values of nested tables, in TOML's order."""
    for name, value in sorted(table.items(), key=lambda item: isinstance(item[1], Mapping)):
        place = (*path, name)
        if isinstance(value, Mapping):
            yield from leaves(value, place)
        else:
            yield ".".join(place), value


class _FieldWords(NamedTuple):
    """A field's words, split: the parts of a range, or choices."""

    parts: list[str]
    is_range: bool


def _parts(field: str, value: Any, problems: list[str]) -> _FieldWords | None:
    if isinstance(value, list):
        options = [str(item).lower() if isinstance(item, bool) else str(item) for item in value]
    elif "," in (text := str(value)):
        options = [part.strip() for part in text.strip("[]").split(",")]
    elif 2 <= len(parts := text.split(":")) <= 3 and all(map(NUMBER.fullmatch, parts[:2])):
        return _FieldWords(parts, is_range=True)
    else:
        problems.append(f"--search.{field}: need {FORMS}, got {text!r}")
        return None
    if len(set(options)) < 2 or len(set(options)) < len(options) or not all(options):
        problems.append(f"--search.{field}: need two different choices or more, got {', '.join(options) or 'none'}")
        return None
    return _FieldWords(options, is_range=False)


def _parameter(field: str, given: _FieldWords, hint: Any, problems: list[str]) -> Parameter | None:
    parts = given.parts
    if not given.is_range:
        return Choice(field, tuple(parts))
    (low, high), rest = map(float, parts[:2]), parts[2:]
    kinds = set(_flat(hint))
    whole = all(re.fullmatch(r"[-+]?\d+", part) for part in parts[:2])
    integer = float not in kinds and (int in kinds or whole)
    log = rest == ["log"]
    step = float(rest[0]) if rest and NUMBER.fullmatch(rest[0]) else None
    if rest and not log and step is None:
        problems.append(f"--search.{field}: need {FORMS}, got {':'.join(parts)!r}")
    elif not (math.isfinite(low) and math.isfinite(high)) or (integer and max(-low, high) > MAX_WHOLE):
        problems.append(f"--search.{field}: too large a number, got {parts[0]} and {parts[1]}")
    elif not low < high:
        problems.append(f"--search.{field}: low must be less than high, got {parts[0]} and {parts[1]}")
    elif log and low <= 0:
        problems.append(f"--search.{field}: a logarithmic range starts above 0, got {parts[0]}")
    elif integer and not (whole and (step is None or step.is_integer())):
        problems.append(f"--search.{field} takes whole numbers, got {':'.join(parts)}")
    elif step is not None and not 0 < step <= high - low:
        problems.append(f"--search.{field}: a step lies between 0 and {high - low:g}, got {step:g}")
    else:
        return Range(field, low, high, log, step, integer)
    return None


def _built(subject: TunedRun, values: Mapping[str, str], problems: list[str]) -> Any:
    """Read the run with ``values``; note its problems under the names of the search, each once."""
    try:
        return subject.read([f"--{field}={value}" for field, value in values.items()])
    except RecipeError as error:
        problems += [text for problem in error.problems if (text := _of_search(problem)) not in problems]
        return None


def _of_search(problem: str) -> str:
    """Replace the fields' flags by those that are typed for a search."""
    return re.sub(r"--(?=\w)", "--search.", problem)


def _raise(problems: Sequence[str]) -> None:
    if problems:
        listed = problems[0] if len(problems) == 1 else "".join(f"\n  {problem}" for problem in problems)
        raise UsageError(listed if len(problems) == 1 else f"the search cannot be used:{listed}")


def _value(at: Any, path: Sequence[str]) -> Any:
    """Return what a run has at a path; None if there is nothing."""
    for name in path:
        if name == "kind" and dataclasses.is_dataclass(at) and not hasattr(at, "kind"):
            from arclight._intervals import kind_of

            return kind_of(type(at))
        inside = at.arguments if isinstance(at, Imported) else at
        at = inside.get(name) if isinstance(inside, Mapping) else getattr(inside, name, None)
    return at


def _hint(at: Any, path: Sequence[str]) -> Any:
    """Return the type of the field at a path; Any if it has none."""
    holder, leaf = _value(at, path[:-1]), path[-1]
    if isinstance(holder, Imported):
        return arguments_of(imported(holder.target)).get(leaf, (Any, None))[0]
    if dataclasses.is_dataclass(holder):
        return typing.get_type_hints(type(holder), include_extras=True).get(leaf, Any)
    return Any


def _flat(hint: Any) -> Iterator[Any]:
    """Yield the types that a hint is made of."""
    inner = typing.get_args(hint)
    yield from (kind for part in inner for kind in _flat(part)) if inner else (hint,)
