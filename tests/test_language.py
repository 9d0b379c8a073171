"""Vocabulary: words with a standard term in the field are not used in another sense.

The comment of each pattern names the term. `language_limits.json` has the remaining occurrences per package, which may
only fall; `python -m tests.test_language` lowers the limits.
"""

import ast
import io
import json
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PATTERNS = {
    "place": r"(?<!in )(?<!In )(?<!in-)(?<!decimal )(?<!take )(?<!takes )\bplaces?\b",  # position, coordinates
    "picture": r"\bpictures?\b",  # image, figure
    "kept": r"\bkept\b",  # cached, stored
    "turned": r"\b(?:is|are|was|were|be|been) turned\b|\bturned (?:image|by|labels|query|key|copy|sample)",  # rotated
    "beside": r"\bbeside\b",  # alongside, in addition to
    "is no": r"(?<!there )(?<!There )\b(?:is|are) no (?!longer|more\b|less|larger|smaller|better)",  # is not a
    "apart": r"\bapart\b(?! from)",  # separate
    "says which": r"\bsays? (?:which|how|what|where|whether|nothing)\b",  # documents, states
    "alike": r"\balike\b",  # equal
    "leave out": r"\b(?:leave|leaves|left|leaving) (?:it |them |\w+ )?out\b",  # omit, skip
    "asked": r"\b(?:was|were|is|are|be) asked\b",  # requested
    "anew": r"\banew\b",  # again
}
NAMES = (
    "found",
    "given",
    "wanted",
    "asked",
    "seen",
    "kept",
    "placed",
    "turned",
    "places",
    "pictures",
    "picture",
)

PROSE = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", None))


def package_of(path):
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[:2]) if parts[0] == "vispe" and len(parts) > 2 else parts[0]


def texts(path):
    """Yield the prose of a file: comments and strings of Python, everything of other files."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in PROSE:
                yield token.string
    elif path.suffix == ".ipynb":
        for cell in json.loads(text)["cells"]:
            if cell["cell_type"] == "markdown":
                yield "".join(cell["source"])
    elif path.name == "CHANGELOG.md":
        yield text.split("\n## ")[1]  # entries of the version to come
    else:
        yield re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def names_of(path):
    """Yield the names that a file binds."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name


FILES = sorted(
    path
    for pattern in (
        "vispe/**/*.py",
        "docs/**/*.md",
        "docs/**/*.ipynb",
        "configs/*.yaml",
        "README.md",
        "CHANGELOG.md",
    )
    for path in ROOT.glob(pattern)
)


def counts():
    """Return how often each pattern occurs, by (package, pattern)."""
    total = Counter()
    for path in FILES:
        package = package_of(path)
        for text in texts(path):
            for name, pattern in PATTERNS.items():
                total[package, name] += len(re.findall(pattern, text))
        if path.suffix == ".py":
            total[package, "names"] += sum(name in NAMES for name in names_of(path))
    return +total


@pytest.fixture(scope="module")
def present():
    return counts()


LIMITS_FILE = Path(__file__).with_name("language_limits.json")


def test_counts_only_fall(present):
    limits = {tuple(key.split(": ")): value for key, value in json.loads(LIMITS_FILE.read_text()).items()}
    more = {key: (count, limits.get(key, 0)) for key, count in present.items() if count > limits.get(key, 0)}
    assert not more, f"more than before: {more}"


if __name__ == "__main__":
    LIMITS_FILE.write_text(
        json.dumps({": ".join(k): v for k, v in sorted(counts().items())}, indent=0) + "\n"
    )
