"""Every file, heading and function that a page points to exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])
LINK = re.compile(r"!?\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
PATH = re.compile(r"`((?:src|tests|docs|benchmarks|recipes|examples)/[\w./-]*)`")


def text_of(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def links(page: Path) -> Iterator[tuple[str, Path, str]]:
    """Yield text, file and fragment of each link of ``page`` that stays in the repository."""
    for found in LINK.finditer(text_of(page)):
        target, _, fragment = found["target"].partition("#")
        if "://" not in target and not target.startswith("mailto:"):
            yield found["text"], (page.parent / target).resolve() if target else page, fragment


def headings(page: Path) -> set[str]:
    """Return the fragments of a page's headings, as GitHub makes them."""
    lines = re.findall(r"^#+ +(.*)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


@cache
def definitions(path: Path) -> frozenset[str]:
    """Return the names that a module defines: functions, classes, their methods, constants."""
    found: set[str] = set()
    if not path.exists():
        return frozenset()

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            if isinstance(node, ast.Assign):
                found.update(prefix + target.id for target in node.targets if isinstance(target, ast.Name))
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(prefix + node.target.id)

    visit(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return frozenset(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    found = list(links(page))
    missing = [(text, file) for text, file, _ in found if not file.exists()]
    headless = [
        (text, part) for text, file, part in found if part and file.suffix == ".md" and part not in headings(file)
    ]
    assert (missing, headless) == ([], [])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_functions_that_a_page_links_to_are_defined_there(page: Path) -> None:
    code = [(text.strip("`()"), file) for text, file, _ in links(page) if file.suffix == ".py" and text.startswith("`")]
    own = [(name, file) for name, file in code if file.is_relative_to(ROOT / "src") and re.fullmatch(r"[\w.]+", name)]
    assert [(name, str(file.relative_to(ROOT))) for name, file in own if name not in definitions(file)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_that_a_page_names_exist(page: Path) -> None:
    if page.name != "CHANGELOG.md":  # which speaks of former versions as well
        assert [path for path in PATH.findall(text_of(page)) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_that_a_page_writes_are_in_their_modules(page: Path) -> None:
    if page.name in (
        "CHANGELOG.md",
        "migrate-from-lightning.md",
    ):  # of former versions; tested by tests/compat/test_guide.py
        return
    missing = []
    for name in re.findall(r"`(arclight(?:\.\w+)+)", text_of(page)):
        module, parts = ROOT / "src" / "arclight", name.split(".")[1:]
        while parts and ((module / parts[0]).is_dir() or (module / f"{parts[0]}.py").is_file()):
            module /= parts.pop(0)
        found = [
            module.with_suffix(".py"),
            *module.glob("__init__.py*"),
        ]  # compat has stubs of modules that are made from a table
        text = "".join(file.read_text(encoding="utf-8") for file in found if file.is_file())
        if parts and not re.search(rf"\b{parts[0]}\b", text):
            missing.append(name)
    assert missing == []


def test_every_decision_is_listed_once_under_its_title() -> None:
    folder = ROOT / "docs" / "decisions"
    rows = re.findall(r"^\| \[(\d+)\]\((\S+)\) \| (.*?) \|", (folder / "README.md").read_text(), re.MULTILINE)
    pages = sorted(path for path in folder.glob("*.md") if path.name != "README.md")
    titles = [path.read_text(encoding="utf-8").splitlines()[0] for path in pages]
    assert [f"# {number}. {title}" for number, _, title in rows] == titles
    assert [file for _, file, _ in rows] == [path.name for path in pages]
    assert [int(number) for number, _, _ in rows] == list(range(1, len(rows) + 1))
