"""Facts about the source as a whole. The limits live in limits.toml."""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.house import facts

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCE = REPOSITORY / "src" / "arclight"
LIMITS = tomllib.loads((Path(__file__).parent / "limits.toml").read_text())
PACKAGE = facts.PACKAGE
FILES = sorted(PACKAGE.modules.values())
PACKAGES = sorted(path.parent for path in FILES if path.name == "__init__.py")


def tree(path: Path) -> ast.Module:
    return PACKAGE.parsed[PACKAGE.name_of(path)]


def place(path: Path, node: ast.AST | None = None) -> str:
    line = f":{getattr(node, 'lineno', 1)}" if node is not None else ""
    return f"{path.relative_to(REPOSITORY)}{line}"


def nodes(*kinds: type[ast.AST]) -> Iterator[tuple[Path, Any]]:
    return ((PACKAGE.modules[module], node) for module, node in PACKAGE.nodes(*kinds))


def lines_of(node: ast.AST) -> int:
    return node.end_lineno - node.lineno + 1  # type: ignore[attr-defined]


# ---------------------------------------------------------------------------------------------------- what is counted


def long_functions() -> list[str]:
    found = [(path, node) for path, node in nodes(ast.FunctionDef, ast.AsyncFunctionDef) if lines_of(node) > 60]
    return [f"{place(path, node)} {node.name} has {lines_of(node)} lines" for path, node in found]


def room_of(module: str) -> str | None:
    """The room, or top-level file, that a module belongs to."""
    parts = module.split(".")
    return parts[1] if parts[0] == "arclight" and len(parts) > 1 else None


def two_way_imports() -> list[str]:
    seen: set[tuple[str, str]] = set()
    for path in FILES:
        here = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        found = (one.name for one in PACKAGE.imports[PACKAGE.name_of(path)] if not one.for_types)
        seen |= {(here, room) for module in found if (room := room_of(module)) and room != here}
    return sorted(f"{a} <-> {b}" for a, b in seen if a < b and (b, a) in seen)


def public_names() -> list[str]:
    """Every name that a package promises."""
    modules = [".".join(path.relative_to(SOURCE.parent).parts) for path in PACKAGES]
    return [f"{name}.{item}" for name in modules for item in getattr(importlib.import_module(name), "__all__", [])]


def dependencies() -> list[str]:
    return list(tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"])


COUNTS: dict[str, Callable[[], list[str]]] = {
    "functions_over_60_lines": long_functions,
    "two_way_imports": two_way_imports,
    "dependencies": dependencies,
    "public_names": public_names,
    **{count.__name__: functools.partial(count, PACKAGE) for count in facts.FACTS},
}


@pytest.fixture(scope="module")
def small_tree(tmp_path_factory: pytest.TempPathFactory) -> facts.Tree:
    """A package that breaks every rule once, and keeps it beside that."""
    root = tmp_path_factory.mktemp("house") / "pack"
    files = {
        "__init__.py": '"""Whose package."""',
        "a/__init__.py": "",
        "a/one.py": "from pack.a import two\n\n\ndef f(trainer, x): trainer.x = x\n",
        "a/two.py": "def g(owner: Trainer | None):\n    from pack.a.one import f\n    self.trainer.y, z = 1, 2\n    owner.trainer.progress.step = 3\n",
        "a/part.py": f'"""{"Carry " * 15}"""\n\n\ndef f():\n    """{"Carry " * 15}on."""\n',
        "a/big.py": "import pack.a.part\n" + "x = 1\n" * 200,
        "b/__init__.py": "",
        "b/three.py": "if TYPE_CHECKING:\n    from pack.b.four import x\nimport pack.b.deep.four\n",
        "b/four.py": "import pack.b.three\nimportlib.import_module('pack.a.one')\nimport_module('os')\n",
        "b/deep/__init__.py": "",
        "b/deep/four.py": "from pack.b.three import y\n",
        "callbacks/__init__.py": "def h(trainer): ...\n",
        "callback.py": "def k(trainer): ...\n",
    } | {f"many/m{number}.py": "" for number in range(17)}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return facts.Tree(root)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("files_beyond_15_in_a_folder", 2), ("small_files_with_one_importer", 3), ("files_in_circles_at_run_time", 4),
        ("files_in_circles_with_types", 5), ("largest_circle_with_types", 3), ("circles_across_folders", 1),
        ("functions_that_take_a_trainer", 2), ("trainer_attributes_set_by_other_files", 3), ("file_names_twice_in_a_room", 1),
        ("docstrings_that_open_with_a_question_word", 1), ("long_first_lines_of_docstrings", 1), ("imports_by_text", 1),
    ],
)  # fmt: skip
def test_each_fact_is_counted(small_tree: facts.Tree, name: str, count: int) -> None:
    found = getattr(facts, name)(small_tree)
    assert len(found) == count, found


