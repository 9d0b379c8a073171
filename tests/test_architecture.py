"""Import rules: only from lower layers, without cycles, never the top-level package, never private names.

Layers and reasons: docs/explanation/architecture.md. Imports inside functions count as well; they defer heavy
third-party packages.
"""

import ast
import functools
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("without_collector")
PACKAGE = Path(__file__).parents[1] / "vispe"
LAYERS = (  # from the bottom up; packages of one layer may import each other, files never in a cycle
    ("errors", "_lazy"),
    ("utils",),
    ("grid",),
    ("images",),
    ("attention",),
    ("encodings",),
    ("multimodal",),
    ("hosts",),
    ("backbones",),
    ("segment",),
    ("evaluate",),
    ("train",),
    ("",),  # vispe/__init__.py
    ("experimental",),
    ("cli", "run", "__main__"),
)
LAYER = {package: level for level, packages in enumerate(LAYERS) for package in packages}


SEGMENT_LAYERS = (  # the same for the packages of vispe.segment
    ("metrics", "materials"),
    ("classify", "features"),
    ("overlays", "types"),
    ("text", "objects"),
    ("model",),
    ("invariance_report",),
    ("run",),
    ("out_of_core",),
    ("pipeline",),
    ("live",),
    ("napari",),
    ("",),
)
SEGMENT_LAYER = {package: level for level, packages in enumerate(SEGMENT_LAYERS) for package in packages}


