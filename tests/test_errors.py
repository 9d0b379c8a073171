"""Error messages: nouns agree with their counts, and names in backticks exist."""

import ast
import functools
import re
from pathlib import Path

import pytest

from vispe.errors import counted

pytestmark = pytest.mark.usefixtures("without_collector")
PACKAGE = Path(__file__).parents[1] / "vispe"
NOUNS = """
    axes blocks cells channels classes colours coordinates entries features files frames groups heads images indices
    items keys labels layers levels objects pages pairs patches pixels points positions prompts queries rows samples
    sequences shapes slices steps tiles tokens values videos views weights windows words
"""
BEFORE = re.compile(r"(\b\d (or|to)|up to|all|All| x) $")  # "1 or 4 heads", "0 to 12 tokens", "all 12 heads"
EXCEPTIONS = (  # strings stored in results, or without `counted` so far
    "evaluate/audit/checkpoint.py",
    "hosts/transformers/language/image_placeholders.py",
)


@pytest.mark.parametrize(
    ("n", "noun", "expected"),
    [
        (0, "image", "0 images"),
        (1, "image", "1 image"),
        (2, "axis", "2 axes"),
        (1, "axis", "1 axis"),
        ("1 or 2", "axis", "1 or 2 axes"),
        ("1", "axis", "1 axis"),
        (3, "patch", "3 patches"),
        (3, "class", "3 classes"),
        (3, "query", "3 queries"),
        (3, "key", "3 keys"),
        (3, "index", "3 indices"),
        (1, "labelled pixel", "1 labelled pixel"),
        (11, "labelled pixel", "11 labelled pixels"),
    ],
)
def test_a_count_agrees_with_its_noun(n, noun, expected):
    assert counted(n, noun) == expected


def is_count(expression):
    """Return whether an expression is certainly an integer that may be 1."""
    return (
        (isinstance(expression, ast.Call) and getattr(expression.func, "id", None) == "len")
        or (isinstance(expression, ast.Subscript) and getattr(expression.value, "attr", None) == "shape")
        or getattr(expression, "attr", None) in ("axes", "depth", "tokens", "pairs", "heads", "num_heads")
    )


def plurals(path, nodes):
    """Yield the f-strings of a file with an unconditional plural after a count."""
    pattern = re.compile(rf" (?:[a-z-]+ ){{0,2}}?({'|'.join(NOUNS.split())})\b")
    for node in nodes:
        if not isinstance(node, ast.JoinedStr):
            continue
        parts = [*node.values, ast.Constant("")]
        for previous, value, text in zip([ast.Constant(""), *parts], parts, parts[1:], strict=False):
            if not (isinstance(value, ast.FormattedValue) and is_count(value.value)):
                continue
            before = previous.value if isinstance(previous, ast.Constant) else ""
            match = isinstance(text, ast.Constant) and pattern.match(text.value)
            if match and not BEFORE.search(before):
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(value.value)}{match[0]}"


def test_messages_use_counted():
    wrong = [line for plural, _, _ in syntax().values() for line in plural]
    wrong = [line for line in wrong if not line.startswith(EXCEPTIONS)]
    assert not wrong, wrong


def test_plurals_after_counts_are_detected(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.PACKAGE", tmp_path)
    path = tmp_path / "example.py"
    path.write_text(
        'f"{len(x)} images, {pos.axes} axes, {q.shape[1]} key heads, {counted(n, noun)}, 1 or {n.heads} heads"'
    )
    assert len(list(plurals(path, nodes_of(path)))) == 3


def names_of(nodes):
    """Yield parameters, fields and functions of a module."""
    for node in nodes:
        if isinstance(node, ast.arg):
            yield node.arg.rstrip("_")  # `class_` is `class` on the command line
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name


def backticked(nodes):
    """Yield (name, line) for the names in backticks in raised messages."""
    for statement in nodes:
        if isinstance(statement, ast.Raise):
            for node in ast.walk(statement):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    for name in re.findall(r"`([a-z_]\w*)(?:=[^`]*)?`", node.value):
                        yield name, node.lineno


def nodes_of(path):
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@functools.cache  # each file is parsed once
def syntax():
    """Return (plurals after a count, names, names in backticks) of all modules."""
    modules = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        nodes = nodes_of(path)
        modules[path] = list(plurals(path, nodes)), set(names_of(nodes)), list(backticked(nodes))
    return modules


def test_names_in_messages_exist():
    known = {name for _, names, _ in syntax().values() for name in names} | {"inv_freq"}  # of transformers
    known |= {"allow_code", "allow_download"}  # options of all commands
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path, (_, _, quoted) in syntax().items()
        for name, line in quoted
        if name not in known
    ]
    assert not wrong, wrong


def test_attention_formats_counts_only_in_errors():
    """torch.compile traces the selection of a backend, also the reasons of backends that are not used."""
    traced = []
    for path in sorted((PACKAGE / "attention").rglob("*.py")):
        tree = ast.parse(path.read_text())
        raised = {
            id(node)
            for parent in ast.walk(tree)
            if isinstance(parent, ast.Raise)
            for node in ast.walk(parent)
        }
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and id(node) not in raised]
        traced += [
            f"{path}:{n.lineno}" for n in calls if isinstance(n.func, ast.Name) and n.func.id == "counted"
        ]
    assert not traced, traced
