"""Mutants of a source file: one comparison, operator, `and`, integer or condition turned at a time."""

from __future__ import annotations

import ast
import copy
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

OPPOSITES: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
LARGEST_INT = 64


@dataclass(frozen=True)
class Mutant:
    """One change of a file. ``lines``: those of the turned code before; ``turned``: the first of them after."""

    lines: tuple[int, int]
    code: str
    turned: str
    source: str
    statement: int
    """First line of the statement it is in: what a tracer sees of code that spans several lines."""


def mutants(source: str) -> list[Mutant]:
    """List all mutants of a source in an order that is drawn by their text, so that an edit moves no others."""
    data = source.encode()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found, seen = [], Counter[str]()
    for node, new, statement in _changes(ast.parse(source)):
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        after = (data[:begin] + f"({ast.unparse(new)})".encode() + data[end:]).decode()
        code, turned = (text.splitlines()[node.lineno - 1].strip() for text in (source, after))
        seen[turned] += 1
        found.append(
            (f"{turned}#{seen[turned]}", Mutant((node.lineno, node.end_lineno), code, turned, after, statement))
        )
    return [one for _, one in sorted(found, key=lambda pair: hashlib.sha256(pair[0].encode()).digest())]


def _changes(module: ast.Module) -> Iterator[tuple[ast.expr, ast.expr, int]]:
    waiting: list[tuple[ast.AST, int]] = [(module, 1)]
    while waiting:
        node, statement = waiting.pop()
        if isinstance(node, ast.Raise | ast.JoinedStr) or _is_warning(node) or _is_for_checkers(node):
            continue  # messages and what never runs
        statement = node.lineno if isinstance(node, ast.stmt) else statement
        yield from ((at, new, statement) for at, new in _changes_of(node))
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns", "type_comment"):
                children = value if isinstance(value, list) else [value]
                waiting += [(child, statement) for child in children if isinstance(child, ast.AST)]


def _changes_of(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield node.test, ast.UnaryOp(ast.Not(), node.test)
    if isinstance(node, ast.Compare):
        for number, op in enumerate(node.ops):
            turned = copy.copy(node)
            turned.ops = [*node.ops[:number], OPPOSITES[type(op)](), *node.ops[number + 1 :]]
            yield node, turned
    elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in OPPOSITES and not _is_type(node):
        turned = copy.copy(node)
        turned.op = OPPOSITES[type(node.op)]()
        yield node, turned
    elif isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) <= LARGEST_INT:
        yield node, ast.Constant(node.value + 1)


def _is_type(node: ast.AST) -> bool:
    """Return True for None, a type, and a union of types such as ``int | None``, as far as their spelling says so."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.BitOr) and (_is_type(node.left) or _is_type(node.right))
    name = ast.unparse(node).rpartition(".")[2]
    return name in ("None", "int", "float", "str", "bool") or (name[:1].isupper() and not name.isupper())


def _is_warning(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("warn", "warning", "rank_zero_warn"))


def _is_for_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