def name_of(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(nodes):
    """Yield (module, name or None, line) for every import from the package."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((a.name, None, node.lineno) for a in node.names if a.name.split(".")[0] == "vispe")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vispe":
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield (whole, None, node.lineno) if whole in FILES else (node.module, alias.name, node.lineno)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "import_module":
            name = node.args[0].value if isinstance(node.args[0], ast.Constant) else ""
            if name.split(".")[0] == "vispe":  # an import by another spelling
                yield name, None, node.lineno


def package_of(module):
    return [*module.split("."), ""][1]


ENTRY = re.compile(r"^    (?! )([*\w, ]+):(?: |$)", re.MULTILINE)  # of a section of a docstring


def entries(doc, title):
    """Yield the names that a section of a docstring describes."""
    _, _, section = f"{doc}\n".partition(f"\n{title}:\n")
    section = re.split(r"\n(?=\S)", section)[0]
    for names in ENTRY.findall(section):
        yield from (name.strip().lstrip("*") for name in names.split(","))


def parameters(function):
    args = function.args
    named = (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg)
    return {arg.arg for arg in named if arg is not None}


def attributes(node):
    """Return the names of the fields, methods and class variables of a class, and those set on an object."""
    names = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    for part in node.body:
        if isinstance(part, ast.FunctionDef):
            names.add(part.name)
        elif isinstance(part, ast.Assign | ast.AnnAssign):
            names |= {
                n.id for n in ast.walk(part) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            }
    return names


def outdated_entries(nodes):
    """Yield the line and the name of each argument or attribute that a docstring describes and that does not exist."""
    for node in nodes:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or not (doc := ast.get_docstring(node)):
            continue
        init = [n for n in getattr(node, "body", ()) if getattr(n, "name", "") == "__init__"]
        checks = []
        if isinstance(node, ast.FunctionDef) or init:
            checks.append(("Args", parameters(init[0] if isinstance(node, ast.ClassDef) else node)))
        # other bases may define attributes
        if isinstance(node, ast.ClassDef) and {ast.unparse(base) for base in node.bases} <= {"NamedTuple"}:
            checks.append(("Attributes", attributes(node)))
        for title, names in checks:
            yield from (f"{node.lineno} {name}" for name in entries(doc, title) if name not in names)


@functools.cache  # not while tests are collected, which every worker does
def syntax():
    """Return (imports, public classes, needless aliases, outdated docstrings) of all modules, each parsed once."""
    imported, classes, aliases, outdated = {}, {}, {}, {}
    for name, path in FILES.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        nodes = list(ast.walk(tree))
        imported[name] = sorted(set(imports(nodes)), key=str)
        tops = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        classes[name] = [top for top in tops if not top.startswith("_")]
        aliases[name] = list(needless_aliases(nodes))
        outdated[name] = list(outdated_entries(nodes))
    return imported, classes, aliases, outdated


def all_imports():
    return syntax()[0]


def test_every_package_has_a_layer():
    assert {package_of(name) for name in FILES} <= set(LAYER)


def test_imports_point_down():
    up = [
        f"{name}:{line} imports {target}"
        for name, targets in all_imports().items()
        for target, _, line in targets
        if LAYER[package_of(target)] > LAYER[package_of(name)]
    ]
    assert not up, "\n".join(up)


def segment_package(module):
    return [*module.split("."), ""][2]


def test_imports_of_the_segmentation_point_down():
    up = {
        f"{name} imports {target}"
        for name, targets in all_imports().items()
        for target, _, _ in targets
        if name.startswith("vispe.segment") and target.startswith("vispe.segment.")
        if SEGMENT_LAYER[segment_package(target)] > SEGMENT_LAYER[segment_package(name)]
    }
    assert not up, "\n".join(sorted(up))


def test_no_module_imports_the_top_level_package():
    at = [
        f"{name}:{line}"
        for name, targets in all_imports().items()
        for target, _, line in targets
        if target == "vispe" and LAYER[package_of(name)] < LAYER[""]
    ]
    assert not at, "\n".join(at)


def test_no_private_name_crosses_packages():
    crossing = [
        f"{name}:{line} imports {target}.{what or ''}"
        for name, targets in all_imports().items()
        for target, what, line in targets
        if package_of(target) not in (package_of(name), "_lazy")
        and any(
            part.startswith("_") and not part.startswith("__") for part in f"{target}.{what or ''}".split(".")
        )
    ]
    assert not crossing, "\n".join(crossing)


def cycles():
    """Return the groups of files that import each other in a cycle (strongly connected components, Tarjan)."""
    index, low, stack, components, state = {}, {}, [], [], iter(range(10**9))

    def visit(name):
        index[name] = low[name] = next(state)
        stack.append(name)
        for target, _, _ in all_imports()[name]:
            # importing a file runs the __init__ of its packages as well, which export names lazily
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            group = []
            while not group or group[-1] != name:
                group.append(stack.pop())
            if len(group) > 1:
                components.append(sorted(group))

    for name in FILES:
        if name not in index:
            visit(name)
    return components


def test_no_import_cycles():
    assert not cycles(), "\n".join(map(str, cycles()))


def test_folders_have_at_most_15_entries():
    full = {}
    for folder in {path.parent for path in FILES.values()}:
        entries = [e for e in folder.iterdir() if e.suffix == ".py" or (e.is_dir() and any(e.glob("*.py")))]
        entries = [e for e in entries if not e.name.startswith("_")]
        if len(entries) > 15:
            full[str(folder.relative_to(PACKAGE.parent))] = len(entries)
    assert not full, full


CONVENTIONS = {
    "numpy": "np",
    "torch.nn.functional": "F",
    "torch.distributed": "dist",
    "triton.language": "tl",
}


def test_public_classes_have_unique_names():
    homes = {}
    for module, classes in syntax()[1].items():
        for name in classes:
            homes.setdefault(name, []).append(module)
    assert not {name: modules for name, modules in homes.items() if len(modules) > 1}


def bound_names(nodes):
    """Yield the names that a module binds other than by an import with an alias."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.name for alias in node.names if alias.asname is None)


def needless_aliases(nodes):
    """Yield the line and the text of each alias that neither avoids a clash nor follows a convention."""
    imported = []
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = "" if isinstance(node, ast.Import) else f"{node.module}."
            imported += [(module + a.name, a.name, a.asname, node.lineno) for a in node.names]
    originals = [original for _, original, _, _ in imported]
    candidates = [
        (full, original, alias, line)
        for full, original, alias, line in imported
        if alias not in (None, original, CONVENTIONS.get(full), "_".join(full.split(".")[-2:]))
        and originals.count(original) < 2
    ]
    bound = set(bound_names(nodes)) if candidates else set()
    for full, original, alias, line in candidates:
        if original.rpartition(".")[2] not in bound:
            yield f"{line} imports {full} as {alias}"


def test_import_aliases_avoid_a_clash_or_follow_a_convention():
    """An alias such as `from a import new as old` keeps a name that search does not find; `timm_layers` is found."""
    needless = [f"{module}:{text}" for module, texts in syntax()[2].items() for text in texts]
    assert not needless, "\n".join(needless)


def test_docstrings_describe_existing_arguments_and_attributes():
    outdated = [f"{module}:{text}" for module, texts in syntax()[3].items() for text in texts]
    assert not outdated, "\n".join(outdated)
