"""Count what makes the package hard to live in; every figure may only fall (limits.toml).

`test_house` compares each count of `FACTS` with its limit. A new count is a function of a `Tree` in `FACTS`, a limit, and a case of
``test_each_fact_is_counted``.
"""

from __future__ import annotations

import ast
import functools
import gc
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

MOST_MODULES = 15
"""Modules of a folder; more mean that it has sub-concepts without names."""
SMALL = 150
"""A module of fewer lines that only a sibling imports counts as a part of that sibling."""
LONGEST_FIRST_LINE = 90
"""Characters of a docstring's first line: what an editor or an index shows of it."""
COMMON_NAMES = frozenset({"settings", "base", "errors"})
"""Names of files that a room may have in several folders."""
QUESTION = re.compile(r"(What|Whether|How|Who|Whose|Where|Which|When|Why|From)\b")


@contextmanager
def _kept() -> Iterator[None]:
    """Create many lasting objects without garbage collection, and leave them out of later collections."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class Import(NamedTuple):
    """One imported name, and when the import is carried out."""

    name: str
    in_function: bool
    for_types: bool


@dataclass(frozen=True)
class Tree:
    """All modules of a package, parsed."""

    root: Path

    @functools.cached_property
    def modules(self) -> dict[str, Path]:
        """Dotted name to file."""
        return {self.name_of(path): path for path in sorted(self.root.rglob("*.py"))}

    def name_of(self, path: Path) -> str:
        names = path.relative_to(self.root.parent).with_suffix("").parts
        return ".".join(names[:-1] if names[-1] == "__init__" else names)

    @functools.cached_property
    def parsed(self) -> dict[str, ast.Module]:
        with _kept():
            return {name: ast.parse(path.read_text(encoding="utf-8"), str(path)) for name, path in self.modules.items()}

    @functools.cached_property
    def _by_kind(self) -> dict[str, dict[type[ast.AST], list[ast.AST]]]:
        """The nodes of each module by their class, sorted once: there are a million, and a dozen counts read them."""
        found: dict[str, dict[type[ast.AST], list[ast.AST]]] = {}
        with _kept():
            for module, parsed in self.parsed.items():
                kinds = found[module] = defaultdict(list)
                for node in ast.walk(parsed):
                    kinds[type(node)].append(node)
        return found

    def nodes(self, *kinds: type[ast.AST]) -> Iterator[tuple[str, Any]]:
        """Nodes of these very classes, with their modules."""
        return ((module, node) for module in self.modules for kind in kinds for node in self.of(module, kind))

    def of(self, module: str, kind: type[ast.AST]) -> list[Any]:
        return self._by_kind[module].get(kind, [])

    @functools.cached_property
    def imports(self) -> dict[str, list[Import]]:
        return {name: list(_imports(tree, False, False)) for name, tree in self.parsed.items()}

    def place(self, module: str, node: ast.AST | None = None) -> str:
        line = f":{getattr(node, 'lineno', 1)}" if node is not None else ""
        return f"{self.modules[module].relative_to(self.root.parent)}{line}"

    def graph(self, *, types: bool) -> dict[str, set[str]]:
        """Module to the modules that it imports at run time, also within functions; with ``types`` those for type checkers too.

        A module's own packages, which Python imports before it, are left out.
        """
        edges: dict[str, set[str]] = {name: set() for name in self.modules}
        for module, found in self.imports.items():
            targets = {self._target(one.name) for one in found if types or not one.for_types}
            edges[module] = {t for t in targets if t is not None and t != module and not module.startswith(f"{t}.")}
        return edges

    def _target(self, name: str) -> str | None:
        while name not in self.modules:
            name, _, last = name.rpartition(".")
            if not last or not name:
                return None
        return name

    def functions(self) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        yield from self.nodes(ast.FunctionDef, ast.AsyncFunctionDef)


def dotted(node: ast.AST) -> str:
    """Return the names of an expression, such as torch.load; one that starts with no name starts with ``...``."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id if isinstance(node, ast.Name) else "...", *reversed(names)])


