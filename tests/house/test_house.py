"""Facts about the source as a whole. The limits live in limits.toml."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCE = REPOSITORY / "src" / "arclight"
LIMITS = tomllib.loads((Path(__file__).parent / "limits.toml").read_text())
FILES = sorted(SOURCE.rglob("*.py"))
PACKAGES = sorted(path.parent for path in FILES if path.name == "__init__.py")


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def place(path: Path, node: ast.AST | None = None) -> str:
    line = f":{getattr(node, 'lineno', 1)}" if node is not None else ""
    return f"{path.relative_to(REPOSITORY)}{line}"


def nodes(kind: type | tuple[type, ...]) -> Iterator[tuple[Path, ast.AST]]:
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, kind):
                yield path, node


def lines_of(node: ast.AST) -> int:
    return node.end_lineno - node.lineno + 1  # type: ignore[attr-defined]


# ---------------------------------------------------------------------------------------------------- what is counted


def long_functions() -> list[str]:
    found = [(path, node) for path, node in nodes((ast.FunctionDef, ast.AsyncFunctionDef)) if lines_of(node) > 60]
    return [f"{place(path, node)} {node.name} has {lines_of(node)} lines" for path, node in found]


def room_of(module: str) -> str | None:
    """The room, or top-level file, that a module belongs to."""
    parts = module.split(".")
    return parts[1] if parts[0] == "arclight" and len(parts) > 1 else None


def imports(path: Path) -> Iterator[str]:
    """Modules imported anywhere in a file, except for type checkers only."""
    waiting: list[ast.AST] = [tree(path)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            waiting.extend(node.orelse)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            waiting.extend(ast.iter_child_nodes(node))


def two_way_imports() -> list[str]:
    seen: set[tuple[str, str]] = set()
    for path in FILES:
        here = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        seen |= {(here, room) for module in imports(path) if (room := room_of(module)) and room != here}
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
}


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
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def test_nothing_is_ever_unpickled() -> None:
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


def test_nothing_is_left_for_later() -> None:
    pattern = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|NotImplementedError\(\)")
    texts = ((path, path.read_text(encoding="utf-8").splitlines()) for path in FILES)
    assert not [
        f"{place(path)}:{i}" for path, lines in texts for i, line in enumerate(lines, 1) if pattern.search(line)
    ]


def test_every_room_says_what_it_is_for() -> None:
    missing = [place(path) for path in PACKAGES if not (ast.get_docstring(tree(path / "__init__.py")) or "").strip()]
    assert not missing


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


def test_what_make_runs_exists() -> None:
    from arclight.cli.command import VERBS

    verbs = {verb for group in VERBS.values() for verb in group}
    typed = re.findall(r"arclight ([\w-]+)", (REPOSITORY / "Makefile").read_text(encoding="utf-8"))
    assert not [verb for verb in typed if verb not in verbs]
