"""Read recipes from a file or a function, override by flags, check, explain and write them.

The schema is any frozen, keyword-only dataclass, and reading returns an instance, as Python code would make it. A table fills a dataclass;
if a field allows several, ``kind`` chooses: a name in lower case, or ``package.module:Class`` for a class of your own. A text instead of a
table is its kind. If a flag chooses another kind than the file, the file's table is not used. TOML has no null: the text ``"none"`` stands
for it if a field may be empty.

``cli`` reads, explains and writes recipes by this, ``text.evaluation.suite_settings`` reads suites. Recipes that were valid stay valid;
former names (`_intervals`) are accepted for one release. Importing it imports neither torch nor numpy, which import-linter checks.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import functools
import importlib
import inspect
import itertools
import json
import re
import sys
import textwrap
import tomllib
import types
import typing
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

from arclight._installed import pip_install
from arclight._intervals import describe, kind_of, refused_kinds, renamed_value, todays_name, todays_value
from arclight._stored_names import current

T = TypeVar("T")


class RecipeError(ValueError):
    """Raised for a recipe that cannot be used; lists every problem at once."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True, kw_only=True)
class Imported:
    """Class of a user's own that is no dataclass, with arguments checked by its types."""

    target: str  # package.module:Class
    arguments: Mapping[str, Any]

    def build(self) -> Any:
        return imported(self.target)(**self.arguments)