def _imports(node: ast.AST, in_function: bool, for_types: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, in_function, for_types) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        if node.level == 0 and node.module:
            yield from (Import(f"{node.module}.{alias.name}", in_function, for_types) for alias in node.names)
    elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for child in node.body:
            yield from _imports(child, in_function, True)
        for child in node.orelse:
            yield from _imports(child, in_function, for_types)
    else:
        inside = in_function or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):  # no expression imports by a statement
                yield from _imports(child, inside, for_types)


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return groups of modules each of which reaches all others of its group, largest first (Kosaraju)."""
    backwards: dict[str, set[str]] = {name: set() for name in edges}
    for name, targets in edges.items():
        for target in targets:
            backwards[target].add(name)
    seen: set[str] = set()
    order = [name for start in edges for name in _finished(start, edges, seen)]
    seen = set()
    groups = [sorted(_finished(name, backwards, seen)) for name in reversed(order) if name not in seen]
    return sorted((group for group in groups if len(group) > 1), key=len, reverse=True)


def _finished(start: str, edges: dict[str, set[str]], seen: set[str]) -> list[str]:
    """Return the names reached from ``start`` that are not in ``seen`` yet, in post-order."""
    if start in seen:
        return []
    seen.add(start)
    done, way = [], [(start, iter(sorted(edges[start])))]
    while way:
        name, rest = way[-1]
        further = next((other for other in rest if other not in seen), None)
        if further is None:
            done.append(name)
            way.pop()
        else:
            seen.add(further)
            way.append((further, iter(sorted(edges[further]))))
    return done


def _in_circles(tree: Tree, *, types: bool) -> list[str]:
    found = circles(tree.graph(types=types))
    return [f"{name} (of {len(group)}: {', '.join(group[:4])}...)" for group in found for name in group]


def files_in_circles_at_run_time(tree: Tree) -> list[str]:
    return _in_circles(tree, types=False)


def files_in_circles_with_types(tree: Tree) -> list[str]:
    return _in_circles(tree, types=True)


def largest_circle_with_types(tree: Tree) -> list[str]:
    return (circles(tree.graph(types=True)) or [[]])[0]


def circles_across_folders(tree: Tree) -> list[str]:
    """Circles at run time whose modules lie in several folders, or are more than three."""
    found = circles(tree.graph(types=False))
    return [
        ", ".join(group) for group in found if len({tree.modules[name].parent for name in group}) > 1 or len(group) > 3
    ]


def files_beyond_15_in_a_folder(tree: Tree) -> list[str]:
    counts = Counter(path.parent for path in tree.modules.values() if path.name != "__init__.py")
    return [
        f"{folder.relative_to(tree.root.parent)} has {count}"
        for folder, count in counts.items()
        for _ in range(count - MOST_MODULES)
    ]


def small_files_with_one_importer(tree: Tree) -> list[str]:
    """Small modules that are imported by one module only, which lies beside them."""
    importers: dict[str, set[str]] = defaultdict(set)
    for module, targets in tree.graph(types=False).items():
        for target in targets:
            importers[target].add(module)
    found = []
    for module, path in tree.modules.items():
        beside = {name for name in importers[module] if name.rpartition(".")[0] == module.rpartition(".")[0]}
        is_small = path.name != "__init__.py" and len(path.read_text(encoding="utf-8").splitlines()) < SMALL
        if is_small and len(importers[module]) == 1 and beside:
            found.append(f"{tree.place(module)} is a part of {beside.pop()}")
    return found


def docstrings_that_open_with_a_question_word(tree: Tree) -> list[str]:
    found = []
    for module, node in tree.nodes(ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef):
        text = ast.get_docstring(node) or ""
        found += [f"{tree.place(module, node)} {text.splitlines()[0]}"] if QUESTION.match(text) else []
    return found


def long_first_lines_of_docstrings(tree: Tree) -> list[str]:
    """First lines of docstrings over 90 characters."""
    found = []
    for module, node in tree.nodes(ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef):
        first, *_ = (ast.get_docstring(node) or "").splitlines() or [""]
        if len(first) > LONGEST_FIRST_LINE:
            found.append(f"{tree.place(module, node)} ({len(first)}) {first}")
    return found


def functions_that_take_a_trainer(tree: Tree) -> list[str]:
    """Functions with a parameter called trainer, or one under another name whose type is a Trainer.

    Callbacks and their base class are left out: the trainer is what their hooks are called with.
    """

    def is_one(argument: ast.arg) -> bool:
        annotated = ast.unparse(argument.annotation) if argument.annotation is not None else ""
        return (
            argument.arg == "trainer" or re.fullmatch(r"['\"]?(\w+\.)*Trainer['\"]?( \| None)?", annotated) is not None
        )

    return [
        f"{tree.place(module, node)} {node.name}"
        for module, node in tree.functions()
        if not {"callback", "callbacks"} & set(module.split("."))
        and any(map(is_one, (*node.args.args, *node.args.kwonlyargs)))
    ]


def trainer_attributes_set_by_other_files(tree: Tree) -> list[str]:
    """Attributes of an object called trainer, kept as one or reached through one, that are assigned to from outside of it."""
    found: dict[str, set[str]] = defaultdict(set)
    for module, node in tree.nodes(ast.Assign, ast.AugAssign, ast.AnnAssign):
        for target in _assigned(node):
            if isinstance(target, ast.Attribute) and {"trainer", "_trainer"} & set(dotted(target.value).split(".")):
                found[dotted(target).rpartition("trainer.")[2]].add(tree.place(module))
    return [f"trainer.{name}: {', '.join(sorted(places))}" for name, places in sorted(found.items())]


def _assigned(node: ast.Assign | ast.AugAssign | ast.AnnAssign) -> Iterator[ast.expr]:
    targets: Iterable[ast.expr] = node.targets if isinstance(node, ast.Assign) else (node.target,)
    for target in targets:
        yield from target.elts if isinstance(target, (ast.Tuple, ast.List)) else (target,)


def file_names_twice_in_a_room(tree: Tree) -> list[str]:
    inside = [path.relative_to(tree.root) for path in tree.modules.values() if path.name != "__init__.py"]
    counts = Counter(
        (path.parts[0], path.stem) for path in inside if len(path.parts) > 1 and path.stem not in COMMON_NAMES
    )
    return [f"{room}: {name}.py {count} times" for (room, name), count in counts.items() if count > 1]


def imports_by_text(tree: Tree) -> list[str]:
    """Imports of the package's own modules by a name in quotes, which no checker of imports sees."""
    return [
        tree.place(module, node)
        for module, node in tree.nodes(ast.Call)
        if dotted(node.func).rpartition(".")[2] in ("import_module", "__import__")
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and str(node.args[0].value).startswith(f"{tree.root.name}.")
    ]


FACTS: tuple[Callable[[Tree], list[str]], ...] = (
    files_beyond_15_in_a_folder,
    small_files_with_one_importer,
    files_in_circles_at_run_time,
    files_in_circles_with_types,
    largest_circle_with_types,
    circles_across_folders,
    functions_that_take_a_trainer,
    trainer_attributes_set_by_other_files,
    file_names_twice_in_a_room,
    docstrings_that_open_with_a_question_word,
    long_first_lines_of_docstrings,
    imports_by_text,
)

PACKAGE = Tree(Path(__file__).resolve().parents[2] / "src" / "arclight")
"""One for all tests: parsing is what takes time."""
