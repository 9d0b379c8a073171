"""Mutants: source text with one small change of the syntax tree of a module."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
}
# messages are compared by few tests on purpose; nested functions are visited on their own
SKIPPED = (ast.JoinedStr, ast.Raise, ast.FunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Fault:
    """A change of one expression or statement.

    Attributes:
        path: file, relative to the repository.
        statement: first line of the statement, which coverage counts.
        line: first line of the changed code.
        end: end of the changed code as (line, column in bytes).
        column: start in bytes.
        kind: name of the change.
        before: source text.
        after: new source text.
    """

    path: str
    statement: int
    line: int
    column: int
    end: tuple[int, int]
    kind: str
    before: str
    after: str

    def applied(self, source: str) -> str:
        """Return the source text with the change."""
        lines = source.encode().splitlines(keepends=True)
        last, column = self.end
        head = b"".join(lines[: self.line - 1]) + lines[self.line - 1][: self.column]
        tail = lines[last - 1][column:] + b"".join(lines[last:])
        return (head + self.after.encode() + tail).decode()


def faults(path: str, root: Path) -> list[Fault]:
    """Return every fault of a file: inside functions only, as lines of an import belong to no test."""
    source = (root / path).read_text()
    result = []
    for statement, node, kind, changed in _changes(ast.parse(source)):
        before = ast.get_source_segment(source, node)
        if before is None or ast.unparse(node) == ast.unparse(changed):
            continue
        after = ast.unparse(changed)
        if isinstance(changed, ast.expr):
            after = f"({after})"
        end = (node.end_lineno or node.lineno, node.end_col_offset or 0)
        result.append(Fault(path, statement, node.lineno, node.col_offset, end, kind, before, after))
    return result


Change = tuple[ast.AST, str, ast.AST]


def _changes(tree: ast.Module) -> Iterator[tuple[int, ast.AST, str, ast.AST]]:
    """Yield the statement's line, a node inside a function, the name of a change, and the new node."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and not _for_triton(function):
            for statement in function.body:
                yield from _within(statement, statement.lineno)


def _for_triton(function: ast.FunctionDef) -> bool:
    """Return whether a function is a kernel, which runs in an interpreter of its own."""
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def _within(node: ast.AST, statement: int) -> Iterator[tuple[int, ast.AST, str, ast.AST]]:
    """Yield the changes of a node and its children; nested functions have their own turn."""
    if isinstance(node, ast.stmt):
        statement = node.lineno
    if isinstance(node, ast.Raise):
        yield statement, node, "error removed", ast.Pass()
    if isinstance(node, SKIPPED):
        return
    for changed in _of(node):
        yield statement, *changed
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _within(child, statement)


def _of(node: ast.AST) -> Iterator[Change]:
    """Yield the changes of one node."""
    new = copy.deepcopy(node)
    match new:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            new.ops = [COMPARISONS[type(op)]()]
            yield node, "comparison", new
        case ast.BinOp(op=op) if type(op) in OPERATORS and not _text(new):
            new.op = OPERATORS[type(op)]()
            yield node, "arithmetic", new
        case ast.BoolOp(op=op):
            new.op = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield node, "and, or", new
        case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=operand):
            yield node, "negation removed", operand
        case ast.Constant(value=bool() as value):
            yield node, "constant", ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield node, "constant", ast.Constant(value + 1 if isinstance(value, int) else 2 * value or 1.0)
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            yield node.test, "condition negated", ast.UnaryOp(ast.Not(), test)
        case ast.Expr(value=ast.Call()):
            yield node, "call removed", ast.Pass()
        case ast.AugAssign():
            yield node, "update removed", ast.Pass()
        case ast.Return(value=value) if value is not None and not isinstance(value, ast.Constant):
            yield node, "result removed", ast.Return(ast.Constant(None))


def _text(node: ast.BinOp) -> bool:
    """Return whether an operation joins strings, or types of an annotation."""
    sides = (node.left, node.right)
    return any(
        isinstance(side, ast.JoinedStr) or (isinstance(side, ast.Constant) and isinstance(side.value, str))
        for side in sides
    )