def test_every_fact_has_its_test() -> None:
    marks = test_each_fact_is_counted.pytestmark  # type: ignore[attr-defined]
    assert {name for name, _ in marks[0].args[1]} == {count.__name__ for count in facts.FACTS}


@pytest.mark.parametrize("limit", COUNTS)
def test_the_house_keeps_its_limits(limit: str) -> None:
    found = COUNTS[limit]()
    assert len(found) <= LIMITS[limit], f"{limit}: {len(found)}, allowed {LIMITS[limit]}: " + "; ".join(
        sorted(set(found))
    )


def test_every_limit_is_checked() -> None:
    assert set(LIMITS) == set(COUNTS)


# --------------------------------------------------------------------------------------------------- what is forbidden


def called(node: ast.AST) -> str:
    """The dotted name that a call calls, such as torch.load."""
    return facts.dotted(node.func) if isinstance(node, ast.Call) else ""


def test_the_package_never_unpickles() -> None:
    unpickling = ("pickle.load", "pickle.loads", "pickle.Unpickler", "dill.load", "cloudpickle.load", "joblib.load")
    found = [place(path, node) for path, node in nodes(ast.Call) if called(node) in unpickling]
    for path, node in nodes(ast.Call):
        if called(node) == "torch.load":
            options = {word.arg: ast.unparse(word.value) for word in node.keywords}
            found += [place(path, node)] if options.get("weights_only") != "True" else []
        if called(node) in ("np.load", "numpy.load"):
            options = {word.arg: ast.unparse(word.value) for word in node.keywords}
            found += [place(path, node)] if options.get("allow_pickle", "False") != "False" else []
    assert not found


def test_no_code_is_made_from_text() -> None:
    assert not [place(path, node) for path, node in nodes(ast.Call) if called(node) in ("eval", "exec", "os.system")]