def read(schema: type[T], source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> T:
    """Read the recipe in ``source``, with ``overrides``, as an object of ``schema``.

    ``source`` is a .toml or .yaml file, ``my_runs.py:function``, ``package.module:function``, or a table;
    ``overrides`` are flags: ``["--trainer.max_epochs", "3", "--seed=7"]``, a list ``[1, 2]`` or ``1,2``.
    Raises RecipeError with every problem found.
    """
    problems: list[str] = []
    flags = _flags(overrides, problems)
    table = source if isinstance(source, Mapping) else _load(schema, str(source))
    if not isinstance(table, Mapping):
        problems.insert(0, f"a recipe is a table of settings, got {_shown(table)}")
    made: T = _build(schema, _Source("", table, flags, problems))
    if problems:
        raise RecipeError(problems)
    return made


def _load(schema: type, source: str) -> Any:
    suffix = Path(source).suffix
    if suffix not in (".toml", ".yaml", ".yml"):
        if ":" not in source:
            raise RecipeError(f"{source}: a recipe is a .toml or .yaml file, or a function as in my_runs.py:function")
        made = imported(source)()
        if type(made) is not schema:
            raise RecipeError(f"{source} must return a {schema.__name__}, it returned {_shown(made)}")
        return _plain(made, schema)
    try:
        text = Path(source).read_text(encoding="utf-8-sig")
        return tomllib.loads(text) if suffix == ".toml" else _parse_yaml(text)
    except (OSError, ValueError) as error:
        raise RecipeError(f"{source} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _parse_yaml(text: str) -> Any:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise RecipeError(f"YAML needs PyYAML: {pip_install('vision')}, or write the recipe in TOML") from error

    class Loader(yaml.SafeLoader):  # the rules below are not for others
        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            """Refuse a key that comes twice in the text, before `<<` merges other mappings."""
            node: yaml.MappingNode = super().compose_mapping_node(anchor)
            keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
            if twice := [key for key in keys if keys.count(key) > 1]:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {twice[0]!r} comes twice", node.start_mark
                )
            return node

    loader: Any = Loader
    number = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$")  # to YAML 1.1 3e-4 is text; people mean a number
    loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    try:
        return yaml.load(text, loader)  # noqa: S506  (a SafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(error) from error


def imported(target: str) -> Any:
    """Import the object that ``package.module:name`` or ``file.py:name`` names.

    Former names are known too. Raises RecipeError if there is none.
    """
    module_name, _, name = current(target).rpartition(":")
    path = Path(module_name).resolve() if module_name.endswith(".py") else None
    if path is not None:
        if not path.is_file():
            raise RecipeError(f"{target}: there is no file {module_name}")
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        module_name = path.stem
    if not all(part.isidentifier() for part in [*module_name.split("."), name]):
        raise RecipeError(f"{target} names nothing: write package.module:Name or file.py:name")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise RecipeError(f"{target} cannot be imported: {error}") from error
    if path is not None and Path(module.__file__ or "").resolve() != path:
        raise RecipeError(f"{target}: another module is called {module_name} ({module.__file__}); rename the file")
    if not hasattr(module, name):
        raise RecipeError(f"{target}: {module_name} has no {name}")
    return getattr(module, name)


def _flags(arguments: Sequence[str], problems: list[str]) -> dict[str, Any]:
    """Parse flags into a tree of tables whose leaves are the texts typed.

    A text for a whole table is its kind.
    """
    tree: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        flag, equals, text = rest.pop(0).partition("=")
        path = flag.removeprefix("--").split(".")
        if not flag.startswith("--") or not all(path):
            problems.append(f"{flag}: write an override as --table.field value")
        elif not equals and (not rest or rest[0].startswith("--")):
            problems.append(f"{flag} needs a value")
        else:
            table, leaf = tree, path[-1]
            for name in path[:-1]:
                if not isinstance(table.get(name), dict):
                    table[name] = {"kind": table[name]} if name in table else {}
                table = table[name]
            if isinstance(table.get(leaf), dict):
                table, leaf = table[leaf], "kind"
            table[leaf] = text if equals else rest.pop(0)
    return tree


class _Source(NamedTuple):
    """Value at one place of a recipe, from its file and a flag; MISSING if there is none."""

    where: str
    file: Any
    flag: Any
    problems: list[str]

    @property
    def value(self) -> Any:
        both = isinstance(self.file, Mapping) and isinstance(self.flag, Mapping)
        return {**self.file, **self.flag} if both else self.file if self.flag is MISSING else self.flag

    @property
    def place(self) -> str:
        return self.where if self.flag is MISSING else f"--{self.where}"

    def tables(self) -> Iterator[dict[str, Any]]:
        """Yield file and flags as tables; a lone text is a kind."""
        for part in (self.file, self.flag):
            yield {"kind": part} if isinstance(part, str) else dict(part) if isinstance(part, Mapping) else {}

    def fields(self) -> dict[str, _Source]:
        file, flag = self.tables()
        return {name: self.at(f".{name}", file.get(name, MISSING), flag.get(name, MISSING)) for name in file | flag}

    def at(self, suffix: str, file: Any, flag: Any = MISSING) -> _Source:
        return _Source((self.where + suffix).removeprefix("."), file, flag, self.problems)

    def wrong(self, what: str) -> None:
        self.problems.append(f"{self.place}{what}")


def _build(cls: type[Any], source: _Source, base: Any = None) -> Any:
    """Build an instance of ``cls`` from a recipe.

    ``base``, an instance, has the values that the recipe leaves out.
    """
    fields, given, values, known = _fields(cls), _todays_names(cls, source.fields()), {}, len(source.problems)
    for name, field in given.items():
        if name in fields:
            hint, default = fields[name]
            today = _todays(cls, name, field)
            values[name] = _convert(hint, today, default if base is None else getattr(base, name))
        else:
            near = _nearest(str(name), fields, field.place.removesuffix(str(name)))
            field.wrong(f" is not a field of {cls.__name__}; {near}")
    for name, (hint, default) in fields.items():
        if default is MISSING and base is None and name not in given:
            source.at(f".{name}", MISSING).wrong(f" is missing; {cls.__name__} needs it: {describe(hint)}")
    if len(source.problems) > known:
        return None
    try:
        if not dataclasses.is_dataclass(cls):
            return Imported(target=f"{cls.__module__}:{cls.__qualname__}", arguments=values)
        return cls(**values) if base is None else dataclasses.replace(base, **values)
    except ValueError as error:
        source.problems.append(f"{source.where or cls.__name__}: {error}")


def _todays_names(cls: type[Any], given: dict[str, _Source]) -> dict[str, _Source]:
    """Return a recipe's fields under today's names, with a warning for former ones.

    A flag goes over a file under either name.
    """
    found: dict[str, _Source] = {}
    for said_name, field in given.items():
        name = todays_name(cls, said_name)
        if name != said_name:
            warnings.warn(
                f"{field.place} is called {name} now; the former name is read for one more release", FutureWarning, 3
            )
        other = found.get(name)
        if other is None:
            found[name] = field
        elif MISSING not in (other.file, field.file) or MISSING not in (other.flag, field.flag):
            former, today = (other.where, field.where) if name == said_name else (field.where, other.where)
            for dashes, values in (("", (other.file, field.file)), ("--", (other.flag, field.flag))):
                if MISSING not in values:
                    field.problems.append(f"{dashes}{former} and {dashes}{today} are one field; give one of them")
        elif field.flag is MISSING:
            found[name] = other._replace(file=field.file)
        else:
            found[name] = field._replace(file=other.file)
    return found


def _todays(cls: type[Any], name: str, field: _Source) -> _Source:
    """Return ``field`` with its value as it is called today, and warn of a former one."""
    value = field.value
    today = todays_value(cls, name, value)
    if today is value:
        return field
    warnings.warn(renamed_value(field.place, value, today), FutureWarning, 3)
    return field._replace(file=today) if field.flag is MISSING else field._replace(flag=today)


def _convert(hint: Any, source: _Source, default: Any = MISSING) -> Any:
    """Convert a value to the type ``hint``; record a problem if it does not fit."""
    classes, others, empty = _members(hint)
    if empty and (source.value is None or source.value == "none" or source.flag in ("None", "null")):
        return None
    if (item := _item(hint)) is not None:
        return _list(item, source, typing.get_origin(hint))
    if classes and (not others or isinstance(source.value, Mapping)):
        return _select_variant(classes, source, default)
    if isinstance(source.value, Mapping) and (values := _values_of(others)) is not None:
        return {name: _convert(values, field) for name, field in source.fields().items()}
    return _parse_scalar(hint, source)


def _values_of(hints: list[Any]) -> Any:
    """Return the type of a table's values among ``hints``, or None."""
    for hint in hints:
        if hint is Any:
            return Any
        if typing.get_origin(hint) is dict and typing.get_args(hint)[0] is str:
            return typing.get_args(hint)[1]
    return None


def _list(item: Any, source: _Source, kind: Any) -> Any:
    """Return a list or tuple of tables; a flag gives all of them, as TOML."""
    values = source.file if source.flag is MISSING else next(_candidate_values(Any, str(source.flag)))
    if not isinstance(values, list):
        return source.wrong(f": need a list of tables ({describe(item)}), got {_shown(values)}")
    return kind(_convert(item, source.at(f"[{number}]", value)) for number, value in enumerate(values))


def _parse_scalar(hint: Any, source: _Source) -> Any:
    from pydantic import PydanticUserError, TypeAdapter, ValidationError

    for candidate in _candidate_values(hint, source.flag) if isinstance(source.flag, str) else [source.value]:
        with contextlib.suppress(ValidationError, PydanticUserError):  # the latter: a type that is not made of data
            # Strict JSON is what a recipe means: text is not a number, but may be a path; a list may be a tuple.
            return TypeAdapter(hint).validate_json(json.dumps(candidate, default=str), strict=True)
    near = difflib.get_close_matches(str(source.value), describe(hint).split(" | "), 1)
    return source.wrong(
        f": need {describe(hint)}, got {_shown(source.value)}" + "".join(f"; did you mean {x}?" for x in near)
    )


def _candidate_values(hint: Any, text: str) -> Iterator[Any]:
    """Yield the meanings of a command-line text, likeliest first: text, TOML value, list."""

    def value(part: str) -> Any:
        with contextlib.suppress(tomllib.TOMLDecodeError):
            return tomllib.loads(f"x = {part}")["x"]
        with contextlib.suppress(ValueError):
            return float(part)  # .5 is a number to people, though not to TOML
        return part

    parts_of = {
        typing.get_args(part)[0] if typing.get_origin(part) is Annotated else part for part in typing.get_args(hint)
    }
    yield from (value(text), text) if {bool, int, float} & parts_of or hint is Any else (text, value(text))
    if not text.startswith("["):
        parts = [part.strip() for part in text.split(",")] if text else []
        yield from (parts, [value(part) for part in parts])


def _select_variant(classes: list[Any], source: _Source, default: Any) -> Any:
    """Return an instance of one of ``classes``, chosen by kind."""
    kinds = {kind_of(cls): cls for cls in classes}
    if not isinstance(source.value, Mapping | str):
        return source.wrong(f": need a table ({' | '.join(kinds)}), got {_shown(source.value)}")
    file, flag = source.tables()
    usual = type(default) if dataclasses.is_dataclass(default) else classes[0] if len(classes) == 1 else None
    place = f"{'--' if 'kind' in flag else ''}{source.where}.kind"
    before, chosen = file.pop("kind", usual), flag.pop("kind", MISSING)
    before, chosen = (kinds.get(kind, kind) if isinstance(kind, str) else kind for kind in (before, chosen))
    if chosen not in (before, MISSING):
        file = {}  # another kind starts from its own defaults
    chosen = before if chosen is MISSING else chosen
    try:
        chosen = imported(chosen) if isinstance(chosen, str) and ":" in chosen else chosen
        if isinstance(chosen, type):
            base = default if type(default) is chosen else None
            return _build(chosen, source.at("", file, flag), base)
        advice = refused_kinds(classes).get(str(chosen).lower()) or _nearest(str(chosen), kinds)
        source.problems.append(f"{place}: need a kind, got {_shown(chosen)}; {advice}")
    except RecipeError as error:
        source.problems.append(f"{place}: {error}")


def _members(hint: Any) -> tuple[list[Any], list[Any], bool]:
    """Return the dataclasses of a union, its other types, and whether none is allowed."""
    members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    classes = [member for member in members if dataclasses.is_dataclass(member)]
    return classes, [m for m in members if m not in classes and m is not type(None)], type(None) in members


def _item(hint: Any) -> Any:
    """Return the item type of a list of tables; None for any other type."""
    inner = typing.get_args(hint) if typing.get_origin(hint) in (list, tuple) else ()
    return inner[0] if inner and _members(inner[0])[0] else None


def _fields(cls: Any) -> dict[str, tuple[Any, Any]]:
    """Map the names that a table for ``cls`` may hold to (type, default)."""
    if dataclasses.is_dataclass(cls):
        hints = _hints(cls)  # type: ignore[arg-type]
        fields = [f for f in dataclasses.fields(cls) if f.init]
        return {
            f.name: (hints[f.name], f.default_factory() if callable(f.default_factory) else f.default) for f in fields
        }
    if cls.__init__ is object.__init__ and cls.__new__ is object.__new__:
        return {}
    if not inspect.isfunction(cls.__init__):
        raise RecipeError(f"{cls.__name__} is neither a dataclass nor has it a constructor written in Python")
    return arguments_of(cls)


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    """Evaluate the types of a dataclass's fields, cached: it is half the time of reading."""
    return typing.get_type_hints(cls, include_extras=True)


def arguments_of(cls: Any) -> dict[str, tuple[Any, Any]]:
    """Map each argument of a constructor to (type, default).

    Any without annotation, MISSING without default.
    """
    hints = typing.get_type_hints(cls.__init__, include_extras=True)
    return {
        p.name: (hints.get(p.name, Any), MISSING if p.default is p.empty else p.default)
        for p in inspect.signature(cls).parameters.values()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }


def _shown(value: Any) -> str:
    return "a table" if isinstance(value, Mapping) else textwrap.shorten(repr(value), 80, placeholder="...")


def _nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {prefix}{near[0]}?" if near else f"there is {', '.join(known) or 'none'}"


def write(recipe: Any) -> str:
    """Write a recipe as TOML text that reads back as an equal object.

    Raises RecipeError for a value that no recipe can express.
    """
    return toml_text(_plain(recipe, type(recipe)))


def _plain(value: Any, hint: Any, default: Any = MISSING) -> Any:
    """Return ``value`` as tables, lists, text and numbers."""
    classes, _, empty = _members(hint)
    if isinstance(value, Imported):
        fields = _fields(imported(value.target))
        return {"kind": value.target} | {name: _plain(item, fields[name][0]) for name, item in value.arguments.items()}
    if dataclasses.is_dataclass(value):
        cls = type(value)
        kind = kind_of(cls) if cls in classes else f"{cls.__module__}:{cls.__qualname__}"
        table: dict[str, Any] = {} if hint in (cls, cls | None) else {"kind": kind}
        for name, (of, usual) in _fields(cls).items():
            item, usual = getattr(value, name), getattr(default, name) if type(default) is cls else usual
            if item is not None or usual is not None:
                table[name] = _plain(item, of, usual)
        return table
    if isinstance(value, Mapping):
        return {name: _plain(item, Any) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item, _item(hint) or Any) for item in value]
    if value is None and empty:
        return "none"
    if not isinstance(value, str | int | float | Path) or (empty and value == "none"):
        raise RecipeError(f"{_shown(value)} cannot be written in a recipe as {describe(hint)}")
    return str(value) if isinstance(value, Path) else value


