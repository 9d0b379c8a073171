"""Public API: an exact list of names, each with documentation and annotations."""

import inspect
import re
from pathlib import Path

import vispe
from tests.cases import cases

PUBLIC = [
    "Additive",
    "Attention",
    "Biased",
    "Compose",
    "Encoding",
    "EncodingInfo",
    "Grid",
    "Mixing",
    "Positions",
    "Rotary",
    "VispeError",
    "attention",
    "convert",
    "create_encoding",
    "debias",
    "describe",
    "encoding_info",
    "explain",
    "explore",
    "fold",
    "from_pretrained",
    "list_encodings",
    "monitor",
    "plot_bias",
    "positions_for",
    "register",
    "restore",
    "symmetrize",
    "use_backend",
]


def test_public_names_equal_the_list():
    assert sorted(vispe.__all__) == PUBLIC
    assert all(hasattr(vispe, name) for name in PUBLIC)


def test_version_is_defined_once():
    assert re.fullmatch(r"\d+\.\d+\.\d+", vispe.__version__)
    root = Path(vispe.__file__).resolve().parents[1]
    pyproject = root / "pyproject.toml"
    if pyproject.exists():
        assert vispe.__version__ not in pyproject.read_text()
        assert f"\nversion: {vispe.__version__}\n" in (root / "CITATION.cff").read_text()


def _documented(owner):
    for name, member in vars(owner).items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            yield name, member.fget
        elif inspect.isfunction(inspect.unwrap(getattr(member, "__func__", member))):
            yield name, getattr(member, "__func__", member)


@cases("name", PUBLIC)
def test_every_public_name_is_documented(name):
    thing = getattr(vispe, name)
    text = inspect.getdoc(thing) or ""
    first = text.partition("\n")[0]
    assert first.endswith((".", ":"))
    if inspect.isclass(thing):
        for member, function in _documented(thing):
            assert function.__doc__, f"{name}.{member}"
        signature = inspect.signature(thing.__init__)
    else:
        signature = inspect.signature(thing)
    named = [p for p in signature.parameters if p != "self"]
    if len(named) > 1 and name not in ("VispeError",):
        assert "Args:" in text or "Attributes:" in text, "arguments are not described"
        missing = [p for p in named if not re.search(rf"^\s+\**{p}[,:]", text, re.MULTILINE)]
        assert not missing


def test_public_arguments_are_annotated():
    for name in PUBLIC:
        thing = getattr(vispe, name)
        functions = [f for _, f in _documented(thing)] if inspect.isclass(thing) else [thing]
        for function in functions:
            for p in inspect.signature(function).parameters.values():
                assert p.name == "self" or p.annotation is not p.empty, (
                    f"{name}: {function.__name__}({p.name})"
                )