def test_no_error_is_swallowed() -> None:
    found = []
    for path, node in nodes(ast.ExceptHandler):
        names = {"", "Exception", "BaseException"}
        everything = node.type is None or ast.unparse(node.type) in names
        silent = all(
            isinstance(line, ast.Pass) or (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
            for line in node.body
        )
        found += [place(path, node)] if everything and silent else []
    for path, node in nodes(ast.Call):
        if called(node).endswith("suppress") and {ast.unparse(a) for a in node.args} & {"Exception", "BaseException"}:
            found.append(place(path, node))
    assert not found


def test_no_work_is_left_for_later() -> None:
    pattern = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|NotImplementedError\(\)")
    texts = ((path, path.read_text(encoding="utf-8").splitlines()) for path in FILES)
    assert not [
        f"{place(path)}:{i}" for path, lines in texts for i, line in enumerate(lines, 1) if pattern.search(line)
    ]


OPENING = re.compile(r"test_(what|who|whom|whose|which|whichever|how|whether|where|when|why|nobody|nothing)(ever)?_")
"""A question word or a pronoun, by which a test's name says neither its subject nor what is asserted."""


def unnamed_tests(folder: Path) -> list[str]:
    return [
        f"{path.relative_to(folder)}:{number} {found[1]}"
        for path in sorted(folder.rglob("test_*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (found := re.match(r"\s*(?:async )?def (\w+)", line)) and OPENING.match(found[1])
    ]


def test_names_of_tests_open_with_a_subject(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(
        "def test_what_is_wrong_is_said(): ...\nclass TestX:\n    async def test_whoever_asks_waits(self): ...\n"
        "def test_whole_files_are_read(): ...\ndef test_howling_is_heard(): ...\n"
    )
    assert unnamed_tests(tmp_path) == ["test_x.py:1 test_what_is_wrong_is_said", "test_x.py:3 test_whoever_asks_waits"]
    assert unnamed_tests(REPOSITORY / "tests") == [], (
        "name the subject and what it does: secure_runs_refuse_unmasked_updates"
    )


EXPECTING = re.compile(r"assert\w*|raises|warns|fail|AssertionError")
"""Names by which a test expects something, beside the statement."""


def expects(node: ast.AST) -> bool:
    """Return True for code that can fail by what it finds, and for the start of a script that can."""
    return any(
        isinstance(one, ast.Assert)
        or (isinstance(one, ast.Name | ast.Attribute) and EXPECTING.fullmatch(facts.dotted(one).rpartition(".")[2]))
        or (isinstance(one, ast.Constant) and isinstance(one.value, str) and "assert " in one.value)
        or (isinstance(one, ast.keyword) and one.arg == "check" and ast.unparse(one.value) == "True")
        for one in ast.walk(node)
    )


class Definitions:
    """Definitions and imports of a file of tests, by name."""

    def __init__(self, folder: Path, path: Path) -> None:
        self.path, self.tree = path, ast.parse(path.read_text(encoding="utf-8"))
        self.nodes = dict(self._named())
        self._folder = folder

    def _named(self) -> Iterator[tuple[str, ast.AST]]:
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield node.name, node
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield from ((target.id, node) for target in targets if isinstance(target, ast.Name))

    @functools.cached_property
    def _imported(self) -> dict[str, tuple[Path, str]]:
        return {
            name.asname or name.name: (self._folder.parent.joinpath(*str(node.module).split(".")), name.name)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ImportFrom)
            for name in node.names
        }

    def tests(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        classes = (one for one in self.tree.body if isinstance(one, ast.ClassDef) and one.name.startswith("Test"))
        for node in (one for owner in (self.tree, *classes) for one in owner.body):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                yield node

    def places(self, name: str) -> list[tuple[Path, str]]:
        """List places of a name: this file or the one it is imported from, or else, as a fixture, folders above."""
        first, _, rest = name.partition(".")
        if first in self.nodes:
            return [(self.path, first)]
        if first in self._imported:
            start, original = self._imported[first]
            return [(start.with_suffix(".py"), original), (start / f"{original}.py", rest.partition(".")[0])]
        return [(folder / "conftest.py", first) for folder in self.path.parents]


def vain_tests(folder: Path) -> list[str]:
    """List tests that expect nothing: no assertion, error or warning in them, nor in what they use of the tests."""
    seen: dict[int, bool] = {}

    @functools.cache
    def of(path: Path) -> Definitions | None:
        return Definitions(folder, path) if path.is_file() else None

    def is_vain(within: Definitions, node: ast.AST) -> bool:
        if id(node) not in seen:
            seen[id(node)] = True  # while what it uses is looked at, which may use it in turn
            seen[id(node)] = not expects(node) and all(
                is_vain(*other)
                for name in {facts.dotted(one) for one in ast.walk(node) if isinstance(one, ast.Name | ast.Attribute)}
                | {one.arg for one in ast.walk(node) if isinstance(one, ast.arg)}
                for path, inner in within.places(name)
                if (file := of(path)) is not None and inner in file.nodes
                for other in [(file, file.nodes[inner])]
            )
        return seen[id(node)]

    return [
        f"{path.relative_to(folder)}:{node.lineno} {node.name}"
        for path in sorted(folder.rglob("test_*.py"))
        if (file := of(path)) is not None
        for node in file.tests()
        if is_vain(file, node)
    ]


def test_tests_can_fail(tmp_path: Path) -> None:
    files = {
        "shared.py": "def same(a): check(a)\ndef check(a): assert a\ndef show(a): print(a)\n",
        "conftest.py": "import pytest\n@pytest.fixture\ndef page(): return Page()\nclass Page:\n  def wait(self): assert self\n",
        "a/test_a.py": "import pytest\nfrom tests.shared import same, show\nfrom tests import shared\ndef work(): print(1)\n"
        "def test_vain(): show(work())\ndef test_asserts(): assert work()\ndef test_by_another(): same(work())\n"
        "def test_by_a_module(): shared.same(1)\ndef test_by_a_fixture(page): page.wait()\n"
        "def test_raises():\n  with pytest.raises(ValueError): work()\nclass TestOf:\n  def test_vain_too(self): shared.show(1)\n"
        "def test_of_a_script(): run('assert x', check=True)\nclass Net:\n  def test_step(self): pass\n",
    }
    for name, text in files.items():
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / name).write_text(text)
    assert vain_tests(tmp_path / "tests") == ["a/test_a.py:5 test_vain", "a/test_a.py:13 test_vain_too"]
    assert vain_tests(REPOSITORY / "tests") == [], "assert what follows from the call, or delete the test"


def questions(folder: Path) -> list[str]:
    return [
        f"{path.relative_to(folder)}:{getattr(node, 'lineno', 1)} {text.splitlines()[0]}"
        for path in sorted(folder.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and facts.QUESTION.match(text := ast.get_docstring(node) or "")
    ]


def test_docstrings_of_tests_are_statements(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        '"""What it holds."""\nclass A:\n    """Whatever is held."""\ndef b():\n    """How it goes."""\n'
    )
    assert questions(tmp_path) == ["a.py:1 What it holds.", "a.py:4 How it goes."]
    assert questions(REPOSITORY / "tests") == [], "say what is asserted, held or returned"


def test_every_room_says_what_it_is_for() -> None:
    missing = [place(path) for path in PACKAGES if not (ast.get_docstring(tree(path / "__init__.py")) or "").strip()]
    assert not missing


LISTS = {"cli.commands", "compat.lightning", "text.families", "trainer.callbacks", "trainer.loggers"}
"""Folders that are a list of one thing: a verb, a callback, a family in each file, which its name says."""


def test_every_room_is_a_map_of_its_files() -> None:
    unnamed = []
    for folder in PACKAGES:
        if PACKAGE.name_of(folder / "__init__.py").removeprefix("arclight.") in LISTS:
            continue
        text = ast.get_docstring(tree(folder / "__init__.py")) or ""
        files = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__", "errors", "settings"}
        rooms = {path.parent.name for path in folder.glob("*/__init__.py")}
        unnamed += [
            f"{place(folder)}: {name}"
            for name in sorted(files | rooms)
            if not name.startswith("_") and not re.search(rf"\b{name}\b", text)
        ]
    assert not unnamed


NAMES: dict[type[ast.AST], tuple[str, ...]] = {
    ast.Name: ("id",), ast.Attribute: ("attr",), ast.arg: ("arg",), ast.keyword: ("arg",), ast.alias: ("name", "asname"),
    ast.ImportFrom: ("module",), ast.FunctionDef: ("name",), ast.AsyncFunctionDef: ("name",), ast.ClassDef: ("name",),
    ast.ExceptHandler: ("name",), ast.MatchAs: ("name",), ast.MatchStar: ("name",), ast.Constant: ("value",),
}  # fmt: skip
"""Where names are, and texts that may be some."""


def names_written_in_code() -> set[str]:
    """Every word that the source uses as a name: of modules, definitions, arguments, attributes, and texts that are one word."""
    found = (
        set(dir(builtins))
        | {"arclight", "torch"}
        | {part for path in FILES for part in PACKAGE.name_of(path).split(".")}
    )
    texts = {getattr(node, field) for kind, fields in NAMES.items() for _, node in nodes(kind) for field in fields}
    return found | {part for text in texts if isinstance(text, str) and " " not in text for part in text.split(".")}


def test_docstrings_name_what_exists() -> None:
    """A name in single backticks is one of this package's: after a renaming it must follow."""
    known = names_written_in_code()
    found = []
    for path, node in nodes(ast.Expr):
        text = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else None
        for name in re.findall(r"(?<!`)`([A-Za-z_][\w.]*)`(?!`)", text if isinstance(text, str) else ""):
            if not name.startswith("torch.") and not (set(name.split(".")) <= known and is_in_its_module(name)):
                found.append(f"{place(path, node)}: {name}")
    assert not found


def is_in_its_module(name: str) -> bool:
    """Return False for ``module.member`` if modules of this name exist, and none of them writes the member or has it as a file."""
    *_, owner, member = (".", *name.split("."))
    homes = [path for path in FILES if owner == (path.parent.name if path.stem == "__init__" else path.stem)]
    return not homes or any(
        re.search(rf"\b{member}\b", path.read_text(encoding="utf-8")) or (path.parent / f"{member}.py").is_file()
        for path in homes
    )


def test_every_folder_of_the_package_is_a_room_with_a_face() -> None:
    folders = {path.parent for path in FILES}
    assert not [place(folder) for folder in folders if not (folder / "__init__.py").is_file()]


def test_every_public_name_is_there() -> None:
    """A lazy name whose module or object is gone would fail only when somebody uses it."""
    missing = []
    for name in public_names():
        package, _, item = name.rpartition(".")
        try:
            getattr(importlib.import_module(package), item)
        except (ImportError, AttributeError) as error:
            missing.append(f"{name}: {error}")
    assert not missing


def test_code_beside_the_package_imports_what_exists() -> None:
    """Benchmarks, examples and tests import in functions too, where nothing fails until the function is called."""
    files = [
        path for folder in ("benchmarks", "examples", "tests") for path in sorted((REPOSITORY / folder).rglob("*.py"))
    ]
    imports = [
        (place(path, node), node.module or "", alias.name)
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE.root.name
        for alias in node.names
    ]
    missing = [
        f"{where} {module}.{name}"
        for where, module, name in imports
        if f"{module}.{name}" not in PACKAGE.modules and not hasattr(importlib.import_module(module), name)
    ]
    assert missing == []


# ------------------------------------------------------------------------------------------------------- what is typed


def commands(program: str) -> list[str]:
    """The first word after ``program`` in every command of the README."""
    blocks = re.findall(r"```\w*\n(.*?)```", (REPOSITORY / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    return [word for block in blocks for word in re.findall(rf"^\$? ?{program} ([\w-]+)", block, re.MULTILINE)]


def test_the_commands_of_the_readme_exist() -> None:
    from arclight.cli.command import VERBS

    verbs = {verb for group in VERBS.values() for verb in group}
    targets = set(re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    if not commands("arclight") and not commands("make"):
        pytest.skip("the README has no commands yet")
    assert not [verb for verb in commands("arclight") if verb not in verbs]
    assert not [target for target in commands("make") if target not in targets]


def test_make_calls_existing_verbs() -> None:
    from arclight.cli.command import VERBS

    verbs = {verb for group in VERBS.values() for verb in group}
    typed = re.findall(r"arclight ([\w-]+)", (REPOSITORY / "Makefile").read_text(encoding="utf-8"))
    assert not [verb for verb in typed if verb not in verbs]