class Setting(NamedTuple):
    """Field of a schema: dotted path, kind of its table, type, default and docstring."""

    path: str
    kind: str
    type: str
    default: Any  # MISSING if a recipe must give it
    doc: str


def explain(schema: Any, path: str = "", kind: str = "", base: Any = None) -> list[Setting]:
    """List every field that a recipe of ``schema`` may have, in order.

    If a table has several kinds, or may be empty, the fields of each kind follow its ``kind``.
    """
    docs, about = _field_docs(schema), (inspect.getdoc(schema) or "").partition("\n")[0]
    settings = [Setting(f"{path}.kind", kind, kind, MISSING, about)] if kind else []
    for name, (hint, default) in _fields(schema).items():
        default = default if base is None else getattr(base, name)
        classes, _, empty = _members(_item(hint) or hint)
        place = f"{path}.{name}" if path else name
        settings.append(Setting(place, kind, describe(hint), default, docs.get(name, "")))
        for cls in classes:
            chosen = kind_of(cls) if len(classes) > 1 or empty else ""
            below = place + "[]" * (_item(hint) is not None)
            settings += explain(cls, below, chosen, default if type(default) is cls else None)
    return settings


def _field_docs(cls: Any) -> dict[str, str]:
    """Return the docstring under each field, read from the source."""
    return {name: text for owner in reversed(cls.__mro__[:-1]) for name, text in _own_field_docs(owner).items()}


@functools.cache
def _own_field_docs(cls: Any) -> dict[str, str]:
    """Return the docstring under each field of a class itself."""
    docs = {}
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    for field, doc in itertools.pairwise(getattr(tree, "body", ())):
        match field, doc:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = inspect.cleandoc(text)
    return docs


def toml_text(table: Mapping[str, Any]) -> str:
    """Return ``table`` as TOML that reads back equal; tables within lists are inline.

    Written here because Python reads TOML only, and tomli-w would be one more dependency of the core for what are twenty lines.
    """
    return "\n".join(_lines(table)).lstrip("\n") + "\n"


def _lines(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> list[str]:
    lines = [f"{_key(name)} = {_literal(value)}" for name, value in table.items() if not isinstance(value, Mapping)]
    for name, value in table.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{'.'.join(map(_key, (*path, name)))}]", *_lines(value, (*path, name))]
    return lines


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _literal(name)


def _literal(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(name)} = {_literal(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
