"""Reading, overriding, checking, explaining and writing recipes."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
import textwrap
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from arclight._intervals import former_names
from arclight.recipe import MISSING, Imported, RecipeError, explain, read, write


@dataclass(frozen=True, kw_only=True)
class Momentum:
    """Step along a velocity."""

    lr: float = 0.1
    """Step size."""
    decay: float = 0.9
    """Velocity decay, in [0, 1)."""

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay must be in [0, 1), got {self.decay}")


@dataclass(frozen=True, kw_only=True)
class Adaptive:
    """Step by the ratio of two moments."""

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the moments."""
    groups: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Photos:
    """Learn from photos."""

    data: Path
    """Folder of photos."""
    size: int = 640
    """Side, pixels."""
    weights: Path | None = Path("start.pt")
    """Where to start."""
    optimizer: Adaptive | Momentum = field(default_factory=lambda: Adaptive(lr=0.5))
    """How weights move."""


@dataclass(frozen=True, kw_only=True)
class Words:
    """Learn from words."""

    depth: int = 12


@dataclass(frozen=True, kw_only=True)
class Loop:
    max_epochs: int | None = None
    """Passes over the data."""
    precision: Literal["fp32", "bf16"] = "fp32"
    limit: int | float | None = None
    devices: int | Literal["auto"] = "auto"
    fast: bool = False
    notes: dict[str, Any] = field(default_factory=dict)
    workers: Annotated[int, Field(ge=0)] = 2
    rates: dict[str, Annotated[float, Field(ge=0)] | tuple[Annotated[float, Field(ge=0)], ...]] = field(
        default_factory=dict
    )
    every: Annotated[int, Field(ge=1)] | str | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything about one run."""

    name: str = "run"
    """What the run is called."""
    tag: str | None = None
    seed: int = 0
    task: Photos | Words
    """What is learned."""
    loop: Loop = field(default_factory=Loop)
    """How long."""
    average: Momentum | None = None
    """Averaging, if any."""


PHOTOS = {"task": {"kind": "photos", "data": "x"}}

number = st.floats(allow_nan=False)
word = st.text().filter(lambda text: text != "none")
momentum = st.builds(Momentum, lr=number, decay=st.floats(0, 0.99))
adaptive = st.builds(Adaptive, lr=number, betas=st.tuples(number, number), groups=st.lists(st.text()))
path = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])).filter(lambda text: text != "none")
photos = st.builds(
    Photos,
    data=path.map(Path),
    size=st.integers(),
    weights=st.none() | path.map(Path),
    optimizer=momentum | adaptive,
)
plain = st.booleans() | st.integers() | number | st.text()
loops = st.builds(
    Loop,
    max_epochs=st.none() | st.integers(),
    precision=st.sampled_from(["fp32", "bf16"]),
    limit=st.none() | st.integers() | number,
    devices=st.integers() | st.just("auto"),
    fast=st.booleans(),
    notes=st.dictionaries(st.text(), plain | st.lists(plain) | st.dictionaries(st.text(), plain)),
    workers=st.integers(min_value=0),
)
plans = st.builds(
    Plan,
    name=st.text(),
    tag=st.none() | word,
    seed=st.integers(),
    task=photos | st.builds(Words, depth=st.integers()),
    loop=loops,
    average=st.none() | momentum,
)


def problems(*arguments: Any, schema: type = Plan) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        read(schema, *arguments)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return caught.value.problems


@settings(max_examples=60, deadline=None, derandomize=True)
@given(plans)
def test_a_recipe_survives_being_written_and_read(plan: Plan) -> None:
    again = read(Plan, tomllib.loads(write(plan)))
    assert again == plan
    assert type(again.loop.limit) is type(plan.loop.limit)  # 1 and 1.0 are different limits


@settings(max_examples=40, deadline=None, derandomize=True)
@given(plans, st.integers())
def test_an_override_changes_that_field_only(plan: Plan, n: int) -> None:
    changed = read(Plan, tomllib.loads(write(plan)), ["--loop.max_epochs", str(n)])
    assert changed == dataclasses.replace(plan, loop=dataclasses.replace(plan.loop, max_epochs=n))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(plans)
def test_a_new_kind_starts_from_its_own_defaults(plan: Plan) -> None:
    table = tomllib.loads(write(plan))
    if isinstance(plan.task, Words):
        assert read(Plan, table, ["--task.kind", "photos", "--task.data=y"]).task == Photos(data=Path("y"))
    else:
        assert read(Plan, table, ["--task.kind", "words"]).task == Words()
        other, fresh = ("momentum", Momentum()) if isinstance(plan.task.optimizer, Adaptive) else ("adaptive", None)
        moved = read(Plan, table, ["--task.optimizer.kind", other])
        # The default of the field is Adaptive(lr=0.5): what help shows is what one gets.
        assert moved.task == dataclasses.replace(plan.task, optimizer=fresh or Adaptive(lr=0.5))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(plans)
def test_naming_the_kind_that_is_there_changes_nothing(plan: Plan) -> None:
    table = tomllib.loads(write(plan))
    assert read(Plan, table, ["--task", type(plan.task).__name__.lower()]) == plan


keys = ["task", "kind", "optimizer", "loop", "seed", "lr", "data", "betas", "average", "limit", "notes", "q", ""]
leaves = st.none() | plain | st.sampled_from(["photos", "words", "momentum", "none", "a:b", "os:path", "auto"])
anything = st.recursive(
    leaves,
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(keys) | st.integers(), inner),
    max_leaves=12,
)


tables = st.dictionaries(st.sampled_from(keys) | st.integers(), anything)


def is_a_recipe_or_refused(table: Any) -> None:
    with contextlib.suppress(RecipeError):
        assert isinstance(read(Plan, table), Plan)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(tables)
def test_any_table_is_a_recipe_or_a_recipe_error(table: Any) -> None:
    is_a_recipe_or_refused(table)


@pytest.mark.slow
@settings(max_examples=400, deadline=None, derandomize=True)
@given(tables)
def test_any_of_many_tables_is_a_recipe_or_a_recipe_error(table: Any) -> None:
    is_a_recipe_or_refused(table)


flag = st.lists(st.sampled_from(keys), min_size=1, max_size=3).map(lambda parts: "--" + ".".join(parts))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(flag | leaves.map(str), max_size=6))
def test_any_flags_are_a_recipe_or_a_recipe_error(flags: list[str]) -> None:
    with contextlib.suppress(RecipeError):
        assert isinstance(read(Plan, PHOTOS, flags), Plan)


def test_the_types_of_fields_are_evaluated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = read(Plan, PHOTOS, ["--task.optimizer.lr", "0.5"])

    def evaluate(cls: type, **_: Any) -> None:
        raise AssertionError(f"the types of {cls.__name__} are evaluated again")

    monkeypatch.setattr("arclight.recipe.typing.get_type_hints", evaluate)
    assert read(Plan, PHOTOS, ["--task.optimizer.lr", "0.5"]) == plan


def test_every_problem_is_reported_at_once_with_its_place() -> None:
    table = {"loop": {"max_epoch": 3, "fast": "yes"}, "task": {"kind": "photo"}, "seeds": 1, "average": 3}
    flags = ["--loop.precision", "bf61", "--loop.limit", "lots", "--nme=x", "--tag"]
    assert problems(table, flags) == [
        "--tag needs a value",
        "loop.max_epoch is not a field of Loop; did you mean loop.max_epochs?",
        "loop.fast: need true | false, got 'yes'",
        "--loop.precision: need fp32 | bf16, got 'bf61'; did you mean bf16?",
        "--loop.limit: need int | number | none, got 'lots'",
        "task.kind: need a kind, got 'photo'; did you mean photos?",
        "seeds is not a field of Plan; did you mean seed?",
        "average: need a table (momentum), got 3",
        "--nme is not a field of Plan; did you mean --name?",
    ]


@pytest.mark.parametrize(
    "table, said",
    [
        ({}, "task is missing; Plan needs it: photos | words"),
        ({"task": {}}, "task.kind: need a kind, got None; there is photos, words"),
        ({"task": "photos"}, "task.data is missing; Photos needs it: path"),
        (
            {"task": "words", "loop": {"zzz": 1}},
            "loop.zzz is not a field of Loop; there is max_epochs, precision, limit, devices, fast, notes, workers, rates, every",
        ),
        ({"task": "words", "average": {"decay": 2}}, "average: decay must be in [0, 1), got 2.0"),
        ({"task": "words", "seed": "3"}, "seed: need int, got '3'"),
        ({"task": "words", "seed": True}, "seed: need int, got True"),
        ({"task": "words", "seed": 3.0}, "seed: need int, got 3.0"),
        ({"task": "words", "name": 3}, "name: need text, got 3"),
        ({"task": "words", "loop": {"workers": -1}}, "loop.workers: need int (Ge(ge=0)), got -1"),
        ({"task": "nowhere.x:Y"}, "task.kind: nowhere.x:Y cannot be imported: No module named 'nowhere'"),
        ({"task": "os.path:sjoin"}, "task.kind: os.path:sjoin: os.path has no sjoin"),
        ({"task": ":Y"}, "task.kind: :Y names nothing: write package.module:Name or file.py:name"),
        (
            {"task": "collections:OrderedDict"},
            "task.kind: OrderedDict is neither a dataclass nor has it a constructor written in Python",
        ),
        (
            {"task": {"kind": "photos", "data": "x", "optimizer": {"betas": [1]}}},
            "task.optimizer.betas: need [number, number], got [1]",
        ),
    ],
)
def test_bad_tables_are_explained(table: Any, said: str) -> None:
    assert problems(table) == [said]


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--loop.max_epoch", "7"], "--loop.max_epoch is not a field of Loop; did you mean --loop.max_epochs?"),
        (["--task.optimizer", "adaptiv"], "--task.optimizer.kind: need a kind, got 'adaptiv'; did you mean adaptive?"),
        (["loop.fast"], "loop.fast: write an override as --table.field value"),
        (["--loop.fast", "--seed", "3"], "--loop.fast needs a value"),
        (["--seed.x", "1"], "--seed: need int, got a table"),
        (["--task.optimizer.lr", "fast"], "--task.optimizer.lr: need number, got 'fast'"),
        (["--task.kind", "words"], None),
    ],
)
def test_bad_flags_are_explained(flags: list[str], said: str | None) -> None:
    if said is None:
        assert read(Plan, PHOTOS, flags).task == Words()
    else:
        assert problems(PHOTOS, flags) == [said]


def test_a_flag_into_a_table_changes_that_one_value_only() -> None:
    table = {**PHOTOS, "loop": {"notes": {"model": {"x": 1, "y": [2]}, "z": 9}, "rates": {"second": 1.0}}}
    made = read(
        Plan, table, ["--loop.notes.model.x", "3", "--loop.notes.model.deep.er", "true", "--loop.rates.first", "2"]
    )
    assert made.loop.notes == {"model": {"x": 3, "y": [2], "deep": {"er": True}}, "z": 9}
    assert made.loop.rates == {"second": 1.0, "first": 2.0}
    assert problems(table, ["--loop.rates.first", "-1"]) == [
        "--loop.rates.first: need number (Ge(ge=0)) | list of number (Ge(ge=0)), got '-1'"
    ]
    assert problems({**PHOTOS, "loop": {"rates": {"second": "x"}}}) == [
        "loop.rates.second: need number (Ge(ge=0)) | list of number (Ge(ge=0)), got 'x'"
    ]
    assert problems(table, ["--loop.rates", "5"]) == [
        "--loop.rates: need table of number (Ge(ge=0)) | list of number (Ge(ge=0)), got '5'"
    ]


def test_a_key_that_comes_twice_is_refused_in_yaml_too(tmp_path: Path) -> None:
    for text in ("seed: 1\nseed: 2\ntask: words\n", "task: words\nloop:\n  fast: true\n  fast: false\n"):
        (tmp_path / "a.yaml").write_text(text)
        assert "comes twice" in problems(tmp_path / "a.yaml")[0]
    (tmp_path / "a.yaml").write_text("task: words\nloop: &a {fast: true}\naverage: {<<: {lr: 1.0}, lr: 2.0}\n")
    made = read(Plan, tmp_path / "a.yaml")
    assert made.average == Momentum(lr=2.0)
    assert made.loop.fast
    # the mapping that is merged lies deeper, so that it is taken in before it is a table of its own
    text = "task: words\nloop: {notes: {deep: &b {<<: {lr: 1.0}, lr: 2.0}}}\naverage: {<<: *b, decay: 0.5}\n"
    (tmp_path / "a.yaml").write_text(text)
    made = read(Plan, tmp_path / "a.yaml")
    assert made.average == Momentum(lr=2.0, decay=0.5)
    assert made.loop.notes == {"deep": {"lr": 2.0}}


@pytest.mark.parametrize(
    "flags, path, value",
    [
        (["--name", "123"], "name", "123"),
        (["--name=--x"], "name", "--x"),
        (["--seed", "-1"], "seed", -1),
        (["--tag", "none"], "tag", None),
        (["--loop.limit", "1"], "loop.limit", 1),
        (["--loop.limit", "1.0"], "loop.limit", 1.0),
        (["--loop.limit", ".5"], "loop.limit", 0.5),
        (["--loop.devices", "auto"], "loop.devices", "auto"),
        (["--loop.devices", "2"], "loop.devices", 2),
        (["--loop.fast", "true"], "loop.fast", True),
        (["--loop.notes.depth", "3"], "loop.notes", {"depth": 3}),
        (["--loop.notes.name", "three"], "loop.notes", {"name": "three"}),
        (["--loop.rates.first", "0.5"], "loop.rates", {"first": 0.5}),
        (["--loop.rates.first", "1,2.5"], "loop.rates", {"first": (1.0, 2.5)}),
        (["--task.optimizer.groups", ""], "task.optimizer.groups", []),
        (["--tag", "None"], "tag", None),
        (["--tag", "null"], "tag", None),
        (["--loop.every", "5"], "loop.every", 5),
        (["--loop.every", "00:05"], "loop.every", "00:05"),
        (["--loop.notes", "{depth = 3}"], "loop.notes", {"depth": 3}),
        (["--task.optimizer.lr", "3e-4"], "task.optimizer.lr", 3e-4),
        (["--task.optimizer.betas", "0.1, 0.2"], "task.optimizer.betas", (0.1, 0.2)),
        (["--task.optimizer.betas", "[0.1, 0.2]"], "task.optimizer.betas", (0.1, 0.2)),
        (["--task.optimizer.groups", "1,b"], "task.optimizer.groups", ["1", "b"]),
        (["--task.weights", "7"], "task.weights", Path("7")),
        (["--average", "momentum"], "average", Momentum()),
        (["--average.lr", "1"], "average", Momentum(lr=1.0)),
        (["--task.optimizer.lr", "2", "--task.optimizer", "momentum"], "task.optimizer", Momentum(lr=2.0)),
        (["--seed", "1", "--seed", "2"], "seed", 2),
    ],
)
def test_flags_are_read_as_what_their_field_needs(flags: list[str], path: str, value: Any) -> None:
    got: Any = read(Plan, PHOTOS, flags)
    for name in path.split("."):
        got = getattr(got, name)
    assert got == value
    assert type(got) is type(value)


def test_files_in_toml_and_yaml_are_equivalent(tmp_path: Path) -> None:
    toml, yaml = tmp_path / "a.toml", tmp_path / "a.yaml"
    toml.write_text('[task]\nkind = "photos"\ndata = "x"\nweights = "none"\noptimizer = {lr = 3e-4}\n')
    yaml.write_text("task:\n  kind: photos\n  data: x\n  weights: null\n  optimizer: {lr: 3e-4}\n")
    assert read(Plan, toml) == read(Plan, yaml)
    task = read(Plan, toml).task
    assert isinstance(task, Photos)
    assert (task.weights, task.optimizer) == (None, Adaptive(lr=3e-4))
    for file in (toml, yaml):  # as editors of Windows save it
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n"))
        assert read(Plan, file).task == task


@pytest.mark.parametrize(
    "name, text, said",
    [
        ("a.toml", "seed = = 3", "a.toml cannot be read: Invalid value (at line 1, column 8)"),
        ("a.yaml", "[1", "a.yaml cannot be read: while parsing a flow sequence"),
        ("a.yaml", "- 1", "a recipe is a table of settings, got [1]"),
        ("a.txt", "", "a.txt: a recipe is a .toml or .yaml file, or a function as in my_runs.py:function"),
        ("b.toml", None, "b.toml cannot be read: No such file or directory"),
    ],
)
def test_bad_files_are_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str | None, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path(name).write_text(text)
    assert problems(name)[0].startswith(said)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A person's own file: classes that the schema does not know, and functions that return a recipe."""
    file = tmp_path / "my_own_runs.py"
    file.write_text(
        textwrap.dedent('''
        from dataclasses import dataclass, field

        @dataclass(frozen=True, kw_only=True)
        class Sounds:
            """Learn from sounds."""
            rate: int = 16_000

        class Machine:
            def __init__(self, depth: int, name: str | None = "m", *rest, **more) -> None:
                self.built = depth, name

        recipe = None

        def small():
            return recipe
        ''')
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    yield file
    sys.modules.pop("my_own_runs", None)


def test_a_class_of_ones_own_comes_in_by_its_path(runs: Path) -> None:
    plan = read(Plan, {"task": {"kind": f"{runs}:Sounds"}}, ["--task.rate", "8000"])
    assert type(plan.task).__name__ == "Sounds"
    assert plan.task.rate == 8000
    assert 'kind = "my_own_runs:Sounds"' in write(plan)
    assert read(Plan, tomllib.loads(write(plan))) == plan
    assert problems({"task": {"kind": "my_own_runs.py:Sounds", "rat": 1}}) == [
        "task.rat is not a field of Sounds; did you mean task.rate?"
    ]


def test_a_class_that_is_no_dataclass_is_checked_and_built_later(runs: Path) -> None:
    plan = read(Plan, {"task": {"kind": f"{runs}:Machine", "depth": 3, "name": "none"}})
    assert plan.task == Imported(target="my_own_runs:Machine", arguments={"depth": 3, "name": None})
    assert plan.task.build().built == (3, None)
    assert read(Plan, tomllib.loads(write(plan))) == plan
    assert problems({"task": "my_own_runs:Machine"}) == ["task.depth is missing; Machine needs it: int"]
    assert problems({"task": {"kind": "my_own_runs:Machine", "depth": "3", "more": 1}}) == [
        "task.depth: need int, got '3'",
        "task.more is not a field of Machine; there is depth, name",
    ]


def test_a_function_may_return_the_recipe(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems(f"{runs}:small") == [f"{runs}:small must return a Plan, it returned None"]
    module = sys.modules["my_own_runs"]
    monkeypatch.setattr(module, "recipe", Plan(task=Words(depth=3)))
    assert read(Plan, "my_own_runs.py:small", ["--seed", "4"]) == Plan(task=Words(depth=3), seed=4)
    assert read(Plan, "my_own_runs:small").task == Words(depth=3)
    monkeypatch.setattr(module, "recipe", Plan(task=Words(depth="3")))  # type: ignore[arg-type]
    assert problems("my_own_runs:small") == ["task.depth: need int, got '3'"]


def test_a_file_named_like_another_module_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "tomllib.py"
    file.write_text("small = 1")
    assert problems(f"{file}:small")[0].startswith(f"{file}:small: another module is called tomllib (")
    assert problems(f"{file}x.py:small") == [f"{file}x.py:small: there is no file {file}x.py"]


@pytest.mark.parametrize("plan", [Plan(task=Words(), tag="none"), Plan(task=Words(), loop=Loop(notes={"a": None}))])
def test_values_a_recipe_cannot_express_are_not_written(plan: Plan) -> None:
    with pytest.raises(RecipeError, match="cannot be written in a recipe"):
        write(plan)


def test_a_field_is_left_out_only_if_it_is_none_by_default() -> None:
    text = write(Plan(task=Photos(data=Path("x"), weights=None)))
    assert 'weights = "none"' in text
    assert "tag" not in text
    assert "average" not in text


def test_explain_lists_every_field_of_every_kind() -> None:
    rows = {(row.path, row.kind): row for row in explain(Plan)}
    assert rows["name", ""] == ("name", "", "text", "run", "What the run is called.")
    assert rows["task", ""].default is MISSING
    assert rows["task", ""].type == "photos | words"
    assert rows["task.kind", "photos"].doc == "Learn from photos."
    assert rows["task.size", "photos"] == ("task.size", "photos", "int", 640, "Side, pixels.")
    assert rows["task.optimizer.lr", "adaptive"].default == 0.5  # of the field's default, not of the class
    assert rows["task.optimizer.lr", "momentum"].default == 0.1
    assert rows["task.optimizer.betas", "adaptive"].type == "[number, number]"
    assert rows["loop.limit", ""].type == "int | number | none"
    assert rows["average.decay", "momentum"].doc == "Velocity decay, in [0, 1)."
    assert len(rows) == 32


def test_reading_a_recipe_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, arclight.recipe as r, arclight.vision.tasks.settings as s; r.read(s.DetectionTask, {'data': 'x'}); "
    code += "print([m for m in ('torch', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@former_names(inertia="momentum")
@dataclass(frozen=True, kw_only=True)
class Wheel:
    momentum: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Cart:
    wheel: Wheel = field(default_factory=Wheel)


FORMER, TODAY = "--wheel.inertia=5", "--wheel.momentum=6"


@pytest.mark.parametrize(
    ("file", "flags", "momentum"),
    [({"inertia": 1.0}, [TODAY], 6), ({"momentum": 2.0}, [FORMER], 5), ({"inertia": 1.0}, [FORMER], 5)],
)
def test_a_flag_goes_over_a_file_under_either_name_of_a_field(
    file: dict[str, float], flags: list[str], momentum: float
) -> None:
    with pytest.warns(FutureWarning, match="wheel.inertia is called momentum now"):
        assert read(Cart, {"wheel": file}, flags) == Cart(wheel=Wheel(momentum=momentum))


IN_FILE = "wheel.inertia and wheel.momentum are one field; give one of them"
IN_FLAGS = "--wheel.inertia and --wheel.momentum are one field; give one of them"


@pytest.mark.parametrize(
    ("file", "flags", "problems"),
    [
        (["inertia", "momentum"], [FORMER], [IN_FILE]),
        (["inertia", "momentum"], [TODAY], [IN_FILE]),
        (["inertia"], [FORMER, TODAY], [IN_FLAGS]),
        (["momentum"], [FORMER, TODAY], [IN_FLAGS]),
        (["inertia", "momentum"], [FORMER, TODAY], [IN_FILE, IN_FLAGS]),
    ],
)
def test_both_names_of_a_field_in_one_place_are_refused_by_that_place(
    file: list[str], flags: list[str], problems: list[str]
) -> None:
    with pytest.warns(FutureWarning), pytest.raises(RecipeError) as refused:
        read(Cart, {"wheel": dict.fromkeys(file, 1.0)}, flags)
    assert refused.value.problems == problems
